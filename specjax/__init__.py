"""Lossless speculative decoding for Llama models in JAX."""

from specjax.checkpoint import Model, load
from specjax.drafters.base import Draft, Drafter
from specjax.errors import SpecJAXError
from specjax.generation import Completion, Generation, generate
from specjax.heads import Head
from specjax.heads import load as load_head
from specjax.sharding import make_mesh

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Draft",
    "Drafter",
    "Generation",
    "Head",
    "Model",
    "SpecJAXError",
    "generate",
    "load",
    "load_head",
    "make_mesh",
]
