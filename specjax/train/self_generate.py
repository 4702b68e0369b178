"""Training data from the target itself: its own continuations of prompts, by the decode loop.

A drafter has to predict what the target writes, not what people write. The target's residual
streams, which an EAGLE head is trained on, are recorded on the way, by a drafter that proposes
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import decode, parallel
from specjax.decode import DecodeConfig
from specjax.drafters.base import Draft, Drafter
from specjax.engine import batch as batch_lib
from specjax.engine.generate import check_logits
from specjax.engine.load import Model
from specjax.engine.request import SamplingOptions
from specjax.errors import SpecJAXError
from specjax.train import data, identity
from specjax.train.data import Rows

PREFILL_CHUNK = 64


@struct.dataclass
class RecorderState:
    """State of a `Recorder`.

    Attributes:
      length_B: int32, number of committed tokens.
      aux_hidden_BSD: for each of its `aux_layers` the residual stream of all tokens but the last,
        float16.
    """

    length_B: jax.Array
    aux_hidden_BSD: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(Drafter):
    """A drafter that proposes nothing, and records the target's residual streams in its state."""

    aux_layers: tuple[int, ...]

    def init(self, params, context):
        shape = (*context.tokens_BS.shape, context.target_config.hidden_size)
        empty = tuple(jnp.zeros(shape, data.HIDDEN_DTYPE) for _ in self.aux_layers)
        return RecorderState(jnp.copy(context.length_B), empty)

    def prefill(self, params, state, context, chunk):
        row_B1, index_T = (
            jnp.arange(len(chunk.start_B))[:, None],
            jnp.arange(chunk.tokens_BT.shape[1]),
        )
        position_BT = chunk.start_B[:, None] + index_T
        is_real_BT = index_T < chunk.count_B[:, None]
        position_BT = jnp.where(is_real_BT, position_BT, context.tokens_BS.shape[1])
        updated = []
        for old, new in zip(state.aux_hidden_BSD, chunk.aux_hidden_BTD, strict=True):
            updated.append(old.at[row_B1, position_BT].set(_narrow(new), mode="drop"))
        return state.replace(aux_hidden_BSD=tuple(updated))

    def propose(self, params, state, context, sample):
        none_B = jnp.zeros_like(context.length_B)
        return Draft(none_B[:, None], count_B=none_B), state

    def update(self, params, state, context, verified, aux_hidden_BTD):
        length_B = state.length_B
        row_B = jnp.arange(len(length_B))
        is_new_B = context.length_B > length_B
        position_B = jnp.where(is_new_B, length_B - 1, context.tokens_BS.shape[1])
        updated = []
        for old, new in zip(state.aux_hidden_BSD, aux_hidden_BTD, strict=True):
            updated.append(old.at[row_B, position_B].set(_narrow(new[:, 0]), mode="drop"))
        return RecorderState(context.length_B, tuple(updated))


def _narrow(hidden):
    return jnp.clip(hidden, -data.HIDDEN_LIMIT, data.HIDDEN_LIMIT).astype(data.HIDDEN_DTYPE)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How continuations are generated.

    Attributes:
      max_seq_len: S, most tokens of a row, prompt and continuation.
      batch_size: rows of a shard, generated together.
      temperatures: temperatures of the rows: all equally often, in a seeded order.
      seed: seed of all random numbers.
      aux_layers: layers whose residual streams are recorded.
      eos_ids: ids that end a continuation; None for those of the model.
      page_size: positions per page of the cache.
    """

    max_seq_len: int
    batch_size: int
    temperatures: tuple[float, ...]
    seed: int
    aux_layers: tuple[int, ...]
    eos_ids: tuple[int, ...] | None = None
    page_size: int = 64


def self_generate(
    target: Model,
    prompts: Sequence[Sequence[int]],
    domains: Sequence[str],
    output: pathlib.Path,
    config: GenerateConfig,
    on_shard: Callable[[int, int], None] | None = None,
) -> list[pathlib.Path]:
    """Writes shards of the target's continuations of prompts; existing shards are kept.

    Args:
      target: the model.
      prompts: token ids; at most `max_seq_len` - 1 each.
      domains: domain of each prompt.
      output: folder of the shards.
      config: how continuations are generated.
      on_shard: called with (number of finished shards, number of shards).

    Returns:
      The files of the shards.

    Raises:
      SpecJAXError: `output` has rows that were generated with other options (the message names what
        differs); the batch size is no multiple of the number of data-parallel replicas.
    """
    dp_size = parallel.dp_size(target.mesh)
    if config.batch_size % dp_size:
        raise SpecJAXError(
            f"a batch of {config.batch_size} rows cannot be split over data_parallel={dp_size}"
        )
    if config.eos_ids is None:
        config = dataclasses.replace(config, eos_ids=target.eos_ids)
    identity.claim(output, data.ABOUT, _identity(target, prompts, domains, config))
    rng = np.random.default_rng(config.seed)
    temperatures = np.resize(np.asarray(config.temperatures, np.float32), len(prompts))
    temperatures = rng.permutation(temperatures)
    batches = _batches(prompts, config.batch_size, rng)
    paths = []
    for number, chosen in enumerate(batches):
        path = output / f"rows-{number:05}.safetensors"
        if not path.exists():
            rows = _continue(target, prompts, domains, temperatures, chosen, config)
            data.write_shard(path, rows)
        paths.append(path)
        if on_shard:
            on_shard(len(paths), len(batches))
    return paths


def _identity(target: Model, prompts, domains, config: GenerateConfig) -> dict:
    listed = []
    for domain, prompt in zip(domains, prompts, strict=True):
        listed.append([domain, *map(int, prompt)])
    return {
        "model": target.path,
        "dtype": str(target.dtype),
        "target": target.config.to_dict(),
        "max_seq_len": config.max_seq_len,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "temperatures": list(config.temperatures),
        "aux_layers": list(config.aux_layers),
        "eos_ids": list(map(int, config.eos_ids)),
        "prompts": zlib.crc32(json.dumps(listed).encode()),
    }


def _batches(prompts, batch_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Returns the prompts of each shard.

    Prompts of similar length are together: a batch is read in as many steps as its longest prompt
    needs.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = []
    for start in range(0, len(order), batch_size):
        batches.append(order[start : start + batch_size])
    rng.shuffle(batches)
    return batches


def _continue(
    target: Model, prompts, domains, temperatures, chosen: list[int], config: GenerateConfig
) -> Rows:
    """Returns the continuations of the prompts with the numbers `chosen`."""
    S = config.max_seq_len
    # Prompts have the seeds that `specjax.generate` gives to all prompts in one call.
    sampling = SamplingOptions(
        temperature=temperatures[chosen], seed=[config.seed + i for i in chosen]
    )
    batch = batch_lib.arrays(
        [prompts[i] for i in chosen],
        max_length=S,
        eos_ids=config.eos_ids,
        sampling=sampling,
        max_seq_len=S,
        num_rows=config.batch_size,  # the last batch too, so that all have one shape
    )
    drafter = Recorder(num_tokens=1, aux_layers=config.aux_layers)
    runtime = target.runtime(config.page_size)
    decode_config = DecodeConfig(target.config, drafter, runtime=runtime)
    arrays = parallel.put(batch, target.mesh)
    state = decode.init_jit(target.params, None, decode_config, *arrays, PREFILL_CHUNK)
    state = decode.generate_jit(target.params, None, decode_config, state)
    found = parallel.get((state.tokens_BS, state.length_B, state.drafter))
    num_rows = len(chosen)
    check_logits(state, [f"prompt {i}" for i in chosen])
    tokens_BS, length_B, recorded = jax.tree.map(lambda x: x[:num_rows], found)
    is_text_BS = np.arange(S) < length_B[:, None]
    return Rows(
        tokens_BS=np.where(is_text_BS, tokens_BS, 0),
        length_B=length_B,
        start_B=batch.request.prompt_length_B[:num_rows],
        temperature_B=temperatures[chosen],
        domains=[domains[i] for i in chosen],
        aux_hidden=dict(zip(config.aux_layers, recorded.aux_hidden_BSD, strict=True)),
    )
