"""Output files of commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
from typing import Any

from specjax import files
from specjax.cli import processes
from specjax.engine.request import Completion, Prompt
from specjax.errors import SpecJAXError

PROBE = b"\n" * 4096  # one block: a full disk has room for empty files


def check_output(path: str | None, flag: str = "output", *, resume: bool | None = None) -> None:
    """Checks, before any work is done, that a file can be written.

    Args:
      path: path of the file; None for no file.
      flag: that gives the path.
      resume: whether the file may exist; None for a command that cannot resume.

    Raises:
      SpecJAXError: the file exists, or it cannot be written.
    """
    if path is None or not processes.is_first():
        return
    if resume is False and os.path.lexists(path):
        raise SpecJAXError(
            f"--{flag}: {path} exists already; --resume continues a run that was interrupted"
        )
    if not (resume and os.path.isfile(path)):
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

    Attributes:
      error: why lines are missing in the file; None if none are.
    """

    def __init__(
        self,
        path: str | None,
        prompts: list[Prompt],
        options: list[dict[str, Any]],
        *,
        resume: bool = False,
    ):
        """Opens nothing yet, but reads the file of a run that is resumed.

        Args:
          path: None for no file. Only the first process writes one.
          prompts: texts or chats.
          options: the sampling options of each prompt.
          resume: whether the file may have lines of an earlier run, which was interrupted.

        Raises:
          SpecJAXError: for lines that are not those of an earlier run with these prompts and
            options.
        """
        self._path = path if processes.is_first() else None
        self._prompts, self._options = prompts, options
        self._lines: dict[int, bytes] = {}
        self._file: io.FileIO | None = None
        self._end: int | None = None  # of the whole lines of an earlier run
        self.error: str | None = None
        if resume and self._path is not None and os.path.isfile(self._path):
            self._read_lines()

    @property
    def finished(self) -> set[int]:
        """Prompts whose completions are in the file."""
        return set(self._lines)

    def _read_lines(self) -> None:
        """Reads the lines of an earlier run; drops a last line that was cut."""
        data = pathlib.Path(self._path).read_bytes()
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            if line.endswith(b"\n"):
                self._lines[self._index_of(line, f"{self._path}:{number}")] = line
        self._end = data.rfind(b"\n") + 1

    def _index_of(self, line: bytes, where: str) -> int:
        """Returns the number of the prompt that a line belongs to."""
        with files.parsing(where):
            row = json.loads(line)
            index = row["index"]
            expected = {"prompt": self._prompts[index], "options": self._options[index]}
        for name, value in json.loads(json.dumps(expected)).items():
            if row.get(name) != value:
                raise SpecJAXError(
                    f"--resume: {where} has another {name} than prompt {index} of this run: "
                    f"{row.get(name)!r}, not {value!r}; give the same prompts and options, or "
                    "another --output"
                )
        return index

    def __enter__(self) -> CompletionWriter:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    def write(self, index: int, completion: Completion) -> None:
        """Writes the completion of a prompt. An error is kept in `error`."""
        if self._path is None or self.error is not None:
            return
        line = self._line(index, completion).encode("utf-8", "replace")
        if self._file is None:
            try:
                self._file = self._open()
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

    def _open(self) -> io.FileIO:
        if self._end is None:
            return io.FileIO(self._path, "x")
        file = io.FileIO(self._path, "r+")
        file.truncate(self._end)
        file.seek(self._end)
        return file

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

    def _line(self, index: int, completion: Completion) -> str:
        rounds = []
        columns = (completion.drafted, completion.accepted, completion.emitted)
        for drafted, accepted, emitted in zip(*columns, strict=True):
            rounds.append({"drafted": drafted, "accepted": accepted, "emitted": emitted})
        fields = {
            "index": index,
            "prompt": self._prompts[index],
            "options": self._options[index],
            "prompt_tokens": completion.prompt_tokens,
            "tokens": completion.tokens,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "rounds": rounds,
        }
        return json.dumps(fields, ensure_ascii=False) + "\n"
