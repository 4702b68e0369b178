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

from specjax import files, llama, parallel
from specjax.checkpoints_convert import hf, orbax
from specjax.config import LlamaConfig
from specjax.engine import batch, metrics
from specjax.errors import SpecJAXError


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
    """What `make` finds. Bytes and seconds are those of one device, the batch is that of all of
    them together.

    Attributes:
      target, draft, both: what the device holds of the models; of a draft model that is not there,
        nothing.
      reserve: bytes for the logits of a round and for the widest activations of a chunk of the
        prompts.
      kv_tokens: tokens whose KV, of both models, fits beside the weights and the reserve.
      plain, verify: the target's pass over 1 token and over K + 1 tokens of each sequence.
      drafting: the draft model's pass over 1 token; takes no time without a draft model.
      overhead: seconds that a pass of the target lasts beyond its roofline; 0 unless it was measured.
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
        return metrics.expected_tokens(rate, K) * (self.plain.roofline + self.overhead) / seconds


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
      SpecJAXError: models that do not go together, degrees that do not work, or what does not fit.
    """
    mesh = AbstractMesh(
        parallel.mesh_shape(tensor_parallel, draft_tensor_parallel, data_parallel),
        parallel.MESH_AXES,
    )
    if not 0 < gpu_memory_utilization <= 1:
        raise SpecJAXError(
            f"gpu_memory_utilization must be above 0 and at most 1, got {gpu_memory_utilization:g}"
        )
    if draft is None and draft_tensor_parallel > 1:
        raise SpecJAXError(
            f"draft_tensor_parallel={draft_tensor_parallel}, but there is no draft model"
        )
    if draft and draft.vocab_size != target.vocab_size:
        raise SpecJAXError(
            f"the target has {target.vocab_size} tokens and the draft model {draft.vocab_size}"
        )
    models = {"target": target} | ({"draft": draft} if draft else {})
    shards = {role: parallel.degree(mesh, role) for role in models}
    shares = {"draft": Share()} | {
        role: _share(cfg, mesh, role, dtype) for role, cfg in models.items()
    }
    both = Share(*map(sum, zip(*shares.values(), strict=True)))
    K, rows = num_speculative_tokens, -(-batch_size // data_parallel)
    kv_needed = rows * context

    # In float32, as matrix products give them: every model's logits, and the two halves of a
    # feed-forward layer.
    logits = sum(
        (K + (role == "target")) * cfg.vocab_size // shards[role] for role, cfg in models.items()
    )
    widest = max(2 * cfg.intermediate_size // shards[role] for role, cfg in models.items())
    reserve = 4 * rows * (logits + batch.prefill_chunk(context) * widest)
    usable = gpu_memory_utilization * gpu.memory
    kv_tokens = math.floor((usable - both.weights - reserve) / both.kv_per_token)
    if kv_tokens < kv_needed:
        parts = {
            "weights of the target": shares["target"].weights,
            "of the draft model": shares["draft"].weights,
            "logits and activations": reserve,
            f"KV of {rows} x {context} tokens": kv_needed * both.kv_per_token,
        }
        listed = ", ".join(f"{what} {count / 1e9:.2f}" for what, count in parts.items())
        raise SpecJAXError(
            f"does not fit: of each GPU {usable / 1e9:.2f} GB may be used, and needed are "
            f"{sum(parts.values()) / 1e9:.2f} GB: {listed}"
        )

    def step(role: str, tokens: int) -> Step:
        cfg, share = models[role], shares[role]
        scores_and_mixture = (
            4 * cfg.num_layers * cfg.num_heads // shards[role] * cfg.head_dim * context
        )
        flops = rows * tokens * (2 * share.read / dtype.itemsize + scores_and_mixture)
        return Step(
            (share.read + kv_needed * share.kv_per_token) / gpu.bandwidth, flops / gpu.flops
        )

    plain, overhead = step("target", 1), 0.0
    if plain_tokens_per_second is not None:
        overhead = batch_size / plain_tokens_per_second - plain.roofline
        if not overhead >= 0:
            raise SpecJAXError(
                f"plain_tokens_per_second={plain_tokens_per_second:g} is above what the roofline of a step "
                f"allows, {batch_size / plain.roofline:.1f}"
            )
    return Plan(
        shares["target"],
        shares["draft"],
        both,
        reserve,
        kv_tokens,
        plain,
        step("target", K + 1),
        step("draft", 1) if draft else Step(),
        overhead,
        batch_size,
        K,
    )


def _share(cfg: LlamaConfig, mesh: AbstractMesh, role: str, dtype: np.dtype) -> Share:
    shards = parallel.degree(mesh, role)
    parallel.check_shardable(cfg, shards, role)
    params = llama.abstract_params(cfg, dtype)
    sizes = jax.tree.map(
        lambda array, split: math.prod(split.shard_shape(array.shape)) * dtype.itemsize,
        params,
        parallel.shardings(params, mesh, role),
    )
    weights = sum(jax.tree.leaves(sizes))
    unread = sizes["embed_VD"] if "lm_head_VD" in sizes else 0
    kv_per_token = 2 * cfg.num_layers * cfg.num_kv_heads // shards * cfg.head_dim * dtype.itemsize
    return Share(weights, weights - unread, kv_per_token)


def read_model_config(path: str | os.PathLike) -> LlamaConfig:
    """The configuration of a SpecJAX checkpoint or a Hugging Face folder, which need not have
    weights."""
    folder = pathlib.Path(path)
    fields = files.read_json(folder / "config.json")
    if not orbax.is_checkpoint(fields):
        return hf.read_config(folder)
    with files.parsing(folder / "config.json"):
        return LlamaConfig.from_dict(fields["model"])
