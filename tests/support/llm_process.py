"""A program for `LLM` in one process or in one of two: every process makes the same calls.

    python -m support.llm_process FOLDER OUTPUT [PORT PROCESS_ID]

FOLDER has the models target and draft. OUTPUT is a JSON file for what the calls returned. Two
processes have two replicas of the models, each split over two devices.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

import jax

from specjax import LLM, SamplingParams
from specjax.engine import budget
from specjax.engine import llm as llm_lib
from specjax.errors import SpecJAXError

PROMPTS = ["hello", "he", "or world", "hello world", "w"]
CHAT = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, n=2)
FRESH = SamplingParams(temperature=1.0, max_tokens=12, n=2)


def main(folder: str, output: str, *process: str) -> None:
    """Makes the calls, and writes what they returned."""
    degrees = {}
    if process:
        port, process_id = process
        jax.distributed.initialize(f"localhost:{port}", 2, int(process_id))
        degrees = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    if jax.process_index() == 1:
        _change_machine()
    llm = LLM(
        f"{folder}/target",
        speculative_model=f"{folder}/draft",
        num_speculative_tokens=2,
        verify="coupled",
        seed=None,
        max_num_seqs=2,
        max_model_len=64,
        block_size=8,
        **degrees,
    )
    greedy = llm.generate(PROMPTS, GREEDY)
    word = greedy[0].text[3:5]
    stopping = dataclasses.replace(GREEDY, stop=[word])
    calls = {
        "greedy": greedy,
        "sampled": llm.generate(PROMPTS, SAMPLED),
        "stop": llm.generate(PROMPTS, stopping),
        "chat": llm.chat(CHAT, GREEDY),
        "abort": _abort(llm),
        "fresh": llm.generate(PROMPTS, FRESH),
    }
    seed = calls["fresh"][1].outputs[0].seed
    calls["same seed"] = llm.generate(PROMPTS[1], dataclasses.replace(FRESH, seed=seed))
    for outputs in calls.values():
        for request in outputs:
            times = request.metrics
            assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    results = {name: list(map(_fields, outputs)) for name, outputs in calls.items()}
    results["metrics"] = [_value(metric) for metric in llm.get_metrics()]
    if process:
        try:
            llm.generate(f"prompt {jax.process_index()}", GREEDY)
        except SpecJAXError as error:
            results["different prompts"] = str(error)
    pathlib.Path(output).write_text(json.dumps(results))


def _change_machine() -> None:
    """Gives this process a clock of its own, as on another host, and less memory."""
    clock, available_bytes = time.monotonic, budget.available_bytes
    time.monotonic = lambda: clock() - 1e6
    budget.available_bytes = lambda *arguments: available_bytes(*arguments) // 10_000


def _abort(llm: LLM) -> list:
    """The outputs of requests of which two are aborted, one before and one while it runs."""
    ids = [llm.engine.submit(llm.target.tokenizer.encode(text), GREEDY) for text in PROMPTS]
    llm.engine.abort(ids[1])
    outputs = llm.engine.step()
    llm.engine.abort(ids[0])
    while llm.engine.has_unfinished:
        outputs += llm.engine.step()
    assert {output.request_id for output in outputs if output.finished} == set(ids[2:])
    return sorted((o for o in outputs if o.finished), key=lambda output: output.request_id)


def _fields(output) -> list:
    names = ("text", "token_ids", "finish_reason", "stop_reason", "seed", "drafted", "accepted")
    completions = []
    for completion in output.outputs:
        completions.append({name: getattr(completion, name) for name in names})
    return [output.request_id, output.prompt, output.prompt_token_ids, completions]


def _value(metric) -> list:
    value = metric.values if isinstance(metric, llm_lib.Vector) else metric.value
    return [metric.name, metric.labels, value]


if __name__ == "__main__":
    main(*sys.argv[1:])
