"""Other engines on the same weights, prompts and dtype, in the same run."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench import timing
from specjax.engine import batch
from specjax.engine import generate as generation
from specjax.engine import load as checkpoint
from specjax.engine.load import Model
from specjax.errors import SpecJAXError

# (prompt, number of tokens) -> seconds of decoding them
Engine = Callable[[tuple[int, ...], int], float]


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt: decoding rates in tokens per second, medians over repeats.

    Attributes:
      name: of the prompt.
      tokens: generated.
      tokens_per_round: of SpecJAX with speculation.
      plain: of SpecJAX without speculation.
      speculative: of SpecJAX with it.
      roofline: what reading the weights' bytes once per token allows.
      baselines: of each other engine.
    """

    name: str
    tokens: int
    tokens_per_round: float
    plain: float
    speculative: float
    roofline: float
    baselines: dict[str, float]


def compare(
    target: Model,
    prompts: dict[str, generation.Prompt],
    drafter: dict[str, Any],
    *,
    max_new_tokens: int,
    repeats: int,
    common: dict[str, Any],
    names: Sequence[str],
    num_lookup_tokens: int,
    gguf: str | None,
    threads: int,
) -> list[Row]:
    """Greedy decoding by all engines in turn, after a run of each that is not counted.

    Args:
      target: the model.
      prompts: by name.
      drafter: "drafter", "draft", "num_speculative_tokens" and "drafter_options" of
        `generation.generate`.
      max_new_tokens: generated tokens per run; end-of-sequence tokens are ignored.
      repeats: counted runs.
      common: "verify", "page_size" and "implementation" of `generation.generate`.
      names: of `BASELINES`.
      num_lookup_tokens: K of their prompt lookup.
      gguf: for llama.cpp, the same weights in float32.
      threads: of the other engines; ours are those that XLA takes.

    Raises:
      SpecJAXError: a baseline that is unknown or not installed; or speculation that changed a text.
    """
    check(names, gguf)
    if names and (jax.default_backend() != "cpu" or target.dtype != jnp.float32):
        raise SpecJAXError("other engines are compared in float32 on a CPU")
    read_weights = timing.read_weights(target)
    engines = {name: BASELINES[name][1](target, num_lookup_tokens, threads, gguf) for name in names}
    rows = []
    for name, prompt in prompts.items():
        ids = batch.encode(target, prompt, name)
        arguments = dict(prompts=[ids], max_new_tokens=max_new_tokens, eos_ids=(), **common)
        runs = {
            "plain": [],
            "speculative": [],
            "roofline": [],
            **{baseline: [] for baseline in engines},
        }
        for _ in range(repeats + 1):
            runs["roofline"].append(1 / np.median([timing.seconds(read_weights) for _ in range(9)]))
            plain = generation.generate(target, "none", **arguments)
            speculative = generation.generate(target, **drafter, **arguments)
            tokens = len(plain.completions[0].tokens)
            differ = plain.completions[0].tokens != speculative.completions[0].tokens
            if differ and target.dtype == jnp.float32:  # elsewhere near ties fall either way
                raise SpecJAXError(f"{name}: speculation changed the greedy text")
            runs["plain"].append(tokens / plain.decode_seconds)
            runs["speculative"].append(tokens / speculative.decode_seconds)
            for baseline, engine in engines.items():
                # Reading the prompt is not decoding: it is what a single token costs.
                runs[baseline].append((tokens - 1) / (engine(ids, tokens) - engine(ids, 1)))
        rate = {run: float(np.median(rates[1:])) for run, rates in runs.items()}
        rows.append(
            Row(
                name,
                tokens,
                tokens / speculative.rounds,
                rate["plain"],
                rate["speculative"],
                rate["roofline"],
                {baseline: rate[baseline] for baseline in engines},
            )
        )
    return rows


def _transformers(**lookup) -> Callable[..., Engine]:
    """Hugging Face transformers, plainly or with its prompt lookup."""

    def start(target: Model, num_speculative_tokens: int, threads: int, gguf: str | None) -> Engine:
        del gguf
        import torch
        import transformers

        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.export(target.path, f"{folder}/model", dtype="float32")
            model = transformers.LlamaForCausalLM.from_pretrained(
                f"{folder}/model", dtype=torch.float32
            ).eval()
        model.generation_config.eos_token_id = None  # as here, where it is said and nothing ends
        assisted = dict.fromkeys(lookup, num_speculative_tokens)

        def run(ids, num_tokens: int) -> None:
            options = dict(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
            with torch.inference_mode():
                text = model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids)),
                    **options,
                    **assisted,
                )
            if (found := text.shape[1] - len(ids)) != num_tokens:
                raise SpecJAXError(
                    f"transformers gave {found} tokens where {num_tokens} were wanted"
                )

        return lambda ids, num_tokens: timing.seconds(run, ids, num_tokens)

    return start


def _llama_cpp(lookup: bool) -> Callable[..., Engine]:
    """llama.cpp through llama-cpp-python, plainly or with its prompt lookup."""

    def start(target: Model, num_speculative_tokens: int, threads: int, gguf: str | None) -> Engine:
        del target
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = (
            LlamaPromptLookupDecoding(num_pred_tokens=num_speculative_tokens) if lookup else None
        )
        model = llama_cpp.Llama(
            gguf,
            n_ctx=2048,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=draft,
            logits_all=lookup,
            verbose=False,
        )

        def run(ids, num_tokens: int) -> None:
            model.reset()
            for count, _ in enumerate(model.generate(list(ids), temp=0.0), 1):
                if count == num_tokens:
                    break

        return lambda ids, num_tokens: timing.seconds(run, ids, num_tokens)

    return start


BASELINES = {
    "transformers": ("transformers", _transformers()),
    "transformers_lookup": ("transformers", _transformers(prompt_lookup_num_tokens=True)),
    "llama_cpp": ("llama_cpp", _llama_cpp(lookup=False)),
    "llama_cpp_lookup": ("llama_cpp", _llama_cpp(lookup=True)),
}


def check(names: Sequence[str], gguf: str | None) -> None:
    """Raises SpecJAXError, naming it, for a baseline that is unknown, not installed or without its
    weights; or for weights that no baseline reads."""
    for name in names:
        if name not in BASELINES:
            raise SpecJAXError(f"baseline {name!r} is not known; known: {', '.join(BASELINES)}")
        try:
            __import__(BASELINES[name][0])
        except ImportError as error:
            raise SpecJAXError(f"the baseline {name!r} is not installed: {error}") from error
        if BASELINES[name][0] == "llama_cpp" and not (gguf and os.path.exists(gguf)):
            raise SpecJAXError(
                f"llama.cpp needs the same weights in a float32 GGUF file: --gguf={gguf}"
            )
    if gguf and not any(BASELINES[name][0] == "llama_cpp" for name in names):
        raise SpecJAXError(f"--gguf={gguf} is for llama.cpp, which --baselines does not name")
