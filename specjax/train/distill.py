"""The training objective of draft models: distillation of the target into a smaller Llama."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax import llama, parallel
from specjax.config import LlamaConfig
from specjax.engine import load
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.train import losses
from specjax.train.data import Dataset
from specjax.train.losses import Projection, Start


def draft_hidden(params, config: LlamaConfig, tokens_BS) -> jax.Array:
    """Returns a model's hidden states `[B, S, D]` after the final norm; differentiable."""
    rotation = llama.rotary(config, jnp.arange(tokens_BS.shape[1])[None])
    x_BSD = params["embed_VD"][tokens_BS]
    for layer in params["layers"]:
        attention, mlp = layer["attention"], layer["mlp"]
        q_BSNH, k_BSKH, v_BSKH = llama.qkv(attention, config, x_BSD, rotation)
        a_BSNH = jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True)
        x_BSD = llama.out_residual(attention, a_BSNH, x_BSD)
        h_BSF = llama.gate_up(mlp, config, x_BSD)
        x_BSD = llama.down_residual(mlp, h_BSF, x_BSD)
    return llama.rms_norm(x_BSD, params["final_norm_D"], config.rms_norm_eps)


@dataclasses.dataclass(frozen=True)
class DistillObjective(losses.Objective):
    """Trains a draft model, whose configuration is a `LlamaConfig`. `ttt_steps` must be 1."""

    OPTIONS = ("draft_config",)
    FIRST_POSITION = 0
    TRAINS_OUTPUT = True

    def __post_init__(self):
        super().__post_init__()
        if self.ttt_steps != 1:
            raise SpecJAXError(f"ttt_steps must be 1 for a draft model, got {self.ttt_steps}")

    @classmethod
    def make_config(cls, start: Start, target_config: LlamaConfig) -> LlamaConfig:
        if (start.draft is None) == (start.config is None):
            raise SpecJAXError("a draft model requires either --draft or --draft_config")
        config = start.config
        if config is None:
            config = load.open_source(start.draft).config
        if config.vocab_size != target_config.vocab_size:
            raise SpecJAXError(
                f"the draft model has a vocabulary of {config.vocab_size} tokens, the target of "
                f"{target_config.vocab_size}"
            )
        return config

    def check_shardable(self) -> None:
        degree = parallel.degree(self.mesh, "draft")
        parallel.check_shardable(self.draft_config, degree, "draft")

    def initial(self, target: Model, rows: Dataset, start: Start, seed: int):
        if start.draft is not None:
            draft = load.load(start.draft, dtype="float32", mesh=target.mesh, role="draft")
            return draft.params, None
        params = llama.init(jax.random.key(seed), self.draft_config)
        return parallel.place(params, target.mesh, "draft"), None

    def save(self, folder, target: Model, params, draft_ids_U) -> None:
        draft = dataclasses.replace(target, config=self.draft_config, params=params)
        load.save(folder, draft)

    def student(self, params, target_params, draft_ids_U, batch, aux_hidden, num_steps):
        hidden_BSD = draft_hidden(params, self.draft_config, batch.tokens_BS)
        output_UD = llama.output_rows(params, draft_ids_U)
        return [Projection(hidden_BSD[:, :-1], output_UD)]


OBJECTIVE = DistillObjective
