"""`specjax bench`: the figures, their provenance, and errors."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.bench import costs, decode, gpu, paging, saturation
from specjax.cli import jsonl
from specjax.config import LlamaConfig
from specjax.drafters import registry
from specjax.engine import generate as generation
from specjax.engine.load import Model
from specjax.engine.metrics import Acceptance
from specjax.engine.setup import Setup, Speculation
from specjax.errors import SpecJAXError
from specjax.parallel import make_mesh, place
from support.cli import check_refused, write_model, write_prompts
from support.models import similar, tiny, tiny_head

TARGET = tiny(6)
MODEL = Model(TARGET.config, TARGET.params, None, (), "tiny")
SETUP = Setup(MODEL, page_size=4)
SHAPE = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(
        tmp_path / "prompts.jsonl",
        {"name": "greeting", "prompt": "hello", "domain": "prose"},
        {"prompt": "or", "domain": "code"},
        {"prompt": "hello hello world", "domain": "code"},
    )


def stats(rate, num_rounds, with_drafts):
    return Acceptance(0, num_rounds, with_drafts, np.nan, np.nan, rate, ())


def test_the_prediction_counts_rounds_without_drafts_as_plain_steps():
    cost = costs.Costs(plain_seconds=0.1, draft=0.05, verify=1.4, call_seconds=0.01)
    E = (1 - 0.6**4) / 0.4
    assert costs.predicted_speedup(stats(0.6, 10, 10), cost, 3) == pytest.approx(
        E / (3 * 0.05 + 1.4)
    )
    assert costs.predicted_speedup(stats(0.6, 10, 5), cost, 3) == pytest.approx(
        (E + 1) / (3 * 0.05 + 1.4 + 1)
    )
    assert costs.predicted_speedup(stats(np.nan, 10, 0), cost, 3) == 1


@pytest.mark.parametrize("name", ["ngram", "eagle", "draft_model"])
def test_costs_are_positive_and_finite_for_every_drafter(name):
    """Measures a plain step, a round with drafts that cost nothing, and one with the real
    drafter."""
    config, params = {"ngram": (None, None), "eagle": tiny_head(TARGET), "draft_model": similar(6)}[
        name
    ]
    drafter = registry.make(name, 3, TARGET.config, config)
    found = costs.measure(
        SETUP,
        3,
        [(drafter, params)],
        batch_size=2,
        length=9,
        temperature=1.0,
        repeats=2,
    )
    assert found.plain_seconds > 0 and found.verify > 0 and np.isfinite(found.draft)


def test_costs_are_in_plain_steps_and_add_up_over_drafters(monkeypatch):
    """Calls of 8 rounds: 8 s for plain decoding, so 1 s per step.

    A call of a single step takes 1.5 s, so a call costs 0.5 s.
    """
    ran = {}

    def interleaved(prepare, repeats):
        for function in prepare.values():
            ran[len(ran)] = np.asarray(function()().log.rounds_B).max()
        return dict(zip(prepare, (8.0, 1.5, 12.0, 14.4, 16.8), strict=True))

    monkeypatch.setattr(costs.timing, "interleaved", interleaved)
    parts = [
        (registry.make("ngram", 3, TARGET.config), None),
        (registry.make("ngram", 3, TARGET.config), None),
    ]
    found = costs.measure(
        SETUP,
        3,
        parts,
        batch_size=1,
        length=9,
        temperature=0.0,
        repeats=2,
    )
    assert dataclasses.astuple(found) == pytest.approx((1.0, (0.3 + 0.6) / 3, 1.5, 0.5))
    assert list(ran.values()) == [8, 1, 8, 8, 8]


def test_decode(command, folder, prompts, tmp_path):
    outcome = command(
        "bench",
        "decode",
        f"--target={folder}",
        f"--prompts_file={prompts}",
        "--max_new_tokens=12",
        "--drafter=ngram",
        "--drafter=draft_model",
        f"--draft={folder}",
        "--num_speculative_tokens=2",
        "--paging_length=20",
        f"--output={tmp_path / 'out.json'}",
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert "A step at 20 tokens: " in outcome.out and "real/pred" in outcome.out
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(row["domain"], row["drafter"], row["temperature"]) for row in result["rows"]] == [
        (domain, drafter, temperature)
        for temperature in (0, 1)
        for drafter in ("ngram", "draft_model")
        for domain in ("code", "prose")
    ]
    for row in result["rows"]:
        assert row["prompts"] == (2 if row["domain"] == "code" else 1)
        assert row["speedup"] == pytest.approx(row["speculative"] / row["plain"])
        if row["drafter"] == "draft_model" and row["temperature"] == 0:
            assert row["acceptance"] == 1 and row["by_position"] == [1, 1]  # it is the target
        assert row["num_speculative_tokens"] == 2
    assert {"versions", "device", "command"} <= result.keys()
    assert result["flags"]["seed"] == 0 and "numpy" in result["versions"]
    assert result["paging"]["length"] == 20


def test_the_cost_of_paging_is_timed_on_a_mesh():
    mesh = make_mesh(2, 2, 2)
    model = dataclasses.replace(MODEL, params=place(TARGET.params, mesh, "target"), mesh=mesh)
    assert all(0 < seconds < 5 for seconds in paging.cost(model, length=20, page_size=8, repeats=2))


def test_a_changed_greedy_text_stops_the_benchmark(monkeypatch):
    generate = generation.generate

    def wrong(target, drafter, prompts, **options):
        if drafter != "none":
            prompts = [[9, 9, 9]]
        return generate(target, drafter, prompts, **options)

    monkeypatch.setattr(generation, "generate", wrong)
    with pytest.raises(
        SpecJAXError, match="a prompt of code: speculation with ngram changed the greedy text"
    ):
        decode.measure(
            Setup(MODEL, page_size=8),
            [("code", (1, 2, 3))],
            {"ngram": Speculation("ngram", None, 2, {})},
            temperatures=[0.0],
            max_new_tokens=8,
            repeats=1,
        )


def test_saturation(command, folder, prompts, tmp_path):
    outcome = command(
        "bench",
        "saturation",
        f"--target={folder}",
        f"--prompts_file={prompts}",
        "--batch_sizes=1,4",
        "--draft_lengths=1,2",
        "--max_new_tokens=8",
        f"--plot={tmp_path / 'plot.png'}",
        f"--output={tmp_path / 'out.json'}",
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    points = json.loads((tmp_path / "out.json").read_text())["points"]
    assert [point["batch_size"] for point in points] == [1, 4]
    for point in points:
        rates = {int(k): rate for k, rate in point["speculative"].items()}
        assert set(rates) == {1, 2} and point["speedup"] == pytest.approx(
            max(rates.values()) / point["plain"]
        )


def test_every_batch_size_decodes_the_same_texts(monkeypatch):
    seen = []

    def record(target, drafter, prompts, **options):
        run = generate(target, drafter, prompts, **options)
        texts = [completion.tokens for completion in run.completions]
        K = options.get("num_speculative_tokens", 0)
        seen.append((K, prompts, options["seed"], texts))
        return run

    generate = generation.generate
    monkeypatch.setattr(generation, "generate", record)
    prompts = [(1, 2, 3), (4, 5), (6, 7, 8)]
    saturation.measure(
        Setup(MODEL, "coupled", page_size=8),
        prompts,
        Speculation("ngram", None, 1, {}),
        batch_sizes=[1, 2, 8],
        draft_lengths=[3],
        max_new_tokens=6,
        temperature=1.0,
        repeats=1,
    )
    assert [(k, len(texts)) for k, *_, texts in seen] == [
        (k, rows) for rows, calls in ((1, 3), (2, 2), (8, 1)) for _ in range(calls) for k in (0, 3)
    ]
    text = {}
    for _, *batch in seen:
        for prompt, seed, tokens in zip(*batch, strict=True):
            assert text.setdefault((prompt, seed), tokens) == tokens
    assert set(text) == {(prompt, i) for i, prompt in enumerate(prompts)}


def test_the_best_k_is_the_fastest_or_none():
    assert saturation.Point(1, 10.0, {1: 11.0, 3: 20.0, 5: 15.0}).best == 3
    assert saturation.Point(64, 30.0, {1: 29.0, 3: 20.0}).best == 0


def test_the_remaining_layers_lower_acceptance_as_they_are_scaled_up():
    """The draft model is the first layers. If the others add nothing, every draft is accepted."""
    biased = dataclasses.replace(SHAPE, attention_bias=True, mlp_bias=True)
    found = []
    for shape, epsilon in ((biased, 0.0), (SHAPE, 0.0), (SHAPE, 0.3), (SHAPE, 3.0)):
        target, draft = gpu.make_pair(shape, 2, 0, jnp.float32, epsilon)
        run = generation.generate(
            target,
            "draft_model",
            [[1, 2, 3]] * 8,
            draft=draft,
            num_speculative_tokens=2,
            temperature=1.0,
            seed=list(range(8)),
            max_new_tokens=40,
        )
        found.append(gpu.metrics.acceptance(run.completions, 2).rate)
    assert found[0] == found[1] == 1 and 1 > found[2] > found[3]


@pytest.mark.parametrize("wanted", [0.4, pytest.param(0.9, marks=pytest.mark.slow)])
def test_gpu_with_a_small_shape(command, tmp_path, wanted):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    outcome = command(
        "bench",
        "gpu",
        f"--target={tmp_path / 'shape'}",
        "--draft_layers=2",
        f"--acceptance={wanted}",
        "--num_speculative_tokens=2",
        "--max_speculative_tokens=2",
        "--batch_size=24",
        "--prompt_length=8",
        "--max_new_tokens=48",
        "--dtype=float32",
        "--repeats=1",
        "--copy_bytes=4096",
        f"--output={tmp_path / 'out.json'}",
    )
    assert (outcome.code, outcome.err) == (0, "")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["acceptance"] == pytest.approx(wanted, abs=0.05)
    assert (
        set(result["verify_by_k"]) == {"1", "2"}
        and result["plain"] > 0
        and result["copy_bandwidth"] > 0
    )
    assert "realised / predicted" in outcome.out


@pytest.fixture
def run_baselines(command, folder, prompts, tmp_path):
    """Runs `specjax bench baselines`; returns the outcome and the rows that it wrote."""

    def run(*arguments):
        output = tmp_path / "out.json"
        outcome = command(
            "bench",
            "baselines",
            f"--target={folder}",
            f"--prompts_file={prompts}",
            "--max_new_tokens=20",
            "--repeats=1",
            f"--output={output}",
            *arguments,
        )
        assert outcome.code == 0, outcome.err
        return outcome, json.loads(output.read_text())["rows"]

    return run


@pytest.mark.parametrize(
    "mesh", [(), ("--tensor_parallel=2", "--data_parallel=2")], ids=["one", "mesh"]
)
def test_baselines(run_baselines, mesh):
    outcome, rows = run_baselines(*mesh)
    assert outcome.err == ""
    assert [(row["name"], row["tokens"]) for row in rows] == [
        ("greeting", 20),
        ("prompt 1", 20),
        ("prompt 2", 20),
    ]
    assert all(min(row["plain"], row["speculative"], row["roofline"]) > 0 for row in rows)


def test_baselines_with_transformers(run_baselines):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    _, rows = run_baselines("--baselines=transformers,transformers_lookup")
    assert all(set(row["baselines"]) == {"transformers", "transformers_lookup"} for row in rows)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["baselines", "--baselines=vllm"], ["unknown baseline 'vllm'; choose from transformers"]),
        (["decode", "--temperatures=hot"], ["--temperatures must be numbers"]),
        (["decode", "--temperatures=-1"], ["--temperatures must be finite and at least 0"]),
        (["decode", "--temperatures=nan"], ["--temperatures must be finite and at least 0"]),
        (["decode", "--drafter=none"], ["--drafter=none"]),
        (["decode", "--drafter=eagle", "--drafter=draft_model"], ["only one can be given"]),
        (
            ["decode", "--drafter=ngram", "--repeats=0"],
            ["--repeats=0: 0 is not a positive integer"],
        ),
        (
            ["decode", "--drafter=ngram", "--num_speculative_tokens=0"],
            ["--num_speculative_tokens=0: 0 is not an integer in the range [1, 128]"],
        ),
        (
            ["decode", "--drafter=ngram", "--draft=x"],
            ["--draft=x", "ngram uses no draft model and no head"],
        ),
        (["decode", "--drafter=ngram", "--drafter_options=min_n=9"], ["min_n=9"]),
        (
            ["decode", "--drafter=ngram", "--drafter=eagle", "--drafter_options=min_n=1"],
            ["--drafter_options apply to one --drafter"],
        ),
        (["saturation", "--plot=x.jpg"], ["--plot=x.jpg must end in .png"]),
        (
            ["baselines", "--gguf=x.gguf"],
            ["--gguf=x.gguf applies to llama.cpp only, which --baselines does not name"],
        ),
        (["baselines", "--threads=1"], ["--threads applies to the engines of --baselines"]),
        (
            ["baselines", "--baselines=transformers", "--max_new_tokens=1"],
            ["--max_new_tokens must be at least 2"],
        ),
        (["gpu", "--acceptance=1.5"], ["the wanted acceptance must be between 0 and 1, got 1.5"]),
        (["gpu", "--max_new_tokens=99999"], ["beyond the context of the target"]),
        (["saturation", "--batch_sizes=0,1"], ["--batch_sizes must be finite and at least 1"]),
        (["saturation", "--drafter=none"], ["--drafter=none"]),
        (
            ["gpu", "--draft_layers=4", "--prompt_length=8", "--max_new_tokens=8"],
            ["1 to 3 of the target's layers, got 4"],
        ),
    ],
)
def test_invalid_arguments_are_rejected(command, folder, prompts, tmp_path, arguments, parts):
    shape = write_model(tmp_path / "shape", num_hidden_layers=4)
    extra = [f"--target={shape}", f"--output={tmp_path / 'new.json'}"]
    if arguments[0] != "gpu":
        extra.append(f"--prompts_file={prompts}")
    check_refused(command("bench", *arguments, *extra), *parts)
    assert not (tmp_path / "new.json").exists()


def test_prompts_without_a_domain_are_rejected(command, folder, tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", {"prompt": "hello"})
    check_refused(
        command(
            "bench", "decode", f"--target={folder}", "--drafter=ngram", f"--prompts_file={path}"
        ),
        f"{path}, line 1: the prompt has no 'domain'",
    )


def test_the_bundled_prompts_have_four_domains():
    rows = jsonl.read_prompts(str(decode.PROMPTS))
    counts = dict.fromkeys(decode.PUBLIC, 0)
    for row in rows:
        counts[row["domain"]] += 1
    assert all(count >= 12 for count in counts.values()) and sum(counts.values()) == len(rows)
    assert len({json.dumps(row["prompt"]) for row in rows}) == len(rows)
