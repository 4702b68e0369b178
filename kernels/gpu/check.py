"""Our kernels beside the `xla` implementation in float32, from the same inputs, on whatever runs
them.

Every check also shows that it would have found zeros and shifted outputs wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels import sampling as verify
from specjax.kernels.paged_attention import pack_ancestors, paged_attention
from specjax.kernels.sampling.noise import exponential

# Relative distance below which two results of float32 arithmetic may fall either way: exp of an
# argument of up to 80 that is off by half a unit in the last place is off by 5e-6, and there are
# two of them.
TIE = 1e-5


def check_attention(
    starts: Sequence[int],
    T: int,
    tree: bool,
    dtype: str,
    heads: tuple[int, int, int],
    page_size: int,
) -> list[str]:
    """What is wrong with the kernel's outputs. Positions and pages that hold nothing are NaN.

    Two roundings to the dtype are allowed, of the weights and of the output, each to the nearest:
      together one unit in
    the last place of the same attention over the magnitudes of the values. 1e-5 is for sums in
    float32.
    """
    rng, (N, K, H), B, Z = np.random.default_rng(0), heads, len(starts), page_size
    start_B = np.array(starts, np.int32)
    X = -(-int(start_B.max() + T) // Z)
    P = B * X + 3
    table_BX = rng.permutation(P)[: B * X].reshape(B, X).astype(np.int32)
    written_PZ, written_BXZ = (
        np.zeros((P, Z), bool),
        np.arange(X * Z).reshape(X, Z) < (start_B + T)[:, None, None],
    )
    written_PZ[table_BX] = written_BXZ
    table_BX[~written_BXZ.any(-1)] = P
    ancestors_BT2 = random_tree(rng, B, T) if tree else None

    @jax.jit
    def outputs(written_PZ, table_BX, start_B, ancestors_BT2):
        q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
        # Large queries make for outputs that a few values dominate, and that differ where these do.
        q_BTNH = (3 * jax.random.normal(q_key, (B, T, N, H))).astype(dtype)
        k_pool, v_pool = (
            jnp.where(
                written_PZ[:, None, :, None], jax.random.normal(key, (P, K, Z, H), dtype), jnp.nan
            )
            for key in (k_key, v_key)
        )
        out_BTNH = paged_attention(
            q_BTNH,
            k_pool,
            v_pool,
            table_BX,
            start_B,
            ancestors_BT2=ancestors_BT2,
            implementation="mosaic_gpu",
        )
        q_BTNH, k_pool, v_pool = (x.astype(jnp.float32) for x in (q_BTNH, k_pool, v_pool))
        with jax.default_matmul_precision("highest"):  # on a GPU float32 is TF32 otherwise
            expected_BTNH, size_BTNH = (
                paged_attention(
                    q_BTNH,
                    k_pool,
                    v,
                    table_BX,
                    start_B,
                    implementation="xla",
                    ancestors_BT2=ancestors_BT2,
                )
                for v in (v_pool, abs(v_pool))
            )
        return out_BTNH, expected_BTNH, size_BTNH

    arrays = outputs(
        jnp.asarray(written_PZ), jnp.asarray(table_BX), jnp.asarray(start_B), ancestors_BT2
    )
    out_BTNH, expected_BTNH, size_BTNH = (np.asarray(x, np.float64) for x in arrays)

    def wrong(out_BTNH):
        return ~(abs(out_BTNH - expected_BTNH) <= float(jnp.finfo(dtype).eps) * size_BTNH + 1e-5)

    problems = []
    if wrong(out_BTNH).any():
        b, t, n, h = np.argwhere(wrong(out_BTNH))[0]
        problems.append(
            f"{wrong(out_BTNH).mean():.2%} of the outputs are wrong, the first at sequence {b}, token {t}, "
            f"head {n}, channel {h}: {out_BTNH[b, t, n, h]:.4g} instead of {expected_BTNH[b, t, n, h]:.4g}"
        )
    # In each head of each token that sees anything.
    controls = {"zeros": 0 * expected_BTNH, "shifted channels": np.roll(expected_BTNH, 1, 3)}
    if K > 1:
        controls["shifted kv heads"] = np.roll(expected_BTNH, N // K, 2)
    seen_BTN = size_BTNH.any(-1)
    return problems + [
        f"the check itself takes {name} for right"
        for name, control_BTNH in controls.items()
        if not wrong(control_BTNH).any(-1)[seen_BTN].all()
    ]


def random_tree(rng, B: int, T: int) -> jax.Array:
    """Ancestor bits of random trees, in which every node but the first has a parent before it."""
    mask_BTT = np.zeros((B, T, T), bool)
    for t in range(T):
        mask_BTT[:, t] = mask_BTT[np.arange(B), rng.integers(max(t, 1), size=B)]
        mask_BTT[:, t, t] = True
    return pack_ancestors(jnp.asarray(mask_BTT))


def check_verification(V: int, K: int, dtype: str) -> list[str]:
    """What is wrong with the kernel's draws, distributions and decisions.

    They must be the reference's, but where the reference itself says that it was a tie within
    `TIE`.
    """
    rng, B, T, num_valid = np.random.default_rng(0), 10, K + 1, V - 3
    temperature_B = jnp.float32([1.0, 0.0, 0.7, 1.6, 1.0, 1.0, 0.8, 1.2, 0.0, 1.0])
    threshold_BT = jnp.full((B, T), -jnp.inf).at[2].set(1.0)
    key_BT2, draft_key_BT2 = jnp.asarray(rng.integers(-(2**31), 2**31, (2, B, T, 2)), jnp.int32)
    u_BM = jnp.asarray(rng.random((B, K)), jnp.float32).at[4].set(0)  # which accepts all
    count_B = (
        jnp.asarray(rng.permutation(np.clip(np.arange(B) + K - 2, 1, K)), jnp.int32).at[4].set(K)
    )
    greedy_B11 = temperature_B[:, None, None] == 0
    kernel, reference = (
        {"num_valid": num_valid, "implementation": name} for name in ("mosaic_gpu", "xla")
    )

    def dense(distribution):
        """Probabilities as the reference computes them, and one at the first most likely token at
        temperature 0."""
        x_BTV = jnp.where(jnp.arange(V) < num_valid, distribution.logits_BTV, -jnp.inf)
        scale_B11 = jnp.where(greedy_B11, 1, temperature_B[:, None, None])
        weight_BTV = (
            jnp.exp((x_BTV - distribution.largest_BT[..., None]) / scale_B11)
            / distribution.total_BT[..., None]
        )
        probs_BTV = jnp.where(x_BTV >= distribution.threshold_BT[..., None], weight_BTV, 0)
        return jnp.where(greedy_B11, jax.nn.one_hot(x_BTV.argmax(-1), V), probs_BTV)

    def at(x_BTV, token_BT):
        return jnp.take_along_axis(x_BTV, token_BT[..., None], axis=-1)[..., 0]

    def wins(token_BT, weight_BTV, slack_BTV):
        """Whether no token's race can have been won by more than the slack of both."""
        noise_BTV = exponential(key_BT2[..., :1], key_BT2[..., 1:], jnp.arange(V, dtype=jnp.int32))
        lowest_BT = ((weight_BTV - slack_BTV) / noise_BTV).max(-1)
        return (at((weight_BTV + slack_BTV) / noise_BTV, token_BT) >= lowest_BT) & (
            at(weight_BTV, token_BT) > 0
        )

    @jax.jit
    def outputs():
        # Logits and drafts resemble each other, so that some drafts are accepted and some are not.
        logits_BTV, other_BTV = jax.random.normal(jax.random.key(0), (2, B, T, V))
        draft_BMV = (3 * logits_BTV + 1.2 * other_BTV)[:, :K].astype(dtype)
        logits_BTV = (3 * logits_BTV).astype(dtype)
        draft_BM, q = verify.draw(
            draft_BMV.astype(jnp.float32),
            temperature_B,
            threshold_BT[:, :K],
            draft_key_BT2[:, :K],
            **reference,
        )
        argmax_BT, p = verify.draw(
            logits_BTV.astype(jnp.float32), temperature_B, threshold_BT, None, **reference
        )

        def reject(p, q, options):
            return verify.reject(
                p,
                argmax_BT,
                draft_BM,
                count_B,
                apart(q),
                temperature_B,
                u_BM,
                key_BT2,
                **options,
            )

        accepted_B, _ = reject(p, q, reference)
        argmax = (
            verify.draw(logits_BTV, temperature_B, threshold_BT, None, **kernel)[0] == argmax_BT
        )
        token_BT, distribution = verify.draw(
            logits_BTV, temperature_B, threshold_BT, key_BT2, **kernel
        )
        n_B, own_B = reject(
            p._replace(logits_BTV=logits_BTV), q._replace(logits_BTV=draft_BMV), kernel
        )

        p_BTV, q_BMV = dense(p), dense(q)
        p_BM, uq_BM = at(p_BTV[:, :K], draft_BM), u_BM * at(q_BMV, draft_BM)
        tie_BM = abs(p_BM - uq_BM) <= TIE * (p_BM + uq_BM)
        # The first place at which the numbers of accepted drafts can differ is the lower of the
        # two.
        place_B1 = jnp.minimum(jnp.minimum(n_B, accepted_B), K - 1)[:, None]
        counted_B = (n_B == accepted_B) | jnp.take_along_axis(tie_BM, place_B1, axis=1)[:, 0]
        q_BMV = jnp.where((jnp.arange(K) < count_B[:, None])[..., None], q_BMV, 0)
        # At temperature 0 the most likely token is there, whatever is left.
        left_BTV = jnp.where(greedy_B11, p_BTV, jnp.maximum(p_BTV.at[:, :K].add(-q_BMV), 0))

        def won(token_BT):
            return wins(token_BT, p_BTV, TIE * p_BTV)

        def own(token_B):
            won_BT = wins(jnp.broadcast_to(token_B[:, None], (B, T)), left_BTV, TIE * p_BTV)
            return jnp.take_along_axis(won_BT, n_B[:, None], axis=1)[:, 0]

        same = {
            "largest logits": distribution.largest_BT == p.largest_BT,
            "sums of weights": abs(distribution.total_BT / p.total_BT - 1) <= TIE,
            "most likely tokens": argmax,
            "drawn tokens": won(token_BT),
            "numbers of accepted drafts": counted_B,
            "tokens after the accepted drafts": own(own_B),
        }
        controls = {
            "shifted draws": won((token_BT + 1) % V),
            "shifted tokens after the accepted drafts": own((own_B + 1) % V),
        }
        return same, controls, n_B

    same, controls, n_B = jax.tree.map(np.asarray, outputs())
    problems = [
        f"{name}: {(~ok).sum()} of {ok.size} are wrong" for name, ok in same.items() if not ok.all()
    ]
    problems += [
        f"the check itself takes {name} for right" for name, ok in controls.items() if ok.any()
    ]
    if not (n_B < count_B).any() or not n_B.any():
        problems.append(
            f"the check has no drafts that are accepted, or none that are not: {n_B.tolist()}"
        )
    return problems


def apart(distribution: verify.Distribution) -> tuple[verify.Distribution, ...]:
    """The distributions of drafts as `verify.reject` takes them, one after the other, from those of one call
    of `draw`."""
    return tuple(
        jax.tree.map(lambda x, k=k: x[:, k], distribution)
        for k in range(distribution.logits_BTV.shape[1])
    )
