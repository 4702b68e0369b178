"""`specjax.generate`: text or token ids in, completions out. `decode` does all the work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import decode, parallel
from specjax.decode import DecodeConfig, DecodeState, RequestArrays
from specjax.drafters import registry
from specjax.drafters.base import Drafter
from specjax.engine import batch
from specjax.engine.batch import Batch
from specjax.engine.load import LoadedDraft, Model, check_same_vocabulary
from specjax.engine.request import (
    Completion,
    Generation,
    OnCompletion,
    OnTokens,
    Prompt,
    SamplingOptions,
    from_draft,
)
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer

MAX_SPECULATIVE_TOKENS = 128  # the memory of a round grows with it
ROUNDS_WHILE_STREAMING = 4  # rounds per call of the loop while `on_tokens` is given
SECONDS_PER_CALL = 0.5  # roughly, otherwise: Python handles Ctrl-C only between calls
NO_LIMIT = np.iinfo(np.int32).max


def default_num_speculative_tokens(drafter: str) -> int:
    """Returns K, the number of speculative tokens per round, for a drafter by its name.

    On a CPU the target's pass costs 1.5 plain steps for two drafts and 1.8 for seven (SmolLM2 in
    float32). Many drafts pay if drafting itself costs nothing. Where each draft costs a pass of a
    model, only the first ones pay.
    """
    if jax.default_backend() != "cpu":
        return 5
    has_model = any(registry.draft_config_types(drafter))
    return 2 if has_model else 7


def generate(
    target: Model,
    drafter: str | Drafter = registry.DEFAULT,
    prompts: Sequence[Prompt] = (),
    *,
    draft: LoadedDraft | None = None,
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

    The output follows the target's distribution for every drafter: at temperature 0 it is the
    target's greedy text, and with `verify="coupled"` the text of plain sampling with the same seed.
    Texts are equal token for token in float32; in bfloat16 and float16, passes over different
    numbers of tokens or rows round differently, so that near ties may be decided differently.

    Args:
      target: the model to generate with, from `specjax.load`.
      drafter: "none"; the name of a module in `specjax.drafters`; several names separated by
        commas, of which each row takes the first that has a proposal; or a `Drafter`.
      prompts: texts, token ids, or chats as lists of {"role": ..., "content": ...}. A text gets the
        special tokens that the model expects, such as a BOS token, unless it begins with the BOS
        token already; then a `SpecJAXWarning` is issued.
      draft: for a named drafter that needs one: its draft model or head, from
        `specjax.load_drafter`, loaded for the same mesh. A token id must mean the same as in the
        target.
      num_speculative_tokens: K, 1 to 128, for a named drafter; by default
        `default_num_speculative_tokens`. K is cut to the number of drafts that can be emitted.
      drafter_options: keyword options of a named drafter.
      drafter_params: parameters of a `Drafter`.
      verify: "rejection" or "coupled", see `specjax.verify`.
      max_new_tokens: at least 1. The model's context may end a completion earlier.
      temperature, top_k, top_p, min_p, seed: see `request.SamplingOptions`. These, `max_new_tokens`
        and `eos_ids` have one value for all prompts or one per prompt. In float32 the same prompt
        with the same seed gives the same text, alone or in any batch. Nothing is compiled for what
        is off for all prompts, or for new values, unless a budget cuts K.
      eos_ids: ids that end a completion, one set for all prompts or one per prompt; by default
        `target.eos_ids`.
      page_size: positions per page of the key/value caches.
      implementation: "mosaic_gpu" (this package's kernels), "xla" or "interpret" (the kernels in
        Pallas' interpreter), for attention and sampling; by default the kernels if they can run,
        see `specjax env`.
      on_tokens: called while tokens are generated, see `request.OnTokens`. If the mesh spans
        several processes, they need the same arguments, and all or none have `on_tokens`.
      on_completion: called when a prompt is finished, see `request.OnCompletion`; the same holds
        for several processes.

    Raises:
      SpecJAXError: for an option, a prompt or a pair of models that cannot be used, naming it; or
        if the target's logits are NaN.
    """
    _check_models(target, draft)
    prompt_ids = batch.encode_prompts(target, prompts)
    num_prompts, replicas = len(prompt_ids), parallel.dp_size(target.mesh)
    max_length_B = batch.max_lengths(target, prompt_ids, max_new_tokens)
    rows = batch.arrays(
        prompt_ids,
        max_length=max_length_B,
        eos_ids=batch.eos_sets(target, eos_ids, num_prompts),
        sampling=SamplingOptions(temperature, top_k, top_p, min_p, seed),
        num_rows=-(-num_prompts // replicas) * replicas,
    )
    longest = max(len(ids) for ids in prompt_ids)
    most_new_tokens = int((rows.request.max_length_B - rows.request.prompt_length_B).max())

    if isinstance(drafter, str):
        if drafter_params is not None:
            raise SpecJAXError(
                f"drafter_params applies to a Drafter, but {drafter!r} is given by name"
            )
        drafter, drafter_params = named_drafter(
            drafter,
            target,
            draft,
            num_speculative_tokens,
            drafter_options or {},
            max_tokens=most_new_tokens - 1,  # the last token of a row is never a draft
        )
    elif not isinstance(drafter, Drafter):
        raise SpecJAXError(f"drafter must be a name or a Drafter, got {drafter!r}")
    elif draft is not None or num_speculative_tokens is not None or drafter_options:
        raise SpecJAXError(
            "draft, num_speculative_tokens and drafter_options apply to a drafter given by name"
        )
    num_positions = rows.tokens_BS.shape[1] + (drafter.num_tokens if drafter else 0)
    if isinstance(page_size, int) and page_size > num_positions:
        page_size = num_positions  # one page holds the whole sequence
    config = DecodeConfig(target.config, drafter, verify, target.runtime(page_size, implementation))
    chunk = batch.prefill_chunk(longest)
    progress = _Progress(target.tokenizer, rows.request, num_prompts, on_tokens, on_completion)
    state, prefill_seconds, decode_seconds = _run(
        target, drafter_params, config, rows, chunk, progress
    )
    completions = _completions(state, target, num_prompts)
    rounds = max(len(completion.emitted) for completion in completions)
    return Generation(completions, prefill_seconds, decode_seconds, rounds)


def named_drafter(
    name: str,
    target: Model,
    draft: LoadedDraft | None,
    num_speculative_tokens: int | None,
    options: dict[str, Any],
    *,
    max_tokens: int = MAX_SPECULATIVE_TOKENS,
) -> tuple[Drafter | None, Any]:
    """Returns a drafter by its name and its parameters; None and None for "none".

    Args:
      name, target, draft, num_speculative_tokens, options: see `generate`.
      max_tokens: the number of drafts per round is cut to it, but not below 1.

    Raises:
      SpecJAXError: see `generate`.
    """
    if name == "none":
        if draft is not None or options or num_speculative_tokens is not None:
            raise SpecJAXError(
                "the drafter 'none' decodes without speculation; it takes no draft, no "
                "num_speculative_tokens and no options"
            )
        return None, None
    needs_draft = [config_type is not None for config_type in registry.draft_config_types(name)]
    if isinstance(draft, Model):
        check_same_vocabulary(target, draft)
    if draft is not None and draft.mesh != target.mesh:
        raise SpecJAXError(
            f"target and draft must be loaded for the same mesh, got {target.mesh} and {draft.mesh}"
        )
    num_tokens = num_speculative_tokens
    if num_tokens is None:
        num_tokens = default_num_speculative_tokens(name)
    if isinstance(num_tokens, int):
        if num_tokens > MAX_SPECULATIVE_TOKENS:
            raise SpecJAXError(
                f"num_speculative_tokens must be at most {MAX_SPECULATIVE_TOKENS}, got {num_tokens}"
            )
        num_tokens = min(num_tokens, max(1, max_tokens))
    draft_config = None if draft is None else draft.config
    drafter = registry.make(name, num_tokens, target.config, draft_config, options)
    params = tuple(draft.params if needed else None for needed in needs_draft)
    return drafter, params[0] if len(params) == 1 else params


def _check_models(target: Model, draft: LoadedDraft | None) -> None:
    if not isinstance(target, Model):
        raise SpecJAXError(f"target must be a model from specjax.load, got {target!r}")
    if draft is not None and not isinstance(draft, LoadedDraft):
        raise SpecJAXError(f"draft must come from specjax.load_drafter, got {draft!r}")
    for role, model in (("target", target), ("draft", draft)):
        if isinstance(model, Model) and not model.is_placed(role):
            raise SpecJAXError(f"the {role} is not sharded as a {role}; load it with role={role!r}")


# --- The loop -------------------------------------------------------------------------------------


def _run(
    target: Model,
    drafter_params: Any,
    config: DecodeConfig,
    rows: Batch,
    prefill_chunk: int,
    progress: _Progress,
) -> tuple[DecodeState, float, float]:
    """Returns the final state, and the seconds of reading the prompts and of decoding."""
    mesh, params = target.mesh, target.params
    static = (str(target.config), config.verify, config.runtime.page_size, config.num_tokens)
    parallel.check_alike((rows, prefill_chunk, static), mesh)
    tokens_BS, request = parallel.put(rows, mesh)

    start = time.perf_counter()
    state = decode.init_jit(params, drafter_params, config, tokens_BS, request, prefill_chunk)
    jax.block_until_ready(state)
    prefill_seconds = time.perf_counter() - start

    def run_rounds(state: DecodeState, max_rounds: int) -> DecodeState:
        limit = parallel.put(np.int32(max_rounds), mesh)
        return decode.generate_jit(params, drafter_params, config, state, limit)

    state = jax.block_until_ready(run_rounds(state, 0))  # compiles, unless it has been already
    decode_seconds = 0.0
    max_rounds = progress.first_rounds(mesh)
    while True:
        start = time.perf_counter()
        state = run_rounds(state, max_rounds)
        active_B = parallel.get(state.active_B)
        seconds = time.perf_counter() - start
        decode_seconds += seconds
        progress.report(state, active_B)
        if not active_B.any():
            return state, prefill_seconds, decode_seconds
        if not progress.is_streaming:
            fitting = int(max_rounds * SECONDS_PER_CALL / seconds)
            max_rounds = min(max(1, fitting), NO_LIMIT)


class _Progress:
    """Calls the callbacks of `generate` between calls of the loop."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        request: RequestArrays,
        num_prompts: int,
        on_tokens: OnTokens | None,
        on_completion: OnCompletion | None,
    ):
        self._tokenizer = tokenizer
        self._on_tokens = on_tokens
        self._on_completion = on_completion
        self._reported_B = request.prompt_length_B.copy()
        self._unfinished = set(range(num_prompts))

    @property
    def is_streaming(self) -> bool:
        """Whether tokens are reported while they are generated."""
        return self._on_tokens is not None

    def first_rounds(self, mesh: Mesh | None) -> int:
        """Returns how many rounds the first call of the loop may run.

        Processes of one mesh must all run the same number, which cannot depend on their clocks.
        """
        if self.is_streaming:
            return ROUNDS_WHILE_STREAMING
        return NO_LIMIT if mesh is not None and mesh.is_multi_process else 1

    def report(self, state: DecodeState, active_B: np.ndarray) -> None:
        """Passes on the tokens that are new since the last call."""
        if self._on_tokens:
            self._report_tokens(state, active_B)
        finished = {b for b in self._unfinished if not active_B[b]}
        self._unfinished -= finished
        if self._on_completion and finished:
            state = parallel.get(state.replace(cache=None, drafter=None))
            for b in sorted(finished):
                if not state.failed_B[b]:
                    self._on_completion(b, _completion(state, b, self._tokenizer))

    def _report_tokens(self, state: DecodeState, active_B: np.ndarray) -> None:
        tokens_BS, length_B, prompt_length_B, accepted_BS, emitted_BS = parallel.get(
            (
                state.tokens_BS,
                state.length_B,
                state.request.prompt_length_B,
                state.log.accepted_BS,
                state.log.emitted_BS,
            )
        )
        for b in np.flatnonzero(length_B > self._reported_B):
            start, end = self._reported_B[b], length_B[b]
            flags = from_draft(accepted_BS[b], emitted_BS[b])
            new_flags = flags[start - prompt_length_B[b] :]
            self._on_tokens(int(b), tokens_BS[b, start:end].tolist(), new_flags, not active_B[b])
            self._reported_B[b] = end


def check_logits(state: DecodeState, names: Sequence[str]) -> None:
    """Checks that no row ended because the target's logits were NaN, or all -inf.

    Args:
      state: after the loop.
      names: what errors call the first rows.

    Raises:
      SpecJAXError: naming the row and the position.
    """
    failed_B, length_B = parallel.get((state.failed_B, state.length_B))
    for b in np.flatnonzero(failed_B[: len(names)]):
        raise SpecJAXError(
            f"{names[b]}: the target's logits at position {length_B[b]} are NaN or all -inf; its "
            "weights are damaged, or too large for the dtype"
        )


def _completions(state: DecodeState, target: Model, num_prompts: int) -> tuple[Completion, ...]:
    state = parallel.get(state.replace(cache=None, drafter=None))
    check_logits(state, [f"prompt {b}" for b in range(num_prompts)])
    return tuple(_completion(state, b, target.tokenizer) for b in range(num_prompts))


def _completion(state: DecodeState, b: int, tokenizer: Tokenizer | None) -> Completion:
    request, log = state.request, state.log
    start, end, rounds = request.prompt_length_B[b], state.length_B[b], log.rounds_B[b]
    tokens = tuple(state.tokens_BS[b, start:end].tolist())
    is_stopped = tokens[-1] in request.eos_BE[b]
    return Completion(
        prompt_tokens=tuple(state.tokens_BS[b, :start].tolist()),
        tokens=tokens,
        text=None if tokenizer is None else tokenizer.decode(tokens),
        finish_reason="stop" if is_stopped else "length",
        drafted=tuple(log.drafted_BS[b, :rounds].tolist()),
        accepted=tuple(log.accepted_BS[b, :rounds].tolist()),
        emitted=tuple(log.emitted_BS[b, :rounds].tolist()),
        unusable_drafts=int(log.unusable_drafts_B[b]),
    )
