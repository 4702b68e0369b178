"""Runs the compilations for absent GPUs, each once per session, and reads what came of them."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from specjax.kernels.gpu import aot

PACKAGES = "SPECJAX_AOT_PACKAGES"
SECONDS = 900  # each takes a minute or two of one core
HERE = pathlib.Path(__file__).parent
RESOURCES = ["-m", "specjax.kernels.gpu.resources", "--check"]
DECODE_STEP = [str(HERE / "decode_step.py")]
MESH_STEP = [str(HERE / "mesh_step.py")]
# The folder to write to comes after those that are a script. Those of `slow` tests have names that
# end in "_rest" or "_all".
COMMANDS = {
    "resources": [*RESOURCES, "--every=5"],
    "resources_all": RESOURCES,
    "decode_step": [*DECODE_STEP, "rejection", "ngram", "broken"],
    "decode_step_rest": [*DECODE_STEP, "plain", "coupled", "eagle"],
    "engine_rest": [*DECODE_STEP, "engine_rounds", "engine_prefill"],
    "mesh_step": [*MESH_STEP, "mesh_h100", "mesh_wrong"],
    "mesh_step_rest": [*MESH_STEP, "mesh_a100"],
}


def importable() -> bool:
    """Are the wheels of the extra `aot` installed beside jax?"""
    return importlib.util.find_spec("jax_cuda12_plugin") is not None


class Run(NamedTuple):
    """What a process left: its exit code, None where it took too long, and its output and errors in
    one."""

    code: int | None
    out: str


@functools.cache
def run(name: str, folder: pathlib.Path) -> Run:
    """Runs one of `COMMANDS`; a script writes to the folder. A gate that cannot run fails."""
    packages = os.environ.get(PACKAGES)
    if not (os.path.isdir(packages) if packages else importable()):
        pytest.fail(
            "nothing here compiles for an absent GPU: run `make test`, which installs what that "
            f"takes and says where it is in {PACKAGES}, or install the extra 'aot'"
        )
    script, *arguments = COMMANDS[name]
    command = [script, *arguments] if script == "-m" else [script, str(folder), *arguments]
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=aot.environment(packages),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # it has no exit code then, which is not 0 either
    return Run(process.returncode, output.read_text())


class Gates:
    """Runs each gate when one of its programs is first asked for.

    Attributes:
      gate_of: the gate of each program by name, one of `COMMANDS`.
      read: makes a program of the folder that its gate saved it in.
      mktemp: makes a folder for a gate.
    """

    def __init__(self, gate_of: dict[str, str], read: Callable, mktemp: Callable):
        self.gate_of, self.read, self.mktemp = gate_of, read, mktemp
        self.folders, self.programs = {}, {}

    def __getitem__(self, name: str):
        gate = self.gate_of[name]
        if gate not in self.folders:
            self.folders[gate] = self.mktemp(gate)
            result = run(gate, self.folders[gate])
            assert result.code == 0, result.out[-4000:]
        if name not in self.programs:
            self.programs[name] = self.read(self.folders[gate] / name)
        return self.programs[name]


def marked(gate_of: dict[str, str]) -> list:
    """Returns names of programs as parameters of a test; those of a gate "..._rest" are slow."""
    parameters = []
    for name, gate in gate_of.items():
        marks = [pytest.mark.slow] if gate.endswith("_rest") else []
        parameters.append(pytest.param(name, marks=marks))
    return parameters


class Instruction(NamedTuple):
    """An instruction of an HLO program whose result is written to memory.

    Attributes:
      name: of the instruction.
      op: such as "copy" or "fusion".
      shapes: dimensions of each array of the result.
      inside: computation that a fusion calls, "" for other instructions.
      text: the whole line.
    """

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    inside: str
    text: str


class Program:
    """A compiled program as `decode_step.py` saved it.

    Attributes:
      facts: see there.
      instructions: those that write to memory; what happens within a fusion or within a reduction
        does not.
      computations: name to lines.
      thunks: what runs, see `Thunk`.
    """

    WRITES_NOTHING = (
        "parameter",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "constant",
        "while",
        "conditional",
        "call",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "after-all",
    )

    def __init__(self, folder: pathlib.Path):
        self.facts = json.loads(folder.joinpath("facts.json").read_text())
        self.thunks = parse_thunks(folder.joinpath("thunks.txt").read_text())
        self.computations, entry = {}, ""
        for line in folder.joinpath("hlo.txt").read_text().splitlines():
            if start := re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line):
                lines = self.computations.setdefault(start[2], [])
                entry = start[2] if start[1] else entry
            elif line.startswith("  "):
                lines.append(line.partition(", backend_config=")[0])
        self.instructions, self.while_loops = [], []
        self._walk(entry)

    def _walk(self, computation: str) -> None:
        for line in self.computations[computation]:
            name, result, op = re.match(
                r"\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w-]+)\(", line
            ).groups()
            for inner in re.findall(
                r"(?:body|condition|true_computation|false_computation)=%?([\w.-]+)", line
            ):
                self._walk(inner)
            for several in re.findall(
                r"(?:branch_computations|called_computations)=\{([^}]*)\}", line
            ):
                for inner in several.replace("%", "").split(", "):
                    self._walk(inner)
            if op == "call" or op.startswith("async"):
                self._walk(re.search(r"(?:to_apply|calls)=%?([\w.-]+)", line)[1])
            if op == "while":
                self.while_loops.append(re.search(r'op_name="([^"]*)"', line)[1])
            if op not in self.WRITES_NOTHING:
                shapes = tuple(
                    tuple(int(size) for size in dims.split(",") if size)
                    for dims in re.findall(r"\w+\[([\d,]*)\]", result)
                )
                inside = re.search(r"calls=%?([\w.-]+)", line)[1] if op == "fusion" else ""
                self.instructions.append(Instruction(name, op, shapes, inside, line))

    def written(self, at_least: int) -> list[Instruction]:
        """Instructions that write an array of at least so many numbers, unless they update a pool
        where it is."""
        pools = {tuple(shape) for shape in self.facts["pools"]}

        def updates(instruction: Instruction) -> bool:
            """Is it a fusion that scatters into pools, and writes nothing else that is large?"""
            body = self.computations.get(instruction.inside, [])
            scattered = sum(
                " scatter(" in line or " dynamic-update-slice(" in line for line in body
            )
            large = [shape for shape in instruction.shapes if math.prod(shape) >= at_least]
            return pools.issuperset(large) and scattered >= len(large)

        return [
            instruction
            for instruction in self.instructions
            if any(math.prod(shape) >= at_least for shape in instruction.shapes)
            and not updates(instruction)
        ]

    def products(self, at_least: int) -> list[Instruction]:
        """Those of the instructions above that multiply matrices, and write nothing but the
        product."""
        return [
            instruction
            for instruction in self.written(at_least)
            if len(instruction.shapes) == 1
            and (
                instruction.op == "dot"
                or any(" dot(" in line for line in self.computations.get(instruction.inside, []))
            )
        ]

    def collectives(self) -> list[Instruction]:
        """Instructions by which devices exchange something."""
        return [
            i
            for i in self.instructions
            if re.match("all-|collective-|reduce-scatter|ragged-all-to-all", i.op)
            and not i.op.endswith("-done")
        ]

    def exchanged(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every array that devices exchange: by which operation, and the shape that it has
        afterwards."""
        found = []
        for i in self.collectives():
            # The start of an asynchronous one may list what goes in before what comes out.
            operands = re.search(rf" {i.op}\(([^)]*)\)", i.text)[1].count("%")
            found += [(i.op.removesuffix("-start"), shape) for shape in i.shapes[-operands:]]
        return found

    def leaves_the_device(self) -> list[str]:
        """Instructions that go through the host or through its memory, and calls of what is no
        kernel of ours."""
        ops = (
            "infeed",
            "outfeed",
            "send",
            "recv",
            "copy-start",
            "copy-done",
            "async",
            "send-done",
            "recv-done",
        )
        return [
            i.text
            for i in self.instructions
            if i.op.startswith(ops)
            or "S(5)" in i.text
            or "callback" in i.text
            or (i.op == "custom-call" and 'custom_call_target="mosaic_gpu_v2"' not in i.text)
        ]


class Thunk(NamedTuple):
    """A step of what XLA executes. `children` of a while loop are those of its body."""

    kind: str
    children: list[Thunk]


def parse_thunks(text: str) -> list[Thunk]:
    """Reads a `thunk_sequence_after_thunk_passes.txt`: one thunk a line, indented below the one
    that holds it."""
    top = Thunk("", [])
    stack = [(-1, top)]  # indentation, thunk
    for line in text.splitlines():
        if thunk := re.match(r"( *)\d+: (k\w+)", line):
            while stack[-1][0] >= len(thunk[1]):
                stack.pop()
            stack[-1][1].children.append(new := Thunk(thunk[2], []))
            stack.append((len(thunk[1]), new))
        elif re.search(r"\bbody:\s*$", line):
            while stack[-1][1].kind != "kWhile":
                stack.pop()
            stack[-1][1].children.clear()  # the thunks of the condition
    return top.children


def kinds(thunks: list[Thunk]) -> list[str]:
    """Their kinds, in order."""
    return [thunk.kind for thunk in thunks]
