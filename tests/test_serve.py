"""`specjax serve` on a small model, over HTTP: what clients send, and what they get.

Requests and expectations follow vLLM's tests of its HTTP server, written anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import socket
import threading
import time
from typing import Any

import openai
import pytest

import specjax
from specjax import LLM, SamplingParams
from specjax.engine.request import CompletionOutput, RequestOutput
from specjax.errors import SpecJAXError
from specjax.serve import async_engine, protocol
from support import cli
from support import server as servers

GREEDY = {"temperature": 0, "ignore_eos": True}
COMPLETION = {"prompt": "hello world", "max_tokens": 12, **GREEDY}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, **GREEDY}
LONG = {**COMPLETION, "max_tokens": 300, "prompt": "or"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "model"
    return cli.write_model(path, max_position_embeddings=320)


@pytest.fixture(scope="module")
def llm(folder):
    """The models of all servers here: one at a time uses them."""
    llm = LLM(
        folder,
        speculative_model="ngram",
        num_speculative_tokens=2,
        max_num_seqs=2,
        seconds_per_call=0.02,
    )
    llm.engine.warm_up(processors=False)
    return llm


@pytest.fixture(scope="module")
def server(llm):
    with servers.running(lambda: llm, shows_cached_tokens=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def post(client, path: str, body: dict, status: int = 200) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def generated(folder, prompt, max_new_tokens=12, **options) -> str:
    """The text of plain decoding."""
    target = specjax.load(folder)
    options = {"eos_ids": [], **options}
    result = specjax.generate(target, "none", [prompt], max_new_tokens=max_new_tokens, **options)
    return result.completions[0].text


# --- Routes ---------------------------------------------------------------------------------------


def test_what_the_server_says_of_itself(client):
    assert client.get("/health").status_code == 200
    assert client.get("/version").json() == {"version": specjax.__version__}
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [card["id"] for card in models["data"]] == ["tiny", "alias"]
    assert models["data"][1]["root"] == "tiny"
    assert models["data"][0]["max_model_len"] == 320
    assert client.get("/v1/models/alias").json()["object"] == "model"
    paths = client.get("/openapi.json").json()["paths"]
    assert {COMPLETIONS, CHATS, "/v1/models", "/tokenize", "/detokenize", "/health"} <= paths.keys()
    shape = paths[COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert shape["$ref"].endswith("CompletionRequest")


def test_the_page_needs_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|//cdn|@import|url\(", page.text)
    assert "return_speculation" in page.text


def test_a_completion(client, folder):
    answer = post(client, COMPLETIONS, COMPLETION)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    assert choice["text"] == generated(folder, "hello world")
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 12)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert post(client, COMPLETIONS, {**COMPLETION, "model": "alias"})["choices"] == [choice]


def test_a_chat(client, folder):
    answer = post(client, CHATS, {**CHAT, "max_completion_tokens": 5})
    (choice,) = answer["choices"]
    expected = generated(folder, CHAT["messages"], 5)
    assert choice["message"] == {"role": "assistant", "content": expected}
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 5, "max_completion_tokens comes first"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert post(client, CHATS, {**CHAT, "messages": parts})["choices"][0]["message"][
        "content"
    ] == generated(folder, CHAT["messages"])


def test_a_chat_goes_on_to_the_end_of_the_context(client):
    body = {"messages": CHAT["messages"], **GREEDY}
    usage = post(client, CHATS, body)["usage"]
    assert usage["total_tokens"] == 320
    assert post(client, CHATS, {**body, "max_tokens": 10**6})["usage"] == {
        **usage,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_last_message_is_continued(client, folder):
    messages = [*CHAT["messages"], {"role": "assistant", "content": "hello wor"}]
    body = {
        **CHAT,
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    answer = post(client, CHATS, body)
    target = specjax.load(folder)
    text = target.tokenizer.render_chat(messages, False, continue_final_message=True)
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    assert answer["choices"][0]["message"]["content"] == generated(folder, ids)


def test_choices_are_ordered_prompt_by_prompt(client):
    prompts = ["hello", "or world"]
    body = {**COMPLETION, "temperature": 1, "seed": 3, "n": 2}
    answer = post(client, COMPLETIONS, {**body, "prompt": prompts})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 4
    for i, prompt in enumerate(prompts):
        alone = post(client, COMPLETIONS, {**body, "prompt": prompt})
        assert [choice["text"] for choice in alone["choices"]] == texts[2 * i : 2 * i + 2]
    assert answer["usage"]["completion_tokens"] == 48
    chunks = servers.events(client, COMPLETIONS, {**body, "prompt": prompts})
    assert joined(chunks, "text") == texts


def test_prompts_are_texts_or_ids(client, llm):
    ids = llm.get_tokenizer().encode("hello world")
    texts = [
        post(client, COMPLETIONS, {**COMPLETION, "prompt": prompt})["choices"][0]["text"]
        for prompt in ("hello world", ["hello world"], ids, [ids], [7, *ids])
    ]
    assert len(set(texts[:4])) == 1
    body = {**COMPLETION, "prompt": [7, *ids], "truncate_prompt_tokens": len(ids)}
    answer = post(client, COMPLETIONS, body)
    assert answer["choices"][0]["text"] == texts[0]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    plain = post(client, COMPLETIONS, {**COMPLETION, "add_special_tokens": False})
    assert plain["usage"]["prompt_tokens"] == len(ids) - 1, "no BOS"


def test_an_echo(client, llm):
    text = post(client, COMPLETIONS, COMPLETION)["choices"][0]["text"]
    echo = {**COMPLETION, "echo": True}
    assert post(client, COMPLETIONS, echo)["choices"][0]["text"] == "hello world" + text
    ids = llm.get_tokenizer().encode("hello world")
    of_ids = post(client, COMPLETIONS, {**echo, "prompt": ids})["choices"][0]
    assert of_ids["text"] == "<s>hello world" + text
    nothing = post(client, COMPLETIONS, {**echo, "max_tokens": 0})
    assert nothing["choices"][0]["text"] == "hello world"
    assert nothing["choices"][0]["finish_reason"] == "length"
    assert nothing["usage"]["completion_tokens"] == 0
    for body in (echo, {**echo, "max_tokens": 0}):
        expected = post(client, COMPLETIONS, body)["choices"][0]["text"]
        assert joined(servers.events(client, COMPLETIONS, body), "text") == [expected]


def test_stop_strings_and_ids(client, llm):
    text = post(client, COMPLETIONS, COMPLETION)["choices"][0]["text"]
    stop = text[4:6]
    body = {**COMPLETION, "stop": [stop, "never"]}
    (choice,) = post(client, COMPLETIONS, body)["choices"]
    cut = text[: text.index(stop)]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    chunks = servers.events(client, COMPLETIONS, body)
    assert joined(chunks, "text") == [cut], "what might begin a stop string is held back"
    assert chunks[-1]["choices"][0]["stop_reason"] == stop
    kept = post(client, COMPLETIONS, {**body, "include_stop_str_in_output": True})
    assert kept["choices"][0]["text"] == cut + stop
    stop_id = post(client, COMPLETIONS, {**COMPLETION, "return_token_ids": True})["choices"][0][
        "token_ids"
    ][2]
    (choice,) = post(client, COMPLETIONS, {**COMPLETION, "stop_token_ids": [stop_id]})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_id)


def test_parameters_reach_the_engine(client, llm):
    (token,) = llm.get_tokenizer().encode("w", add_special_tokens=False)
    for body in ({"logit_bias": {str(token): 100}}, {"allowed_token_ids": [token]}):
        assert post(client, COMPLETIONS, {**COMPLETION, **body})["choices"][0]["text"] == "w" * 12
    text = post(client, COMPLETIONS, {**COMPLETION, "bad_words": ["w"]})["choices"][0]["text"]
    assert "w" not in text


def test_tokens_and_texts(client, llm):
    ids = llm.get_tokenizer().encode("hello world")
    answer = post(client, "/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert answer == {
        "count": len(ids),
        "max_model_len": 320,
        "tokens": ids,
        "token_strs": ["<s>", "hello", " w", "or", "l", "d"],
    }
    bare = post(client, "/tokenize", {"prompt": "hello world", "add_special_tokens": False})
    assert bare["tokens"] == ids[1:]
    assert post(client, "/detokenize", {"tokens": ids}) == {"prompt": "<s>hello world"}
    chat = post(client, "/tokenize", {"messages": CHAT["messages"]})
    assert chat["count"] == post(client, CHATS, CHAT)["usage"]["prompt_tokens"]
    assert post(client, "/tokenize", {"prompt": ""})["tokens"] == []


# --- Streams --------------------------------------------------------------------------------------


def joined(chunks: list[dict], field: str) -> list[str]:
    """The text of each choice of a stream; `field` is "text" or "delta"."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if field == "text" else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return [texts[index] for index in sorted(texts)]


def test_a_stream_of_a_completion(client):
    body = {**LONG, "n": 2, "temperature": 1, "seed": 1}
    answer = post(client, COMPLETIONS, body)
    chunks = servers.events(client, COMPLETIONS, body)
    assert len(chunks) > 4
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert joined(chunks, "text") == [choice["text"] for choice in answer["choices"]]
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["text"], "the last chunk has text"
    assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_of_a_chat(client):
    answer = post(client, CHATS, CHAT)
    chunks = servers.events(client, CHATS, {**CHAT, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["choices"][0]["finish_reason"] is None
    *parts, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert joined(parts, "delta") == [answer["choices"][0]["message"]["content"]]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = servers.events(client, CHATS, {**CHAT, "max_tokens": 200, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-2:] == [200, 200]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {4}
    assert len(set(counts)) > 3


def test_pieces_tell_accepted_drafts(client):
    body = {**LONG, "return_speculation": True}
    whole = post(client, COMPLETIONS, body)["choices"][0]
    chunks = servers.events(client, COMPLETIONS, body)
    streamed = [piece for chunk in chunks for piece in chunk["choices"][0]["speculation"]["pieces"]]
    for pieces in (whole["speculation"]["pieces"], streamed):
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
    counts = chunks[-1]["choices"][0]["speculation"]
    assert counts | {"pieces": []} == whole["speculation"] | {"pieces": []}
    assert counts["num_accepted_tokens"] + counts["num_rounds"] == 300
    assert 0 < counts["num_accepted_tokens"] <= counts["num_draft_tokens"]
    drafts = [piece for piece in streamed if piece["is_draft"]]
    assert sum(len(piece["text"]) for piece in drafts) <= counts["num_accepted_tokens"]
    assert len(drafts) > 3


# --- Log-probabilities ----------------------------------------------------------------------------


def test_log_probabilities_of_a_completion(client, llm):
    body = {**COMPLETION, "prompt": "hello or", "logprobs": 2, "echo": True}
    (choice,) = post(client, COMPLETIONS, body)["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == "<s>" + choice["text"]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    offset = 0
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert start == offset
        offset += len(token)
    prompt = llm.get_tokenizer().encode("hello or")
    params = SamplingParams(
        temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=2, ignore_eos=True
    )
    (expected,) = reference(llm, prompt, params)
    entries = [*expected.prompt_logprobs[1:], *expected.outputs[0].logprobs]
    ids = [*prompt[1:], *expected.outputs[0].token_ids]
    assert found["token_logprobs"][1:] == pytest.approx(
        [entry[token_id].logprob for entry, token_id in zip(entries, ids, strict=True)], abs=1e-4
    )
    for entry, top in zip(entries, found["top_logprobs"][1:], strict=True):
        assert top == pytest.approx(
            {each.decoded_token: each.logprob for each in entry.values()}, abs=1e-4
        )
    chunks = servers.events(client, COMPLETIONS, body)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in found.items():
        together = [value for part in streamed for value in part[name]]
        if name == "token_logprobs":
            assert together[1:] == pytest.approx(values[1:], abs=1e-4)
        elif name != "top_logprobs":
            assert together == values


def reference(llm, prompt, params) -> list[RequestOutput]:
    """What an engine of its own gives."""
    other = LLM(llm.target.path, max_num_seqs=1)
    return other.generate({"prompt_token_ids": prompt}, params)


def test_log_probabilities_of_a_chat(client):
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    (choice,) = post(client, CHATS, body)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    for each in content:
        assert len(each["top_logprobs"]) == 2
        assert each["top_logprobs"][0]["token"] == each["token"], "greedy"
        assert each["logprob"] == each["top_logprobs"][0]["logprob"]
        assert each["bytes"] == list(each["token"].encode())
    (choice,) = post(client, CHATS, {**body, "top_logprobs": 0})["choices"]
    assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [[]] * 12
    streamed = servers.events(client, CHATS, body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    tokens = [each["token"] for part in parts if part for each in part["content"]]
    assert tokens == [each["token"] for each in content]


def test_ids_instead_of_tokens(client, llm):
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0}
    (choice,) = post(client, COMPLETIONS, {**COMPLETION, **extra})["choices"]
    assert choice["prompt_token_ids"] == llm.get_tokenizer().encode("hello world")
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert llm.get_tokenizer().decode(choice["token_ids"]) == choice["text"]


def test_log_probabilities_of_a_prompt(client):
    answer = post(client, COMPLETIONS, {**COMPLETION, "prompt_logprobs": 1})
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(others) == 5
    assert all({"logprob", "rank", "decoded_token"} == entry.keys() for entry in others[0].values())
    assert len(post(client, CHATS, {**CHAT, "prompt_logprobs": 0})["prompt_logprobs"]) == 4


# --- What is refused ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Refused:
    """A request, and the error that it gets.

    Attributes:
      change: fields that replace those of a good request; None removes a field.
      words: parts of the message.
      param: of the error.
      path: of the route.
      status: of the answer.
      kind: type of the error.
    """

    change: dict[str, Any]
    words: tuple[str, ...] = ()
    param: str | None = None
    path: str = COMPLETIONS
    status: int = 400
    kind: str = "BadRequestError"


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
REFUSED = {
    "no prompt": Refused({"prompt": None}, ("prompt",), "prompt"),
    "empty prompt": Refused({"prompt": ""}, ("empty",), "prompt"),
    "empty prompts": Refused({"prompt": []}, ("prompt",), "prompt"),
    "one empty prompt": Refused({"prompt": ["a", ""]}, ("empty",), "prompt"),
    "no ids": Refused({"prompt": [[]]}, ("empty",), "prompt"),
    "unknown id": Refused({"prompt": [100000]}, ("100000", "ids range"), "prompt"),
    "huge id": Refused({"prompt": [10**30]}, (), "prompt"),
    "negative id": Refused({"prompt": [-1]}, ("-1",), "prompt"),
    "mixed prompts": Refused({"prompt": ["a", [1]]}, (), "prompt"),
    "a number": Refused({"prompt": 5}, (), "prompt"),
    "too long": Refused({"prompt": "a" * 400}, ("401 tokens", "319"), "prompt"),
    "many prompts": Refused({"prompt": ["a"] * 1025}, ("1024",), "prompt"),
    "beyond the bound": Refused({"prompt": ["a"] * 67}, ("at most 66", "67")),
    "temperature": Refused({"temperature": 2.5}, ("[0, 2]", "2.5"), "temperature"),
    "infinite": Refused({"temperature": 1e999}, ("[0, 2]",), "temperature"),
    "a text for a number": Refused({"temperature": "hot"}, ("hot",), "temperature"),
    "top_p": Refused({"top_p": 0}, ("(0, 1]",), "top_p"),
    "top_k": Refused({"top_k": -2}, (), "top_k"),
    "min_p": Refused({"min_p": 1.5}, (), "min_p"),
    "penalty": Refused({"presence_penalty": 3}, (), "presence_penalty"),
    "max_tokens": Refused({"max_tokens": 0}, ("at least 1",), "max_tokens"),
    "negative max_tokens": Refused({"max_tokens": -1, "echo": True}, (), "max_tokens"),
    "min_tokens": Refused({"min_tokens": 20}, ("max_tokens",), "min_tokens"),
    "seed": Refused({"seed": 2**63}, (), "seed"),
    "n": Refused({"n": 129, "temperature": 1}, ("128",), "n"),
    "huge n": Refused({"n": 10**25, "temperature": 1}, (), "n"),
    "no n": Refused({"n": 0}, (), "n"),
    "greedy n": Refused({"n": 2}, (), "n"),
    "stop": Refused({"stop": ["a"] * 5}, ("4",), "stop"),
    "empty stop": Refused({"stop": [""]}, ("empty",), "stop"),
    "stop ids": Refused({"stop_token_ids": [100000]}, ("100000",), "stop_token_ids"),
    "logit_bias": Refused({"logit_bias": {"a": 1}}, (), "logit_bias"),
    "unknown bias": Refused({"logit_bias": {"100000": 1}}, ("100000",), "logit_bias"),
    "allowed ids": Refused({"allowed_token_ids": []}, (), "allowed_token_ids"),
    "bad words": Refused({"bad_words": ["a"] * 129}, ("128",), "bad_words"),
    "logprobs": Refused({"logprobs": 21}, ("20",), "logprobs"),
    "negative logprobs": Refused({"logprobs": -1}, (), "logprobs"),
    "prompt_logprobs": Refused({"prompt_logprobs": 21}, (), "prompt_logprobs"),
    "truncation": Refused({"truncate_prompt_tokens": 0}, (), "truncate_prompt_tokens"),
    "options without stream": Refused({"stream_options": {"include_usage": True}}, ("stream",)),
    "best_of": Refused({"best_of": 2}, ("best_of",), "best_of"),
    "suffix": Refused({"suffix": "x"}, (), "suffix"),
    "beams": Refused({"use_beam_search": True}, (), "use_beam_search"),
    "guided": Refused({"guided_json": {"type": "object"}}, (), "guided_json"),
    "structured": Refused({"structured_outputs": {"regex": "a"}}, (), "structured_outputs"),
    "format": Refused({"response_format": {"type": "json_object"}}, (), "response_format"),
    "spaces": Refused(
        {"spaces_between_special_tokens": False}, (), "spaces_between_special_tokens"
    ),
    "model": Refused({"model": "gpt"}, ("gpt",), status=404, kind="NotFoundError"),
    "no messages": Refused({"messages": []}, (), "messages", CHATS),
    "null messages": Refused({"messages": None}, (), "messages", CHATS),
    "messages": Refused({"messages": "hello"}, (), "messages", CHATS),
    "a text": Refused({"messages": ["hello"]}, (), "messages", CHATS),
    "no role": Refused({"messages": [{"content": "a"}]}, ("role",), "messages", CHATS),
    "unknown role": Refused(
        {"messages": [{"role": "x", "content": "a"}]}, ("no role x",), "messages", CHATS
    ),
    "image": Refused(
        {"messages": [{"role": "user", "content": [IMAGE]}]}, ("image_url",), "messages", CHATS
    ),
    "tools": Refused({"tools": [{"type": "function"}]}, ("tools",), "tools", CHATS),
    "empty tools": Refused({"tools": []}, ("tools",), "tools", CHATS),
    "tool_choice": Refused({"tool_choice": "auto"}, (), "tool_choice", CHATS),
    "top_logprobs alone": Refused({"top_logprobs": 1}, ("logprobs=true",), "top_logprobs", CHATS),
    "top_logprobs": Refused({"top_logprobs": 21, "logprobs": True}, ("20",), "top_logprobs", CHATS),
    "template": Refused({"chat_template": "{{ 1 }}"}, (), "chat_template", CHATS),
    "reserved variable": Refused(
        {"chat_template_kwargs": {"messages": []}}, ("messages",), "messages", CHATS
    ),
    "two ends": Refused({"continue_final_message": True}, (), "messages", CHATS),
    "echo of a chat": Refused({"echo": True}, (), "echo", CHATS),
    "unknown tokens": Refused({"tokens": [10**7]}, (), None, "/detokenize"),
    "nothing to tokenize": Refused({}, ("prompt", "messages"), None, "/tokenize"),
    "both to tokenize": Refused(
        {"prompt": "a", "messages": CHAT["messages"]}, (), None, "/tokenize"
    ),
}
GOOD = {COMPLETIONS: COMPLETION, CHATS: CHAT, "/tokenize": {}, "/detokenize": {}}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_it_refuses(client, case):
    body = {**GOOD[case.path], **case.change}
    body = {name: value for name, value in body.items() if value is not None}
    content = json.dumps(body)
    response = client.post(case.path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == case.status, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (case.kind, case.status)
    assert error["param"] == case.param, error
    for word in case.words:
        assert word in error["message"]
    assert len(response.content) < 4000
    if case.path in (COMPLETIONS, CHATS):
        content = json.dumps({**body, "stream": True})
        streamed = client.post(
            case.path, content=content, headers={"Content-Type": "application/json"}
        )
        if "stream_options" not in body:
            assert streamed.status_code == case.status, "not a stream that begins with an error"


ACCEPTED = {
    "nulls": dict.fromkeys((*protocol.SAMPLING_FIELDS, "stream_options", "user", "tools")),
    "neutral": {"best_of": 1, "suffix": "", "response_format": {"type": "text"}, "priority": 0},
    "unknown": {"foo": {"bar": 1}, "x" * 1000: 1},
    "NUL": {"prompt": "a\0b"},
    "extras": {"user": "me", "request_id": "mine", "cache_salt": "s", "min_tokens": 3},
    "special tokens": {"prompt": "<s></s><|user|>"},
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_it_accepts(client, change):
    answer = post(client, COMPLETIONS, {**COMPLETION, **change})
    if "request_id" in change:
        assert answer["id"] == "cmpl-mine"


def test_tools_that_are_not_used_are_accepted(client):
    post(client, CHATS, {**CHAT, "tools": [{"type": "function"}], "tool_choice": "none"})


BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "null": b"null",
    "list": b"[]",
    "text": b'"prompt"',
    "surrogate": b'{"prompt": "\\ud800"}',
    "surrogate in a model": b'{"prompt": "a", "tools": "\\ud800"}',
    "huge integer": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "large integer": b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "10 MB": b'{"prompt": "' + b"a" * 10_000_000 + b'"}',
    "many wrong ids": b'{"prompt": [' + b'"a",1.5,' * 500_000 + b"1]}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_broken_body_is_refused(client, body):
    response = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in ((404, 400) if b"model" in body else (400,)), response.text
    assert response.json()["error"]["message"]
    assert len(response.content) < 4000


def test_other_content_types_are_refused(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        content = b'{"prompt": "a"}'
        response = client.post(COMPLETIONS, content=content, headers={"Content-Type": kind})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "BadRequestError"


def test_a_body_in_pieces_is_counted(client):
    def pieces():
        for _ in range(10):
            yield b" " * 2**20

    headers = {"Content-Type": "application/json"}
    response = client.post(COMPLETIONS, content=pieces(), headers=headers)
    assert response.status_code == 400
    assert "8388608" in response.json()["error"]["message"]


def test_unknown_routes_and_methods(client):
    for response, status in ((client.get("/v2"), 404), (client.get(COMPLETIONS), 405)):
        assert response.status_code == status
        assert response.json()["error"]["code"] == status


def test_errors_do_not_tell_where_the_model_lies(client, llm, monkeypatch):
    def fail(*arguments, **options):
        raise SpecJAXError(f"{llm.target.path}/chat_template.jinja: the chat template failed")

    monkeypatch.setattr(type(llm.target.tokenizer), "render_chat", fail)
    message = post(client, CHATS, CHAT, 400)["error"]["message"]
    assert str(llm.target.path) not in message
    assert "tiny/chat_template.jinja" in message


# --- OpenAI's client ------------------------------------------------------------------------------


def test_the_client_of_openai(server, client):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["tiny", "alias"]
        arguments = dict(model="tiny", temperature=0, max_tokens=12)
        extra = {"ignore_eos": True}
        whole = api.completions.create(prompt="hello world", **arguments, extra_body=extra)
        assert whole.choices[0].text == post(client, COMPLETIONS, COMPLETION)["choices"][0]["text"]
        parts = api.completions.create(
            prompt="hello world", stream=True, **arguments, extra_body=extra
        )
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        chat = dict(messages=CHAT["messages"], **arguments, extra_body=extra)
        answer = api.chat.completions.create(**chat, logprobs=True, top_logprobs=1)
        assert len(answer.choices[0].logprobs.content) == 12
        stream = api.chat.completions.create(
            **chat, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage == answer.usage
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(prompt="a", model="tiny", temperature=3)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            api.completions.create(prompt="a", model="other")


def test_the_client_of_openai_in_coroutines(server):
    async def text(api, n) -> str:
        stream = await api.chat.completions.create(
            model="tiny", messages=CHAT["messages"], temperature=0, max_tokens=n, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(parts)

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
            return await asyncio.gather(*(text(api, n) for n in range(20, 26)))

    texts = asyncio.run(run())
    assert all(longer.startswith(text) for text, longer in itertools.pairwise(texts))


# --- Metrics --------------------------------------------------------------------------------------


def metric(client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))


def test_metrics_count_what_was_done(client, server):
    servers.wait_until(lambda: metric(client, "num_requests_running") == 0)
    names = {
        "prompt_tokens_total": 2,
        "generation_tokens_total": 300,
        'request_success_total{engine="0",finished_reason="length"': 1,
        "request_generation_tokens_sum": 300,
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
        "request_time_per_output_token_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
    }
    before = {name: metric(client, name) for name in names}
    drafts = {name: metric(client, f"spec_decode_num_{name}") for name in ("drafts_total",)}
    gaps = metric(client, "inter_token_latency_seconds_count")
    chunks = servers.events(client, COMPLETIONS, {**LONG, "return_speculation": True})
    for name, more in names.items():
        assert metric(client, name) == before[name] + more, name
    assert metric(client, "inter_token_latency_seconds_count") > gaps
    assert metric(client, "spec_decode_num_drafts_total") > drafts["drafts_total"]
    accepted = metric(client, "spec_decode_num_accepted_tokens_total")
    by_position = metric(client, "spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted == by_position > 0
    assert chunks[-1]["choices"][0]["speculation"]["num_accepted_tokens"] <= accepted
    assert metric(client, "kv_cache_usage_perc") == 0


# --- Clients that leave, read slowly, or are too many ---------------------------------------------


def start(server, body: dict, path: str = COMPLETIONS) -> socket.socket:
    """A request whose answer nobody reads."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(server.server._socket.getsockname())
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def is_idle(server) -> bool:
    engine = server.server.engine
    return engine.num_unfinished == 0 and not engine.llm.engine.has_unfinished


def test_clients_that_leave_free_their_rows(server, client):
    engine = server.server.engine
    aborted = 'request_success_total{engine="0",finished_reason="abort"'
    before = metric(client, aborted)
    for wave in range(4):
        body = {**LONG, "stream": bool(wave % 2)}
        connections = [start(server, body) for _ in range(50)]
        servers.wait_until(lambda: engine.num_unfinished > 40)
        for connection in connections:
            connection.close()
        servers.wait_until(lambda: engine.num_unfinished == 0)
    began = time.monotonic()
    post(client, COMPLETIONS, COMPLETION)
    assert time.monotonic() - began < 5
    servers.wait_until(lambda: is_idle(server), 5)
    assert metric(client, aborted) - before > 100
    assert metric(client, "kv_cache_usage_perc") == 0


def test_a_reader_that_sleeps_holds_nobody_up(server, client):
    connections = [start(server, {**LONG, "stream": True}) for _ in range(4)]
    try:
        post(client, COMPLETIONS, COMPLETION)
        servers.wait_until(lambda: is_idle(server))
    finally:
        for connection in connections:
            connection.close()


def test_a_full_queue_answers_429(llm, gate):
    with servers.running(lambda: llm, max_queue=2) as server, server.client() as client:
        gate.clear()
        connections = [start(server, LONG) for _ in range(4)]  # two have rows
        servers.wait_until(lambda: server.server.engine.num_unfinished == 4)
        response = client.post(COMPLETIONS, json=COMPLETION)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "RateLimitError"
        assert client.get("/health").status_code == 200, "it never waits for the engine"
        assert metric(client, 'admission_rejections_total{engine="0"') == 1
        gate.set()
        for connection in connections:
            connection.close()
        servers.wait_until(lambda: is_idle(server))
        post(client, COMPLETIONS, COMPLETION)


@pytest.fixture
def gate(llm, monkeypatch):
    """Steps of the engine wait while it is cleared, and are slow."""
    gate, step = threading.Event(), llm.engine.step

    def wait():
        gate.wait(30)
        time.sleep(0.005)
        return step()

    monkeypatch.setattr(llm.engine, "step", wait)
    gate.set()
    yield gate
    gate.set()


# --- Keys -----------------------------------------------------------------------------------------


def test_keys(llm):
    with servers.running(lambda: llm, api_keys=("sésame", "other")) as server:
        with server.client() as client:
            paths = ("/v1/models", "/metrics", "/version", "/openapi.json", "/nope", "/docs")
            bad = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic other"})
            for path in paths:
                for headers in bad:
                    response = client.get(path, headers=headers)
                    assert response.status_code == 401, path
                    assert response.json()["error"]["type"] == "AuthenticationError"
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 401
            assert client.get("/health").status_code == 200
            assert client.get("/").status_code == 200, "the page asks for the key"
            for key in ("sésame", "other"):
                headers = {b"Authorization": f"Bearer {key}".encode()}
                assert client.get("/v1/models", headers=headers).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="other") as api:
            answer = api.completions.create(model="tiny", prompt="a", max_tokens=2)
            assert answer.usage.completion_tokens == 2
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as api,
            pytest.raises(openai.AuthenticationError),
        ):
            api.models.list()


# --- Beginning and end ----------------------------------------------------------------------------


def test_it_answers_503_while_it_loads(llm):
    may_load = threading.Event()

    def load():
        may_load.wait(30)
        return llm

    with servers.running(load, waits=False) as server, server.client() as client:
        for response in (
            client.get("/health"),
            client.get("/v1/models"),
            client.post(COMPLETIONS, json=COMPLETION),
            client.post(CHATS, json=CHAT),
            client.post("/tokenize", json={"prompt": "a"}),
        ):
            assert response.status_code == 503
            assert "loading" in response.json()["error"]["message"]
        assert client.get("/metrics").status_code == 200
        may_load.set()
        servers.wait_until(lambda: client.get("/health").status_code == 200)
        post(client, COMPLETIONS, COMPLETION)


def test_models_that_cannot_be_loaded_end_it(tmp_path):
    with servers.running(lambda: LLM(tmp_path / "nothing"), waits=False) as server:
        server.wait()
    assert isinstance(server.exit_code, SpecJAXError)
    assert "nothing" in str(server.exit_code)


def test_it_drains(llm, gate):
    with servers.running(lambda: llm) as server, server.client() as client:
        result = {}

        def read():
            with server.client() as other:
                result["chunks"] = servers.events(other, COMPLETIONS, LONG)

        reader = threading.Thread(target=read)
        reader.start()
        servers.wait_until(lambda: server.server.engine.num_unfinished)
        gate.clear()
        server.end()
        servers.wait_until(lambda: client.get("/health").status_code == 503)
        response = client.post(COMPLETIONS, json=COMPLETION)
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        gate.set()
        reader.join(30)
        assert result["chunks"][-1]["choices"][0]["finish_reason"] == "length"
        began = time.monotonic()
        server.wait(20)
        assert time.monotonic() - began < 10, "it ends when it is empty"
    assert server.exit_code == 0


def test_it_drains_no_longer_than_it_should(llm, gate):
    with servers.running(lambda: llm, shutdown_seconds=0.2) as server:
        gate.clear()
        body = {**LONG, "stream": True}
        with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
            pass_one_step(gate)
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.end()
            rest = [line for line in lines if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == 503
        assert rest[-1] == "data: [DONE]"
        gate.set()
        server.wait(30)
    assert server.exit_code == 0


def pass_one_step(gate) -> None:
    gate.set()
    time.sleep(0.1)
    gate.clear()


def test_an_engine_that_dies_ends_everything(folder, monkeypatch, caplog):
    llm = LLM(folder, max_num_seqs=2, seconds_per_call=0.0)
    step, steps, may_die = llm.engine.step, [], threading.Event()

    def dying():
        steps.append(1)
        if len(steps) > 3:
            may_die.wait(30)
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(llm.engine, "step", dying)
    with servers.running(lambda: llm) as server, server.client() as client:
        answers = []

        def ask():
            with server.client() as other:
                answers.append(other.post(COMPLETIONS, json=LONG))

        with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            assert response.status_code == 200
            thread = threading.Thread(target=ask)
            thread.start()
            servers.wait_until(lambda: server.server.engine.num_unfinished == 2)
            may_die.set()
            lines = [line for line in response.iter_lines() if line]
        thread.join(30)
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
        assert lines[-1] == "data: [DONE]"
        assert answers[0].status_code == 503
        assert "memory" not in answers[0].text, "reasons are for the log"
        server.wait(20)
    assert server.exit_code == 1
    assert "out of memory" in caplog.text


def test_a_port_in_use_is_an_error(server):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(SpecJAXError, match=f"port {port}"):
        servers.Server(lambda: None, servers.Settings(("x",)), servers.Options(port=port))


def test_defaults_are_those_of_the_model(folder, llm, monkeypatch):
    monkeypatch.setattr(llm, "generation_config", {"temperature": 0.0, "max_tokens": 7})
    with servers.running(lambda: llm) as server, server.client() as client:
        texts = set()
        for _ in range(3):
            answer = post(client, COMPLETIONS, {"prompt": "hello world", "ignore_eos": True})
            texts.add(answer["choices"][0]["text"])
            assert answer["usage"]["completion_tokens"] == 7
        assert texts == {generated(folder, "hello world", 7)}
        body = {"prompt": "a", "temperature": 1, "max_tokens": 9, "ignore_eos": True}
        assert post(client, COMPLETIONS, body)["usage"]["completion_tokens"] == 9


# --- Streams inside -------------------------------------------------------------------------------


def test_what_is_not_read_is_merged():
    """A stream without a reader keeps one output for each prompt."""

    def output(text, ids, finish_reason=None):
        part = CompletionOutput(
            0, text, ids, finish_reason=finish_reason, accepted=(1, 1), emitted=(2, 2)
        )
        return RequestOutput("id", None, (1,), None, (part,), finish_reason is not None)

    async def run():
        engine = async_engine.AsyncEngine(lambda: None)
        engine.state, engine._capacity = async_engine.State.READY, 4
        stream = engine.open(2)
        stream._ids, stream._unfinished = ["a", "b"], {0, 1}
        stream.put(0, output("x", (1, 2)))
        stream.put(1, output("y", (5,), "stop"))
        stream.put(0, output("z", (3, 4)))
        assert engine.num_unfinished == 2
        stream.put(0, output("", (), "length"))
        assert engine.num_unfinished == 0
        return [item async for item in stream]

    (first, merged), (second, other) = asyncio.run(run())
    assert (first, second) == (0, 1)
    (part,) = merged.outputs
    assert (part.text, part.token_ids, part.finish_reason) == ("xz", (1, 2, 3, 4), "length")
    assert part.from_draft == [True, False, True, False]
    assert other.outputs[0].text == "y"
