"""specjax serve: an HTTP server with OpenAI's API, and a page to chat with the model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import flags

from specjax.cli import flags as common_flags
from specjax.cli import interrupts
from specjax.drafters import registry
from specjax.engine import generate as generation
from specjax.engine.llm import DTYPES as NAMED_DTYPES
from specjax.engine.llm import LLM
from specjax.errors import SpecJAXError
from specjax.report import tables
from specjax.verify import METHODS

FLAGS = flags.FLAGS
KEY_VARIABLE = "SPECJAX_API_KEY"
# JAX takes this share of a GPU's memory when it starts. The pools are cut from it, but for a little
# that fragmentation may cost.
FRACTION_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
SHARE_OF_ALLOCATOR = 0.98
PACKAGES = {
    "fastapi": "fastapi",
    "starlette": "fastapi",
    "uvicorn": "uvicorn",
    "pydantic": "pydantic",
    "prometheus_client": "prometheus-client",
}
GIB, MIB = 2**30, 2**20
# Flags that are arguments of `LLM` with the same name and meaning.
LLM_FLAGS = (
    "model",
    "tokenizer",
    "revision",
    "dtype",
    "tensor_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_gib",
    "max_model_len",
    "max_num_seqs",
    "enable_prefix_caching",
    "block_size",
    "chat_template",
    "max_logprobs",
    "verify",
    "implementation",
)
# Names of other commands, which mean the same.
ALIASES = {
    "target": "model",
    "tensor_parallel": "tensor_parallel_size",
    "data_parallel": "data_parallel_size",
    "draft_tensor_parallel": "speculative_draft_tensor_parallel_size",
    "page_size": "block_size",
}


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How tokens are drafted, as the flags of these names say it; None where not given."""

    speculative_model: str | None
    num_speculative_tokens: int | None
    speculative_draft_tensor_parallel_size: int | None
    speculative_config: str | None
    drafter: str | None
    draft: str | None

    def arguments(self) -> dict[str, Any]:
        """Returns arguments of `LLM`.

        Raises:
          SpecJAXError: for contradictory flags, or a configuration that is no JSON object.
        """
        names = ("num_speculative_tokens", "speculative_draft_tensor_parallel_size")
        counts = {name: getattr(self, name) for name in names}
        if self.drafter is None and self.draft is None:
            config = None
            if self.speculative_config is not None:
                config = _json_object(self.speculative_config)
            return {
                "speculative_model": self.speculative_model,
                "speculative_config": config,
                **counts,
            }
        if self.speculative_model is not None or self.speculative_config is not None:
            raise SpecJAXError(
                "--drafter and --draft exclude --speculative_model and --speculative_config, which "
                "say the same"
            )
        if self.drafter == "none" and self.draft is None:
            return {"speculative_model": None, **counts}
        config = {
            "method": self.drafter,
            "model": self.draft,
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_tensor_parallel_size": self.speculative_draft_tensor_parallel_size,
        }
        return {"speculative_config": config}


def _json_object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise SpecJAXError(f"--speculative_config must be JSON, got {text!r}: {error}") from error
    if not isinstance(config, dict):
        raise SpecJAXError(f"--speculative_config must be a JSON object, got {text!r}")
    return config


def define_flags() -> None:
    """Defines the flags of `specjax serve`."""
    _define_model_flags()
    _define_drafting_flags()
    _define_server_flags()
    for name, original in ALIASES.items():
        flags.DEFINE_alias(name, original)


def _define_model_flags() -> None:
    common_flags.define_path(
        "model",
        None,
        "The model: a SpecJAX checkpoint, a Hugging Face Llama folder, or the name of a Hugging "
        "Face repository.",
        required=True,
    )
    common_flags.define_path("tokenizer", None, "Another folder to take the tokenizer from.")
    flags.DEFINE_string("revision", None, "Branch, tag or commit of a Hugging Face repository.")
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["bfloat16", "float16", "float32", *NAMED_DTYPES],
        "dtype to run in; auto: float32 on a CPU, else that of the checkpoint.",
    )
    flags.DEFINE_integer(
        "tensor_parallel_size", 1, "Devices that share one copy of the model.", lower_bound=1
    )
    flags.DEFINE_integer(
        "data_parallel_size", 1, "Replicas, each with requests of its own.", lower_bound=1
    )
    flags.DEFINE_float(
        "gpu_memory_utilization",
        0.92,
        "Share of a GPU's memory for weights and caches.",
        lower_bound=0.01,
        upper_bound=1.0,
    )
    flags.DEFINE_float(
        "kv_cache_gib", None, "GiB of the caches of each device, instead; on a CPU 1 by default."
    )
    flags.DEFINE_integer(
        "max_model_len",
        None,
        "Largest length of a request, prompt and output; by default the model's context.",
    )
    flags.DEFINE_integer(
        "max_num_seqs",
        None,
        "Completions that run at a time; by default 16 per replica on a CPU and 64 on a GPU.",
    )
    flags.DEFINE_bool(
        "enable_prefix_caching", True, "Requests with the same beginning share its cache."
    )
    flags.DEFINE_integer("block_size", 64, "Positions per page of the caches.")
    flags.DEFINE_string("chat_template", None, "Path of a Jinja template, or the template itself.")
    flags.DEFINE_integer("max_logprobs", 20, "Largest logprobs of a request.")
    flags.DEFINE_enum("verify", None, METHODS, "Verification method; both are lossless.")
    common_flags.define_implementation()


def _define_drafting_flags() -> None:
    names = ", ".join(registry.names())
    flags.DEFINE_string(
        "speculative_model",
        None,
        "How tokens are drafted: the path or Hugging Face name of a draft model or head, or the "
        f"name of a drafter: {names}, or several with commas. By default no tokens are drafted.",
    )
    flags.DEFINE_integer(
        "num_speculative_tokens",
        None,
        "K, tokens to draft per round.",
        lower_bound=1,
        upper_bound=generation.MAX_SPECULATIVE_TOKENS,
    )
    flags.DEFINE_integer(
        "speculative_draft_tensor_parallel_size",
        None,
        "Devices that share one copy of the draft; 1 by default.",
        lower_bound=1,
    )
    flags.DEFINE_string("speculative_config", None, "All of this as a JSON object, as vLLM has it.")
    flags.DEFINE_string("drafter", None, "The drafter, as specjax generate has it.")
    common_flags.define_path("draft", None, "Its draft model or head.")


def _define_server_flags() -> None:
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 for all.")
    flags.DEFINE_integer("port", 8000, "Port to listen at.", lower_bound=0, upper_bound=65535)
    flags.DEFINE_multi_string(
        "api_key",
        [],
        "A key that clients must send; may be repeated. The environment variable "
        f"{KEY_VARIABLE} does the same, and no list of processes shows it.",
    )
    flags.DEFINE_list(
        "served_model_name",
        [],
        "Names of the model for clients; by default --model as it is given.",
    )
    flags.DEFINE_integer(
        "max_queue",
        1024,
        "Most completions that wait; more are refused with status 429.",
        lower_bound=0,
    )
    flags.DEFINE_integer("max_body_mib", 8, "Largest body of a request.", lower_bound=1)
    flags.DEFINE_float(
        "shutdown_timeout",
        30.0,
        "Seconds that requests may go on after SIGTERM.",
        lower_bound=0,
    )
    flags.DEFINE_bool(
        "enable_prompt_tokens_details",
        False,
        "Tell clients how much of their prompts the prefix cache had.",
    )
    flags.DEFINE_bool(
        "warm_up",
        True,
        "Compile what requests need before the first one; else each waits for what it needs.",
    )


def main(argv: list[str]) -> int:
    """Runs the server with the values of the flags; returns the exit code."""
    del argv
    _check_packages()
    from specjax.serve.app import Settings
    from specjax.serve.server import Options

    keys = [*FLAGS.api_key, os.environ.get(KEY_VARIABLE, "")]
    settings = Settings(
        model_names=tuple(FLAGS.served_model_name) or (FLAGS.model,),
        api_keys=tuple(key for key in keys if key),
        max_body_bytes=FLAGS.max_body_mib * MIB,
        shows_cached_tokens=FLAGS.enable_prompt_tokens_details,
    )
    options = Options(FLAGS.host, FLAGS.port, FLAGS.max_queue, FLAGS.shutdown_timeout)
    drafting = common_flags.read(Drafting)
    arguments = {name: getattr(FLAGS, name) for name in LLM_FLAGS} | drafting.arguments()
    return run(arguments, settings, options, warm_up=FLAGS.warm_up)


def _check_packages() -> None:
    """Raises SpecJAXError if a package of the extra `serve` is missing."""
    try:
        import specjax.serve.server  # noqa: F401
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in PACKAGES:
            raise
        packages = " ".join(sorted(set(PACKAGES.values())))
        raise SpecJAXError(
            f"specjax serve needs the package {PACKAGES[module]}, which is not installed; run: pip "
            f"install {packages}"
        ) from error


def run(arguments: dict[str, Any], settings: Any, options: Any, *, warm_up: bool) -> int:
    """Serves until the process is told to end.

    Args:
      arguments: of `LLM`.
      settings: `app.Settings`.
      options: `server.Options`.
      warm_up: compile before the first request.

    Returns:
      The exit code.

    Raises:
      SpecJAXError: for a model that cannot be loaded, or an address that cannot be used.
    """
    from specjax.serve.server import Server

    utilization = _reserve_memory(arguments["gpu_memory_utilization"], os.environ)
    arguments = arguments | {"gpu_memory_utilization": utilization}
    load = _loader(arguments, settings.model_names, warm_up)

    async def serve() -> tuple[Server, int]:
        server = Server(load, settings, options)
        name = settings.model_names[0]
        print(f"Loading {name}; {server.address}/health answers 503 meanwhile.", flush=True)
        return server, await server.run(lambda: _print_address(server, settings))

    with _log_to_stderr():
        server, code = asyncio.run(serve())
    if server.engine.is_alive:  # it compiles, or waits for a device that does not answer
        interrupts.exit_now(code)
    return code


def _print_address(server: Any, settings: Any) -> None:
    """Prints where the server is, and a command that asks it something."""
    tokenizer = server.engine.llm.target.tokenizer
    route, prompt = "completions", {"prompt": "1, 2, 3,"}
    if tokenizer is not None and tokenizer.chat_template is not None:
        message = {"role": "user", "content": "Why is the sky blue?"}
        route, prompt = "chat/completions", {"messages": [message]}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if settings.api_keys else ""
    body = json.dumps(prompt | {"max_tokens": 64})
    print(
        f"\n  curl {server.address}/v1/{route} {key}-H 'Content-Type: application/json' -d '{body}'"
        f"\n\nServing {settings.model_names[0]} at {server.address}",
        flush=True,
    )


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    logger = logging.getLogger("specjax")
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(logging.Formatter("specjax: %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _reserve_memory(utilization: float, environment: dict[str, str]) -> float:
    """Tells JAX, before it starts, which share of a GPU's memory it may take.

    Returns:
      The share of JAX's own memory that the engine may use. Where the user has told JAX, it is
      `utilization` of that.
    """
    if any(name in environment for name in FRACTION_VARIABLES):
        return utilization
    environment[FRACTION_VARIABLES[0]] = f"{utilization:g}"
    return SHARE_OF_ALLOCATOR


def _loader(arguments: dict[str, Any], names: tuple[str, ...], warm_up: bool) -> Callable[[], LLM]:
    """Returns the function that loads and compiles, and prints its progress."""

    def load() -> LLM:
        llm = LLM(**arguments, seconds_per_call=generation.SECONDS_PER_CALL_OF_STREAMS)
        tables.wide_console().print(_summary(llm, names), end="\n\n")
        if warm_up:
            llm.engine.warm_up(wait=False, on_program=_Progress())
        return llm

    return load


class _Progress:
    """Prints each program that is compiled."""

    def __init__(self):
        self._num_done = 0

    def __call__(self, name: str, seconds: float, num_programs: int) -> None:
        """Callback of `Engine.warm_up`."""
        self._num_done += 1
        width = len(str(num_programs))
        count = f"{self._num_done:{width}}/{num_programs}"
        print(f"compiled {count}  {seconds:5.1f} s  {name}", flush=True)


def _summary(llm: LLM, names: tuple[str, ...]) -> Any:
    """Returns the table of what is served."""
    engine = llm.engine
    memory = engine.memory()
    page_size = engine.config.runtime.page_size
    num_replicas = engine.max_num_seqs // engine.num_rows
    rows = [
        ("model", f"{', '.join(names)} ({engine.config.runtime.dtype.name})"),
        ("from", str(pathlib.Path(llm.target.path))),
        ("drafter", _drafter_text(llm)),
        ("devices", _devices_text(llm)),
        ("weights", f"{memory.weights / GIB:.2f} GiB"),
        ("caches", f"{num_replicas * engine.num_pages * memory.page / GIB:.2f} GiB"),
        (
            "pages",
            f"{num_replicas * engine.num_pages:,} of {page_size} positions, "
            f"{num_replicas * engine.num_pages * page_size:,} in all",
        ),
        ("longest request", f"{engine.max_model_len:,} tokens, prompt and output"),
        ("at a time", f"{engine.max_num_seqs} completions"),
    ]
    return tables.table("", ("", ""), rows, num_texts=2)


def _drafter_text(llm: LLM) -> str:
    config = llm.engine.config
    if config.drafter is None:
        return "none: plain decoding"
    return f"{llm.drafter_name}, K = {config.num_tokens}, {config.verify}"


def _devices_text(llm: LLM) -> str:
    import jax

    mesh: Mapping[str, int] = dict(llm.target.mesh.shape) if llm.target.mesh else {}
    count = llm.target.mesh.size if mesh else 1
    return f"{count} x {jax.devices()[0].device_kind}"
