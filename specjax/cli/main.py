"""The `specjax` command: finds the subcommand, parses its flags, and turns errors into one line and
an exit code."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import time

from absl import flags, logging

import specjax
from specjax.errors import SpecJAXError

COMMANDS = (
    "generate",
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
USAGE_ERROR = 2


def run() -> None:
    """Entry point of the console script."""
    sys.stdout.reconfigure(
        errors="replace"
    )  # a terminal that cannot show a character shows a question mark
    sys.exit(main(sys.argv))


def main(argv: list[str]) -> int:
    """Runs `specjax <command> [flags]` and returns the exit code: 0, 1 (it failed) or 2 (unusable
    input)."""
    if len(argv) < 2 or argv[1] in ("-h", "--help", "--helpfull", "help"):
        _list(COMMANDS)
        return 0 if len(argv) > 1 else USAGE_ERROR
    if argv[1] == "--version":
        print(f"specjax {specjax.__version__}")
        return 0
    group = [name for name in COMMANDS if name.startswith(f"{argv[1]} ")]
    if group and " ".join(argv[1:3]) not in COMMANDS:
        if len(argv) > 2 and not argv[2].startswith("-"):
            return _complain(
                f"command {' '.join(argv[1:3])!r} does not exist; there is: {', '.join(group)}"
            )
        _list(group)
        return (
            0 if len(argv) > 2 and argv[2].lstrip("-") in ("h", "help", "helpfull") else USAGE_ERROR
        )
    words = 2 if " ".join(argv[1:3]) in COMMANDS else 1  # "bench decode" is one command
    name, arguments = " ".join(argv[1 : 1 + words]), argv[1 + words :]
    if name not in COMMANDS:
        return _complain(f"command {name!r} does not exist; there is: {', '.join(COMMANDS)}")
    command = _module(name)
    command.define_flags()
    if any(
        arg.lstrip("-") in ("h", "help", "helpshort") for arg in arguments if arg.startswith("-")
    ):
        print(command.__doc__.strip() + "\n")
        print(flags.FLAGS.module_help(command.__name__))
        return 0
    try:
        rest = flags.FLAGS([name, *arguments])[1:]
        if rest:
            raise SpecJAXError(f"{rest[0]!r} is not a flag; flags look like --name=value")
        _configure_jax()
        return command.main([name, *arguments]) or 0
    except (SpecJAXError, flags.Error) as error:
        return _end(_complain(str(error)))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        if not _lost_a_process(error):
            raise
        reason = next(iter(str(error).splitlines()), "")
        _complain(f"the run over several processes has failed; one of them may have died: {reason}")
        return _end(1)


def _list(commands) -> None:
    print("usage: specjax <command> [flags]\n\ncommands:")
    for name in commands:
        print(f"  {name:18}{_module(name).__doc__.splitlines()[0].partition(': ')[2]}")
    print("\nspecjax <command> --help shows the flags; --flagfile=FILE reads flags from a file.")


def _module(command: str):
    return importlib.import_module(f"specjax.cli.{command.replace(' ', '_')}")


def _complain(message: str) -> int:
    print(f"specjax: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def _lost_a_process(error: RuntimeError) -> bool:
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1


def _end(code: int) -> int:
    """The exit code. One of several processes ends here: Python's own end would wait for those that
    go on."""
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        if jax.process_index() == 0:
            time.sleep(
                1
            )  # the others, which end with this one, should have said their own word before
        os._exit(code)
    return code


def _configure_jax() -> None:
    """Keeps compiled programs from one run to the next; where, and which, the user may have chosen
    already."""
    import jax

    logging.set_verbosity(
        logging.FATAL
    )  # what goes wrong is said once, by us, not by a library's threads as well
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "specjax" / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
