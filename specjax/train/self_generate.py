"""Training data from the target itself: its own continuations of prompts, in batches through the
decode loop.

A drafter has to guess what the target says, not what people have written. And while the target says
it, its residual streams, which a head is trained on, come for nothing: a drafter that proposes
nothing writes them down.
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

from specjax import decode, files, parallel, sampling
from specjax.decode import DecodeConfig
from specjax.drafters.base import Draft, Drafter
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.train import data
from specjax.train.data import Rows

PREFILL_CHUNK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(Drafter):
    """A drafter that proposes nothing, and records the target's residual streams in its state.

    State: committed tokens int32 `[B]`, and per layer of `aux_layers` float16 `[B, S, D]`, of all
    tokens but the last.
    """

    aux_layers: tuple[int, ...]

    def init(self, params, context, aux_hidden_BSD, chunk_size):
        return jnp.copy(context.length_B), tuple(map(_narrow, aux_hidden_BSD))

    def propose(self, params, state, context, sample):
        none_B = jnp.zeros_like(context.length_B)
        return Draft(none_B[:, None], count_B=none_B), state

    def update(self, params, state, context, verified, aux_hidden_BTD):
        length_B, aux_hidden_BSD = state
        row_B = jnp.arange(len(length_B))
        is_new_B = context.length_B > length_B
        position_B = jnp.where(is_new_B, length_B - 1, context.tokens_BS.shape[1])
        updated = []
        for old, new in zip(aux_hidden_BSD, aux_hidden_BTD, strict=True):
            updated.append(old.at[row_B, position_B].set(_narrow(new[:, 0]), mode="drop"))
        return context.length_B, tuple(updated)


def _narrow(hidden):
    return jnp.clip(hidden, -data.TAP_LIMIT, data.TAP_LIMIT).astype(data.TAP_DTYPE)


def self_generate(
    target: Model,
    prompts: Sequence[Sequence[int]],
    domains: Sequence[str],
    output: pathlib.Path,
    *,
    max_seq_len: int,
    batch_size: int,
    temperatures: Sequence[float],
    seed: int,
    aux_layers: tuple[int, ...],
    eos_ids: Sequence[int] | None = None,
    page_size: int = 64,
    on_shard: Callable[[int, int], None] | None = None,
) -> list[pathlib.Path]:
    """Writes shards of the target's continuations of prompts; those that the same call has written
    before are kept.

    Args:
      target: the model.
      prompts: token ids; none longer than `max_seq_len` - 1.
      domains: of each prompt.
      output: folder of the shards.
      max_seq_len: S, tokens of a row: prompt and continuation.
      batch_size: rows of a shard, generated together.
      temperatures: of the rows: each comes as often as the others, in an order that the seed
        decides.
      seed: of everything random.
      aux_layers: layers whose residual streams to keep.
      eos_ids: that end a continuation; by default the model's.
      page_size: positions per page of the cache.
      on_shard: called with (shards there are, shards there will be).

    Returns:
      The shards' files.

    Raises:
      SpecJAXError: `output` holds rows that were made otherwise, naming what differs; or a batch
        that the parts of the mesh do not divide.
    """
    if batch_size % parallel.dp_size(target.mesh):
        raise SpecJAXError(
            f"a batch of {batch_size} rows cannot be split over "
            f"data_parallel={parallel.dp_size(target.mesh)}"
        )
    eos = np.asarray(target.eos_ids if eos_ids is None else eos_ids, np.int32)
    files.claim_run_folder(
        output,
        data.ABOUT,
        {
            "model": target.path,
            "dtype": str(target.dtype),
            "target": target.config.to_dict(),
            "max_seq_len": max_seq_len,
            "batch_size": batch_size,
            "seed": seed,
            "temperatures": list(temperatures),
            "aux_layers": list(aux_layers),
            "eos_ids": eos.tolist(),
            "prompts": zlib.crc32(
                json.dumps(
                    [
                        [domain, *map(int, prompt)]
                        for domain, prompt in zip(domains, prompts, strict=True)
                    ]
                ).encode()
            ),
        },
    )
    rng = np.random.default_rng(seed)
    temperature_N = rng.permutation(np.resize(np.asarray(temperatures, np.float32), len(prompts)))
    # Prompts of about the same length go together: those of a batch are read in as many steps as
    # the longest needs.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rng.shuffle(batches)
    drafter = Recorder(num_tokens=1, aux_layers=aux_layers)
    cfg = DecodeConfig(target.config, drafter, runtime=target.runtime(page_size))
    paths = [output / f"rows-{number:05}.safetensors" for number in range(len(batches))]
    for number, batch in enumerate(batches):
        if not paths[number].exists():
            filled = np.resize(
                batch, batch_size
            )  # the last batch is filled up, so that one program serves all
            tokens_BS = np.zeros((batch_size, max_seq_len), np.int32)
            for row, i in enumerate(filled):
                tokens_BS[row, : len(prompts[i])] = prompts[i]
            start_B = np.array([len(prompts[i]) for i in filled], np.int32)
            end_B = np.where(np.arange(batch_size) < len(batch), max_seq_len, 0).astype(np.int32)
            noise = sampling.SamplingArrays(
                (seed + filled).astype(np.uint32), temperature_N[filled]
            )
            eos_BE = np.broadcast_to(eos, (batch_size, len(eos)))
            request = decode.RequestArrays(start_B, end_B, eos_BE, noise)
            arrays = parallel.put((tokens_BS, request), target.mesh)
            state = decode.init_jit(target.params, None, cfg, *arrays, PREFILL_CHUNK)
            state = decode.generate_jit(target.params, None, cfg, state)
            found = parallel.get((state.tokens_BS, state.length_B, state.drafter))
            R = len(batch)
            tokens_RS, length_R, (_, aux_hidden_RSD) = jax.tree.map(lambda x, R=R: x[:R], found)
            tokens_RS = np.where(np.arange(max_seq_len) < length_R[:, None], tokens_RS, 0)
            data.write_shard(
                paths[number],
                Rows(
                    tokens_RS,
                    length_R,
                    start_B[:R],
                    temperature_N[batch],
                    [domains[i] for i in batch],
                    dict(zip(aux_layers, aux_hidden_RSD, strict=True)),
                ),
            )
        if on_shard:
            on_shard(number + 1, len(batches))
    return paths
