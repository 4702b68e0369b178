"""Attention of a few new tokens over a paged key/value cache."""

from specjax.kernels.paged_attention.api import pack_ancestors, paged_attention, unsupported

__all__ = ["pack_ancestors", "paged_attention", "unsupported"]
