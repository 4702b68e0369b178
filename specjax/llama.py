"""The Llama model: one declaration of its parameters, initialisation, and the forward pass over a
paged KV cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import kv_cache
from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.kernels.paged_attention import paged_attention, unsupported
from specjax.kv_cache import PagedKVCache
from specjax.parallel import split_over

CPU_FEW_ROWS, CPU_BLOCKS = 32, 4  # see `_matmul`


def abstract_params(cfg: LlamaConfig, dtype=jnp.float32):
    """The parameter pytree of a model as `jax.ShapeDtypeStruct`s: the one place that says what
    exists, and its shape.

    Matrices are kept `[out, in]` and everything that reads the same input is fused, so that each
    weight is read once
    a pass. q, k and v sit together *per kv head* (G query heads, then k, then v): a shard over kv
      heads is a slice.
    """
    V, D, F, H = cfg.vocab_size, cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    K, G = cfg.num_kv_heads, cfg.group_size

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def layer():
        attention = {
            "norm_D": array(D),
            "qkv_KGHD": array(K, G + 2, H, D),
            "out_DKGH": array(D, K, G, H),
        }
        mlp = {"norm_D": array(D), "gate_up_2FD": array(2, F, D), "down_DF": array(D, F)}
        if cfg.attention_bias:
            attention |= {"qkv_bias_KGH": array(K, G + 2, H), "out_bias_D": array(D)}
        if cfg.mlp_bias:
            mlp |= {"gate_up_bias_2F": array(2, F), "down_bias_D": array(D)}
        return {"attention": attention, "mlp": mlp}

    params = {
        "embed_VD": array(V, D),
        "layers": [layer() for _ in range(cfg.num_layers)],
        "final_norm_D": array(D),
    }
    if not cfg.tie_word_embeddings:
        params["lm_head_VD"] = array(V, D)
    return params


def init(rng: jax.Array, cfg: LlamaConfig, dtype=jnp.float32, scale: float = 0.02):
    """Random parameters: norms are 1, everything else normal with standard deviation `scale`."""
    shapes = abstract_params(cfg, dtype)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(rng, len(leaves))
    return treedef.unflatten(
        jnp.ones(leaf.shape, dtype)
        if "norm" in path[-1].key
        else scale * jax.random.normal(key, leaf.shape, dtype)
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    )


class Output(NamedTuple):
    """What a forward pass returns.

    Attributes:
      hidden_BTD: hidden states after the final norm.
      cache: the cache with the new keys and values in it.
      aux_layers: the residual stream after each wanted layer, `[B, T, D]` each.
    """

    hidden_BTD: jax.Array
    cache: PagedKVCache
    aux_layers: tuple[jax.Array, ...]


def forward(
    params,
    cfg: LlamaConfig,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    cache: PagedKVCache,
    *,
    aux_layers: tuple[int, ...] = (),
    implementation: str | None = None,
    role: str = "target",
) -> Output:
    """Runs T consecutive new tokens of each sequence through the model (Touvron et al. 2023,
    "LLaMA").

    Token t of sequence b has the absolute position, and the cache position, `start_B[b] + t`; it sees
    the positions before its own and itself. Its keys and values are written to the cache; where no page
    holds its position they are dropped, and its output means nothing.

    On a mesh (`parallel.on_mesh`) parameters and pools are this device's shards. Where they are
    split the devices add up what each has of the embedding, of every attention's output and of
    every MLP's: two all-reduces a layer.

    Args:
      params: see `abstract_params`.
      cfg: the model's configuration (static).
      tokens_BT: int32 `[B, T]`.
      start_B: int32 `[B]`; -1 makes the first token a placeholder that sees nothing and is written
        nowhere.
      cache: pages must be reserved for the positions that matter (`kv_cache.reserve`).
      aux_layers: layers after which to return the residual stream (static); layer 0 is the first.
      implementation: of attention, see `kernels.dispatch.choose` (static).
      role: "target" or "draft", which says over which mesh axes the model is split where it is
        (static).
    """
    positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])
    page_BT, offset_BT = kv_cache.locate(cache, positions_BT)
    rotation = rotary(cfg, positions_BT)
    k_pools, v_pools, aux_hidden = list(cache.k_PKZH), list(cache.v_PKZH), {}

    axes = split_over(params["embed_VD"].shape[0], cfg.vocab_size, role)
    x_BTD = embed(params, cfg, tokens_BT, role)
    for i, layer in enumerate(params["layers"]):
        x_BTD, k_pools[i], v_pools[i] = paged_layer(
            layer,
            cfg,
            x_BTD,
            k_pools[i],
            v_pools[i],
            page_BT,
            offset_BT,
            rotation,
            cache.block_table_BX,
            start_B,
            implementation,
            axes,
        )
        if i in aux_layers:
            aux_hidden[i] = x_BTD

    hidden_BTD = rms_norm(x_BTD, params["final_norm_D"], cfg.rms_norm_eps)
    cache = cache.replace(k_PKZH=k_pools, v_PKZH=v_pools)
    return Output(hidden_BTD, cache, tuple(aux_hidden[i] for i in aux_layers))


# Jitted on its own so that it is traced once, not once per layer; XLA inlines it.
@functools.partial(jax.jit, static_argnums=(1, 10, 11))
def paged_layer(
    layer,
    cfg: LlamaConfig,
    x_BTD,
    k_pool,
    v_pool,
    page_BT,
    offset_BT,
    rotation,
    block_table_BX,
    start_B,
    implementation: str | None,
    axes: tuple[str, ...],
):
    """`decoder_layer` over a paged cache: the residual stream after it, and the pools with the new
    keys and values."""

    def attend(q_BTNH, k_BTKH, v_BTKH):
        k_new = kv_cache.write(k_pool, page_BT, offset_BT, k_BTKH)
        v_new = kv_cache.write(v_pool, page_BT, offset_BT, v_BTKH)
        a_BTNH = paged_attention(
            q_BTNH, k_new, v_new, block_table_BX, start_B, implementation=implementation
        )
        return a_BTNH, (k_new, v_new)

    x_BTD, (k_pool, v_pool) = decoder_layer(layer, cfg, x_BTD, rotation, attend, axes)
    return x_BTD, k_pool, v_pool


def decoder_layer(
    layer, cfg: LlamaConfig, x_BTD, rotation, attend: Callable, axes: tuple[str, ...] = ()
):
    """One decoder layer.

    Args:
      layer: its parameters, see `abstract_params`.
      cfg: of the model.
      x_BTD: the residual stream before it.
      rotation: see `rotary`.
      attend: `(q_BTNH, k_BTKH, v_BTKH) -> (a_BTNH, kept)` with the new queries, keys and values,
        already rotated.
      axes: mesh axes over which the parameters are split.

    Returns:
      The residual stream after it, and what `attend` wanted kept.
    """
    B, T, _ = x_BTD.shape
    attention, mlp = layer["attention"], layer["mlp"]
    G, H = cfg.group_size, cfg.head_dim
    N = G * attention["qkv_KGHD"].shape[0]

    h_BTD = rms_norm(x_BTD, attention["norm_D"], cfg.rms_norm_eps)
    qkv_BTKGH = linear(h_BTD, attention["qkv_KGHD"], attention.get("qkv_bias_KGH"))
    q_BTNH = _rotate(qkv_BTKGH[..., :G, :].reshape(B, T, N, H), rotation)
    a_BTNH, kept = attend(q_BTNH, _rotate(qkv_BTKGH[..., G, :], rotation), qkv_BTKGH[..., G + 1, :])
    out_DI = attention["out_DKGH"].reshape(-1, N * H)
    x_BTD += linear(a_BTNH.reshape(B, T, N * H), out_DI, attention.get("out_bias_D"), axes=axes)

    h_BTD = rms_norm(x_BTD, mlp["norm_D"], cfg.rms_norm_eps)
    gate_up_BT2F = linear(h_BTD, mlp["gate_up_2FD"], mlp.get("gate_up_bias_2F"))
    h_BTF = jax.nn.silu(gate_up_BT2F[..., 0, :]) * gate_up_BT2F[..., 1, :]
    return x_BTD + linear(h_BTF, mlp["down_DF"], mlp.get("down_bias_D"), axes=axes), kept


def embed(params, cfg: LlamaConfig, tokens_BT: jax.Array, role: str = "target") -> jax.Array:
    """Embeddings of tokens, `[B, T, D]`; of a shard of the vocabulary, added up over the devices
    that have the others."""
    embed_VD = params["embed_VD"]
    V = embed_VD.shape[0]
    axes = split_over(V, cfg.vocab_size, role)
    if not axes:
        return embed_VD[tokens_BT]
    index_BT = tokens_BT - jax.lax.axis_index(axes) * V
    here_BT = (index_BT >= 0) & (index_BT < V)
    x_BTD = jnp.where(here_BT[..., None], embed_VD[jnp.clip(index_BT, 0, V - 1)], 0)
    return jax.lax.psum(x_BTD, axes)


def logits(params, hidden_BTD: jax.Array) -> jax.Array:
    """Next-token logits, float32 `[B, T, V]`, of hidden states from `forward`. A tied embedding
    serves as it lies. Of a shard of the vocabulary come that shard's logits."""
    return linear(hidden_BTD, output_rows(params), dtype=jnp.float32)


def output_rows(params, ids_U: jax.Array | None = None) -> jax.Array:
    """The output matrix `[V, D]`, which is the embedding where the two are tied; or its rows for
    some tokens."""
    head_VD = params.get("lm_head_VD", params["embed_VD"])
    return head_VD if ids_U is None else head_VD[ids_U]


def linear(x_BTI, w_OI, bias_O=None, dtype=None, axes: tuple[str, ...] = ()):
    """Product over the last axis of both; the weight may have several output axes. Accumulates in
    float32, over the mesh axes too over which the last axis is split."""
    # As plain matrices: XLA's CPU compiler transposes, that is copies, a weight with several output
    # axes in every step.
    y = _matmul(x_BTI.reshape(-1, x_BTI.shape[-1]), w_OI.reshape(-1, w_OI.shape[-1]))
    y = y.reshape(*x_BTI.shape[:2], *w_OI.shape[:-1])
    if axes:
        y = jax.lax.psum(y, axes)
    return (y if bias_O is None else y + bias_O).astype(dtype or x_BTI.dtype)


def _matmul(x_RI, w_OI):
    """`x @ w.T` in float32, for R rows."""
    R, (O, I) = x_RI.shape[0], w_OI.shape

    def plain(x_RI, w_OI):
        return jax.lax.dot_general(
            x_RI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    def blocked(x_RI, w_OI):
        padded = -(-R // 8) * 8 if 4 < R < 16 else R
        x_RI = jnp.pad(x_RI, ((0, padded - R), (0, 0)))
        w_JOI = w_OI.reshape(CPU_BLOCKS, -1, I)
        x_JRI = jnp.broadcast_to(x_RI, (CPU_BLOCKS, padded, I))
        y_JOR = jax.lax.dot_general(
            w_JOI, x_JRI, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        return y_JOR.reshape(O, padded)[:, :R].T

    # For a few rows XLA's CPU library would first rearrange the whole weight, which costs more than
    # the product. As a batch of products with the weight on the left, it reads the weight as it
    # lies. One row gains a tenth. Its inner kernels take 8 rows or 4: 5 to 7 cost a quarter more
    # than 8 do, and 9 to 15 up to half more than 16.
    if R <= CPU_FEW_ROWS and O % CPU_BLOCKS == 0:
        return jax.lax.platform_dependent(x_RI, w_OI, cpu=blocked, default=plain)
    return plain(x_RI, w_OI)


def rms_norm(x_BTD, scale_D, eps: float):
    """Root mean square layer normalisation (Zhang & Sennrich 2019)."""
    x = x_BTD.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x.astype(x_BTD.dtype) * scale_D


def rope_frequencies(cfg: LlamaConfig) -> np.ndarray:
    """Radians per position of each pair of channels, float32 `[H / 2]`, after the configuration's
    scaling."""
    rope = cfg.rope
    freq = rope.theta ** -(np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim)
    if rope.rope_type == "linear":
        freq = freq / rope.factor
    elif rope.rope_type == "llama3":
        turns = (
            rope.original_max_position * freq / (2 * np.pi)
        )  # how often a channel turns over the original context
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0, 1)
        freq = keep * freq + (1 - keep) * freq / rope.factor
    return freq.astype(np.float32)


def rotary(cfg: LlamaConfig, positions_BT):
    """Cosines and sines of the angles by which positions turn queries and keys, float32 `[B, T, 1,
    H / 2]` each."""
    angle_BTh = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(cfg)
    return jnp.cos(angle_BTh)[:, :, None], jnp.sin(angle_BTh)[:, :, None]


def _rotate(x_BTNH, rotation):
    """Rotary embedding (Su et al. 2021, "RoFormer"), with channel i paired with i + H/2 as in
    Hugging Face weights."""
    cos, sin = rotation
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def check_implementation(
    cfg: LlamaConfig, dtype, page_size: int, implementation: str | None
) -> None:
    """Whether a model can run with this implementation of attention, here.

    Raises:
      SpecJAXError: it cannot, and why.
    """
    q_BTNH = jax.ShapeDtypeStruct((1, 1, cfg.num_heads, cfg.head_dim), dtype)
    k_pool = jax.ShapeDtypeStruct((1, cfg.num_kv_heads, page_size, cfg.head_dim), dtype)
    try:
        dispatch.choose(implementation, unsupported(q_BTNH, k_pool))
    except ValueError as error:
        raise SpecJAXError(str(error)) from error


def init_cache(
    params, cfg: LlamaConfig, batch_size: int, max_seq_len: int, page_size: int
) -> PagedKVCache:
    """An empty cache for a model, or for a shard of it, in the dtype of its parameters; see
    `kv_cache.init`."""
    qkv_KGHD = params["layers"][0]["attention"]["qkv_KGHD"]
    return kv_cache.init(
        cfg,
        batch_size,
        max_seq_len,
        page_size=page_size,
        num_kv_heads=qkv_KGHD.shape[0],
        dtype=qkv_KGHD.dtype,
    )


def prefill(
    params,
    cfg: LlamaConfig,
    tokens_BS: jax.Array,
    count_B: jax.Array,
    cache: PagedKVCache,
    chunk_size: int,
    *,
    aux_layers: tuple[int, ...] = (),
    implementation: str | None = None,
    role: str = "target",
):
    """Reads the first `count_B` tokens of each row into an empty cache, `chunk_size` at a time.

    One loop serves every prompt length, so only S and the chunk decide what is compiled. No logits
      are computed: the
    last token of a prompt is left to the decode loop.

    Returns:
      The cache, and for each layer the residual stream `[B, S, D]`, which is 0 or means nothing from
      `count_B` on.

    Raises:
      SpecJAXError: an implementation that cannot run this model here.
    """
    check_implementation(cfg, params["embed_VD"].dtype, cache.page_size, implementation)
    B, S = tokens_BS.shape
    cache = kv_cache.reserve(cache, count_B)
    num_chunks = -(-jnp.max(count_B) // chunk_size)
    padded_BS = jnp.pad(tokens_BS, ((0, 0), (0, -S % chunk_size)))
    aux_hidden_BSD = tuple(
        jnp.zeros((*padded_BS.shape, cfg.hidden_size), params["embed_VD"].dtype) for _ in aux_layers
    )

    def read_chunk(i, carry):
        cache, aux_hidden_BSD = carry
        start = i * chunk_size
        chunk_BT = jax.lax.dynamic_slice_in_dim(padded_BS, start, chunk_size, axis=1)
        # Rows that end earlier write what means nothing into positions beyond their length, or nowhere.
        output = forward(
            params,
            cfg,
            chunk_BT,
            jnp.full((B,), start),
            cache,
            aux_layers=aux_layers,
            implementation=implementation,
            role=role,
        )
        aux_hidden_BSD = tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
            for old, new in zip(aux_hidden_BSD, output.aux_layers, strict=True)
        )
        return output.cache, aux_hidden_BSD

    cache, aux_hidden_BSD = jax.lax.fori_loop(0, num_chunks, read_chunk, (cache, aux_hidden_BSD))
    return cache, tuple(layer[:, :S] for layer in aux_hidden_BSD)
