"""Small files, and output files and folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

from specjax.errors import SpecJAXError

_UMASK = os.umask(0)
os.umask(_UMASK)
# Permissions of a file as Python creates it. The safetensors library grants them to the owner only.
MODE = 0o666 & ~_UMASK
# A file of this name marks a folder that is being written, or whose writer was killed.
INCOMPLETE = "INCOMPLETE"
REMOVE_ATTEMPTS, SECONDS_BEFORE_REMOVING_AGAIN = 20, 0.1


def expand(path: str | os.PathLike) -> pathlib.Path:
    """Returns `path` with a leading `~` or `~user` replaced by the home folder."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise SpecJAXError(f"cannot expand {path}: {one_line(error)}") from error


def exists(path: pathlib.Path) -> bool:
    """Whether there is a file or folder at `path`.

    Raises:
      SpecJAXError: `path` is a link to something that does not exist; the message names both.
    """
    if path.exists():
        return True
    if path.is_symlink():
        raise SpecJAXError(f"{path} is a link to {os.readlink(path)}, which does not exist")
    return False


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def new_folder(output: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a temporary sibling of `output` to write into, and renames it to `output` at the end.

    An exception removes the temporary folder. A killed process leaves it behind with a marker file,
    by which `check_complete` rejects it.

    Raises:
      SpecJAXError: `output` exists or its parent is not a folder, before anything is written; also
        in place of an OSError of the body, which is taken for a failure to write.
    """
    final = expand(output).absolute()
    check_not_exists(final)
    temporary = final.with_name(f"{final.name}.incomplete-{os.getpid()}")
    try:
        temporary.mkdir()
    except OSError as error:
        raise SpecJAXError(f"cannot create {temporary}: {error.strerror}") from error
    try:
        marker = temporary / INCOMPLETE
        marker.write_text(
            "This folder is not a checkpoint: its writer is at work, or was killed.\n"
        )
        yield temporary
        for path in temporary.glob("*.safetensors"):
            path.chmod(MODE)
        marker.unlink()
        # A rename would silently replace an empty folder created in the meantime.
        check_not_exists(final)
        temporary.rename(final)
    except BaseException as error:
        _remove_folder(temporary)
        if isinstance(error, OSError):
            raise SpecJAXError(f"cannot write {output}: {error}") from error
        raise


def _remove_folder(folder: pathlib.Path) -> None:
    """Removes a folder in which threads of a library may still write what was abandoned."""
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(SECONDS_BEFORE_REMOVING_AGAIN)
        if not folder.exists():
            return


@contextlib.contextmanager
def new_file(output: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a temporary sibling of `output` to write to, and renames it to `output` at the end.

    An exception removes the temporary file.

    Raises:
      SpecJAXError: in place of an OSError or a UnicodeError of the body.
    """
    final = expand(output)
    temporary = pathlib.Path(f"{final}.incomplete-{os.getpid()}")
    try:
        yield temporary
        temporary.chmod(MODE)
        temporary.rename(final)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | UnicodeError):
            raise SpecJAXError(f"cannot write {output}: {error}") from error
        raise


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raises OSError in place of the exceptions of libraries that cannot write.

    `new_folder` and `new_file` then add the name of the output.
    """
    try:
        yield
    except Exception as error:  # TensorStore, safetensors and tokenizers share no base class
        raise OSError(one_line(error)) from error


@contextlib.contextmanager
def parsing(where: object) -> Iterator[None]:
    """Raises SpecJAXError, naming `where`, in place of the exceptions that malformed input causes.

    Args:
      where: the file, folder or line that is parsed.
    """
    try:
        yield
    except SpecJAXError as error:
        message = str(error)
        if str(where) not in message:
            message = f"{where}: {message}"
        raise SpecJAXError(message) from error
    except KeyError as error:
        raise SpecJAXError(f"{where}: field {error.args[0]!r} is missing") from error
    except Exception as error:  # tokenizers raises plain Exception
        raise SpecJAXError(f"{where}: a field has an invalid value: {one_line(error)}") from error


def check_not_exists(output: str | os.PathLike) -> None:
    """Raises SpecJAXError if there is anything at `output`, including a dangling link."""
    if os.path.lexists(expand(output)):
        raise SpecJAXError(f"output {output} exists; choose another path or remove it")


def check_complete(folder: pathlib.Path) -> None:
    """Raises SpecJAXError for a folder that a killed conversion or export left behind."""
    if (folder / INCOMPLETE).exists():
        raise SpecJAXError(
            f"{folder} is incomplete: its writer was interrupted; remove it and write it again"
        )


def check_run_identity(folder: pathlib.Path, name: str, identity: dict[str, Any]) -> None:
    """Checks that a run with these values may start or resume in `folder`.

    Args:
      folder: folder of the run; it may be absent or empty.
      name: name of the JSON file in it that describes the run, see `claim_run_folder`.
      identity: JSON-serialisable values that must match for a run to resume.

    Raises:
      SpecJAXError: the folder holds something else, or a run with another value, which is named.
    """
    path = folder / name
    if not path.exists():
        if folder.is_dir():
            _check_no_files(folder, name)
        return
    recorded = read_json(path)
    for field, value in json.loads(json.dumps(identity)).items():
        if recorded.get(field) != value:
            raise SpecJAXError(
                f"{folder} was created with {field}={recorded.get(field)!r}, got {value!r}; "
                "resume with the same flags and files, or choose another folder"
            )


def _check_no_files(folder: pathlib.Path, name: str) -> None:
    for path in folder.iterdir():
        if not path.name.startswith(f"{name}.incomplete-"):
            raise SpecJAXError(f"{folder} is not empty and has no {name}; choose another folder")


def claim_run_folder(folder: pathlib.Path, name: str, identity: dict[str, Any]) -> None:
    """Creates the folder of a run and writes `identity` to its file `name`.

    If that file exists, only checks it. Arguments and errors as for `check_run_identity`.
    """
    check_run_identity(folder, name, identity)
    if not (folder / name).exists():
        make_folder(folder)
        with new_file(folder / name) as path:
            write_json(path, identity)


def make_folder(folder: pathlib.Path) -> None:
    """Creates a folder and its parents if absent. Raises SpecJAXError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecJAXError(f"cannot create {folder}: {error.strerror}") from error


def read_text(path: pathlib.Path) -> str:
    """Returns the content of a UTF-8 file without its byte order mark.

    Raises:
      SpecJAXError: the file cannot be read or decoded.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        exists(path)  # names the target of a dangling link
        raise SpecJAXError(f"cannot read {path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecJAXError(f"cannot read {path}: {error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises SpecJAXError if there is none."""
    text = read_text(path)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecJAXError(f"{path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(fields, dict):
        raise SpecJAXError(f"{path}: a JSON object is expected")
    return fields


def json_lines(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yields the position, for error messages, and the value of each line of a JSONL file.

    Blank lines are skipped. Raises SpecJAXError, naming the line, for a line that is not JSON.
    """
    lines = read_text(path).split("\n")  # JSON strings may contain other line separators
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SpecJAXError(f"{where}: not JSON: {error}") from error
        yield where, value


def write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    """Writes a JSON object that `read_json` reads."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
