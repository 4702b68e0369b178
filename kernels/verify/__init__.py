"""Drawing tokens from logits and verifying drafts against them, over a vocabulary or a shard of
one."""

from specjax.kernels.verify.api import AxisName, Law, draw, leading, reject
from specjax.kernels.verify.noise import uniform
from specjax.kernels.verify.partial import usable

__all__ = ["AxisName", "Law", "draw", "leading", "reject", "uniform", "usable"]
