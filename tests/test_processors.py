"""Changes of the target's logits: as a slow reference computes them, and with drafts the same as
without. Log-probabilities do not see them, see `test_logprobs.py`."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax import decode, parallel, processors
from specjax.drafters import registry
from specjax.engine import batch
from specjax.engine.request import SamplingOptions
from specjax.errors import SpecJAXError
from specjax.processors import ProcessorArrays
from support.distributions import chi_square_p, reference_distribution, reference_logits
from support.logprobs import check_outputs
from support.loop import prepare, run
from support.models import full_logits, make_drafter, similar, tiny

NAMES = [*registry.names(), "ngram,eagle"]

# --- One block, against the reference -------------------------------------------------------------

BLOCK_B, BLOCK_V, BLOCK_S, BLOCK_M = 16, 8, 24, 5
EOS = [2, 7]

# Numbers whose products with counts are exact in float32: results are equal to the bit.
FEATURES = {
    "logit_bias": dict(logit_bias={3: 1.7, 0: -100, 5: 0.3}),
    "allowed_token_ids": dict(allowed_token_ids=[1, 2, 4, 5]),
    "bad_words": dict(bad_words=[[6], [1, 2], [3, 3], [0, 1, 4], [5, 4, 3, 2, 1]]),
    "min_tokens": dict(min_tokens=9),
    "presence_penalty": dict(presence_penalty=1.3),
    "frequency_penalty": dict(frequency_penalty=-0.75),
    "repetition_penalty": dict(repetition_penalty=1.7),
}
ALL = functools.reduce(lambda a, b: a | b, FEATURES.values())


@dataclasses.dataclass(frozen=True)
class Block:
    """Random texts with drafts: of a small alphabet, so that everything occurs."""

    logits_BTV: np.ndarray
    tokens_BS: np.ndarray
    prompt_length_B: np.ndarray
    length_B: np.ndarray
    drafts_BM: np.ndarray
    count_B: np.ndarray

    @property
    def eos_BE(self):
        return np.tile(np.int32([*EOS, -1]), (BLOCK_B, 1))

    def args(self):
        return (
            self.logits_BTV,
            self.tokens_BS,
            self.prompt_length_B,
            self.length_B,
            self.drafts_BM,
            self.eos_BE,
        )


@functools.cache
def block() -> Block:
    rng = np.random.default_rng(0)
    logits_BTV = 3 * rng.standard_normal((BLOCK_B, BLOCK_M + 1, BLOCK_V)).astype(np.float32)
    logits_BTV[:, :, 4] *= rng.choice([1, 0], (BLOCK_B, BLOCK_M + 1))
    prompt_length_B = rng.integers(1, 10, BLOCK_B, np.int32)
    count_B = rng.integers(0, BLOCK_M + 1, BLOCK_B, np.int32)
    drafts_BM = rng.integers(0, BLOCK_V, (BLOCK_B, BLOCK_M), np.int32)
    # What is not a draft may be anything.
    garbage_BM = rng.choice([-1, -2, 10**6], drafts_BM.shape)
    drafts_BM = np.where(np.arange(BLOCK_M) < count_B[:, None], drafts_BM, garbage_BM)
    return Block(
        logits_BTV,
        rng.integers(0, BLOCK_V, (BLOCK_B, BLOCK_S), np.int32),
        prompt_length_B,
        prompt_length_B + np.arange(BLOCK_B, dtype=np.int32) % 12,
        drafts_BM.astype(np.int32),
        count_B,
    )


def processor_arrays(num_rows: int, features: dict) -> ProcessorArrays | None:
    vocabulary = batch.Vocabulary(BLOCK_V, BLOCK_V)
    params = SamplingOptions(**features)
    return batch.processor_arrays(params, np.full(num_rows, 100), vocabulary)


def with_neutral_values(arrays: ProcessorArrays | None) -> ProcessorArrays:
    """All fields as arrays; those that are None as arrays that change nothing."""
    full = processor_arrays(BLOCK_B, ALL)
    off = jax.tree.map(lambda off, x: np.full_like(x, off), processors.OFF, full)
    used = {} if arrays is None else {k: v for k, v in vars(arrays).items() if v is not None}
    return off.replace(**used)


def assert_equal_where_real(got_BTV, expected_BTV):
    """At the nodes after real drafts: the others are undefined."""
    for b, count in enumerate(block().count_B):
        np.testing.assert_array_equal(got_BTV[b, : count + 1], expected_BTV[b, : count + 1])


def expected_block(features: dict) -> np.ndarray:
    x = block()
    expected_BTV = np.zeros_like(x.logits_BTV)
    for b, t in itertools.product(range(BLOCK_B), range(BLOCK_M + 1)):
        if t <= x.count_B[b]:
            start, end = x.prompt_length_B[b], x.length_B[b]
            prompt, output = x.tokens_BS[b, :start].tolist(), x.tokens_BS[b, start:end].tolist()
            output += x.drafts_BM[b, :t].tolist()
            expected_BTV[b, t] = reference_logits(
                x.logits_BTV[b, t], prompt, output, EOS, **features
            )
    return expected_BTV


PROCESS = jax.jit(processors.process)


@pytest.mark.parametrize("name", [*FEATURES, "all"])
def test_every_node_gets_the_logits_of_plain_decoding_there(name):
    """After the committed tokens and the drafts before it, and whatever follows the length."""
    features = ALL if name == "all" else FEATURES[name]
    expected_BTV = expected_block(features)
    arrays = with_neutral_values(processor_arrays(BLOCK_B, features))
    assert_equal_where_real(np.asarray(PROCESS(arrays, *block().args())), expected_BTV)
    # It matters at the first node and later ones, and drafts matter (but where they cannot).
    changed_BTV = expected_BTV != block().logits_BTV
    assert changed_BTV[:, 0].any() and not changed_BTV[:, 0].all()
    without = dataclasses.replace(block(), drafts_BM=np.full_like(block().drafts_BM, 1))
    other_BTV = np.asarray(PROCESS(arrays, *without.args()))
    is_real_BT = np.arange(BLOCK_M + 1) <= block().count_B[:, None]
    drafts_matter = (other_BTV != expected_BTV)[is_real_BT].any()
    assert drafts_matter == (name not in ("logit_bias", "allowed_token_ids", "min_tokens"))


@pytest.mark.parametrize("name", FEATURES)
def test_a_field_that_is_off_may_be_none(name):
    """The same to the bit: two programs, one for all features, give the same text."""
    arrays = processor_arrays(BLOCK_B, FEATURES[name])
    assert len(jax.tree.leaves(arrays)) == 1
    got_BTV = np.asarray(PROCESS(arrays, *block().args()))
    full = with_neutral_values(arrays)
    np.testing.assert_array_equal(got_BTV, np.asarray(PROCESS(full, *block().args())))


def test_neutral_values_change_nothing_and_need_no_arrays():
    got_BTV = PROCESS(with_neutral_values(None), *block().args())
    np.testing.assert_array_equal(got_BTV, block().logits_BTV)
    off = {field.name: field.default for field in dataclasses.fields(SamplingOptions)}
    off |= dict(logit_bias=[{}, None], bad_words=[[], None], allowed_token_ids=[None, None])
    assert processor_arrays(2, off) is None
    assert processors.process(None, *block().args()) is block().logits_BTV
    assert processors.process(ProcessorArrays(), *block().args()) is block().logits_BTV


def test_a_shard_of_the_vocabulary_gets_its_part():
    """Over four devices, to the bit."""
    mesh = parallel.make_mesh(4, 2)
    axes = parallel.model_axes(mesh, "target")
    arrays = with_neutral_values(processor_arrays(BLOCK_B, ALL))
    tree = dict(arrays=arrays, logits_BTV=block().logits_BTV)

    def shard(tree, *args):
        return processors.process(tree["arrays"], tree["logits_BTV"], *args, axes)

    in_specs = (parallel.specs(tree, "target"), *[PartitionSpec()] * 5)
    run_shards = parallel.on_mesh(shard, mesh, in_specs, PartitionSpec(None, None, axes))
    processed_BTV = jax.jit(run_shards)(tree, *block().args()[1:])
    assert_equal_where_real(np.asarray(processed_BTV), expected_block(ALL))


def test_infinite_logits_and_forbidden_nans():
    """A forbidden token's logit does not matter; NaN and infinity of others stay what they are."""
    args = list(block().args())
    args[0] = np.array(args[0])
    args[0][:, :, [0, 3]] = np.inf, np.nan
    arrays = with_neutral_values(
        processor_arrays(BLOCK_B, dict(allowed_token_ids=[0, 1], frequency_penalty=2))
    )
    got_BTV = np.asarray(PROCESS(arrays, *args))
    assert (got_BTV[:, :, 0] == np.inf).all() and (got_BTV[:, :, 2:] == -np.inf).all()
    arrays = with_neutral_values(processor_arrays(BLOCK_B, dict(repetition_penalty=2)))
    assert np.isnan(np.asarray(PROCESS(arrays, *args))[:, :, 3]).all()


# --- Distributions of whole texts, with drafts ----------------------------------------------------

SMALL_V, SMALL_PROMPT, SMALL_EOS, DEPTH = 5, [0, 1, 2, 1], [3], 3
SMALL_TARGET, SMALL_DRAFT = tiny(10, vocab_size=SMALL_V), tiny(11, vocab_size=SMALL_V)
TRIALS = 2_048
GROUPS = {
    "none": {},
    "logit_bias": dict(logit_bias={0: 2.0, 4: -3.0}),
    "allowed_token_ids": dict(allowed_token_ids=[0, 2, 3]),
    "bad_words": dict(bad_words=[[0, 0], [2, 3], [1, 2, 1], [4]]),
    "min_tokens": dict(min_tokens=2),
    "presence_penalty": dict(presence_penalty=2.0),
    "frequency_penalty": dict(frequency_penalty=-2.0),
    "repetition_penalty": dict(repetition_penalty=3.0),
    "all": dict(
        logit_bias={0: 1.0},
        allowed_token_ids=[0, 1, 2, 3],
        bad_words=[[0, 2], [1, 1, 1]],
        min_tokens=1,
        presence_penalty=0.5,
        frequency_penalty=1.0,
        repetition_penalty=0.6,
    ),
}
GROUPS["all, greedy"] = GROUPS["all"]
OFF = {field.name: field.default for field in dataclasses.fields(SamplingOptions)}


def eos_of(group: str) -> list[int]:
    return SMALL_EOS if GROUPS[group].get("min_tokens") else []


def temperature_of(group: str) -> float:
    return 0.0 if "greedy" in group else 2.5


@functools.cache
def run_groups(drafter_name: str):
    """`TRIALS` rows of each group, all of them in one program."""
    options = {"min_n": 1} if drafter_name == "ngram" else {}
    drafter, params = make_drafter(drafter_name, DEPTH - 1, SMALL_TARGET, SMALL_DRAFT, **options)
    names = {name for group in GROUPS.values() for name in group}
    columns = {name: [] for name in names}
    for group, name in itertools.product(GROUPS.values(), names):
        columns[name] += [group.get(name, OFF[name])] * TRIALS
    num_rows = len(GROUPS) * TRIALS
    return run(
        SMALL_TARGET,
        [SMALL_PROMPT] * num_rows,
        drafter=drafter,
        draft_params=params,
        max_new=DEPTH,
        eos=[eos_of(group) for group in GROUPS for _ in range(TRIALS)],
        seed=np.arange(num_rows),
        temperature=np.repeat([temperature_of(group) for group in GROUPS], TRIALS),
        capacity=8,
        **columns,
    )


@functools.cache
def small_logits() -> dict:
    """The target's logits after every text of up to two tokens."""
    texts = list(itertools.product(range(SMALL_V), repeat=DEPTH - 1))
    logits = full_logits(SMALL_TARGET, [SMALL_PROMPT + list(text) for text in texts])
    start = len(SMALL_PROMPT) - 1
    return {text[:t]: logits[i, start + t] for i, text in enumerate(texts) for t in range(DEPTH)}


def code(text) -> int:
    """A number for each text of up to `DEPTH` tokens."""
    padded = [*text, *[SMALL_V] * DEPTH][:DEPTH]
    return int(np.dot(padded, (SMALL_V + 1) ** np.arange(DEPTH)))


def enumerated(group: str) -> np.ndarray:
    """The probability of each text, token by token, by its code."""
    distribution = np.zeros((SMALL_V + 1) ** DEPTH)

    def visit(text, probability):
        if len(text) == DEPTH or (text and text[-1] in eos_of(group)):
            distribution[code(text)] += probability
            return
        logits_V = reference_logits(
            small_logits()[text], SMALL_PROMPT, text, eos_of(group), **GROUPS[group]
        )
        p_V = reference_distribution(logits_V, temperature_of(group))
        for token in np.flatnonzero(p_V):
            visit((*text, int(token)), probability * p_V[token])

    visit((), 1.0)
    return distribution


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("drafter_name", ["draft_model", "ngram"])
def test_rejection_samples_from_the_processed_distribution(drafter_name, group):
    """With sampled drafts and with one-hot ones, some of them accepted."""
    got = run_groups(drafter_name)
    start = list(GROUPS).index(group) * TRIALS
    rows = slice(start, start + TRIALS)
    counts = np.bincount([code(text) for text in got.emitted[rows]], minlength=6**DEPTH)
    distribution = enumerated(group)
    np.testing.assert_allclose(distribution.sum(), 1, atol=1e-6)
    assert counts[distribution == 0].sum() == 0
    if temperature_of(group) == 0:
        assert distribution.max() == 1  # and so all texts are that one
        return
    log = got.state.log
    drafted, accepted = (np.asarray(x[rows]).sum() for x in (log.drafted_BS, log.accepted_BS))
    assert 0.05 * drafted < accepted < 0.95 * drafted
    assert (distribution > 0.002).sum() > 10
    assert chi_square_p(counts, distribution, TRIALS) > 1e-3


# --- Texts with all features on, with every drafter -----------------------------------------------

TARGET, DRAFT = tiny(6), similar(6)
B = 12
PROMPTS = [
    (np.random.default_rng(row).integers(0, 32, length).tolist() * 3)[:17]
    for row, length in enumerate([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17])
]
# Three tokens are forbidden after each one, and a token everywhere.
BAD_WORDS = [[a, (7 * a + b) % 32] for a in range(32) for b in range(3)] + [[4], [3, 11, 6]]
TEXTS = dict(
    max_new=[30, 24, 9, 30, 20, 17, 25, 28, 12, 10, 22, 30],
    seed=list(range(B)),
    temperature=[0, 1, 0.7, 0, 0.5, 1, 0.3, 0, 2, 1, 0, 0.5],
    top_p=[1, 1, 0.9, 1, 1, 1, 1, 1, 0.8, 1, 1, 1],
    eos=[5, 9],
    logit_bias=[{row: 2.0, 5: 6.0 if row % 2 else 1.5, 31: -4} for row in range(B)],
    # The last row has no token that it may emit.
    allowed_token_ids=[range(row % 3, 32, 1 + row % 2) for row in range(B - 1)] + [[3]],
    bad_words=[BAD_WORDS] * (B - 1) + [[[3]]],
    min_tokens=[0, 3, 8, 30, 5, 1, 20, 12, 3, 2, 7, 0],
    presence_penalty=[0.5, -0.5, 1, 0.2, 0, 2, 0.3, 0.1, -1, 0.5, 0.4, 0],
    frequency_penalty=[0.1, 0.3, -0.2, 0, 0.5, -0.1, 0.2, 0.05, 1, 0.3, -0.3, 0],
    repetition_penalty=[1.1, 0.9, 1.3, 1.05, 1, 1.2, 0.95, 1.02, 1.5, 1.1, 0.8, 1],
    logprobs=3,
)


@functools.cache
def plain():
    return run(TARGET, PROMPTS, **TEXTS)


def check_text(got, rows):
    assert [got.emitted[row] for row in rows] == [plain().emitted[row] for row in rows]
    log = got.state.log
    assert log.accepted_BS[np.array(rows)].sum() > 0
    assert (log.accepted_BS < log.drafted_BS).any()
    check_outputs(got.state, TARGET, 3)


def test_plain_decoding_takes_the_argmax_of_processed_logits():
    """Of the greedy rows; and a row without a token that it may emit fails, before the first."""
    got = plain()
    logits_BSV = full_logits(TARGET, got.state.tokens_BS)
    for row in range(B - 1):
        features = {name: TEXTS[name][row] for name in ALL}
        text = got.emitted[row]
        for t, token in enumerate(text if TEXTS["temperature"][row] == 0 else ()):
            logits_V = logits_BSV[row, len(PROMPTS[row]) + t - 1]
            processed_V = reference_logits(
                logits_V, PROMPTS[row], text[:t], TEXTS["eos"], **features
            )
            assert processed_V[token] > processed_V.max() - 1e-4
        ended = set(text[-1:]) & set(TEXTS["eos"])
        assert len(text) == TEXTS["max_new"][row] or (ended and len(text) > features["min_tokens"])
    assert np.flatnonzero(got.state.failed_B).tolist() == [B - 1] and not got.emitted[B - 1]
    assert len({len(text) for text in got.emitted}) > 4
    check_outputs(got.state, TARGET, 3)


@pytest.mark.parametrize("name", NAMES)
def test_coupled_text_is_that_of_plain_decoding_with_every_feature(name):
    drafter, params = make_drafter(name, 2, TARGET, DRAFT)
    got = run(TARGET, PROMPTS, drafter=drafter, draft_params=params, verify="coupled", **TEXTS)
    check_text(got, list(range(B)))
    np.testing.assert_array_equal(got.state.failed_B, plain().state.failed_B)


def test_the_loop_on_a_mesh_gives_the_same_text_and_log_probabilities():
    """Without drafts, whose part in it has its own test above."""
    mesh = parallel.make_mesh(2, data_parallel=2)
    placed = TARGET._replace(params=parallel.place(TARGET.params, mesh, "target"))
    got = run(placed, PROMPTS, mesh=mesh, **TEXTS)
    assert got.emitted == plain().emitted
    check_outputs(got.state, TARGET, 3)


# --- What nobody asked for is not compiled --------------------------------------------------------


def jaxpr(processors: ProcessorArrays | None, **options) -> str:
    params, _, config, state = prepare(TARGET, [[1, 2, 3]], capacity=8, **options)
    state = state.replace(request=state.request.replace(processors=processors))

    def step(params, state):  # a function of its own: JAX remembers what it traced
        return decode.step(params, None, config, state)

    return str(jax.make_jaxpr(step)(params, state))


def test_without_features_the_loop_is_the_same(monkeypatch):
    arrays = jax.tree.map(
        jnp.asarray, processors.arrays(presence_penalty_B=np.full(1, 0.5, np.float32))
    )
    without = jaxpr(None)
    assert jaxpr(ProcessorArrays()) == without
    assert len(jaxpr(arrays)) > len(without)
    # It is what it would be if the function did not exist.
    monkeypatch.setattr(decode, "process", lambda arrays, logits_BTV, *_: logits_BTV)
    assert jaxpr(None) == without


# --- Values that cannot be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(presence_penalty=2.5), "presence_penalty must be in [-2, 2], got 2.5"),
        (dict(frequency_penalty=[0, -3]), "frequency_penalty must be in [-2, 2], got -3.0"),
        (dict(frequency_penalty="a"), "frequency_penalty must be a number, got 'a'"),
        (dict(repetition_penalty=0), "repetition_penalty must be in [1.2e-38, 3.4e38], got 0.0"),
        (dict(repetition_penalty=float("nan")), "repetition_penalty must be in"),
        (dict(repetition_penalty=[1, 1, 1]), "repetition_penalty has 3 values for 2 prompts"),
        (dict(min_tokens=-1), "min_tokens must be in [0, 2**31), got -1"),
        (dict(min_tokens=1.5), "min_tokens must be an integer, got 1.5"),
        (
            dict(min_tokens=[2, 5]),
            "prompt 1: min_tokens must be at most the 4 tokens that can be generated, got 5",
        ),
        (dict(logit_bias={8: 1}), "logit_bias has 8, but ids range from 0 to 7"),
        (dict(logit_bias={"1": 1}), "logit_bias has '1', but ids range from 0 to 7"),
        (dict(logit_bias={1: 101}), "logit_bias must be in [-100, 100], got 101 for token 1"),
        (dict(logit_bias={1: float("nan")}), "logit_bias must be in [-100, 100], got nan"),
        (dict(logit_bias={1: "a"}), "logit_bias must be in [-100, 100], got 'a'"),
        (dict(logit_bias=[{1: 1}]), "logit_bias has 1 maps for 2 prompts"),
        (dict(logit_bias=[1, 2]), "logit_bias must map token ids to numbers"),
        (dict(logit_bias=3), "logit_bias must map token ids to numbers"),
        (dict(allowed_token_ids=[]), "allowed_token_ids is empty; at least one id is required"),
        (dict(allowed_token_ids=[[1], []]), "allowed_token_ids is empty"),
        (dict(allowed_token_ids=[-1]), "allowed_token_ids has -1, but ids range from 0 to 7"),
        (dict(allowed_token_ids=[[1]]), "allowed_token_ids has 1 sets for 2 prompts"),
        (dict(allowed_token_ids=3), "allowed_token_ids must be a list of token ids"),
        (dict(bad_words=[[8]]), "bad_words has 8, but ids range from 0 to 7"),
        (dict(bad_words=[1, 2]), "bad_words must be a list of sequences of token ids"),
        (dict(bad_words="abc"), "bad_words must be a list of sequences of token ids"),
        (dict(bad_words=[[1], []]), "bad_words has an empty sequence"),
        (dict(bad_words=[[[1], 2], []]), "bad_words must be a list of sequences of token ids"),
        (dict(bad_words=[[[1]]]), "bad_words has 1 lists for 2 prompts"),
        (dict(bad_words=[[1]] * 129), "bad_words may have 128 sequences and 1024 tokens"),
        (dict(bad_words=[[1] * 1025]), "got 1 sequences and 1025 tokens"),
    ],
)
def test_values_that_cannot_be_are_refused(options, message):
    with pytest.raises(SpecJAXError) as error:
        arrays_of(options, vocab_size=10, num_valid_tokens=8)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words"])
def test_ids_need_a_vocabulary(name):
    with pytest.raises(SpecJAXError, match=f"{name} requires vocab_size"):
        arrays_of(FEATURES[name])


def arrays_of(options: dict, **vocabulary):
    """The processors of two prompts that may generate four tokens."""
    rows = batch.arrays(
        [[1], [1, 2]], max_length=[5, 6], sampling=SamplingOptions(**options), **vocabulary
    )
    return rows.request.processors


def test_values_become_arrays():
    """One value for all prompts or one per prompt; tables have few sizes."""
    got = arrays_of(
        dict(
            logit_bias=[{1: 2.5}, None],
            allowed_token_ids=[None, [1, 3]],
            bad_words=[[4], [5, 6]],
            min_tokens=[4, 0],
            repetition_penalty=1.5,
        ),
        vocab_size=10,
        num_valid_tokens=8,
    )
    inf = np.inf
    np.testing.assert_array_equal(got.bias_BV[0], [0, 2.5, 0, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(got.bias_BV[1], [-inf, 0, -inf, 0, *[-inf] * 6])
    assert got.bad_words_BWC.shape == (2, 8, 4)
    assert got.bad_words_BWC[1, :3].tolist() == [[-1, -1, -1, 4], [-1, -1, 5, 6], [-1] * 4]
    assert got.min_tokens_B.tolist() == [4, 0]
    assert got.repetition_penalty_B.tolist() == [1.5, 1.5]
    assert got.presence_penalty_B is None and got.frequency_penalty_B is None
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"float32", "int32"}
