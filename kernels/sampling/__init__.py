"""Passes over the logits of a whole vocabulary, or of a shard of one: sampling and residuals."""

from specjax.kernels.sampling.api import (
    AxisName,
    Distribution,
    logit,
    probability,
    residual_pass,
    sample_pass,
)
from specjax.kernels.sampling.noise import uniform
from specjax.kernels.sampling.partial import finite, inverse, usable

__all__ = [
    "AxisName",
    "Distribution",
    "finite",
    "inverse",
    "logit",
    "probability",
    "residual_pass",
    "sample_pass",
    "uniform",
    "usable",
]
