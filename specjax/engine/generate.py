"""Generation for people: texts or token ids in, completions out. All the work is done by `decode`."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specjax import decode, parallel
from specjax import sampling as sampling_lib
from specjax.decode import DecodeConfig
from specjax.drafters import registry
from specjax.drafters.base import Drafter
from specjax.engine.eagle_heads import EagleHead
from specjax.engine.load import Model, check_same_vocabulary
from specjax.engine.pace import Pace
from specjax.errors import SpecJAXError

# on_tokens(index of the prompt, new ids, for each id whether it was an accepted draft, whether
# these are the last)
OnTokens = Callable[[int, list[int], list[bool], bool], None]
OnCompletion = Callable[[int, "Completion"], None]
Prompt = (
    str | Sequence[int] | Sequence[dict[str, str]]
)  # text, token ids, or the messages of a chat

MAX_PREFILL_CHUNK = 256
MIN_EOS_SLOTS = 8


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    Attributes:
      prompt_tokens: ids of the prompt.
      tokens: generated ids, with the end-of-sequence token where one was reached.
      text: of the generated ids without special tokens; None where the model has no tokenizer.
      finish_reason: "stop" (an end-of-sequence token) or "length" (`max_new_tokens`, or the model's
        context is full).
      drafted: for each round, the number of drafts that the target checked.
      accepted: for each round, the number of them that were emitted.
      emitted: for each round, the number of tokens that were emitted; adds up to `len(tokens)`.
      unusable_drafts: drafts that the drafter made of logits that were NaN, or all -inf; they cost
        time, and change nothing else.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    unusable_drafts: int = 0

    @property
    def from_draft(self) -> list[bool]:
        """For each token, whether it was an accepted draft (True) or the target's own (False)."""
        return _from_draft(self.accepted, self.emitted)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
      completions: one per prompt, in their order.
      prefill_seconds: wall time of reading the prompts, compilation included where there was any.
      decode_seconds: wall time of the decode loop, without compilation and without `on_tokens`.
      rounds: number of rounds of the loop.
    """

    completions: tuple[Completion, ...]
    prefill_seconds: float
    decode_seconds: float
    rounds: int


def default_num_speculative_tokens(drafter: str) -> int:
    """K where the user does not say. On a CPU the target's pass costs 1.5 plain steps for two
    drafts and 1.8 for seven (SmolLM2 in float32): many guesses from a lookup, which cost nothing
    else, pay, and of a model's only the first."""
    if jax.default_backend() != "cpu":
        return 5
    return 2 if any(registry.draft_config_types(drafter)) else 7


def generate(
    target: Model,
    drafter: str | Drafter = "ngram",
    prompts: Sequence[Prompt] = (),
    *,
    draft: Model | EagleHead | None = None,
    num_speculative_tokens: int | None = None,
    drafter_options: dict[str, Any] | None = None,
    drafter_params: Any = None,
    verify: str = "rejection",
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    eos_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    page_size: int = 64,
    implementation: str | None = None,
    on_tokens: OnTokens | None = None,
    on_completion: OnCompletion | None = None,
) -> Generation:
    """Generates a completion for each prompt, all of them in one batch.

    The output follows the target's distribution whatever the drafter: at temperature 0 it is the target's
    greedy text, and with `verify="coupled"` the text of plain sampling with the same seed.

    Args:
      target: model whose completions are wanted, from `specjax.load`.
      drafter: "none", "ngram", "draft_model", "eagle" or the name of another module in
        `specjax.drafters`; several with commas between them, of which the first that has a proposal
        makes it ("ngram,eagle"); or a `Drafter`.
      prompts: texts, token ids, or chats as lists of {"role": ..., "content": ...}.
      draft: draft model, for the drafter "draft_model"; its vocabulary must be the target's, and it
        must be loaded for the same mesh. Or a head, from `specjax.load_head`, for "eagle".
      num_speculative_tokens: K, at least 1; by default `default_num_speculative_tokens`. Named
        drafters only.
      drafter_options: keyword options of a named drafter, such as {"min_n": 1} for "ngram".
      drafter_params: parameters of a `Drafter` of your own.
      verify: "rejection" or "coupled", see `specjax.verify`.
      max_new_tokens: at least 1. The model's context may end a completion earlier.
      temperature, top_k, top_p, min_p, seed: see `specjax.sampling.SamplingArrays`. This and
        everything else that may be a sequence has one entry per prompt, or one value for all. The
        same prompt with the same seed gives the same text, alone or in any batch. What no prompt
        uses is not compiled; other values compile nothing.
      eos_ids: ids that end a completion, one set for all prompts or one per prompt; by default the
        model's.
      page_size: positions per page of the key/value caches.
      implementation: "mosaic_gpu" (our kernels) or "xla", for attention and verification; by
        default the kernels where they can run, see `specjax env`. A `Drafter` of your own chooses
        for itself.
      on_tokens: called while tokens are being generated, see `OnTokens`. Where the mesh spans
        several processes, they need the same arguments, and all have an `on_tokens` or none has.
      on_completion: called with the index of a prompt and its completion when that is finished.

    Raises:
      SpecJAXError: for an option, a prompt or a pair of models that cannot be used, naming it.
    """
    for role, model in (("target", target), ("draft", draft)):
        if isinstance(model, Model) and not parallel.is_placed(
            model.params["embed_VD"], model.mesh, role
        ):
            raise SpecJAXError(f"the {role} is not split like a {role}: load it with role={role!r}")
    if isinstance(drafter, str):
        if drafter_params is not None:
            raise SpecJAXError(
                f"drafter_params is for a Drafter of your own; the drafter {drafter!r} takes none"
            )
        drafter, drafter_params = named_drafter(
            drafter, target, draft, num_speculative_tokens, drafter_options or {}
        )
    elif not isinstance(drafter, Drafter):
        raise SpecJAXError(f"drafter must be a name or a Drafter, got {drafter!r}")
    elif draft is not None or num_speculative_tokens is not None or drafter_options:
        raise SpecJAXError(
            "draft, num_speculative_tokens and drafter_options are for a drafter given by name"
        )

    if isinstance(prompts, str | dict) or not hasattr(prompts, "__len__"):
        raise SpecJAXError(f"prompts must be a list, if only of one prompt; got {prompts!r}")
    prompt_ids = [encode(target, prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
    if not prompt_ids:
        raise SpecJAXError("there is no prompt")
    limit = (
        target.config.max_position_embeddings
    )  # beyond its own context a draft model only drafts worse
    for i, ids in enumerate(prompt_ids):
        if len(ids) >= limit:
            raise SpecJAXError(
                f"prompt {i} has {len(ids)} tokens; it may have at most {limit - 1}, since prompt and "
                f"output together may have {limit}"
            )
    batch_size = len(prompt_ids)
    budget_B = per_prompt(
        "max_new_tokens",
        max_new_tokens,
        batch_size,
        int,
        lambda x: (x >= 1) & (x < 2**31),
        "in [1, 2**31)",
    )
    sampling = sampling_lib.arrays(
        seed_B=per_prompt(
            "seed", seed, batch_size, int, lambda x: (x >= 0) & (x < 2**32), "in [0, 2**32)"
        ).astype(np.uint32),
        temperature_B=per_prompt(
            "temperature",
            temperature,
            batch_size,
            float,
            lambda x: (x >= 0) & (x < np.inf),
            "at least 0 and finite",
        ),
        top_k_B=per_prompt(
            "top_k", top_k, batch_size, int, lambda x: (x >= 0) & (x < 2**31), "in [0, 2**31)"
        ),
        top_p_B=per_prompt(
            "top_p", top_p, batch_size, float, lambda x: (x > 0) & (x <= 1), "in (0, 1]"
        ),
        min_p_B=per_prompt(
            "min_p", min_p, batch_size, float, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"
        ),
    )
    length_B = np.array([len(ids) for ids in prompt_ids], np.int32)
    max_length_B = np.minimum(length_B.astype(np.int64) + budget_B, limit).astype(np.int32)
    tokens_BS = np.zeros((batch_size, bucket(int(max_length_B.max()))), np.int32)
    for row, ids in zip(tokens_BS, prompt_ids, strict=True):
        row[: len(ids)] = ids

    # One page holds the whole sequence where that is shorter than a page.
    runtime = target.runtime(min(page_size, tokens_BS.shape[1]), implementation)
    cfg = DecodeConfig(target.config, drafter, verify, runtime)
    chunk = prefill_chunk(int(length_B.max()))
    eos_BE = _eos_table(target, eos_ids, batch_size)
    arrays = (tokens_BS, decode.RequestArrays(length_B, max_length_B, eos_BE, sampling))
    parallel.check_alike(
        (arrays, chunk, str(target.config), verify, page_size, drafter and drafter.num_tokens),
        target.mesh,
    )
    fill_up = functools.partial(_fill_up, num_rows=-batch_size % parallel.dp_size(target.mesh))
    tokens_BS, request = jax.tree.map(fill_up, arrays)
    request.max_length_B[batch_size:] = 0  # rows that fill up the batch emit nothing
    arrays = parallel.put((tokens_BS, request), target.mesh)
    start = time.perf_counter()
    state = jax.block_until_ready(
        decode.init_jit(target.params, drafter_params, cfg, *arrays, chunk)
    )
    prefill_seconds = time.perf_counter() - start
    # No rounds: this only compiles, where that has not been done yet.
    none = parallel.put(np.int32(0), target.mesh)
    state = jax.block_until_ready(
        decode.generate_jit(target.params, drafter_params, cfg, state, none)
    )

    decode_seconds = 0.0
    pace = Pace(on_tokens is not None, jax.process_count() == 1)
    reported_B = length_B[:batch_size].copy()
    finished: dict[int, Completion] = {}
    while len(finished) < batch_size:
        start = time.perf_counter()
        rounds = parallel.put(np.int32(pace.rounds), target.mesh)
        state = decode.generate_jit(target.params, drafter_params, cfg, state, rounds)
        active_B = parallel.get(state.active_B)[:batch_size]
        seconds = time.perf_counter() - start
        decode_seconds += seconds
        pace.update(seconds)
        if on_tokens:
            _report(state, reported_B, on_tokens)
        new = [b for b in np.flatnonzero(~active_B).tolist() if b not in finished]
        if not new:
            continue
        for b, completion in zip(new, _completions(state, target, new), strict=True):
            finished[b] = completion
            if on_completion:
                on_completion(b, completion)
    completions = tuple(finished[b] for b in range(batch_size))
    return Generation(
        completions, prefill_seconds, decode_seconds, max(len(c.emitted) for c in completions)
    )


def encode(model: Model, prompt: Prompt, name: str) -> tuple[int, ...]:
    """Token ids of a prompt. `name` is what errors call it.

    Raises:
      SpecJAXError: an empty prompt, ids outside the vocabulary, text for a model without tokenizer,
        or something else altogether.
    """
    if isinstance(prompt, bytes | dict) or not hasattr(prompt, "__len__"):
        raise SpecJAXError(
            f"{name} must be a text, token ids or the messages of a chat, got {prompt!r}"
        )
    if not len(prompt):
        raise SpecJAXError(f"{name} is empty")
    is_chat = isinstance(prompt[0], dict)
    if (isinstance(prompt, str) or is_chat) and model.tokenizer is None:
        raise SpecJAXError(f"{name} is text, and {model.path} has no tokenizer: give token ids")
    if is_chat or isinstance(prompt, str):
        text = model.tokenizer.render_chat(prompt) if is_chat else prompt
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SpecJAXError(f"{name} is not valid Unicode: {error}") from error
        prompt = model.tokenizer.encode(
            text, add_special_tokens=not is_chat
        )  # a template writes them itself
        if not prompt:
            raise SpecJAXError(f"{name} gives no tokens")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SpecJAXError(
            f"{name} must be a text, token ids or the messages of a chat, got {prompt!r}"
        )
    outside = ids[(ids < 0) | (ids >= model.num_valid_tokens)]
    if outside.size:
        raise SpecJAXError(
            f"{name} has the token id {outside[0]}; ids go from 0 to {model.num_valid_tokens - 1}"
        )
    return tuple(ids.tolist())


def per_prompt(
    name: str, value, batch_size: int, kind: type, valid: Callable, rule: str
) -> np.ndarray:
    """One value for all prompts, or one for each, as a checked array `[B]`: int64 or float32."""
    array = np.asarray(value)
    if array.shape not in ((), (batch_size,)):
        raise SpecJAXError(f"{name} has {array.size} values for {batch_size} prompts")
    if array.dtype.kind not in ("iu" if kind is int else "iuf"):
        raise SpecJAXError(
            f"{name} must be {'a whole number' if kind is int else 'a number'}, got {value!r}"
        )
    if kind is float:  # first, since 1e-50 becomes 0 and 1e50 infinite
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    if not np.all(valid(array)):
        raise SpecJAXError(f"{name} must be {rule}, got {array[~valid(array)].flat[0]!s}")
    return np.broadcast_to(array, (batch_size,)).astype(np.int64 if kind is int else np.float32)


def bucket(max_seq_len: int) -> int:
    """S for sequences of up to `max_seq_len` tokens: the next of a few sizes, at most a quarter
    larger or 128 more, so that prompts of similar length share a compiled program."""
    step = max(128, 2 ** (max_seq_len.bit_length() - 3))
    return -(-max_seq_len // step) * step


def prefill_chunk(prompt_length: int) -> int:
    """Tokens of a prompt to read at a time: the power of two that holds the longest prompt, within
    limits."""
    return min(max(16, 2 ** (prompt_length - 1).bit_length()), MAX_PREFILL_CHUNK)


def named_drafter(
    name: str,
    target: Model,
    draft: Model | EagleHead | None,
    num_speculative_tokens: int | None,
    options: dict[str, Any],
) -> tuple[Drafter | None, Any]:
    """A drafter by its name and its parameters, None for "none"; arguments and errors as for
    `generate`."""
    if name == "none":
        if draft is not None or options or num_speculative_tokens is not None:
            raise SpecJAXError(
                "the drafter 'none' decodes without speculation: it takes no draft model, no number of "
                "speculative tokens and no options"
            )
        return None, None
    needs = registry.draft_config_types(name)
    if isinstance(draft, Model):
        check_same_vocabulary(target, draft)
    if draft is not None and draft.mesh != target.mesh:
        raise SpecJAXError(
            f"target and draft were loaded for different meshes: {target.mesh}, {draft.mesh}"
        )
    k = (
        default_num_speculative_tokens(name)
        if num_speculative_tokens is None
        else num_speculative_tokens
    )
    drafter = registry.make(name, k, target.config, draft.config if draft else None, options)
    params = [draft.params if kind else None for kind in needs]
    return drafter, params[0] if len(params) == 1 else tuple(params)


def _fill_up(x_B, num_rows: int):
    """A copy with so many rows more, which repeat the last one."""
    return np.pad(x_B, ((0, num_rows), *[(0, 0)] * (x_B.ndim - 1)), mode="edge")


def _eos_table(target: Model, eos_ids, batch_size: int) -> np.ndarray:
    """int32 `[B, E]`, filled up with -1. E is the same for most models, so that it does not decide
    what is compiled."""
    if np.isscalar(eos_ids):
        raise SpecJAXError(
            f"eos_ids must be a list of token ids, or one for each prompt; got {eos_ids!r}"
        )
    eos_ids = list(target.eos_ids if eos_ids is None else eos_ids)
    sets = eos_ids if eos_ids and not np.isscalar(eos_ids[0]) else [eos_ids] * batch_size
    if len(sets) != batch_size:
        raise SpecJAXError(f"eos_ids has {len(sets)} sets for {batch_size} prompts")
    for token in (token for ids in sets for token in ids):
        if not isinstance(token, int | np.integer) or not 0 <= token < target.config.vocab_size:
            raise SpecJAXError(
                f"eos_ids has {token!r}; ids go from 0 to {target.config.vocab_size - 1}"
            )
    table_BE = np.full((batch_size, max(MIN_EOS_SLOTS, *map(len, sets))), -1, np.int32)
    for row, ids in zip(table_BE, sets, strict=True):
        row[: len(ids)] = ids
    return table_BE


def _from_draft(accepted: Iterable[int], emitted: Iterable[int]) -> list[bool]:
    """For each token of some rounds, whether it was an accepted draft: in a round these come first."""
    return [i < n for n, m in zip(accepted, emitted, strict=True) for i in range(m)]


def _report(state: decode.DecodeState, reported_B: np.ndarray, on_tokens: OnTokens) -> None:
    """Hands out what was committed since the last report; `reported_B` is brought up to date."""
    tokens_BS, length_B, prompt_length_B, active_B, accepted_BS, emitted_BS = parallel.get(
        (
            state.tokens_BS,
            state.length_B,
            state.request.prompt_length_B,
            state.active_B,
            state.log.accepted_BS,
            state.log.emitted_BS,
        )
    )
    for b in np.flatnonzero(length_B[: len(reported_B)] > reported_B):
        from_draft = _from_draft(accepted_BS[b], emitted_BS[b])
        new = slice(reported_B[b], length_B[b])
        on_tokens(
            int(b),
            tokens_BS[b, new].tolist(),
            from_draft[new.start - prompt_length_B[b] :],
            not active_B[b],
        )
        reported_B[b] = length_B[b]


def _completions(state: decode.DecodeState, target: Model, rows: Sequence[int]) -> list[Completion]:
    """The completions of rows that are finished.

    Raises:
      SpecJAXError: the target's logits were NaN, or all -inf.
    """
    state = parallel.get(state.replace(cache=None, drafter=None))
    completions = []
    for b in rows:
        if state.failed_B[b]:
            raise SpecJAXError(
                f"prompt {b}: the target's logits at position {state.length_B[b]} are NaN or all "
                "-inf: its weights are damaged, or too large for the dtype"
            )
        prompt, end = state.request.prompt_length_B[b], state.length_B[b]
        tokens = tuple(state.tokens_BS[b, prompt:end].tolist())
        rounds = state.log.rounds_B[b]
        tables = (state.log.drafted_BS, state.log.accepted_BS, state.log.emitted_BS)
        drafted, accepted, emitted = (tuple(table_BS[b, :rounds].tolist()) for table_BS in tables)
        completions.append(
            Completion(
                prompt_tokens=tuple(state.tokens_BS[b, :prompt].tolist()),
                tokens=tokens,
                text=target.tokenizer.decode(tokens) if target.tokenizer else None,
                finish_reason="stop" if tokens[-1] in state.request.eos_BE[b] else "length",
                drafted=drafted,
                accepted=accepted,
                emitted=emitted,
                unusable_drafts=int(state.log.unusable_drafts_B[b]),
            )
        )
    return completions
