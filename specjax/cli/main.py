"""The `specjax` command: finds the subcommand, parses its flags and reports errors in one line."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import pathlib
import sys
import time
import warnings

from absl import flags, logging

import specjax
from specjax.cli import flags as common_flags
from specjax.cli import interrupts
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.report.stream import visible

COMMANDS = (
    "generate",
    "serve",
    "convert",
    "export",
    "train",
    "bench decode",
    "bench saturation",
    "bench gpu",
    "bench baselines",
    "bench kernels",
    "plan",
    "demo",
    "env",
)
HELP = ("-h", "--help", "--helpfull", "--helpshort")
FAILURE, USAGE_ERROR = 1, 2


def run() -> None:
    """Entry point of the console script."""
    # A terminal that cannot show a character shows a question mark.
    sys.stdout.reconfigure(errors="replace")
    interrupts.install()
    code = main(sys.argv)
    if code == interrupts.EXIT_CODE:
        interrupts.exit_now()
    sys.exit(code)


def main(argv: list[str]) -> int:
    """Runs `specjax <command> [flags]`.

    Returns:
      The exit code: 0, 1 (a failure), 2 (unusable input) or 130 (interrupted).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", SpecJAXWarning)
            warnings.showwarning = _show_warning
            code = _main(argv)
        sys.stdout.flush()
        return code
    except (SpecJAXError, flags.Error) as error:
        return _end(_complain(str(error)))
    except BrokenPipeError:  # the reader of our output has closed the pipe
        _discard_stdout()
        return FAILURE
    except KeyboardInterrupt:
        return interrupts.EXIT_CODE
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG):
            raise
        _discard_stdout()
        return _end(_complain(f"cannot write to the standard output: {error.strerror}"))
    except RuntimeError as error:
        if not _lost_a_process(error):
            raise
        reason = next(iter(str(error).splitlines()), "")
        _complain(f"the run over several processes has failed; one of them may have died: {reason}")
        return _end(FAILURE)


def _main(argv: list[str]) -> int:
    """Finds the command and runs it."""
    words = argv[1:]
    if not words or words[0] in (*HELP, "help"):
        _list(COMMANDS)
        return 0 if words else USAGE_ERROR
    if words[0] == "--version":
        print(f"specjax {specjax.__version__}")
        return 0
    length = 2 if " ".join(words[:2]) in COMMANDS else 1  # "bench decode" is one command
    name, arguments = " ".join(words[:length]), words[length:]
    if name not in COMMANDS:
        return _no_command(words)
    if any(argument in HELP for argument in arguments):
        _describe(name)
        return 0
    skipped = common_flags.parse(name, arguments, MODULES)
    for path, names in skipped.items():
        listed = ", ".join(f"--{flag}" for flag in names)
        print(f"specjax: {path}: skipped flags of other commands: {listed}", file=sys.stderr)
    _configure_jax()
    return MODULES[name]().main([name, *arguments]) or 0


def _no_command(words: list[str]) -> int:
    """Lists the commands of a group, or raises SpecJAXError for an unknown command."""
    name = words[0]
    group = [command for command in COMMANDS if command.startswith(f"{name} ")]
    if not group:
        raise SpecJAXError(f"unknown command {name!r}; choose from {', '.join(COMMANDS)}")
    if len(words) > 1 and words[1] not in (*HELP, "help"):
        wanted = " ".join(words[:2])
        raise SpecJAXError(f"unknown command {wanted!r}; choose from {', '.join(group)}")
    _list(group)
    return 0 if len(words) > 1 else USAGE_ERROR


def _list(commands) -> None:
    print("usage: specjax <command> [flags]\n\ncommands:")
    for name in commands:
        first_line = MODULES[name]().__doc__.splitlines()[0]
        print(f"  {name:18}{first_line.partition(': ')[2]}")
    print("\nspecjax <command> --help shows the flags; --flagfile=FILE reads flags from a file.")


def _describe(name: str) -> None:
    """Prints the description and the flags of a command."""
    command = MODULES[name]()
    command.define_flags()
    print(command.__doc__.strip() + "\n")
    print(flags.FLAGS.module_help(command.__name__))


def _module(command: str):
    return importlib.import_module(f"specjax.cli.{command.replace(' ', '_')}")


MODULES = {name: functools.partial(_module, name) for name in COMMANDS}


def _complain(message: str) -> int:
    print(f"specjax: error: {visible(' '.join(message.split()))}", file=sys.stderr)
    return USAGE_ERROR


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Prints a warning of SpecJAX in one line, and others as Python does."""
    if issubclass(category, SpecJAXWarning):
        text = f"specjax: warning: {visible(' '.join(str(message).split()))}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(text)


def _flush() -> None:
    """Writes what is still buffered, if possible."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _discard_stdout() -> None:
    """Lets Python flush its buffer at the end without an error."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _lost_a_process(error: RuntimeError) -> bool:
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1


def _end(code: int) -> int:
    """Returns the exit code, or exits with it at once if this is one of several processes.

    Python's shutdown would wait for the other processes.
    """
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized():
        _flush()
        if jax.process_index() == 0:
            time.sleep(1)  # the others end with this one, and should report their errors first
        os._exit(code)
    return code


def _configure_jax() -> None:
    """Keeps compiled programs from one run to the next, unless the user chose where, and which."""
    import jax

    # Errors are reported once, by us, and not by the threads of a library as well.
    logging.set_verbosity(logging.FATAL)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "specjax" / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
