"""Flags of the command line and of flag files: names, skipped flags, paths."""

import json
import pathlib

import pytest

from support.cli import check_refused, write_lines, write_model, write_prompts

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
PLAN = f"--target={CONFIGS / 'llama-3-8b'}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "target")


def num_tokens(path):
    return [len(json.loads(line)["tokens"]) for line in path.read_text().splitlines()]


class TestNames:
    def test_dashes_count_as_underscores(self, command, folder, tmp_path):
        output = tmp_path / "out.jsonl"
        outcome = command(
            "generate",
            f"--target={folder}",
            "--prompt=hello",
            "--max-new-tokens",
            "3",
            "--ignore-eos",
            "--nocompare",
            f"--output={output}",
        )
        assert (outcome.code, outcome.err) == (0, "")
        assert num_tokens(output) == [3]

    def test_the_value_of_a_flag_keeps_its_dashes(self, command, folder, tmp_path):
        output = tmp_path / "out.jsonl"
        outcome = command(
            "generate",
            f"--target={folder}",
            "--prompt",
            "--max-new-tokens",
            "--max_new_tokens=2",
            f"--output={output}",
        )
        assert outcome.code == 0
        assert json.loads(output.read_text())["prompt"] == "--max-new-tokens"

    def test_in_a_flag_file(self, command, tmp_path):
        flagfile = write_lines(tmp_path / "a.flags", PLAN, "--num-speculative-tokens=3")
        outcome = command("plan", f"--flagfile={flagfile}")
        assert (outcome.code, outcome.err) == (0, "")
        assert "predicted, K = 3" in outcome.out


class TestAliases:
    """Names of vLLM."""

    def test_model_is_target(self, command):
        assert command("plan", PLAN.replace("--target", "--model")) == command("plan", PLAN)

    @pytest.mark.parametrize("name", ["generate", "plan", "bench decode"])
    def test_both_names_are_an_error(self, command, tmp_path, name):
        flagfile = write_lines(tmp_path / "a.flags", PLAN)
        check_refused(
            command(*name.split(), f"--flagfile={flagfile}", "--model=x"),
            "--model and --target are the same flag; give one of them",
        )

    @pytest.mark.parametrize("model", ["ngram", "{folder}"])
    def test_speculative_model_is_a_drafter_or_a_draft(self, command, folder, tmp_path, model):
        model = model.format(folder=folder)
        long = [f"--drafter={model}"]
        if model == str(folder):
            long = ["--drafter=draft_model", f"--draft={model}"]
        texts = []
        for i, words in enumerate((long, [f"--speculative_model={model}"])):
            output = tmp_path / f"{i}.jsonl"
            rest = ["--prompt=hello", "--max_new_tokens=9", f"--output={output}", *words]
            assert command("generate", f"--target={folder}", *rest).code == 0
            texts.append(output.read_text())
        assert texts[0] == texts[1]
        assert any(a_round["drafted"] for a_round in json.loads(texts[0])["rounds"])

    def test_no_speculative_model(self, command, folder):
        rest = ["--prompt=hello", "--max_new_tokens=2", "--speculative_model=none"]
        outcome = command("generate", f"--target={folder}", *rest)
        assert (outcome.code, outcome.err) == (0, "")

    def test_speculative_model_excludes_what_it_replaces(self, command, folder):
        model = f"--target={folder}"
        for name, value in (("drafter", "ngram"), ("draft", folder)):
            check_refused(
                command(
                    "generate", model, "--prompt=a", "--speculative_model=x", f"--{name}={value}"
                ),
                f"--speculative_model and --{name} exclude each other; give one of them",
            )
        check_refused(
            command("plan", PLAN, "--speculative_model=x", "--draft=x"),
            "--speculative_model and --draft exclude each other",
        )

    def test_a_plan_for_a_drafter(self, command):
        expected = command("plan", PLAN)
        assert command("plan", PLAN, "--speculative_model=ngram") == expected
        check_refused(
            command("plan", PLAN, "--speculative_model=ngram,eagle"),
            "--speculative_model=ngram,eagle: give the draft model, or a drafter that needs none",
        )


class TestFlagFiles:
    def test_flags_of_other_commands_are_skipped_and_listed(self, command, tmp_path):
        flagfile = write_lines(
            tmp_path / "shared.flags",
            "# generate, plan, bench and train share this",
            PLAN,
            "--num_speculative_tokens=2",
            "--drafter=draft_model",
            "--chat",
            "--max_new_tokens",
            "7",
            "--nocompare",
            "--drafter=ngram",
            "--loss=kl",
        )
        outcome = command("plan", f"--flagfile={flagfile}")
        assert outcome.code == 0
        assert outcome.err == (
            f"specjax: {flagfile}: skipped flags of other commands: --drafter, --chat, "
            "--max_new_tokens, --nocompare, --loss\n"
        )
        assert "predicted, K = 2" in outcome.out

    @pytest.mark.parametrize(
        "path",
        sorted(CONFIGS.glob("*.flags")),
        ids=lambda path: path.name,
    )
    @pytest.mark.parametrize("name", ["generate", "plan", "bench decode", "bench saturation"])
    def test_the_flag_files_of_the_repository_work_for_every_command(
        self, command, path, name, tmp_path
    ):
        missing = tmp_path / "none"
        prompt = ["--prompt=a"] if name == "generate" else []
        outcome = command(*name.split(), f"--flagfile={path}", f"--target={missing}", *prompt)
        *skipped, error = outcome.err.splitlines()
        assert outcome.code == 2 and str(missing) in error
        assert len(skipped) == (0 if name == "generate" else 1)
        assert all("skipped flags of other commands: --" in line for line in skipped)

    def test_training_a_draft_model_with_the_flag_file_of_a_pair(self, command, tmp_path):
        outcome = command(
            "train",
            f"--flagfile={CONFIGS / 'llama3_70b_llama3_8b_tp4.flags'}",
            f"--target={tmp_path / 'none'}",
            "--steps=1",
            "--data=x.txt",
            f"--output={tmp_path / 'new'}",
        )
        skipped, error = outcome.err.splitlines()
        assert outcome.code == 2 and str(tmp_path / "none") in error
        assert skipped.endswith("--num_speculative_tokens, --chat, --max_new_tokens, --compare")

    def test_a_plan_from_the_flag_file_of_a_pair(self, command):
        outcome = command(
            "plan",
            f"--flagfile={CONFIGS / 'llama3_70b_llama3_8b_tp4.flags'}",
            f"--target={CONFIGS / 'llama-3-70b'}",
            f"--draft={CONFIGS / 'llama-3-8b'}",
        )
        assert outcome.code == 0
        assert "memory of each of 4 x h100-80gb" in outcome.out
        assert "--drafter, --chat, --max_new_tokens, --compare" in outcome.err

    def test_on_the_command_line_flags_of_other_commands_are_errors(self, command):
        check_refused(command("plan", PLAN, "--drafter=ngram"), "drafter")

    def test_unknown_flags_are_errors(self, command, tmp_path):
        flagfile = write_lines(tmp_path / "a.flags", PLAN, "", "--drafterr=ngram")
        check_refused(
            command("plan", f"--flagfile={flagfile}"),
            f"{flagfile}, line 3: unknown flag --drafterr",
        )

    def test_lines_without_a_flag_are_errors(self, command, tmp_path):
        flagfile = write_lines(tmp_path / "a.flags", PLAN, "drafter=ngram")
        check_refused(command("plan", f"--flagfile={flagfile}"), "'drafter=ngram' is not a flag")

    def test_files_may_include_files(self, command, tmp_path):
        inner = write_lines(tmp_path / "inner.flags", PLAN, "--num_speculative_tokens=3", "--chat")
        outer = write_lines(
            tmp_path / "outer.flags", "--compare", f"--flagfile={inner}", "--batch_size=2"
        )
        outcome = command("plan", "--flagfile", outer, "--context=77")
        assert outcome.code == 0
        assert "2 x 77 tokens" in outcome.out and "predicted, K = 3" in outcome.out
        assert outcome.err.splitlines() == [
            f"specjax: {outer}: skipped flags of other commands: --compare",
            f"specjax: {inner}: skipped flags of other commands: --chat",
        ]

    def test_a_file_that_includes_itself_is_an_error(self, command, tmp_path):
        path = tmp_path / "a.flags"
        write_lines(path, PLAN, f"--flagfile={path}")
        check_refused(command("plan", f"--flagfile={path}"), f"flag file {path} includes itself")

    def test_later_flags_win(self, command, tmp_path):
        flagfile = write_lines(tmp_path / "a.flags", PLAN, "--context=11")
        assert "1 x 11 tokens" in command("plan", "--context=9", f"--flagfile={flagfile}").out
        assert "1 x 9 tokens" in command("plan", f"--flagfile={flagfile}", "--context=9").out


class TestHome:
    """`~` in every path."""

    @pytest.fixture(autouse=True)
    def home(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))

    def test_generate(self, command, tmp_path):
        write_model(tmp_path / "model")
        write_prompts(tmp_path / "prompts.jsonl", "hello")
        write_lines(tmp_path / "a.flags", "--drafter=draft_model", "--draft=~/model")
        outcome = command(
            "generate",
            "--flagfile=~/a.flags",
            "--target=~/model",
            "--prompts_file",
            "~/prompts.jsonl",
            "--output=~/out.jsonl",
            "--max_new_tokens=4",
        )
        assert (outcome.code, outcome.err) == (0, "")
        assert num_tokens(tmp_path / "out.jsonl") == [4]

    @pytest.mark.parametrize(
        ("command_line", "path"),
        [
            ("convert --source=~/no --output=~/new", "no"),
            ("export --source=~/no --output=~/new", "no"),
            ("plan --target=~/no", "no"),
            ("demo --target=~/no", "no"),
            ("bench gpu --target=~/no --output=~/new", "no"),
            ("bench baselines --target=~/no", "no"),
            ("bench baselines --target=x --prompts_file=~/no", "no"),
            ("bench decode --target=x --output=~/no/new", "no/new"),
            ("bench kernels --output=~/no/new", "no/new"),
            ("bench saturation --target=x --plot=~/no/new.png", "no/new.png"),
            ("generate --prompt=a --target=x --flagfile=~/no", "no"),
        ],
    )
    def test_other_commands(self, command, tmp_path, command_line, path):
        check_refused(command(*command_line.split()), tmp_path / path)
