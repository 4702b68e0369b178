"""The `specjax` command. Most runs call `main` in this process, so that they share compiled
programs."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import specjax
from specjax.checkpoints_convert import eagle as heads
from specjax.cli import jsonl, main
from specjax.engine.request import Completion, Generation
from specjax.train import eagle as eagle_training
from support import folders
from support.cli import Outcome, check_refused, write_lines, write_model, write_prompts

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
CHAT = [{"role": "user", "content": "hello hello"}]
FLAGS_OF_GENERATE = (
    "target",
    "drafter",
    "draft",
    "num_speculative_tokens",
    "drafter_options",
    "verify",
    "page_size",
    "prompt",
    "prompts_file",
    "chat",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "ignore_eos",
    "dtype",
    "implementation",
    "compare",
    "output",
    "tensor_parallel",
    "draft_tensor_parallel",
    "data_parallel",
    "distributed",
    "coordinator",
    "num_processes",
    "process_id",
    "process_timeout",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def target(folder):
    return specjax.load(folder)


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


class TestGenerate:
    """Runs that succeed."""

    def test_text_and_table_go_to_stdout(self, command, folder, target):
        prompts = ["hello world\nor", "or", "he"]
        outcome = command(
            "generate",
            f"--target={folder}",
            *(f"--prompt={prompt}" for prompt in prompts),
            "--max_new_tokens=24",
        )
        assert (outcome.code, outcome.err) == (0, "")
        headlines = ["> hello world ...", "> or", "> he"]
        texts = [
            c.text
            for c in specjax.generate(target, "ngram", prompts, max_new_tokens=24).completions
        ]
        listing = "".join(
            f"{headline}\n{text}\n\n" for headline, text in zip(headlines, texts, strict=True)
        )
        assert outcome.out.startswith(listing)
        table = outcome.out.removeprefix(listing)
        assert table.startswith("ngram, K = 7")
        assert re.search(r"^ tokens +\S? *72 $", table, re.MULTILINE), table
        for row in (
            "tokens/s",
            "rounds",
            "tokens per round",
            "time per round",
            "acceptance α",
            "accepted at draft position",
            "E = (1-α^(K+1))/(1-α) predicts",
        ):
            assert row in table
        assert "speedup" not in table, "there was nothing to compare with"

    def test_prompts_file_and_output(self, command, folder, target, tmp_path):
        prompts = write_prompts(
            tmp_path / "prompts.jsonl",
            "hello\u2028hello",
            {
                "prompt": "or",
                "temperature": 2.0,
                "seed": 7,
                "max_new_tokens": 5,
                "name": "own options",
            },
            {"messages": CHAT, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
        )
        output = tmp_path / "completions.jsonl"
        outcome = command(
            "generate",
            f"--target={folder}",
            f"--prompts_file={prompts}",
            f"--output={output}",
            "--max_new_tokens=30",
            "--temperature=1.5",
            "--seed=3",
        )
        assert (outcome.code, outcome.err) == (0, "")
        expected = specjax.generate(
            target,
            "ngram",
            ["hello\u2028hello", "or", CHAT],
            max_new_tokens=[30, 5, 30],
            temperature=[1.5, 2.0, 1.5],
            seed=[3, 7, 3],
            top_k=[0, 0, 3],
            top_p=[1.0, 1.0, 0.9],
            min_p=[0.0, 0.0, 0.01],
        ).completions
        rows = read_lines(output)
        assert [row["prompt"] for row in rows] == ["hello\u2028hello", "or", CHAT]
        for row, completion in zip(rows, expected, strict=True):
            assert tuple(row["prompt_tokens"]) == completion.prompt_tokens
            assert tuple(row["tokens"]) == completion.tokens
            assert (row["text"], row["finish_reason"]) == (
                completion.text,
                completion.finish_reason,
            )
            assert sum(r["emitted"] for r in row["rounds"]) == len(row["tokens"])
            assert [r["accepted"] for r in row["rounds"]] == list(completion.accepted)
            assert [r["drafted"] for r in row["rounds"]] == list(completion.drafted)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["completions.jsonl", "prompts.jsonl"]

    def test_penalties_and_stop_strings(self, command, folder, target, tmp_path):
        """Penalties may differ between the lines of a file."""
        row = {"prompt": "hello", "frequency_penalty": 1.5}
        prompts = write_prompts(tmp_path / "prompts.jsonl", row)
        output = tmp_path / "out.jsonl"
        outcome = command(
            "generate",
            f"--target={folder}",
            f"--prompts_file={prompts}",
            f"--output={output}",
            "--prompt=hello",
            "--repetition_penalty=3",
            "--min_tokens=2",
            "--stop=never there",
            "--stop=e",
            "--max_new_tokens=20",
        )
        assert (outcome.code, outcome.err) == (0, "")
        expected = specjax.generate(
            target,
            "ngram",
            ["hello", "hello"],
            frequency_penalty=[1.5, 0.0],
            repetition_penalty=3.0,
            min_tokens=2,
            stop=["never there", "e"],
            max_new_tokens=20,
        ).completions
        rows = read_lines(output)
        assert [tuple(row["tokens"]) for row in rows] == [c.tokens for c in expected]
        assert [row["text"] for row in rows] == [c.text for c in expected]
        assert rows[1]["options"]["stop"] == ["never there", "e"]

    def test_a_prompts_file_with_a_byte_order_mark(self, command, folder, tmp_path):
        (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + b'"hello"\n')
        outcome = command(
            "generate", f"--target={folder}", f"--prompts_file={tmp_path / 'prompts.jsonl'}"
        )
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("> hello\n")

    def test_contents_may_be_lists_of_texts(self, command, folder, target, tmp_path):
        parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
        row = {"messages": [{"role": "user", "content": parts}]}
        prompts = write_prompts(tmp_path / "prompts.jsonl", row)
        output = tmp_path / "out.jsonl"
        outcome = command(
            "generate", f"--target={folder}", f"--prompts_file={prompts}", f"--output={output}"
        )
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("> hello ...\n")
        (line,) = read_lines(output)
        assert line["prompt"] == row["messages"]
        joined = [{"role": "user", "content": "hello\nworld"}]
        assert line["prompt_tokens"] == target.tokenizer.apply_chat_template(joined)

    def test_a_drafter_with_damaged_weights_is_reported(self, command, folder, target, tmp_path):
        """The text is the target's; a warning counts the drafts that could not be used."""
        config = {"num_hidden_layers": 1}
        arrays = folders.tensors(config)
        arrays["model.norm.weight"][0] = np.nan
        draft = folders.write_folder(tmp_path / "draft", config, arrays)
        outcome = command(
            "generate",
            f"--target={folder}",
            "--prompt=hello",
            "--drafter=draft_model",
            f"--draft={draft}",
            "--max_new_tokens=12",
        )
        assert outcome.code == 0
        text = specjax.generate(target, "none", ["hello"], max_new_tokens=12).completions[0].text
        assert outcome.out.startswith(f"> hello\n{text}\n\n")
        assert re.search(
            r"warning: the drafter's logits were NaN, or all -inf, for \d+ drafts", outcome.err
        )
        assert outcome.err.count("\n") == 1

    def test_warnings_are_one_line(self, command, folder, target):
        bos = target.tokenizer.special_tokens["bos_token"]
        outcome = command("generate", f"--target={folder}", f"--prompt={bos}hello")
        assert outcome.code == 0
        assert outcome.err.startswith("specjax: warning: prompt 0 begins with ")
        assert outcome.err.count("\n") == 1

    def test_compare_finds_greedy_texts_identical(self, command, folder):
        outcome = command(
            "generate", f"--target={folder}", "--prompt=hello", "--compare", "--max_new_tokens=24"
        )
        assert (outcome.code, outcome.err) == (0, "")
        assert "The texts with and without speculation are identical." in outcome.out
        assert re.search(r"plain .* speculative", outcome.out)
        assert re.search(r"^ speedup +\S? +\S? +\d+\.\d\dx", outcome.out, re.MULTILINE), outcome.out
        assert "cost of a round, in plain steps" in outcome.out

    def test_compare_of_sampled_texts(self, command, folder):
        arguments = (
            "generate",
            f"--target={folder}",
            "--prompt=hello",
            "--compare",
            "--temperature=2",
        )
        outcome = command(*arguments)
        assert outcome.code == 0
        assert (
            "Sampled texts may differ with speculation; their distribution does not." in outcome.out
        )
        assert "identical" not in outcome.out
        outcome = command(*arguments, "--verify=coupled")
        assert outcome.code == 0
        assert "The texts with and without speculation are identical." in outcome.out

    def test_compare_fails_if_texts_differ(self, command, folder, monkeypatch):
        real = specjax.engine.generate.generate

        def wrong(target, drafter, *args, **kwargs):
            result = real(target, "ngram", *args, **kwargs)
            if drafter == "none":
                return result
            changed = Completion(**{**vars(result.completions[0]), "tokens": (9,)})
            return Generation(
                (changed,), result.prefill_seconds, result.decode_seconds, result.rounds
            )

        monkeypatch.setattr(specjax.engine.generate, "generate", wrong)
        outcome = command("generate", f"--target={folder}", "--prompt=hello", "--compare")
        assert outcome.code == 1
        assert "The texts with and without speculation are NOT identical." in outcome.out

    def test_flagfile(self, command, folder, tmp_path):
        flagfile = write_lines(
            tmp_path / "some.flags",
            "# A comment.",
            f"--target={folder}",
            "--prompt=hello",
            "--max_new_tokens=4",
            f"--output={tmp_path / 'out.jsonl'}",
        )
        assert command("generate", f"--flagfile={flagfile}", "--max_new_tokens=3").code == 0
        assert [len(row["tokens"]) for row in read_lines(tmp_path / "out.jsonl")] == [3]

    @pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.flags")), ids=lambda path: path.name)
    def test_the_flag_files_of_the_repository_can_be_parsed(self, command, path, tmp_path):
        name = re.match("# specjax ([a-z]+) --flagfile=", path.read_text())[
            1
        ]  # the command in the comment of the file
        prompt = ["--prompt=a"] if name == "generate" else []
        check_refused(
            command(name, f"--flagfile={path}", f"--target={tmp_path / 'none'}", *prompt),
            f"{tmp_path / 'none'} does not exist",
        )

    def test_chat(self, command, folder, target, tmp_path):
        arguments = (
            f"--target={folder}",
            "--prompt=hello",
            "--chat",
            f"--output={tmp_path / 'out'}",
        )
        assert command("generate", *arguments).code == 0
        (row,) = read_lines(tmp_path / "out")
        messages = [{"role": "user", "content": "hello"}]
        assert row["prompt_tokens"] == target.tokenizer.apply_chat_template(messages)
        assert row["prompt"] == messages

    def test_ignore_eos(self, command, tmp_path, folder, target):
        (first, *_) = (
            specjax.generate(target, "ngram", ["hello"], max_new_tokens=1).completions[0].tokens
        )
        shutil.copytree(folder, tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(
            json.dumps(config | {"eos_token_id": first})
        )
        for name, more in (("stop", ()), ("length", ("--ignore_eos",))):
            assert (
                command(
                    "generate",
                    f"--target={tmp_path / 'model'}",
                    "--prompt=hello",
                    "--max_new_tokens=6",
                    f"--output={tmp_path / name}",
                    *more,
                ).code
                == 0
            )
            (row,) = read_lines(tmp_path / name)
            assert (row["finish_reason"], len(row["tokens"])) == (name, 1 if name == "stop" else 6)

    def test_text_needs_a_tokenizer(self, command, tmp_path):
        folders.write_folder(tmp_path / "model", {"num_hidden_layers": 1}, tokenizer=False)
        outcome = command("generate", f"--target={tmp_path / 'model'}", "--prompt=a")
        check_refused(outcome, "prompt 0 is text", f"{tmp_path / 'model'} has no tokenizer")

    def test_generate_streams_to_a_terminal(self, command, folder, target, monkeypatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        prompts = ["hello hello", "or", "he"]
        outcome = command(
            "generate",
            f"--target={folder}",
            *(f"--prompt={prompt}" for prompt in prompts),
            "--max_new_tokens=24",
        )
        assert outcome.code == 0
        assert "\x1b[32maccepted drafts\x1b[0m" in outcome.out
        plain = re.sub(r"\x1b\[[\d;]*m", "", outcome.out)
        texts = [
            c.text
            for c in specjax.generate(target, "ngram", prompts, max_new_tokens=24).completions
        ]
        assert (
            "".join(f"> {prompt}\n{text}\n\n" for prompt, text in zip(prompts, texts, strict=True))
            in plain
        )


def test_convert_generate_export(command, folder, tmp_path):
    outcome = command("convert", f"--source={folder}", f"--output={tmp_path / 'converted'}")
    assert outcome.code == 0
    assert outcome.out.startswith(f"wrote {tmp_path / 'converted'}: ")
    assert re.search(r": [\d,]+ parameters in float32, [\d.]+ MB, [\d.]+ s\n$", outcome.out)
    for name, model in (("a", folder), ("b", tmp_path / "converted")):
        assert (
            command(
                "generate", f"--target={model}", "--prompt=hello", f"--output={tmp_path / name}"
            ).code
            == 0
        )
    assert read_lines(tmp_path / "a") == read_lines(tmp_path / "b")
    outcome = command(
        "export", f"--source={tmp_path / 'converted'}", f"--output={tmp_path / 'exported'}"
    )
    assert outcome.code == 0
    assert outcome.out.startswith(f"wrote {tmp_path / 'exported'}: ")
    before, after = (
        folders.read_folder(folder),
        folders.read_folder(tmp_path / "exported"),
    )
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "converted", "exported"]


def test_demo(command, folder, tmp_path, monkeypatch):
    rows = {"name": "first", "messages": CHAT}, {"name": "second", "prompt": "or"}
    path = write_prompts(tmp_path / "prompts.jsonl", *rows)
    monkeypatch.setattr(jsonl, "DEMO_PROMPTS", path)
    outcome = command("demo", f"--target={folder}", "--max_new_tokens=20")
    assert (outcome.code, outcome.err) == (0, "")
    assert "The texts with and without speculation are identical." in outcome.out
    assert (
        outcome.out.index("> hello hello")
        < outcome.out.index("> or")
        < outcome.out.index("Prompt by prompt")
    )
    assert "eagle" not in outcome.out


def test_demo_with_a_bundled_head(command, folder, tmp_path, monkeypatch):
    target = specjax.load(folder)
    config = eagle_training.make_config(target.config)
    (tmp_path / "heads").mkdir()
    heads.save(
        tmp_path / "heads" / "own",
        config,
        eagle_training.initial_params(config, target.params, jax.random.key(0)),
        None,
    )
    monkeypatch.setattr(heads, "BUNDLED", tmp_path / "heads")
    monkeypatch.setattr(
        jsonl,
        "DEMO_PROMPTS",
        write_prompts(
            tmp_path / "prompts.jsonl",
            {"name": "first", "prompt": "hello"},
            {"name": "second", "prompt": "or", "domain": "prose"},
        ),
    )
    outcome = command("demo", f"--target={folder}", "--max_new_tokens=20")
    assert (outcome.code, outcome.err) == (0, "")
    assert "The texts with and without speculation are identical." in outcome.out
    lines = [line.replace("│", " ").split()[:2] for line in outcome.out.splitlines()]
    assert (
        ["first", "ngram"] in lines
        and ["second", "ngram,eagle"] in lines
        and ["second", "eagle"] in lines
    )
    assert ["first", "eagle"] not in lines
    ks = [
        line.replace("│", " ").split()[5:]
        for line in outcome.out.splitlines()
        if "most drafts per round" in line
    ]
    assert ks == [["7"], ["7", "2", "2"]]


def test_env(command):
    outcome = command("env")
    assert (outcome.code, outcome.err) == (0, "")
    for operation in ("attention", "verification"):
        assert re.search(
            rf"^{operation} +xla\n +Not mosaic_gpu: requires an NVIDIA GPU of compute capability "
            r"9.0 \(Hopper\), but JAX runs on 'cpu'\.$",
            outcome.out,
            re.MULTILINE,
        )


class TestHelp:
    """Every command and every flag is described."""

    @pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], []])
    def test_the_commands(self, command, arguments):
        outcome = command(*arguments)
        assert outcome.code == (0 if arguments else 2)
        for name in main.COMMANDS:
            assert re.search(rf"^  {name} +\w", outcome.out, re.MULTILINE)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("generate", FLAGS_OF_GENERATE),
            ("convert", ("source", "output", "dtype")),
            ("export", ("source", "output", "dtype")),
            (
                "bench decode",
                (
                    "target",
                    "drafter",
                    "draft",
                    "num_speculative_tokens",
                    "verify",
                    "prompts_file",
                    "output",
                ),
            ),
            (
                "bench baselines",
                (
                    "target",
                    "drafter",
                    "prompts_file",
                    "repeats",
                    "baselines",
                    "gguf",
                    "threads",
                    "output",
                ),
            ),
            ("bench saturation", ("target", "batch_sizes", "draft_lengths", "plot", "output")),
            ("bench gpu", ("target", "acceptance", "dtype", "output")),
            (
                "train",
                (
                    "target",
                    "drafter",
                    "self_generate",
                    "data",
                    "steps",
                    "loss",
                    "data_parallel",
                    "output",
                ),
            ),
            ("demo", ("target", "max_new_tokens")),
        ],
    )
    def test_the_flags(self, command, name, expected):
        outcome = command(*name.split(), "--help")
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith(f"specjax {name}: ")
        described = set(re.findall(r"^  --(?:\[no\])?(\w+):", outcome.out, re.MULTILINE))
        assert set(expected) <= described


@dataclasses.dataclass(frozen=True)
class Rejected:
    """Arguments, separated by spaces, and parts of the error message."""

    arguments: str
    parts: tuple[str, ...]

    def __init__(self, arguments: str, *parts: str):
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "parts", parts)


GENERATE = "generate --target=x --prompt=a"
ARGUMENTS = [
    Rejected("foo", "unknown command 'foo'; choose from generate, serve, convert, export"),
    Rejected("--target=x", "unknown command '--target=x'; choose from generate"),
    Rejected("generate --target=x --foo=1", "foo"),
    Rejected("generate --target=x foo", "'foo' is not a flag"),
    Rejected("generate --target=x --drafter=foo", "unknown drafter 'foo'; choose from none,"),
    Rejected("generate --target=x --verify=foo", "--verify=foo", "rejection|coupled"),
    Rejected("generate --target=x --dtype=int8", "--dtype=int8", "float32"),
    Rejected("generate --target=x --temperature=hot", "--temperature=hot"),
    Rejected("generate --target=x --num_speculative_tokens=1.5", "--num_speculative_tokens=1.5"),
    Rejected("generate --prompt=a", "--target"),
    Rejected("generate --flagfile=/does/not/exist", "cannot read /does/not/exist"),
    Rejected("generate --target=x", "no prompt was given; use --prompt or --prompts_file"),
    Rejected("generate --target=x --prompts_file=/does/not/exist", "/does/not/exist"),
    Rejected("generate --target=/does/not/exist --prompt=a", "/does/not/exist does not exist"),
    Rejected(f"{GENERATE} --compare --drafter=none", "--compare", "--drafter=none"),
    Rejected(f"{GENERATE} --output=/does/not/exist", "--output", "the folder of /does/not/exist"),
    Rejected(f"{GENERATE} --output=/dev/null/x", "--output", "/dev/null/x"),
    Rejected("convert --output=new", "--source"),
    Rejected("convert --source=/does/not/exist --output=new", "/does/not/exist does not exist"),
    Rejected("convert --source=x", "--output"),
    Rejected("export --source=/does/not/exist --output=new", "/does/not/exist does not exist"),
    Rejected("bench baselines --target=x --drafter=none", "--drafter=none"),
    Rejected("bench baselines --target=x --repeats=0", "--repeats=0: 0 is not a positive integer"),
    Rejected("bench baselines --target=x --max_new_tokens=0", "--max_new_tokens=0: 0 is not"),
    Rejected("bench saturation --target=x --num_speculative_tokens=3", "num_speculative_tokens"),
    Rejected(
        "bench saturation --target=x --draft_lengths=2,500", "--draft_lengths must be at most"
    ),
    Rejected("demo", "--target"),
]
TOO_MANY = "is not an integer in the range [1, 128]"
VALUES = [
    Rejected("--num_speculative_tokens=0", f"--num_speculative_tokens=0: 0 {TOO_MANY}"),
    Rejected("--num_speculative_tokens=20000", f"--num_speculative_tokens=20000: 20000 {TOO_MANY}"),
    Rejected("--temperature=-1", "temperature must be in [0, ", "got -1.0"),
    Rejected("--top_p=0", "top_p must be in (0, 1], got 0.0"),
    Rejected("--top_p=1.01", "top_p must be in (0, 1], got 1.01"),
    Rejected("--top_k=-1", "top_k", "got -1"),
    Rejected("--min_p=2", "min_p must be in [0, 1], got 2.0"),
    Rejected("--seed=-1", "seed must be in [0, 2**32), got -1"),
    Rejected("--max_new_tokens=0", "max_new_tokens", "got 0"),
    Rejected("--page_size=0", "page_size must be an integer of at least 1, got 0"),
    Rejected(
        "--implementation=mosaic_gpu",
        "'mosaic_gpu' cannot run here",
        "compute capability 9.0",
        "'cpu'",
    ),
    Rejected("--drafter_options=min_n=9", "min_n=9 and max_n=4"),
    Rejected("--drafter_options=min_n", "--drafter_options: 'min_n' is not of the form"),
    Rejected("--drafter_options=foo=1", "drafter 'ngram' has no option 'foo'"),
    Rejected("--drafter=draft_model", "'draft_model' requires the path of a draft model"),
    Rejected(
        "--tensor_parallel=4",
        "the target cannot be split over 4 devices",
        "2 kv heads",
        "choose from 1, 2",
    ),
    Rejected("--tensor_parallel=3", "tensor_parallel=3 = 3 must divide the number of devices, 8"),
    Rejected("--data_parallel=16", "data_parallel=16 x tensor_parallel=1 requires 16 devices"),
    Rejected("--tensor_parallel=0", "tensor_parallel must be an integer of at least 1, got 0"),
    Rejected("--drafter=eagle", "no EAGLE head is bundled for a model of this shape"),
    Rejected("--tensor_parallel=2 --draft_tensor_parallel=2", "no --drafter uses a draft"),
    Rejected("--process_id=1", "--coordinator, --num_processes and --process_id belong together"),
    Rejected("--process_timeout=9", "--process_timeout=9", "one process"),
    Rejected("--drafter=none --num_speculative_tokens=2", "'none' decodes without speculation"),
]


class TestBadInput:
    """An error of one line that names the fault, exit code 2, and no output file."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, tmp_path):
        yield
        assert not [
            path for path in tmp_path.rglob("*") if "incomplete" in path.name or path.name == "new"
        ]

    @pytest.mark.parametrize("case", ARGUMENTS, ids=lambda case: case.arguments)
    def test_arguments(self, command, case, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        check_refused(command(*case.arguments.split()), *case.parts)

    @pytest.mark.parametrize("case", VALUES, ids=lambda case: case.arguments[:40])
    def test_values(self, command, folder, case, tmp_path):
        outcome = command(
            "generate",
            f"--target={folder}",
            "--prompt=hello",
            f"--output={tmp_path / 'new'}",
            *case.arguments.split(),
        )
        check_refused(outcome, *case.parts)

    @pytest.mark.parametrize("text", ["", "a\udcff", 63 * "a"])
    @pytest.mark.parametrize("chat", [(), ("--chat",)], ids=["text", "chat"])
    def test_prompts(self, command, folder, text, chat):
        outcome = command(
            "generate", f"--target={folder}", "--prompt=hello", f"--prompt={text}", *chat
        )
        reason = {"": "is empty", "a\udcff": "is not valid Unicode"}.get(text, "at most 63 fit")
        check_refused(outcome, "prompt 1", reason)

    def test_an_output_that_exists(self, command, folder, tmp_path):
        existing = write_lines(tmp_path / "there", "keep me")
        for arguments in (
            ["generate", f"--target={folder}", "--prompt=a"],
            ["bench", "baselines", f"--target={folder}"],
            ["convert", f"--source={folder}"],
            ["export", f"--source={folder}"],
        ):
            check_refused(command(*arguments, f"--output={existing}"), existing, "exists")
        assert existing.read_text() == "keep me\n"
        (tmp_path / "folder").mkdir()
        outcome = command("convert", f"--source={folder}", f"--output={tmp_path / 'folder'}")
        check_refused(outcome, tmp_path / "folder", "exists")
        assert not any((tmp_path / "folder").iterdir())

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"prompt": "a"', "not JSON"),
            ("[]", "must be a string, or an object"),
            ("3", "must be a string, or an object"),
            ("{}", "either 'prompt' or 'messages'"),
            ('{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'"),
            ('{"prompt": 3}', "'prompt' must be a string"),
            ('{"messages": []}', "'messages' must be a list of objects with 'role' and 'content'"),
            ('{"messages": ["a"]}', "message 1 must be an object with a 'role' and a 'content'"),
            ('{"messages": [{"role": "user"}]}', "message 1: 'content' must be a string or a list"),
            (
                '{"prompt": "a", "temprature": 1}',
                "unknown key 'temprature'; choose from prompt, messages, name, domain",
            ),
            ('{"prompt": "a", "temperature": [1]}', "'temperature' must be a number, got [1]"),
            ('{"prompt": "a", "top_k": "3"}', "'top_k' must be a number, got '3'"),
            ('{"prompt": "a", "seed": true}', "'seed' must be a number, got True"),
        ],
    )
    def test_a_broken_line_of_a_prompts_file(self, command, folder, tmp_path, line, reason):
        path = write_lines(tmp_path / "prompts.jsonl", '"good"', "", line, '"good"')
        check_refused(
            command("generate", f"--target={folder}", f"--prompts_file={path}"),
            f"{path}, line 3: ",
            reason,
        )

    def test_other_prompts_files(self, command, folder, tmp_path):
        for content, reason in (
            (b"", "has no prompts"),
            (b"\n \n", "has no prompts"),
            (b'"\xff"', "cannot read"),
        ):
            (tmp_path / "prompts.jsonl").write_bytes(content)
            outcome = command(
                "generate", f"--target={folder}", f"--prompts_file={tmp_path / 'prompts.jsonl'}"
            )
            check_refused(outcome, tmp_path / "prompts.jsonl", reason)
        outcome = command("generate", f"--target={folder}", f"--prompts_file={tmp_path}")
        check_refused(outcome, f"cannot read {tmp_path}")

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"prompt": "b", "temperature": -2}, "temperature must be in [0, "),
            ({"prompt": "b", "temperature": 1e30}, "temperature must be in [0, "),
            ({"prompt": "b", "seed": -1}, "seed must be in [0, 2**32), got -1"),
            ({"prompt": "b", "seed": 1.5}, "seed must be an integer, got 1.5"),
            ({"prompt": "b", "top_k": -1}, "top_k must be in [0, 2**31), got -1"),
            ({"prompt": "b", "top_p": 0}, "top_p must be in (0, 1], got 0.0"),
            ({"prompt": "b", "min_p": 2}, "min_p must be in [0, 1], got 2.0"),
            ({"prompt": "b", "max_new_tokens": 0}, "max_new_tokens must be in [1, 2**31), got 0"),
            ({"prompt": ""}, "the prompt is empty"),
            ({"prompt": 63 * "a"}, "has 64 tokens, but at most 63 fit"),
            ({"messages": [{"role": "user", "content": 63 * "a"}]}, "at most 63 fit"),
            ({"messages": [{"role": "user", "content": None}]}, "'content' must be a string or"),
            ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "'content' must be a"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "parts of type 'image_url' are not supported",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
                "'text' of a part must be a string",
            ),
        ],
    )
    def test_a_bad_value_in_a_prompts_file_is_found_by_its_line(
        self, command, folder, tmp_path, row, reason
    ):
        path = write_prompts(tmp_path / "prompts.jsonl", "a", "b", row, "c")
        outcome = command(
            "generate",
            f"--target={folder}",
            f"--prompts_file={path}",
            f"--output={tmp_path / 'new'}",
        )
        check_refused(outcome, f"{path}, line 3", reason)

    @pytest.mark.parametrize("name", ["decode", "saturation", "baselines"])
    def test_a_prompt_of_a_benchmark_is_found_by_its_line(self, command, folder, tmp_path, name):
        rows = [{"prompt": text, "domain": "a"} for text in ("a", "")]
        path = write_prompts(tmp_path / "prompts.jsonl", *rows)
        outcome = command("bench", name, f"--target={folder}", f"--prompts_file={path}")
        check_refused(outcome, f"{path}, line 2: the prompt is empty")

    def test_bench_rejects_sampling_options_of_prompts(self, command, folder, tmp_path):
        path = write_prompts(tmp_path / "prompts.jsonl", {"prompt": "b", "temperature": 1})
        check_refused(
            command("bench", "baselines", f"--target={folder}", f"--prompts_file={path}"),
            path,
            "'temperature'",
        )

    def test_draft_models_that_do_not_fit(self, command, folder, tmp_path):
        larger = write_model(tmp_path / "larger", vocab_size=300)
        arguments = (
            "generate",
            f"--target={folder}",
            "--prompt=a",
            f"--output={tmp_path / 'new'}",
            f"--draft={larger}",
        )
        check_refused(
            command(*arguments, "--drafter=draft_model"),
            "different vocabularies",
            "target 288, draft 300",
        )
        check_refused(command(*arguments, "--drafter=none"), "the drafter 'none' uses no draft")
        same = write_model(tmp_path / "same")
        check_refused(
            command(*arguments[:-1], f"--draft={same}"), "the drafter 'ngram' uses no draft"
        )


class TestProcess:
    """The installed command."""

    @staticmethod
    def specjax(*arguments, **environment):
        script = pathlib.Path(sys.executable).with_name("specjax")
        inherited = {
            name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
        }
        return subprocess.run(
            [script, *arguments],
            capture_output=True,
            text=True,
            env=inherited | environment,
            timeout=120,
        )

    def test_a_run(self, folder, target, tmp_path):
        done = self.specjax(
            "generate",
            f"--target={folder}",
            "--prompt=hello",
            "--drafter=none",
            "--max_new_tokens=5",
            XDG_CACHE_HOME=str(tmp_path),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        assert (done.returncode, done.stderr) == (0, "")
        text = specjax.generate(target, "none", ["hello"], max_new_tokens=5).completions[0].text
        assert done.stdout.startswith(f"> hello\n{text}\n\nnone, K = 0")
        assert any((tmp_path / "specjax" / "xla").iterdir()), "compiled programs were not kept"

    def test_an_error(self, folder, tmp_path):
        done = self.specjax(
            "generate",
            f"--target={folder}",
            "--prompt=hello",
            "--top_p=0",
            f"--output={tmp_path / 'new'}",
            XDG_CACHE_HOME=str(tmp_path),
        )
        check_refused(
            Outcome(done.returncode, done.stdout, done.stderr), "top_p must be in (0, 1], got 0.0"
        )
        assert not (tmp_path / "new").exists()
