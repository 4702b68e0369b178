"""GGUF files: the model equals that of the Hugging Face folder they were made from.

Damaged and unsupported files are rejected.
"""

import builtins
import json
import os
import struct

import numpy as np
import pytest
import tokenizers

from specjax import llama
from specjax.checkpoints_convert import gguf_tokenizer
from specjax.config import LlamaConfig, RopeConfig
from specjax.dtypes import DTYPES
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from support import folders
from support.limits import limits

gguf = pytest.importorskip("gguf")

CONFIG = {"head_dim": 16, "rope_theta": 500.0}
KEYS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "rope.dimension_count": 16,
    "rope.freq_base": 500.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
KINDS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q8_0": "float32",
    "Q4_1": "float32",
}
BYTE_LEVEL = {
    "model": "gpt2",
    "pre": "smollm",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "eot_token_id": 3,
    "padding_token_id": 1,
}


def permute(array, heads):
    """As in llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute)."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def gguf_tensors(arrays):
    """Hugging Face tensors with llama.cpp's names and order of rotary pairs."""
    result = {}
    for name, array in arrays.items():
        prefix = ""
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if "q_proj" in stem:
            array = permute(array, 4)
        if "k_proj" in stem:
            array = permute(array, 2)
        result[f"{prefix}{NAMES[stem]}.{suffix}"] = array
    return result


def write(path, tensors, kind="F32", architecture="llama", keys=None, tokenizer=None):
    """A GGUF file; matrices are stored as `kind`, vectors as float32, as llama.cpp does."""
    writer = gguf.GGUFWriter(path, architecture)
    fields = {f"{architecture}.{key}": value for key, value in (KEYS | (keys or {})).items()}
    for key, value in (tokenizer or {}).items():
        prefix = "tokenizer" if key == "chat_template" else "tokenizer.ggml"
        fields[f"{prefix}.{key}"] = value
    adders = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in fields.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, array in tensors.items():
        if array.ndim < 2:
            writer.add_tensor(name, array.astype(np.float32))
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(array.astype(np.float32), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_tokenizer():
    state = json.loads(folders.backend().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return BYTE_LEVEL | {
        "tokens": tokens,
        "token_type": [3] * 4 + [1] * (len(tokens) - 4),
        "merges": [" ".join(merge) for merge in state["merges"]],
        "add_bos_token": True,
        "chat_template": folders.CHAT_TEMPLATE,
    }


def check_rejected(path, *words):
    """Checks that conversion fails with one line that contains all `words`, and writes nothing."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(SpecJAXError) as caught:
        checkpoint.convert(path, path.with_name("out"))
    message = str(caught.value)
    assert "\n" not in message
    for word in (path, *words):
        assert str(word) in message
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_same_parameters_as_the_hugging_face_folder(tmp_path, kind, config):
    arrays = folders.tensors(CONFIG | config)
    path = write(
        tmp_path / "model.gguf", gguf_tensors(arrays), kind, tokenizer=byte_level_tokenizer()
    )
    reader = checkpoint.convert(path, tmp_path / "ours")
    assert reader.dtype == KINDS[kind]
    # The permutation moves whole rows, so it commutes with quantisation, which is per row.
    type_ = gguf.GGMLQuantizationType[kind]
    stored = {
        name: gguf.dequantize(gguf.quantize(array, type_), type_) if array.ndim > 1 else array
        for name, array in arrays.items()
    }
    stored = {name: array.astype(DTYPES[KINDS[kind]]) for name, array in stored.items()}
    checkpoint.export(tmp_path / "ours", tmp_path / "back")
    back = folders.read_folder(tmp_path / "back")
    assert back.keys() == stored.keys()
    for name, array in stored.items():
        assert back[name].tobytes() == array.tobytes(), name
    model = checkpoint.load(tmp_path / "ours")
    assert model.config == LlamaConfig(
        288,
        32,
        64,
        2,
        4,
        2,
        16,
        1e-5,
        64,
        RopeConfig(500.0),
        tie_word_embeddings="tie_word_embeddings" in config,
        attention_bias="mlp_bias" in config,
        mlp_bias="mlp_bias" in config,
    )
    assert model.eos_ids == (1, 3)


def test_dtype_option(tmp_path):
    path = write(tmp_path / "model.gguf", gguf_tensors(folders.tensors(CONFIG)), "Q8_0")
    assert checkpoint.convert(path, tmp_path / "ours", dtype="bfloat16").dtype == "bfloat16"
    assert checkpoint.open_source(tmp_path / "ours").tokenizer is None


def llama3_factors(factor, original=8192, head_dim=16):
    """As in llama.cpp's convert_hf_to_gguf.py (LlamaModel.generate_extra_tensors)."""
    result = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / head_dim)
        if wavelength < original / 4:
            result.append(1)
        elif wavelength > original:
            result.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


def test_llama3_rope_is_recovered_from_its_factors(tmp_path):
    tensors = gguf_tensors(folders.tensors(CONFIG))
    for factor in (1.0, 8.0, 32.0):
        path = write(
            tmp_path / f"{factor}.gguf",
            tensors | {"rope_freqs.weight": llama3_factors(factor)},
            keys={"rope.freq_base": 500000.0},
        )
        cfg = checkpoint.open_source(path).config
        expected = (
            RopeConfig(500000.0)
            if factor == 1
            else RopeConfig(500000.0, "llama3", factor, 1.0, 4.0, 8192)
        )
        assert cfg.rope == expected
        unscaled = LlamaConfig(**{**vars(cfg), "rope": RopeConfig(500000.0)})
        np.testing.assert_allclose(
            llama.rope_frequencies(cfg),
            llama.rope_frequencies(unscaled) / llama3_factors(factor),
            rtol=1e-5,
        )


@pytest.mark.parametrize(
    "factors",
    [llama3_factors(8.0, original=4096), llama3_factors(8.0)[:-1], np.full(8, 2.0, np.float32)],
)
def test_other_rope_factors_are_rejected(tmp_path, factors):
    tensors = gguf_tensors(folders.tensors(CONFIG)) | {"rope_freqs.weight": factors}
    check_rejected(
        write(tmp_path / "model.gguf", tensors, keys={"rope.freq_base": 500000.0}),
        "rope_freqs.weight",
    )


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            RopeConfig(500.0, "linear", 4.0),
        ),
        ({"rope.scale_linear": 2.0}, RopeConfig(500.0, "linear", 2.0)),
        ({"rope.scaling.type": "none"}, RopeConfig(500.0)),
        ({"rope.freq_base": None}, RopeConfig(10000.0)),
    ],
)
def test_linear_rope(tmp_path, keys, rope):
    tensors = gguf_tensors(folders.tensors(CONFIG))
    path = write(tmp_path / "model.gguf", tensors, keys=keys)
    assert checkpoint.open_source(path).config.rope == rope


def test_linear_rope_with_the_factors_of_llama3_is_rejected(tmp_path):
    tensors = gguf_tensors(folders.tensors(CONFIG))
    tensors["rope_freqs.weight"] = llama3_factors(8.0)
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = write(tmp_path / "both.gguf", tensors, keys=keys)
    check_rejected(path, "rope_freqs.weight", "linear")


def test_bad_files(tmp_path):
    tensors = gguf_tensors(folders.tensors(CONFIG))
    name = "blk.1.attn_k.weight"
    number = iter(range(100))

    def bad(*words, tensors=tensors, **options):
        check_rejected(write(tmp_path / f"{next(number)}.gguf", tensors, **options), *words)

    bad("'qwen2'", architecture="qwen2")
    bad("'yarn'", keys={"rope.scaling.type": "yarn"})
    bad("experts", keys={"expert_count": 8})
    bad("llama.context_length", "missing", keys={"context_length": None})
    bad("rope.dimension_count", keys={"rope.dimension_count": 8})
    bad(name, "missing", tensors={key: array for key, array in tensors.items() if key != name})
    bad(
        "token_embd.weight",
        "missing",
        tensors={key: array for key, array in tensors.items() if key != "token_embd.weight"},
    )
    bad(
        "blk.0.attn_qkv.weight",
        "surplus",
        tensors=tensors | {"blk.0.attn_qkv.weight": tensors[name]},
    )
    bad("blk.2.attn_k.weight", "surplus", tensors=tensors | {"blk.2.attn_k.weight": tensors[name]})
    bad(name, "[16, 32]", "[32, 32]", tensors=tensors | {name: tensors[name][:16]})
    bad("'unigram'", tokenizer=byte_level_tokenizer() | {"model": "unigram"})
    bad("'deepseek-coder'", "smollm", tokenizer=byte_level_tokenizer() | {"pre": "deepseek-coder"})
    bad("invalid value", tokenizer=byte_level_tokenizer() | {"token_type": [3, 3]})
    bad("invalid value", tokenizer=byte_level_tokenizer() | {"merges": ["ab"]})
    bad("num_heads", "many", keys={"attention.head_count": "many"})
    bad(
        "invalid value",
        keys={
            "attention.head_count": 0,
            "attention.key_length": None,
            "rope.dimension_count": None,
        },
    )
    bad("chat_template", tokenizer=byte_level_tokenizer() | {"chat_template": 3})
    for keep in (0, 100, 5000, -500):
        path = write(tmp_path / f"cut{keep}.gguf", tensors)
        path.write_bytes(path.read_bytes()[:keep])
        check_rejected(path, "truncated")


def set_offset(path, tensor, offset):
    """Overwrites the offset of a tensor; `offset` is a function of the present one."""
    data = bytearray(path.read_bytes())
    position = data.index(tensor.encode()) + len(tensor)
    (num_dimensions,) = struct.unpack_from("<I", data, position)
    position += 4 + 8 * num_dimensions + 4
    (present,) = struct.unpack_from("<Q", data, position)
    struct.pack_into("<Q", data, position, offset(present))
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (lambda present: present + 3, ["is not a multiple of the alignment 32"]),
        (lambda present: present + 32, ["share bytes"]),
        (lambda present: present - 32, ["share bytes"]),
        (lambda present: 0, ["share bytes"]),
        (lambda present: 2**40, ["truncated", "end at byte"]),
        (lambda present: 2**64 - 32, ["truncated", "end at byte"]),
    ],
)
def test_offsets_of_tensors(tmp_path, offset, words):
    path = write(tmp_path / "model.gguf", gguf_tensors(folders.tensors(CONFIG)))
    name = "blk.1.ffn_up.weight"
    set_offset(path, name, offset)
    check_rejected(path, name, *words)


def test_tensors_may_be_in_any_order(tmp_path):
    """Swaps two tensors of the same size: other weights, but a valid file."""
    path = write(tmp_path / "model.gguf", gguf_tensors(folders.tensors(CONFIG)))
    offsets = {}
    for name in ("blk.0.attn_q.weight", "blk.1.attn_q.weight"):
        set_offset(path, name, lambda present, name=name: offsets.setdefault(name, present))
    first, second = offsets.values()
    set_offset(path, "blk.0.attn_q.weight", lambda present: second)
    set_offset(path, "blk.1.attn_q.weight", lambda present: first)
    checkpoint.open_source(path)


def text(string, length=None):
    """A string in the format of GGUF, optionally with a wrong length."""
    data = string.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def raw_file(*fields, num_fields=None, num_tensors=0):
    """A GGUF file with these bytes as its fields and tensors."""
    num_fields = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + b"".join(fields)


def array(kind, length):
    """A field that is an array."""
    return text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, kind, length)


def tensor(*shape):
    return text("x") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)


HUGE = {
    "array of numbers": raw_file(array(4, 2**60)),
    "array of strings": raw_file(array(8, 2**60)),
    "array of arrays": raw_file(array(9, 2**60)),
    "string": raw_file(text("a", 2**60)),
    "fields": raw_file(num_fields=2**60),
    "tensors": raw_file(num_tensors=2**60),
    "dimensions": raw_file(text("x") + struct.pack("<I", 2**31), num_fields=0, num_tensors=1),
    "shape": raw_file(tensor(2**40, 2**40), num_fields=0, num_tensors=1),
    "nested arrays": raw_file(array(9, 1) + struct.pack("<IQ", 9, 1) * 10_000),
}


@pytest.mark.parametrize("content", HUGE.values(), ids=HUGE)
def test_sizes_in_headers_are_compared_with_the_file(tmp_path, content):
    (tmp_path / "model.gguf").write_bytes(content)
    with limits():
        check_rejected(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "content", [raw_file(array(0, 2**31)), raw_file(array(8, 2**28)), raw_file(text("a", 2**31))]
)
def test_sizes_in_headers_are_limited(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    os.truncate(path, 2**32)  # a sparse file
    with limits():
        check_rejected(path, "is not supported; at most")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"block_count": 5 * 10**7}, ["50000000 layers", "21 tensors"]),
        ({"embedding_length": 5 * 10**7}, ["50000000"]),
        ({"feed_forward_length": 5 * 10**7}, ["50000000"]),
        ({"attention.head_count": 2 * 10**9, "attention.head_count_kv": 1}, ["32000000000"]),
    ],
)
def test_sizes_of_the_model_are_compared_with_the_tensors(tmp_path, keys, words):
    path = write(tmp_path / "model.gguf", gguf_tensors(folders.tensors(CONFIG)), keys=keys)
    with limits():
        check_rejected(path, *words)


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_alignment(tmp_path, alignment):
    path = write(tmp_path / "model.gguf", gguf_tensors(folders.tensors(CONFIG)))
    field = text("general.alignment") + struct.pack("<II", 4, alignment)
    data = bytearray(path.read_bytes())
    (num_fields,) = struct.unpack_from("<Q", data, 16)
    struct.pack_into("<Q", data, 16, num_fields + 1)
    path.write_bytes(data[:24] + field + data[24:])
    check_rejected(path)


def test_without_the_gguf_package(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", gguf_tensors(folders.tensors(CONFIG)))
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "gguf":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SpecJAXError, match=r"pip install 'specjax\[gguf\]'"):
        checkpoint.convert(path, tmp_path / "out")


def test_special_ids_that_mean_none(tmp_path):
    path = write(
        tmp_path / "model.gguf",
        gguf_tensors(folders.tensors(CONFIG)),
        tokenizer=byte_level_tokenizer() | {"eos_token_id": 2**32 - 1, "eot_token_id": 2**32 - 1},
    )
    reader = checkpoint.open_source(path)
    assert reader.tokenizer.eos_id is None
    assert reader.eos_ids == (1,)  # "</s>", by its text


def test_an_eos_token_that_can_never_be_emitted_is_rejected(tmp_path):
    path = write(
        tmp_path / "model.gguf",
        gguf_tensors(folders.tensors(CONFIG)),
        tokenizer=byte_level_tokenizer() | {"eot_token_id": 267},
    )
    check_rejected(path, "token 267 can never be emitted", "the tokenizer has 267 tokens")


@pytest.mark.parametrize("text", gguf_tokenizer.END_OF_GENERATION)
@pytest.mark.parametrize("type_", [gguf_tokenizer.NORMAL, gguf_tokenizer.CONTROL])
def test_end_of_generation_tokens_are_found_by_their_text(tmp_path, text, type_):
    """As in llama.cpp: also if the file names another token, and with any token type."""
    fields = byte_level_tokenizer()
    del fields["eot_token_id"]
    fields["tokens"][1] = "<end>"  # the eos_token_id
    fields["tokens"][2] = text
    fields["token_type"][2] = type_
    tensors = gguf_tensors(folders.tensors(CONFIG))
    reader = checkpoint.open_source(write(tmp_path / "model.gguf", tensors, tokenizer=fields))
    assert reader.eos_ids == (1, 2)
    assert reader.tokenizer.encode(f"hello{text}") == [0, 263, 2]
    assert reader.tokenizer.decode([263, 2]) == "hello"


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        (["a", "<|end|>"], {0, 1}),
        (["a", "<|end|>", "<|call|>"], {0, 1, 2}),
        (["a", "<|end|>", "<|call|>", "<|return|>"], {0, 2, 3}),
        (["a", "<|end|>", "<|calls|>", "<|flush|>"], {0, 2, 3}),
        (["a", "</s>", "<|tool_response>"], {0, 2}),
        (["</s>", "<|tool_response>"], {1}),
    ],
)
def test_exceptions_among_the_end_of_generation_tokens(tokens, ids):
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}
    assert gguf_tokenizer.end_of_generation_ids(metadata) == ids


def test_a_chat_template_that_fails_names_the_file(tmp_path):
    path = write(
        tmp_path / "model.gguf",
        gguf_tensors(folders.tensors(CONFIG)),
        tokenizer=byte_level_tokenizer() | {"chat_template": "{{ 1 // 0 }}"},
    )
    with pytest.raises(SpecJAXError, match=f"{path}: the chat template failed: ZeroDivisionError"):
        checkpoint.open_source(path).tokenizer.render_chat([])


def test_byte_level_tokenizer(tmp_path):
    path = write(
        tmp_path / "model.gguf",
        gguf_tensors(folders.tensors(CONFIG)),
        tokenizer=byte_level_tokenizer(),
    )
    tokenizer = checkpoint.open_source(path).tokenizer
    for text in ("hello world", "<|user|>héllo 🎉<|assistant|>", " \n\t a"):
        assert tokenizer.encode(text) == folders.backend().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "<s>" + text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 267)
    assert tokenizer.chat_template == folders.CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["abc", "1", "2", "3", "4", " def", "'s"]),
        ("llama-bpe", ["abc", "123", "4", " def", "'s"]),
        ("gpt-2", ["abc", "1234", " def", "'s"]),
    ],
)
def test_pre_tokenizers(tmp_path, pre, words):
    metadata = {
        f"tokenizer.ggml.{key}": value
        for key, value in (byte_level_tokenizer() | {"pre": pre}).items()
    }
    backend = gguf_tokenizer.build(metadata, tmp_path).backend
    assert [
        word.replace("Ġ", " ")
        for word, _ in backend.pre_tokenizer.pre_tokenize_str("abc1234 def's")
    ] == words


def test_sentencepiece_tokenizer(tmp_path):
    pieces = [*folders.SENTENCEPIECE_TOKENS, "▁", "a", "b", "c", "ab", "abc", "▁a", "▁abc", "bc"]
    pieces.append("[X]")
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -3.0, -4.0, -5.0, -2.0, 0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 9 + [4]
    path = write(
        tmp_path / "model.gguf",
        gguf_tensors(folders.tensors(CONFIG)),
        tokenizer={
            "model": "llama",
            "tokens": pieces,
            "scores": scores,
            "token_type": types,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        },
    )
    tokenizer = checkpoint.open_source(path).tokenizer

    def encode_as_pieces(text):
        return [pieces[i] for i in tokenizer.encode(text)]

    assert encode_as_pieces("abc") == [
        "<s>",
        "▁abc",
    ]  # merges: ab, which scores best, then abc, then the space before it
    assert encode_as_pieces("bc abc") == ["<s>", "▁", "bc", "▁abc"]
    assert encode_as_pieces("a</s>é[X]") == ["<s>", "▁a", "</s>", "▁", "<0xC3>", "<0xA9>", "[X]"]
    for text in ("abc abc", " abc", "aé🎉 b", "[X]"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert encode_as_pieces("a<unk>") == ["<s>", "▁a", "<unk>"]
    assert tokenizer.decode([1, 265, 0]) == "a"
    assert tokenizer.decode([265, 0], skip_special_tokens=False) == "a<unk>"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert isinstance(tokenizer.backend.model, tokenizers.models.BPE)
