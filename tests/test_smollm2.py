"""SmolLM2-135M-Instruct: token ids and texts equal those of transformers.

tests/golden/make_smollm2_goldens.py makes the golden files.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import specjax
from specjax.checkpoints_convert import eagle as heads
from specjax.engine import load as checkpoint
from support import xla

PATH = os.environ.get("SPECJAX_TEST_MODEL")
pytestmark = pytest.mark.skipif(
    not PATH, reason="SPECJAX_TEST_MODEL names no converted SmolLM2 (make test sets it)"
)
GOLDEN = pathlib.Path(__file__).parent / "golden"
GREEDY = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
NUM_TOKENS, NUM_SAMPLED = 48, 16
# By drafter and verification method: tokens per prompt. A run takes half a minute of one core.
RUNS = {
    "none, rejection": NUM_TOKENS,
    "eagle, rejection": NUM_TOKENS,
    "ngram, coupled": NUM_TOKENS,
}


def generate() -> dict:
    """Completions of the five golden prompts, greedy, and of the first prompt, sampled.

    One batch for all: to compile thirty layers takes longer than to run them.
    """
    model = specjax.load(PATH)
    prompts = [row["prompt_ids"] for row in GREEDY] + [GREEDY[0]["prompt_ids"]]
    head, results = specjax.load_drafter("eagle", None, model), {}
    for run, budget in RUNS.items():
        drafter, verify = run.split(", ")
        completions = specjax.generate(
            model,
            drafter,
            prompts,
            draft=head if "eagle" in drafter else None,
            verify=verify,
            num_speculative_tokens=None if drafter == "none" else 7,
            max_new_tokens=[budget] * 5 + [NUM_SAMPLED],
            eos_ids=(),
            temperature=[0.0] * 5 + [1.0],
            seed=11,
        ).completions
        results[run] = [{"tokens": c.tokens, "accepted": c.accepted} for c in completions]
    return results


@pytest.fixture(scope="module")
def runs():
    """The output of `generate` in a subprocess, whose flags are faster for thirty layers than those
    of this process: the fusion emitters of XLA's default stay."""
    environment = os.environ | {"XLA_FLAGS": " ".join(xla.QUICK_CODEGEN)}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def opened():
    return checkpoint.open_source(PATH)


def test_token_ids_are_those_of_the_models_own_tokenizer(opened):
    rows = json.loads((GOLDEN / "smollm2_tokens.json").read_text())
    assert len(rows) == 200
    different = [row["text"] for row in rows if opened.tokenizer.encode(row["text"]) != row["ids"]]
    assert not different


@pytest.mark.parametrize("run", RUNS)
def test_greedy_text_is_that_of_transformers(runs, run):
    length = RUNS[run]
    assert len(GREEDY) == 5
    for row, completion in zip(GREEDY, runs[run][:5], strict=True):
        assert len(row["generated_ids"]) == NUM_TOKENS
        assert completion["tokens"] == row["generated_ids"][:length], row["name"]
    most = max(sum(completion["accepted"]) for completion in runs[run][:5])
    assert most == 0 if run.startswith("none") else most >= length // 2, (
        "too few drafts were accepted"
    )


def test_the_bundled_head_is_small_and_its_drafts_are_often_accepted(opened, runs):
    folder = heads.bundled(opened.config)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16e6
    completions = runs["eagle, rejection"][:5]
    assert (
        sum(len(c["tokens"]) for c in completions) / sum(len(c["accepted"]) for c in completions)
        > 1.75
    )  # tokens per round


def test_the_models_end_of_sequence_token_ends_its_text(opened, runs):
    """The `text` of a golden ends at an end-of-sequence token."""
    for row, completion in zip(GREEDY, runs["none, rejection"], strict=False):
        tokens = completion["tokens"]
        end = next((i for i, token in enumerate(tokens) if token in opened.eos_ids), len(tokens))
        assert opened.tokenizer.decode(tokens[:end]) == row["text"], row["name"]


def test_coupled_text_is_that_of_plain_sampling(runs):
    plain, coupled = runs["none, rejection"][5], runs["ngram, coupled"][5]
    assert len(plain["tokens"]) == NUM_SAMPLED
    assert (
        coupled["tokens"] == plain["tokens"] != runs["none, rejection"][0]["tokens"][:NUM_SAMPLED]
    )


if __name__ == "__main__":
    print(json.dumps(generate()))
