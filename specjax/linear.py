"""The one product with a weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

CPU_FEW_ROWS, CPU_BLOCKS = 32, 4  # see `_matmul`


def linear(x, weight, bias=None, *, dtype=None, axes: tuple[str, ...] = ()):
    """Returns the product over the last axis of `x` and `weight`, accumulated in float32.

    Args:
      x: `[B, T, inputs]`.
      weight: `[..., inputs]`, with one or more output axes.
      bias: with the output axes of the weight; None for none.
      dtype: dtype of the result; by default that of `x`.
      axes: mesh axes over which the inputs are split. The products are then summed over them.
    """
    # As plain matrices: XLA's CPU compiler transposes, that is copies, a weight with several
    # output axes in every step.
    rows = x.reshape(-1, x.shape[-1])
    matrix = weight.reshape(-1, weight.shape[-1])
    y = _matmul(rows, matrix).reshape(*x.shape[:2], *weight.shape[:-1])
    if axes:
        y = jax.lax.psum(y, axes)
    if bias is not None:
        y = y + bias
    return y.astype(dtype or x.dtype)


def _matmul(x, weight):
    """Returns `x @ weight.T` in float32, for `x` of shape `[rows, inputs]`."""
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    # For a few rows XLA's CPU library would first rearrange the whole weight, which costs more
    # than the product. As a batch of products with the weight on the left, it reads the weight as
    # it is stored. One row gains a tenth.
    if num_rows <= CPU_FEW_ROWS and num_outputs % CPU_BLOCKS == 0:
        return jax.lax.platform_dependent(x, weight, cpu=_matmul_in_blocks, default=_matmul_plain)
    return _matmul_plain(x, weight)


def _matmul_plain(x, weight):
    contract_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract_last, preferred_element_type=jnp.float32)


def _matmul_in_blocks(x, weight):
    num_rows, num_inputs = x.shape
    # The library's inner kernels take 8 rows or 4: 5 to 7 cost a quarter more than 8 do, and 9 to
    # 15 up to half more than 16.
    padded = -(-num_rows // 8) * 8 if 4 < num_rows < 16 else num_rows
    x = jnp.pad(x, ((0, padded - num_rows), (0, 0)))
    x_blocks = jnp.broadcast_to(x, (CPU_BLOCKS, padded, num_inputs))
    weight_blocks = weight.reshape(CPU_BLOCKS, -1, num_inputs)
    contract_last = (((2,), (2,)), ((0,), (0,)))
    y = jax.lax.dot_general(
        weight_blocks, x_blocks, contract_last, preferred_element_type=jnp.float32
    )
    return y.reshape(weight.shape[0], padded)[:, :num_rows].T
