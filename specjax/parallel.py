"""The mesh of devices, and over which of its axes each axis of each array is split.

A mesh has three axes:

    data     the batch: every part of it has sequences, pages and a free list of its own
    both     target and draft model are both split over it target   the target alone is split
    further over it; the draft model is the same on all of its devices

With a target over four devices and a draft model over two, `both` and `target` are two each. The
target's shards are numbered with `both` as the higher digit, so that its part of the vocabulary
lies inside the draft model's part on the same device, and verification can compare the two without
exchanging logits.

The axes of an array are the letters at the end of its name (`qkv_KGHD`), or the name of the list
that it is in. What is split is decided by letter, in one table per model.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError

DATA, BOTH, TARGET_ONLY = MESH_AXES = ("data", "both", "target")
MODEL_AXES = {"target": (BOTH, TARGET_ONLY), "draft": (BOTH,)}

# Letter -> mesh axes, for the arrays of each model. B sequences, P pages and C caches go with the
# batch; kv heads (K, each with its query heads), the feed-forward width and the vocabulary are what
# tensor parallelism splits (Shoeybi et al. 2019, "Megatron-LM", section 3). Other axes are whole
# everywhere.
RULES: dict[str, Mapping[str, str | tuple[str, ...]]] = {
    role: {"B": DATA, "P": DATA, "C": DATA, "K": axes, "F": axes, "V": axes}
    for role, axes in MODEL_AXES.items()
}


def make_mesh(
    tensor_parallel: int = 1,
    draft_tensor_parallel: int = 1,
    data_parallel: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """The mesh for a target split over `tensor_parallel` devices, and a draft model over some of
    them.

    Args:
      tensor_parallel: devices that share one copy of the target.
      draft_tensor_parallel: devices that share one copy of the draft model; a divisor of
        `tensor_parallel`.
      data_parallel: parts of the batch, each with copies of both models of its own.
      devices: of the mesh, the first data_parallel * tensor_parallel of them; by default all that
        JAX has.

    Raises:
      SpecJAXError: degrees that are not positive, do not divide one another or the devices, or
        exceed them.
    """
    shape = mesh_shape(tensor_parallel, draft_tensor_parallel, data_parallel)
    devices = jax.devices() if devices is None else devices
    size = data_parallel * tensor_parallel
    product = f"data_parallel={data_parallel} x tensor_parallel={tensor_parallel}"
    if size > len(devices):
        raise SpecJAXError(f"{product} takes {size} devices, and there are {len(devices)}")
    if len(devices) % size:
        raise SpecJAXError(
            f"{product} = {size} does not divide the {len(devices)} devices that there are"
        )
    if size < len(devices) and jax.process_count() > 1:
        raise SpecJAXError(
            f"{product} uses {size} of the {len(devices)} devices; several processes must use all"
        )
    return Mesh(np.array(devices[:size]).reshape(shape), MESH_AXES)


def mesh_shape(
    tensor_parallel: int, draft_tensor_parallel: int, data_parallel: int
) -> tuple[int, int, int]:
    """Devices along each of `MESH_AXES`. Raises SpecJAXError for degrees that are not positive or
    do not divide."""
    for name, value in (
        ("tensor_parallel", tensor_parallel),
        ("draft_tensor_parallel", draft_tensor_parallel),
        ("data_parallel", data_parallel),
    ):
        if not isinstance(value, int) or value < 1:
            raise SpecJAXError(f"{name} must be a whole number of at least 1, got {value!r}")
    if tensor_parallel % draft_tensor_parallel:
        raise SpecJAXError(
            f"draft_tensor_parallel={draft_tensor_parallel} does not divide "
            f"tensor_parallel={tensor_parallel}; it may be {_listed(divisors(tensor_parallel))}"
        )
    return data_parallel, draft_tensor_parallel, tensor_parallel // draft_tensor_parallel


def degree(mesh: Mesh | None, role: str) -> int:
    """Over how many devices one copy of the "target" or "draft" is split."""
    return math.prod(mesh.shape[axis] for axis in MODEL_AXES[role]) if mesh else 1


def dp_size(mesh: Mesh | None) -> int:
    """Parts of the batch."""
    return mesh.shape[DATA] if mesh else 1


def split_over(size: int, whole: int, role: str) -> tuple[str, ...]:
    """Mesh axes over which a model's arrays are split; none where `size` of an axis is all that the
    `whole` has."""
    return MODEL_AXES[role] if size < whole else ()


def check(cfg: LlamaConfig, num_shards: int, role: str) -> None:
    """Whether a model can be split over so many devices.

    Raises:
      SpecJAXError: it cannot; with the degrees that it can be split by.
    """
    for size, what in (
        (cfg.num_kv_heads, "kv heads"),
        (cfg.intermediate_size, "feed-forward channels"),
        (cfg.vocab_size, "tokens"),
    ):
        if size % num_shards:
            works = divisors(math.gcd(cfg.num_kv_heads, cfg.intermediate_size, cfg.vocab_size))
            raise SpecJAXError(
                f"the {role} cannot be split over {num_shards} devices, which do not divide its {size} "
                f"{what}; degrees that work: {_listed(works)}"
            )


def specs(tree: Any, role: str, unnamed: PartitionSpec = PartitionSpec()):  # noqa: B008
    """How each array of a pytree is split, as a tree of `PartitionSpec`s.

    Args:
      tree: parameters, a `DecodeState`, or anything else; arrays or their shapes.
      role: "target" or "draft", the key of a table in `RULES`.
      unnamed: of arrays whose name has no letters for its axes.
    """

    def spec(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        name, _, axes = next(filter(None, reversed(names)), "").rpartition("_")
        if (
            not name
            or len(axes) != np.ndim(leaf)
            or not all(axis.isupper() or axis.isdigit() for axis in axes)
        ):
            return unnamed if np.ndim(leaf) else PartitionSpec()
        return PartitionSpec(*(RULES[role].get(axis) for axis in axes))

    return jax.tree.map_with_path(spec, tree)


def shardings(tree: Any, mesh: Mesh, role: str):
    """`specs` on a mesh, as a tree of `NamedSharding`s."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, role))


def place(params: Any, mesh: Mesh | None, role: str):
    """Parameters on the devices of a mesh, split as those of that role are; as they are where there
    is none."""
    return params if mesh is None else jax.device_put(params, shardings(params, mesh, role))


def is_placed(embed_VD: jax.Array, mesh: Mesh | None, role: str) -> bool:
    """Whether a model with this embedding is split as one of that role is."""
    return mesh is None or embed_VD.sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec(MODEL_AXES[role])), 2
    )


def put(tree: Any, mesh: Mesh | None, unnamed: PartitionSpec = PartitionSpec(DATA)):  # noqa: B008
    """Arrays of the host, the same in every process, on the default device or on the mesh: split by
      their letters, or
    as `unnamed` says, which is by rows."""
    if mesh is None:
        return jax.device_put(tree)

    def distribute(x, spec):
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda index: x[index]
        )

    return jax.tree.map(distribute, tree, specs(tree, "target", unnamed))


def get(tree: Any):
    """The whole arrays, on the host of every process that has a part of them."""

    def whole(x):
        spread = isinstance(x, jax.Array) and not x.is_fully_addressable
        return multihost_utils.process_allgather(x, tiled=True) if spread else x

    return jax.device_get(jax.tree.map(whole, tree))


def check_alike(values: Any, mesh: Mesh | None) -> None:
    """Whether all processes of a mesh were given the same values: arrays of the host, numbers,
    texts.

    Raises:
      SpecJAXError: in every process, where they were not.
    """
    if mesh is None or not mesh.is_multi_process:
        return
    digest = np.uint32(zlib.crc32(pickle.dumps(jax.tree.map(np.asarray, values))))
    if len(set(multihost_utils.process_allgather(digest).tolist())) > 1:
        raise SpecJAXError("the processes of this run were not given the same prompts and options")


def on_mesh(
    function: Callable, mesh: Mesh | None, *in_specs, out_specs: Callable | None = None
) -> Callable:
    """The function, run by every device on its own shards; the function itself where there is no
    mesh.

    Args:
      function: of as many pytrees as there are `in_specs`. Devices exchange what it says and
        nothing else.
      mesh: from `make_mesh`.
      *in_specs: trees of `PartitionSpec`s.
      out_specs: makes the tree for the result of the result's shapes; None where that is like the
        last argument.
    """
    if mesh is None:
        return function

    if out_specs is not None:
        function = jax.jit(function)  # or it would be traced twice

    def mapped(out_specs):
        # It cannot be told that copies agree: that follows from what they are made of.
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def run(*args):
        if out_specs is None:
            return mapped(in_specs[-1])(*args)
        # A shard's own shapes: all that is wanted is which arrays there are.
        return mapped(out_specs(jax.eval_shape(mapped(PartitionSpec()), *args)))(*args)

    return run


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
