"""specjax plan: what fits on a GPU and how fast decoding could be there, by arithmetic alone."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh
from rich.table import Table

from specjax import llama, parallel
from specjax.config import LlamaConfig
from specjax.engine import batch, metrics
from specjax.errors import SpecJAXError
from specjax.report import tables


class Gpu(NamedTuple):
    """Figures of a GPU.

    Attributes:
      memory: bytes.
      bandwidth: bandwidth of the memory, in bytes per second.
      flops: operations per second on dense bfloat16 or float16 matrices.
    """

    memory: float
    bandwidth: float
    flops: float


# From NVIDIA's data sheets of the A100, H100 and H200 Tensor Core GPUs: the SXM form; the sheets of
# the latter two give operations with sparsity, twice those without. GB are taken as 10^9 bytes,
# which errs on the safe side.
GPUS = {
    "h100-80gb": Gpu(80e9, 3.35e12, 989.5e12),
    "h200-141gb": Gpu(141e9, 4.8e12, 989.5e12),
    "a100-80gb": Gpu(80e9, 2.039e12, 312e12),
    "a100-40gb": Gpu(40e9, 1.555e12, 312e12),
}


class Share(NamedTuple):
    """A device's share of a model, in bytes.

    Attributes:
      weights: all of them.
      read: those that a pass reads: of an embedding a few rows, unless it is the output matrix too.
      kv_per_token: keys and values of one token.
    """

    weights: int = 0
    read: int = 0
    kv_per_token: int = 0


class Step(NamedTuple):
    """The least time of one pass on a device, in seconds.

    Attributes:
      reading: memory.
      computing: matrix products.
    """

    reading: float = 0.0
    computing: float = 0.0

    @property
    def roofline(self) -> float:
        """The longer of the two."""
        return max(self)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `make`. Bytes and seconds are per device; the batch is that of all devices.

    Attributes:
      target, draft, both: the device's shares of the models; empty for a draft model if there is
        none.
      reserve: bytes for the logits of a round and for the widest activations of a chunk of the
        prompts.
      kv_tokens: tokens whose KV, of both models, fits in addition to the weights and the reserve.
      plain, verify: the target's pass over 1 token and over K + 1 tokens of each sequence.
      drafting: the draft model's pass over 1 token; takes no time without a draft model.
      overhead: seconds that a pass of the target takes beyond its roofline; 0 unless measured.
      batch_size: sequences.
      num_speculative_tokens: K.
    """

    target: Share
    draft: Share
    both: Share
    reserve: int
    kv_tokens: int
    plain: Step
    verify: Step
    drafting: Step
    overhead: float
    batch_size: int
    num_speculative_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Speed of plain decoding, all sequences together."""
        return self.batch_size / (self.plain.roofline + self.overhead)

    def speedup(self, rate: float) -> float:
        """Speedup over plain decoding, if a draft is accepted with probability `rate`.

        Leviathan et al. 2023, theorem 3.8.
        """
        K = self.num_speculative_tokens
        seconds = K * self.drafting.roofline + self.verify.roofline + self.overhead
        tokens = metrics.expected_tokens(rate, K)
        return tokens * (self.plain.roofline + self.overhead) / seconds


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model of a plan: its shape, the number of its shards, and a device's share of it."""

    config: LlamaConfig
    shards: int
    share: Share


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work to plan for, and the number of devices. The fields are flags of `specjax plan`.

    Attributes:
      dtype: dtype of weights, keys and values.
      tensor_parallel: devices that share one copy of the target.
      draft_tensor_parallel: devices that share one copy of the draft model.
      data_parallel: replicas of both models.
      gpu_memory_utilization: share of the memory that may be used.
      num_speculative_tokens: K.
      batch_size: sequences, on all devices together.
      context: tokens of each sequence in the cache.
      plain_tokens_per_second: measured speed of plain decoding; None if it was not measured.
    """

    dtype: np.dtype
    tensor_parallel: int = 1
    draft_tensor_parallel: int = 1
    data_parallel: int = 1
    gpu_memory_utilization: float = 0.92
    num_speculative_tokens: int = 5
    batch_size: int = 1
    context: int = 1024
    plain_tokens_per_second: float | None = None

    @property
    def rows(self) -> int:
        """Sequences of each device."""
        return -(-self.batch_size // self.data_parallel)


def make(target: LlamaConfig, draft: LlamaConfig | None, gpu: Gpu, workload: Workload) -> Plan:
    """Returns the plan for a target, and perhaps a draft model, on GPUs of one kind.

    Raises:
      SpecJAXError: incompatible models, degrees that do not divide them, or models that do not fit.
    """
    utilization = workload.gpu_memory_utilization
    if not 0 < utilization <= 1:
        raise SpecJAXError(
            f"gpu_memory_utilization must be above 0 and at most 1, got {utilization:g}"
        )
    shape = parallel.mesh_shape(
        workload.tensor_parallel, workload.draft_tensor_parallel, workload.data_parallel
    )
    mesh = AbstractMesh(shape, parallel.MESH_AXES)
    _check_draft(target, draft, workload.draft_tensor_parallel)
    models = {"target": _model(target, mesh, "target", workload.dtype)}
    if draft:
        models["draft"] = _model(draft, mesh, "draft", workload.dtype)
    shares = {role: model.share for role, model in models.items()}
    both = Share(*map(sum, zip(*shares.values(), strict=True)))
    K = workload.num_speculative_tokens
    reserve = _reserve(models, workload)
    usable = utilization * gpu.memory
    kv_tokens = math.floor((usable - both.weights - reserve) / both.kv_per_token)
    if kv_tokens < workload.rows * workload.context:
        raise _too_large(shares, both, reserve, usable, workload)
    plain = _step(models["target"], 1, gpu, workload)
    return Plan(
        target=shares["target"],
        draft=shares.get("draft", Share()),
        both=both,
        reserve=reserve,
        kv_tokens=kv_tokens,
        plain=plain,
        verify=_step(models["target"], K + 1, gpu, workload),
        drafting=_step(models["draft"], 1, gpu, workload) if draft else Step(),
        overhead=_overhead(plain, workload),
        batch_size=workload.batch_size,
        num_speculative_tokens=K,
    )


def _too_large(
    shares: dict[str, Share], both: Share, reserve: int, usable: float, workload: Workload
) -> SpecJAXError:
    """The error for models that do not fit."""
    rows, context = workload.rows, workload.context
    needed = {
        "weights of the target": shares["target"].weights,
        "of the draft model": shares.get("draft", Share()).weights,
        "logits and activations": reserve,
        f"KV of {rows} x {context} tokens": rows * context * both.kv_per_token,
    }
    listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in needed.items())
    return SpecJAXError(
        f"does not fit: requires {sum(needed.values()) / 1e9:.2f} GB on each GPU, may use "
        f"{usable / 1e9:.2f} GB: {listed}"
    )


def _step(model: _Model, tokens: int, gpu: Gpu, workload: Workload) -> Step:
    """A pass over some tokens of each sequence."""
    config, share = model.config, model.share
    heads = config.num_layers * config.num_heads // model.shards
    scores_and_mixture = 4 * heads * config.head_dim * workload.context
    num_weights = share.read / workload.dtype.itemsize
    flops = workload.rows * tokens * (2 * num_weights + scores_and_mixture)
    read = share.read + workload.rows * workload.context * share.kv_per_token
    return Step(read / gpu.bandwidth, flops / gpu.flops)


def _overhead(plain: Step, workload: Workload) -> float:
    """Seconds of a plain step beyond its roofline; 0 unless it was measured."""
    measured = workload.plain_tokens_per_second
    if measured is None:
        return 0.0
    overhead = workload.batch_size / measured - plain.roofline
    if not overhead >= 0:
        raise SpecJAXError(
            f"plain_tokens_per_second={measured:g} is above what the roofline of a step allows, "
            f"{workload.batch_size / plain.roofline:.1f}"
        )
    return overhead


def _check_draft(
    target: LlamaConfig, draft: LlamaConfig | None, draft_tensor_parallel: int
) -> None:
    if draft is None and draft_tensor_parallel > 1:
        raise SpecJAXError(
            f"draft_tensor_parallel={draft_tensor_parallel}, but there is no draft model"
        )
    if draft and draft.vocab_size != target.vocab_size:
        raise SpecJAXError(
            f"the target has {target.vocab_size} tokens and the draft model {draft.vocab_size}"
        )


def _model(config: LlamaConfig, mesh: AbstractMesh, role: str, dtype: np.dtype) -> _Model:
    shards = parallel.degree(mesh, role)
    parallel.check_shardable(config, shards, role)
    params = llama.abstract_params(config, dtype)

    def size(array, sharding) -> int:
        return math.prod(sharding.shard_shape(array.shape)) * dtype.itemsize

    sizes = jax.tree.map(size, params, parallel.shardings(params, mesh, role))
    weights = sum(jax.tree.leaves(sizes))
    unread = sizes["embed_VD"] if "lm_head_VD" in sizes else 0
    kv_heads = config.num_layers * config.num_kv_heads // shards
    kv_per_token = 2 * kv_heads * config.head_dim * dtype.itemsize
    return _Model(config, shards, Share(weights, weights - unread, kv_per_token))


def _reserve(models: dict[str, _Model], workload: Workload) -> int:
    """Bytes of every model's logits and of the two halves of a feed-forward layer, in float32."""
    logits, widest = 0, 0
    for role, model in models.items():
        num_logits = workload.num_speculative_tokens + (role == "target")
        logits += num_logits * model.config.vocab_size // model.shards
        widest = max(widest, 2 * model.config.intermediate_size // model.shards)
    chunk = batch.prefill_chunk(workload.context)
    return 4 * workload.rows * (logits + chunk * widest)


def memory_table(plan: Plan, devices: str, utilization: float) -> Table:
    """The memory of each device."""
    shares = (plan.target, plan.draft, plan.both)
    weights = [f"{share.weights / 1e9:.2f} GB" for share in shares]
    kv_bytes = [f"{share.kv_per_token:,}" for share in shares]
    return tables.table(
        f"memory of each of {devices}",
        ("", "target", "draft", "both"),
        [
            ("weights", *weights),
            ("KV bytes per token", *kv_bytes),
            ("logits and activations", "", "", f"{plan.reserve / 1e9:.2f} GB"),
            (f"tokens of KV that fit at {utilization:g}", "", "", f"{plan.kv_tokens:,}"),
        ],
    )


def pass_table(plan: Plan, cache: str) -> Table:
    """The least time of each pass."""
    passes = {
        "target, 1 token": plan.plain,
        f"target, {plan.num_speculative_tokens + 1} tokens": plan.verify,
        "draft, 1 token": plan.drafting,
    }
    lines = []
    for name, step in passes.items():
        times = (step.reading, step.computing, step.roofline)
        lines.append((name, *map(_milliseconds, times)))
    title = f"a pass, {cache} tokens in the cache"
    return tables.table(title, ("", "reading", "computing", "roofline"), lines)


def speedup_table(plan: Plan, rates: list[float]) -> Table:
    """The predicted speedup for each acceptance."""
    K = plan.num_speculative_tokens
    lines = []
    for rate in rates:
        speedup = plan.speedup(rate)
        lines.append(
            (
                f"α = {rate:g}",
                f"{metrics.expected_tokens(rate, K):.2f}",
                f"{speedup:.2f}x",
                f"{speedup * plan.tokens_per_second:.1f}",
            )
        )
    title = f"predicted, K = {K}; plain: {plan.tokens_per_second:.1f} tokens/s"
    return tables.table(title, ("", "tokens/round", "speedup", "tokens/s"), lines)


def explanation(plan: Plan) -> str:
    """A sentence on what the prediction assumes."""
    if plan.overhead:
        return (
            f"A pass of the target takes {_milliseconds(plan.overhead)} more than its roofline, as "
            "measured."
        )
    return (
        "Every pass at its roofline; --plain_tokens_per_second=MEASURED makes this a prediction "
        "for a machine."
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
