"""Control flow that keeps large arrays where they are."""

from __future__ import annotations

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
