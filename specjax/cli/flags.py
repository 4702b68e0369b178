"""Flags that several commands share, and flag files.

A command's `define_flags` defines its flags; its `main` reads their values, once, and passes plain
values on. The functions here that read flags are for `main` only.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from specjax import files
from specjax.cli.processes import DEFAULT_TIMEOUT, Processes
from specjax.drafters import registry
from specjax.dtypes import DTYPES
from specjax.engine import generate as generation
from specjax.engine import speculative
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.report.provenance import Invocation
from specjax.verify import METHODS

FLAGS = flags.FLAGS
TARGET_HELP = (
    "The model: a SpecJAX checkpoint, a Hugging Face Llama folder, or the name of a Hugging Face "
    "repository, such as meta-llama/Llama-3.2-1B-Instruct, which is downloaded if it is not in the "
    "cache."
)
# vLLM's names of flags. The values of both are the same.
ALIASES = {"model": "target"}

# Flags that the functions below define belong to the command that calls them.
flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How models are loaded and run, and how tokens are drafted and verified.

    Attributes:
      target: path of the target.
      drafters: names of drafters, see `specjax.generate`.
      draft: path of the draft model or EAGLE head; None for the bundled head.
      num_speculative_tokens: K; None for the default of each drafter.
      drafter_options: options of the drafter.
      verify: verification method.
      page_size: positions per page of the KV caches.
      dtype: name of the dtype to run in; None for the default.
      implementation: implementation of attention and verification; None for the default.
      degrees: tensor parallelism of target and draft model, and data parallelism.
      processes: processes of the run.
    """

    target: str
    drafters: tuple[str, ...]
    draft: str | None
    num_speculative_tokens: int | None
    drafter_options: dict[str, float]
    verify: str
    page_size: int
    dtype: str | None
    implementation: str | None
    degrees: tuple[int, int, int]
    processes: Processes


class _PathParser(flags.ArgumentParser):
    """A path; `~` is the home folder."""

    syntactic_help = "a path"

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)


class _PathListParser(flags.ListParser):
    """Paths with commas between them."""

    def parse(self, argument: str | list[str]) -> list[str]:
        return [os.path.expanduser(path) for path in super().parse(argument)]


def define_path(name: str, default: str | None, text: str, required: bool = False) -> None:
    """Defines a flag that is a path, in which `~` is expanded."""
    serializer = flags.ArgumentSerializer()
    flags.DEFINE(_PathParser(), name, default, text, serializer=serializer, required=required)


def define_paths(name: str, text: str) -> None:
    """Defines a flag that is a list of paths, in which `~` is expanded."""
    flags.DEFINE(_PathListParser(), name, [], text, serializer=flags.ListSerializer(","))


def define_target(text: str = TARGET_HELP) -> None:
    """Defines --target, and its alias --model."""
    define_path("target", None, text, required=True)
    for alias, name in ALIASES.items():
        flags.DEFINE_alias(alias, name)


def define_decoding_flags(
    drafter: str = registry.DEFAULT, several_drafters: bool = False, draft_length: bool = True
) -> None:
    """Defines the flags that `decoding` reads.

    Args:
      drafter: default of --drafter.
      several_drafters: whether --drafter may be repeated.
      draft_length: whether there is a flag --num_speculative_tokens.
    """
    define_target()
    names = ", ".join(["none", *registry.names()])
    text = (
        f"How to draft tokens: {names}; or several with commas, such as ngram,eagle: each row "
        "takes the first that has a proposal."
    )
    if several_drafters:
        flags.DEFINE_multi_string("drafter", [drafter], f"{text} May be repeated, to compare.")
    else:
        flags.DEFINE_string("drafter", drafter, text)
    flags.register_validator("drafter", _check_drafters)
    define_path(
        "draft",
        None,
        "For --drafter=draft_model the draft model, as for --target. For --drafter=eagle the "
        "folder of an EAGLE head (see specjax train); by default the head that is bundled for the "
        "target.",
    )
    define_path(
        "speculative_model",
        None,
        "Instead of --drafter and --draft: the name of a drafter; or a draft model or EAGLE head, "
        "from which the drafter follows.",
    )
    if draft_length:
        flags.DEFINE_integer(
            "num_speculative_tokens",
            None,
            "K, tokens to draft per round (default on a CPU: 2 with a draft model or an EAGLE "
            "head, else 7; on other devices: 5).",
            lower_bound=1,
            upper_bound=generation.MAX_SPECULATIVE_TOKENS,
        )
    flags.DEFINE_list(
        "drafter_options",
        [],
        "Options of the drafter as name=number, such as min_n=1,max_n=5 for ngram.",
    )
    flags.DEFINE_enum("verify", "rejection", METHODS, "Verification method; both are lossless.")
    define_page_size()
    flags.DEFINE_enum(
        "dtype",
        None,
        list(DTYPES),
        "dtype to run in; by default float32 on a CPU, else that of the checkpoint.",
    )
    define_implementation()
    define_mesh_flags()
    _define_process_flags()


def define_page_size() -> None:
    """Defines --page_size."""
    flags.DEFINE_integer("page_size", 64, "Positions per page of the KV caches.")


def define_implementation() -> None:
    """Defines --implementation."""
    flags.DEFINE_enum(
        "implementation",
        None,
        dispatch.IMPLEMENTATIONS,
        "Implementation of attention and verification; by default our kernels where they can run, "
        "see specjax env.",
    )


def define_repeats(default: int) -> None:
    """Defines --repeats of a benchmark."""
    flags.DEFINE_integer(
        "repeats", default, "Number of counted runs; figures are medians.", lower_bound=1
    )


def define_figures_output(required: bool = False) -> None:
    """Defines --output of a benchmark."""
    define_path(
        "output", None, "JSON file to write the figures to; it must not exist.", required=required
    )


def define_mesh_flags() -> None:
    """Defines the flags that `mesh_degrees` reads."""
    flags.DEFINE_integer(
        "tensor_parallel", 1, "Number of devices that share one copy of the target."
    )
    flags.DEFINE_integer(
        "draft_tensor_parallel",
        1,
        "Number of devices that share one copy of the draft model; divides --tensor_parallel.",
    )
    flags.DEFINE_integer("data_parallel", 1, "Number of data-parallel replicas of both models.")


def _define_process_flags() -> None:
    flags.DEFINE_bool(
        "distributed",
        False,
        "Join the other processes of a run on Slurm, Open MPI or Kubernetes, which JAX detects.",
    )
    flags.DEFINE_string(
        "coordinator",
        None,
        "Without a cluster manager: host:port of process 0, the same in all processes.",
    )
    flags.DEFINE_integer(
        "num_processes", None, "Without a cluster manager: number of processes, one per host."
    )
    flags.DEFINE_integer(
        "process_id", None, "Without a cluster manager: number of this process, from 0."
    )
    flags.DEFINE_integer(
        "process_timeout",
        None,
        f"Seconds without a heartbeat from a process after which the run ends (default: "
        f"{DEFAULT_TIMEOUT}).",
        lower_bound=1,
    )


def _check_drafters(names: str | list[str]) -> bool:
    """Validator of --drafter: raises SpecJAXError for an unknown name."""
    for name in [names] if isinstance(names, str) else names:
        if name != "none":
            registry.draft_config_types(name)
    return True


def decoding() -> Decoding:
    """Reads the flags of `define_decoding_flags`."""
    drafters = FLAGS.drafter if isinstance(FLAGS.drafter, list) else [FLAGS.drafter]
    draft = FLAGS.draft
    if FLAGS.speculative_model is not None:
        for name in ("drafter", "draft"):
            check_exclusive("speculative_model", name)
        found = speculative.from_model(FLAGS.speculative_model)
        drafters, draft = [found.drafter], found.draft
    has_length = "num_speculative_tokens" in FLAGS
    return Decoding(
        target=FLAGS.target,
        drafters=tuple(drafters),
        draft=draft,
        num_speculative_tokens=FLAGS.num_speculative_tokens if has_length else None,
        drafter_options=_drafter_options(FLAGS.drafter_options),
        verify=FLAGS.verify,
        page_size=FLAGS.page_size,
        dtype=FLAGS.dtype,
        implementation=FLAGS.implementation,
        degrees=mesh_degrees(),
        processes=Processes(*(getattr(FLAGS, name) for name in Processes._fields)),
    )


def check_exclusive(*names: str) -> None:
    """Raises SpecJAXError if several of these flags were given."""
    given = [f"--{name}" for name in names if FLAGS[name].present]
    if len(given) > 1:
        raise SpecJAXError(f"{' and '.join(given)} exclude each other; give one of them")


def mesh_degrees() -> tuple[int, int, int]:
    """Reads the flags of `define_mesh_flags`."""
    return FLAGS.tensor_parallel, FLAGS.draft_tensor_parallel, FLAGS.data_parallel


def read(kind: type, **others: Any) -> Any:
    """Reads the flags that are named as the fields of a dataclass.

    Args:
      kind: the dataclass.
      **others: values of fields that are not read.

    Returns:
      An instance of `kind`.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.name not in others]
    return kind(**{name: getattr(FLAGS, name) for name in names}, **others)


def given(module: str) -> frozenset[str]:
    """Reads which flags of the command in `module` were given."""
    return frozenset(flag.name for flag in _flags_of_command(module) if flag.present)


def invocation(module: str) -> Invocation:
    """Reads all flags of the command in `module`."""
    of_command = _flags_of_command(module)
    given = [flag.serialize() for flag in of_command if flag.present]
    return Invocation(given, {flag.name: flag.value for flag in of_command})


def _flags_of_command(module: str) -> list[flags.Flag]:
    of_command = FLAGS.get_key_flags_for_module(module)
    return [flag for flag in of_command if flag.name not in ALIASES]


def numbers(name: str, values: Sequence[str], kind: type = float) -> list:
    """The numbers in the value of a flag that is a list.

    Args:
      name: name of the flag.
      values: texts.
      kind: float, for finite numbers of at least 0; or int, for numbers of at least 1.

    Raises:
      SpecJAXError: another value, or none.
    """
    given = ",".join(values)
    try:
        found = [kind(value) for value in values]
    except ValueError:
        raise SpecJAXError(
            f"--{name} must be numbers, separated by commas, got {given!r}"
        ) from None
    least = 1 if kind is int else 0
    if not found or not all(least <= value < math.inf for value in found):
        raise SpecJAXError(f"--{name} must be finite and at least {least}, got {given!r}")
    return found


def _drafter_options(items: list[str]) -> dict[str, float]:
    options = {}
    for item in items:
        name, _, value = item.partition("=")
        is_float = bool(set(value) & set(".e"))
        try:
            options[name] = float(value) if is_float else int(value)
        except ValueError:
            raise SpecJAXError(
                f"--drafter_options: {item!r} is not of the form name=number"
            ) from None
    return options


# Flag files. absl reads them too, but only with the flags of one command.


@dataclasses.dataclass(frozen=True)
class _Argument:
    """An argument of the command line, or a line of a flag file.

    Attributes:
      text: the argument.
      name: name of its flag, without dashes; "" for an argument that is no flag.
      where: flag file and line; None for the command line.
    """

    text: str
    name: str = ""
    where: str | None = None


def parse(
    command: str, arguments: Sequence[str], modules: dict[str, Callable]
) -> dict[str, list[str]]:
    """Parses the arguments of a command into absl's flags, which are defined here.

    Dashes in names are taken for underscores. In a flag file, flags of other commands are skipped.

    Args:
      command: name of the command.
      arguments: arguments of the command line.
      modules: for each command a function that returns its module.

    Returns:
      The names of the skipped flags, by flag file.

    Raises:
      SpecJAXError: a flag in a flag file that no command has, or an argument that is no flag.
      absl.flags.Error: an unknown flag on the command line, or a value that cannot be used.
    """
    own = _flags_of(modules[command]())
    expanded = list(_expand(arguments, own, None, ()))
    unknown = [item for item in expanded if item.where and item.name and item.name not in own]
    skipped: dict[str, list[str]] = {}
    if unknown:
        others = set()
        for name, module in modules.items():
            if name != command:
                others |= _flags_of(module()).keys()
        for item in unknown:
            if item.name not in others:
                raise SpecJAXError(f"{item.where}: unknown flag --{item.name}")
            of_file = skipped.setdefault(item.where.partition(", line ")[0], [])
            if item.name not in of_file:
                of_file.append(item.name)
    modules[command]().define_flags()
    kept = [item.text for item in expanded if item not in unknown]
    rest = FLAGS([command, *kept])[1:]
    for alias, name in ALIASES.items():
        if alias in FLAGS and FLAGS[name].present > FLAGS[alias].present > 0:
            raise SpecJAXError(f"--{alias} and --{name} are the same flag; give one of them")
    if rest:
        raise SpecJAXError(f"{rest[0]!r} is not a flag; flags look like --name=value")
    return skipped


def _flags_of(module: Any) -> dict[str, bool]:
    """For each flag of a command, whether it is boolean. absl's flags stay as they were."""
    before = set(FLAGS)
    module.define_flags()
    added = set(FLAGS) - before
    found = {}
    for name in added:
        found[name] = FLAGS[name].boolean
        if found[name]:
            found[f"no{name}"] = True
    for name in added:
        delattr(FLAGS, name)
    return found


def _expand(
    arguments: Sequence[str], own: dict[str, bool], file: str | None, open_files: tuple[str, ...]
) -> Iterator[_Argument]:
    """The arguments, with flag files replaced by their lines and names with underscores."""
    takes_next = False
    is_skipped_value = False
    lines = enumerate(arguments, 1)
    for number, text in lines:
        where = f"{file}, line {number}" if file else None
        if file and not text:
            continue
        is_flag = text.startswith("-") and text not in ("-", "--")
        if takes_next:
            takes_next = False
            yield _Argument(text)
            continue
        if not is_flag:
            if text == "--" and not file:
                for _, other in lines:
                    yield _Argument(other)
                return
            if not is_skipped_value:
                yield _Argument(text)
            is_skipped_value = False
            continue
        name, equals, value = text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name == "flagfile":
            path = value if equals else next(lines, (0, ""))[1]
            yield from _expand_file(path, own, open_files)
            continue
        takes_next = not equals and name in own and not own[name]
        is_skipped_value = bool(file) and not equals and name not in own
        yield _Argument(f"--{name}{equals}{value}", name, where)


def _expand_file(
    path: str, own: dict[str, bool], open_files: tuple[str, ...]
) -> Iterator[_Argument]:
    """The lines of a flag file."""
    path = os.path.expanduser(path)
    if path in open_files:
        raise SpecJAXError(f"flag file {path} includes itself")
    lines = []
    for line in files.read_text(pathlib.Path(path)).splitlines():
        line = line.strip()
        lines.append("" if line.startswith(("#", "//")) else line)
    yield from _expand(lines, own, path, (*open_files, path))
