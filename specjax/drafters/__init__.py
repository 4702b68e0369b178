"""Drafters: one module each, found by name. `base` has the contract."""
