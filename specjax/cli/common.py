"""Flags and output that more than one command needs."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Iterable, Sequence

import jax
from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax import parallel
from specjax.checkpoints_convert import eagle as heads
from specjax.checkpoints_convert.eagle import EagleHead
from specjax.cli import jsonl
from specjax.drafters import registry
from specjax.drafters.eagle import EagleConfig
from specjax.dtypes import DTYPES
from specjax.engine import generate as generation
from specjax.engine import load as checkpoint
from specjax.engine import metrics
from specjax.engine.generate import Generation
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.verify import METHODS

DRAFT_STYLE, OWN_STYLE = "green", "cyan"
FLAGS = flags.FLAGS
OTHER_ENGINES = ("torch", "transformers", "llama_cpp")


def define_decoding_flags(default: str | list[str]) -> None:
    """Flags that say how models run, and how drafts are made and checked. With a list of defaults
    --drafter may be given several times."""
    define = flags.DEFINE_string if isinstance(default, str) else flags.DEFINE_multi_string
    define(
        "drafter",
        default,
        f"How to guess tokens: none, {', '.join(registry.names())}; or several with commas, such as "
        "ngram,eagle: the first that has a proposal makes it."
        + ("" if isinstance(default, str) else " May be repeated, to compare."),
    )

    def known(names: str | list[str]) -> bool:
        return all(
            name == "none" or registry.draft_config_types(name)
            for name in ([names] if isinstance(names, str) else names)
        )

    flags.register_validator("drafter", known)  # an unknown name is an error of ours
    flags.DEFINE_string(
        "draft",
        None,
        "For --drafter=draft_model the draft model: a checkpoint or Hugging Face "
        "folder; for --drafter=eagle the folder of a head (see specjax train), if not the one that "
        "comes with SpecJAX for the target.",
    )
    flags.DEFINE_integer(
        "num_speculative_tokens",
        None,
        "K, tokens to guess per round (default: 7 on a CPU, 2 there "
        "with a draft model or a head; else 5).",
        lower_bound=1,
    )
    flags.DEFINE_list(
        "drafter_options",
        [],
        "Options of the drafter as name=number, such as min_n=1,max_n=5 for ngram.",
    )
    flags.DEFINE_enum(
        "verify",
        "rejection",
        METHODS,
        "How drafts are accepted; see the README. Both are lossless.",
    )
    flags.DEFINE_integer("page_size", 64, "Positions per page of the key/value caches.")
    flags.DEFINE_enum(
        "dtype",
        None,
        list(DTYPES),
        "dtype to run in; by default float32 on CPU, else that of the checkpoint.",
    )
    flags.DEFINE_enum(
        "implementation",
        None,
        dispatch.IMPLEMENTATIONS,
        "Of attention and verification; by default our kernels where they can run: see specjax env.",
    )
    define_mesh_flags()
    flags.DEFINE_bool(
        "distributed",
        False,
        "Join the other processes of a run on Slurm, Open MPI or Kubernetes, which "
        "JAX finds by itself.",
    )
    flags.DEFINE_string(
        "coordinator", None, "Elsewhere: host:port of process 0, the same in all processes,"
    )
    flags.DEFINE_integer("num_processes", None, "how many processes there are, one per host,")
    flags.DEFINE_integer("process_id", None, "and which of them this is, from 0.")
    flags.DEFINE_integer(
        "process_timeout",
        100,
        "Seconds after which a process that is not heard of ends the run.",
        lower_bound=1,
    )


def define_mesh_flags() -> None:
    """Flags that say how devices share the work."""
    flags.DEFINE_integer("tensor_parallel", 1, "Devices over which a copy of the target is split.")
    flags.DEFINE_integer(
        "draft_tensor_parallel", 1, "The same of the draft model: a divisor of --tensor_parallel."
    )
    flags.DEFINE_integer(
        "data_parallel", 1, "Parts of the batch, each with copies of the models of its own."
    )


def console() -> Console:
    """Where tables go that are wider than the 80 columns which a file would be thought to have."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 170)


def load_models() -> tuple[Model, Model | EagleHead | None]:
    """The target and, if there is one, the draft model or head that the flags name, on the mesh
    that they ask for."""
    names = drafter_names()
    kinds = {
        kind for name in names if name != "none" for kind in registry.draft_config_types(name)
    } - {None}
    if len(kinds) > 1:
        raise SpecJAXError(
            f"--drafter: {' and '.join(names)} need a draft model and a head; there is one --draft"
        )
    uses_head = EagleConfig in kinds
    if FLAGS.draft_tensor_parallel != 1 and not (FLAGS.draft or uses_head):
        raise SpecJAXError(
            f"--draft_tensor_parallel={FLAGS.draft_tensor_parallel}, but there is no --draft"
        )
    mesh = make_mesh()
    if not (FLAGS.draft or uses_head):
        return checkpoint.load(FLAGS.target, dtype=FLAGS.dtype, mesh=mesh), None
    # What cannot be used or split is refused before the other one is read.
    if uses_head:
        config = checkpoint.open_source(FLAGS.target).config
        heads.check(FLAGS.draft, config, mesh)
    elif mesh:
        for role, path in (("target", FLAGS.target), ("draft", FLAGS.draft)):
            parallel.check_shardable(
                checkpoint.open_source(path).config, parallel.degree(mesh, role), role
            )
    target = checkpoint.load(FLAGS.target, dtype=FLAGS.dtype, mesh=mesh)
    if uses_head:
        with_head = [
            name
            for name in names
            if name != "none" and EagleConfig in registry.draft_config_types(name)
        ]
        return target, checkpoint.load_drafter(with_head[0], FLAGS.draft, target)
    return target, checkpoint.load(FLAGS.draft, dtype=FLAGS.dtype, mesh=mesh, role="draft")


def make_mesh():
    """The mesh that the flags ask for; None for one device."""
    if (
        FLAGS.tensor_parallel,
        FLAGS.draft_tensor_parallel,
        FLAGS.data_parallel,
        jax.process_count(),
    ) == (1, 1, 1, 1):
        return None
    return parallel.make_mesh(
        FLAGS.tensor_parallel, FLAGS.draft_tensor_parallel, FLAGS.data_parallel
    )


def join_processes() -> None:
    """Makes this process one of several where the flags say so; the first of them speaks for all,
    and writes."""
    given = {name: getattr(FLAGS, name) for name in ("coordinator", "num_processes", "process_id")}
    if not FLAGS.distributed and set(given.values()) == {None}:
        if FLAGS["process_timeout"].present:
            raise SpecJAXError(
                f"--process_timeout={FLAGS.process_timeout} is for several processes; this is a run of "
                "one process"
            )
        return
    if not FLAGS.distributed and None in given.values():
        raise SpecJAXError(
            f"--coordinator, --num_processes and --process_id belong together, got {given}"
        )
    if None not in given.values() and not 0 <= FLAGS.process_id < FLAGS.num_processes:
        raise SpecJAXError(f"--process_id={FLAGS.process_id} must be in [0, {FLAGS.num_processes})")
    if FLAGS.coordinator and not FLAGS.coordinator.rpartition(":")[2].isdigit():
        raise SpecJAXError(f"--coordinator={FLAGS.coordinator} must be of the form host:port")
    try:
        jax.distributed.initialize(
            *given.values(),
            initialization_timeout=FLAGS.process_timeout,
            heartbeat_timeout_seconds=FLAGS.process_timeout,
            shutdown_timeout_seconds=FLAGS.process_timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise SpecJAXError(f"cannot join the other processes: {error}") from error
    if not is_first_process():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def is_alone() -> bool:
    """Whether there are no other processes, with which this one would have to look at its tokens in
    step."""
    return jax.process_count() == 1


def is_first_process() -> bool:
    """Whether this process writes the files of the run."""
    return jax.process_index() == 0


def drafter_names() -> list[str]:
    """What --drafter says, which some commands take several times."""
    return [FLAGS.drafter] if isinstance(FLAGS.drafter, str) else FLAGS.drafter


def provenance(module: str) -> dict:
    """Where figures come from: the flags of the command in `module`, those given and all values;
    versions, devices."""
    flags_ = FLAGS.get_key_flags_for_module(module)
    found = {
        name: importlib.metadata.version(name) for name in ("specjax", "jax", "jaxlib", "numpy")
    }
    found |= {name: sys.modules[name].__version__ for name in OTHER_ENGINES if name in sys.modules}
    return {
        "command": [flag.serialize() for flag in flags_ if flag.present],
        "flags": {flag.name: flag.value for flag in flags_},
        "versions": found,
        "python": platform.python_version(),
        "device": str(jax.devices()[0].device_kind),
        "num_devices": jax.device_count(),
        "num_cores": num_cores(),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def write_figures(module: str, figures: dict) -> None:
    """Writes the figures of a benchmark, and where they come from, to --output."""
    if FLAGS.output and is_first_process():
        jsonl.write_figures(FLAGS.output, {**provenance(module), **figures})


def begin_benchmark(*outputs: str) -> None:
    """Joins other processes, and checks what is the same for all benchmarks of drafters before
    anything is loaded.

    Args:
      *outputs: flags that name files to write.
    """
    names = drafter_names()
    if "none" in names:
        raise SpecJAXError("--drafter=none: bench compares drafters with plain decoding")
    if FLAGS.draft and not any(
        kind for name in names for kind in registry.draft_config_types(name)
    ):
        raise SpecJAXError(
            f"--draft={FLAGS.draft}: {' and '.join(names)} uses no draft model and no head"
        )
    join_processes()
    for name in outputs if is_first_process() else ():
        if getattr(FLAGS, name):
            jsonl.refuse_existing(getattr(FLAGS, name), name)


def drafters(draft: Model | EagleHead | None) -> dict[str, dict]:
    """By the names in --drafter, what chooses each of them as keyword arguments of
    `generation.generate`."""
    names = drafter_names()
    if FLAGS.drafter_options and len(names) > 1:
        raise SpecJAXError("--drafter_options are of one --drafter, and here there are several")
    return {
        name: dict(
            drafter=name,
            draft=draft if len(names) == 1 or any(registry.draft_config_types(name)) else None,
            num_speculative_tokens=num_speculative_tokens(name),
            drafter_options=_options(FLAGS.drafter_options),
        )
        for name in names
    }


def decoding_arguments() -> dict:
    """The flags that hold for plain decoding too, as keyword arguments of `generation.generate`."""
    return {name: getattr(FLAGS, name) for name in ("verify", "page_size", "implementation")}


def numbers(name: str, kind: type = float) -> list:
    """The values of a flag that is a list of numbers."""
    try:
        values = [kind(value) for value in getattr(FLAGS, name)]
    except ValueError:
        raise SpecJAXError(
            f"--{name} must be numbers with commas between them, got "
            f"{','.join(getattr(FLAGS, name))!r}"
        ) from None
    least = 1 if kind is int else 0
    if not values or not all(least <= value < math.inf for value in values):
        raise SpecJAXError(
            f"--{name} must be finite and at least {least}, got {','.join(getattr(FLAGS, name))!r}"
        )
    return values


def num_speculative_tokens(drafter: str) -> int | None:
    """K for a drafter, by the flags; None for "none" where they do not say."""
    if FLAGS.num_speculative_tokens is None and drafter != "none":
        return generation.default_num_speculative_tokens(drafter)
    return FLAGS.num_speculative_tokens


def _options(items: list[str]) -> dict[str, float]:
    options = {}
    for item in items:
        name, _, value = item.partition("=")
        try:
            options[name] = float(value) if set(value) & set(".e") else int(value)
        except ValueError:
            raise SpecJAXError(
                f"--drafter_options: {item!r} is not of the form name=number"
            ) from None
    return options


class TextStream:
    """Prints completions as they grow, in the order of the prompts: the first unfinished one live,
    the rest after it.

    Accepted drafts have one colour and the target's bonus tokens another; a first line says which.
    """

    def __init__(self, console: Console, model: Model, headers: list[str], legend: bool = True):
        self._console, self._headers, self._legend = console, headers, legend
        self._decoders = [model.tokenizer.stream() for _ in headers]
        self._pieces: list[list[tuple[str, str]]] = [[] for _ in headers]
        self._finished = [False] * len(headers)
        self._current = -1  # nothing is printed before the first tokens come

    def on_tokens(
        self, index: int, tokens: list[int], from_draft: list[bool], finished: bool
    ) -> None:
        """Callback for `generation.generate`."""
        for token, is_draft in zip(tokens, from_draft, strict=True):
            style = DRAFT_STYLE if is_draft else OWN_STYLE
            self._pieces[index].append((self._decoders[index].push([token]), style))
        if finished:
            self._pieces[index].append((self._decoders[index].flush(), OWN_STYLE))
        self._finished[index] = finished
        if self._current < 0:
            if self._legend:
                self._console.print(legend(), end="\n\n")
            self._next()
        while self._current < len(self._headers):
            for text, style in self._pieces[self._current]:
                self._console.print(Text(text, style), end="", soft_wrap=True)
            self._pieces[self._current] = []
            if not self._finished[self._current]:
                return
            self._console.print("\n")
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current < len(self._headers):
            self._console.print(Text(self._headers[self._current], "bold"))


def legend() -> Text:
    """What the colours of `TextStream` mean."""
    return Text.assemble(
        ("accepted drafts", DRAFT_STYLE), "  ", ("the target's bonus tokens", OWN_STYLE)
    )


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_texts: int = 1,
    no_wrap: bool = False,
    caption: str | None = None,
) -> Table:
    """A table: its first columns hold texts, the others numbers, which `no_wrap` keeps on one line."""
    result = Table(title=title, caption=caption, title_justify="left", show_edge=False)
    for i, column in enumerate(columns):
        result.add_column(
            column, justify="left" if i < num_texts else "right", no_wrap=no_wrap and i >= num_texts
        )
    for row in rows:
        result.add_row(*row)
    return result


def speed_table(title: str, runs: dict[str, list[Generation]], ks: dict[str, int]) -> Table:
    """Speed and acceptance of one or more runs over the same prompts, a column each; a run is a
    list of batches.

    A column "plain" is the yardstick of the others, of which `ks` has the K.
    """
    columns = {
        name: _figures(batches, 0 if name == "plain" else ks[name], runs.get("plain"))
        for name, batches in runs.items()
    }
    return table(
        title,
        ["", *columns],
        [
            [row, *(figures.get(row, "") for figures in columns.values())]
            for row in next(reversed(columns.values()))
        ],
    )


def tokens_per_second(batches: list[Generation]) -> float:
    """Tokens of all completions over the time of all decode loops."""
    tokens = sum(len(c.tokens) for batch in batches for c in batch.completions)
    return tokens / sum(batch.decode_seconds for batch in batches)


def milliseconds_per_round(batches: list[Generation]) -> float:
    """Mean wall time of a round of the decode loop."""
    return (
        1e3
        * sum(batch.decode_seconds for batch in batches)
        / sum(batch.rounds for batch in batches)
    )


def _figures(batches: list[Generation], k: int, plain: list[Generation] | None) -> dict[str, str]:
    stats = metrics.acceptance([c for batch in batches for c in batch.completions], k)
    figures = {
        "tokens": f"{stats.num_tokens}",
        "tokens/s": f"{tokens_per_second(batches):.1f}",
        "rounds": f"{stats.num_rounds}",
        "tokens per round": f"{stats.tokens_per_round:.2f}",
        "time per round": f"{milliseconds_per_round(batches):.1f} ms",
    }
    if k == 0:
        return figures
    expected = metrics.expected_tokens(stats.rate, k)
    figures |= {
        "K, most drafts per round": f"{k}",
        "rounds with drafts": f"{stats.rounds_with_drafts}",
        "acceptance α of drafts tested": number(stats.rate, 3),
        "tokens per round with drafts": number(stats.tokens_per_drafted_round),
        "  E = (1-α^(K+1))/(1-α) predicts": number(expected),
        "accepted at draft position 1, 2, ...": " ".join(map(number, stats.by_position)),
    }
    if plain:
        cost = milliseconds_per_round(batches) / milliseconds_per_round(plain)
        figures |= {
            "a round costs, in plain steps": f"{cost:.2f}",
            "speedup": f"{tokens_per_second(batches) / tokens_per_second(plain):.2f}x",
        }
    return figures


def number(value: float, digits: int = 2) -> str:
    """A figure for a table; a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def report_equality(*groups: dict[str, list[Generation]]) -> int:
    """Says whether the runs of each group, which ought to, gave the same tokens. Returns an exit
    code: 0, or 1 where they did not."""
    texts = [
        [[c.tokens for batch in batches for c in batch.completions] for batches in runs.values()]
        for runs in groups
    ]
    same = all(text == group[0] for group in texts for text in group)
    print(f"The texts with and without speculation are {'identical' if same else 'NOT identical'}.")
    return 0 if same else 1
