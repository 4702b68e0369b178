"""What XLA makes of the whole decode loop for a GPU: one loop, one command buffer, nothing copied,
no host."""

import math
from collections import Counter

import gate
import pytest
from decode_step import PROGRAMS, broken

GATES = dict.fromkeys(("rejection", "ngram"), "decode_step")
GATES |= dict.fromkeys(("plain", "coupled", "eagle"), "decode_step_rest")
NAMES = gate.marked(GATES)
# There two loops of one round or none stand for branches.
ONE_LOOP = [name for name in NAMES if name.values != ("ngram",)]
BROKEN = [*broken(), "logits_stacked"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    gate_of = GATES | dict.fromkeys(BROKEN, "decode_step")
    return gate.Gates(gate_of, gate.Program, tmp_path_factory.mktemp)


@pytest.fixture(params=NAMES)
def program(request, programs):
    return programs[request.param]


def test_every_program_has_its_gate():
    assert GATES.keys() == PROGRAMS.keys()


def test_one_loop_holds_everything(program):
    outermost = [
        name for name in program.while_loops if not name.startswith("jit(generate)/while/body/")
    ]
    assert outermost == ["jit(generate)/while"]
    assert gate.kinds(program.thunks) == ["kWhile"]


@pytest.mark.parametrize("name", ONE_LOOP)
def test_no_loop_is_inside_the_loop(name, programs):
    assert len(programs[name].while_loops) == 1


@pytest.mark.parametrize("name", ONE_LOOP)
def test_a_round_is_one_command_buffer(name, programs):
    """One launch of a CUDA graph, with every kernel of ours in it."""
    [loop] = programs[name].thunks
    assert gate.kinds(loop.children) == ["kCommandBuffer"]
    assert (
        gate.kinds(loop.children[0].children).count("kCustomCall")
        == programs[name].facts["kernels"]
    )


def test_a_round_of_prompt_lookup_is_few_command_buffers(programs):
    """The search, the pass with guesses, the pass without, what follows; a pass is a loop of one
    round or none."""
    [loop] = programs["ngram"].thunks
    assert gate.kinds(loop.children) == ["kCommandBuffer", "kWhile", "kWhile", "kCommandBuffer"]
    passes = [inner for inner in loop.children if inner.kind == "kWhile"]
    assert [gate.kinds(inner.children) for inner in passes] == [["kCommandBuffer"]] * 2
    kernels = [
        kind
        for inner in passes
        for kind in gate.kinds(inner.children[0].children)
        if kind == "kCustomCall"
    ]
    assert len(kernels) == programs["ngram"].facts["kernels"]


def test_every_kernel_of_ours_is_called(program):
    calls = [i for i in program.instructions if i.op == "custom-call"]
    assert len(calls) == program.facts["kernels"]


def test_nothing_as_large_as_a_weight_is_written_but_pools_in_place(program):
    """No weight is copied, transposed or converted, and no pool copied."""
    assert len(program.instructions) > 50
    assert not [i.text for i in program.written(program.facts["smallest_weight"])]


def sizes(instructions) -> Counter:
    """Of the arrays that they write, how many there are of each number of numbers."""
    return Counter(math.prod(shape) for i in instructions for shape in i.shapes)


def beside_logits(program) -> tuple[Counter, Counter]:
    """Sizes of the products of matrices of B * V numbers or more, which are logits, and of other
    arrays so large."""
    at_least = program.facts["smallest_logits"]
    logits = sizes(program.products(at_least))
    assert logits and all(size % at_least == 0 for size in logits)
    written = sizes(program.written(at_least))
    return logits, Counter({size: n for size, n in written.items() if size >= at_least}) - logits


def test_nothing_as_large_as_logits_is_written_but_logits(program):
    """Filters alone write two more arrays for each of logits, in which they search: the order of
    the logits as integers, and the weights."""
    logits, others = beside_logits(program)
    expected = logits + logits if program.facts["filters"] else Counter()
    assert others == expected, [i.text for i in program.written(program.facts["smallest_logits"])]


def test_pools_are_updated_where_they_are(program):
    facts = program.facts
    assert facts["aliased_bytes"] >= facts["state_bytes"] > facts["pool_bytes"]
    assert facts["temporary_bytes"] < 1.1 * facts["logits_bytes"] < facts["smallest_pool_bytes"]


def test_nothing_goes_through_the_host(program):
    assert not program.leaves_the_device()


def test_these_checks_notice(programs):
    """Each loop that is wrong on purpose is caught by the check that is there for it, and the right
    one by none."""

    def faults(name):
        program = programs[name]
        written = program.written(program.facts["smallest_weight"])
        loops = [thunk for thunk in program.thunks if thunk.kind == "kWhile"]
        return {
            "pool": any((512, 8, 64, 128) in i.shapes for i in written),
            "weight": any((4096, 4096) in i.shapes for i in written),
            "host": bool(program.leaves_the_device()),
            "buffer": [gate.kinds(loop.children) for loop in loops] != [["kCommandBuffer"]],
        }

    def found(name):
        return {fault for fault, there in faults(name).items() if there}

    assert found("right") == set()
    assert found("not_donated") == {"pool"}
    assert found("pool_rebuilt") == {"pool"}
    assert found("weight_converted") == {"weight"}
    assert found("loop_inside") == {"buffer"}
    assert "host" in found("through_host")
    stacked = programs["logits_stacked"]
    assert beside_logits(stacked)[1] == Counter([2 * stacked.facts["smallest_logits"]])
