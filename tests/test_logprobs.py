"""Log-probabilities of outputs and prompts: those of a full forward pass and of transformers, of
accepted drafts too, whatever changes the logits before sampling."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, llama, parallel, sampling
from specjax.config import LlamaConfig, Runtime
from specjax.engine import load
from specjax.errors import SpecJAXError
from support.logprobs import check, check_outputs, log_softmax, of_positions
from support.loop import GENERATE, prepare, result, run
from support.models import Model, OracleParams, full_logits, make_drafter, oracle

GOLDEN = pathlib.Path(__file__).parent / "golden" / "llama"

# Four kv heads, so that four devices can share it.
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
)
# With the wide weights of `tiny`, the logits of a text differ by more than the tolerance between
# reading it in pieces and at once.
TARGET, OTHER = (Model(CONFIG, llama.init(jax.random.key(i), CONFIG, scale=0.25)) for i in (1, 2))
# Often right and often wrong.
DRAFT = Model(CONFIG, jax.tree.map(lambda a, b: a + 0.1 * b, TARGET.params, OTHER.params))
PROMPTS = [
    np.random.default_rng(row).integers(0, 32, length).tolist() * 2
    for row, length in enumerate([1, 2, 3, 4, 5, 6, 7, 3])
]
B = len(PROMPTS)
SAMPLED = dict(
    max_new=[24, 20, 9, 24, 20, 17, 24, 22],
    seed=list(range(B)),
    eos=[5],
    temperature=[0, 0, 0, 0, 0.6, 1, 1.5, 0.4],
    top_k=[0, 0, 0, 0, 0, 6, 0, 3],
    top_p=[1, 1, 1, 1, 1, 1, 0.9, 1],
    logit_bias=[None, {7: 3.0}, None, {1: 50}, None, {2: 1.5}, None, None],
    allowed_token_ids=[None, range(1, 32, 2), None, range(20), None, None, range(4, 30), None],
    frequency_penalty=[0, 1.0, 0.5, 0, 0.2, 0, -0.5, 0],
)
GREEDY = dict(max_new=24)


def check_drafts(state) -> None:
    """Drafts were accepted and rejected."""
    log = state.log
    assert 0 < np.sum(log.accepted_BS) < np.sum(log.drafted_BS)


# --- Outputs --------------------------------------------------------------------------------------


def run_with(name: str, **options):
    drafter, params = (None, None) if name == "none" else make_drafter(name, 2, TARGET, DRAFT)
    return run(TARGET, PROMPTS, drafter=drafter, draft_params=params, **options)


def test_plain_decoding():
    """The texts are changed by all that has no part in the log-probabilities."""
    state = run_with("none", logprobs=5, **SAMPLED).state
    check_outputs(state, TARGET, 5)
    ranks_BS = np.asarray(state.logprobs.rank_BS)
    assert set(ranks_BS[0]) == {0, 1}  # greedy, and processed by nothing
    assert all((ranks_BS[row] > 1).any() for row in range(1, B) if row != 2)


@pytest.mark.parametrize(
    "name",
    [
        "draft_model",
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "eagle", "ngram,eagle")],
    ],
)
def test_outputs_with_drafts(name):
    """Greedy and sampled, filtered and processed rows; `test_processors.py` has coupled ones."""
    state = run_with(name, logprobs=5, **SAMPLED).state
    check_outputs(state, TARGET, 5)
    check_drafts(state)


@pytest.mark.parametrize("name", ["none", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_greedy_rows_alone(name):
    """A program without temperature, and all 20 that a request may ask for."""
    state = run_with(name, logprobs=20, **GREEDY).state
    check_outputs(state, TARGET, 20)
    assert set(np.unique(state.logprobs.rank_BS)) == {0, 1}
    if name != "none":
        check_drafts(state)


def test_ids_that_are_not_valid_have_no_part():
    """Though they have the largest logits of all."""
    num_valid = 28
    head_VD = TARGET.params["lm_head_VD"].at[num_valid:].multiply(8)
    loud = Model(CONFIG, {**TARGET.params, "lm_head_VD": head_VD})
    prompts = [[token % num_valid for token in prompt] for prompt in PROMPTS]
    got = run(loud, prompts, max_new=12, num_valid_tokens=num_valid, logprobs=3)
    logits_BSV = full_logits(loud, np.asarray(got.state.tokens_BS))
    assert (logits_BSV.argmax(axis=-1) >= num_valid).any()
    for row, prompt in enumerate(prompts):
        positions = slice(len(prompt), len(prompt) + 12)
        before = slice(len(prompt) - 1, len(prompt) + 11)
        found = of_positions(got.state.logprobs, row, positions)
        check(found, logits_BSV[row, before, :num_valid], got.emitted[row], 3)


# --- The order of tokens --------------------------------------------------------------------------


def tied_logits() -> np.ndarray:
    """Logits `[4, 8, 64]` of few values, so that many tokens tie, and some that almost do."""
    x_BTV = 7 * np.random.default_rng(0).integers(-6, 6, (4, 8, 64)).astype(np.float32) + 0.3
    x_BTV[:, :, 40] = 1.0
    x_BTV[:, :, 50] = np.nextafter(np.float32(1), np.float32(2))
    return x_BTV


@pytest.mark.parametrize("num_valid", [None, 53])
@pytest.mark.parametrize("degrees", [None, (4, 2), (8, 1)], ids=str)
def test_tokens_that_tie_are_in_the_order_of_their_ids(degrees, num_valid):
    """And share their rank, which is vLLM's, to the unit, also over shards smaller than J.

    Rounded log-probabilities would tie where logits do not.
    """
    logits_BTV = tied_logits()
    token_BT = np.random.default_rng(1).integers(0, num_valid or 64, (4, 8)).astype(np.int32)
    token_BT[:, :2] = 40, 50
    mesh = parallel.make_mesh(*degrees) if degrees else None
    axes = parallel.model_axes(mesh, "target") if degrees else ()
    runtime = Runtime(mesh=mesh, num_valid_tokens=num_valid)

    def of_shard(tree, token_BT):
        return sampling.logprobs(runtime, tree["logits_BTV"], token_BT, 20, axes)

    tree = {"logits_BTV": logits_BTV}
    whole = jax.sharding.PartitionSpec()
    in_specs = (parallel.specs(tree, "target"), whole)
    got = jax.jit(parallel.on_mesh(of_shard, mesh, in_specs, whole))(tree, token_BT)
    valid_BTV = logits_BTV[..., :num_valid]
    order_BTV = np.argsort(-valid_BTV, axis=-1, kind="stable")
    np.testing.assert_array_equal(got.top_ids_BSJ, order_BTV[..., :20])
    token_BT1 = token_BT[..., None]
    of_token_BT1 = np.take_along_axis(valid_BTV, token_BT1, axis=-1)
    np.testing.assert_array_equal(got.rank_BS, (valid_BTV >= of_token_BT1).sum(axis=-1))
    expected_BTV = log_softmax(valid_BTV)
    of_token_BT1 = np.take_along_axis(expected_BTV, token_BT1, axis=-1)
    np.testing.assert_allclose(got.token_BS, of_token_BT1[..., 0], atol=1e-5)
    of_top_BTJ = np.take_along_axis(expected_BTV, order_BTV[..., :20], axis=-1)
    np.testing.assert_allclose(got.top_BSJ, of_top_BTJ, atol=1e-5)


def test_a_vocabulary_of_fewer_tokens_than_asked_for():
    """Places without a token have log-probability -inf; and so do ids that are not valid."""
    logits_BTV, token_BT = np.float32([[[1, 3, 2, 9]]]), np.int32([[2]])
    runtime = Runtime(num_valid_tokens=3)
    got = jax.jit(sampling.logprobs, static_argnums=(0, 3))(runtime, logits_BTV, token_BT, 6)
    assert got.top_ids_BSJ[0, 0, :3].tolist() == [1, 2, 0] and got.rank_BS.tolist() == [[2]]
    np.testing.assert_allclose(got.top_BSJ[0, 0, :3], log_softmax([3, 2, 1]), atol=1e-6)
    assert (np.asarray(got.top_BSJ)[0, 0, 3:] == -np.inf).all()


# --- On a mesh ------------------------------------------------------------------------------------


@functools.cache
def placed(degrees):
    """The mesh, and target and draft model on it."""
    mesh = parallel.make_mesh(*degrees)
    models = []
    for model, role in ((TARGET, "target"), (DRAFT, "draft")):
        models.append(Model(CONFIG, parallel.place(model.params, mesh, role)))
    return mesh, *models


@pytest.mark.parametrize(
    ("name", "degrees", "num_top"),
    [
        ("draft_model", (4, 2, 2), 20),
        pytest.param("none", (4, 1, 1), 0, marks=pytest.mark.slow),
        pytest.param("ngram,eagle", (4, 1, 2), 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_on_a_mesh(name, degrees, num_top):
    """The vocabulary is split, and so is the batch. A shard has fewer tokens than are asked for."""
    mesh, target, _ = placed(degrees)
    drafter, params = (None, None) if name == "none" else make_drafter(name, 1, TARGET, DRAFT)
    if params is not None:
        params = parallel.place(params, mesh, "draft")
    options = dict(drafter=drafter, draft_params=params, logprobs=num_top, mesh=mesh)
    state = run(target, PROMPTS, **options, **SAMPLED).state
    check_outputs(state, TARGET, num_top)
    if name != "none":
        check_drafts(state)


# --- Prompts --------------------------------------------------------------------------------------


def score(params, drafter_params, config, state, start_B, count_B, T: int):
    """`decode.score` of all rows, on a mesh or one device."""

    def of_device(params, drafter_params, start_B, count_B, state):
        found_and_state = decode.score(
            params, drafter_params, config, state, count_B > 0, start_B, count_B, T
        )
        return found_and_state[::-1]

    def in_specs(params, drafter_params, start_B, count_B, state):
        rows = parallel.ROWS, parallel.ROWS
        return *decode.param_specs(params, drafter_params), *rows, decode.state_specs(state)

    def out_specs(found_and_state):
        found, state = found_and_state
        return parallel.specs(found, "target"), decode.state_specs(state)

    mapped = parallel.on_mesh(of_device, config.runtime.mesh, in_specs, out_specs)
    return mapped(params, drafter_params, start_B, count_B, state)


SCORE = jax.jit(score, static_argnums=(2, 6))
PREFILL = jax.jit(decode.prefill, static_argnums=(2, 7))


def check_prompts(arguments, target: Model, prompts, num_top: int) -> None:
    """Chunks of five tokens, each row from another position on."""
    T, (params, drafter_params, config, state) = 5, arguments
    logits_BSV = full_logits(target, np.asarray(state.tokens_BS))
    starts_B = np.array([row % 3 for row in range(len(prompts))], np.int32)
    num_scored = 0
    for step in range(3):
        start_B = starts_B + T * step
        left_B = np.array([len(prompt) - 1 for prompt in prompts], np.int32) - start_B
        count_B = np.clip(left_B, 0, T)
        found, _ = SCORE(params, drafter_params, config, state, start_B, count_B, T)
        for row, (start, count) in enumerate(zip(start_B, count_B, strict=True)):
            tokens = prompts[row][start + 1 : start + count + 1]
            of_row = of_positions(found, row, slice(0, count))
            if count:
                check(of_row, logits_BSV[row, start : start + count], tokens, num_top)
            num_scored += count
    assert num_scored > 30


@pytest.mark.parametrize("name", ["none", "ngram,eagle"])
def test_prompts(name):
    """The chunk is read as `prefill` reads it: every cache has the same bits."""
    drafter, params = (None, None) if name == "none" else make_drafter(name, 3, TARGET, DRAFT)
    options = dict(drafter=drafter, draft_params=params, logprobs=4)
    arguments = prepare(TARGET, PROMPTS, **options)
    check_prompts(arguments, TARGET, PROMPTS, 4)
    # From empty caches.
    params, drafter_params, config, state = arguments
    zeros = jax.tree.map(jnp.zeros_like, (state.cache, state.drafter))
    state = state.replace(cache=zeros[0], drafter=zeros[1])
    start_B, count_B = np.zeros(B, np.int32), np.array([len(p) - 1 for p in PROMPTS], np.int32)
    count_B = np.minimum(count_B, 5)
    _, scored = SCORE(params, drafter_params, config, state, start_B, count_B, 5)
    config = dataclasses.replace(config, logprobs=None)
    read = PREFILL(params, drafter_params, config, state, count_B > 0, start_B, count_B, 5)
    assert any(x.any() for x in jax.tree.leaves(read.cache))
    jax.tree.map(np.testing.assert_array_equal, scored, read)


def test_prompts_on_a_mesh():
    mesh, target, _ = placed((4, 1, 2))
    arguments = prepare(target, PROMPTS, mesh=mesh, logprobs=9)
    check_prompts(arguments, TARGET, PROMPTS, 9)


# --- Golden values of transformers ----------------------------------------------------------------


def golden(case: str):
    """A model, two texts of 40 tokens, and their logits in transformers."""
    arrays = np.load(GOLDEN / case / "golden.npz")
    return load.load(GOLDEN / case, dtype="float32"), arrays["tokens_BT"], arrays["logits_BTV"]


def golden_cases():
    """Three are slow: `test_llama.py` compares the logits of all."""
    names = sorted(path.name for path in GOLDEN.iterdir())
    fast = ["biases", "mha_tied", "rope_llama3"]
    assert set(fast) < set(names)
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in names if name not in fast]
    return fast + slow


@pytest.mark.parametrize("case", golden_cases())
def test_prompts_have_the_log_probabilities_of_transformers(case):
    model, tokens_BT, logits_BTV = golden(case)
    arguments = prepare(model, tokens_BT.tolist(), max_new=1, prefill_chunk=39, logprobs=5)
    start_B, count_B = np.zeros(2, np.int32), np.full(2, 39, np.int32)
    found, _ = SCORE(*arguments, start_B, count_B, 39)
    for row in range(2):
        of_row = of_positions(found, row, slice(0, 39))
        check(of_row, logits_BTV[row, :39], tokens_BT[row, 1:], 5, atol=1e-4)


@pytest.mark.parametrize("case", ["rope_llama3", pytest.param("gqa", marks=pytest.mark.slow)])
def test_accepted_drafts_have_the_log_probabilities_of_transformers(case):
    """Each prefix of a golden text is a prompt, and its next two tokens are the output.

    Processors see to that: only the two are allowed, the first is preferred, and forbidden after
    itself. One is an accepted draft, the other the bonus token.
    """
    model, (tokens, _), (logits_SV, _) = golden(case)
    tokens = tokens.tolist()
    lengths = range(1, 39)
    pairs = [tokens[length : length + 2] for length in lengths]
    _, _, _, state = arguments = prepare(
        model,
        [tokens[:length] for length in lengths],
        drafter=oracle(1),
        draft_params=OracleParams(
            jnp.tile(jnp.asarray(tokens), (len(pairs), 1)), jnp.zeros((len(pairs), 40), bool)
        ),
        max_new=2,
        capacity=40,
        logprobs=5,
        allowed_token_ids=pairs,
        logit_bias=[{first: 100} for first, _ in pairs],
        bad_words=[[[first, first]] if first != second else [] for first, second in pairs],
    )
    state = GENERATE(*arguments)
    assert result(state).emitted == pairs
    np.testing.assert_array_equal(state.log.accepted_BS[:, 0], 1)
    for row, length in enumerate(lengths):
        found = of_positions(state.logprobs, row, slice(length, length + 2))
        check(found, logits_SV[length - 1 : length + 1], pairs[row], 5, atol=1e-4)


# --- What nobody asked for ------------------------------------------------------------------------


def compiled(num_top: int | None) -> str:
    arguments = prepare(TARGET, PROMPTS, logprobs=num_top, **SAMPLED)
    return GENERATE.lower(*arguments).compile().as_text()


def test_nothing_is_sorted_unless_asked_for():
    """Filters do not sort either, so that any sorting is of log-probabilities."""
    sorting = re.compile(r'\b(sort|topk)\(|custom_call_target="TopK"')
    off, token_only, top = (compiled(num_top) for num_top in (None, 0, 5))
    assert sorting.search(top)
    assert not sorting.search(token_only) and not sorting.search(off)
    instructions = [text.count(" = ") for text in (off, token_only, top)]
    assert instructions == sorted(set(instructions))


def test_without_log_probabilities_the_loop_is_the_same(monkeypatch):
    """It is what it would be if the function did not exist."""

    def jaxpr(num_top):
        params, _, config, state = prepare(TARGET, [[1, 2, 3]], capacity=8, logprobs=num_top)

        def step(params, state):  # a function of its own: JAX remembers what it traced
            return decode.step(params, None, config, state)

        return str(jax.make_jaxpr(step)(params, state))

    without = jaxpr(None)
    assert "top_k" not in jaxpr(0) and "top_k" in jaxpr(1)
    monkeypatch.setattr(sampling, "logprobs", None)
    assert jaxpr(None) == without


@pytest.mark.parametrize("number", [True, False, -1, 2.0, "5"])
def test_a_number_that_cannot_be_is_refused(number):
    with pytest.raises(SpecJAXError, match="logprobs must be None or an integer of at least 0"):
        decode.DecodeConfig(CONFIG, logprobs=number)
