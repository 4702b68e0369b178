"""`specjax generate --prompts_file --output --resume`: many prompts, and runs that were killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from support.cli import check_refused, write_model, write_prompts

NUM_PROMPTS = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "target"
    write_model(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts that differ, some with budgets of their own."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"he {i}", "max_new_tokens": 1 + i % 3} for i in range(NUM_PROMPTS)]
    write_prompts(path, *rows)
    return path


def arguments(model, prompts, output, *more) -> list[str]:
    return [
        "generate",
        f"--target={model}",
        "--drafter=none",
        f"--prompts_file={prompts}",
        f"--output={output}",
        "--ignore_eos",
        *more,
    ]


@pytest.fixture(scope="module")
def whole(model, prompts, tmp_path_factory) -> list[str]:
    """The lines of a run of all prompts, which was killed and resumed."""
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    script = "import sys; from specjax.cli import main; sys.exit(main.main(sys.argv))"
    command = [sys.executable, "-c", script, *arguments(model, prompts, output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not output.exists() or output.read_bytes().count(b"\n") < 50:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = output.read_bytes()
    assert 50 <= killed.count(b"\n") < NUM_PROMPTS
    output.write_bytes(killed + b'{"index": 9')  # as if the kill had cut a line
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    assert set(killed.splitlines()) <= set(output.read_bytes().splitlines())
    return output.read_text().splitlines()


def test_a_killed_run_is_resumed_and_every_prompt_has_one_line(whole):
    rows = [json.loads(line) for line in whole]
    assert [row["index"] for row in rows] == list(range(NUM_PROMPTS))
    assert [row["prompt"] for row in rows] == [f"he {i}" for i in range(NUM_PROMPTS)]
    assert [len(row["tokens"]) for row in rows] == [1 + i % 3 for i in range(NUM_PROMPTS)]


def test_a_resumed_run_writes_what_a_whole_run_writes(command, model, prompts, whole, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(prompts.read_text().splitlines(keepends=True)[:20]))
    outcome = command(*arguments(model, few, tmp_path / "out.jsonl", "--max_num_seqs=3"))
    assert (outcome.code, outcome.err) == (0, "")
    assert (tmp_path / "out.jsonl").read_text().splitlines() == whole[:20]
    again = command(*arguments(model, few, tmp_path / "out.jsonl", "--resume"))
    assert (again.code, again.out.splitlines()[-1][:27]) == (0, "All 20 prompts are finished")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "other"}, ["has another prompt than prompt 0", "'he 0', not 'other'"]),
        ({"max_new_tokens": 9}, ["has another options than prompt 0"]),
    ],
)
def test_lines_of_other_prompts_or_options_are_refused(
    command, model, whole, tmp_path, change, words
):
    output = tmp_path / "out.jsonl"
    output.write_text(whole[0] + "\n")
    row = {"prompt": "he 0", "max_new_tokens": 1} | change
    write_prompts(tmp_path / "prompts.jsonl", row)
    outcome = command(*arguments(model, tmp_path / "prompts.jsonl", output, "--resume"))
    check_refused(outcome, "--resume", *words)
    assert output.read_text() == whole[0] + "\n"


def test_what_cannot_be_resumed_is_refused(command, model, prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("something else\n")
    check_refused(command(*arguments(model, prompts, output)), "exists already", "--resume")
    check_refused(command(*arguments(model, prompts, output, "--resume")), f"{output}:1")
    outcome = command("generate", f"--target={model}", "--drafter=none", "--prompt=he", "--resume")
    check_refused(outcome, "--resume continues an --output, but none is given")
    assert output.read_text() == "something else\n"
