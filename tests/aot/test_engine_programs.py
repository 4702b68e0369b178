"""What XLA makes of an engine's programs for a GPU: nothing is copied, no host is asked."""

import gate
import pytest
from decode_step import ENGINE_PROGRAMS

GATES = dict.fromkeys(ENGINE_PROGRAMS, "engine_rest")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return gate.Gates(GATES, gate.Program, tmp_path_factory.mktemp)


@pytest.fixture(params=gate.marked(GATES))
def program(request, programs):
    return programs[request.param]


def test_every_kernel_of_ours_is_called(program):
    calls = [i for i in program.instructions if i.op == "custom-call"]
    assert len(calls) == program.facts["kernels"]


def test_nothing_as_large_as_a_weight_is_written_but_pools_in_place(program):
    """No weight is copied, transposed or converted, and no pool copied."""
    assert not [i.text for i in program.written(program.facts["smallest_weight"])]


def test_pools_are_updated_where_they_are(program):
    facts = program.facts
    assert facts["aliased_bytes"] >= facts["state_bytes"] > facts["pool_bytes"]
    assert facts["temporary_bytes"] < facts["smallest_pool_bytes"]


def test_nothing_goes_through_the_host(program):
    assert not program.leaves_the_device()


@pytest.mark.slow
def test_a_round_is_one_command_buffer(programs):
    """Rows are gathered before the loop, and put back behind it."""
    thunks = programs["engine_rounds"].thunks
    [loop] = [thunk for thunk in thunks if thunk.kind == "kWhile"]
    assert gate.kinds(loop.children) == ["kCommandBuffer"]
