"""specjax bench baselines: decoding speed against other engines.

All run the same weights, prompts and dtype in one process, in turn.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.table import Table

from specjax.bench import timing
from specjax.engine import batch, load
from specjax.engine.load import Model
from specjax.engine.request import Prompt
from specjax.engine.setup import Setup, Speculation
from specjax.errors import SpecJAXError
from specjax.report import tables

ROOFLINE_REPEATS = 9
EXPLANATION = "The roofline is the time to read as many bytes as the weights have on this machine."
EXPLANATION_OF_BRACKETS = "In brackets: our rate over theirs, with drafts where they use lookup."

# (prompt, number of tokens) -> seconds of decoding them
Engine = Callable[[tuple[int, ...], int], float]


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one prompt: decoding rates in tokens per second, medians over repeats.

    Attributes:
      name: name of the prompt.
      tokens: generated.
      tokens_per_round: tokens per round of SpecJAX with speculation.
      plain: rate of SpecJAX without speculation.
      speculative: rate of SpecJAX with it.
      roofline: rate if a token took no longer than reading the bytes of the weights once.
      baselines: rate of each other engine.
    """

    name: str
    tokens: int
    tokens_per_round: float
    plain: float
    speculative: float
    roofline: float
    baselines: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Baselines:
    """The other engines of a run.

    Attributes:
      names: names in `BASELINES`.
      num_lookup_tokens: K of their prompt lookup.
      gguf: for llama.cpp, the same weights in float32.
      threads: number of threads; ours is chosen by XLA.
    """

    names: Sequence[str]
    num_lookup_tokens: int
    gguf: str | None
    threads: int

    def check(self) -> None:
        """Checks the names and the weights.

        Raises:
          SpecJAXError: a baseline that is unknown, not installed or without its weights; or weights
            that no baseline reads.
        """
        for name in self.names:
            if name not in BASELINES:
                raise SpecJAXError(f"unknown baseline {name!r}; choose from {', '.join(BASELINES)}")
            package = BASELINES[name][0]
            try:
                __import__(package)
            except ImportError as error:
                raise SpecJAXError(f"baseline {name!r} is not installed: {error}") from error
            if package == "llama_cpp" and not (self.gguf and os.path.exists(self.gguf)):
                raise SpecJAXError(
                    f"llama.cpp requires the same weights as a float32 GGUF file, got "
                    f"--gguf={self.gguf}"
                )
        packages = [BASELINES[name][0] for name in self.names]
        if self.gguf and "llama_cpp" not in packages:
            raise SpecJAXError(
                f"--gguf={self.gguf} applies to llama.cpp only, which --baselines does not name"
            )

    def start(self, target: Model) -> dict[str, Engine]:
        """Loads the weights of the target into every engine."""
        return {name: BASELINES[name][1](target, self) for name in self.names}


def measure(
    setup: Setup,
    prompts: dict[str, Prompt],
    speculation: Speculation,
    baselines: Baselines,
    *,
    max_new_tokens: int,
    repeats: int,
) -> list[Row]:
    """Greedy decoding by all engines in turn, after one warm-up turn.

    Args:
      setup: the target and how it is run.
      prompts: by name.
      speculation: the drafter.
      baselines: the other engines.
      max_new_tokens: generated tokens per run; end-of-sequence tokens are ignored.
      repeats: counted runs.

    Raises:
      SpecJAXError: a baseline that is unknown or not installed; or speculation changed a text.
    """
    baselines.check()
    target = setup.target
    if baselines.names and (jax.default_backend() != "cpu" or not setup.is_exact):
        raise SpecJAXError("other engines are compared in float32 on a CPU only")
    read_weights = timing.read_weights(target)
    engines = baselines.start(target)
    rows = []
    for name, prompt in prompts.items():
        ids = batch.encode(target, prompt, name)
        rates: dict[str, list[float]] = {}
        for _ in range(repeats + 1):
            times = [timing.seconds(read_weights) for _ in range(ROOFLINE_REPEATS)]
            turn = {"roofline": 1 / float(np.median(times))}
            options = {"max_new_tokens": max_new_tokens, "eos_ids": ()}
            plain = setup.generate(None, [ids], **options)
            drafted = setup.generate(speculation, [ids], **options)
            text = plain.completions[0].tokens
            if setup.is_exact and text != drafted.completions[0].tokens:
                raise SpecJAXError(f"{name}: speculation changed the greedy text")
            tokens = len(text)
            turn["plain"] = tokens / plain.decode_seconds
            turn["speculative"] = tokens / drafted.decode_seconds
            for baseline, engine in engines.items():
                # The time of a single token is that of reading the prompt, which is no decoding.
                seconds = engine(ids, tokens) - engine(ids, 1)
                turn[baseline] = (tokens - 1) / seconds
            for key, rate in turn.items():
                rates.setdefault(key, []).append(rate)
        medians = {key: float(np.median(of_key[1:])) for key, of_key in rates.items()}
        rows.append(
            Row(
                name=name,
                tokens=tokens,
                tokens_per_round=tokens / drafted.rounds,
                plain=medians["plain"],
                speculative=medians["speculative"],
                roofline=medians["roofline"],
                baselines={baseline: medians[baseline] for baseline in engines},
            )
        )
    return rows


def table(rows: list[Row], baselines: Sequence[str], title: str) -> Table:
    """One line per prompt."""
    lines = []
    for row in rows:
        others = []
        for name, rate in row.baselines.items():
            ours = row.speculative if "lookup" in name else row.plain
            others.append(f"{rate:.1f} ({ours / rate:.2f}x)")
        lines.append(
            (
                row.name,
                f"{row.tokens_per_round:.2f}",
                f"{row.plain:.1f}",
                f"{row.plain / row.roofline:.2f}",
                f"{row.speculative:.1f}",
                f"{row.speculative / row.plain:.2f}x",
                *others,
            )
        )
    columns = ("prompt", "tok/round", "plain", "of roofline", "drafts", "speedup", *baselines)
    return tables.table(title, columns, lines)


def _transformers(target: Model, baselines: Baselines, **lookup: Any) -> Engine:
    """Hugging Face transformers; `lookup` are the options of its prompt lookup."""
    import torch
    import transformers

    torch.set_num_threads(baselines.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        load.export(target.path, path, dtype="float32")
        model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # as here, where end-of-sequence tokens are ignored

    def run(ids, num_tokens: int) -> None:
        with torch.inference_mode():
            text = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                do_sample=False,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                **lookup,
            )
        found = text.shape[1] - len(ids)
        if found != num_tokens:
            raise SpecJAXError(f"transformers generated {found} tokens instead of {num_tokens}")

    return lambda ids, num_tokens: timing.seconds(run, ids, num_tokens)


def _transformers_lookup(target: Model, baselines: Baselines) -> Engine:
    """Hugging Face transformers with its prompt lookup."""
    return _transformers(target, baselines, prompt_lookup_num_tokens=baselines.num_lookup_tokens)


def _llama_cpp(target: Model, baselines: Baselines, **lookup: Any) -> Engine:
    """llama.cpp through llama-cpp-python; `lookup` are the options of its prompt lookup."""
    del target
    import llama_cpp

    model = llama_cpp.Llama(
        baselines.gguf,
        n_ctx=2048,
        n_threads=baselines.threads,
        n_threads_batch=baselines.threads,
        verbose=False,
        **lookup,
    )

    def run(ids, num_tokens: int) -> None:
        model.reset()
        for count, _ in enumerate(model.generate(list(ids), temp=0.0), 1):
            if count == num_tokens:
                break

    return lambda ids, num_tokens: timing.seconds(run, ids, num_tokens)


def _llama_cpp_lookup(target: Model, baselines: Baselines) -> Engine:
    """llama.cpp with its prompt lookup."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft_model = LlamaPromptLookupDecoding(num_pred_tokens=baselines.num_lookup_tokens)
    return _llama_cpp(target, baselines, draft_model=draft_model, logits_all=True)


# By name: the package, and a function that loads a target into the engine.
BASELINES: dict[str, tuple[str, Callable[[Model, Baselines], Engine]]] = {
    "transformers": ("transformers", _transformers),
    "transformers_lookup": ("transformers", _transformers_lookup),
    "llama_cpp": ("llama_cpp", _llama_cpp),
    "llama_cpp_lookup": ("llama_cpp", _llama_cpp_lookup),
}
