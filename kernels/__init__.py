"""Custom operations with one implementation per backend. Imports jax only, never the rest of
specjax."""
