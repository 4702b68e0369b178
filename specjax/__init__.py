"""Lossless speculative decoding for Llama models in JAX."""

from specjax.checkpoints_convert.eagle import EagleHead
from specjax.drafters.base import Draft, Drafter
from specjax.engine.generate import generate
from specjax.engine.load import Model, load, load_drafter
from specjax.engine.request import Completion, Generation
from specjax.errors import SpecJAXError, SpecJAXWarning
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
    "SpecJAXWarning",
    "generate",
    "load",
    "load_drafter",
    "make_mesh",
]
