"""The `specjax` command: finds the subcommand, parses its flags, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys

from absl import flags, logging

import specjax
from specjax.errors import SpecJAXError

COMMANDS = ("generate", "convert", "export", "bench", "bench kernels", "plan", "demo", "env")
USAGE_ERROR = 2


def run() -> None:
    """Entry point of the console script."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    sys.exit(main(sys.argv))


def main(argv: list[str]) -> int:
    """Runs `specjax <command> [flags]` and returns the exit code: 0, 1 (a check failed) or 2 (unusable input)."""
    if len(argv) < 2 or argv[1] in ("-h", "--help", "--helpfull", "help"):
        print("usage: specjax <command> [flags]\n\ncommands:")
        for name in COMMANDS:
            print(f"  {name:15}{_module(name).__doc__.splitlines()[0].partition(': ')[2]}")
        print("\nspecjax <command> --help shows the flags; --flagfile=FILE reads flags from a file.")
        return 0 if len(argv) > 1 else USAGE_ERROR
    if argv[1] == "--version":
        print(f"specjax {specjax.__version__}")
        return 0
    words = 2 if " ".join(argv[1:3]) in COMMANDS else 1  # "bench" is a command, and so is "bench kernels"
    name, arguments = " ".join(argv[1 : 1 + words]), argv[1 + words :]
    if name not in COMMANDS:
        return _complain(f"command {name!r} does not exist; there is: {', '.join(COMMANDS)}")
    command = _module(name)
    command.define_flags()
    if any(arg.lstrip("-") in ("h", "help", "helpshort") for arg in arguments if arg.startswith("-")):
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
        return _complain(str(error))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        _end_of_several(error)
        raise


def _module(command: str):
    return importlib.import_module(f"specjax.cli.{command.replace(' ', '_')}")


def _complain(message: str) -> int:
    print(f"specjax: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def _end_of_several(error: RuntimeError) -> None:
    """Ends this process, where it is one of several, at once: a proper end would wait for those that may be dead."""
    import jax

    if jax.process_count() > 1:
        reason = next(iter(str(error).splitlines()), "")
        _complain(f"the run over {jax.process_count()} processes has failed; one of them may have died: {reason}")
        sys.stderr.flush()
        os._exit(1)


def _configure_jax() -> None:
    """Keeps compiled programs from one run to the next; where, and which, the user may have chosen already."""
    import jax

    logging.set_verbosity(logging.FATAL)  # what goes wrong is said once, by us, not by a library's threads as well
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "specjax" / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
