"""Random numbers from a key and a counter, the same in plain jax.numpy and inside a kernel.

Only 32-bit integer and float operations are used, on int32 (which wraps around), so that both give
the same words.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def threefry2x32(key0, key1, count0, count1):
    """Returns random bits of Threefry-2x32 with 20 rounds.

    See Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".

    Args:
      key0, key1, count0, count1: int32 scalars or arrays that broadcast.

    Returns:
      Two int32 arrays of random bits, equal to what `jax.extend.random.threefry_2x32` computes.
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.int32(PARITY))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = x0 + x1
            high = lax.shift_left(x1, jnp.int32(rotation))
            low = lax.shift_right_logical(x1, jnp.int32(32 - rotation))
            x1 = x0 ^ (high | low)
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.int32(group + 1)
    return x0, x1


def uniform(key_R2):
    """Returns one uniform number of [0, 1) per key, float32 `[R]`.

    It is a multiple of 2^-24: it can be exactly 0, never 1.
    """
    zero = jnp.int32(0)
    word_R, _ = threefry2x32(key_R2[..., 0], key_R2[..., 1], zero, zero)
    return _high_bits(word_R) * jnp.float32(2**-24)


def exponential(key0, key1, token):
    """Returns an exponential variate (of mean 1) per token id under a key, float32 in (2^-50, 17).

    argmax(w / E) samples a token in proportion to its weight w: the Gumbel-max trick without its
    outer logarithm. An unlikely token wins by a small E only, so small values need the finest
    resolution: E = -log(1 - v) with 48 bits in v.
    """
    high, low = threefry2x32(key0, key1, token, jnp.int32(0))
    v = (_high_bits(high) + (_high_bits(low) + 0.5) * jnp.float32(2**-24)) * jnp.float32(2**-24)
    v = jnp.minimum(v, jnp.float32(1 - 2**-24))
    # -log(1 - v) by its series where the subtraction would round v away; the next term is below
    # 2^-24 of the sum.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return jnp.where(v < 1 / 16, series, -jnp.log(1 - v))


def _high_bits(word):
    """Returns the upper 24 bits as a float32, exactly."""
    return lax.shift_right_logical(word, jnp.int32(8)).astype(jnp.float32)
