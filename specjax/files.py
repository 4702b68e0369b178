"""Small files, and output files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from specjax.errors import SpecJAXError

_UMASK = os.umask(0)
os.umask(_UMASK)
MODE = (
    0o666 & ~_UMASK
)  # of a file as Python makes it; the safetensors library lets nobody but the owner read its own
INCOMPLETE = "INCOMPLETE"  # a file of this name marks a folder that is still being written, or whose writer was killed


@contextlib.contextmanager
def new_folder(output: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Gives a temporary sibling of `output` to write into, and renames it to `output` at the very
    end.

    An exception removes it. A killed process leaves it behind, marked, and `refuse_incomplete`
    refuses it. Raises SpecJAXError, before anything is written, where `output` exists or its parent
    is not a folder, and in place of an OSError, which is taken to be of writing.
    """
    final = pathlib.Path(output).absolute()
    refuse_existing(final)
    temporary = final.with_name(f"{final.name}.incomplete-{os.getpid()}")
    try:
        temporary.mkdir()
    except OSError as error:
        raise SpecJAXError(f"cannot create {temporary}: {error.strerror}") from error
    try:
        marker = temporary / INCOMPLETE
        marker.write_text(
            "This folder is being written, or what wrote it was killed. It is not a checkpoint.\n"
        )
        yield temporary
        for path in temporary.glob("*.safetensors"):
            path.chmod(MODE)
        marker.unlink()
        refuse_existing(
            final
        )  # a rename would silently replace an empty folder made in the meantime
        temporary.rename(final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise SpecJAXError(f"cannot write {output}: {error}") from error
        raise


@contextlib.contextmanager
def new_file(output: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Gives a temporary sibling of `output` to write to, and puts it in the place of `output` at
    the very end. An exception removes it. Raises SpecJAXError in place of an OSError or a
    UnicodeError."""
    partial = pathlib.Path(f"{output}.incomplete-{os.getpid()}")
    try:
        yield partial
        partial.chmod(MODE)
        partial.rename(output)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError | UnicodeError):
            raise SpecJAXError(f"cannot write {output}: {error}") from error
        raise


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raises OSError in place of what a library raises when it cannot write, for `new_folder` and
    `new_file` to name the output."""
    try:
        yield
    except Exception as error:  # TensorStore, safetensors and tokenizers have no common one
        raise OSError(_one_line(error)) from error


@contextlib.contextmanager
def parsing(where: object) -> Iterator[None]:
    """Raises SpecJAXError, naming the file or folder `where`, in place of what malformed content
    makes of a parser."""
    try:
        yield
    except SpecJAXError as error:
        raise SpecJAXError(
            f"{where}: {error}" if str(where) not in str(error) else str(error)
        ) from error
    except KeyError as error:
        raise SpecJAXError(f"{where}: field {error.args[0]!r} is missing") from error
    except Exception as error:  # tokenizers raises plain Exception
        raise SpecJAXError(
            f"{where}: a field has a value of the wrong kind: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def refuse_existing(output: str | os.PathLike) -> None:
    """Raises SpecJAXError where `output` exists, be it a broken link."""
    if os.path.lexists(output):
        raise SpecJAXError(f"output {output} exists; choose another name or remove it")


def refuse_incomplete(path: pathlib.Path) -> None:
    """Raises SpecJAXError for what a killed conversion or export left behind."""
    if (path / INCOMPLETE).exists():
        raise SpecJAXError(
            f"{path} is incomplete: what wrote it was interrupted; remove it and write it again"
        )


def check_claim(folder: pathlib.Path, name: str, identity: dict[str, Any]) -> None:
    """Whether what has these values may be written to `folder`, or gone on with there, see `claim`.

    Raises:
      SpecJAXError: it holds something else, or what has another value, which is named.
    """
    if not (folder / name).exists():
        if folder.is_dir() and any(
            not path.name.startswith(f"{name}.incomplete-") for path in folder.iterdir()
        ):
            raise SpecJAXError(f"{folder} is not empty, and has no {name} that says what it is")
        return
    theirs = read_json(folder / name)
    for field, value in json.loads(json.dumps(identity)).items():
        if theirs.get(field) != value:
            raise SpecJAXError(
                f"{folder} was made with {field}={theirs.get(field)!r}, and here it is {value!r}: go on "
                "with the same flags and files, or choose another folder"
            )


def claim(folder: pathlib.Path, name: str, identity: dict[str, Any]) -> None:
    """Makes a folder whose file `name` says what it is of, or checks that it is that already.
    Errors as for `check_claim`."""
    check_claim(folder, name, identity)
    if not (folder / name).exists():
        make_folder(folder)
        with new_file(folder / name) as path:
            write_json(path, identity)


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder, and those above it, where there is none. Raises SpecJAXError where that
    cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecJAXError(f"cannot create {folder}: {error.strerror}") from error


def read_text(path: pathlib.Path) -> str:
    """A text file, with SpecJAXError in place of the operating system's or the decoder's error."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecJAXError(f"cannot read {path}: {error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; raises SpecJAXError naming the file where it is absent or is something else."""
    try:
        fields = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise SpecJAXError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SpecJAXError(f"{path}: a JSON object is expected")
    return fields


def json_lines(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """For each line of a JSONL file that is not blank, what errors call it, and its value. Raises
    SpecJAXError."""
    text = read_text(path).removeprefix("\ufeff")  # a byte order mark
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold other line ends
        if line.strip():
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SpecJAXError(f"{where}: not JSON: {error}") from error
            yield where, value


def write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    """Reverses `read_json`."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
