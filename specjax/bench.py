"""Measuring decoding speed so that figures can be compared: everything interleaved in one process, medians, and the
floor that the machine itself sets."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax import checkpoint, decode, generation, llama, metrics, sharding
from specjax.checkpoint import Model
from specjax.errors import SpecJAXError
from specjax.kernels.paged_attention import xla
from specjax.sampling import SamplingParams
from specjax.sharding import MESH_AXES


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures of one prompt; rates are medians over the repeats, in tokens per second of the decode loop alone.

    Attributes:
      name: of the prompt.
      tokens: generated per repeat.
      plain: rate without speculation.
      speculative: rate with it.
      tokens_per_round: with speculation.
      acceptance: α, see `metrics.Acceptance.rate`.
      floor_share: rate of plain decoding over what reading the weights' bytes once per token allows.
      peers: rate of each other engine.
    """

    name: str
    tokens: int
    plain: float
    speculative: float
    tokens_per_round: float
    acceptance: float
    floor_share: float
    peers: dict[str, float]


def decode_speed(target: Model, prompts: dict[str, generation.Prompt], *, max_new_tokens: int, repeats: int,
                 drafter: dict[str, Any], peers: Sequence[str] = ()) -> list[Row]:
    """Plain and speculative greedy decoding of each prompt, `repeats` times in turn, after one run that is not counted.

    Args:
      target: the model.
      prompts: by name.
      max_new_tokens: generated tokens per run; end-of-sequence tokens are ignored.
      repeats: counted runs.
      drafter: arguments of `generation.generate` that choose drafter and verification.
      peers: of `PEERS`; each must be installed.

    Raises:
      SpecJAXError: a peer that is unknown or not installed; or speculation that changed a text.
    """
    common = {name: drafter[name] for name in ("verify", "page_size", "implementation") if name in drafter}
    engines = {name: _peer(name)(target) for name in peers}
    # On each device an array of as many bytes as its weights: what memory can do, undisturbed by where arrays end.
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(target.params))
    place = NamedSharding(target.mesh, PartitionSpec(MESH_AXES)) if target.mesh else None
    memory = jnp.zeros(size // 4 * (target.mesh.size if target.mesh else 1), jnp.float32, device=place)
    read_memory = jax.jit(sharding.on_mesh(jnp.sum, target.mesh, PartitionSpec(MESH_AXES),
                                           out_specs=lambda total: PartitionSpec()))
    rows = []
    for name, prompt in prompts.items():
        ids = generation.encode(target, prompt, name)
        arguments = dict(prompts=[ids], max_new_tokens=max_new_tokens, eos_ids=())
        runs = {"plain": [], "speculative": [], "floor": [], **{peer: [] for peer in engines}}
        for _ in range(repeats + 1):
            runs["floor"].append(1 / np.median([_seconds(read_memory, memory) for _ in range(9)]))
            plain = generation.generate(target, "none", **arguments, **common)
            speculative = generation.generate(target, **arguments, **drafter)
            tokens = len(plain.completions[0].tokens)
            differ = plain.completions[0].tokens != speculative.completions[0].tokens
            if differ and target.params["embed_VD"].dtype == jnp.float32:  # elsewhere near ties fall either way
                raise SpecJAXError(f"{name}: speculation changed the greedy text")
            runs["plain"].append(tokens / plain.decode_seconds)
            runs["speculative"].append(tokens / speculative.decode_seconds)
            for peer, rate in engines.items():
                runs[peer].append(rate(ids, tokens))
        rate = {run: float(np.median(rates[1:])) for run, rates in runs.items()}
        stats = metrics.acceptance(speculative.completions, max(speculative.completions[0].drafted))
        rows.append(Row(name, tokens, rate["plain"], rate["speculative"], stats.tokens_per_round, stats.rate,
                        rate["plain"] / rate["floor"], {peer: rate[peer] for peer in engines}))
    return rows


def paging_cost(target: Model, *, length: int, page_size: int, repeats: int) -> tuple[float, float]:
    """Seconds of a plain decode step at `length` tokens with the paged cache, and with one contiguous run of slots,
    both through XLA.

    Medians of `repeats` calls in turn. The contiguous cache is one page as long as the sequence, read where it lies.
    """
    slots = generation.bucket(length + 1)
    rows = sharding.num_parts(target.mesh)

    def contiguous(q_BTNH, k_pool, v_pool, block_table_BX, start_B, **_):
        return xla.attention(q_BTNH, k_pool, v_pool, jnp.ones((1, slots), bool), start_B)

    def prepare(size: int):
        cfg = decode.DecodeConfig(target.config, page_size=size, implementation="xla", mesh=target.mesh)
        tokens_BS = jnp.tile(jnp.arange(slots) % target.num_valid_tokens, (rows, 1))
        state = decode.init(target.params, None, cfg, tokens_BS, jnp.full(rows, length), jnp.full(rows, slots),
                            jnp.full((rows, 1), -1), SamplingParams(jnp.zeros(rows, jnp.uint32)))
        # As functions of its own, so that nothing compiled for the one is taken for the other.
        step = jax.jit(lambda params, state: decode.step(params, None, cfg, state), donate_argnums=1)
        carry = [step(target.params, state)]

        def again():
            carry[0] = step(target.params, carry[0])
            return carry[0]

        return again

    paged = prepare(page_size)
    with mock.patch.object(llama, "paged_attention", contiguous):
        dense = prepare(slots)
    times = np.array([(_seconds(paged), _seconds(dense)) for _ in range(repeats)])
    return tuple(map(float, np.median(times, axis=0)))


def first_token_seconds(target: Model, prompt: generation.Prompt, started: float, drafter: dict[str, Any]) -> float:
    """Seconds from `started` (`time.perf_counter`) until the first tokens of a prompt have been generated."""
    generation.generate(target, prompts=[prompt], max_new_tokens=1, **drafter)
    return time.perf_counter() - started


def _seconds(function: Callable, *arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def _transformers(target: Model) -> Callable[[tuple[int, ...], int], float]:
    """Greedy decoding with Hugging Face transformers, float32, as many threads as PyTorch likes."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.export(target.path, f"{folder}/model", dtype="float32")
        model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).eval()

    def run(ids, num_tokens: int) -> float:
        start = time.perf_counter()
        options = dict(do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0)
        with torch.inference_mode():
            model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
        return time.perf_counter() - start

    # Reading the prompt is not decoding: it is what a single token costs.
    return lambda ids, num_tokens: (num_tokens - 1) / (run(ids, num_tokens) - run(ids, 1))


PEERS = {"transformers": _transformers}


def _peer(name: str) -> Callable:
    if name not in PEERS:
        raise SpecJAXError(f"peer {name!r} is not known; known: {', '.join(PEERS)}")
    try:
        __import__(name)
    except ImportError as error:
        raise SpecJAXError(f"the peer {name!r} is not installed: {error}") from error
    return PEERS[name]
