"""`LLM` on small models: what people type, what comes back, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import re

import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax import LLM, SamplingParams
from specjax.engine import llm as llm_lib
from specjax.engine.request import RequestOutputKind
from specjax.errors import SpecJAXError
from support import folders

CONFIG = {"num_hidden_layers": 1, "num_key_value_heads": 4, "max_position_embeddings": 320}
PROMPTS = ["hello world hello", "world or"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=12)
CHAT = [{"role": "user", "content": "hello"}]
TARGET_NAME, DRAFT_NAME = (
    "meta-llama/Meta-Llama-3-70B-Instruct",
    "meta-llama/Meta-Llama-3-8B-Instruct",
)

# What people type, word for word; the models are small ones at these paths.
PROGRAM = """
from specjax import LLM, SamplingParams
llm = LLM(model="meta-llama/Meta-Llama-3-70B-Instruct", tensor_parallel_size=4,
          speculative_model="meta-llama/Meta-Llama-3-8B-Instruct", num_speculative_tokens=5)
for output in llm.generate(["Explain the mechanics of eBPF kernel maps."], SamplingParams(temperature=0.0, max_tokens=256)):
    print(output.outputs[0].text)
"""
PROGRAM_OF_TODAY = PROGRAM.replace(
    """speculative_model="meta-llama/Meta-Llama-3-8B-Instruct", num_speculative_tokens=5)""",
    """speculative_config={"model": "meta-llama/Meta-Llama-3-8B-Instruct",
                              "num_speculative_tokens": 5, "method": "draft_model"})""",
)


def write_model(folder: pathlib.Path, noise: float = 0.0, **config) -> pathlib.Path:
    """A model that does not soon repeat itself; with noise, a draft model for it."""
    config = CONFIG | config
    arrays, other = (folders.tensors(config, seed=seed) for seed in (0, 1))
    arrays["model.layers.0.self_attn.o_proj.weight"] *= 0.02
    arrays["lm_head.weight"][[*range(4), *range(25, 288)]] *= 0.2  # most tokens are unlikely
    noisy = {name: array + np.float32(noise) * other[name] for name, array in arrays.items()}
    return folders.write_folder(folder, config, noisy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return write_model(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def plain_texts(folder) -> list[str]:
    """Greedy texts of `PROMPTS` without speculation."""
    target = specjax.load(folder)
    result = specjax.generate(target, "none", PROMPTS, max_new_tokens=24)
    return [completion.text for completion in result.completions]


def make_llm(folder, **options) -> LLM:
    defaults = dict(speculative_model="ngram", num_speculative_tokens=2, max_num_seqs=2)
    return LLM(str(folder), **{**defaults, **options})


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_llm(folder)


def texts(outputs) -> list[str]:
    return [output.text for output in outputs]


# --- What people type -----------------------------------------------------------------------------


@pytest.mark.parametrize("program", [PROGRAM, PROGRAM_OF_TODAY], ids=["vllm", "vllm of today"])
def test_what_people_type(tmp_path, monkeypatch, capsys, program):
    assert program.count(DRAFT_NAME) == 1
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / TARGET_NAME)
    write_model(tmp_path / DRAFT_NAME, noise=0.02)
    names = {}
    exec(program, names)  # as a file would be run
    prompt = "Explain the mechanics of eBPF kernel maps."
    target = specjax.load(TARGET_NAME)
    plain = specjax.generate(target, "none", [prompt], max_new_tokens=256).completions[0]
    assert capsys.readouterr().out == plain.text + "\n"
    completion = names["output"].outputs[0]
    assert completion.token_ids == plain.tokens
    assert len(completion.token_ids) == 256
    assert max(completion.drafted) == 5
    assert sum(completion.accepted) > 0
    engine = names["llm"].engine
    assert engine.target.mesh.size == 4
    assert engine.config.drafter.config.num_layers == 1


# --- Prompts and outputs --------------------------------------------------------------------------


def test_prompts_come_in_every_form_and_outputs_in_their_order(llm, plain_texts):
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(text) for text in PROMPTS]
    forms = {
        "texts": (PROMPTS, PROMPTS),
        "ids": (ids, [None, None]),
        "arrays": (list(map(np.array, ids)), [None, None]),
        "dicts": ([{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids[1]}], [PROMPTS[0], None]),
        "both": (({"prompt_token_ids": ids[0], "prompt": "x"}, PROMPTS[1]), ["x", PROMPTS[1]]),
    }
    for prompts, prompt_texts in forms.values():
        outputs = llm.generate(prompts, GREEDY)
        assert texts(outputs) == plain_texts
        assert [output.prompt for output in outputs] == prompt_texts
        assert [list(output.prompt_token_ids) for output in outputs] == ids
    for prompt in (PROMPTS[1], ids[1], {"prompt": PROMPTS[1]}):
        assert texts(llm.generate(prompt, GREEDY)) == plain_texts[1:]
    assert llm.generate([], GREEDY) == []


def test_an_output_has_what_vllm_has(llm):
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    assert output.finished
    assert output.text == output.outputs[0].text
    metrics = output.metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
    assert sorted([*times, metrics.finished_time]) == [*times, metrics.finished_time]
    (completion,) = output.outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (
        0,
        "length",
        None,
    )
    assert len(completion.token_ids) == sum(completion.emitted) == 24
    assert sum(completion.from_draft) == sum(completion.accepted) > 0


def test_each_prompt_can_have_parameters_of_its_own(llm, plain_texts):
    params = [dataclasses.replace(GREEDY, max_tokens=3), GREEDY]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 24]
    assert plain_texts[0].startswith(outputs[0].text)
    assert outputs[1].text == plain_texts[1]


def test_a_stop_string_cuts_text_and_tokens(llm, plain_texts):
    stop = plain_texts[0][5:8]
    start = plain_texts[0].index(stop)
    params = dataclasses.replace(GREEDY, stop=[stop], output_kind=RequestOutputKind.DELTA)
    (output,) = llm.generate(PROMPTS[0], params)
    (completion,) = output.outputs
    assert completion.text == plain_texts[0][:start], "the whole text, whatever output_kind says"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    kept = llm.get_tokenizer().decode(completion.token_ids)
    assert kept.endswith(stop)
    assert len(kept) == start + len(stop)
    assert len(completion.token_ids) == sum(completion.emitted)


def test_several_completions_have_consecutive_seeds(llm):
    params = dataclasses.replace(SAMPLED, n=3, seed=2**40)
    (output,) = llm.generate(PROMPTS[0], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    seeds = [completion.seed for completion in output.outputs]
    assert seeds == [2**40, 2**40 + 1, 2**40 + 2]
    of_one = [dataclasses.replace(SAMPLED, seed=seed) for seed in seeds]
    alone = llm.generate([PROMPTS[0]] * 3, of_one)
    assert [completion.text for completion in output.outputs] == texts(alone)
    assert len(set(texts(alone))) == 3


def test_the_seed_of_an_llm_repeats_its_texts(folder):
    runs = []
    for seed in (7, 7, 8, None, None):
        other = make_llm(folder, seed=seed)
        outputs = other.generate(PROMPTS, SAMPLED) + other.generate(PROMPTS, SAMPLED)
        runs.append(([output.outputs[0].seed for output in outputs], texts(outputs)))
    assert runs[0] == runs[1]
    assert len({tuple(seeds) for seeds, _ in runs}) == 4
    assert all(len(set(seeds)) == 4 for seeds, _ in runs), "every request has a seed of its own"


# --- Chats ----------------------------------------------------------------------------------------


def test_a_chat_is_rendered_by_the_template(llm):
    tokenizer = llm.get_tokenizer()
    (output,) = llm.chat(CHAT, GREEDY)
    assert output.prompt == tokenizer.render_chat(CHAT) == "<s><|user|>hello<|assistant|>"
    assert list(output.prompt_token_ids) == tokenizer.apply_chat_template(CHAT)
    two = llm.chat([CHAT, [*CHAT, *CHAT]], GREEDY)
    assert two[0].text == output.text == llm.generate([output.prompt_token_ids], GREEDY)[0].text
    assert two[1].prompt == "<s><|user|>hello<|user|>hello<|assistant|>"


def test_a_chat_can_continue_its_last_message(folder):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    other = make_llm(folder, chat_template=template + "{% if add_generation_prompt %}[{% endif %}")
    messages = [*CHAT, {"role": "assistant", "content": "hell"}]
    for options, prompt in (
        ({}, "[hello][hell]["),
        ({"add_generation_prompt": False}, "[hello][hell]"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "[hello][hell"),
    ):
        assert other.chat(messages, GREEDY, **options)[0].prompt == prompt


def test_a_chat_template_and_a_tokenizer_can_be_given(folder, tmp_path):
    template = "{{ messages[0].content }}{{ end }}"
    (tmp_path / "template.jinja").write_text(template)
    folders.write_tokenizer(tmp_path, bos_token="</s>")
    for source in (template, tmp_path / "template.jinja"):
        other = make_llm(folder, chat_template=source, tokenizer=tmp_path)
        assert other.get_tokenizer().special_tokens["bos_token"] == "</s>"
        (output,) = other.chat(CHAT, GREEDY, chat_template_kwargs={"end": "!"})
        assert output.prompt == "hello!"
        (output,) = other.chat(CHAT, GREEDY, False, chat_template="{{ messages[0].role }}")
        assert output.prompt == "user"


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (3, GREEDY, "prompts must be a prompt or a list of prompts, got 3"),
        ([3.5], GREEDY, "prompt 0 must be text, token ids or the messages of a chat, got 3.5"),
        (["a", ""], GREEDY, "prompt 1 is empty"),
        ([[1], []], GREEDY, "prompt 1 is empty"),
        ([[1, [2, 3]]], GREEDY, "prompt 0 must be text, token ids or the messages of a chat, got"),
        ([[288]], GREEDY, "prompt 0 has token id 288, but ids range from 0 to 266"),
        ([CHAT], GREEDY, "prompt 0 has messages; LLM.chat takes messages"),
        ([{"prompt": "a", "multi_modal_data": 1}], GREEDY, "prompt 0: unknown key 'multi_modal_d"),
        ([{"cache_salt": "a"}], GREEDY, "prompt 0 has neither prompt nor prompt_token_ids"),
        ([{"prompt": 3}], GREEDY, "prompt 0: prompt and cache_salt must be strings, got"),
        (["a", [5] * 320], GREEDY, "prompt 1: the prompt has 320 tokens, but at most 319 fit"),
        (["a"], [GREEDY] * 2, "sampling_params has 2 elements for 1 prompts"),
        (["a"], {"temperature": 0}, "sampling_params must be SamplingParams, or a list of them"),
        (["a"], [None], "prompt 0: expected SamplingParams, got None"),
        (["a"], SamplingParams(logprobs=3), "prompt 0: logprobs must be at most max_logprobs=2"),
        (
            ["a"],
            SamplingParams(stop_token_ids=[267]),
            "prompt 0: stop_token_ids has 267, but ids range from 0 to 266",
        ),
    ],
)
def test_a_prompt_that_cannot_be_used(llm, monkeypatch, prompts, params, message):
    monkeypatch.setattr(llm, "max_logprobs", 2)
    before = llm.engine.stats().num_generated_tokens
    with pytest.raises(SpecJAXError, match=re.escape(message)):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished, "prompts before it are not left in the engine"
    assert llm.engine.stats().num_generated_tokens == before


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("hello", {}, "messages must be a list of messages, got 'hello'"),
        ([CHAT, []], {}, "conversation 1 must be a list of at least one message, got []"),
        ([CHAT, ["a"]], {}, "conversation 1: message 1 must be an object with a 'role' and a"),
        ([{"role": "system", "content": "a"}], {}, "conversation 0: "),
        (CHAT, {"continue_final_message": True}, "conversation 0: add_generation_prompt and con"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "variable 'messages' cannot be set"),
        (CHAT, {"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be a dict, got ['a']"),
        (CHAT, {"use_tqdm": 1}, "use_tqdm must be True or False, got 1"),
    ],
)
def test_a_chat_that_cannot_be_used(llm, messages, options, message):
    with pytest.raises(SpecJAXError, match=re.escape(message)):
        llm.chat(messages, GREEDY, **options)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "LLM has no argument 'tensor_parallel'; did you mean 'tensor_pa"),
        ({"max_num_batched_tokens": 1}, "LLM has no argument 'max_num_batched_tokens'"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": True}, "block_size must be an integer of at least 1, got True"),
        ({"enforce_eager": True}, "LLM supports enforce_eager=False only, got True"),
        ({"quantization": "awq"}, "LLM supports quantization=None only, got 'awq'"),
        ({"pipeline_parallel_size": True}, "LLM supports pipeline_parallel_size=1 only, got True"),
        ({"seed": "1"}, "seed must be None or an integer, got '1'"),
        ({"max_logprobs": -1}, "max_logprobs must be an integer in [0, 20], got -1"),
        ({"disable_log_stats": 0}, "disable_log_stats must be True or False, got 0"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"kv_cache_gib": 1, "kv_cache_memory_bytes": 1}, "exclude each other; give one"),
        ({"kv_cache_memory_bytes": 0.5}, "kv_cache_memory_bytes must be a positive integer, got"),
        (
            {"speculative_config": {"method": "ngram"}},
            "speculative_model and speculative_config exclude each other; give one of them",
        ),
        ({"spec_method": "ngram"}, "speculative_model and spec_method exclude each other"),
        (
            {
                "speculative_model": None,
                "num_speculative_tokens": None,
                "speculative_config": {"method": "ngram", "rejection_sample_method": "standard"},
                "verify": "coupled",
            },
            "verify='coupled' contradicts rejection_sample_method, which means 'rejection'",
        ),
        ({"speculative_model": None}, "num_speculative_tokens is 2, but no speculative model is"),
        ({"num_speculative_tokens": 129}, "num_speculative_tokens must be at most 128, got 129"),
        ({"tensor_parallel_size": 16}, "tensor_parallel=16 requires 16 devices, got 8"),
        ({"dtype": "int8"}, "unsupported dtype 'int8'; choose from float32, float16, bfloat16"),
        ({"max_model_len": 321}, "max_model_len must be an integer from 2 to the model's context"),
        ({"revision": "v1"}, "revision 'v1' is for a repository of Hugging Face"),
        ({"tokenizer": "/no/such"}, "/no/such does not exist; give the folder of a model, or the"),
        ({"chat_template": "/no/such"}, "cannot read /no/such"),
        ({"model": "/no/such"}, "/no/such does not exist; give the folder of a model, or the"),
    ],
)
def test_an_argument_that_cannot_be_used(folder, options, message):
    options = {"model": folder} | options
    with pytest.raises(SpecJAXError, match=re.escape(message)):
        make_llm(options.pop("model"), **options)


def test_only_a_similar_name_is_suggested(folder):
    for name, suggestion in (("max_seq_len", "max_model_len"), ("max_num_batched_tokens", None)):
        with pytest.raises(SpecJAXError) as caught:
            make_llm(folder, **{name: 1})
        hint = f"; did you mean {suggestion!r}?" if suggestion else ""
        assert str(caught.value) == f"LLM has no argument {name!r}{hint}"


def test_an_argument_of_vllm_with_its_only_value_is_accepted(folder):
    make_llm(folder, **llm_lib.FIXED)


def test_without_a_tokenizer_prompts_are_ids(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    other = make_llm(tmp_path / "model")
    (output,) = other.generate([[5, 6, 7]], GREEDY)
    assert (output.text, len(output.outputs[0].token_ids)) == ("", 24)
    for call in (other.get_tokenizer, lambda: other.chat(CHAT)):
        with pytest.raises(SpecJAXError, match=r"needs a tokenizer, but .* has none"):
            call()
    with pytest.raises(SpecJAXError, match=r"prompt 0 is text, but .* has no tokenizer"):
        other.generate("hello")
    with pytest.raises(SpecJAXError, match=r"chat_template needs a tokenizer, but .* has none"):
        make_llm(tmp_path / "model", chat_template="{{ messages }}")


def test_logits_that_are_nan_are_an_error(tmp_path):
    path = write_model(tmp_path / "model")
    arrays = folders.read_folder(path)
    arrays["model.embed_tokens.weight"][100] = np.nan
    safetensors.numpy.save_file(arrays, path / "model.safetensors")
    other = make_llm(path)
    with pytest.raises(SpecJAXError, match=r"prompt 1: the target's logits at position 2 are NaN"):
        other.generate([[5], [6, 100]], GREEDY)
    assert not other.engine.has_unfinished
    assert other.generate([[5]], GREEDY)[0].finished


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch, plain_texts):
    step = llm.engine.step

    def interrupted():
        monkeypatch.setattr(llm.engine, "step", step)
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.has_unfinished
    assert texts(llm.generate(PROMPTS, GREEDY)) == plain_texts


# --- Defaults, metrics, progress ------------------------------------------------------------------


def test_default_parameters_are_those_of_the_model(tmp_path, llm):
    assert llm.get_default_sampling_params() == SamplingParams()
    path = write_model(tmp_path / "model") / "generation_config.json"
    fields = {"temperature": 0.6, "top_k": 50, "max_new_tokens": 5, "top_p": None, "do_sample": 1}
    path.write_text(json.dumps(fields))
    other = make_llm(tmp_path / "model")
    params = other.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_k=50, max_tokens=5)
    for (output,) in (other.generate("hello"), other.chat(CHAT)):
        assert len(output.outputs[0].token_ids) == 5
    path.write_text(json.dumps({"top_p": 2}))
    with pytest.raises(SpecJAXError, match=r"generation_config.json: top_p must be a number in"):
        make_llm(tmp_path / "model")


def test_metrics_have_the_names_and_counts_of_vllm(folder):
    other = make_llm(folder)
    prompts = ["hello " * 80, *PROMPTS]
    outputs = other.generate(prompts, GREEDY) + other.generate(prompts[0], GREEDY)
    completions = [output.outputs[0] for output in outputs]
    metrics = {}
    for metric in other.get_metrics():
        key = (metric.name, *metric.labels.values())
        value = metric.values if isinstance(metric, llm_lib.Vector) else metric.value
        metrics[":".join(key).removeprefix("vllm:")] = value
    rounds = [n for completion in completions for n in completion.accepted]
    drafted = [n for completion in completions for n in completion.drafted]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert metrics == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.0,
        "num_preemptions": 0,
        "prefix_cache_queries": num_prompt_tokens - 4,  # the pending token needs no lookup
        "prefix_cache_hits": outputs[-1].num_cached_tokens,
        "prompt_tokens": num_prompt_tokens,
        "generation_tokens": 4 * 24,
        "request_success:stop": 0,
        "request_success:length": 4,
        "request_success:abort": 0,
        "request_success:error": 0,
        "spec_decode_num_drafts": sum(n > 0 for n in drafted),
        "spec_decode_num_draft_tokens": sum(drafted),
        "spec_decode_num_accepted_tokens": sum(rounds),
        "spec_decode_num_accepted_tokens_per_pos": [sum(n > i for n in rounds) for i in (0, 1)],
    }
    assert outputs[-1].num_cached_tokens >= 64
    assert other.reset_prefix_cache()
    assert other.generate(prompts[0], GREEDY)[0].num_cached_tokens == 0
    plain = make_llm(folder, speculative_model=None, num_speculative_tokens=None)
    names = {metric.name for metric in plain.get_metrics()}
    assert not any("spec_decode" in name for name in names)


def test_prompts_with_another_salt_share_no_pages(llm):
    ids = [9] * 130

    def cached(salt):
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        return llm.generate([prompt], GREEDY)[0].num_cached_tokens

    assert [cached(salt) for salt in ("a", "b", "a")] == [0, 0, 128]


def test_progress_is_shown_on_a_terminal(llm, monkeypatch, capsys):
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("TERM", "xterm")
    llm.generate(PROMPTS, GREEDY, False)
    assert capsys.readouterr() == ("", "")
    llm.generate(PROMPTS, GREEDY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err)
    assert "tokens/s" in err


def test_speed_is_logged_on_request(folder, caplog):
    with caplog.at_level(logging.INFO, logger="specjax"):
        make_llm(folder).generate(PROMPTS, GREEDY)
        assert not caplog.records
        make_llm(folder, disable_log_stats=False).generate(PROMPTS, GREEDY)
    (record,) = caplog.records
    assert re.fullmatch(r"[\d.]+ tokens/s, \d+% of \d+ drafts accepted", record.getMessage())


def test_options_reach_the_engine(folder, tmp_path):
    engine = make_llm(
        folder,
        max_num_seqs=3,
        max_model_len=100,
        block_size=16,
        kv_cache_memory_bytes=2**20,
        enable_prefix_caching=False,
        verify="coupled",
        dtype="half",
        implementation="xla",
        speculative_model=None,
        num_speculative_tokens=None,
        speculative_config={"method": "ngram", "prompt_lookup_max": 7, "max_n": 7},
    ).engine
    assert (engine.num_rows, engine.max_model_len) == (3, 100)
    runtime = engine.config.runtime
    assert (runtime.page_size, runtime.implementation, runtime.dtype) == (16, "xla", np.float16)
    bytes_per_page = 2 * 2 * 16 * 4 * 8  # keys and values in float16 of 16 positions
    assert engine.num_pages == min(2**20 // bytes_per_page, 4 * 3 * 7)
    assert engine.config.verify == "coupled"
    assert (engine.config.drafter.max_n, engine.config.num_tokens) == (7, 7)
    pool = engine._scheduler.replicas[0].pool
    assert not pool.enable_prefix_caching


def test_spec_arguments_are_those_of_a_config(folder):
    options = dict(speculative_model=None, num_speculative_tokens=None)
    engine = make_llm(folder, spec_method="ngram", spec_tokens=4, **options).engine
    assert engine.config.num_tokens == 4
