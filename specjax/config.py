"""Frozen, hashable configurations: static arguments of `jax.jit`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specjax import dtypes
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch

ROPE_TYPES = ("default", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the geometric series of wavelengths.
      rope_type: "default" (no scaling), "linear" (every frequency divided by `factor`; Chen et al.
        2023, "Extending Context Window of LLMs via Positional Interpolation") or "llama3" (low
        frequencies divided by `factor`, high ones kept, a linear ramp between; Llama 3.1 reference
        code, `apply_scaling`).
      factor: divisor of the frequencies (1.0 for "default").
      low_freq_factor: "llama3" only; wavelengths above `original_max_position / low_freq_factor`
        are divided.
      high_freq_factor: "llama3" only; wavelengths below `original_max_position / high_freq_factor`
        are kept.
      original_max_position: "llama3" only; context length, in tokens, before scaling.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise SpecJAXError(
                f"RoPE type {self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise SpecJAXError(f"rope_theta must be positive and finite, got {self.theta}")
        if not 1 <= self.factor < math.inf:
            raise SpecJAXError(
                f"RoPE scaling factor must be at least 1 and finite, got {self.factor}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise SpecJAXError(
                "RoPE scaling needs 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )
        if not self.original_max_position >= 1:
            raise SpecJAXError(
                f"RoPE's original_max_position must be at least 1, got {self.original_max_position}"
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama model (Llama 1 to 3.2, SmolLM2 and other `LlamaForCausalLM`
    weights).

    Attributes:
      vocab_size: V, rows of the embedding.
      hidden_size: D.
      intermediate_size: F.
      num_layers: L.
      num_heads: N, query heads.
      num_kv_heads: K; divides `num_heads`.
      head_dim: H; need not be D / N.
      rms_norm_eps: added to the mean square in RMSNorm.
      max_position_embeddings: most tokens, prompt and output together, that a sequence may have.
      rope: rotary position embedding.
      tie_word_embeddings: logits use the embedding matrix; there is no `lm_head`.
      attention_bias: biases on q, k, v and o.
      mlp_bias: biases on gate, up and down.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecJAXError(f"{field} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise SpecJAXError(
                "num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise SpecJAXError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if not self.rms_norm_eps > 0:
            raise SpecJAXError(f"rms_norm_eps must be positive, got {self.rms_norm_eps}")

    @property
    def group_size(self) -> int:
        """G, query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-serialisable form; `from_dict` reverses it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LlamaConfig:
        """Reverses `to_dict`. Raises SpecJAXError on missing or unknown fields."""
        try:
            return cls(**{**fields, "rope": RopeConfig(**fields["rope"])})
        except (TypeError, KeyError) as error:
            raise SpecJAXError(f"not a SpecJAX model configuration: {error}") from error


@dataclasses.dataclass(frozen=True)
class Runtime:
    """How models run: every static choice that is not part of a model's architecture.

    Attributes:
      dtype: dtype of the parameters and of the key/value caches.
      page_size: Z, positions per page of the key/value caches.
      num_valid_tokens: token ids at or above it are never emitted (rows that pad the embedding);
        None for the whole vocabulary.
      implementation: implementation of attention and sampling, see `kernels.dispatch.choose`; None
        for the best one available.
      mesh: devices, from `parallel.make_mesh`; None for one device.

    Raises:
      SpecJAXError: for a value of the wrong type or out of range.
    """

    dtype: np.dtype | str = "float32"
    page_size: int = 64
    num_valid_tokens: int | None = None
    implementation: str | None = None
    mesh: Mesh | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", dtypes.DTYPES[dtypes.dtype_name(self.dtype)])
        counts = {"page_size": self.page_size}
        if self.num_valid_tokens is not None:
            counts["num_valid_tokens"] = self.num_valid_tokens
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecJAXError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise SpecJAXError(f"mesh must come from make_mesh, got {self.mesh!r}")
        if self.implementation not in (None, *dispatch.IMPLEMENTATIONS):
            choices = ", ".join(dispatch.IMPLEMENTATIONS)
            raise SpecJAXError(
                f"implementation must be one of {choices} or None, got {self.implementation!r}"
            )
