"""Training data from the target itself: its own continuations of prompts, by an engine.

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

from specjax import kv_cache, parallel
from specjax.drafters.base import Draft, Drafter
from specjax.engine.engine import Engine
from specjax.engine.generate import unusable_logits
from specjax.engine.load import Model
from specjax.engine.request import SamplingParams
from specjax.errors import SpecJAXError
from specjax.train import data, identity
from specjax.train.data import Rows

SECONDS_PER_CALL = 0.5  # roughly: Python handles Ctrl-C only between calls


@struct.dataclass
class RecorderState:
    """State of a `Recorder`.

    Attributes:
      hidden_PZD: for each of its `aux_layers` a pool of the residual streams of all tokens but the
        last, float16.
    """

    hidden_PZD: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(Drafter):
    """A drafter that proposes nothing, and records the target's residual streams in its state."""

    aux_layers: tuple[int, ...]

    def init(self, params, context):
        width = context.target_config.hidden_size
        shape = (context.num_pages, context.runtime.page_size, width)
        return RecorderState(tuple(jnp.zeros(shape, data.HIDDEN_DTYPE) for _ in self.aux_layers))

    def begin(self, state, is_new_B, start_B):
        return state

    def prefill(self, params, state, context, chunk):
        return self._write(state, context, chunk.start_B, chunk.aux_hidden_BTD)

    def propose(self, params, state, context, sample):
        none_B = jnp.zeros_like(context.length_B)
        return Draft(none_B[:, None], count_B=none_B), state

    def update(self, params, state, context, verified, aux_hidden_BTD):
        # A round without drafts emits one token, behind the one that the target has read.
        read = tuple(hidden_BTD[:, :1] for hidden_BTD in aux_hidden_BTD)
        return self._write(state, context, context.length_B - 2, read)

    def _write(self, state, context, start_B, aux_hidden_BTD):
        positions_BT = start_B[:, None] + jnp.arange(aux_hidden_BTD[0].shape[1])
        page_BT, offset_BT = kv_cache.locate(
            context.block_table_BX, positions_BT, context.runtime.page_size, context.num_pages
        )
        updated = []
        for pool, new in zip(state.hidden_PZD, aux_hidden_BTD, strict=True):
            updated.append(kv_cache.write(pool, page_BT, offset_BT, _narrow(new)))
        return RecorderState(tuple(updated))


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
    shards = _batches(prompts, config.batch_size, rng)
    paths = [output / f"rows-{number:05}.safetensors" for number in range(len(shards))]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    num_finished = len(paths) - len(missing)
    for done in range(1, num_finished + 1):
        if on_shard:
            on_shard(done, len(paths))
    if not missing:
        return paths
    writer = _Writer(target, prompts, domains, temperatures, config)
    for number in missing:
        writer.submit(shards[number])
    for done, number in enumerate(missing, num_finished + 1):
        data.write_shard(paths[number], writer.rows(shards[number]))
        if on_shard:
            on_shard(done, len(paths))
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


class _Writer:
    """Continues prompts with an engine, and returns the rows of a shard when they are finished.

    Prompts of the next shard take the rows of those that have ended.
    """

    def __init__(self, target: Model, prompts, domains, temperatures, config: GenerateConfig):
        self._prompts, self._domains, self._temperatures = prompts, domains, temperatures
        self._config, self._mesh = config, target.mesh
        num_rows = config.batch_size // parallel.dp_size(target.mesh)
        recorder = Recorder(num_tokens=1, aux_layers=config.aux_layers)
        self._row_pages = kv_cache.pages_for(config.max_seq_len + 1, config.page_size)
        self._engine = Engine(
            target,
            recorder,
            page_size=config.page_size,
            max_model_len=config.max_seq_len,
            max_num_seqs=config.batch_size,
            num_pages=num_rows * self._row_pages,
            enable_prefix_caching=False,
            seconds_per_call=SECONDS_PER_CALL,
            on_end=self._record,
        )
        self._tokens: dict[int, list[int]] = {}
        self._hidden: dict[int, tuple[np.ndarray, ...]] = {}

    def submit(self, shard: list[int]) -> None:
        """Asks for the continuations of the prompts with these numbers."""
        for number in shard:
            prompt = self._prompts[number]
            params = SamplingParams.unchecked(
                temperature=float(self._temperatures[number]),
                # The seeds that `specjax.generate` gives to all prompts in one call.
                seed=self._config.seed + number,
                max_tokens=self._config.max_seq_len - len(prompt),
                ignore_eos=True,
                stop_token_ids=self._config.eos_ids,
                detokenize=False,
            )
            self._engine.submit(prompt, params, request_id=str(number))

    def _record(self, request_id: str, token_ids: list[int], pages: np.ndarray) -> None:
        """Keeps what the engine has of a request that ends."""
        number = int(request_id)
        self._tokens[number] = token_ids
        pools = self._engine.drafter_state.hidden_PZD
        all_pages = np.resize(pages, self._row_pages)  # of one size, for one program
        recorded = parallel.get(_pages_of(pools, all_pages))
        self._hidden[number] = tuple(x.reshape(-1, x.shape[-1]) for x in recorded)

    def rows(self, shard: list[int]) -> Rows:
        """Waits for the continuations of these prompts, and returns them.

        Raises:
          SpecJAXError: if the target's logits are NaN.
        """
        S = self._config.max_seq_len
        while not self._tokens.keys() >= set(shard):
            for output in self._engine.step():
                if output.outputs[0].finish_reason == "error":
                    position = len(self._tokens[int(output.request_id)])
                    raise unusable_logits(f"prompt {output.request_id}", position)
        tokens_BS = np.zeros((len(shard), S), np.int32)
        shape = (len(shard), S, self._hidden[shard[0]][0].shape[-1])
        hidden_BSD = [np.zeros(shape, data.HIDDEN_DTYPE) for _ in self._config.aux_layers]
        length_B = np.zeros(len(shard), np.int32)
        for b, number in enumerate(shard):
            ids, recorded = self._tokens.pop(number), self._hidden.pop(number)
            length_B[b] = len(ids)
            tokens_BS[b, : len(ids)] = ids
            for table_BSD, hidden_SD in zip(hidden_BSD, recorded, strict=True):
                table_BSD[b, : len(ids) - 1] = hidden_SD[: len(ids) - 1]
        return Rows(
            tokens_BS=tokens_BS,
            length_B=length_B,
            start_B=np.array([len(self._prompts[number]) for number in shard], np.int32),
            temperature_B=self._temperatures[shard],
            domains=[self._domains[number] for number in shard],
            aux_hidden=dict(zip(self._config.aux_layers, hidden_BSD, strict=True)),
        )


@jax.jit
def _pages_of(pools: tuple[jax.Array, ...], pages: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(pool[pages] for pool in pools)
