"""Drafters, one module each, found by name (`registry`). `base` has the contract."""
