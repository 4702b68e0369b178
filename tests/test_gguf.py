"""GGUF files give the same model as the Hugging Face folder they were made from; what is not
understood is refused."""

import builtins
import json

import numpy as np
import pytest
import tokenizers

from specjax import llama
from specjax.checkpoints_convert import gguf_tokenizer
from specjax.checkpoints_convert.table import DTYPES
from specjax.config import LlamaConfig, RopeConfig
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from support import folders

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
    return (
        array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


def gguf_tensors(arrays):
    result = {}
    for name, array in arrays.items():
        stem, _, suffix = name.rpartition(".")
        *layer, stem = stem.split(".", 3) if stem.startswith("model.layers") else [stem]
        array = (
            permute(array, 4)
            if "q_proj" in stem
            else permute(array, 2)
            if "k_proj" in stem
            else array
        )
        result[(f"blk.{layer[2]}." if layer else "") + f"{NAMES[stem]}.{suffix}"] = array
    return result


def write(path, tensors, kind="F32", architecture="llama", keys=None, tokenizer=None):
    """A GGUF file; matrices are stored as `kind`, vectors as float32, as llama.cpp does."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (KEYS | (keys or {})).items():
        if value is not None:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
                type(value)
            ](f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        adders = {
            list: writer.add_array,
            int: writer.add_uint32,
            str: writer.add_string,
            bool: writer.add_bool,
        }
        adders[type(value)](
            f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}", value
        )
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


def refused(path, *words):
    """Conversion fails with one line that has all `words`, and nothing is written."""
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
    opened = checkpoint.convert(path, tmp_path / "ours")
    assert opened.dtype == KINDS[kind]
    # Rows move as a whole, so that quantising a row gives the same numbers on either side.
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
def test_other_rope_factors_are_refused(tmp_path, factors):
    tensors = gguf_tensors(folders.tensors(CONFIG)) | {"rope_freqs.weight": factors}
    refused(
        write(tmp_path / "model.gguf", tensors, keys={"rope.freq_base": 500000.0}),
        "rope_freqs.weight",
    )


def test_linear_rope(tmp_path):
    tensors = gguf_tensors(folders.tensors(CONFIG))
    for i, (keys, rope) in enumerate(
        [
            (
                {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
                RopeConfig(500.0, "linear", 4.0),
            ),
            ({"rope.scale_linear": 2.0}, RopeConfig(500.0, "linear", 2.0)),
            ({"rope.scaling.type": "none"}, RopeConfig(500.0)),
            ({"rope.freq_base": None}, RopeConfig(10000.0)),
        ]
    ):
        assert (
            checkpoint.open_source(write(tmp_path / f"{i}.gguf", tensors, keys=keys)).config.rope
            == rope
        )
    refused(
        write(
            tmp_path / "both.gguf",
            tensors | {"rope_freqs.weight": llama3_factors(8.0)},
            keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        "rope_freqs.weight",
        "linear",
    )


def test_bad_files(tmp_path):
    tensors = gguf_tensors(folders.tensors(CONFIG))
    name = "blk.1.attn_k.weight"
    number = iter(range(100))

    def bad(*words, tensors=tensors, **options):
        refused(write(tmp_path / f"{next(number)}.gguf", tensors, **options), *words)

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
    bad("wrong kind", tokenizer=byte_level_tokenizer() | {"token_type": [3, 3]})
    bad("wrong kind", tokenizer=byte_level_tokenizer() | {"merges": ["ab"]})
    bad("num_heads", "many", keys={"attention.head_count": "many"})
    bad(
        "wrong kind",
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
        refused(path, "truncated")


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


def test_special_ids_outside_of_the_vocabulary_are_dropped(tmp_path):
    path = write(
        tmp_path / "model.gguf",
        gguf_tensors(folders.tensors(CONFIG)),
        tokenizer=byte_level_tokenizer() | {"eos_token_id": 2**32 - 1},
    )
    opened = checkpoint.open_source(path)
    assert (opened.eos_ids, opened.tokenizer.eos_id) == ((3,), None)


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
def test_pre_tokenizers(pre, words):
    metadata = {
        f"tokenizer.ggml.{key}": value
        for key, value in (byte_level_tokenizer() | {"pre": pre}).items()
    }
    backend = gguf_tokenizer.build(metadata).backend
    assert [
        word.replace("Ġ", " ")
        for word, _ in backend.pre_tokenizer.pre_tokenize_str("abc1234 def's")
    ] == words


def test_sentencepiece_tokenizer(tmp_path):
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "abc",
        "▁a",
        "▁abc",
        "bc",
        "[X]",
    ]
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

    def pieces_of(text):
        return [pieces[i] for i in tokenizer.encode(text)]

    assert pieces_of("abc") == [
        "<s>",
        "▁abc",
    ]  # ab first, as it scores best, then abc, then the space before it
    assert pieces_of("bc abc") == ["<s>", "▁", "bc", "▁abc"]
    assert pieces_of("a</s>é[X]") == ["<s>", "▁a", "</s>", "▁", "<0xC3>", "<0xA9>", "[X]"]
    for text in ("abc abc", " abc", "aé🎉 b", "[X]"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert isinstance(tokenizer.backend.model, tokenizers.models.BPE)
