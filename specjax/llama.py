"""The Llama model: its parameters, initialisation, and the forward pass over a paged KV cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import kv_cache, parallel
from specjax.config import LlamaConfig, Runtime
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.kernels.paged_attention import paged_attention, unsupported
from specjax.kv_cache import PagedKVCache
from specjax.lax_utils import with_standard_promotion
from specjax.linear import linear


def abstract_params(config: LlamaConfig, dtype=jnp.float32):
    """Returns the parameter pytree of a model as `jax.ShapeDtypeStruct`s: the only list of them.

    Matrices are `[out, in]`, and everything that reads the same input is fused, so that each
    weight is read once a pass. q, k and v sit together *per kv head* (G query heads, then k, then
    v): a shard over kv heads is a slice.
    """
    V, D, F, H = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    K, G = config.num_kv_heads, config.group_size

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def layer():
        attention = {
            "norm_D": array(D),
            "qkv_KGHD": array(K, G + 2, H, D),
            "out_DKGH": array(D, K, G, H),
        }
        mlp = {"norm_D": array(D), "gate_up_2FD": array(2, F, D), "down_DF": array(D, F)}
        if config.attention_bias:
            attention |= {"qkv_bias_KGH": array(K, G + 2, H), "out_bias_D": array(D)}
        if config.mlp_bias:
            mlp |= {"gate_up_bias_2F": array(2, F), "down_bias_D": array(D)}
        return {"attention": attention, "mlp": mlp}

    params = {
        "embed_VD": array(V, D),
        "layers": [layer() for _ in range(config.num_layers)],
        "final_norm_D": array(D),
    }
    if not config.tie_word_embeddings:
        params["lm_head_VD"] = array(V, D)
    return params


def init(rng: jax.Array, config: LlamaConfig, dtype=jnp.float32, scale: float = 0.02):
    """Returns random parameters: norms are 1, the rest normal with standard deviation `scale`."""
    shapes = abstract_params(config, dtype)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(rng, len(leaves))
    arrays = []
    for key, (path, leaf) in zip(keys, leaves, strict=True):
        if "norm" in path[-1].key:
            arrays.append(jnp.ones(leaf.shape, dtype))
        else:
            arrays.append(scale * jax.random.normal(key, leaf.shape, dtype))
    return treedef.unflatten(arrays)


def params_dtype(params) -> np.dtype:
    """Returns the dtype of a model's parameters."""
    return params["embed_VD"].dtype


# --- The forward pass -----------------------------------------------------------------------------


class Output(NamedTuple):
    """Result of a forward pass.

    Attributes:
      hidden_BTD: hidden states after the final norm.
      cache: the cache, with the new keys and values in it.
      aux_hidden: for each requested layer the residual stream after it, `[B, T, D]`.
    """

    hidden_BTD: jax.Array
    cache: PagedKVCache
    aux_hidden: tuple[jax.Array, ...]


class Locations(NamedTuple):
    """Locations of the T new tokens of each sequence; the same for all layers.

    Attributes:
      rotation: see `rotary`.
      page_BT: int32, page of each new token.
      offset_BT: int32, its offset in the page.
      block_table_BX: int32, pages of each sequence.
      start_B: int32, position of the first new token.
    """

    rotation: tuple[jax.Array, jax.Array]
    page_BT: jax.Array
    offset_BT: jax.Array
    block_table_BX: jax.Array
    start_B: jax.Array


def locate(
    config: LlamaConfig, cache: PagedKVCache, block_table_BX: jax.Array, start_B: jax.Array, T: int
) -> Locations:
    """Returns the locations of T new tokens of each sequence, from position `start_B` on."""
    positions_BT = start_B[:, None] + jnp.arange(T)
    page_BT, offset_BT = kv_cache.locate(
        block_table_BX, positions_BT, cache.page_size, cache.num_pages
    )
    rotation = rotary(config, positions_BT)
    return Locations(rotation, page_BT, offset_BT, block_table_BX, start_B)


@with_standard_promotion
def forward(
    params,
    config: LlamaConfig,
    runtime: Runtime,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    block_table_BX: jax.Array,
    cache: PagedKVCache,
    *,
    aux_layers: tuple[int, ...] = (),
    role: str = "target",
) -> Output:
    """Runs T consecutive new tokens of each sequence through the model (Touvron et al. 2023).

    Token t of sequence b has the absolute position `start_B[b] + t`. It sees earlier positions and
    itself. Its keys and values are written to the cache; where no page holds its position they
    are dropped, and its output is undefined.

    On a mesh (`parallel.on_mesh`) parameters and pools are this device's shards. Where the model
    is split, devices sum the embedding, every attention's output and every MLP's output: two
    all-reduces a layer.

    Args:
      params: see `abstract_params`.
      config: the model's configuration (static).
      runtime: how it runs (static).
      tokens_BT: int32 `[B, T]`.
      start_B: int32 `[B]`; -1 makes the first token a placeholder that sees nothing and is written
        nowhere.
      block_table_BX: int32 `[B, X]`, pages of each sequence, see `kv_cache`. Sequences may share
        pages of earlier positions, but not those that are written here.
      cache: the pools.
      aux_layers: layers after which to return the residual stream (static); the first layer is 0.
      role: "target" or "draft": over which mesh axes the model is split (static).
    """
    locations = locate(config, cache, block_table_BX, start_B, tokens_BT.shape[1])
    k_pools, v_pools, aux_hidden = list(cache.k_PKZH), list(cache.v_PKZH), {}
    x_BTD = embed(params, runtime, tokens_BT, role)
    for i, layer in enumerate(params["layers"]):
        x_BTD, k_pools[i], v_pools[i] = decoder_layer(
            layer, config, runtime, role, x_BTD, k_pools[i], v_pools[i], locations
        )
        if i in aux_layers:
            aux_hidden[i] = x_BTD
    hidden_BTD = rms_norm(x_BTD, params["final_norm_D"], config.rms_norm_eps)
    cache = cache.replace(k_PKZH=k_pools, v_PKZH=v_pools)
    return Output(hidden_BTD, cache, tuple(aux_hidden[i] for i in aux_layers))


# Jitted on its own so that it is traced once, not once per layer; XLA inlines it.
@functools.partial(jax.jit, static_argnames=("config", "runtime", "role", "first_position"))
def decoder_layer(
    layer,
    config: LlamaConfig,
    runtime: Runtime,
    role: str,
    x_BTD: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    locations: Locations,
    first_position: int = 0,
):
    """One decoder layer over a paged cache.

    Args:
      layer: its parameters, see `abstract_params`.
      config: configuration of the model (static).
      runtime: how the model runs (static).
      role: see `forward` (static).
      x_BTD: the residual stream before the layer.
      k_pool: keys of the layer, `[P, K, Z, H]`.
      v_pool: values of the layer, `[P, K, Z, H]`.
      locations: locations of the new tokens.
      first_position: the first position that is attended to (static).

    Returns:
      The residual stream after it, and both pools with the new keys and values.
    """
    attention, mlp = layer["attention"], layer["mlp"]
    axes = parallel.model_axes(runtime.mesh, role)
    q_BTNH, k_BTKH, v_BTKH = qkv(attention, config, x_BTD, locations.rotation)
    k_pool = kv_cache.write(k_pool, locations.page_BT, locations.offset_BT, k_BTKH)
    v_pool = kv_cache.write(v_pool, locations.page_BT, locations.offset_BT, v_BTKH)
    a_BTNH = paged_attention(
        q_BTNH,
        k_pool,
        v_pool,
        locations.block_table_BX,
        locations.start_B,
        first_position=first_position,
        implementation=runtime.implementation,
    )
    x_BTD = out_residual(attention, a_BTNH, x_BTD, axes)
    h_BTF = gate_up(mlp, config, x_BTD)
    return down_residual(mlp, h_BTF, x_BTD, axes), k_pool, v_pool


def qkv(attention, config: LlamaConfig, x_BTD, rotation):
    """Returns rotated queries `[B, T, N, H]`, rotated keys and values `[B, T, K, H]`."""
    B, T, _ = x_BTD.shape
    G, H = config.group_size, config.head_dim
    h_BTD = rms_norm(x_BTD, attention["norm_D"], config.rms_norm_eps)
    qkv_BTKGH = linear(h_BTD, attention["qkv_KGHD"], attention.get("qkv_bias_KGH"))
    q_BTNH = qkv_BTKGH[..., :G, :].reshape(B, T, -1, H)
    k_BTKH, v_BTKH = qkv_BTKGH[..., G, :], qkv_BTKGH[..., G + 1, :]
    return _rotate(q_BTNH, rotation), _rotate(k_BTKH, rotation), v_BTKH


def out_residual(attention, a_BTNH, x_BTD, axes: tuple[str, ...] = ()):
    """Returns the residual stream after attention; `axes` are mesh axes that split the heads."""
    B, T, N, H = a_BTNH.shape
    weight = attention["out_DKGH"].reshape(-1, N * H)
    a = a_BTNH.reshape(B, T, N * H)
    return x_BTD + linear(a, weight, attention.get("out_bias_D"), axes=axes)


def gate_up(mlp, config: LlamaConfig, x_BTD):
    """Returns SiLU(gate) * up, `[B, T, F]` (Shazeer 2020, "GLU Variants Improve Transformer")."""
    h_BTD = rms_norm(x_BTD, mlp["norm_D"], config.rms_norm_eps)
    gate_up_BT2F = linear(h_BTD, mlp["gate_up_2FD"], mlp.get("gate_up_bias_2F"))
    return jax.nn.silu(gate_up_BT2F[..., 0, :]) * gate_up_BT2F[..., 1, :]


def down_residual(mlp, h_BTF, x_BTD, axes: tuple[str, ...] = ()):
    """Returns the residual stream after the MLP; `axes` are mesh axes that split F."""
    return x_BTD + linear(h_BTF, mlp["down_DF"], mlp.get("down_bias_D"), axes=axes)


def embed(params, runtime: Runtime, tokens_BT: jax.Array, role: str = "target") -> jax.Array:
    """Returns embeddings of tokens, `[B, T, D]`; over shards of the vocabulary they are summed."""
    embed_VD = params["embed_VD"]
    axes = parallel.model_axes(runtime.mesh, role)
    if not axes:
        return embed_VD[tokens_BT]
    V = embed_VD.shape[0]
    index_BT = tokens_BT - jax.lax.axis_index(axes) * V
    is_here_BT = (index_BT >= 0) & (index_BT < V)
    x_BTD = embed_VD[jnp.clip(index_BT, 0, V - 1)]
    return jax.lax.psum(jnp.where(is_here_BT[..., None], x_BTD, 0), axes)


@with_standard_promotion
def logits(params, hidden_BTD: jax.Array) -> jax.Array:
    """Returns next-token logits, float32 `[B, T, V]`, of the hidden states from `forward`.

    Where the vocabulary is split these are the logits of this device's shard.
    """
    return linear(hidden_BTD, output_rows(params), dtype=jnp.float32)


def output_rows(params, ids_U: jax.Array | None = None) -> jax.Array:
    """Returns the output matrix `[V, D]`, or its rows for some tokens.

    It is the embedding where the two are tied.
    """
    head_VD = params.get("lm_head_VD", params["embed_VD"])
    return head_VD if ids_U is None else head_VD[ids_U]


def rms_norm(x_BTD, scale_D, eps: float):
    """Root mean square layer normalisation (Zhang & Sennrich 2019), computed in float32."""
    x = x_BTD.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x.astype(x_BTD.dtype) * scale_D


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns radians per position of each pair of channels, float32 `[H / 2]`, after scaling."""
    rope = config.rope
    freq = rope.theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if rope.rope_type == "linear":
        freq = freq / rope.factor
    elif rope.rope_type == "llama3":
        # Turns of each channel over the original context.
        turns = rope.original_max_position * freq / (2 * np.pi)
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0, 1)
        freq = keep * freq + (1 - keep) * freq / rope.factor
    return freq.astype(np.float32)


def rotary(config: LlamaConfig, positions_BT):
    """Returns cosines and sines of the rotation at each position, float32 `[B, T, 1, H / 2]`."""
    angle = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]


def _rotate(x_BTNH, rotation):
    """Rotary embedding (Su et al. 2021, "RoFormer").

    Channel i is paired with i + H / 2, as in Hugging Face weights.
    """
    cos, sin = rotation
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def check_implementation(config: LlamaConfig, runtime: Runtime) -> None:
    """Checks that attention of this model can run under `runtime`.

    Raises:
      SpecJAXError: if it cannot; the message gives the reason.
    """
    q_BTNH = jax.ShapeDtypeStruct((1, 1, config.num_heads, config.head_dim), runtime.dtype)
    pool_shape = (1, config.num_kv_heads, runtime.page_size, config.head_dim)
    pool = jax.ShapeDtypeStruct(pool_shape, runtime.dtype)
    try:
        dispatch.choose(runtime.implementation, unsupported(q_BTNH, pool))
    except ValueError as error:
        raise SpecJAXError(str(error)) from error


def init_cache(
    config: LlamaConfig, runtime: Runtime, num_pages: int, role: str = "target"
) -> PagedKVCache:
    """Returns empty pools for a model, or for this device's shard of it; see `kv_cache.init`.

    Raises:
      SpecJAXError: for an implementation that cannot run this model here.
    """
    check_implementation(config, runtime)
    return kv_cache.init(
        config,
        num_pages,
        page_size=runtime.page_size,
        num_kv_heads=config.num_kv_heads // parallel.degree(runtime.mesh, role),
        dtype=runtime.dtype,
    )
