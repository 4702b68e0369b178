"""The mesh of devices, and over which of its axes each axis of each array is split.

A mesh has three axes:

    data       the batch: every data-parallel replica has sequences and pages of its own
    tp_shared  target and draft model are both split over it
    tp_target  the target alone is split further over it; the draft model is replicated

With a target over four devices and a draft model over two, `tp_shared` and `tp_target` are two
each. The target's shards are numbered with `tp_shared` as the higher digit. A device's part of the
target's vocabulary then lies inside its part of the draft model's, and verification compares the
two without exchanging logits.

The axes of an array are the letters at the end of its name (`qkv_KGHD`), or of the name of the
list that holds it. One table per model lists the letters that are split.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError

DATA, TP_SHARED, TP_TARGET = MESH_AXES = ("data", "tp_shared", "tp_target")
MODEL_AXES = {"target": (TP_SHARED, TP_TARGET), "draft": (TP_SHARED,)}
ROWS = PartitionSpec(DATA)
MESSAGE_BYTES = 1024  # of what processes tell each other in one exchange

# Letter -> mesh axes, for the arrays of each model. Sequences (B) and pages (P) are split over the
# batch's axis. Tensor parallelism splits kv heads (K, each with its query heads), the feed-forward
# width (F) and the vocabulary (V) (Shoeybi et al. 2019, "Megatron-LM", section 3). Other axes are
# whole on every device.
RULES: dict[str, Mapping[str, str | tuple[str, ...]]] = {
    role: {"B": DATA, "P": DATA, "K": axes, "F": axes, "V": axes}
    for role, axes in MODEL_AXES.items()
}


# --- The mesh -------------------------------------------------------------------------------------


def make_mesh(
    tensor_parallel: int = 1,
    draft_tensor_parallel: int = 1,
    data_parallel: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns the mesh for a target split over `tensor_parallel` devices.

    Args:
      tensor_parallel: devices that share one copy of the target.
      draft_tensor_parallel: devices that share one copy of the draft model; divides
        `tensor_parallel`.
      data_parallel: replicas of both models; each decodes its own rows of the batch.
      devices: the first data_parallel * tensor_parallel of them form the mesh; by default all
        devices that JAX has.

    Raises:
      SpecJAXError: for degrees that are not positive, do not divide one another or the number of
        devices, or exceed it.
    """
    shape = mesh_shape(tensor_parallel, draft_tensor_parallel, data_parallel)
    devices = jax.devices() if devices is None else devices
    size, available = data_parallel * tensor_parallel, len(devices)
    product = f"data_parallel={data_parallel} x tensor_parallel={tensor_parallel}"
    if size > available:
        raise SpecJAXError(f"{product} requires {size} devices, got {available}")
    if available % size:
        raise SpecJAXError(f"{product} = {size} must divide the number of devices, {available}")
    if size < available and jax.process_count() > 1:
        raise SpecJAXError(
            f"{product} uses {size} of the {available} devices; several processes must use all"
        )
    return Mesh(np.array(devices[:size]).reshape(shape), MESH_AXES)


def mesh_shape(
    tensor_parallel: int, draft_tensor_parallel: int, data_parallel: int
) -> tuple[int, int, int]:
    """Returns the number of devices along each of `MESH_AXES`.

    Raises:
      SpecJAXError: for degrees that are not positive, or where the draft model's does not divide
        the target's.
    """
    degrees = dict(
        tensor_parallel=tensor_parallel,
        draft_tensor_parallel=draft_tensor_parallel,
        data_parallel=data_parallel,
    )
    for name, value in degrees.items():
        if not isinstance(value, int) or value < 1:
            raise SpecJAXError(f"{name} must be an integer of at least 1, got {value!r}")
    if tensor_parallel % draft_tensor_parallel:
        raise SpecJAXError(
            f"draft_tensor_parallel={draft_tensor_parallel} must divide "
            f"tensor_parallel={tensor_parallel}; choose from {_listed(divisors(tensor_parallel))}"
        )
    return data_parallel, draft_tensor_parallel, tensor_parallel // draft_tensor_parallel


def degree(mesh: Mesh | None, role: str) -> int:
    """Returns over how many devices one copy of the "target" or the "draft" is split."""
    return math.prod(mesh.shape[axis] for axis in MODEL_AXES[role]) if mesh else 1


def dp_size(mesh: Mesh | None) -> int:
    """Returns the number of data-parallel replicas."""
    return mesh.shape[DATA] if mesh else 1


def model_axes(mesh: Mesh | None, role: str) -> tuple[str, ...]:
    """Returns the mesh axes over which a model is split; none where each device has all of it."""
    return MODEL_AXES[role] if degree(mesh, role) > 1 else ()


def check_shardable(config: LlamaConfig, num_shards: int, role: str) -> None:
    """Checks that a model can be split over `num_shards` devices.

    Raises:
      SpecJAXError: if it cannot; the message lists the degrees that work.
    """
    sizes = {
        "kv heads": config.num_kv_heads,
        "feed-forward channels": config.intermediate_size,
        "vocabulary entries": config.vocab_size,
    }
    for what, size in sizes.items():
        if size % num_shards:
            degrees = _listed(divisors(math.gcd(*sizes.values())))
            raise SpecJAXError(
                f"the {role} cannot be split over {num_shards} devices: its {size} {what} are not "
                f"divisible by {num_shards}; choose from {degrees}"
            )


# --- Which axes of an array are split -------------------------------------------------------------


def specs(tree: Any, role: str):
    """Returns how each array of a pytree is split, as a tree of `PartitionSpec`s.

    Args:
      tree: parameters, a `DecodeState`, or anything else; arrays or their shapes.
      role: "target" or "draft", the key of a table in `RULES`.

    Raises:
      SpecJAXError: for an array whose name does not end in one letter per axis.
    """
    return jax.tree.map_with_path(lambda path, leaf: _spec(path, leaf, role), tree)


def _spec(path, leaf, role: str) -> PartitionSpec:
    return PartitionSpec(*(RULES[role].get(axis) for axis in axis_letters(path, leaf)))


def axis_letters(path, leaf) -> str:
    """Returns the letters of an array's axes, from its name in a pytree; none for a scalar.

    Raises:
      SpecJAXError: for an array whose name does not end in one letter per axis.
    """
    if not np.ndim(leaf):
        return ""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    name = next(filter(None, reversed(names)), "")
    axes = name.rpartition("_")[2]
    is_declared = all(axis.isupper() or axis.isdigit() for axis in axes)
    if not is_declared or len(axes) != np.ndim(leaf):
        raise SpecJAXError(
            "on a mesh and in an engine the name of an array must end in one letter per axis, such "
            f"as embed_VD; {jax.tree_util.keystr(path) or 'an array without a name'} has "
            f"{np.ndim(leaf)} axes"
        )
    return axes


def shardings(tree: Any, mesh: Mesh, role: str):
    """Returns `specs` on a mesh, as a tree of `NamedSharding`s."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, role))


def place(params: Any, mesh: Mesh | None, role: str):
    """Puts parameters on the devices of a mesh; returns them as they are where there is no mesh."""
    return params if mesh is None else jax.device_put(params, shardings(params, mesh, role))


def is_placed(embed_VD: jax.Array, mesh: Mesh | None, role: str) -> bool:
    """Returns whether the embedding is sharded as `role` requires."""
    if mesh is None:
        return True
    expected = NamedSharding(mesh, PartitionSpec(MODEL_AXES[role]))
    return embed_VD.sharding.is_equivalent_to(expected, embed_VD.ndim)


# --- Between the host and the devices -------------------------------------------------------------


def put(tree: Any, mesh: Mesh | None, spec: PartitionSpec | None = ROWS):
    """Puts arrays of the host on the default device, or on the mesh.

    Args:
      tree: arrays, the same in every process.
      mesh: None for the default device.
      spec: how all of them are split, by default along the first axis over the batch; None to
        split each by the letters of its name. Scalars are replicated.
    """
    if mesh is None:
        return jax.device_put(tree)

    def distribute(x, spec):
        sharding = NamedSharding(mesh, spec)
        # The caller may disallow transfers; this one is explicit, though JAX counts it as implicit.
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    if spec is None:
        split = specs(tree, "target")
    else:
        split = jax.tree.map(lambda x: spec if np.ndim(x) else PartitionSpec(), tree)
    return jax.tree.map(distribute, tree, split)


def get(tree: Any):
    """Returns whole arrays on the host of every process that has a part of them."""

    def whole(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return multihost_utils.process_allgather(x, tiled=True)
        return x

    return jax.device_get(jax.tree.map(whole, tree))


def check_alike(values: Any, mesh: Mesh | None) -> None:
    """Checks that all processes of a mesh were given the same values.

    Args:
      values: pytree of host arrays, numbers and strings.
      mesh: the mesh; nothing is checked if one process has all of it.

    Raises:
      SpecJAXError: in every process, if they were not.
    """
    if mesh is None or not mesh.is_multi_process:
        return
    digest = np.uint32(zlib.crc32(pickle.dumps(jax.tree.map(np.asarray, values))))
    if len(set(multihost_utils.process_allgather(digest).tolist())) > 1:
        raise SpecJAXError("the processes of this run were not given the same prompts and options")


def least(value: int, mesh: Mesh | None) -> int:
    """Returns the smallest of the values, below 2**62, that the processes of a mesh have."""
    if mesh is None or not mesh.is_multi_process:
        return value
    digits = np.array(divmod(value, 2**31), np.int32)  # JAX may have no wider integers
    return min(
        high * 2**31 + low for high, low in multihost_utils.process_allgather(digits).tolist()
    )


def from_first_process(value: Any, mesh: Mesh | None) -> Any:
    """Returns the value of process 0, in every process of a mesh.

    Args:
      value: anything that can be pickled; what other processes pass is ignored.
      mesh: the mesh; if one process has all of it, the value is returned as it is.
    """
    if mesh is None or not mesh.is_multi_process:
        return value
    data = pickle.dumps(value) if jax.process_index() == 0 else b""
    # Short messages, which most are, take one exchange.
    head = np.zeros(MESSAGE_BYTES, np.uint8)
    message = len(data).to_bytes(8, "little") + data[: MESSAGE_BYTES - 8]
    head[: len(message)] = np.frombuffer(message, np.uint8)
    head = multihost_utils.broadcast_one_to_all(head).tobytes()
    size, data = int.from_bytes(head[:8], "little"), head[8:]
    if size > len(data):
        rest = np.zeros(size - len(data), np.uint8)
        if jax.process_index() == 0:
            rest[:] = np.frombuffer(pickle.dumps(value), np.uint8)[len(data) :]
        data += multihost_utils.broadcast_one_to_all(rest).tobytes()
    return pickle.loads(data[:size])


# --- Inside a program -----------------------------------------------------------------------------


def on_mesh(function: Callable, mesh: Mesh | None, in_specs, out_specs=None) -> Callable:
    """Returns the function, run by every device on its own shards.

    Devices communicate only where the function does so. Without a mesh the function itself is
    returned, and the specs are not needed.

    Args:
      function: takes as many pytrees as there are `in_specs`.
      mesh: from `make_mesh`, or None.
      in_specs: trees of `PartitionSpec`s, one for each argument, or a function `args -> in_specs`.
      out_specs: the tree for the result, or a function that makes it from the result's shapes;
        None where the result is split like the last argument.
    """
    if mesh is None:
        return function
    if callable(out_specs):
        function = jax.jit(function)  # traced once, although its shapes are needed first

    def mapped(in_specs, out_specs):
        # check_vma cannot prove that replicated outputs agree; they do, since they are computed
        # from identical inputs.
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def run(*args):
        split = in_specs(*args) if callable(in_specs) else in_specs
        if out_specs is None:
            return mapped(split, split[-1])(*args)
        if not callable(out_specs):
            return mapped(split, out_specs)(*args)
        # The shapes of a shard: only the structure of the result matters.
        shapes = jax.eval_shape(mapped(split, PartitionSpec()), *args)
        return mapped(split, out_specs(shapes))(*args)

    return run


def agree(tree: Any, mesh: Mesh | None, axes: tuple[str, ...] = ()):
    """Returns the same integers on all devices that share a sequence: those of the first.

    Devices that replicate a draft model compute the same tokens, but might round differently.

    Args:
      tree: integer arrays.
      mesh: from `make_mesh`, or None.
      axes: mesh axes over which they are the same already.
    """
    copies = tuple(axis for axis in MODEL_AXES["target"] if axis not in axes)
    if mesh is None or all(mesh.shape[axis] == 1 for axis in copies):
        return tree
    is_first = jax.lax.axis_index(copies) == 0
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_first, x, 0), copies), tree)


def logits_axes(num_columns: int, vocab_size: int, mesh: Mesh | None) -> tuple[str, ...]:
    """Returns the mesh axes over which a drafter's logits are split.

    Args:
      num_columns: columns of its logits on one device: the whole vocabulary, or the draft model's
        or the target's shard of it.
      vocab_size: V of the whole vocabulary.
      mesh: from `make_mesh`, or None.

    Raises:
      SpecJAXError: for any other number of columns.
    """
    draft_size = vocab_size // degree(mesh, "draft")
    target_size = vocab_size // degree(mesh, "target")
    if num_columns == vocab_size:
        return ()
    if num_columns == draft_size:
        return MODEL_AXES["draft"]
    if num_columns == target_size:
        return MODEL_AXES["target"]
    raise SpecJAXError(
        f"a drafter's logits must have {vocab_size} columns, or those of a shard of the draft "
        f"model, {draft_size}, or of the target, {target_size}; got {num_columns}"
    )


def target_shard(logits_BV, vocab_size: int, mesh: Mesh | None, axes: tuple[str, ...]):
    """Returns this device's shard of the target's vocabulary, from logits split over `axes`."""
    target_size = vocab_size // degree(mesh, "target")
    if logits_BV.shape[1] == target_size:
        return logits_BV
    rest = tuple(axis for axis in MODEL_AXES["target"] if axis not in axes)
    start = jax.lax.axis_index(rest) * target_size
    return jax.lax.dynamic_slice_in_dim(logits_BV, start, target_size, axis=1)


def divisors(number: int) -> list[int]:
    """Returns all divisors, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
