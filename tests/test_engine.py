"""The engine: every request gets the text that it would get alone, whatever else runs."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pathlib
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import parallel
from specjax.drafters import registry
from specjax.engine import engine as engine_module
from specjax.engine import load, programs, runner
from specjax.engine.engine import Engine
from specjax.engine.load import Model
from specjax.engine.request import RequestOutputKind, SamplingParams
from specjax.errors import SpecJAXError
from support import loop
from support.models import full_logits, make_drafter, tiny

TARGET, DRAFT = tiny(1), tiny(2)
MODEL = Model(TARGET.config, TARGET.params, None, (), "tiny")
GOLDEN = pathlib.Path(__file__).parent / "golden" / "llama"
NAMES = ["none", *registry.names(), "ngram,eagle", "ngram,draft_model"]
V, PAGE, LENGTH, K = TARGET.config.vocab_size, 4, 64, 3


def make_engine(name="none", model=MODEL, **options) -> Engine:
    drafter, params = (None, None)
    if name != "none":
        drafter, params = make_drafter(name, K, TARGET, DRAFT)
    defaults = dict(
        verify="coupled",
        page_size=PAGE,
        max_model_len=LENGTH,
        max_num_seqs=4,
        num_pages=64,
        chunk_sizes=(8, 16),
    )
    return Engine(model, drafter, params, **{**defaults, **options})


def outputs(engine: Engine) -> dict:
    """Runs the engine to the end; returns the last output of each request."""
    last = {}
    while engine.has_unfinished:
        for output in engine.step():
            last[output.request_id] = output
    check_is_empty(engine)
    return last


def check_is_empty(engine: Engine) -> None:
    """No request is left, and every page is free or cached."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    for pool in engine._pools:
        pool.check()


def alone(prompt, max_tokens: int, temperature=0.0, seed=0) -> list[int]:
    """The text of plain decoding, by the functional API."""
    result = loop.run(
        TARGET,
        [prompt],
        max_new=max_tokens,
        temperature=temperature,
        seed=seed,
        capacity=LENGTH,
    )
    return result.emitted[0]


def tokens(output) -> list[int]:
    return list(output.outputs[0].token_ids)


# --- Random schedules -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request of a random schedule, and when it comes and perhaps goes."""

    shared: int
    own: tuple[int, ...]
    max_tokens: int
    temperature: float
    arrival: int
    abort_after: int | None


SHARED = np.random.default_rng(0).integers(0, V, 24).tolist()
WISHES = st.builds(
    Wish,
    shared=st.sampled_from([0, 0, 9, 16]),
    own=st.lists(st.integers(0, V - 1), min_size=1, max_size=8).map(tuple),
    max_tokens=st.sampled_from([1, 5, 30, 30]),
    temperature=st.sampled_from([0.0, 0.8]),
    arrival=st.integers(0, 6),
    abort_after=st.sampled_from([None, None, None, 0, 2]),
)


@pytest.fixture(scope="module")
def engines():
    """One engine for each drafter, with few pages: 15 hold the longest request, and no other."""
    made = {}
    for name in NAMES:
        made[name] = make_engine(name, num_pages=15)
        made[name]._runner._buckets = (4,)  # for all numbers of rows, to compile less
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_request_has_its_own_text_in_every_schedule(engines, name):
    """Arrivals, aborts, preemptions and shared prefixes, with pages for a few requests at most."""
    engine = engines[name]

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(wishes=st.lists(WISHES, min_size=5, max_size=9))
    def check(wishes):
        finished = run_schedule(engine, wishes)
        for index, wish in enumerate(wishes):
            if index in finished:
                prompt = [*SHARED[: wish.shared], *wish.own]
                expected = alone(prompt, wish.max_tokens, wish.temperature, seed=index)
                assert tokens(finished[index]) == expected
            else:
                assert wish.abort_after is not None

    check()
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_hit_tokens > 0


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_sampled_texts_with_rejection_are_those_of_the_functional_api(name):
    engine = make_engine(name, verify="rejection")
    for i in range(6):
        params = SamplingParams(temperature=0.9, seed=i, max_tokens=14, ignore_eos=True)
        engine.submit(SHARED[: 9 + i], params, request_id=str(i))
    found = outputs(engine)
    drafter, draft_params = make_drafter(name, K, TARGET, DRAFT)
    for i in range(6):
        result = loop.run(
            TARGET,
            [SHARED[: 9 + i]],
            drafter=drafter,
            draft_params=draft_params,
            verify="rejection",
            max_new=14,
            temperature=0.9,
            seed=i,
            capacity=LENGTH,
        )
        assert tokens(found[str(i)]) == result.emitted[0]


def run_schedule(engine: Engine, wishes) -> dict:
    """Returns the final outputs by index; requests that were aborted in time have none."""
    finished, time = {}, 0
    to_come = sorted(range(len(wishes)), key=lambda i: wishes[i].arrival)
    while to_come or engine.has_unfinished:
        while to_come and wishes[to_come[0]].arrival <= time:
            index = to_come.pop(0)
            wish = wishes[index]
            params = SamplingParams(
                temperature=wish.temperature,
                seed=index,
                max_tokens=wish.max_tokens,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = [*SHARED[: wish.shared], *wish.own]
            engine.submit(prompt, params, request_id=str(index))
        for index, wish in enumerate(wishes):
            if wish.abort_after is not None and time == wish.arrival + wish.abort_after:
                engine.abort(str(index))
        for output in engine.step():
            finished[int(output.request_id)] = output
        time += 1
    check_is_empty(engine)
    return finished


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("draft_model", 300),
        ("ngram,eagle", 300),
        pytest.param("ngram", 10_000, marks=pytest.mark.slow),
    ],
)
def test_many_short_requests_leave_nothing_behind(engines, name, number):
    engine = engines[name]
    num_objects = []
    for start in range(0, number, 50):
        for i in range(start, start + 50):
            prompt = [i % V, i // V % V, 1, 2]
            engine.submit(prompt, SamplingParams(temperature=0, max_tokens=1 + i % 3))
        assert len(outputs(engine)) == 50
        if start % 100 == 0:
            gc.collect()
            num_objects.append(len(gc.get_objects()))
    assert not engine._requests and not engine._clients
    assert num_objects[-1] <= 1.01 * num_objects[1]


# --- Pages ----------------------------------------------------------------------------------------


def test_a_request_that_the_pages_never_hold_is_refused():
    engine = make_engine("draft_model", num_pages=8)
    with pytest.raises(SpecJAXError, match="needs 9 pages of 4 positions, but the cache has 8"):
        engine.submit([1] * 20, SamplingParams(max_tokens=14))
    engine.submit([1] * 20, SamplingParams(temperature=0, max_tokens=10))
    outputs(engine)


def test_pages_that_are_too_few_for_all_finish_all():
    prompts = [[i] * 12 for i in range(6)]
    engine = make_engine("draft_model", num_pages=12)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(temperature=0, max_tokens=20))
    got = [tokens(output) for output in outputs(engine).values()]
    assert sorted(got) == sorted(alone(prompt, 20) for prompt in prompts)
    assert engine.stats().num_preemptions > 0


# --- Exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("program", ["admit_jit", "prefill_jit", "rounds_jit"])
def test_an_exception_in_a_step_loses_no_request_and_no_page(monkeypatch, program, is_before):
    """What was planned may not have been done: neither pages nor tokens may be taken for there."""
    engine = make_engine("draft_model")
    real, left = getattr(programs, program), [2]

    def fails_at_its_second_call(*arguments):
        left[0] -= 1
        if left[0] == 0 and is_before:
            raise KeyboardInterrupt
        result = real(*arguments)
        if left[0] == 0:
            raise KeyboardInterrupt  # and its donated arguments are gone
        return result

    monkeypatch.setattr(programs, program, fails_at_its_second_call)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for i in range(6):
        engine.submit([*SHARED[:17], i], params, request_id=str(i))
    found, failures = {}, 0
    while engine.has_unfinished:
        try:
            for output in engine.step():
                found[int(output.request_id)] = tokens(output)
        except KeyboardInterrupt:
            failures += 1
    assert failures == 1
    assert found == {i: alone([*SHARED[:17], i], 9) for i in range(6)}
    check_is_empty(engine)


def test_an_exception_of_a_client_keeps_no_output_from_the_others():
    engine = make_engine()
    left = [1]

    def fails_once(output):
        if output.finished and left.pop():
            raise RuntimeError("a client")

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.submit(SHARED[:5], params, on_output=fails_once)
    engine.submit(SHARED[:6], params, request_id="other")
    found = {}
    while engine.has_unfinished:
        with contextlib.suppress(RuntimeError):
            found |= {output.request_id: tokens(output) for output in engine.step()}
    assert not left and found == {"other": alone(SHARED[:6], 4)}
    check_is_empty(engine)


def test_a_request_that_cannot_begin_is_dropped(monkeypatch):
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for i in range(3):
        engine.submit(SHARED[: 5 + i], params, request_id=str(i))
    real = engine_module.TextBuilder

    def fails_for_one(tokenizer, params, stop_ids, prompt_ids):
        if len(prompt_ids) == 6:
            raise KeyboardInterrupt
        return real(tokenizer, params, stop_ids, prompt_ids)

    monkeypatch.setattr(engine_module, "TextBuilder", fails_for_one)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert sorted(outputs(engine)) == ["0", "2"]


def test_deltas_hold_the_completions_with_news():
    """A completion that has ended is in one delta more, and not in those after it."""
    engine = make_engine(seconds_per_call=0.0)
    params = SamplingParams(
        temperature=1.0, n=3, seed=1, max_tokens=12, output_kind=RequestOutputKind.DELTA, logprobs=1
    )
    eos_ids = tuple(range(0, V, 2))
    engine.target = dataclasses.replace(engine.target, eos_ids=eos_ids)
    engine.submit(SHARED[:5], params)
    ends, ids, sums = [], {0: [], 1: [], 2: []}, {}
    while engine.has_unfinished:
        for output in engine.step():
            for completion in output.outputs:
                assert completion.token_ids or completion.finish_reason
                ids[completion.index] += completion.token_ids
                chosen = zip(completion.token_ids, completion.logprobs, strict=True)
                new = sum(entries[token_id].logprob for token_id, entries in chosen)
                sums[completion.index] = sums.get(completion.index, 0) + new
                assert completion.cumulative_logprob == pytest.approx(sums[completion.index])
                if completion.finish_reason:
                    ends.append(completion.index)
    assert sorted(ends) == [0, 1, 2] and len(set(map(len, ids.values()))) > 1
    whole = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.submit(SHARED[:5], whole, request_id="whole")
    completions = outputs(engine)["whole"].outputs
    assert [list(completion.token_ids) for completion in completions] == list(ids.values())


# --- Shared prefixes ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "ngram", "eagle", "draft_model"])
def test_a_prefix_is_read_once(name):
    """A hit changes neither the text nor the acceptance."""
    rng = np.random.default_rng(3)
    prefix, params = rng.integers(0, V, 33).tolist(), SamplingParams(temperature=0, max_tokens=12)
    cold, warm = (make_engine(name) for _ in range(2))
    warm.submit([*prefix, 1], params)
    outputs(warm)
    results = []
    for engine in (cold, warm):
        engine.submit([*prefix, 2], params)
        (output,) = outputs(engine).values()
        results.append(output)
    assert [result.num_cached_tokens for result in results] == [0, 32]
    assert tokens(results[0]) == tokens(results[1]) == alone([*prefix, 2], 12)
    assert results[0].outputs[0].accepted == results[1].outputs[0].accepted


def test_a_whole_prompt_that_is_known_is_not_read(monkeypatch):
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.submit(SHARED[:17], params)
    expected = [tokens(output) for output in outputs(engine).values()]
    monkeypatch.setattr(programs, "prefill_jit", None)
    engine.submit(SHARED[:17], params)
    assert [tokens(output) for output in outputs(engine).values()] == expected


def test_salts_keep_requests_apart():
    engine = make_engine()
    found = []
    for salt in (b"a", b"b", b"a"):
        engine.submit(SHARED, SamplingParams(temperature=0, max_tokens=1), salt=salt)
        (output,) = outputs(engine).values()
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 20]


def test_completions_of_a_request_share_its_prompt():
    engine = make_engine()
    engine.submit(SHARED, SamplingParams(temperature=0.8, n=3, seed=5, max_tokens=6))
    (output,) = outputs(engine).values()
    assert [tuple(completion.token_ids) for completion in output.outputs] == [
        tuple(alone(SHARED, 6, 0.8, seed)) for seed in (5, 6, 7)
    ]
    assert engine.stats().num_hit_tokens == 2 * 20


# --- The end of a completion ----------------------------------------------------------------------


def test_stop_ids_and_budgets():
    text = alone([3, 1, 4], 12)
    stop = text[5]
    index = text.index(stop)
    engine = make_engine("ngram", model=dataclasses.replace(MODEL, eos_ids=(stop,)))
    cases = {
        "eos": (SamplingParams(temperature=0, max_tokens=12), "stop", None, index + 1),
        "ignored": (
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            "length",
            None,
            12,
        ),
        "id": (
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]),
            "stop",
            stop,
            index + 1,
        ),
        "context": (
            SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
            "length",
            None,
            61,
        ),
    }
    for name, (params, *_) in cases.items():
        engine.submit([3, 1, 4], params, request_id=name)
    for name, output in outputs(engine).items():
        (completion,) = output.outputs
        found = completion.finish_reason, completion.stop_reason, len(completion.token_ids)
        assert found == cases[name][1:], name
        assert list(completion.token_ids[:12]) == text[: min(12, found[2])]


def test_a_row_with_unusable_logits_ends_alone():
    params = dict(TARGET.params)
    params["embed_VD"] = params["embed_VD"].at[7].set(np.nan)
    engine = make_engine(model=dataclasses.replace(MODEL, params=params, config=TARGET.config))
    engine.submit([1, 7], SamplingParams(temperature=0, max_tokens=4), request_id="bad")
    assert outputs(engine)["bad"].outputs[0].finish_reason == "error"


@pytest.mark.parametrize("name", ["none", "draft_model"])
def test_processors_and_plain_requests_run_side_by_side(name):
    """Requests with and without processors have the texts that they have alone."""
    engine = make_engine(name)
    wishes = [
        SamplingParams(temperature=0, max_tokens=10),
        SamplingParams(temperature=0, max_tokens=10, repetition_penalty=50.0),
        SamplingParams(temperature=0.8, seed=4, max_tokens=10, allowed_token_ids=[1, 2, 3]),
        SamplingParams(temperature=0.8, seed=4, max_tokens=10),
        SamplingParams(temperature=0, max_tokens=10, logit_bias={5: 100.0}),
    ]
    for index, params in enumerate(wishes):
        engine.submit([3, 1, 4], params, request_id=str(index))
    together = {key: tokens(output) for key, output in outputs(engine).items()}
    for index, params in enumerate(wishes):
        engine.submit([3, 1, 4], params, request_id=str(index))
        assert tokens(outputs(engine)[str(index)]) == together[str(index)]
    assert together["0"] == alone([3, 1, 4], 10) != together["1"]
    assert set(together["2"]) <= {1, 2, 3}
    assert together["3"] == alone([3, 1, 4], 10, 0.8, 4)
    assert together["4"] == [5] * 10


# --- Log-probabilities ----------------------------------------------------------------------------


def check_entries(entries: dict, token: int, logprobs_V, num_top: int) -> None:
    """Those of the token itself, and of the most likely ones."""
    order = np.argsort(-logprobs_V, kind="stable")
    assert set(entries) == {token, *order[:num_top].tolist()}
    for token_id, entry in entries.items():
        assert entry.logprob == pytest.approx(logprobs_V[token_id], abs=1e-5)
        assert entry.rank == list(order).index(token_id) + 1


@pytest.mark.parametrize("name", ["none", "ngram,eagle", "draft_model"])
def test_log_probabilities_are_those_of_the_target(name):
    """Of prompts and outputs, whatever changes the logits before sampling, also beside requests
    without."""
    engine = make_engine(name, chunk_sizes=(16,))
    prompt = SHARED[:20]
    options = dict(max_tokens=12, temperature=0.7, top_k=5, seed=3, frequency_penalty=0.5)
    wishes = [
        SamplingParams(logprobs=2, prompt_logprobs=1, **options),
        SamplingParams(logprobs=0, **options),
        SamplingParams(**options),
    ]
    for index, params in enumerate(wishes):
        engine.submit(prompt, params, request_id=str(index))
    got = outputs(engine)
    (first,), (second,), (third,) = (got[str(i)].outputs for i in range(3))
    assert first.token_ids == second.token_ids == third.token_ids
    assert third.logprobs is None and third.cumulative_logprob is None
    text = [*prompt, *first.token_ids]
    logprobs_SV = np.asarray(jax.nn.log_softmax(full_logits(TARGET, [text])[0]))
    for i, token in enumerate(first.token_ids):
        check_entries(first.logprobs[i], token, logprobs_SV[19 + i], 2)
        check_entries(second.logprobs[i], token, logprobs_SV[19 + i], 0)
    expected = sum(logprobs_SV[19 + i, token] for i, token in enumerate(first.token_ids))
    assert first.cumulative_logprob == pytest.approx(expected, abs=1e-4)
    assert got["0"].prompt_logprobs[0] is None and got["1"].prompt_logprobs is None
    assert len(got["0"].prompt_logprobs) == 20
    for i, entries in enumerate(got["0"].prompt_logprobs[1:], 1):
        check_entries(entries, prompt[i], logprobs_SV[i - 1], 1)


@pytest.mark.parametrize("case", ["gqa", "rope_llama3"])
def test_log_probabilities_are_those_of_transformers(case):
    """Golden logits of Hugging Face transformers, see `test_llama.py`."""
    model = load.load(GOLDEN / case, dtype="float32")
    golden = np.load(GOLDEN / case / "golden.npz")
    prompt = golden["tokens_BT"][0].tolist()
    engine = Engine(model, page_size=PAGE, max_num_seqs=1, max_model_len=len(prompt) + 1)
    engine.submit(
        prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=0)
    )
    (output,) = outputs(engine).values()
    (completion,) = output.outputs
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    logprobs_TV = np.asarray(jax.nn.log_softmax(golden["logits_BTV"][0]))
    for i, token in enumerate([*prompt[1:], *completion.token_ids]):
        assert entries[i][token].logprob == pytest.approx(logprobs_TV[i, token], abs=1e-4)


# --- Calls ----------------------------------------------------------------------------------------


def submit_a_mix(engine: Engine) -> None:
    """Submits and runs one, two, then three requests: greedy, sampled, and with a penalty."""
    for number in (1, 2, 3):
        for i in range(number):
            params = SamplingParams(
                temperature=[0, 0.7][i % 2],
                top_p=0.9,
                presence_penalty=[0, 0, 1.0][i],
                max_tokens=9,
            )
            engine.submit(SHARED[: 5 + 9 * i], params)
        outputs(engine)


def committed(model):
    """The model as `specjax.load` returns it: with parameters committed to a device."""
    return dataclasses.replace(model, params=jax.device_put(model.params, jax.devices()[0]))


def test_nothing_compiles_after_warm_up():
    engine = make_engine("ngram", model=committed(MODEL), max_num_seqs=2)
    first, rest = engine._runner.variants(has_processors=True)
    with loop.compilations() as compiled:
        engine.warm_up(wait=False)
        while not engine.is_warm:
            time.sleep(0.01)
    # Each program once, and a few small ones that are run on the way.
    num_programs = len(first + rest) + len(engine._runner._chunk_sizes)
    assert num_programs <= len(compiled) <= num_programs + 3
    with loop.compilations() as compiled:
        submit_a_mix(engine)
        engine.warm_up()
    assert not compiled
    engine.close()


def test_no_program_is_compiled_twice():
    """The state is of one kind before and after a program, with committed parameters too."""
    engine = make_engine(model=committed(MODEL), max_num_seqs=1, chunk_sizes=(8,))
    engine.submit(SHARED[:5], SamplingParams(temperature=0, max_tokens=2))
    outputs(engine)
    with loop.compilations() as compiled:
        engine.submit(SHARED[3:9], SamplingParams(temperature=0, max_tokens=2))
        outputs(engine)
    assert not compiled


def test_a_program_with_fewer_rows_is_compiled_after_many_rounds():
    engine = make_engine(max_num_seqs=4, chunk_sizes=(16,))
    engine._runner._max_oversized_rounds = 16
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for i in range(3):
        engine.submit(SHARED[i : i + 5], params)
    outputs(engine)
    assert {variant.num_rows for variant in engine._runner._compiled} == {4}
    engine.submit(SHARED[:5], params)
    outputs(engine)
    assert {variant.num_rows for variant in engine._runner._compiled} == {4}
    for _ in range(4):
        engine.submit(SHARED[:5], params)
        outputs(engine)
    assert {variant.num_rows for variant in engine._runner._compiled} == {4, 1}


def test_rounds_of_a_call_follow_its_seconds():
    engine = make_engine(seconds_per_call=0.5)
    assert engine._max_rounds() == 1  # nothing is known yet
    found = []
    for seconds in (1.0, 0.3, 0.1, 1e-4):
        engine._seconds_per_round = seconds
        found.append(engine._max_rounds())
    assert found == [1, 2, 5, runner.MAX_ROUNDS]


def test_one_call_is_in_flight_while_the_next_is_planned():
    engine = make_engine(seconds_per_call=1e-9)
    engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=8))
    assert [len(engine.step()) for _ in range(3)] == [0, 1, 1]
    assert len(engine._calls) == 1
    outputs(engine)


def test_ids_in_use_and_prompts_that_do_not_fit_are_refused():
    engine = make_engine()
    engine.submit([1], SamplingParams(max_tokens=1), request_id="a")
    cases = [
        ([1], dict(request_id="a"), "request id 'a' is in use"),
        ([], {}, "the prompt is empty"),
        ([V], {}, f"has {V}, but ids range from 0 to {V - 1}"),
        ([1] * LENGTH, {}, f"has {LENGTH} tokens, but at most {LENGTH - 1} fit"),
    ]
    for prompt, options, message in cases:
        with pytest.raises(SpecJAXError, match=message):
            engine.submit(prompt, SamplingParams(), **options)
    with pytest.raises(SpecJAXError, match="stop needs a tokenizer, but tiny has none"):
        engine.submit([1], SamplingParams(stop="x"))
    outputs(engine)


def test_tables_that_are_cut_change_no_text(monkeypatch):
    """As on a GPU without our kernels, where attention costs what the table has room for."""
    engine, widths, rounds = make_engine(), [], programs.rounds_jit

    def recorded(*arguments):
        widths.append(arguments[4].block_table_BX.shape[1])
        return rounds(*arguments)

    monkeypatch.setattr(programs, "rounds_jit", recorded)
    engine._runner._cuts_tables = True
    engine._runner._buckets = (1,)
    prompts = [SHARED[:4], SHARED[:20]]
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(temperature=0, max_tokens=4))
        assert tokens(*outputs(engine).values()) == alone(prompt, 4)
    assert set(widths) == {1, 2, 8}


# --- Meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "degrees"), [("draft_model", (2, 2, 2)), ("eagle", (1, 1, 2))])
def test_replicas_have_rows_and_pages_of_their_own(name, degrees):
    """Degrees are those of the target, of the draft model, and of the data-parallel replicas."""
    mesh = parallel.make_mesh(*degrees)
    drafter, params = make_drafter(name, K, TARGET, DRAFT)
    target = parallel.place(TARGET.params, mesh, "target")
    model = dataclasses.replace(MODEL, params=target, mesh=mesh)
    engine = Engine(
        model,
        drafter,
        parallel.place(params, mesh, "draft"),
        verify="coupled",
        page_size=PAGE,
        max_model_len=LENGTH,
        max_num_seqs=4,
        num_pages=15,
        chunk_sizes=(16,),
    )
    engine._runner._buckets = (2,)
    prompts = [SHARED[: 3 * i + 1] for i in range(7)]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.8, seed=index, max_tokens=20)
        engine.submit(prompt, params, request_id=str(index))
    used = [0, 0]
    got = {}
    while engine.has_unfinished:
        for output in engine.step():
            got[int(output.request_id)] = tokens(output)
        for replica, pool in enumerate(engine._pools):
            used[replica] = max(used[replica], pool.num_referenced)
    check_is_empty(engine)
    assert min(used) > 5
    for index, prompt in enumerate(prompts):
        assert got[index] == alone(prompt, 20, 0.8, index)


# --- Compiled programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "ngram,eagle", "draft_model"])
def test_the_compiled_rounds_copy_no_pool_and_leave_the_host_alone(name):
    engine = make_engine(name)
    variant = runner.Variant(2, is_greedy=False)
    arguments = engine._runner._round_arguments(variant, engine._runner._no_pages(2), limits=(1, 0))
    text = programs.rounds_jit.lower(*arguments).compile().as_text()
    pool = "f32[" + ",".join(map(str, engine._runner._state.cache.k_PKZH[0].shape)) + "]"
    assert pool in text
    for line in text.splitlines():
        instruction = line.split(" = ")[-1]
        assert not (instruction.startswith(pool) and " copy(" in line), line
        assert "outfeed" not in line and "infeed" not in line and "callback" not in line, line
