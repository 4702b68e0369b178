"""The tokenizer: encoding, chat templates, and text without incomplete characters."""

import dataclasses
import json
import random

import pytest
from tokenizers import pre_tokenizers

from specjax import tokenizer as tokenizer_lib
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer
from support import folders


@pytest.fixture
def folder(tmp_path):
    folders.write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return tokenizer_lib.from_folder(folder)


def sentencepiece():
    backend = folders.sentencepiece_backend()
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def test_encode_and_decode(tokenizer):
    ids = tokenizer.encode("hello world")
    assert ids[0] == tokenizer.bos_id == 0
    assert ids[1:] == tokenizer.encode("hello world", add_special_tokens=False)
    assert ids[1] == tokenizer.token_ids["hello"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello world"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (1, 267)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_without_special_tokens(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = tokenizer_lib.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (None, None, None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert tokenizer_lib.from_folder(folder).eos_id == 1


def test_truncation_and_padding_of_the_file_are_ignored(folder):
    backend = folders.backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = tokenizer_lib.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "world"}]
    text = "<s><|user|>hello<|assistant|>world"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == text
    assert tokenizer.render_chat(messages) == text + "<|assistant|>"
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode(text + "<|assistant|>", add_special_tokens=False)
    assert ids.count(tokenizer.bos_id) == 1
    with pytest.raises(SpecJAXError, match="no role system"):
        tokenizer.apply_chat_template([{"role": "system", "content": ""}])
    with pytest.raises(SpecJAXError, match="no chat template"):
        sentencepiece().apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ eos_token }}{{ pad_token is defined }}", "</s>False"),
    ],
)
def test_template_language(folder, template, text):
    """Features of the template language of transformers, with its white space."""
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_lib.from_folder(
        folder
    )  # the file takes precedence over tokenizer_config.json
    assert tokenizer.render_chat([{"role": "user", "content": "<é>"}]) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if tools is not none %}tools{% endif %}x", "x"),
        ("{% if documents is not none %}documents{% endif %}x", "x"),
        ("{{ tools is defined }}{{ documents is defined }}", "TrueTrue"),
        ("{{ messages[0].name is defined }}", "False"),  # null is left out of messages
        ("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", "whywhy"),
        ("{{ image_token }}", "<img>"),
    ],
)
def test_templates_see_the_variables_that_transformers_passes(tmp_path, template, text):
    """Expected texts were rendered by transformers 5.24."""
    folders.write_tokenizer(tmp_path, chat_template=template, image_token="<img>")
    message = {"role": "user", "content": "a", "name": None, "reasoning": "why"}
    assert tokenizer_lib.from_folder(tmp_path).render_chat([message]) == text


TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
KEEPING = "{% for m in messages %}[{{ m.role }}]{{ m.content }} </s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (TRIMMING, "a b", "[user]q</s>[assistant]a b"),
        (TRIMMING, "a b \n", "[user]q</s>[assistant]a b"),
        (KEEPING, "a b ", "[user]q </s>[assistant]a b "),
        (TRIMMING, "</s>", "[user]q</s>[assistant]</s>"),  # occurs elsewhere too
        (KEEPING, [{"type": "text", "text": "a"}], "[user]q </s>[assistant]a"),
    ],
)
def test_a_final_message_can_be_continued(tmp_path, template, content, text):
    folders.write_tokenizer(tmp_path, chat_template=template)
    tokenizer = tokenizer_lib.from_folder(tmp_path)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    assert tokenizer.render_chat(messages, False, continue_final_message=True) == text


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (["q"], {"continue_final_message": True}, "exclude each other: set one of them to False"),
        ([], {"continue_final_message": True, "add_generation_prompt": False}, "got none"),
        (
            ["hidden"],
            {"continue_final_message": True, "add_generation_prompt": False},
            "the chat template does not render the content of the last message",
        ),
        (["q"], {"variables": {"messages": []}}, "the chat template's variable 'messages' cannot"),
        (["q"], {"variables": {"tokenize": True}}, "the chat template's variable 'tokenize' canno"),
        (["q"], {"variables": {"bos_token": ""}}, "the chat template's variable 'bos_token' canno"),
    ],
)
def test_options_of_a_chat_that_cannot_be_used(tmp_path, messages, options, message):
    template = "{% for m in messages %}{% if 'hidden' not in m.content %}{{ m.content }}{% endif %}"
    folders.write_tokenizer(tmp_path, chat_template=template + "{% endfor %}")
    tokenizer = tokenizer_lib.from_folder(tmp_path)
    chat = [{"role": "user", "content": content} for content in messages]
    with pytest.raises(SpecJAXError, match=message):
        tokenizer.render_chat(chat, **options)


def test_a_template_may_have_further_variables(tmp_path):
    template = "{% if thinking_budget %}<{{ thinking_budget }}>{% endif %}{{ messages[0].content }}"
    folders.write_tokenizer(tmp_path, chat_template=template)
    tokenizer = tokenizer_lib.from_folder(tmp_path)
    chat = [{"role": "user", "content": "q"}]
    assert tokenizer.render_chat(chat) == "q"
    assert tokenizer.render_chat(chat, variables={"thinking_budget": 3}) == "<3>q"


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% if %}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 30) }}",
        "{{ 2.0 ** 5000 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ raise_exception('first\nsecond') }}",
    ],
)
def test_the_error_of_a_failing_template_is_one_line_with_the_file(tmp_path, file, template):
    in_config = file == "tokenizer_config.json"
    folders.write_tokenizer(tmp_path, chat_template=template if in_config else "x")
    if not in_config:
        (tmp_path / file).write_text(template)
    tokenizer = tokenizer_lib.from_folder(tmp_path)
    with pytest.raises(SpecJAXError) as caught:
        tokenizer.render_chat([])
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / file}: the chat template failed: ")
    assert "\n" not in message


TEXT_PARTS = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        # Text-only templates get the joined parts, as in vLLM and llama.cpp.
        ("{{ messages[0].content }}", "he\nllo"),
        ("{{ 'user: ' + messages[0].content | trim }}", "user: he\nllo"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "he\\nllo"}'),
        # Templates that handle lists get the list.
        ("{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}", "[he][llo]"),
        (
            "{% if messages[0].content is string %}no{% else %}"
            "{% for part in messages[0].content %}{{ part['text'] }}{% endfor %}{% endif %}",
            "hello",
        ),
    ],
)
def test_content_as_a_list_of_text_parts(tokenizer, template, text):
    tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    assert tokenizer.render_chat([{"role": "user", "content": TEXT_PARTS}]) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "'content' must be a string or a list of text parts, got null"),
        (3, "got 3"),
        ([], r"got \[\]"),
        ([{"type": "image_url", "image_url": "x"}], "type 'image_url' are not supported"),
        ([{"type": "text"}], "'text' of a part must be a string, got None"),
        (["he"], "a part of 'content' must be an object, got 'he'"),
    ],
)
def test_content_other_than_text_is_rejected(tokenizer, content, words):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": content}]
    for check in (tokenizer.render_chat, tokenizer_lib.check_messages):
        with pytest.raises(SpecJAXError, match=f"message 2.*{words}"):
            check(messages)


def test_named_templates(tmp_path):
    folders.write_tokenizer(
        tmp_path,
        chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
    )
    assert tokenizer_lib.from_folder(tmp_path).render_chat([]) == "d"


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": {"x": 1}},
        {"eos_token": 5},
        {"chat_template": [{"x": 1}]},
        {"chat_template": ["x"]},
        {"chat_template": {"x": 1}},
    ],
)
def test_malformed_tokenizer_config(tmp_path, config):
    folders.write_tokenizer(tmp_path, **config)
    with pytest.raises(SpecJAXError, match=r"tokenizer_config\.json"):
        tokenizer_lib.from_folder(tmp_path)


def test_folders_without_tokenizer_json(tmp_path):
    assert tokenizer_lib.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        SpecJAXError, match=r"only a SentencePiece tokenizer\.model; a tokenizer\.json is needed"
    ):
        tokenizer_lib.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_broken_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SpecJAXError, match=r"cannot read .*tokenizer\.json"):
        tokenizer_lib.from_folder(tmp_path)


def added_token(text, **flags):
    """A token in the format of added_tokens_decoder."""
    fields = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": text, **fields, "special": True, **flags}


@dataclasses.dataclass
class AddedTokens:
    """Fields of tokenizer_config.json, and ids that transformers 5.24's AutoTokenizer gives."""

    text: str
    ids: list[int]
    decoded: str
    config: dict
    eos_id: int = 1
    files: dict = dataclasses.field(default_factory=dict)


ADDED_TOKENS = {
    "added_tokens_decoder": AddedTokens(
        "<|im_start|>hello<|im_end|>",
        [0, 267, 263, 268],
        "hello",
        {
            "added_tokens_decoder": {
                "267": added_token("<|im_start|>"),
                "268": added_token("<|im_end|>"),
            },
            "eos_token": "<|im_end|>",
        },
        eos_id=268,
    ),
    "flags of the tokens": AddedTokens(
        "a <|x|> b wor world",
        [0, 68, 267, 69, 224, 268, 264, 265, 79, 71],
        "a<|x|>b wor world",
        {
            "added_tokens_decoder": {
                "267": added_token("<|x|>", special=False, lstrip=True, rstrip=True),
                "268": added_token("wor", special=False, single_word=True),
            }
        },
    ),
    "special tokens with a role": AddedTokens(
        "<pad><|e|>",
        [0, 268, 267],
        "",
        {"pad_token": "<pad>", "eos_token": "<|e|>"},
        eos_id=267,
    ),
    "roles of the model's own": AddedTokens("<|img|>", [0, 267], "", {"image_token": "<|img|>"}),
    "additional_special_tokens": AddedTokens(
        "<|a|>hello<|b|>hell",
        [0, 267, 262, 82, 268, 262],
        "o",
        {"additional_special_tokens": ["<|a|>", "<|b|>", "hell"]},
    ),
    "added_tokens.json": AddedTokens(
        "<|p|><|q|><|r|>",
        [0, 268, 267, 269],
        "<|p|>",
        {},
        eos_id=267,
        files={
            "added_tokens.json": {"<|p|>": 268, "<|q|>": 267},
            "special_tokens_map.json": {
                "eos_token": "<|q|>",
                "additional_special_tokens": ["<|r|>"],
            },
        },
    ),
    "older files beside added_tokens_decoder": AddedTokens(
        "<|a|>",
        [0, 267],
        "",
        {"added_tokens_decoder": {"267": added_token("<|a|>")}},
        files={"special_tokens_map.json": {"eos_token": "<|q|>"}},
    ),
}


@pytest.mark.parametrize("case", ADDED_TOKENS.values(), ids=ADDED_TOKENS)
def test_tokens_that_tokenizer_json_lacks(tmp_path, case):
    folders.write_tokenizer(tmp_path, **case.config)
    for name, fields in case.files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    tokenizer = tokenizer_lib.from_folder(tmp_path)
    assert tokenizer.encode(case.text) == case.ids
    assert tokenizer.decode(case.ids) == case.decoded
    assert tokenizer.eos_id == case.eos_id
    assert tokenizer.vocab_size > max(case.ids)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"]
)
def test_dangling_links_are_named(folder, file):
    for path in (folder / "tokenizer.json", folder / file):
        if file == "tokenizer.model" or path.name == file:
            path.unlink(missing_ok=True)
    (folder / file).symlink_to("blobs/gone")
    with pytest.raises(SpecJAXError, match=f"{file} is a link to blobs/gone, which does not exist"):
        tokenizer_lib.from_folder(folder)


TEXTS = [
    "",
    " ",
    "hello world",
    "  a  b ",
    "héé 🎉👨‍👩‍👧 日本",
    "\ufffd literal",
    "a\n\n b",
    "ab ab</s> a<s> b",
    "</s></s>a",
]


def text_of_bytes(data):
    """U+FFFD for bytes that are not UTF-8, and nothing for an incomplete character at the end."""
    for length in (1, 2, 3):
        end = data[-length:]
        try:
            end.decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                data = data[:-length]
                break
    return data.decode(errors="replace")


def ids_of_bytes(tokenizer, data):
    """One token for each byte."""
    if tokenizer.token_ids.get("<0x00>") is not None:
        return [tokenizer.token_ids[f"<0x{byte:02X}>"] for byte in data]
    characters = {byte: text for text, byte in tokenizer_lib._byte_level_alphabet().items()}
    assert set(characters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [tokenizer.token_ids[characters[byte]] for byte in data]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_text_has_no_incomplete_character_at_its_end(tokenizer, kind):
    tokenizer = tokenizer if kind == "byte level" else sentencepiece()
    rng = random.Random(0)
    whole = "aé🎉日\ufffd▁".encode()
    for _ in range(500):
        data = b"a"
        for _ in range(rng.randrange(6)):
            start = rng.randrange(len(whole))
            data += whole[start : start + rng.randrange(6)]
        if rng.random() < 0.2:
            data += bytes([rng.randrange(256)])
        ids = ids_of_bytes(tokenizer, data)
        expected = text_of_bytes(data)
        assert tokenizer.decode(ids) == expected
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == expected
        stream = tokenizer.stream()
        shown = ""
        for count, id_ in enumerate(ids, 1):
            shown += stream.push([id_])
            assert shown == text_of_bytes(data[:count])  # nothing is held back
        assert stream.flush() == ""


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_invalid_bytes_inside_the_text(tokenizer, kind):
    tokenizer = tokenizer if kind == "byte level" else sentencepiece()
    cut = "🎉".encode()[:2]
    for data, text in (
        (b"a" + cut + b"b", "a\ufffdb"),
        ("日".encode() + b"\xff", "日\ufffd"),
        ("日".encode() + cut, "日"),
        (cut + "日".encode(), "\ufffd日"),
    ):
        ids = ids_of_bytes(tokenizer, data)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.token_ids["b"]]) in (text + "b", text + "\ufffdb")


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_stream_equals_decode(tokenizer, kind, skip, size):
    tokenizer = tokenizer if kind == "byte level" else sentencepiece()
    rng = random.Random(0)
    cases = [tokenizer.encode(text) for text in TEXTS]
    for _ in range(200):  # mostly broken UTF-8
        length = rng.randrange(30)
        cases.append([rng.randrange(tokenizer.vocab_size) for _ in range(length)])
    for ids in cases:
        stream = tokenizer.stream(skip_special_tokens=skip)
        text = ""
        for start in range(0, len(ids), size):
            text += stream.push(ids[start : start + size])
        text += stream.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_stream_continues_other_ids():
    tokenizer = sentencepiece()
    for text, pieces in (("a", [" b"]), ("", ["b"])):
        stream = tokenizer.stream(previous_ids=tokenizer.encode(text))
        assert [stream.push(tokenizer.encode("b"))] == pieces
    start, rest = tokenizer.encode("é")[:-1], tokenizer.encode("é")[-1:]
    assert tokenizer.stream(previous_ids=start).push(rest) == "é", "the prompt ends inside it"


def test_stream_never_emits_an_incomplete_character(tokenizer):
    text = "aé🎉日b"
    stream = tokenizer.stream()
    pieces = [stream.push([id_]) for id_ in tokenizer.encode(text)]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.flush() == ""
