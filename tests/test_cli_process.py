"""The installed command: output that cannot be written, interrupts, absent devices."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import specjax
from specjax import devices
from specjax.errors import SpecJAXError
from support.cli import Outcome, check_refused, write_lines, write_model, write_prompts

SPECJAX = pathlib.Path(sys.executable).with_name("specjax")
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
SECONDS = 120
FOREVER = 90_000  # tokens, which take minutes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "endless"
    return write_model(path, max_position_embeddings=100_000)


def environment(**changes):
    return os.environ | {"JAX_PLATFORMS": "cpu"} | changes


# Runs another program with a limit on the size of files. Set here and not between fork and exec:
# forking a process in which JAX has started threads may deadlock.
LIMITED = """
import os, resource, signal, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
os.execv(sys.argv[2], sys.argv[2:])
"""


def specjax_command(*arguments, stdout=subprocess.PIPE, file_size=None, **changes) -> Outcome:
    limited = [] if file_size is None else [sys.executable, "-c", LIMITED, str(file_size)]
    done = subprocess.run(
        [*limited, SPECJAX, *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
        timeout=SECONDS,
    )
    return Outcome(done.returncode, done.stdout or "", done.stderr)


class TestStandardOutput:
    def test_a_full_disk_is_an_error_of_one_line(self, folder):
        with open("/dev/full", "w") as full:
            outcome = specjax_command(
                "generate", f"--target={folder}", "--prompt=hello", stdout=full
            )
        check_refused(outcome, "cannot write to the standard output: No space left on device")

    def test_a_full_disk_in_other_commands(self):
        with open("/dev/full", "w") as full:
            for arguments in (["--help"], ["plan", f"--target={CONFIGS / 'llama-3-8b'}"]):
                outcome = specjax_command(*arguments, stdout=full)
                check_refused(outcome, "cannot write to the standard output")

    def test_a_closed_pipe_prints_no_error(self, folder):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            outcome = specjax_command("plan", f"--target={CONFIGS / 'llama-3-8b'}", stdout=pipe)
        assert (outcome.code, outcome.err) == (1, "")


class TestOutputFile:
    def test_rows_are_written_as_they_finish_and_later_ones_are_printed(self, endless, tmp_path):
        """A limit on the size of files acts like a full disk."""
        prompts = write_prompts(
            tmp_path / "prompts.jsonl",
            {"prompt": "hello", "max_new_tokens": 2},
            {"prompt": "hello hello", "max_new_tokens": 150},
        )
        output = tmp_path / "out.jsonl"

        arguments = (
            "generate",
            f"--target={endless}",
            f"--prompts_file={prompts}",
            "--drafter=none",
        )
        no_cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        whole = specjax_command(*arguments, f"--output={tmp_path / 'whole.jsonl'}", **no_cache)
        assert whole.code == 0
        lines = (tmp_path / "whole.jsonl").read_text().splitlines()
        assert len(lines[0]) < 4200 < len(lines[0]) + len(lines[1])
        cut = specjax_command(*arguments, f"--output={output}", file_size=4200, **no_cache)
        assert cut.code == 2
        assert cut.err == f"specjax: error: cannot write {output}: File too large\n"
        assert output.read_text().splitlines() == lines[:1], "whole lines only"
        texts = [json.loads(line)["text"] for line in lines]
        assert cut.out == f"> hello\n{texts[0]}\n\n> hello hello\n{texts[1]}\n\n"

    def test_a_full_disk_is_noticed_before_the_model_is_loaded(self, tmp_path):
        for arguments in (
            ["generate", "--prompt=a"],
            ["bench", "decode"],
            ["bench", "saturation"],
            ["bench", "baselines"],
        ):
            outcome = specjax_command(
                *arguments, "--target=x", f"--output={tmp_path / 'new'}", file_size=100
            )
            check_refused(outcome, "--output: cannot write", tmp_path / "new", "File too large")
        assert not any(tmp_path.iterdir())

    def test_the_final_file_is_in_the_order_of_the_prompts(self, command, folder, tmp_path):
        prompts = write_prompts(
            tmp_path / "prompts.jsonl",
            {"prompt": "hello", "max_new_tokens": 50},
            {"prompt": "or", "max_new_tokens": 3},
        )
        output = tmp_path / "out.jsonl"
        outcome = command(
            "generate", f"--target={folder}", f"--prompts_file={prompts}", f"--output={output}"
        )
        assert outcome.code == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert [row["prompt"] for row in rows] == ["hello", "or"]
        assert outcome.out.index("> hello") < outcome.out.index("> or")


class TestInterrupt:
    def test_while_generating_into_files(self, endless, tmp_path):
        prompts = write_prompts(
            tmp_path / "prompts.jsonl",
            {"prompt": "hello", "max_new_tokens": FOREVER},
            {"prompt": "or", "max_new_tokens": 3},
        )
        output = tmp_path / "out.jsonl"
        process = subprocess.Popen(
            [
                SPECJAX,
                "generate",
                f"--target={endless}",
                f"--prompts_file={prompts}",
                f"--output={output}",
                "--ignore_eos",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        deadline = time.monotonic() + SECONDS
        while not (output.exists() and output.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)  # the loop has chosen its rounds per call
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        assert time.monotonic() - start < 3, "a second, on a machine that does nothing else"
        assert (process.returncode, err) == (130, "")
        (row,) = [json.loads(line) for line in output.read_text().splitlines()]
        assert row["prompt"] == "or" and len(row["tokens"]) == 3
        assert out == f"> or\n{row['text']}\n\n"

    @pytest.mark.parametrize("number", [1, 2])
    def test_while_xla_compiles(self, folder, number):
        """Interrupts one of the compilations, which JAX logs."""
        process = subprocess.Popen(
            [SPECJAX, "generate", f"--target={folder}", "--prompt=hello"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(JAX_LOG_COMPILES="1", JAX_ENABLE_COMPILATION_CACHE="false"),
        )
        seen = 0
        for line in process.stderr:
            seen += "Compiling jit(" in line
            if seen == number:
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 130, err
        assert "Traceback" not in err

    def test_when_a_library_swallows_it(self):
        code = (
            "import time\n"
            "from specjax.cli import interrupts, main\n"
            "interrupts.GRACE_SECONDS = 0.5\n"
            "def swallow(argv):\n"
            "    try:\n"
            "        print('ready', flush=True)\n"
            "        time.sleep(60)\n"
            "    except KeyboardInterrupt:\n"
            "        time.sleep(60)\n"
            "main.main = swallow\n"
            "main.run()\n"
        )
        words = [sys.executable, "-c", code]
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment()) as process:
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 130


@dataclasses.dataclass(frozen=True)
class Absent:
    """An absent platform, and parts of the error."""

    platform: str
    part: str


ABSENT = [Absent("cuda", "JAX_PLATFORMS=cuda"), Absent("foo", "'foo' is not in the list of known")]


class TestAbsentPlatform:
    @pytest.mark.parametrize("absent", ABSENT, ids=lambda absent: absent.platform)
    def test_generate(self, folder, absent):
        outcome = specjax_command(
            "generate", f"--target={folder}", "--prompt=a", JAX_PLATFORMS=absent.platform
        )
        check_refused(outcome, absent.part, "set JAX_PLATFORMS=cpu")

    @pytest.mark.parametrize(
        "arguments",
        [
            "env",
            "generate --prompt=a",
            "demo",
            "convert --source=x --output=new",
            "export --source=x --output=new",
            "bench decode",
            "bench saturation",
            "bench baselines",
            "bench gpu --output=new",
            "bench kernels --output=new",
            "train --data=x.txt --steps=1 --output=new --max_seq_len=24",
        ],
    )
    def test_every_command(self, command, monkeypatch, tmp_path, folder, arguments):
        """JAX raises an AssertionError without a message if a plugin is missing."""
        monkeypatch.chdir(tmp_path)
        write_lines(tmp_path / "x.txt", "hello")

        def fail(*_):
            raise AssertionError

        monkeypatch.setattr(devices.jax, "devices", fail)
        monkeypatch.setattr(devices.jax, "local_devices", fail)
        name, *flags = arguments.split()
        target = [] if name in ("env", "convert", "export") or "kernels" in flags else ["--target"]
        outcome = command(name, *flags, *(f"{flag}={folder}" for flag in target))
        check_refused(outcome, "JAX finds no device for JAX_PLATFORMS=cpu; set JAX_PLATFORMS=cpu")

    def test_load(self, folder, monkeypatch):
        def fail(*_):
            raise AssertionError

        monkeypatch.setattr(devices.jax, "devices", fail)
        with pytest.raises(SpecJAXError, match="JAX finds no device for JAX_PLATFORMS=cpu"):
            specjax.load(folder)

    def test_plans_need_no_device(self):
        outcome = specjax_command(
            "plan", f"--target={CONFIGS / 'llama-3-8b'}", JAX_PLATFORMS="cuda"
        )
        assert (outcome.code, outcome.err) == (0, "")
