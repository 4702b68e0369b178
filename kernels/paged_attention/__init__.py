"""Attention of a few new tokens over a paged key/value cache."""

from specjax.kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
