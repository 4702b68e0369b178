"""Meshes of up to eight virtual devices: the text of one device, and equal decisions on all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, llama, parallel, sampling
from specjax.config import LlamaConfig, Runtime
from specjax.drafters import base, registry
from specjax.engine import generate as generation
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from support.loop import GENERATE, prepare, result
from support.models import Model, make_drafter

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
    attention_bias=True,
    mlp_bias=True,
)
TARGET = Model(CONFIG, llama.init(jax.random.key(1), CONFIG, scale=0.5))
OTHER = llama.init(jax.random.key(2), CONFIG, scale=0.5)
DRAFT = Model(
    CONFIG, jax.tree.map(lambda a, b: a + 0.15 * b, TARGET.params, OTHER)
)  # often right and often wrong
# (data_parallel, tensor_parallel, draft_tensor_parallel). COVERING has each axis at 2 or 4 and at
# its maximum, alone and with others (a draft is split only if its target is).
COVERING = [(2, 1, 1), (2, 4, 1), (1, 4, 2), (1, 8, 4), (8, 1, 1)]
DEGREES = [
    (data, tensor, draft)
    for data in (1, 2, 4, 8)
    for tensor in (1, 2, 4, 8)
    for draft in (1, 2, 4, 8)
    if data * tensor <= 8 and tensor % draft == 0
]
PROMPTS = [
    np.random.default_rng(row).integers(0, 32, length).tolist() * 2
    for row, length in enumerate([1, 2, 3, 4, 5, 6, 7, 3])
]
# Half of the rows are greedy; the others differ in temperature, seed and length.
ROWS = dict(
    temperature=[0, 1, 0, 0.7, 0, 1.5, 0, 1],
    seed=list(range(8)),
    max_new=[24, 24, 28, 20, 28, 1, 26, 25],
)
FILTERS = dict(
    top_k=[0, 0, 3, 5, 0, 9, 0, 0],
    top_p=[1, 1, 0.5, 1, 1, 0.8, 1, 0.9],
    min_p=[0, 0, 0, 0, 0, 0, 0, 0.1],
)


def placed(model: Model, mesh, role: str) -> Model:
    """The model with its parameters on the mesh."""
    return Model(model.config, parallel.place(model.params, mesh, role))


def arguments(name: str, degrees=None, K: int = 1, **options):
    """Arguments of `decode.generate` for a drafter, on one device or a mesh of these degrees.

    K is 1 by default, since each draft takes a second to compile.
    """
    drafter, draft_params = (None, None) if name == "none" else make_drafter(name, K, TARGET, DRAFT)
    target = TARGET
    if degrees:
        data, tensor, draft = degrees
        options["mesh"] = mesh = parallel.make_mesh(tensor, draft, data)
        target = placed(TARGET, mesh, "target")
        if draft_params is not None:
            draft_params = parallel.place(draft_params, mesh, "draft")
    return prepare(
        target, PROMPTS, drafter=drafter, draft_params=draft_params, **{**ROWS, **options}
    )


@pytest.fixture(scope="module")
def plain():
    """The texts of plain decoding on one device."""
    return result(GENERATE(*arguments("none"))).emitted


@pytest.fixture(scope="module")
def counts():
    """By drafter: the number of accepted drafts on one device, per row and round."""
    return {
        name: np.asarray(GENERATE(*arguments(name, verify="coupled")).log.accepted_BS)
        for name in (*registry.names(), "ngram,eagle")
    }


def assert_copies_agree(state):
    """Checks that replicated arrays have the same bits on all devices."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        first = {}
        for shard in x.addressable_shards:
            data = np.asarray(shard.data)
            same = first.setdefault(str(shard.index), data)
            assert same.tobytes() == data.tobytes(), (
                f"{jax.tree_util.keystr(path)} on device {shard.device}"
            )


def degrees_of_drafters():
    """Drafters and degrees; cases outside the covering set are marked slow."""
    chosen = [("draft_model", degrees) for degrees in COVERING]
    chosen += [("ngram", (2, 4, 1)), ("eagle", (2, 4, 2)), ("ngram,eagle", (1, 8, 1))]
    every = [("draft_model", degrees) for degrees in DEGREES]
    every += [("ngram", degrees) for degrees in DEGREES if degrees[2] == 1]
    every += [("eagle", degrees) for degrees in [(8, 1, 1), (1, 8, 1), (1, 4, 4)]]
    every += [("ngram,eagle", degrees) for degrees in [(2, 2, 1), (1, 8, 4)]]
    others = [case for case in every if case not in chosen]
    return chosen + [pytest.param(*case, marks=pytest.mark.slow) for case in others]


@pytest.mark.parametrize(("name", "degrees"), degrees_of_drafters(), ids=str)
def test_the_texts_are_those_of_one_device(name, degrees, plain, counts):
    """Greedy and coupled rows in one batch. Equal counts per round show that drafts are equal,
    too."""
    state = GENERATE(*arguments(name, degrees, verify="coupled"))
    assert result(state).emitted == plain
    np.testing.assert_array_equal(state.log.accepted_BS, counts[name])
    assert counts[name].sum() > 10
    assert_copies_agree(state)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("draft_model", (2, 4, 2)),
        pytest.param("ngram,eagle", (1, 8, 1), marks=pytest.mark.slow),
        pytest.param("draft_model", (1, 8, 1), marks=pytest.mark.slow),
        pytest.param("ngram", (1, 4, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rejection_with_filters(name, degrees):
    """The distributions of target and draft are sharded, in different ways."""
    options = dict(temperature=[0, 1, 1.2, 0.7, 0, 1.5, 1, 1], **FILTERS)
    alone, state = (
        GENERATE(*arguments(name, d, K=2, verify="rejection", **options)) for d in (None, degrees)
    )
    assert result(state).emitted == result(alone).emitted
    np.testing.assert_array_equal(state.log.accepted_BS, alone.log.accepted_BS)
    assert 0 < alone.log.accepted_BS.sum() < alone.log.drafted_BS.sum()
    assert_copies_agree(state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disagreeing(base.Drafter):
    """A drafter whose logits or tokens differ between devices."""

    is_sampled: bool

    def propose(self, params, state, context, sample):
        device = jax.lax.axis_index(("tp_shared", "tp_target"))
        guess_B = context.length_B % 7 + 3 * device
        if not self.is_sampled:
            return base.Draft(guess_B[:, None], count_B=jnp.minimum(guess_B % 3, 1)), state
        token_B, distribution = sample(jax.nn.one_hot(guess_B, 32) * 9, context.length_B)
        return base.chain([token_B], [distribution]), state


@pytest.mark.parametrize(("verify", "is_sampled"), [("rejection", True), ("coupled", False)])
def test_devices_that_round_differently_still_agree(verify, is_sampled, plain):
    """All devices verify the drafts of the first one."""
    mesh = parallel.make_mesh(4, 2, 2)
    target = placed(TARGET, mesh, "target")
    state = GENERATE(
        *prepare(
            target,
            PROMPTS,
            drafter=Disagreeing(num_tokens=1, is_sampled=is_sampled),
            mesh=mesh,
            verify=verify,
            **ROWS,
        )
    )
    assert_copies_agree(state)
    greedy = [row for row, temperature in enumerate(ROWS["temperature"]) if temperature == 0]
    for row in range(8) if verify == "coupled" else greedy:
        assert result(state).emitted[row] == plain[row]


def test_the_comparison_finds_devices_with_different_uniforms(monkeypatch):
    """Three rounds only: devices that disagree end up waiting for each other."""
    right = sampling.uniform
    monkeypatch.setattr(
        sampling, "uniform", lambda *args: abs(right(*args) - jax.lax.axis_index("tp_target"))
    )
    params, draft_params, config, state = arguments("draft_model", (1, 2, 1), temperature=1)
    generate = jax.jit(
        lambda params, draft_params, state: decode.generate(params, draft_params, config, state, 3)
    )
    with pytest.raises(AssertionError, match="on device"):
        assert_copies_agree(generate(params, draft_params, state))


def test_a_loop_of_steps_gives_the_text_of_generate(plain):
    """`step` is public and works on a mesh."""
    params, draft_params, config, state = arguments("ngram", (2, 2, 1), verify="coupled")
    step = jax.jit(decode.step, static_argnums=2)
    while np.asarray(state.active_B).any():
        state = step(params, draft_params, config, state)
    assert result(state).emitted == plain


def test_local_arrays_are_not_gathered_from_other_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    x = parallel.put(np.arange(8), parallel.make_mesh(1, 1, 8))
    np.testing.assert_array_equal(parallel.get({"x_B": x, "n": 3})["x_B"], np.arange(8))


# --- Placement ------------------------------------------------------------------------------------


def test_every_parameter_and_pool_is_split_by_the_rules():
    params, draft_params, _, state = arguments("draft_model", (2, 4, 2))

    def held(x):
        """The share of each axis of an array that a device has."""
        return tuple(
            size // part
            for size, part in zip(x.shape, x.addressable_shards[0].data.shape, strict=True)
        )

    layer, draft_layer = params["layers"][0], draft_params["layers"][0]
    assert held(layer["attention"]["qkv_KGHD"]) == (4, 1, 1, 1)
    assert held(layer["attention"]["out_DKGH"]) == (1, 4, 1, 1)
    assert held(layer["mlp"]["gate_up_2FD"]) == (1, 4, 1) and held(layer["mlp"]["down_DF"]) == (
        1,
        4,
    )
    assert held(params["embed_VD"]) == held(params["lm_head_VD"]) == (4, 1)
    assert held(params["final_norm_D"]) == held(layer["mlp"]["norm_D"]) == (1,)
    assert held(draft_layer["attention"]["qkv_KGHD"]) == (2, 1, 1, 1)
    assert held(state.cache.k_PKZH[0]) == held(state.cache.v_PKZH[0]) == (2, 4, 1, 1)
    assert held(state.drafter.cache.k_PKZH[0]) == (2, 2, 1, 1)
    assert held(state.tokens_BS) == held(state.block_table_BX) == (2, 1)
    assert held(state.request.sampling.seed_B) == held(state.capacity_B) == (2,)
    assert held(state.drafter.read_B) == (2,)
    # On each device, the shard of the target's vocabulary lies within that of the draft model's.
    whole = {shard.device: shard.index[0] for shard in draft_params["embed_VD"].addressable_shards}
    for shard in params["embed_VD"].addressable_shards:
        start, stop, _ = shard.index[0].indices(32)
        assert whole[shard.device].start <= start < stop <= whole[shard.device].stop


@pytest.mark.parametrize(
    ("degrees", "parts"),
    [
        ((0, 1, 1), ("tensor_parallel", "at least 1, got 0")),
        ((4, 3, 1), ("draft_tensor_parallel=3", "tensor_parallel=4", "choose from 1, 2, 4")),
        ((4, 1, 4), ("data_parallel=4 x tensor_parallel=4 requires 16 devices, got 8",)),
        ((3, 1, 1), ("tensor_parallel=3 = 3 must divide the number of devices, 8",)),
    ],
)
def test_invalid_degrees(degrees, parts):
    with pytest.raises(SpecJAXError) as error:
        parallel.make_mesh(*degrees)
    assert all(part in str(error.value) for part in parts)


def test_models_that_cannot_be_split():
    three = parallel.make_mesh(3, devices=jax.devices()[:3])
    with pytest.raises(
        SpecJAXError,
        match=r"target cannot be split over 3 devices.*its 8 kv heads.*choose from 1, 2, 4, 8",
    ):
        decode.DecodeConfig(CONFIG, runtime=Runtime(mesh=three))
    narrow = dataclasses.replace(CONFIG, intermediate_size=26)
    with pytest.raises(
        SpecJAXError, match="26 feed-forward channels are not divisible by 4; choose from 1, 2"
    ):
        parallel.check_shardable(narrow, 4, "draft")
    with pytest.raises(
        SpecJAXError, match="30 vocabulary entries are not divisible by 8; choose from 1, 2"
    ):
        parallel.check_shardable(dataclasses.replace(CONFIG, vocab_size=30), 8, "draft")


def test_the_batch_must_be_divisible_by_data_parallel():
    mesh = parallel.make_mesh(2, 1, 4)
    with pytest.raises(SpecJAXError, match="3 rows cannot be split over data_parallel=4"):
        prepare(placed(TARGET, mesh, "target"), PROMPTS[:3], mesh=mesh)


# --- Texts in, completions out --------------------------------------------------------------------


def model(params, mesh=None) -> checkpoint.Model:
    return checkpoint.Model(CONFIG, params, None, (), "here", mesh)


def test_generation_pads_the_batch():
    mesh = parallel.make_mesh(2, 1, 4)
    told = {}
    options = dict(
        drafter="draft_model",
        num_speculative_tokens=1,
        max_new_tokens=[7, 3, 9],
        temperature=[0, 1, 0],
        seed=3,
        verify="coupled",
        on_tokens=lambda i, tokens, *_: told.setdefault(i, []).extend(tokens),
    )
    target, draft = (
        model(placed(m, mesh, role).params, mesh)
        for m, role in ((TARGET, "target"), (DRAFT, "draft"))
    )
    got = generation.generate(target, prompts=PROMPTS[:3], draft=draft, **options)
    assert [len(c.tokens) for c in got.completions] == [7, 3, 9]
    assert [tuple(told[i]) for i in range(3)] == [c.tokens for c in got.completions] and len(
        told
    ) == 3
    told.clear()
    alone = generation.generate(
        model(TARGET.params), prompts=PROMPTS[:3], draft=model(DRAFT.params), **options
    )
    assert [c.tokens for c in got.completions] == [c.tokens for c in alone.completions]
    with pytest.raises(SpecJAXError, match="must be loaded for the same mesh"):
        generation.generate(target, prompts=PROMPTS[:3], draft=model(DRAFT.params), **options)
    with pytest.raises(
        SpecJAXError, match="draft is not sharded as a draft; load it with role='draft'"
    ):
        generation.generate(target, prompts=PROMPTS[:3], draft=target, **options)
