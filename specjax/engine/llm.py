"""`LLM`: a model that completes prompts offline, with the interface of vLLM's class of this name.

llm = LLM("meta-llama/Llama-3.1-8B-Instruct", speculative_model="meta-llama/Llama-3.2-1B")
for output in llm.generate(["1, 2, 3,"], SamplingParams(temperature=0.0, max_tokens=64)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import itertools
import logging
import numbers
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax import devices, files, parallel
from specjax import tokenizer as tokenizer_lib
from specjax.engine import batch, generate, hub, load, speculative
from specjax.engine.engine import Engine, EngineStats
from specjax.engine.load import Model
from specjax.engine.request import (
    MAX_LOGPROBS,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from specjax.engine.speculative import SpeculativeConfig
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer

logger = logging.getLogger("specjax")

# vLLM's names of dtypes, besides our own.
DTYPES = {"auto": None, "half": "float16", "float": "float32"}
# Arguments of vLLM's class that have one value here.
FIXED = {
    "enforce_eager": False,
    "trust_remote_code": False,
    "skip_tokenizer_init": False,
    "enable_lora": False,
    "enable_chunked_prefill": True,
    "pipeline_parallel_size": 1,
    "quantization": None,
    "load_format": "auto",
    "tokenizer_mode": "auto",
    "kv_cache_dtype": "auto",
    "swap_space": 0,
    "cpu_offload_gb": 0,
}
# Keys of a prompt that is a dict.
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# Fields of generation_config.json that are defaults of requests, and the names of their parameters.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
GIB = 2**30


class LLM:
    """A model with an engine that decodes many prompts at once. One thread may use it at a time.

    In a run of several processes (`jax.distributed`) each makes the same calls, and gets the same
    outputs.

    Attributes:
      engine: the engine.
      target: the model.
      drafter_name: name of the drafter, or several with commas; "none" for plain decoding.
      generation_config: parameters of requests in the model's generation_config.json, by name.
      max_logprobs: largest `logprobs` of a request.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        tokenizer: str | os.PathLike | None = None,
        dtype: Any = "auto",
        seed: int | None = 0,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.92,
        kv_cache_gib: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool | None = None,
        block_size: int = 64,
        revision: str | None = None,
        chat_template: str | os.PathLike | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        disable_log_stats: bool = True,
        speculative_model: str | None = None,
        num_speculative_tokens: int | None = None,
        speculative_draft_tensor_parallel_size: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        spec_method: str | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
        verify: str | None = None,
        implementation: str | None = None,
        seconds_per_call: float = generate.SECONDS_PER_CALL,
        **others: Any,
    ):
        """Loads the models, and makes the engine.

        Args:
          model: a folder, or the name of a Hugging Face repository, see `hub.resolve`.
          tokenizer: another folder or repository to take the tokenizer from.
          dtype: "float32", "float16" or "bfloat16", to cast parameters to. With "auto" float32 on a
            CPU, and the stored dtype elsewhere.
          seed: of requests without a seed: the same calls give the same texts again. With None
            these requests get fresh seeds.
          tensor_parallel_size: devices that share one copy of the model.
          data_parallel_size: replicas, each with requests of its own.
          gpu_memory_utilization: share of a GPU's memory for weights and caches.
          kv_cache_gib: GiB of the caches of each device, instead; on a CPU 1 by default.
          kv_cache_memory_bytes: the same in bytes.
          max_model_len: largest length of a request, prompt and output; by default the model's
            context.
          max_num_seqs: requests that run at a time; by default 16 per replica on a CPU and 64 on a
            GPU.
          enable_prefix_caching: whether requests with the same beginning share its cache; None for
            True.
          block_size: positions per page of the caches.
          revision: branch, tag or commit of a Hugging Face repository.
          chat_template: a Jinja template, or the path of one, instead of the model's own.
          max_logprobs: largest `logprobs` of a request, up to 20.
          disable_log_stats: if False, each call logs its speed to the logger "specjax".
          speculative_model: how tokens are drafted: the path or Hugging Face name of a draft model
            or head; or the name of a drafter, see `specjax.generate`. None for plain decoding.
          num_speculative_tokens: K, drafts per round; by default as `specjax.generate` has it.
          speculative_draft_tensor_parallel_size: devices that share one copy of the draft; 1 by
            default.
          speculative_config: all of this in a dict with the keys of vLLM, see
            `speculative.from_dict`.
          spec_method, spec_model, spec_tokens: the keys method, model and num_speculative_tokens of
            `speculative_config`, instead of it.
          verify: "rejection" (the default) or "coupled", see `specjax.verify`.
          implementation: of attention and sampling, see `specjax.generate`.
          seconds_per_call: how long a call of the decode loop may run, roughly. A server, whose
            streams wait so long, gives less than the default.
          **others: arguments of vLLM's class that have one value here, see `FIXED`.

        Raises:
          SpecJAXError: for an argument that is not known or not supported, models that cannot be
            loaded or do not fit together, or too little memory.
        """
        _check_others(others)
        self._seed = _checked_seed(seed)
        page_size = _checked_block_size(block_size)
        self.max_logprobs = _checked_max_logprobs(max_logprobs)
        self._logs_stats = not _flag("disable_log_stats", disable_log_stats, True)
        speculation = _speculation(
            (speculative_model, num_speculative_tokens, speculative_draft_tensor_parallel_size),
            speculative_config,
            {
                "method": spec_method,
                "model": spec_model,
                "num_speculative_tokens": spec_tokens,
            },
        )
        self.drafter_name = speculation.drafter
        mesh = devices.make_mesh(
            tensor_parallel_size, speculation.draft_tensor_parallel_size, data_parallel_size
        )
        target, draft = load.load_with_drafter(
            hub.resolve(model, revision),
            speculation.drafter,
            speculation.draft,
            dtype=DTYPES[dtype] if isinstance(dtype, str) and dtype in DTYPES else dtype,
            mesh=mesh,
        )
        self.target = _with_texts(target, tokenizer, chat_template)
        self.generation_config = _read_generation_config(pathlib.Path(target.path))
        self._default_params = SamplingParams(**self.generation_config)
        drafter, drafter_params = generate.named_drafter(
            speculation.drafter,
            target,
            draft,
            speculation.num_speculative_tokens,
            speculation.options,
        )
        self.engine = Engine(
            self.target,
            drafter,
            drafter_params,
            verify=_verify_method(verify, speculation),
            page_size=page_size,
            implementation=implementation,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_gib=_kv_cache_gib(kv_cache_gib, kv_cache_memory_bytes),
            enable_prefix_caching=_flag("enable_prefix_caching", enable_prefix_caching, True),
            seconds_per_call=seconds_per_call,
        )
        self._num_requests = itertools.count()

    # --- Completions ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Returns the completions of each prompt, in the order of the prompts.

        Args:
          prompts: a prompt, or a list of prompts. A prompt is a text, a list of token ids, or a
            dict with "prompt" (a text) or "prompt_token_ids", and perhaps "cache_salt": only
            prompts with the same salt share pages of the cache.
          sampling_params: for all prompts, or one for each; by default those of
            `get_default_sampling_params`.
          use_tqdm: whether a terminal shows the progress.

        Raises:
          SpecJAXError: for a prompt or parameters that cannot be used, naming the prompt, before
            anything is generated; or if the model's logits are NaN.
        """
        requests = []
        for i, prompt in enumerate(_listed(prompts)):
            requests.append(self._parse(prompt, f"prompt {i}"))
        return self._run(requests, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns the answers to one conversation, or to each of several.

        Args:
          messages: a list of {"role": ..., "content": ...}, or a list of such lists.
          sampling_params, use_tqdm: see `generate`.
          chat_template: a Jinja template, or the path of one, instead of the model's.
          add_generation_prompt: begin the assistant's answer.
          continue_final_message: continue the last message; requires
            `add_generation_prompt=False`.
          chat_template_kwargs: further variables of the chat template.

        Raises:
          SpecJAXError: see `generate`; also for messages that the chat template rejects.
        """
        if not isinstance(messages, list | tuple):
            raise SpecJAXError(f"messages must be a list of messages, got {messages!r}")
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise SpecJAXError(f"chat_template_kwargs must be a dict, got {chat_template_kwargs!r}")
        is_single = len(messages) > 0 and isinstance(messages[0], Mapping)
        self._require_tokenizer("chat")
        target = _with_texts(self.target, None, chat_template)
        requests = []
        for i, conversation in enumerate([messages] if is_single else messages):
            name = f"conversation {i}"
            if not isinstance(conversation, list | tuple) or not conversation:
                raise SpecJAXError(
                    f"{name} must be a list of at least one message, got {conversation!r}"
                )
            text, ids = batch.encode_chat(
                target,
                conversation,
                name,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            requests.append(_Request(name, text, batch.encode(self.target, ids, name)))
        return self._run(requests, sampling_params, use_tqdm)

    def _parse(self, prompt: Any, name: str) -> _Request:
        """Returns the request for a prompt.

        Raises:
          SpecJAXError: for what is no prompt.
        """
        if not isinstance(prompt, Mapping):
            if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
                raise SpecJAXError(f"{name} has messages; LLM.chat takes messages")
            text = prompt if isinstance(prompt, str) else None
            return _Request(name, text, batch.encode(self.target, prompt, name))
        for key in prompt:
            if key not in PROMPT_KEYS:
                choices = ", ".join(PROMPT_KEYS)
                raise SpecJAXError(f"{name}: unknown key {key!r}; choose from {choices}")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        salt = prompt.get("cache_salt", "")
        if not isinstance(text, str | None) or not isinstance(salt, str):
            raise SpecJAXError(f"{name}: prompt and cache_salt must be strings, got {prompt!r}")
        if text is None and ids is None:
            raise SpecJAXError(f"{name} has neither prompt nor prompt_token_ids: {prompt!r}")
        ids = batch.encode(self.target, text if ids is None else ids, name)
        return _Request(name, text, ids, salt.encode())

    def _run(
        self,
        requests: list[_Request],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        all_params = self._params_of(requests, sampling_params)
        given = [(request.ids, request.salt) for request in requests]
        parallel.check_alike((given, [str(each) for each in all_params]), self.target.mesh)
        start = time.perf_counter()
        numbers: dict[str, int] = {}
        outputs: dict[int, RequestOutput] = {}
        try:
            for i, (request, params) in enumerate(zip(requests, all_params, strict=True)):
                numbers[self._submit(request, params)] = i
            with _ProgressBar(len(requests), is_shown=use_tqdm) as progress:
                while len(outputs) < len(requests):
                    for output in self.engine.step():
                        number = numbers[output.request_id]
                        _check_logits(output, requests[number].name)
                        outputs[number] = output
                        progress.add(output)
        except BaseException:
            self._abandon(numbers)
            raise
        results = [outputs[i] for i in range(len(requests))]
        if self._logs_stats:
            logger.info(_speed(results, time.perf_counter() - start))
        return results

    def _params_of(
        self, requests: list[_Request], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """Returns the parameters of each request.

        Raises:
          SpecJAXError: for another number of parameters, or those that cannot be used.
        """
        if given is None:
            given = self._default_params
        if isinstance(given, SamplingParams):
            given = [given] * len(requests)
        if not isinstance(given, list | tuple):
            raise SpecJAXError(
                f"sampling_params must be SamplingParams, or a list of them, got {given!r}"
            )
        if len(given) != len(requests):
            raise SpecJAXError(
                f"sampling_params has {len(given)} elements for {len(requests)} prompts"
            )
        return [
            self._prepared(params, request.name)
            for params, request in zip(given, requests, strict=True)
        ]

    def _prepared(self, params: SamplingParams, name: str) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise SpecJAXError(f"{name}: expected SamplingParams, got {params!r}")
        for field in ("logprobs", "prompt_logprobs"):
            number = getattr(params, field)
            if number is not None and number > self.max_logprobs:
                raise SpecJAXError(
                    f"{name}: {field} must be at most max_logprobs={self.max_logprobs}, got "
                    f"{number}"
                )
        count = next(self._num_requests)
        seed = params.seed
        if seed is None and self._seed is not None:
            seed = _seed_of(self._seed, count)
        return dataclasses.replace(params, seed=seed, output_kind=RequestOutputKind.FINAL_ONLY)

    def _submit(self, request: _Request, params: SamplingParams) -> str:
        try:
            return self.engine.submit(request.ids, params, prompt=request.text, salt=request.salt)
        except SpecJAXError as error:
            raise SpecJAXError(f"{request.name}: {error}") from error

    def _abandon(self, request_ids: Iterable[str]) -> None:
        """Ends requests after an error or an interrupt, so that the next call finds none."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        while self.engine.has_unfinished:
            self.engine.step()

    # --- Everything else --------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          SpecJAXError: the model has none.
        """
        self._require_tokenizer("get_tokenizer")
        return self.target.tokenizer

    def _require_tokenizer(self, name: str) -> None:
        if self.target.tokenizer is None:
            raise SpecJAXError(f"{name} needs a tokenizer, but {self.target.path} has none")

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of requests without any: those of generation_config.json."""
        return self._default_params

    def get_metrics(self) -> list[Metric]:
        """Returns counts over the life of the engine, under the names of vLLM."""
        return _metrics(self.engine.stats(), has_drafter=self.engine.config.drafter is not None)

    def reset_prefix_cache(self) -> bool:
        """Forgets what requests have in common, and returns whether it did."""
        return self.engine.reset_prefix_cache()


class _Request(NamedTuple):
    """A prompt before it is submitted.

    Attributes:
      name: what errors call it.
      text: text of the prompt; None for token ids alone.
      ids: token ids.
      salt: see `Engine.submit`.
    """

    name: str
    text: str | None
    ids: tuple[int, ...]
    salt: bytes = b""


# --- Arguments ------------------------------------------------------------------------------------


def _check_others(others: dict[str, Any]) -> None:
    """Raises SpecJAXError for arguments that mean nothing here."""
    for name, value in others.items():
        if name not in FIXED:
            known = inspect.signature(LLM).parameters
            similar = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise SpecJAXError(f"LLM has no argument {name!r}{hint}")
        if value != FIXED[name] or isinstance(value, bool) != isinstance(FIXED[name], bool):
            raise SpecJAXError(f"LLM supports {name}={FIXED[name]!r} only, got {value!r}")


def _flag(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SpecJAXError(f"{name} must be True or False, got {value!r}")
    return value


def _checked_seed(seed: Any) -> int | None:
    if seed is None or (isinstance(seed, int) and not isinstance(seed, bool)):
        return seed
    raise SpecJAXError(f"seed must be None or an integer, got {seed!r}")


def _checked_max_logprobs(value: Any) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not 0 <= value <= MAX_LOGPROBS:
        raise SpecJAXError(f"max_logprobs must be an integer in [0, {MAX_LOGPROBS}], got {value!r}")
    return value


def _checked_block_size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecJAXError(f"block_size must be an integer of at least 1, got {value!r}")
    return value


def _speculation(
    arguments: tuple[Any, Any, Any], config: Mapping[str, Any] | None, short: dict[str, Any]
) -> SpeculativeConfig:
    """Returns the drafter, from one of the three forms in which it can be given.

    Args:
      arguments: speculative_model, num_speculative_tokens and the tensor parallelism of the draft.
      config: speculative_config.
      short: the arguments spec_...

    Raises:
      SpecJAXError: for several forms, or a drafter that cannot be used.
    """
    given = {
        "speculative_model": any(value is not None for value in arguments),
        "speculative_config": config is not None,
        "spec_method": any(value is not None for value in short.values()),
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise SpecJAXError(f"{' and '.join(names)} exclude each other; give one of them")
    if names == ["speculative_config"]:
        return speculative.from_dict(config)
    if names == ["spec_method"]:
        return speculative.from_dict(short)
    return speculative.from_model(*arguments)


def _verify_method(verify: str | None, speculation: SpeculativeConfig) -> str:
    wanted = {verify, speculation.verify} - {None}
    if len(wanted) > 1:
        raise SpecJAXError(
            f"verify={verify!r} contradicts rejection_sample_method, which means "
            f"{speculation.verify!r}"
        )
    return next(iter(wanted), "rejection")


def _kv_cache_gib(gib: float | None, num_bytes: int | None) -> float | None:
    if num_bytes is None:
        return gib
    if gib is not None:
        raise SpecJAXError("kv_cache_gib and kv_cache_memory_bytes exclude each other; give one")
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 1:
        raise SpecJAXError(f"kv_cache_memory_bytes must be a positive integer, got {num_bytes!r}")
    return num_bytes / GIB


def _with_texts(
    target: Model, tokenizer: str | os.PathLike | None, chat_template: str | os.PathLike | None
) -> Model:
    """Returns the model with another tokenizer, or another chat template, where they are given."""
    found = target.tokenizer
    if tokenizer is not None:
        folder = hub.resolve(tokenizer)
        found = tokenizer_lib.from_folder(folder)
        if found is None:
            raise SpecJAXError(f"tokenizer: {folder} has no tokenizer.json")
    if chat_template is not None:
        if found is None:
            raise SpecJAXError(f"chat_template needs a tokenizer, but {target.path} has none")
        source, path = os.fspath(chat_template), None
        if "{" not in source:
            path = files.expand(chat_template)
            source = files.read_text(path)
        found = dataclasses.replace(found, chat_template=source, template_path=path and str(path))
    return dataclasses.replace(target, tokenizer=found)


def _read_generation_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the parameters in a model's generation_config.json, by our names.

    Raises:
      SpecJAXError: for values that are not allowed, naming the file.
    """
    path = folder / "generation_config.json"
    if not files.exists(path):
        return {}
    fields = files.read_json(path)
    found = {}
    for field, name in GENERATION_FIELDS.items():
        if fields.get(field) is not None:
            found[name] = fields[field]
    try:
        SamplingParams(**found)
    except SpecJAXError as error:
        raise SpecJAXError(f"{path}: {error}") from error
    return found


# --- Calls ----------------------------------------------------------------------------------------


def _listed(prompts: Any) -> list[Any]:
    """Returns a list of prompts, from one prompt or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__"):
        raise SpecJAXError(f"prompts must be a prompt or a list of prompts, got {prompts!r}")
    is_ids = len(prompts) > 0 and all(isinstance(item, numbers.Integral) for item in prompts)
    return [prompts] if is_ids else list(prompts)


def _seed_of(seed: int, count: int) -> int:
    """Returns the seed of a request, below 2**32, from that of the `LLM` and a count."""
    digest = hashlib.sha256(f"{seed} {count}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _check_logits(output: RequestOutput, name: str) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            position = len(output.prompt_token_ids) + len(completion.token_ids)
            raise generate.unusable_logits(name, position)


class _ProgressBar:
    """Shows finished requests and tokens per second on a terminal; a context manager."""

    def __init__(self, num_requests: int, is_shown: bool):
        if not isinstance(is_shown, bool):
            raise SpecJAXError(f"use_tqdm must be True or False, got {is_shown!r}")
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            disable=not is_shown or not console.is_terminal or jax.process_index() > 0,
        )
        self._task = self._progress.add_task("", total=num_requests, speed="")
        self._outputs: list[RequestOutput] = []
        self._start = time.perf_counter()

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def add(self, output: RequestOutput) -> None:
        """Counts a finished request."""
        self._outputs.append(output)
        speed = _speed(self._outputs, time.perf_counter() - self._start)
        self._progress.update(self._task, advance=1, speed=speed)


def _speed(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Returns tokens per second, and how many drafts were accepted, in words."""
    completions = [completion for output in outputs for completion in output.outputs]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    num_drafted = sum(sum(completion.drafted) for completion in completions)
    num_accepted = sum(sum(completion.accepted) for completion in completions)
    text = f"{num_tokens / max(seconds, 1e-9):.1f} tokens/s"
    if num_drafted:
        text += f", {num_accepted / num_drafted:.0%} of {num_drafted} drafts accepted"
    return text


# --- Metrics --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that an engine reports.

    Attributes:
      name: vLLM's.
      labels: what distinguishes metrics of the same name.
    """

    name: str
    labels: dict[str, str] = dataclasses.field(default_factory=dict, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclasses.dataclass(frozen=True)
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclasses.dataclass(frozen=True)
class Vector(Metric):
    """Several numbers that only grow."""

    values: list[int]


def _metrics(stats: EngineStats, has_drafter: bool) -> list[Metric]:
    metrics: list[Metric] = [
        Gauge("vllm:num_requests_running", stats.num_running),
        Gauge("vllm:num_requests_waiting", stats.num_waiting),
        Gauge("vllm:kv_cache_usage_perc", stats.kv_cache_usage),
        Counter("vllm:num_preemptions", stats.num_preemptions),
        Counter("vllm:prefix_cache_queries", stats.num_queried_tokens),
        Counter("vllm:prefix_cache_hits", stats.num_hit_tokens),
        Counter("vllm:prompt_tokens", stats.num_prompt_tokens),
        Counter("vllm:generation_tokens", stats.num_generated_tokens),
    ]
    for reason in ("stop", "length", "abort", "error"):
        labels = {"finished_reason": reason}
        metrics.append(
            Counter("vllm:request_success", stats.num_finished.get(reason, 0), labels=labels)
        )
    if has_drafter:
        metrics += [
            Counter("vllm:spec_decode_num_drafts", stats.num_drafts),
            Counter("vllm:spec_decode_num_draft_tokens", stats.num_draft_tokens),
            Counter("vllm:spec_decode_num_accepted_tokens", stats.num_accepted_tokens),
            Vector("vllm:spec_decode_num_accepted_tokens_per_pos", stats.num_accepted_per_position),
        ]
    return metrics
