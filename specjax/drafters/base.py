"""The contract between the decode loop and a drafter.

A drafter is a frozen dataclass: its configuration as fields, pure functions as methods, and an
explicit state pytree. Drafters with equal fields are equal, and compile once.

A proposal may depend on committed tokens and on earlier drafts of the same round, never on rejected
drafts: their noise is used again, and the output would no longer follow the target's distribution.

On a mesh a drafter sees one device's shards: of the batch, of its parameters and of its state. The
names of parameters and state declare how they are split, see `parallel`; an array whose name does
not end in its axes is an error there. Logits for `sample` are whole, or the draft model's own
shard of the vocabulary, or the target's. A scalar of the state must be the same on all devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax.config import LlamaConfig, Runtime
from specjax.errors import SpecJAXError
from specjax.kernels.sampling import Distribution

# (logits_BV, position_B) -> (token_B, distribution): samples a draft token for an absolute
# position. It hides temperature, filters, random numbers and shards from the drafter.
Sample = Callable[[jax.Array, jax.Array], tuple[jax.Array, Distribution]]


class Draft(NamedTuple):
    """A proposal: a chain of M tokens that may follow the pending one.

    Attributes:
      tokens_BM: int32.
      count_B: int32, how many of the M tokens are real in each row; None where all always are. When
        no row of the batch has any, the round is a plain one-token step. On a mesh it must be the
        same on all devices that share a row: a function of tokens and integers, not of logits.
      sampled_B: bool, rows whose tokens were sampled from `distributions`; None for all rows. The
        others have one-hot distributions.
      distributions: the M distributions that the tokens were sampled from, as `sample` returned
        them; None where no token was sampled.
    """

    tokens_BM: jax.Array
    count_B: jax.Array | None = None
    sampled_B: jax.Array | None = None
    distributions: tuple[Distribution, ...] | None = None


def chain(tokens: list[jax.Array], distributions: list[Distribution]) -> Draft:
    """Returns the proposal of M tokens sampled one after the other: the results of M samples."""
    return Draft(jnp.stack(tokens, axis=1), distributions=tuple(distributions))


@struct.dataclass
class Context:
    """The loop's state as a drafter sees it: with a chunk of the prompts, before or after a round.

    Attributes:
      tokens_BS: int32, committed tokens, prompt and output; undefined from the length on.
      length_B: int32, number of committed tokens. The last one is *pending*: the target has not
        read it yet.
      active_B: bool, rows that take part in the round or in the chunk. The state of the others must
        stay as it is.
      block_table_BX: int32, pages of the rows that take part, for every pool of P pages that a
        drafter has; the others have none, so that nothing is written for them. In a round there are
        pages at least for positions up to length - 1 + M.
      target_params: the target's parameters; on a mesh this device's shards of them.
      num_pages: P (static); on a mesh that of this device's replica.
      target_config: the target's configuration (static).
      runtime: how models run (static).
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    active_B: jax.Array
    block_table_BX: jax.Array
    target_params: Any
    num_pages: int = struct.field(pytree_node=False)
    target_config: LlamaConfig = struct.field(pytree_node=False)
    runtime: Runtime = struct.field(pytree_node=False)


class Chunk(NamedTuple):
    """T consecutive tokens of each prompt, which the target has just read.

    Attributes:
      tokens_BT: int32.
      start_B: int32, position of the first one. The tokens before it have been read earlier, by the
        drafter as well, or their pages are shared with a row for which they were.
      count_B: int32, how many of the T tokens are real in each row. It may be 0: a row that takes
        part then begins at `start_B`.
      aux_hidden_BTD: for each of `aux_layers` the target's residual stream.
    """

    tokens_BT: jax.Array
    start_B: jax.Array
    count_B: jax.Array
    aux_hidden_BTD: tuple[jax.Array, ...]

    @property
    def end_B(self) -> jax.Array:
        """Position after the last real token."""
        return self.start_B + self.count_B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter:
    """Base class of drafters. One without state overrides `propose` alone.

    Attributes:
      num_tokens: M, how many tokens it proposes at most.
      aux_layers: target layers whose residual streams it reads (a class attribute, a field or a
        property).
    """

    num_tokens: int
    aux_layers = ()

    def init(self, params, context: Context) -> Any:
        """Returns the state before any token is read; by default there is none.

        Args:
          params: the drafter's parameters.
          context: before the first chunk; S is also the largest length that a row can reach.
        """
        return ()

    def prefill(self, params, state, context: Context, chunk: Chunk) -> Any:
        """Returns the state after a chunk of the prompts; by default it does not change.

        The chunks of a prompt come in order and end before its last token, which is pending.

        Args:
          params: the drafter's parameters.
          state: from `init`, or from the chunk before.
          context: whole prompts.
          chunk: what the target has just read.
        """
        return state

    def begin(self, state, is_new_B, start_B):
        """Returns the state in which some rows begin with another sequence.

        An engine calls it when it gives a row to a request. Chunks of the prompt follow, unless
        another sequence has the same prefix.

        Args:
          state: the drafter's.
          is_new_B: bool, rows that begin. The state of the others must stay as it is.
          start_B: int32, how many of the first positions are complete in the pages of the row.

        Raises:
          SpecJAXError: by default for a drafter with state, which must override this method.
        """
        if jax.tree.leaves(state):
            raise SpecJAXError(
                f"{type(self).__name__} has state, so it must define begin(state, is_new_B, "
                "start_B), with which a row is given to another sequence"
            )
        return state

    def complete_B(self, state):
        """Returns how many of the first positions of each row are complete in the drafter's pools.

        Pages up to there may be shared with other sequences. None, the default: it has no pools.
        """
        return None

    def propose(self, params, state, context: Context, sample: Sample) -> tuple[Draft, Any]:
        """Returns a proposal, and the new state."""
        raise NotImplementedError

    def update(self, params, state, context: Context, verified, aux_hidden_BTD) -> Any:
        """Returns the state after a round; by default it does not change.

        Args:
          params: the drafter's parameters.
          state: from `propose`, or from the round before if this drafter was not asked.
          context: after the round; the same rows take part as before it.
          verified: `verify.Verified` of the round.
          aux_hidden_BTD: for each of `aux_layers` the target's residual stream at the pending token
            and the drafts of the round.
        """
        return state

    def resting(self) -> Drafter:
        """Returns this drafter with the ability to rest, for use after another drafter.

        It may then not be asked in any number of rounds, and other drafts than its own may be
        accepted where it is.

        Raises:
          SpecJAXError: if it cannot rest.
        """
        raise SpecJAXError(f"{type(self).__name__} cannot follow another drafter")
