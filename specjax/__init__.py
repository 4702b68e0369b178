"""Lossless speculative decoding for Llama models in JAX."""

from specjax.drafters.base import Draft, Drafter
from specjax.engine.eagle_heads import EagleHead
from specjax.engine.eagle_heads import load as load_head
from specjax.engine.generate import Completion, Generation, generate
from specjax.engine.load import Model, load
from specjax.errors import SpecJAXError
from specjax.parallel import make_mesh

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Draft",
    "Drafter",
    "EagleHead",
    "Generation",
    "Model",
    "SpecJAXError",
    "generate",
    "load",
    "load_head",
    "make_mesh",
]
