"""Lossless speculative decoding for Llama models in JAX."""

from specjax.checkpoints_convert.eagle import EagleHead
from specjax.drafters.base import Draft, Drafter
from specjax.engine.generate import generate
from specjax.engine.llm import LLM
from specjax.engine.load import Model, load, load_drafter
from specjax.engine.request import (
    Completion,
    CompletionOutput,
    Generation,
    RequestOutput,
    SamplingParams,
)
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.parallel import make_mesh

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "CompletionOutput",
    "Draft",
    "Drafter",
    "EagleHead",
    "Generation",
    "Model",
    "RequestOutput",
    "SamplingParams",
    "SpecJAXError",
    "SpecJAXWarning",
    "generate",
    "load",
    "load_drafter",
    "make_mesh",
]
