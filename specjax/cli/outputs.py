"""Output files of commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib

from specjax import files
from specjax.cli import processes
from specjax.engine.request import Completion, Prompt
from specjax.errors import SpecJAXError

PROBE = b"\n" * 4096  # one block: a full disk has room for empty files


def check_output(path: str | None, flag: str = "output") -> None:
    """Checks, before any work is done, that a file can be written.

    Args:
      path: path of the file; None for no file.
      flag: that gives the path.

    Raises:
      SpecJAXError: the file exists, or it cannot be written.
    """
    if path is None or not processes.is_first():
        return
    check_is_new(path, flag)
    probe = pathlib.Path(f"{path}.incomplete-{os.getpid()}")
    try:
        with probe.open("xb") as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SpecJAXError(f"--{flag}: cannot write {path}: {error.strerror}") from error
    finally:
        probe.unlink(missing_ok=True)


def check_is_new(path: str, flag: str) -> None:
    """Raises SpecJAXError where the path exists, or its folder does not."""
    if os.path.lexists(path):
        raise SpecJAXError(f"--{flag}: {path} exists already")
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise SpecJAXError(f"--{flag}: the folder of {path} does not exist")


class CompletionWriter:
    """Writes completions to a JSONL file as they finish.

    The file appears with its first line. While it is open, its lines are in the order in which
    completions finished; `close` sorts them by prompt. As a context manager: an exception keeps the
    lines that were written.
    """

    def __init__(self, path: str | None, prompts: list[Prompt]):
        """With the path None, or in another process than the first, nothing is written."""
        self._path = path if processes.is_first() else None
        self._prompts = prompts
        self._lines: dict[int, bytes] = {}
        self._file: io.FileIO | None = None
        self.error: str | None = None  # why lines are missing in the file

    def __enter__(self) -> CompletionWriter:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    def write(self, index: int, completion: Completion) -> None:
        """Writes the completion of a prompt. An error is kept in `error`."""
        if self._path is None or self.error is not None:
            return
        line = _line(self._prompts[index], completion).encode("utf-8", "replace")
        if self._file is None:
            try:
                self._file = io.FileIO(self._path, "x")
            except OSError as error:
                self.error = f"cannot write {self._path}: {error.strerror}"
                return
        end = self._file.tell()
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self.error = f"cannot write {self._path}: {error.strerror}"
            self._file.truncate(end)  # whole lines only
            return
        self._lines[index] = line

    def close(self) -> None:
        """Closes the file, with its lines in the order of the prompts."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if not self._lines:
            pathlib.Path(self._path).unlink(missing_ok=True)
            return
        order = list(self._lines)
        if order == sorted(order) or self.error is not None:
            return
        # Every line is in the file already: where there is no room for a sorted copy, it stays.
        with contextlib.suppress(SpecJAXError), files.new_file(self._path) as partial:
            partial.write_bytes(b"".join(self._lines[index] for index in sorted(order)))


def _line(prompt: Prompt, completion: Completion) -> str:
    rounds = []
    columns = (completion.drafted, completion.accepted, completion.emitted)
    for drafted, accepted, emitted in zip(*columns, strict=True):
        rounds.append({"drafted": drafted, "accepted": accepted, "emitted": emitted})
    fields = {
        "prompt": prompt,
        "prompt_tokens": completion.prompt_tokens,
        "tokens": completion.tokens,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "rounds": rounds,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"
