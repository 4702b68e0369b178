"""Compiles the decode loop for four absent GPUs, over which a mesh splits the models, and says what
is wrong with it.

`python mesh_step.py FOLDER NAMES` compiles few layers and saves these programs, for the tests.
`python mesh_step.py --full` compiles all layers, prints a table and fails where something is wrong.

A Llama-3 70B is split over all four GPUs, and a Llama-3 8B that drafts for it is whole on each of
them.
"""

import itertools
import math
import pathlib
import sys
import tempfile
import time
from collections import Counter
from typing import NamedTuple

import gate
import jax
import jax.numpy as jnp
from decode_step import compile_
from jax import ShapeDtypeStruct as Shape
from jax.sharding import NamedSharding, PartitionSpec

from specjax import decode, kv_cache, llama, parallel
from specjax.config import LlamaConfig, Runtime
from specjax.decode import DecodeConfig, RequestArrays
from specjax.drafters import registry
from specjax.kernels import dispatch
from specjax.kernels.gpu import aot
from specjax.sampling import SamplingArrays

DEVICES, B, PAGE_SIZE, BYTES = 4, 4, 64, 2  # the models, and with them the pools, are in bfloat16
# XLA cuts the sum of a product of few rows into parts, where its result alone would not occupy the
# GPU, and adds them up: so many it makes of the target's logits at most.
PARTS = 4


class Setup(NamedTuple):
    """What is compiled.

    Attributes:
      gpu: name of a description in `kernels/targets`.
      capability: of that GPU.
      implementation: of attention and verification.
      S: most tokens of a row. Attention by `xla` puts all pages of a row side by side; where S is
        small that is less than the smallest weight.
      K: drafted tokens.
      target_layers, draft_layers: how deep the models are.
      draft_degree: devices over which the draft model is split.
    """

    gpu: str
    capability: tuple[int, int]
    implementation: str
    S: int
    K: int = 2  # the steps of a draft are alike
    target_layers: int = 2
    draft_layers: int = 1
    draft_degree: int = 1

    @property
    def target(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_layers=self.target_layers,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
        )

    @property
    def draft(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=self.draft_layers,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
        )

    @property
    def positions(self) -> int:
        """Positions that the pages of a row hold."""
        return PAGE_SIZE * kv_cache.pages_for(self.S + self.K, PAGE_SIZE)

    @property
    def models(self) -> list[tuple[LlamaConfig, int, int]]:
        """Of target and draft model: the configuration, over how many devices it is split, passes
        in a round."""
        return [(self.target, DEVICES, 1), (self.draft, self.draft_degree, self.K)]


H100 = Setup("h100", dispatch.HOPPER, "mosaic_gpu", S=16384)
A100 = Setup("a100", (8, 0), "xla", S=2048)
PROGRAMS = {"mesh_h100": H100, "mesh_a100": A100}
FULL = {name: setup._replace(target_layers=80, draft_layers=32) for name, setup in PROGRAMS.items()}
FULL["mesh_h100_draft_of_2"] = FULL["mesh_h100"]._replace(draft_degree=2)


class Program(gate.Program):
    """A saved program, and what it was compiled from."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        self.setup = Setup(*self.facts["setup"])


def compile_setup(folder: pathlib.Path, setup: Setup) -> None:
    """Compiles the loop and saves it."""
    start = time.monotonic()
    target, draft, K = setup.target, setup.draft, setup.K
    mesh = parallel.make_mesh(
        DEVICES, setup.draft_degree, devices=list(aot.mesh(setup.gpu, DEVICES).devices.flat)
    )
    with dispatch.compiling_for(setup.capability):
        drafter = registry.make("draft_model", K, target, draft)
        runtime = Runtime(jnp.bfloat16, PAGE_SIZE, implementation=setup.implementation, mesh=mesh)
        config = DecodeConfig(target, drafter, runtime=runtime)
        params, draft_params = (
            llama.abstract_params(model, jnp.bfloat16) for model in (target, draft)
        )
        ids = lambda *shape: Shape(shape, jnp.int32)  # noqa: E731
        sampling = SamplingArrays(
            seed_B=Shape((B,), jnp.uint32), temperature_B=Shape((B,), jnp.float32)
        )
        state = jax.eval_shape(
            lambda params, draft_params, *args: decode.init(params, draft_params, config, *args),
            params,
            draft_params,
            ids(B, setup.S),
            RequestArrays(ids(B), ids(B), ids(B, 3), sampling),
        )
        args = params, draft_params, state = jax.tree.map(
            lambda x, spec: Shape(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
            (params, draft_params, state),
            (*decode.param_specs(params, draft_params), decode.state_specs(state)),
        )
        shards = [[shard(x) for x in jax.tree.leaves(part)] for part in args]
        weights = [math.prod(shape) for shape in (*shards[0], *shards[1]) if len(shape) > 1]
        pools = {shape for shape in shards[2] if len(shape) == 4}
        compile_(
            folder,
            jax.jit(decode.generate, static_argnums=2, donate_argnums=3),
            (params, draft_params, config, state),
            start,
            setup=setup,
            pools=sorted(pools),
            smallest_pool=min(map(math.prod, pools)),
            smallest_weight=min(weights),
        )


def shard(x: Shape) -> tuple[int, ...]:
    """The shape of what a device has of an array."""
    return x.sharding.shard_shape(x.shape)


def compile_wrong(folder: pathlib.Path) -> None:
    """A loop that looks like ours on a mesh, with one layer, and exchanges what it must not: the
    MLP's output twice, what has the draft model's width, and logits."""
    setup = A100._replace(target_layers=1)
    D, V = setup.target.hidden_size, setup.target.vocab_size
    mesh = jax.sharding.Mesh(aot.mesh(setup.gpu, DEVICES).devices, ("x",))

    def body(carry):
        i, x_BD, w_DD, head_DV = carry
        for _ in range(4):  # embedding, attention, MLP, and one too many
            x_BD = jnp.tanh(jax.lax.psum(x_BD @ w_DD, "x"))
        narrow_BD = jax.lax.psum(x_BD[:, : setup.draft.hidden_size] * 2, "x")
        logits_BV = jax.lax.all_gather(x_BD @ head_DV, "x", axis=1, tiled=True)
        return (
            i + 1,
            x_BD + narrow_BD.sum() + jnp.argmax(logits_BV, axis=1)[:, None].astype(x_BD.dtype),
            w_DD,
            head_DV,
        )

    def function(x_BD, w_DD, head_DV):
        return jax.lax.while_loop(lambda carry: carry[0] < 100, body, (0, x_BD, w_DD, head_DV))[1]

    specs = (PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "x"))
    shapes = ((B * (setup.K + 1), D), (D * DEVICES, D), (D, V))
    args = [
        Shape(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    function = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    compile_(folder, jax.jit(function), args, time.monotonic(), setup=setup, pools=[])


# What a program must keep to. Every check returns what is wrong; nothing, if nothing is.


def arguments(program: Program) -> list[str]:
    """Bytes of its arguments that a device has are those of its shards within 1 %."""
    expected, there = argument_bytes(program.setup), program.facts["argument_bytes"]
    return (
        []
        if abs(there - expected) < 0.01 * expected
        else [f"{there} bytes of arguments, not {expected}"]
    )


def argument_bytes(setup: Setup) -> int:
    """Bytes of parameters, pools and rows that a device has, from the models' dimensions alone."""
    total = 4 * 4 * B * setup.S  # tokens, and what was drafted, accepted and emitted in each round
    for model, degree, _ in setup.models:
        D, F, H = model.hidden_size, model.intermediate_size, model.head_dim
        layer = D * H * (2 * model.num_heads + 2 * model.num_kv_heads) + 3 * D * F
        matrices = model.num_layers * layer + 2 * model.vocab_size * D
        pools = model.num_layers * 2 * B * setup.positions * model.num_kv_heads * H
        total += BYTES * ((matrices + pools) // degree + (2 * model.num_layers + 1) * D)
    return total


def temporaries(program: Program) -> list[str]:
    """Temporary memory is that of logits and of what attention by `xla` gathers, and a tenth more.

    The logits of all drafts are kept until the target has judged them, for the whole vocabulary
    where the draft model is whole. Beside them there are, one after the other, the keys and values
    of one layer where `xla` puts all pages of a row side by side, of which the draft model's are
    the larger ones, since its kv heads are not split; and a shard of the target's logits, as they
    are and in parts that are to be added up. Activations are smaller than these. None of it grows
    with the number of layers. With `mosaic_gpu` all of it is less than one pool.
    """
    setup, draft = program.setup, program.setup.draft
    drafts = 4 * setup.K * B * draft.vocab_size // setup.draft_degree
    target = 4 * (1 + PARTS) * B * (setup.K + 1) * setup.target.vocab_size // DEVICES
    expected, there = drafts + target, program.facts["temporary_bytes"]
    if setup.implementation == "xla":
        expected = drafts + max(target, 2 * BYTES * max(itertools.chain(*gathered(setup))))
    wrong = (
        [] if there < 1.1 * expected else [f"{there} temporary bytes, and {expected} were expected"]
    )
    if setup.implementation == "mosaic_gpu" and there >= BYTES * program.facts["smallest_pool"]:
        wrong.append(f"{there} temporary bytes could be a pool")
    return wrong


def gathered(setup: Setup) -> list[list[int]]:
    """Of target and draft model, the numbers in each array that attention by `xla` gathers in a
    round."""
    return [
        [B * setup.positions * model.num_kv_heads * model.head_dim // degree]
        * (2 * model.num_layers * passes)
        for model, degree, passes in setup.models
    ]


def exchanges(program: Program) -> list[str]:
    """What devices exchange in a round: for the target the embedding and the outputs of every
    layer's attention and MLP, as all-reduces; for a split draft model the same in each of its
    passes, and for a whole one nothing; beyond that a few numbers per row. Nothing is as large as a
    shard of logits."""
    setup, wrong = program.setup, []
    large = large_exchanges(program)
    small = len(program.exchanged()) - large.total()
    expected = Counter(
        {
            ("all-reduce", model.hidden_size): (2 * model.num_layers + 1) * passes
            for model, degree, passes in setup.models
            if degree > 1
        }
    )
    if large != expected:
        wrong.append(f"large arrays are exchanged {dict(large)} times, not {dict(expected)}")
    # For each draft its token, and where the vocabulary is split its distribution; of the target
    # the distributions, the probabilities of the drafts, and those of the drafter; the race for the
    # last token.
    if not 0 < small <= setup.K * (2 if setup.draft_degree > 1 else 1) + 1 + 1 + setup.K + 1:
        wrong.append(f"{small} small arrays are exchanged: {program.exchanged()}")
    return wrong


def large_exchanges(program: Program) -> Counter:
    """How often arrays of more than a few numbers per row and device are exchanged: by which
      operation, and the width
    of the array."""
    few = 8 * DEVICES * B * (program.setup.K + 1)
    return Counter((op, shape[-1]) for op, shape in program.exchanged() if math.prod(shape) > few)


def copies(program: Program) -> list[str]:
    """No weight is copied, transposed or converted: nothing of that size is written. Nor is a pool:
      nothing of the
    size of the smallest one is written but pools in place, and what attention by `xla` gathers."""
    wrong = [i.text for i in program.written(program.facts["smallest_weight"])]
    large = program.written(program.facts["smallest_pool"])
    sizes = Counter(
        size
        for i in large
        for size in map(math.prod, i.shapes)
        if size >= program.facts["smallest_pool"]
    )
    xla = program.setup.implementation == "xla"
    expected = Counter(itertools.chain(*gathered(program.setup)) if xla else ())
    return wrong if sizes == expected else [*wrong, *(i.text for i in large)]


def pools_in_place(program: Program) -> list[str]:
    """What the loop returns lies where its argument did."""
    state = (
        sum(BYTES * sum(sizes) for sizes in gathered(program.setup._replace(K=1)))
        + 4 * 4 * B * program.setup.S
    )
    there = program.facts["aliased_bytes"]
    return [] if there >= state else [f"{there} bytes of {state} stay where they are"]


def loops(program: Program) -> list[str]:
    """One loop holds everything, and no other loop is in it."""
    right = program.while_loops == ["jit(generate)/shard_map/while"] and gate.kinds(
        program.thunks
    ) == ["kWhile"]
    return [] if right else [*program.while_loops, *gate.kinds(program.thunks)]


def host(program: Program) -> list[str]:
    """Nothing goes through the host."""
    return program.leaves_the_device()


def kernels(program: Program) -> list[str]:
    """Every kernel of ours is called: attention in each layer of each pass, and what draws and
    judges."""
    setup, calls = program.setup, [i.text for i in program.instructions if i.op == "custom-call"]
    expected = sum(model.num_layers * passes for model, _, passes in setup.models) + setup.K + 2
    return calls if len(calls) != (expected if setup.implementation == "mosaic_gpu" else 0) else []


CHECKS = (arguments, temporaries, exchanges, copies, pools_in_place, loops, host, kernels)


def full() -> int:
    """Compiles all layers; returns the exit code."""
    wrong = []
    print(
        "| target | implementation | draft split over | compiled in | arguments per device |"
        " by arithmetic | temporary | all-reduces of activations |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|",
        flush=True,
    )
    for name, setup in FULL.items():
        with tempfile.TemporaryDirectory() as folder:
            compile_setup(pathlib.Path(folder), setup)
            program = Program(pathlib.Path(folder))
        facts = program.facts
        reduces = [
            shape for op, shape in program.exchanged() if op == "all-reduce" and shape[-1] >= 4096
        ]
        print(
            f"| {DEVICES} {setup.gpu} | {setup.implementation} | {setup.draft_degree} |"
            f" {facts['seconds']:.0f} s | {facts['argument_bytes'] / 1e9:.2f} GB |"
            f" {argument_bytes(setup) / 1e9:.2f} GB |"
            f" {facts['temporary_bytes'] / 1e6:.1f} MB | {len(reduces)} |",
            flush=True,
        )
        wrong += [
            f"{name}: {check.__name__}: {text[:400]}" for check in CHECKS for text in check(program)
        ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    if sys.argv[1:] == ["--full"]:
        sys.exit(full())
    for name in sys.argv[2:]:
        folder = pathlib.Path(sys.argv[1], name)
        if name == "mesh_wrong":
            compile_wrong(folder)
        else:
            compile_setup(folder, PROGRAMS[name])
