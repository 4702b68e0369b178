"""What fits on a GPU and how fast decoding could be there, by arithmetic alone: for `specjax plan`."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh
from rich.table import Table

from specjax import files, llama, parallel
from specjax.checkpoints_convert import hf, orbax
from specjax.config import LlamaConfig
from specjax.engine import generate as generation
from specjax.engine import metrics
from specjax.errors import SpecJAXError
from specjax.report import tables


class Gpu(NamedTuple):
    """Memory in bytes, its bandwidth in bytes/s, and operations per second on dense bfloat16 or
    float16 matrices."""

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
    """What a device holds of a model, in bytes: weights, those of them that a pass reads, and the
    KV of one token.

    Of an embedding, a pass reads a few rows; all of it only where it is the output matrix too.
    """

    weights: int = 0
    read: int = 0
    kv_per_token: int = 0


class Step(NamedTuple):
    """Seconds that one pass takes a device at least: for reading memory, and for computing."""

    reading: float = 0.0
    computing: float = 0.0

    @property
    def roofline(self) -> float:
        """The longer of the two."""
        return max(self)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `make`. Bytes and seconds are of one device, the batch is of all devices.

    Attributes:
      target, draft, both: what the device holds of the models; nothing of a draft model if there is
        none.
      reserve: bytes for the logits of a round and for the widest activations of a chunk of the
        prompts.
      kv_tokens: tokens whose KV, of both models, fits beside the weights and the reserve.
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
        """Of plain decoding, all sequences together."""
        return self.batch_size / (self.plain.roofline + self.overhead)

    def speedup(self, rate: float) -> float:
        """Over plain decoding, if a draft is accepted with probability `rate` (Leviathan et al.
        2023, theorem 3.8)."""
        K = self.num_speculative_tokens
        seconds = K * self.drafting.roofline + self.verify.roofline + self.overhead
        tokens = metrics.expected_tokens(rate, K)
        return tokens * (self.plain.roofline + self.overhead) / seconds


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model of a plan: its shape, the number of its shards, and what a device holds of it."""

    config: LlamaConfig
    shards: int
    share: Share


def make(
    target: LlamaConfig,
    draft: LlamaConfig | None,
    gpu: Gpu,
    *,
    dtype: np.dtype,
    tensor_parallel: int = 1,
    draft_tensor_parallel: int = 1,
    data_parallel: int = 1,
    gpu_memory_utilization: float = 0.92,
    num_speculative_tokens: int = 5,
    batch_size: int = 1,
    context: int = 1024,
    plain_tokens_per_second: float | None = None,
) -> Plan:
    """A plan for sequences of `context` tokens each. The arguments are those of `specjax plan`.

    Raises:
      SpecJAXError: models that do not go together, degrees that do not work, or models that do not
        fit.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise SpecJAXError(
            f"gpu_memory_utilization must be above 0 and at most 1, got {gpu_memory_utilization:g}"
        )
    shape = parallel.mesh_shape(tensor_parallel, draft_tensor_parallel, data_parallel)
    mesh = AbstractMesh(shape, parallel.MESH_AXES)
    _check_draft(target, draft, draft_tensor_parallel)
    models = {"target": _model(target, mesh, "target", dtype)}
    if draft:
        models["draft"] = _model(draft, mesh, "draft", dtype)
    nothing = Share()
    shares = {
        "target": models["target"].share,
        "draft": models["draft"].share if draft else nothing,
    }
    both = Share(*map(sum, zip(*shares.values(), strict=True)))
    K, rows = num_speculative_tokens, -(-batch_size // data_parallel)
    kv_needed = rows * context
    reserve = _reserve(models, K, rows, context)
    usable = gpu_memory_utilization * gpu.memory
    kv_tokens = math.floor((usable - both.weights - reserve) / both.kv_per_token)
    if kv_tokens < kv_needed:
        needed = {
            "weights of the target": shares["target"].weights,
            "of the draft model": shares["draft"].weights,
            "logits and activations": reserve,
            f"KV of {rows} x {context} tokens": kv_needed * both.kv_per_token,
        }
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in needed.items())
        raise SpecJAXError(
            f"does not fit: of each GPU {usable / 1e9:.2f} GB may be used, but "
            f"{sum(needed.values()) / 1e9:.2f} GB are needed: {listed}"
        )

    def step(role: str, tokens: int) -> Step:
        model = models[role]
        config, share = model.config, model.share
        heads = config.num_layers * config.num_heads // model.shards
        scores_and_mixture = 4 * heads * config.head_dim * context
        flops = rows * tokens * (2 * share.read / dtype.itemsize + scores_and_mixture)
        read = share.read + kv_needed * share.kv_per_token
        return Step(read / gpu.bandwidth, flops / gpu.flops)

    plain, overhead = step("target", 1), 0.0
    if plain_tokens_per_second is not None:
        overhead = batch_size / plain_tokens_per_second - plain.roofline
        if not overhead >= 0:
            raise SpecJAXError(
                f"plain_tokens_per_second={plain_tokens_per_second:g} is above what the roofline "
                f"of a step allows, {batch_size / plain.roofline:.1f}"
            )
    return Plan(
        target=shares["target"],
        draft=shares["draft"],
        both=both,
        reserve=reserve,
        kv_tokens=kv_tokens,
        plain=plain,
        verify=step("target", K + 1),
        drafting=step("draft", 1) if draft else Step(),
        overhead=overhead,
        batch_size=batch_size,
        num_speculative_tokens=K,
    )


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
    parallel.check(config, shards, role)
    params = llama.abstract_params(config, dtype)

    def size(array, sharding) -> int:
        return math.prod(sharding.shard_shape(array.shape)) * dtype.itemsize

    sizes = jax.tree.map(size, params, parallel.shardings(params, mesh, role))
    weights = sum(jax.tree.leaves(sizes))
    unread = sizes["embed_VD"] if "lm_head_VD" in sizes else 0
    kv_heads = config.num_layers * config.num_kv_heads // shards
    kv_per_token = 2 * kv_heads * config.head_dim * dtype.itemsize
    return _Model(config, shards, Share(weights, weights - unread, kv_per_token))


def _reserve(models: dict[str, _Model], K: int, rows: int, context: int) -> int:
    """Bytes of every model's logits and of the two halves of a feed-forward layer, in float32."""
    logits, widest = 0, 0
    for role, model in models.items():
        num_logits = K + (role == "target")
        logits += num_logits * model.config.vocab_size // model.shards
        widest = max(widest, 2 * model.config.intermediate_size // model.shards)
    return 4 * rows * (logits + generation.prefill_chunk(context) * widest)


def memory_table(plan: Plan, devices: str, utilization: float) -> Table:
    """What each device holds."""
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


def read_model_config(path: str | os.PathLike) -> LlamaConfig:
    """The configuration of a SpecJAX checkpoint or a Hugging Face folder, which need not have
    weights."""
    folder = pathlib.Path(path)
    fields = files.read_json(folder / "config.json")
    if not orbax.is_checkpoint(fields):
        return hf.read_config(folder)
    with files.parsing(folder / "config.json"):
        return LlamaConfig.from_dict(fields["model"])
