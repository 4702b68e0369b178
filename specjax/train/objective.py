"""What training minimises: how far a drafter's distributions are from the target's, at every place where it
will have to guess.

Target and drafter are compared over the tokens that the drafter can guess, with the target's distribution
renormalised to them: the distribution among them that is accepted most often is that one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import llama, parallel
from specjax.config import LlamaConfig, Runtime
from specjax.drafters import eagle
from specjax.drafters.eagle import EagleConfig
from specjax.errors import SpecJAXError
from specjax.parallel import DATA

CHUNK = 512  # places whose distributions are in memory at a time
MASKED = -1e30


class Batch(NamedTuple):
    """Rows to learn from, see `data.Rows`.

    Attributes:
      tokens_BS: int32.
      weight_BS: float32, how much it matters that this token is guessed well; 0 behind the end, and
        for the first ones.
      aux_layers: the target's residual streams after the layers that the objective names, `[B, S, D]`; ()
        to ask the target.
    """

    tokens_BS: jax.Array
    weight_BS: jax.Array
    aux_layers: tuple[jax.Array, ...]


def kl(p_logits, q_logits):
    """Kullback-Leibler divergence of p from q, over the last axis."""
    log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def tv(p_logits, q_logits):
    """Total variation distance, which is the probability of a rejection, over the last axis."""
    return 0.5 * jnp.abs(jax.nn.softmax(p_logits) - jax.nn.softmax(q_logits)).sum(-1)


DISTANCES: dict[str, Callable] = {"kl": kl, "tv": tv}


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is to be learned by which drafter. Hashable: a static argument of `jax.jit`.

    Attributes:
      target: the model to guess.
      drafter: configuration of the head, or of the draft model.
      distance: one of `DISTANCES`.
      num_steps: for how many tokens in a row a head is fed its own features; must be 1 for a draft
        model.
      decay: weight of each such step in terms of the one before.
      dtype: of the computation; parameters that are trained are float32.
      mesh: the devices, None for one.
    """

    target: LlamaConfig
    drafter: LlamaConfig | EagleConfig
    distance: str = "kl"
    num_steps: int = 3
    decay: float = 0.9
    dtype: Any = jnp.float32
    mesh: jax.sharding.Mesh | None = None

    def __post_init__(self):
        if self.distance not in DISTANCES:
            raise SpecJAXError(f"loss must be one of {', '.join(DISTANCES)}, got {self.distance!r}")
        if self.num_steps < 1:
            raise SpecJAXError(f"num_steps must be at least 1, got {self.num_steps}")
        if self.num_steps > 1 and not self.is_head:
            raise SpecJAXError(f"num_steps must be 1 for a draft model, got {self.num_steps}")

    @property
    def is_head(self) -> bool:
        """Whether a head is trained; otherwise a draft model."""
        return isinstance(self.drafter, EagleConfig)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target that are needed: those that the head reads, and the last, which the
        target's distribution needs."""
        own = self.drafter.aux_layers if self.is_head else ()
        return tuple(sorted({*own, self.target.num_layers - 1}))

    def weights(self, batch: Batch, num_steps: int) -> jax.Array:
        """For each step the weight of all places together."""
        N = batch.tokens_BS.shape[1] - 1 - (num_steps if self.is_head else 0)
        firsts = (
            range(2, 2 + num_steps) if self.is_head else (1,)
        )  # the tokens that the first places guess
        return jnp.stack([batch.weight_BS[:, first : first + N].sum() for first in firsts])

    def loss(
        self, params, target_params, draft_ids_U, batch: Batch, num_steps: int, weights_I=None
    ):
        """The weighted mean distance, and by step that and the share of drafts that would be
        accepted.

        Args:
          params: the drafter's, float32: what gradients are wanted of.
          target_params: the target's; none are taken of these.
          draft_ids_U: int32 tokens that the drafter can guess; None for all.
          batch: the rows.
          num_steps: at most `self.num_steps` (static).
          weights_I: what the sums over places are divided by; by default `weights` of this batch.
        """
        if weights_I is None:
            weights_I = self.weights(batch, num_steps)
        params = jax.tree.map(lambda x: x.astype(self.dtype), params)
        aux_layers = self.features(target_params, batch)
        hidden_BSD = self.hidden(target_params, aux_layers)
        teacher_UD = llama.output_rows(target_params, draft_ids_U)
        distances, accepted = [], []
        for i, (h_BND, head_VD) in enumerate(
            self.student(params, target_params, draft_ids_U, batch, aux_layers, num_steps)
        ):
            first = (
                1 + i if self.is_head else 0
            )  # the target's hidden state beside which the student's first one lies
            N = h_BND.shape[1]
            weight_BN = batch.weight_BS[:, first + 1 : first + 1 + N] / jnp.maximum(
                weights_I[i], 1e-6
            )
            sums = self.compare(
                hidden_BSD[:, first : first + N], teacher_UD, h_BND, head_VD, weight_BN
            )
            distances.append(sums[0])
            accepted.append(sums[1])
        scale = [self.decay**i for i in range(len(distances))]
        total = sum(s * d for s, d in zip(scale, distances, strict=True))
        return total, (jnp.stack(distances), jnp.stack(accepted))

    def features(self, target_params, batch: Batch) -> tuple[jax.Array, ...]:
        """The target's residual streams at every token, after `self.aux_layers`."""
        if batch.aux_layers:
            return tuple(layer.astype(self.dtype) for layer in batch.aux_layers)
        return jax.lax.stop_gradient(
            ask(target_params, self.target, batch.tokens_BS, self.aux_layers, self.mesh)
        )

    def hidden(self, target_params, aux_layers: tuple[jax.Array, ...]) -> jax.Array:
        """What the target's output matrix reads, of its `features`."""
        return llama.rms_norm(
            aux_layers[-1], target_params["final_norm_D"], self.target.rms_norm_eps
        )

    def student(self, params, target_params, draft_ids_U, batch: Batch, aux_layers, num_steps: int):
        """For each step the drafter's hidden states `[B, N, D]`, and the output matrix that they go
        through."""
        if not self.is_head:
            h_BSD = draft_hidden(params, self.drafter, batch.tokens_BS)
            return [(h_BSD[:, :-1], llama.output_rows(params, draft_ids_U))]
        own = tuple(aux_layers[self.aux_layers.index(layer)] for layer in self.drafter.aux_layers)
        rows_UD = llama.output_rows(target_params, draft_ids_U)
        hidden = unrolled(
            params, self.drafter, self.target, target_params, own, batch.tokens_BS, num_steps
        )
        return [(h_BND, rows_UD) for h_BND in hidden]

    def compare(self, p_BND, p_UD, q_BND, q_UD, weight_BN):
        """Weighted sums over places of the distance and of the probability of acceptance.

        No distributions are kept in memory, and none is worked out twice: gradients are taken on the way
          forward.
        """
        B, N, D = p_BND.shape
        size = min(max(CHUNK // B, 1), N)

        def in_chunks(x):  # along the text: rows stay where they are
            x = jnp.pad(x, ((0, 0), (0, -N % size), *((0, 0),) * (x.ndim - 2)))
            return x.reshape(B, -1, size, *x.shape[2:]).swapaxes(0, 1)

        def chunk(q_BCD, q_UD, p_BCD, weight_BC):
            p_BCU, q_BCU = (
                jnp.einsum(
                    "bcd,ud->bcu",
                    h_BCD,
                    w_UD.astype(h_BCD.dtype),
                    preferred_element_type=jnp.float32,
                )
                for h_BCD, w_UD in ((p_BCD, p_UD), (q_BCD, q_UD))
            )
            return tuple(
                (x_BC * weight_BC).sum()
                for x_BC in (DISTANCES[self.distance](p_BCU, q_BCU), 1 - tv(p_BCU, q_BCU))
            )

        trained = (0,) if self.is_head else (0, 1)  # of a head, the output matrix is the target's

        def forward(q_BND, q_UD):
            def add(total, x):
                sums, gradients = jax.value_and_grad(chunk, trained, has_aux=True)(
                    x[0], q_UD if self.is_head else q_UD.astype(jnp.float32), *x[1:]
                )
                return jax.tree.map(jnp.add, total, (sums, gradients[1:])), gradients[0]

            zeros = (jnp.zeros(()),) * 2, (jnp.zeros(q_UD.shape),) * (len(trained) - 1)
            (sums, by_matrix), by_hidden = jax.lax.scan(
                add, zeros, tuple(map(in_chunks, (q_BND, p_BND, weight_BN)))
            )
            return sums, (by_hidden.swapaxes(0, 1).reshape(B, -1, D)[:, :N], by_matrix)

        @jax.custom_vjp
        def sums(q_BND, q_UD):
            return forward(q_BND, q_UD)[0]

        def backward(gradients, cotangents):
            by_hidden, by_matrix = jax.tree.map(
                lambda x: (x * cotangents[0]).astype(q_BND.dtype), gradients
            )
            return by_hidden, by_matrix[0] if by_matrix else None

        sums.defvjp(forward, backward)
        return sums(q_BND, q_UD)


def ask(
    target_params, cfg: LlamaConfig, tokens_BS, aux_layers: tuple[int, ...], mesh=None
) -> tuple[jax.Array, ...]:
    """The target's residual streams at every token of whole rows, after some layers."""

    def run(params, tokens_BS):
        B, S = tokens_BS.shape
        runtime = Runtime(llama.params_dtype(params), page_size=S, mesh=mesh)
        cache = llama.init_cache(cfg, runtime, B, S)
        count_B = jnp.full(B, S)
        _, aux_hidden = llama.prefill(
            params, cfg, runtime, tokens_BS, count_B, cache, S, aux_layers=aux_layers
        )
        return aux_hidden

    rows = jax.sharding.PartitionSpec(DATA)

    def in_specs(params, tokens_BS):
        return parallel.specs(params, "target"), rows

    mapped = parallel.on_mesh(run, mesh, in_specs, tuple(rows for _ in aux_layers))
    return mapped(target_params, tokens_BS)


def draft_hidden(params, cfg: LlamaConfig, tokens_BS) -> jax.Array:
    """Hidden states of a model at every token of whole rows, after the final norm; can be
    differentiated."""
    rotation = llama.rotary(cfg, jnp.arange(tokens_BS.shape[1])[None])

    x_BSD = params["embed_VD"][tokens_BS]
    for layer in params["layers"]:
        q_BTNH, k_BTKH, v_BTKH = llama.qkv(layer["attention"], cfg, x_BSD, rotation)
        a_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True)
        x_BSD = llama.out_residual(layer["attention"], a_BTNH, x_BSD)
        h_BTF = llama.gate_up(layer["mlp"], cfg, x_BSD)
        x_BSD = llama.down_residual(layer["mlp"], h_BTF, x_BSD)
    return llama.rms_norm(x_BSD, params["final_norm_D"], cfg.rms_norm_eps)


def unrolled(
    params,
    cfg: EagleConfig,
    target: LlamaConfig,
    target_params,
    aux_hidden_BSD,
    tokens_BS,
    num_steps: int,
):
    """A head's hidden states for each of `num_steps` tokens in a row, from every token on.

    Chain j begins at the target's features of token j: step i reads the embedding of token j + 1 +
    i, and is to guess token j + 2 + i. As in decoding it sees the positions up to j with the target's
    features, and what it made of its own features in the positions j + 1 ... j + i.

    Returns:
      For each step `[B, N, D]`, N = S - 1 - num_steps chains.
    """
    N = tokens_BS.shape[1] - 1 - num_steps
    feature_BND = eagle.fuse(params, cfg, tuple(layer[:, :N] for layer in aux_hidden_BSD))
    seen, outputs = [], []  # keys and values of the steps so far
    for i in range(num_steps):
        embed_BND = llama.embed(target_params, target, Runtime(), tokens_BS[:, 1 + i : 1 + i + N])
        x_BND = eagle.join(params, cfg, feature_BND, embed_BND)
        rotation = llama.rotary(cfg.layer, i + jnp.arange(N)[None])
        layer = params["layers"][0]
        q_BTNH, k_BTKH, v_BTKH = llama.qkv(layer["attention"], cfg.layer, x_BND, rotation)
        seen.append((k_BTKH, v_BTKH))
        x_BND = llama.out_residual(layer["attention"], _attend(q_BTNH, seen), x_BND)
        h_BTF = llama.gate_up(layer["mlp"], cfg.layer, x_BND)
        feature_BND = llama.down_residual(layer["mlp"], h_BTF, x_BND)
        outputs.append(eagle.hidden(params, cfg, feature_BND))
    return outputs


def _attend(q_BNQH, seen):
    """Attention of N chains to the first positions of all chains up to their own, and to their own
    later ones."""
    (k_BNKH, v_BNKH), *own = seen
    B, N, Q, H = q_BNQH.shape
    q = q_BNQH.reshape(B, N, k_BNKH.shape[2], -1, H)
    scores = jnp.einsum("bnkgh,bmkh->bkgnm", q, k_BNKH, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tri(N, dtype=bool), scores, MASKED)
    extra = [
        jnp.einsum("bnkgh,bnkh->bkgn", q, k, preferred_element_type=jnp.float32)[..., None]
        for k, _ in own
    ]
    weights = jax.nn.softmax(jnp.concatenate([scores, *extra], axis=-1) * H**-0.5, axis=-1).astype(
        q.dtype
    )
    out = jnp.einsum("bkgnm,bmkh->bnkgh", weights[..., :N], v_BNKH)
    for i, (_, v) in enumerate(own):
        out += jnp.einsum("bkgn,bnkh->bnkgh", weights[..., N + i], v)
    return out.reshape(B, N, Q, H)
