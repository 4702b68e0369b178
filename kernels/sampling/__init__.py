"""Drawing tokens from logits and verifying drafts against them, over a vocabulary or a shard of
one."""

from specjax.kernels.sampling.api import AxisName, Distribution, accepted_prefix, draw, reject
from specjax.kernels.sampling.noise import uniform
from specjax.kernels.sampling.partial import usable

__all__ = ["AxisName", "Distribution", "accepted_prefix", "draw", "reject", "uniform", "usable"]
