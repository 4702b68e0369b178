"""`specjax.generate`: text or token ids in, completions out. A client of the engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import parallel
from specjax.drafters import registry
from specjax.drafters.base import Drafter
from specjax.engine import batch
from specjax.engine.engine import Engine
from specjax.engine.load import LoadedDraft, Model, check_same_vocabulary
from specjax.engine.request import (
    Completion,
    Generation,
    OnCompletion,
    OnTokens,
    Prompt,
    RequestOutput,
    SamplingParams,
)
from specjax.errors import SpecJAXError
from specjax.kv_cache import pages_for
from specjax.tokenizer import Tokenizer

MAX_SPECULATIVE_TOKENS = 128  # the memory of a round grows with it
MAX_NUM_SEQS = 64  # prompts that are decoded at a time
SECONDS_PER_CALL = 0.5  # of the loop, roughly: Python handles Ctrl-C only between calls
SECONDS_PER_CALL_OF_STREAMS = 0.05


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
    min_tokens: int | Sequence[int] = 0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    page_size: int = 64,
    implementation: str | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    on_tokens: OnTokens | None = None,
    on_completion: OnCompletion | None = None,
) -> Generation:
    """Generates a completion for each prompt.

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
      temperature, top_k, top_p, min_p, seed, min_tokens, presence_penalty, frequency_penalty,
        repetition_penalty: see `request.SamplingOptions`. These, `max_new_tokens` and `eos_ids`
        have one value for all prompts or one per prompt. In float32 the same prompt with the same
        seed gives the same text, alone or in any batch. Nothing is compiled for what is off for all
        prompts, or for new values, unless a budget cuts K.
      stop: texts that end a completion, for all prompts; its text ends before them.
      eos_ids: ids that end a completion, one set for all prompts or one per prompt; by default
        `target.eos_ids`.
      page_size: positions per page of the key/value caches.
      implementation: "mosaic_gpu" (this package's kernels), "xla" or "interpret" (the kernels in
        Pallas' interpreter), for attention and sampling; by default the kernels if they can run,
        see `specjax env`.
      max_num_seqs: prompts that are decoded at a time; the others wait for one of them to end.
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
    max_length_B = batch.max_lengths(target, prompt_ids, max_new_tokens)
    max_new_tokens_B = max_length_B - [len(ids) for ids in prompt_ids]
    params = batch.sampling_params(
        batch.eos_sets(target, eos_ids, len(prompt_ids)),
        max_tokens=max_new_tokens_B,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        min_tokens=min_tokens,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        stop=stop,
    )

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
            max_tokens=int(max_new_tokens_B.max()) - 1,  # the last token of a row is never a draft
        )
    elif not isinstance(drafter, Drafter):
        raise SpecJAXError(f"drafter must be a name or a Drafter, got {drafter!r}")
    elif draft is not None or num_speculative_tokens is not None or drafter_options:
        raise SpecJAXError(
            "draft, num_speculative_tokens and drafter_options apply to a drafter given by name"
        )
    max_model_len = min(
        batch.bucket(int(max_length_B.max())), target.config.max_position_embeddings
    )
    num_drafts = drafter.num_tokens if drafter else 0
    num_positions = max_model_len + num_drafts
    if isinstance(page_size, int) and page_size > num_positions:
        page_size = num_positions  # one page holds the whole sequence
    runtime = target.runtime(page_size, implementation)  # checks both
    num_rows = -(-min(len(prompt_ids), max_num_seqs) // parallel.dp_size(target.mesh))
    engine = Engine(
        target,
        drafter,
        drafter_params,
        verify=verify,
        page_size=page_size,
        implementation=implementation,
        max_model_len=max_model_len,
        max_num_seqs=min(len(prompt_ids), max_num_seqs),
        num_pages=_num_pages(max_length_B + num_drafts, num_rows, num_positions, runtime.page_size),
        seconds_per_call=SECONDS_PER_CALL if on_tokens is None else SECONDS_PER_CALL_OF_STREAMS,
        chunk_sizes=(batch.prefill_chunk(max(map(len, prompt_ids))),),
    )
    parallel.check_alike((prompt_ids, [str(each) for each in params]), target.mesh)
    return _run(engine, prompt_ids, params, _Progress(target.tokenizer, on_tokens, on_completion))


def _num_pages(positions_B: np.ndarray, num_rows: int, most_positions: int, page_size: int) -> int:
    """Returns how many pages no requests that run together outgrow.

    Args:
      positions_B: positions of each request.
      num_rows: requests that run at a time.
      most_positions: at least the most of them. Like this number, the result is one of few, so that
        calls with other prompts use the same programs.
      page_size: Z.
    """
    pages = sorted(pages_for(int(positions), page_size) for positions in positions_B)
    needed = sum(pages[-num_rows:])
    return min(num_rows * pages_for(most_positions, page_size), 2 ** (needed - 1).bit_length())


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


# --- Requests and their outputs -------------------------------------------------------------------


def _run(
    engine: Engine,
    prompt_ids: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    progress: _Progress,
) -> Generation:
    """Returns the completions of the prompts, and times."""
    for index, (ids, each) in enumerate(zip(prompt_ids, params, strict=True)):
        on_output = functools.partial(progress.on_output, index)
        try:
            engine.submit(ids, each, request_id=str(index), on_output=on_output)
        except SpecJAXError as error:
            raise SpecJAXError(f"prompt {index}: {error}") from error
    while engine.has_unfinished:
        engine.step()
    completions = [progress.completions[index] for index in range(len(prompt_ids))]
    for index, completion in enumerate(completions):
        if completion.finish_reason == "error":
            position = len(completion.prompt_tokens) + len(completion.tokens)
            raise unusable_logits(f"prompt {index}", position)
    stats = engine.stats()
    rounds = max(len(completion.emitted) for completion in completions)
    return Generation(tuple(completions), stats.prefill_seconds, stats.decode_seconds, rounds)


class _Progress:
    """Turns the outputs of an engine into completions, and calls the callbacks of `generate`."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        on_tokens: OnTokens | None,
        on_completion: OnCompletion | None,
    ):
        self._tokenizer = tokenizer
        self._on_tokens, self._on_completion = on_tokens, on_completion
        self._num_reported: dict[int, int] = {}
        self.completions: dict[int, Completion] = {}

    def on_output(self, index: int, output: RequestOutput) -> None:
        """Callback for `Engine.submit`."""
        completion = self._completion(output)
        if self._on_tokens:
            start = self._num_reported.get(index, 0)
            self._num_reported[index] = len(completion.tokens)
            new_ids, new_flags = completion.tokens[start:], completion.from_draft[start:]
            if new_ids or output.finished:
                self._on_tokens(index, list(new_ids), new_flags, output.finished)
        if not output.finished:
            return
        self.completions[index] = completion
        if self._on_completion and completion.finish_reason != "error":
            self._on_completion(index, completion)

    def _completion(self, output: RequestOutput) -> Completion:
        (result,) = output.outputs
        text = None
        if output.finished and self._tokenizer is not None:
            is_cut = isinstance(result.stop_reason, str)  # at a stop string
            text = result.text if is_cut else self._tokenizer.decode(result.token_ids)
        return Completion(
            prompt_tokens=output.prompt_token_ids,
            tokens=result.token_ids,
            text=text,
            finish_reason=result.finish_reason,
            drafted=result.drafted,
            accepted=result.accepted,
            emitted=result.emitted,
            unusable_drafts=result.unusable_drafts,
        )


def unusable_logits(name: str, position: int) -> SpecJAXError:
    """Returns the error for a prompt that ended because the target's logits are NaN or all -inf."""
    return SpecJAXError(
        f"{name}: the target's logits at position {position} are NaN or all -inf; its weights are "
        "damaged, or too large for the dtype"
    )
