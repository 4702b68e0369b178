"""`specjax serve`: its flags, and the process from start to end."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import httpx
import pytest

from specjax.cli import serve
from specjax.engine import llm
from specjax.errors import SpecJAXError
from specjax.serve import server as server_lib
from support.cli import check_refused, write_model

SECONDS = 120
PROGRAM = "from specjax.cli.main import run; run()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "target", max_position_embeddings=320)


# --- Flags ----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What the command asks for, instead of a server."""
    found = {}

    def run(arguments, settings, options, **others):
        found.update(arguments=arguments, settings=settings, options=options, **others)
        return 0

    monkeypatch.setattr(serve, "run", run)
    return found


# What people type, and arguments of `LLM`.
TYPED = {
    "vllm": (
        ["--model=m", "--tensor-parallel-size=4", "--speculative-model=d"],
        {"model": "m", "tensor_parallel_size": 4, "speculative_model": "d"},
    ),
    "counts": (
        [
            "--model=m",
            "--speculative_model=d",
            "--num_speculative_tokens=5",
            "--speculative_draft_tensor_parallel_size=1",
            "--gpu-memory-utilization=0.8",
            "--max-model-len=8192",
        ],
        {
            "num_speculative_tokens": 5,
            "speculative_draft_tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.8,
            "max_model_len": 8192,
        },
    ),
    "json": (
        ["--model=m", '--speculative-config={"method": "ngram"}'],
        {"speculative_config": {"method": "ngram"}, "speculative_model": None},
    ),
    "our names": (
        [
            "--target=m",
            "--tensor_parallel=2",
            "--draft_tensor_parallel=2",
            "--drafter=draft_model",
            "--draft=d",
            "--page_size=32",
        ],
        {
            "model": "m",
            "tensor_parallel_size": 2,
            "block_size": 32,
            "speculative_config": {
                "method": "draft_model",
                "model": "d",
                "num_speculative_tokens": None,
                "draft_tensor_parallel_size": 2,
            },
        },
    ),
    "a draft alone": (
        ["--target=m", "--draft=d"],
        {
            "speculative_config": {
                "method": None,
                "model": "d",
                "num_speculative_tokens": None,
                "draft_tensor_parallel_size": None,
            }
        },
    ),
    "no drafter": (["--target=m", "--drafter=none"], {"speculative_model": None}),
}


@pytest.mark.parametrize(("flags", "expected"), TYPED.values(), ids=TYPED)
def test_flags_are_arguments_of_llm(command, asked, flags, expected):
    assert command("serve", *flags).code == 0
    assert asked["arguments"] | expected == asked["arguments"]


def test_flags_of_the_server(command, asked, monkeypatch):
    monkeypatch.setenv("SPECJAX_API_KEY", "of the environment")
    outcome = command(
        "serve",
        "--model=m",
        "--served-model-name=a,b",
        "--api-key=k",
        "--api-key=l",
        "--port=9",
        "--max-queue=3",
        "--max_body_mib=2",
        "--shutdown_timeout=1.5",
        "--nowarm_up",
    )
    assert outcome.code == 0
    settings, options = asked["settings"], asked["options"]
    assert settings.model_names == ("a", "b")
    assert settings.api_keys == ("k", "l", "of the environment")
    assert settings.max_body_bytes == 2 * 2**20
    assert (options.port, options.max_queue, options.shutdown_seconds) == (9, 3, 1.5)
    assert options.host == "127.0.0.1"
    assert asked["warm_up"] is False


def test_the_model_has_the_name_that_was_given(command, asked):
    command("serve", "--model=folder/model")
    assert asked["settings"].model_names == ("folder/model",)
    assert asked["settings"].api_keys == ()


def test_every_flag_of_the_model_is_an_argument():
    assert set(serve.LLM_FLAGS) <= llm.LLM.__init__.__annotations__.keys()


REFUSED = {
    "both": (
        ["--drafter=ngram", "--speculative_model=d"],
        ("--drafter", "--speculative_model"),
    ),
    "no JSON": (["--speculative_config={"], ("--speculative_config", "JSON")),
    "no object": (["--speculative_config=[]"], ("object",)),
    "a share": (["--gpu_memory_utilization=1.5"], ("gpu_memory_utilization",)),
    "a port": (["--port=70000"], ("port",)),
    "no model": (["--served_model_name=a"], ("does not exist",)),
}


@pytest.mark.parametrize(("flags", "words"), REFUSED.values(), ids=REFUSED)
def test_it_refuses(command, flags, words, tmp_path):
    outcome = command("serve", f"--model={tmp_path / 'none'}", "--port=0", *flags)
    assert outcome.code == 2
    last_line = outcome.err.splitlines()[-1]
    for word in words:
        assert word in last_line


def test_missing_packages_are_named(command, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("specjax.serve"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    outcome = command("serve", "--model=m")
    check_refused(outcome, "needs the package fastapi", "pip install fastapi prometheus-client")


def test_jax_gets_the_share_of_memory_before_it_starts():
    environment = {}
    assert serve._reserve_memory(0.8, environment) == serve.SHARE_OF_ALLOCATOR
    assert environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    environment = {"XLA_CLIENT_MEM_FRACTION": "0.5"}
    assert serve._reserve_memory(0.8, environment) == 0.8
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.5"}


def test_an_address_that_cannot_be_used():
    with pytest.raises(SpecJAXError, match=r"cannot listen at 192\.0\.2\.1, port 1"):
        server_lib._listen("192.0.2.1", 1)


# --- The process ----------------------------------------------------------------------------------


class Process:
    """The command in a process of its own, which serves."""

    def __init__(self, *flags: str):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XLA_FLAGS": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", *flags, "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines = []
        for line in self._process.stdout:
            self.lines.append(line)
            if line.startswith("Serving"):
                break
        self.url = self.lines[-1].split()[-1]

    def end(self, number: int) -> int:
        """Sends a signal; returns the exit code."""
        self._process.send_signal(number)
        self.errors = self._process.communicate(timeout=SECONDS)[1]
        return self._process.returncode


def test_a_process_serves_until_sigterm(folder):
    process = Process(
        f"--model={folder}", "--speculative_model=ngram", "--max_num_seqs=1", "--nowarm_up"
    )
    text = "".join(process.lines)
    for word in ("ngram, K = 7", "320 tokens", "GiB", "1 x cpu", "pages", "answers 503"):
        assert word in text
    (curl,) = [line for line in process.lines if "curl" in line]
    _, url, *options, body = shlex.split(curl)
    assert options == ["-H", "Content-Type: application/json", "-d"]
    answer = httpx.post(url, json=json.loads(body), timeout=SECONDS)
    assert answer.json()["choices"][0]["message"]["content"]
    body = {"prompt": "hello", "max_tokens": 3, "unknown": 1}
    answer = httpx.post(f"{process.url}/v1/completions", json=body, timeout=SECONDS)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["model"] == str(folder)
    assert process.end(signal.SIGTERM) == 0
    assert "ignored unknown fields of a request: 'unknown'" in process.errors
    assert "Traceback" not in process.errors


def test_ctrl_c_ends_it_at_once(folder):
    process = Process(f"--model={folder}", "--max_num_seqs=1", "--nowarm_up")
    assert process.end(signal.SIGINT) == 130
    assert "Traceback" not in process.errors


def test_programs_are_listed(folder, capsys):
    arguments = {"model": folder, "max_num_seqs": 1, "max_model_len": 32}
    load = serve._loader(arguments, ("tiny",), warm_up=True)
    load()
    out = capsys.readouterr().out
    assert "1/7" in out
    assert "7/7" in out
    assert "rounds of 1 row, sampled" in out


def test_the_page_is_part_of_the_package():
    from specjax.serve import app

    assert app.PAGE.is_relative_to(pathlib.Path(serve.__file__).parents[1])
    assert app.PAGE.exists()
