"""Runs of several processes: the text of one process, and an error if a process dies."""

import copy
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from support import folders, xla

CONFIG = {"num_hidden_layers": 1, "num_key_value_heads": 4, "max_position_embeddings": 8192}
PROMPTS = ("hello", "he", "or world")
SECONDS = 400  # a test that takes longer fails


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and a draft model whose drafts are sometimes accepted."""
    folder = tmp_path_factory.mktemp("models")
    arrays, noise = (folders.tensors(CONFIG, seed=seed) for seed in (0, 1))
    folders.write_folder(folder / "target", CONFIG, arrays)
    folders.write_folder(
        folder / "draft", CONFIG, {name: x + 0.1 * noise[name] for name, x in arrays.items()}
    )
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def environment(folder: pathlib.Path, devices: int) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XLA_FLAGS": xla.quick_flags(devices),
    }


class Process:
    """`specjax generate` in a subprocess; its output goes to files."""

    def __init__(self, folder: pathlib.Path, output: pathlib.Path, *arguments: str, devices: int):
        command = [
            sys.executable,
            "-c",
            "from specjax.cli import main; main.run()",
            "generate",
            f"--target={folder / 'target'}",
            *(f"--prompt={prompt}" for prompt in PROMPTS),
            *arguments,
        ]
        self._paths = output.with_suffix(".out"), output.with_suffix(".err")
        with self._paths[0].open("w") as out, self._paths[1].open("w") as err:
            env = environment(folder, devices)
            self.popen = subprocess.Popen(command, env=env, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()


@pytest.fixture
def start(folder, tmp_path):
    """Starts processes; kills the remaining ones at the end."""
    processes = []

    def start(*arguments, devices: int = 2) -> Process:
        processes.append(
            Process(folder, tmp_path / f"process{len(processes)}", *arguments, devices=devices)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.popen.kill()
        process.popen.wait()


def of_two(process_id: int, port: int, timeout: int) -> list[str]:
    return [
        f"--coordinator=localhost:{port}",
        "--num_processes=2",
        f"--process_id={process_id}",
        f"--process_timeout={timeout}",
    ]


def sampling(folder) -> list[str]:
    return [
        f"--draft={folder / 'draft'}",
        "--drafter=draft_model",
        "--num_speculative_tokens=2",
        "--verify=coupled",
        "--temperature=0.8",
        "--max_new_tokens=24",
    ]


@pytest.fixture(scope="module")
def one(folder) -> str:
    """The output file of one process on one device."""
    process = Process(
        folder, folder / "process", *sampling(folder), f"--output={folder / 'one.jsonl'}", devices=1
    )
    assert process.popen.wait(SECONDS) == 0, process.err
    return folder.joinpath("one.jsonl").read_text()


@pytest.mark.parametrize("mesh", [(4, 2, 1), (2, 2, 2)], ids=["models", "batch"])
def test_two_processes_write_the_text_of_one(mesh, one, start, folder, tmp_path):
    """The models or the batch are split over both processes."""
    degrees = zip(("tensor_parallel", "draft_tensor_parallel", "data_parallel"), mesh, strict=True)
    several = [
        *(f"--{name}={degree}" for name, degree in degrees),
        f"--output={tmp_path / 'two.jsonl'}",
    ]
    port = free_port()
    processes = [start(*sampling(folder), *several, *of_two(i, port, SECONDS)) for i in range(2)]
    assert [process.popen.wait(SECONDS) for process in processes] == [0, 0], [
        process.err for process in processes
    ]
    assert tmp_path.joinpath("two.jsonl").read_text() == one
    rounds = [a_round for line in one.splitlines() for a_round in json.loads(line)["rounds"]]
    assert (
        5
        < sum(a_round["accepted"] for a_round in rounds)
        < sum(a_round["drafted"] for a_round in rounds)
    )
    # Only process 0 prints.
    assert "> hello" in processes[0].out and "> hello" not in processes[1].out


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    """What the calls return in one process, and in each of two."""
    tmp_path, port = tmp_path_factory.mktemp("llm"), str(free_port())
    runs = {"one": [], "first": [port, "0"], "second": [port, "1"]}
    processes = {}
    try:
        for name, arguments in runs.items():
            with tmp_path.joinpath(f"{name}.err").open("w") as err:
                processes[name] = subprocess.Popen(
                    [
                        sys.executable,
                        *("-m", "support.llm_process"),
                        *(str(folder), str(tmp_path / f"{name}.json"), *arguments),
                    ],
                    cwd=pathlib.Path(__file__).parent,
                    env=environment(folder, devices=2),
                    stderr=err,
                )
        for name, process in processes.items():
            err = tmp_path.joinpath(f"{name}.err")
            assert process.wait(SECONDS) == 0, err.read_text()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return {name: json.loads(tmp_path.joinpath(f"{name}.json").read_text()) for name in runs}


class TestLLM:
    """`LLM` in two processes, which make the same calls: see `support.llm_process`."""

    def test_both_processes_get_the_same(self, results):
        assert results["first"] == results["second"]

    @pytest.mark.parametrize("call", ["greedy", "sampled", "stop", "chat", "abort"])
    def test_outputs_are_those_of_one_process(self, results, call):
        first, one = copy.deepcopy((results["first"][call], results["one"][call]))
        if call == "stop":  # rounds behind a stop string depend on time
            for *_, completions in first + one:
                for completion in completions:
                    del completion["drafted"], completion["accepted"]
        assert first == one

    def test_each_call_did_what_it_is_for(self, results):
        def completions(run, call):
            return [of_request for *_, of_request in results[run][call]]

        assert [len(of_request) for of_request in completions("first", "sampled")] == [2] * 5
        whole, stopped = (completions("first", call)[0][0] for call in ("greedy", "stop"))
        assert stopped["finish_reason"] == "stop" and whole["text"].startswith(stopped["text"])
        assert len(stopped["token_ids"]) < len(whole["token_ids"])
        # The seed that process 0 has chosen is the one that is used.
        fresh = completions("first", "fresh")
        assert completions("first", "same seed") == [fresh[1]]
        seeds = {of_request[0]["seed"] for of_request in fresh}
        others = {of_request[0]["seed"] for of_request in completions("one", "fresh")}
        assert len(seeds | others) == 10

    def test_different_prompts_are_refused(self, results):
        message = "the processes of this run were not given the same prompts and options"
        assert results["first"]["different prompts"] == message


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        (1, signal.SIGSTOP),
    ],
)
def test_the_others_end_if_a_process_dies(victim, how, start, tmp_path):
    """Their error names the cause.

    A process that hangs or loses its host closes no connection: the timeout ends the others.
    """
    port, timeout = free_port(), 10
    options = [
        "--ignore_eos",
        "--max_new_tokens=8000",
        "--tensor_parallel=4",
        f"--output={tmp_path / 'out.jsonl'}",
    ]
    processes = [start(*options, *of_two(i, port, timeout)) for i in range(2)]
    victim, survivor = processes[victim], processes[1 - victim]
    while "Gloo" not in victim.out:  # printed when the first collective connects
        assert victim.popen.poll() is None, victim.err
        time.sleep(0.1)
    time.sleep(1)
    victim.popen.send_signal(how)
    assert survivor.popen.wait(timeout + 15) in (1, -signal.SIGABRT)  # from SpecJAX, or from JAX
    assert "one of them may have died" in survivor.err or "another task died" in survivor.err, (
        survivor.err
    )
    assert not tmp_path.joinpath("out.jsonl").exists()


def test_an_error_in_one_process_ends_both(start):
    port = free_port()
    good, bad = (
        start("--tensor_parallel=4", *of_two(i, port, SECONDS), *more)
        for i, more in enumerate([(), ("--target=/does/not/exist",)])
    )
    assert bad.popen.wait(SECONDS) == 2
    assert bad.err.startswith("specjax: error: /does/not/exist does not exist; give the folder of")
    assert good.popen.wait(SECONDS) != 0
    assert "one of them may have died" in good.err or "another task died" in good.err, good.err


def test_processes_with_different_prompts_are_an_error(start):
    port = free_port()
    processes = [
        start("--tensor_parallel=4", *of_two(i, port, SECONDS), f"--prompt={i}") for i in range(2)
    ]
    for process in processes:
        assert process.popen.wait(SECONDS) == 2
        assert (
            "the processes of this run were not given the same prompts and options" in process.err
        )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["--coordinator=host", "--num_processes=2", "--process_id=0"],
            ["--coordinator=host", "host:port"],
        ),
        (["--coordinator=localhost:1", "--process_id=0"], ["--num_processes", "belong together"]),
        (
            ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"],
            ["--process_id=2 must be in [0, 2)"],
        ),
        (["--distributed"], ["cannot join the other processes"]),
    ],
)
def test_inconsistent_flags(start, arguments, parts):
    process = start(*arguments)
    assert (process.popen.wait(SECONDS), process.out) == (2, "")
    assert process.err.startswith("specjax: error: ") and process.err.count("\n") == 1
    assert all(part in process.err for part in parts)
