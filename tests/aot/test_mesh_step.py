"""What XLA makes of the decode loop for four GPUs: shards as large as they should be, two
all-reduces a layer, nothing copied, one loop, no host. What is checked, and why, is in
`mesh_step.py`, which checks all layers in the same way."""

from collections import Counter

import gate
import mesh_step
import pytest
from mesh_step import CHECKS, PROGRAMS

GATES = {"mesh_h100": "mesh_step", "mesh_a100": "mesh_step_rest"}
NAMES = gate.marked(GATES)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    gate_of = GATES | {"mesh_wrong": "mesh_step"}
    return gate.Gates(gate_of, mesh_step.Program, tmp_path_factory.mktemp)


def test_every_program_has_its_gate():
    assert GATES.keys() == PROGRAMS.keys()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong(name, check, programs):
    assert len(programs[name].instructions) > 50
    assert not check(programs[name])


@pytest.mark.parametrize("name", NAMES)
def test_command_buffers_reach_from_exchange_to_exchange(name, programs):
    """Beside them there are the exchanges, and a few small kernels that run meanwhile. With XLA's
    flag --xla_gpu_enable_command_buffer=+COLLECTIVES a round becomes one command buffer."""
    [loop] = programs[name].thunks
    kinds = Counter(gate.kinds(loop.children))
    assert 0 < kinds.pop("kCommandBuffer") <= len(programs[name].collectives()) + 1
    assert kinds.pop("kCustomKernel") < 16
    assert set(kinds) <= {"kAllReduce", "kAllGather", "kAsyncStart", "kAsyncDone"}


def test_what_must_not_be_exchanged_is_noticed(programs):
    wrong = programs["mesh_wrong"]
    assert mesh_step.large_exchanges(wrong) == Counter(
        {
            ("all-reduce", 8192): 4,  # not 3
            ("all-reduce", 4096): 1,
            ("all-gather", 128256): 1,
        }
    )
    assert mesh_step.exchanges(wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("check", "fact", "factor"),
    [
        (mesh_step.arguments, "argument_bytes", 1.02),
        (mesh_step.arguments, "argument_bytes", 0.98),
        (mesh_step.temporaries, "temporary_bytes", 1.2),
        (mesh_step.pools_in_place, "aliased_bytes", 0.99),
    ],
)
def test_other_sizes_are_noticed(name, check, fact, factor, programs, monkeypatch):
    program = programs[name]
    monkeypatch.setitem(program.facts, fact, factor * program.facts[fact])
    assert check(program)


@pytest.mark.parametrize("name", NAMES)
def test_an_instruction_more_or_less_is_noticed(name, programs, monkeypatch):
    program, instructions = programs[name], programs[name].instructions
    reduce = next(
        i for i in program.collectives() if PROGRAMS[name].target.hidden_size in i.shapes[0]
    )
    update = next(i for i in instructions if tuple(program.facts["pools"][0]) in i.shapes)
    call = update._replace(op="custom-call")
    for check, changed in (
        (mesh_step.exchanges, [*instructions, reduce]),
        (mesh_step.exchanges, [i for i in instructions if i is not reduce]),
        (
            mesh_step.copies,
            [*instructions, update._replace(inside="")],
        ),  # a copy: nothing says that it is in place
        (mesh_step.kernels, [*instructions, call]),
        (mesh_step.host, [*instructions, call]),
    ):
        monkeypatch.setattr(program, "instructions", changed)
        assert check(program)
