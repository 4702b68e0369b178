"""Helpers for traced code: a conditional that copies nothing, and promotion rules."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def cond_in_place(condition: jax.Array, function: Callable, carry: tuple) -> tuple:
    """Returns `function(*carry)` where the condition holds, else `carry`.

    Like `lax.cond` with an identity branch, as a loop of at most one iteration: XLA would copy the
    key/value pools into and out of the branches of a conditional.
    """

    def once(loop):
        return (jnp.bool_(False), *function(*loop[1:]))

    return jax.lax.while_loop(lambda loop: loop[0], once, (condition, *carry))[1:]


def with_standard_promotion(function: Callable) -> Callable:
    """Makes a public function independent of the caller's promotion rules.

    A user may run JAX with `jax_numpy_dtype_promotion=strict` or
    `jax_numpy_rank_promotion=raise`. Our code is written for the defaults.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return wrapped
