"""Inputs and results of the `specjax` command."""

from __future__ import annotations

import json
from typing import NamedTuple

from support import folders


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def write_model(path, seed=0, **config):
    """A model whose text soon repeats itself, so that prompt lookup finds drafts."""
    config = {"num_hidden_layers": 1} | config
    arrays = folders.tensors(config, seed=seed)
    arrays["model.layers.0.self_attn.o_proj.weight"] *= 0.02
    arrays["lm_head.weight"][[*range(4), *range(25, len(arrays["lm_head.weight"]))]] *= 0.2
    return folders.write_folder(path, config, arrays)


def write_lines(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_prompts(path, *rows):
    return write_lines(path, *(json.dumps(row, ensure_ascii=False) for row in rows))


def check_refused(outcome: Outcome, *parts) -> None:
    """Checks for exit code 2 and a single line on stderr that contains all `parts`."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("specjax: error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1, outcome.err
    assert "Traceback" not in outcome.err
    for part in parts:
        assert str(part) in outcome.err
