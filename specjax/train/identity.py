"""The values that must match for a run to resume, also in folders from older versions."""

from __future__ import annotations

import pathlib
from typing import Any

from specjax import files

# Present names of fields, and those before 0.1.0.
OLD_NAMES = {
    "ttt_steps": "num_steps",
    "gradient_accumulation_steps": "accumulate",
    "max_grad_norm": "clip",
    "max_seq_len": "num_slots",
    "aux_layers": "taps",
}


def check(folder: pathlib.Path, name: str, identity: dict[str, Any]) -> None:
    """Raises SpecJAXError unless a run may start or resume, see `files.check_run_identity`."""
    files.check_run_identity(folder, name, _as_recorded(folder / name, identity))


def claim(folder: pathlib.Path, name: str, identity: dict[str, Any]) -> None:
    """Creates the folder of a run, or checks it, see `files.claim_run_folder`."""
    files.claim_run_folder(folder, name, _as_recorded(folder / name, identity))


def _as_recorded(path: pathlib.Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Returns `identity` with the names of fields that the file at `path` uses."""
    return _rename(identity, files.read_json(path)) if path.exists() else identity


def _rename(identity: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    renamed = {}
    for name, value in identity.items():
        old_name = OLD_NAMES.get(name)
        if name not in recorded and old_name in recorded:
            name = old_name
        other = recorded.get(name)
        is_nested = isinstance(value, dict) and isinstance(other, dict)
        renamed[name] = _rename(value, other) if is_nested else value
    return renamed
