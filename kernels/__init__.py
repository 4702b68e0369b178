"""Custom operations with one implementation per backend.

Imports jax only, not the rest of specjax.
"""
