"""What XLA makes of the loop: one loop, nothing copied that is large, nothing that goes through the
host."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import llama
from specjax.config import LlamaConfig
from specjax.drafters import registry
from support.loop import GENERATE, compilations, prepare, result
from support.models import Model, make_drafter

# Sizes that show: XLA treats tiny matrices otherwise, and no activation is as large as the smallest
# of the weights.
TARGET_CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
)
DRAFT_CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=96,
    intermediate_size=160,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=48,
    tie_word_embeddings=True,
)
TARGET, DRAFT = (
    Model(config, llama.init(jax.random.key(i), config, scale=0.2))
    for i, config in enumerate((TARGET_CONFIG, DRAFT_CONFIG))
)
PROMPTS = [[5, 6, 5, 6, 5], [1], [9, 8, 7, 9, 8, 7, 9]]


def arguments(name, prompts=PROMPTS):
    drafter, params = (None, None) if name == "none" else make_drafter(name, 3, TARGET, DRAFT)
    # 9 positions a page: no other array has the shape of a pool.
    return prepare(
        TARGET,
        prompts,
        drafter=drafter,
        draft_params=params,
        max_new=[20, 9, 24],
        capacity=40,
        page_size=9,
        temperature=[0, 1, 0.7],
        top_p=[1, 0.9, 1],
        seed=[1, 2, 3],
    )


@pytest.fixture(scope="module", params=["none", *registry.names(), "ngram,eagle"])
def compiled(request):
    """A drafter's name, the arguments of a call, the compiled program, its text, and its
    instructions as (name, type, dimensions, operation)."""
    args = arguments(request.param)
    text = GENERATE.lower(*args).compile().as_text()  # a call with such arguments uses this program
    found = re.findall(
        r"^\s*(?:ROOT )?%?(\S+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", text, flags=re.MULTILINE
    )
    instructions = [
        (name, kind, tuple(map(int, dims.split(","))) if dims else (), op)
        for name, kind, dims, op in found
    ]
    assert len(instructions) > 500 and {"dot", "fusion"} <= {op for *_, op in instructions}
    return request.param, args, text, instructions


def test_one_loop_holds_everything(compiled):
    """All other loops (of random numbers, and those that stand for a branch) are inside it."""
    _, _, text, _ = compiled
    lines = [line for line in text.splitlines() if re.search(r" while\(", line)]
    names = [re.search(r'op_name="([^"]*)"', line) for line in lines]
    assert all(names)
    outermost = [name[1] for name in names if not name[1].startswith("jit(generate)/while/body/")]
    assert outermost == ["jit(generate)/while"]


def test_no_pool_is_copied(compiled):
    """A pool that is copied costs more with every position of the cache, used or not."""
    _, args, _, instructions = compiled
    is_pool = lambda x: x.ndim > 2  # noqa: E731
    pools = {x.shape for x in jax.tree.leaves((args[3].cache, args[3].drafter)) if is_pool(x)}
    assert any(dims in pools for _, _, dims, _ in instructions)
    copies = [
        (name, dims)
        for name, _, dims, op in instructions
        if dims in pools
        and (op.startswith(("copy", "transpose")) or "copy" in name or "transpose" in name)
    ]
    assert not copies


def test_no_weight_is_copied_or_transposed(compiled):
    """Each is read once a pass, where it lies."""
    _, args, _, instructions = compiled
    smallest = min(
        x.size
        for path, x in jax.tree.leaves_with_path(args[:2])
        if x.ndim > 1 and "norm" not in path[-1].key
    )
    assert smallest >= 96 * 96
    copies = [
        (name, dims)
        for name, kind, dims, op in instructions
        if kind == "f32"
        and np.prod(dims, dtype=int) >= smallest
        and (op.startswith(("copy", "transpose")) or "copy" in name or "transpose" in name)
    ]
    assert not copies


def test_nothing_goes_through_the_host(compiled):
    _, _, text, instructions = compiled
    assert not {op for *_, op in instructions} & {
        "infeed",
        "outfeed",
        "send",
        "recv",
        "send-done",
        "recv-done",
    }
    assert set(re.findall(r'custom_call_target="([^"]*)"', text)) <= {"TopK"}
    assert "callback" not in text


def test_every_buffer_of_the_state_is_donated(compiled):
    _, args, text, _ = compiled
    aliases = re.search(
        r"input_output_alias=\{(.*?)\}, entry_computation_layout", text, flags=re.DOTALL
    )[1]
    leaves = jax.tree.leaves(args[3])
    assert len(re.findall(r"(?:may|must)-alias", aliases)) == len(leaves)
    where = {x.unsafe_buffer_pointer() for x in leaves if x.ndim > 2}
    state = GENERATE(*args)
    assert all(x.is_deleted() for x in leaves)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.ndim > 2} == where


def test_the_callers_own_arrays_survive(compiled):
    """Parameters and prompts may be used again after the state was donated."""
    name, *_ = compiled
    args = arguments(name)
    texts = [result(GENERATE(*arguments(name))).emitted for _ in range(2)]
    GENERATE(*args)
    assert texts[0] == texts[1]
    assert not any(x.is_deleted() for x in jax.tree.leaves(args[:2]))


def test_the_loop_transfers_nothing_and_a_second_prompt_compiles_nothing(compiled):
    name, *_ = compiled
    GENERATE(*arguments(name))
    with compilations() as programs:
        args = arguments(name, [[3], [4, 4, 4, 4, 4, 4], [1, 2, 3, 1, 2]])
        with jax.transfer_guard("disallow"):
            state = jax.block_until_ready(GENERATE(*args))
    assert not programs
    assert (np.asarray(state.length_B) == [21, 15, 29]).all()
    with compilations() as programs:  # the listener works
        jax.jit(lambda x: x + jnp.float32(1.5))(np.float32(len(name)))
    assert programs
