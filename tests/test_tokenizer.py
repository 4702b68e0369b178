"""The tokenizer: encoding, the chat template, and streaming that never breaks a character."""

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

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
    """Byte fallback, a space put before the text, and one taken away when decoding."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(tokens[:3])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
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


def test_truncation_and_padding_of_the_file_are_dropped(folder):
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
    """What transformers' templates may use, with the white space it gives."""
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_lib.from_folder(folder)  # the file goes before tokenizer_config.json
    assert tokenizer.render_chat([{"role": "user", "content": "<é>"}]) == text


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% if %}", "{{ 1 + 'a' }}"],
)
def test_templates_are_sandboxed_and_their_errors_named(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_lib.from_folder(folder)
    with pytest.raises(SpecJAXError, match="chat template"):
        tokenizer.render_chat([])


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


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_stream_equals_decode(tokenizer, kind, skip, size):
    tokenizer = tokenizer if kind == "byte level" else sentencepiece()
    rng = random.Random(0)
    cases = [tokenizer.encode(text) for text in TEXTS]
    # Ids at random: mostly broken UTF-8.
    cases += [
        [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))] for _ in range(200)
    ]
    for ids in cases:
        stream = tokenizer.stream(skip_special_tokens=skip)
        pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)] + [
            stream.flush()
        ]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_stream_never_gives_half_a_character(tokenizer):
    text = "aé🎉日b"
    stream = tokenizer.stream()
    pieces = [stream.push([id_]) for id_ in tokenizer.encode(text)]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.flush() == ""


def test_stream_of_a_sequence_that_ends_inside_a_character(tokenizer):
    stream = tokenizer.stream()
    ids = tokenizer.encode("a🎉")[:-1]
    assert "".join(stream.push([id_]) for id_ in ids) == "a"
    assert stream.flush() == tokenizer.decode(ids)[1:] != ""
