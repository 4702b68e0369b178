"""Tiny random models, and the ways in which tests drive the decode loop: always the product's own
code."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from typing import Any, NamedTuple

import jax

# Before jax makes its backend. Code generation takes most of the time that a tiny model needs;
# these change no step before it. A flag that XLA does not know ends the process, and the last of
# them does not exist in all versions. Eight devices are for what runs on a mesh; everything else
# runs on the first.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from drive_cli import Outcome

from specjax import decode, kv_cache, llama
from specjax import sampling as sampling_lib
from specjax.cli import main
from specjax.config import LlamaConfig
from specjax.decode import DecodeConfig, DecodeState
from specjax.drafters import base, eagle
from specjax.drafters.eagle import HeadConfig
from specjax.train import init_head

INIT = decode.init_jit
GENERATE = decode.generate_jit

# One shape for most runs, so that they share compiled programs.
CAPACITY = 48


class Model(NamedTuple):
    """A model in memory."""

    config: LlamaConfig
    params: Any


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped():
    """Compiled programs are memory maps, of which Linux gives a process 65,530. Beyond them XLA
    dies of a segmentation fault."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@functools.cache
def tiny(seed: int, vocab_size: int = 32, num_layers: int = 1, scale: float = 0.5) -> Model:
    """A random Llama with grouped queries. Wide weights: its laws are far from flat, its text
    varied."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
    )
    return Model(config, llama.init(jax.random.key(seed), config, scale=scale))


@functools.cache
def similar(seed: int, noise: float = 0.15, **kwargs) -> Model:
    """`tiny` with noise on its weights: as a draft model it is often right and often wrong."""
    model = tiny(seed, **kwargs)
    other = tiny(seed + 1000, **kwargs)
    return Model(model.config, jax.tree.map(lambda a, b: a + noise * b, model.params, other.params))


def tiny_head(target: Model, taps: tuple[int, ...] = (), num_draft_tokens: int | None = None):
    """A head for a tiny target, as training begins with it: its configuration and the parameters
    for decoding."""
    config = init_head.config(target.config, taps, num_draft_tokens)
    params = init_head.initial_params(config, target.params, jax.random.key(0))
    V = target.config.vocab_size
    ids_U = (
        None
        if num_draft_tokens is None
        else jnp.arange(num_draft_tokens, dtype=jnp.int32) * 2 % (V - 1 + V % 2)
    )
    return config, eagle.for_decoding(params, ids_U, target.params)


def make_drafter(name: str, K: int, target: Model, draft: Model, **options):
    """The drafter called `name` and the params to give to the loop: none, the draft model's, or
    those of a head: one of some layers that guesses some tokens, or behind another drafter one of
    the last layer that guesses all."""
    needs = base.needs(name)
    config, params = None, None
    if HeadConfig in needs:
        L, V = target.config.num_layers, target.config.vocab_size
        config, params = (
            tiny_head(target) if "," in name else tiny_head(target, tuple({0, L - 1}), V * 2 // 3)
        )
    elif LlamaConfig in needs:
        config, params = draft
    params = tuple(params if kind else None for kind in needs)
    return base.make(name, K, target.config, config, options=options), params[0] if len(
        needs
    ) == 1 else params


class Result(NamedTuple):
    """What a run emitted, row by row, and the state it ended in."""

    emitted: list[list[int]]
    state: DecodeState


def prepare(
    target: Model,
    prompts,
    *,
    drafter=None,
    draft_params=None,
    max_new=16,
    eos=(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    capacity: int = CAPACITY,
    **config,
):
    """Reads prompts; every keyword but `drafter`, `draft_params` and `capacity` is one value for
    all rows or a list.

    Returns the arguments of `GENERATE`.
    """
    B = len(prompts)
    tokens_BS = np.zeros((B, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = prompt
    length_B = np.array([len(prompt) for prompt in prompts], np.int32)
    eos_BE = np.full((B, 3), -1, np.int32)
    for row, ids in enumerate(eos if isinstance(eos, list) else [eos] * B):
        eos_BE[row, : len(ids)] = ids

    def rows(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (B,)))

    sampling = sampling_lib.params(
        rows(seed, np.uint32),
        rows(temperature, np.float32),
        rows(top_k, np.int32),
        rows(top_p, np.float32),
        rows(min_p, np.float32),
    )
    prefill_chunk = config.pop("prefill_chunk", 8)
    config = DecodeConfig(target.config, drafter, **{"page_size": 4, **config})
    state = INIT(
        target.params,
        draft_params,
        config,
        jnp.asarray(tokens_BS),
        jnp.asarray(length_B),
        jnp.asarray(length_B + np.asarray(max_new, np.int32)),
        jnp.asarray(eos_BE),
        sampling,
        prefill_chunk,
    )
    return target.params, draft_params, config, state


def result(state: DecodeState) -> Result:
    """The text after the prompts."""
    tokens_BS, start_B, end_B = map(
        np.asarray, (state.tokens_BS, state.prompt_length_B, state.length_B)
    )
    rows = zip(tokens_BS, start_B, end_B, strict=True)
    return Result([tokens_S[start:end].tolist() for tokens_S, start, end in rows], state)


def run(target: Model, prompts, **options) -> Result:
    """Runs the loop to its end; for the options see `prepare`."""
    return result(GENERATE(*prepare(target, prompts, **options)))


def full_logits(model: Model, tokens_BS) -> np.ndarray:
    """Next-token logits after every token, from one forward pass over the whole text and a fresh
    cache."""
    return _full_pass(model.params, model.config, jnp.asarray(tokens_BS), ())[0]


def full_taps(model: Model, tokens_BS, taps: tuple[int, ...]):
    """The residual stream after some layers, from one forward pass over the whole text."""
    return _full_pass(model.params, model.config, jnp.asarray(tokens_BS), taps)[1]


@functools.partial(jax.jit, static_argnums=(1, 3))
def _full_pass(params, config, tokens_BS, taps):
    B, S = tokens_BS.shape
    cache = kv_cache.init(config, B, S, page_size=S)
    cache = kv_cache.reserve(cache, jnp.full(B, S))
    output = llama.forward(params, config, tokens_BS, jnp.zeros(B, jnp.int32), cache, taps=taps)
    return llama.logits(params, output.hidden_BTD), output.taps


def reference_law(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The law that `sampling.draw` draws from, for one vector, one step after the other, in
    float64."""
    logits_V = np.asarray(logits_V, np.float64)
    if temperature == 0:
        return np.eye(len(logits_V))[np.argmax(logits_V)]
    law_V = np.exp((logits_V - logits_V.max()) / temperature)
    law_V /= law_V.sum()
    if top_k:
        law_V[law_V < np.sort(law_V)[::-1][min(top_k, len(law_V)) - 1]] = 0
        law_V /= law_V.sum()
    if top_p < 1:
        falling = np.sort(law_V)[::-1]
        law_V = np.where(
            law_V < falling[(np.cumsum(falling) - falling < top_p).sum() - 1], 0, law_V
        )
    law_V[law_V < min_p * law_V.max()] = 0
    return law_V / law_V.sum()


class OracleParams(NamedTuple):
    """What an oracle says: for each absolute position a token, and whether it has nothing to say
    there."""

    tokens_BS: jax.Array
    empty_BS: jax.Array


@functools.cache
def oracle(K: int, taps: tuple[int, ...] = ()) -> base.Drafter:
    """A drafter that reads its guesses from its params, so that tests decide what is accepted, and
    when.

    Its state keeps the taps it got: for every position the residual streams, and how many columns
      of the last round
    were not all zero.
    """

    def init(params, prefill):
        return prefill.length_B, prefill.taps_BSD, jnp.zeros(prefill.tokens_BS.shape, jnp.int32)

    def propose(params, state, context, draw):
        index_BK = context.length_B[:, None] + jnp.arange(K)
        index_BK = jnp.minimum(index_BK, params.tokens_BS.shape[1] - 1)
        tokens_BK = jnp.take_along_axis(params.tokens_BS, index_BK, axis=1)
        empty_B1 = jnp.take_along_axis(params.empty_BS, index_BK[:, :1], axis=1)
        return base.Draft(tokens_BK, count_B=jnp.where(empty_B1[:, 0], 0, K)), state

    def update(params, state, context, verified, taps_BTD):
        length_B, taps_BSD, width_BS = state
        row_B1 = jnp.arange(length_B.shape[0])[:, None]
        place_BT = length_B[:, None] - 1 + jnp.arange(K + 1)
        taps_BSD = tuple(
            old.at[row_B1, place_BT].set(new, mode="drop")
            for old, new in zip(taps_BSD, taps_BTD, strict=True)
        )
        if taps:
            width_B = (taps_BTD[0] != 0).any(-1).sum(-1)
            width_BS = width_BS.at[row_B1, length_B[:, None]].set(width_B[:, None], mode="drop")
        return context.length_B, taps_BSD, width_BS

    return base.Drafter(K, propose, taps, init, update)


@contextlib.contextmanager
def compilations():
    """A list to which an entry is added for every program that XLA compiles meanwhile."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `specjax ARGUMENTS` in this process. Flags are global, so those of the run are removed
    after it."""
    monkeypatch.setattr(
        main, "_configure_jax", lambda: None
    )  # a test leaves no compilation cache behind
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments) -> Outcome:
        capsys.readouterr()
        try:
            code = main.main(["specjax", *map(str, arguments)])
        finally:
            for name in list(flags.FLAGS):
                if flags.FLAGS.find_module_defining_flag(name).startswith("specjax."):
                    delattr(flags.FLAGS, name)
            flags.FLAGS.unparse_flags()
        return Outcome(code, *capsys.readouterr())

    return run
