"""Training: losses, resumed runs, evaluation and data."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import tokenizers

from specjax import llama, parallel
from specjax.engine import generate as generation
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer
from specjax.train import curves, data, evaluate, identity, losses
from specjax.train import eagle as eagle_training
from specjax.train import loop as trainer
from specjax.train.data import Dataset, Rows
from specjax.train.distill import DistillObjective
from specjax.train.eagle import EagleObjective, unrolled
from specjax.train.loop import TrainConfig
from specjax.train.losses import kl, tv
from specjax.train.self_generate import GenerateConfig, self_generate
from support.models import full_aux_hidden, full_logits, similar, tiny

TARGET = tiny(6, num_layers=2)
MODEL = Model(TARGET.config, TARGET.params, None, (), "tiny")
S = 24
HEAD = eagle_training.make_config(TARGET.config, (0, 1))
OBJECTIVE = EagleObjective(TARGET.config, HEAD, ttt_steps=2)
CFG = TrainConfig(
    steps=12,
    batch_size=4,
    learning_rate=0.02,
    warmup=2,
    unroll_from=0.5,
    eval_every=4,
    save_every=3,
)


def initial():
    return eagle_training.initial_params(HEAD, TARGET.params, jax.random.key(3))


@functools.cache
def rows(seed=0, count=12) -> Dataset:
    """Random text without residual streams, of two domains."""
    rng = np.random.default_rng(seed)
    tokens_BS = rng.integers(0, 32, (count, S)).astype(np.int32)
    length_B = rng.integers(S - 6, S + 1, count).astype(np.int32)
    tokens_BS = np.where(np.arange(S) < length_B[:, None], tokens_BS, 0)
    temperature_B = np.resize(np.array([0, 1], np.float32), count)
    return Dataset(
        (
            Rows(
                tokens_BS,
                length_B,
                np.full(count, 4, np.int32),
                temperature_B,
                ["a", "a", "b", "b"] * (count // 4),
                {},
            ),
        )
    )


def run(folder, cfg=CFG, objective=OBJECTIVE, evaluation=None, params=None, **options):
    what = trainer.Run(objective, cfg, TARGET.params, None, rows(), evaluation)
    params = initial() if params is None else params
    return trainer.train(what, params, folder, {"target": "tiny"}, **options)


# --- Losses ---------------------------------------------------------------------------------------


def test_distances_follow_their_definitions():
    p, q = (jax.nn.softmax(x) for x in np.random.default_rng(0).standard_normal((2, 5, 7)))
    np.testing.assert_allclose(kl(jnp.log(p), jnp.log(q)), (p * np.log(p / q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(1 - tv(jnp.log(p), jnp.log(q)), np.minimum(p, q).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("is_head", [True, False])
def test_the_loss_compares_the_distributions_after_each_token(is_head):
    """Compared with a loss computed from logits of whole passes; positions of weight 0 do not
    count."""
    draft = similar(6, num_layers=2)
    objective = OBJECTIVE if is_head else DistillObjective(TARGET.config, draft.config)
    params = initial() if is_head else draft.params
    batch = rows().batch([0, 5], objective.aux_layers, prompt_weight=0.25)
    loss = jax.jit(objective.loss, static_argnums=4)
    total, (distances, accepted) = loss(params, TARGET.params, None, batch, objective.ttt_steps)
    distribution = jax.nn.softmax(full_logits(TARGET, batch.tokens_BS))
    if is_head:
        aux_layers = full_aux_hidden(TARGET, batch.tokens_BS, HEAD.aux_layers)
        student = jax.jit(objective.student, static_argnums=5)
        hidden = student(params, TARGET.params, None, batch, aux_layers, 2)
        drafted = [jax.nn.softmax(h_BTD @ w_UD.T) for h_BTD, w_UD in hidden]
    else:
        drafted = [jax.nn.softmax(full_logits(draft, batch.tokens_BS))[:, :-1]]
    expected = []
    for i, q in enumerate(drafted):
        first = i + 1 if is_head else 0
        N = q.shape[1]
        p, weight = (
            distribution[:, first : first + N],
            batch.weight_BS[:, first + 1 : first + 1 + N],
        )
        assert {0.0, 0.25, 1.0} >= set(np.unique(weight))
        expected.append((np.sum(p * np.log(p / q), axis=-1) * weight).sum() / weight.sum())
        np.testing.assert_allclose(
            accepted[i], (np.minimum(p, q).sum(-1) * weight).sum() / weight.sum(), rtol=1e-4
        )
    np.testing.assert_allclose(distances, expected, rtol=1e-4)
    np.testing.assert_allclose(total, sum(0.9**i * x for i, x in enumerate(expected)), rtol=1e-4)


def test_the_target_is_renormalised_to_a_reduced_vocabulary():
    ids_U = jnp.array([1, 4, 7, 30])
    batch = rows().batch([0], OBJECTIVE.aux_layers, 1.0)
    loss = jax.jit(OBJECTIVE.loss, static_argnums=4)
    _, (distances, _) = loss(initial(), TARGET.params, ids_U, batch, 1)
    aux_layers = full_aux_hidden(TARGET, batch.tokens_BS, HEAD.aux_layers)
    student = jax.jit(OBJECTIVE.student, static_argnums=5)
    ((h_BTD, w_UD),) = student(initial(), TARGET.params, ids_U, batch, aux_layers, 1)
    p = jax.nn.softmax(full_logits(TARGET, batch.tokens_BS)[:, 1:-1][..., ids_U])
    q = jax.nn.softmax(h_BTD @ w_UD.T)
    weight = batch.weight_BS[:, 2:]
    np.testing.assert_allclose(
        distances[0], ((p * np.log(p / q)).sum(-1) * weight).sum() / weight.sum(), rtol=1e-4
    )


# --- The run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["kl", "tv"])
def test_the_loss_falls(tmp_path, distance):
    cfg = dataclasses.replace(CFG, steps=40, unroll_from=0)
    history = run(tmp_path / "run", cfg, dataclasses.replace(OBJECTIVE, distance=distance)).history
    losses = [record["loss"] for record in history if "loss" in record]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Parameters and history are equal bit for bit, at whatever steps it is killed."""
    held_out = evaluate.Evaluation(OBJECTIVE, TARGET.params, rows(1, 4), num_positions=2)
    whole = run(tmp_path / "whole", evaluation=held_out)

    class Killed(Exception):
        pass

    for dies_at in (2, 5, 8, 11):

        def die(record, dies_at=dies_at):
            if record["step"] == dies_at:
                raise Killed

        with pytest.raises(Killed):
            run(tmp_path / "killed", evaluation=held_out, on_record=die)
    resumed = run(tmp_path / "killed", evaluation=held_out)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.step == whole.step and resumed.scores == whole.scores

    def without_time(history):
        return [
            {key: value for key, value in record.items() if key != "seconds"} for record in history
        ]

    assert without_time(resumed.history) == without_time(whole.history)


def test_a_run_resumes_after_its_time_limit(tmp_path):
    stopped = run(tmp_path / "run", max_seconds=0.0)
    assert stopped.history[-1]["step"] == 1
    jax.tree.map(
        np.testing.assert_array_equal, run(tmp_path / "run").params, run(tmp_path / "whole").params
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(learning_rate=0.5), "learning_rate=0.02, got 0.5"),
        (dict(steps=13), "steps=12"),
    ],
)
def test_a_run_does_not_resume_with_another_configuration(tmp_path, change, message):
    run(tmp_path / "run", max_seconds=0.0)
    with pytest.raises(SpecJAXError, match=message):
        run(tmp_path / "run", dataclasses.replace(CFG, **change))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(SpecJAXError, match=r"is not empty and has no run\.json"):
        run(tmp_path / "other")


def test_invalid_held_out_rows_are_rejected_before_the_teacher_pass(monkeypatch):
    monkeypatch.setattr(evaluate, "_teacher_outputs", None)  # the teacher pass
    evaluate.Evaluation(OBJECTIVE, TARGET.params, rows())
    (shard,) = rows().shards
    for change, message in (
        (
            dict(temperature_B=np.full(12, 0.7, np.float32)),
            "no held-out row has a token to predict",
        ),
        (dict(domains=["a", "all"] * 6), "a domain called 'all'"),
    ):
        with pytest.raises(SpecJAXError, match=message):
            evaluate.Evaluation(
                OBJECTIVE, TARGET.params, Dataset((dataclasses.replace(shard, **change),))
            )


def test_training_ends_early_without_improvement(tmp_path):
    cfg = dataclasses.replace(
        CFG, steps=40, learning_rate=1e-9, patience=2, eval_every=2, save_every=100
    )
    held_out = evaluate.Evaluation(OBJECTIVE, TARGET.params, rows(1, 4), num_positions=2)
    result = run(tmp_path / "run", cfg, evaluation=held_out)
    assert result.history[-1]["step"] < 40
    evaluations = [record["step"] for record in result.history if "held_out" in record]
    assert len([step for step in evaluations if step > result.step]) == 2


def test_gradients_accumulate_over_parts_of_a_batch():
    """Parts are weighted by their tokens, so AdamW's first moment does not depend on their
    number."""
    moments = []
    for accumulate in (1, 2, 4):
        cfg = dataclasses.replace(CFG, gradient_accumulation_steps=accumulate)
        opt_state = trainer.optimizer(cfg).init(initial())
        batch = rows().batch([0, 3, 5, 6], OBJECTIVE.aux_layers, 0.4)
        parts = jax.tree.map(lambda x, n=accumulate: x.reshape(n, -1, *x.shape[1:]), batch)
        _, opt_state, figures = trainer.update(
            OBJECTIVE, cfg, 2, initial(), opt_state, TARGET.params, None, parts
        )
        moments.append((optax.tree_utils.tree_get(opt_state, "mu"), figures))
    for other in moments[1:]:
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), other, moments[0]
        )


@pytest.mark.parametrize("is_head", [True, False])
def test_on_a_mesh_training_is_the_same(tmp_path, is_head):
    cfg = dataclasses.replace(CFG, steps=3, save_every=3)
    objective = OBJECTIVE if is_head else DistillObjective(TARGET.config, TARGET.config)
    start = functools.partial(
        jax.tree.map, jnp.copy, initial() if is_head else similar(6, num_layers=2).params
    )
    one = run(tmp_path / "one", cfg, objective, params=start())  # training takes them over
    mesh = parallel.make_mesh(2, 2, 2)
    objective = dataclasses.replace(objective, mesh=mesh)
    params, target_params = (
        parallel.place(start(), mesh, "draft"),
        parallel.place(TARGET.params, mesh, "target"),
    )
    what = trainer.Run(objective, cfg, target_params, None, rows())
    several = trainer.train(what, params, tmp_path / "mesh", {})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), one.params, several.params
    )
    np.testing.assert_allclose(
        [r["loss"] for r in one.history], [r["loss"] for r in several.history], rtol=1e-4
    )


def test_every_device_of_a_mesh_computes_only_its_own_rows():
    mesh = parallel.make_mesh(2, 2, 2)
    objective = dataclasses.replace(OBJECTIVE, mesh=mesh)
    params, target_params = (
        parallel.place(initial(), mesh, "draft"),
        parallel.place(TARGET.params, mesh, "target"),
    )
    batch = jax.tree.map(lambda x: x[None], rows().batch(range(4), objective.aux_layers, 1.0))
    text = (
        trainer.update.lower(
            objective,
            CFG,
            2,
            params,
            jax.jit(trainer.optimizer(CFG).init)(params),
            target_params,
            None,
            parallel.put(batch, mesh, trainer.STACKED),
        )
        .compile()
        .as_text()
    )
    assert "[2,21,16]" in text and "4,21,16]" not in text


def test_the_training_step_does_not_copy_the_target():
    """The compiled step returns nothing of the target's size and keeps no copy of it."""
    big = tiny(6, vocab_size=4096, num_layers=2)
    config = eagle_training.make_config(big.config, (0, 1), num_draft_tokens=8)
    objective = EagleObjective(big.config, config, ttt_steps=2)
    params = eagle_training.initial_params(config, big.params, jax.random.key(0))
    opt_state = trainer.optimizer(CFG).init(params)
    batch = jax.tree.map(lambda x: x[None], rows().batch([0, 1], objective.aux_layers, 1.0))
    compiled = trainer.update.lower(
        objective, CFG, 2, params, opt_state, big.params, jnp.arange(8), batch
    ).compile()
    embedding = 4096 * 16 * 4
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < embedding / 4
    assert memory.temp_size_in_bytes < embedding


@pytest.mark.parametrize(
    "field",
    [
        "steps",
        "batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "max_grad_norm",
        "warmup",
    ],
)
def test_invalid_values_are_rejected(field):
    with pytest.raises(SpecJAXError, match=f"{field} must be"):
        dataclasses.replace(CFG, **{field: -1})


# --- Evaluation -----------------------------------------------------------------------------------


def test_drafts_of_the_target_itself_are_always_accepted():
    objective = DistillObjective(TARGET.config, TARGET.config)
    scores = evaluate.Evaluation(objective, TARGET.params, rows())(TARGET.params, None)
    assert {score.temperature for score in scores} == {0, 1}
    assert {score.domain for score in scores} == {"a", "b", "all"}
    for score in scores:
        np.testing.assert_allclose(score.by_position, 1.0, atol=1e-5)
    assert evaluate.summary(scores)[0] == pytest.approx(1)


def test_drafters_are_compared_by_consecutive_accepted_drafts():
    def scores(*by_position):
        return [
            evaluate.Score(temperature, domain, "all", tuple(x + shift for x in by_position), 9)
            for temperature, shift in ((0, 0.1), (1, -0.1))
            for domain in ("a", "all")
        ]

    assert evaluate.chain_length(scores(0.5, 0.4, 0.2)) == pytest.approx(
        0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.2
    )
    assert evaluate.chain_length(scores(0.6, 0.2, 0.2)) < evaluate.chain_length(
        scores(0.5, 0.5, 0.5)
    )


def test_scores_of_a_draft_model():
    """Compared with whole passes: per temperature and domain, for tokens after the prompt."""
    draft = similar(6, num_layers=2)
    scores = evaluate.Evaluation(
        DistillObjective(TARGET.config, draft.config), TARGET.params, rows(), batch_size=5
    )(draft.params, None)
    tokens_BS, length_B, domains = (
        rows().fields(name) for name in ("tokens_BS", "length_B", "domains")
    )
    p, q = (np.asarray(jax.nn.softmax(full_logits(model, tokens_BS))) for model in (TARGET, draft))
    for temperature, right in ((0, p.argmax(-1) == q.argmax(-1)), (1, np.minimum(p, q).sum(-1))):
        for domain in ("a", "b"):
            values = np.concatenate(
                [
                    right[r, 3 : length_B[r] - 1]
                    for r in range(len(rows()))
                    if domains[r] == domain and rows().fields("temperature_B")[r] == temperature
                ]
            )
            (score,) = (
                s
                for s in scores
                if (s.temperature, s.domain, s.text) == (temperature, domain, "all")
            )
            assert score.num_positions == len(values)
            np.testing.assert_allclose(score.by_position[0], values.mean(), rtol=1e-4)


def test_scores_of_a_head():
    """Compared with whole passes over the full vocabulary; the head drafts a part of it."""
    config = eagle_training.make_config(TARGET.config, (0, 1), num_draft_tokens=14)
    params, ids_U = (
        eagle_training.initial_params(config, TARGET.params, jax.random.key(3)),
        np.arange(1, 29, 2),
    )
    scores = evaluate.Evaluation(
        EagleObjective(TARGET.config, config), TARGET.params, rows(count=4), num_positions=2
    )(params, jnp.asarray(ids_U))
    found = {
        (score.temperature, score.domain): score.by_position
        for score in scores
        if score.text == "all"
    }
    tokens_BS, loss_mask_BS = (rows(count=4).fields(name) for name in ("tokens_BS", "loss_mask_BS"))
    p_BSV = np.asarray(jax.nn.softmax(full_logits(TARGET, tokens_BS)))
    hidden = unrolled(
        params,
        config,
        TARGET.config,
        TARGET.params,
        full_aux_hidden(TARGET, tokens_BS, (0, 1)),
        tokens_BS,
        2,
    )
    q_by_step = np.asarray(
        jax.nn.softmax(jnp.stack(hidden) @ llama.output_rows(TARGET.params, ids_U).T)
    )
    for row, (temperature, domain) in enumerate([(0, "a"), (1, "a"), (0, "b"), (1, "b")]):
        expected = [[], []]
        for i, position in np.ndindex(q_by_step.shape[0], q_by_step.shape[2]):
            if loss_mask_BS[
                row, position + 2 : position + 3 + i
            ].all():  # this draft and earlier ones
                p_V, q_V = p_BSV[row, position + 1 + i], np.zeros(32)
                q_V[ids_U] = q_by_step[i, row, position]
                right = (
                    p_V.argmax() == q_V.argmax() if temperature == 0 else np.minimum(p_V, q_V).sum()
                )
                expected[i].append(right)
        np.testing.assert_allclose(
            found[temperature, domain], [np.mean(values) for values in expected], atol=1e-5
        )


def test_repetitions_are_found():
    row = np.array([*range(10), *range(10), 3, 3, 3], np.int32)
    assert np.flatnonzero(evaluate._in_loop(row)).tolist() == [18, 19, 20]


def test_curves_are_drawn(tmp_path):
    held_out = evaluate.Evaluation(OBJECTIVE, TARGET.params, rows(1, 4), num_positions=2)
    result = run(tmp_path / "run", evaluation=held_out)
    curves.draw(result.history, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# --- Data -----------------------------------------------------------------------------------------


GENERATE_CONFIG = GenerateConfig(
    max_seq_len=16,
    batch_size=3,
    temperatures=(0.0, 1.0),
    seed=7,
    aux_layers=(0, 1),
    page_size=4,
)


def test_self_generate_writes_continuations_and_residual_streams(tmp_path):
    """Texts equal those of `generate` with the same seed; existing shards are not written again."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3]]
    domains = ["a", "b", "a", "b"]
    self_generate(MODEL, prompts, domains, tmp_path, GENERATE_CONFIG)
    shards = [data.read_shard(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert sorted(map(len, shards)) == [1, 3]
    found = Dataset(tuple(shards))
    tokens_BS, length_B, start_B = (
        found.fields(name) for name in ("tokens_BS", "length_B", "start_B")
    )
    assert (length_B == 16).all() and sorted(found.fields("domains")) == ["a", "a", "b", "b"]
    batch = found.batch(range(4), (0, 1), 1.0)
    for row in range(4):
        number = prompts.index(tokens_BS[row, : start_B[row]].tolist())
        temperature = float(found.fields("temperature_B")[row])
        (text,) = generation.generate(
            MODEL,
            "none",
            [prompts[number]],
            max_new_tokens=16 - start_B[row],
            temperature=temperature,
            seed=7 + number,
        ).completions
        assert list(text.tokens) == tokens_BS[row, start_B[row] :].tolist()
        for layer, expected in zip(
            batch.aux_hidden, full_aux_hidden(TARGET, tokens_BS, (0, 1)), strict=True
        ):
            np.testing.assert_allclose(layer[row, :-1], expected[row, :-1], rtol=2e-3, atol=2e-3)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    self_generate(MODEL, prompts, domains, tmp_path, GENERATE_CONFIG)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_continuations_on_a_mesh_are_the_same(tmp_path):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3], [9]]  # the second batch is padded
    mesh = parallel.make_mesh(2, 2, 2)
    several = dataclasses.replace(
        MODEL, params=parallel.place(TARGET.params, mesh, "target"), mesh=mesh
    )
    config = dataclasses.replace(GENERATE_CONFIG, batch_size=4)
    found = []
    for name, model in (("one", MODEL), ("mesh", several)):
        paths = self_generate(model, prompts, [""] * 5, tmp_path / name, config)
        found.append(Dataset(tuple(map(data.read_shard, paths))).batch(range(5), (0, 1), 1.0))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        # The last token may lack a residual stream: no token is drafted after it.
        np.testing.assert_allclose(a[:, :-1], b[:, :-1], rtol=2e-3, atol=2e-3)
    np.testing.assert_array_equal(found[0].tokens_BS, found[1].tokens_BS)


def test_stored_residual_streams_give_the_loss_of_a_teacher_pass(tmp_path):
    config = GenerateConfig(
        max_seq_len=S,
        batch_size=2,
        temperatures=(1.0,),
        seed=0,
        aux_layers=(0, 1),
        page_size=8,
    )
    self_generate(MODEL, [[1, 2, 3], [4, 5]], ["", ""], tmp_path, config)
    (shard,) = (data.read_shard(path) for path in tmp_path.glob("*.safetensors"))
    stored, without = Dataset((shard,)), Dataset((dataclasses.replace(shard, aux_hidden={}),))
    values = [
        OBJECTIVE.loss(
            initial(), TARGET.params, None, each.batch([0, 1], OBJECTIVE.aux_layers, 1.0), 2
        )[0]
        for each in (stored, without)
    ]
    np.testing.assert_allclose(*values, rtol=1e-2)


def test_weights_decay_but_norms_do_not():
    params = initial()
    optimizer = trainer.optimizer(TrainConfig(steps=9, warmup=0, weight_decay=0.5))
    gradient = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        assert bool(jnp.any(update != 0)) == ("norm" not in jax.tree_util.keystr(path)), path


def test_a_nan_loss_ends_training(tmp_path):
    params = initial()
    params["final_norm_D"] = params["final_norm_D"].at[0].set(jnp.nan)
    with pytest.raises(SpecJAXError, match="the loss of step 0 is nan: try a lower learning_rate"):
        run(tmp_path / "run", params=params)


@pytest.mark.parametrize("is_head", [True, False])
def test_in_bfloat16_the_loss_is_about_that_in_float32(is_head):
    objective = OBJECTIVE if is_head else DistillObjective(TARGET.config, TARGET.config)
    params = initial() if is_head else similar(6, num_layers=2).params
    batch = rows().batch(range(4), objective.aux_layers, 1.0)
    losses = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        loss = functools.partial(
            dataclasses.replace(objective, dtype=dtype).loss,
            target_params=jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), TARGET.params),
            draft_ids_U=None,
            batch=batch,
            num_steps=objective.ttt_steps,
        )
        (losses[dtype], _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
    assert float(losses[jnp.bfloat16]) == pytest.approx(float(losses[jnp.float32]), rel=0.05)


def test_the_order_of_rows_is_a_function_of_the_step():
    seen = [index for step in range(6) for index in trainer.indices(CFG, 12, step)]
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12)) and seen[:12] != seen[12:]


def words(chat_template=None) -> Tokenizer:
    """A tokenizer of numbers and a few other words, which adds the BOS token, 31."""
    vocabulary = {str(i): i for i in range(28)} | {"<think>": 28, "user": 29, "assistant": 30}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary | {"<s>": 31}, "27"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 31)]
    )
    return Tokenizer(backend, {"bos_token": "<s>"}, chat_template)


CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
REASONING_CHAT = CHAT.replace("assistant {%", "assistant <think> {%")


def chat(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def read_line(tmp_path, line, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    return data.read_texts([tmp_path / "a.jsonl"], tokenizer, 16)


def test_texts_become_rows(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(11))))
    lines = [
        {"text": "1 2 3"},
        {"prompt": "1 2", "completion": " 3 4 5", "domain": "code"},
        "7 8 9",
        {"messages": chat("1 2", "3")},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    got = data.read_texts(paths, words(CHAT), max_seq_len=5)
    expected = [  # tokens, and the length of the prompt
        ([31, 0, 1, 2, 3], 1),
        ([4, 5, 6, 7, 8], 1),
        ([31, 1, 2, 3], 1),
        ([31, 1, 2, 3, 4], 3),
        ([31, 7, 8, 9], 1),
        ([29, 1, 2, 30, 3], 4),
    ]
    assert len(got) == len(expected)
    for i, (ids, start) in enumerate(expected):
        assert got.tokens_BS[i].tolist() == ids + [0] * (5 - len(ids))
        assert (got.length_B[i], got.start_B[i]) == (len(ids), start)
    assert got.domains[3] == "code" and np.isnan(got.temperature_B).all()


@pytest.mark.parametrize("answer", ["3 4", "<think> 3 4", "0 4", "1", "<b> 4", " 3"])
def test_an_answer_starts_after_its_header(tmp_path, answer):
    """Also if the generation prompt ends with an opening tag that the complete chat lacks."""
    got = read_line(tmp_path, {"messages": chat("1", "2", "3", answer)}, words(REASONING_CHAT))
    ids = words().encode(f"user 1 assistant 2 user 3 assistant {answer}", add_special_tokens=False)
    assert got.tokens_BS[0, : len(ids)].tolist() == ids and got.length_B[0] == len(ids)
    opened = answer.startswith("<think> ")  # then the prompt is the beginning of the chat
    assert got.start_B[0] == 7 + opened
    assert got.loss_mask_BS[0].sum() == len(ids) - 7 - opened


def test_an_answer_that_the_template_leaves_out_is_rejected(tmp_path):
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% endif %}"
    template += "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    with pytest.raises(SpecJAXError, match=r"a\.jsonl, line 1: .* does not render the assistant's"):
        read_line(tmp_path, {"messages": chat("1 2 3", "4")}, words(template))


def sentencepiece() -> Tokenizer:
    """A tokenizer that puts a space before every text, as those of Llama 2 do."""
    vocabulary = {"<unk>": 0, "\u2581": 1, "1": 2, "+": 3, "=": 4, "2": 5, "\u25811": 6, "==": 7}
    merges = [("\u2581", "1"), ("=", "=")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("\u2581"),
            tokenizers.normalizers.Replace(" ", "\u2581"),
        ]
    )
    return Tokenizer(backend, {}, None)


@pytest.mark.parametrize(
    ("prompt", "completion", "ids", "start"),
    [
        ("1+1=", "2", [6, 3, 2, 4, 5], 4),  # "1+1=2", not "1+1= 2"
        ("1+1=", " 2", [6, 3, 2, 4, 1, 5], 4),
        ("1+1=", "=2", [6, 3, 2, 7, 5], 3),  # "==" counts as part of the completion
    ],
)
def test_a_completion_is_encoded_with_its_prompt(tmp_path, prompt, completion, ids, start):
    line = {"prompt": prompt, "completion": completion}
    got = read_line(tmp_path, line, sentencepiece())
    assert got.tokens_BS[0, : got.length_B[0]].tolist() == ids
    assert got.start_B[0] == start


def test_contents_of_messages_may_be_lists_of_text_parts(tmp_path):
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    got = read_line(tmp_path, {"messages": chat(parts, parts)}, words(CHAT))
    assert got.tokens_BS[0, :6].tolist() == [29, 1, 2, 30, 1, 2]
    assert (got.length_B[0], got.start_B[0]) == (6, 4)


def test_paths_of_data_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("1 2 3")
    assert data.read_texts(["~/a.txt"], words(), 8).length_B.tolist() == [4]
    (shard,) = rows().shards
    (tmp_path / "rows").mkdir()
    data.write_shard(tmp_path / "rows" / "rows-0.safetensors", shard)
    about = {"target": TARGET.config.to_dict()}
    (tmp_path / "rows" / data.ABOUT).write_text(json.dumps(about))
    (found,) = data.read_folder("~/rows", TARGET.config)
    np.testing.assert_array_equal(found.tokens_BS, shard.tokens_BS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be a string, or an object"),
        ('{"text": 3}', "line 2: 'text' must be a string, got 3"),
        ('{"prompt": 3, "completion": "4"}', "line 2: 'prompt' must be a string, got 3"),
        ('{"prompt": "3", "completion": 4}', "line 2: 'completion' must be a string, got 4"),
        ('{"text": "a", "prompt": "b"}', "line 2: must be"),
        ('{"messages": [3]}', "line 2"),
        ('{"text": "1 2 3", "domain": 4}', "line 2: 'domain' must be a string, got 4"),
        ('{"prompt": "1 2"}', "line 2: a prompt requires a 'completion'"),
        ('{"messages": []}', "line 2: the last of 'messages'"),
        (
            '{"messages": [{"role": "user", "content": "1"}]}',
            "line 2: the last of 'messages' must be the assistant's",
        ),
        (json.dumps({"messages": chat(None, "3")}), "line 2: message 1: 'content' must be"),
        (json.dumps({"messages": chat("3", None)}), "line 2: message 2: 'content' must be"),
        (
            json.dumps({"messages": chat([{"type": "image", "url": "x"}], "3")}),
            "line 2: message 1: parts of type 'image' are not supported",
        ),
    ],
)
def test_errors_name_the_invalid_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('"1 2 3"\n' + line)
    with pytest.raises(SpecJAXError, match=f"a.jsonl, {message}"):
        data.read_texts([tmp_path / "a.jsonl"], words(CHAT), 4)


def test_a_checksum_depends_on_the_content_of_rows():
    (shard,) = rows().shards
    others = [rows(1), Dataset(()), Dataset((dataclasses.replace(shard, domains=["c"] * 12),))]
    for name in data.TENSORS:
        changed = getattr(shard, name).copy()
        changed.flat[5] += 1
        others.append(Dataset((dataclasses.replace(shard, **{name: changed}),)))
    same = Dataset((dataclasses.replace(shard, aux_hidden={0: np.ones((12, S, 2), np.float16)}),))
    assert same.checksum == rows().checksum and len({x.checksum for x in (same, *others)}) == 8


def test_data_without_text_are_rejected(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(SpecJAXError, match="there is no text to train on in"):
        data.read_texts([tmp_path / "a.txt"], words(CHAT), 4)
    with pytest.raises(SpecJAXError, match=r"rows-0\.safetensors"):
        (tmp_path / "rows-0.safetensors").write_bytes(b"1234")
        data.read_shard(tmp_path / "rows-0.safetensors")
    with pytest.raises(SpecJAXError, match="fewer than a batch of 100"):
        run(tmp_path / "run", dataclasses.replace(CFG, batch_size=100))


# --- Older versions -------------------------------------------------------------------------------


def test_shards_of_older_versions_are_read(tmp_path):
    """Tensors had the name taps_<layer>_RSD for the residual streams."""
    (shard,) = rows().shards
    hidden_BSD = np.ones((12, S, 2), np.float16)
    data.write_shard(
        tmp_path / "new.safetensors", dataclasses.replace(shard, aux_hidden={1: hidden_BSD})
    )
    arrays = safetensors.numpy.load_file(tmp_path / "new.safetensors")
    arrays["taps_1_RSD"] = arrays.pop("hidden_1_RSD")
    assert {"tokens_RS", "length_R", "start_R", "temperature_R"} < arrays.keys()
    metadata = {"domains": json.dumps(list(shard.domains))}
    safetensors.numpy.save_file(arrays, tmp_path / "old.safetensors", metadata=metadata)
    old = data.read_shard(tmp_path / "old.safetensors")
    batch = Dataset((old,)).batch([0, 3], (1,), 1.0)
    np.testing.assert_array_equal(batch.aux_hidden[0], hidden_BSD[:2])
    np.testing.assert_array_equal(batch.tokens_BS, shard.tokens_BS[[0, 3]])


def test_runs_of_older_versions_resume(tmp_path):
    """Their files have the earlier names of fields; other values still do not match."""
    recorded = {"num_steps": 2, "accumulate": 1, "clip": 1.0, "shape": {"taps": [0, 1], "x": 3}}
    (tmp_path / "run.json").write_text(json.dumps(recorded))
    values = {
        "ttt_steps": 2,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "shape": {"aux_layers": (0, 1), "x": 3},
    }
    identity.check(tmp_path, "run.json", values)
    identity.claim(tmp_path, "run.json", values)
    for name, other in (("ttt_steps", 3), ("shape", {"aux_layers": (0,), "x": 3})):
        with pytest.raises(SpecJAXError, match="was created with"):
            identity.check(tmp_path, "run.json", values | {name: other})


def test_scores_of_older_versions_are_read():
    new = evaluate.Score(0, "a", "all", (0.5, 0.25), 9)
    fields = dataclasses.asdict(new)
    assert evaluate.read_scores([json.loads(json.dumps(fields))]) == [new]
    fields["places"] = fields.pop("num_positions")
    assert evaluate.read_scores([fields]) == [new]


def test_every_trainable_drafter_has_an_objective():
    assert losses.trainable_drafters() == ["draft_model", "eagle"]
    assert losses.objective_class("eagle") is EagleObjective
    assert losses.objective_class("draft_model") is DistillObjective
    with pytest.raises(SpecJAXError, match="'ngram' cannot be trained; choose from draft_model"):
        losses.objective_class("ngram")
