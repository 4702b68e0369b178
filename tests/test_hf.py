"""Hugging Face folders: parameters and configurations, and errors that name the fault."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from specjax import llama
from specjax.checkpoints_convert import hf, table
from specjax.config import LlamaConfig, RopeConfig
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from support import folders
from support.limits import limits

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
Q = "model.layers.1.self_attn.q_proj.weight"


def check_rejected(folder, *words):
    """Checks that loading and converting fail with one line that contains all `words`.

    Nothing is written.
    """
    folder = pathlib.Path(folder)
    before = sorted(folder.parent.rglob("*"))
    for attempt in (
        lambda: checkpoint.load(folder),
        lambda: checkpoint.convert(folder, folder.parent / "out"),
    ):
        with pytest.raises(SpecJAXError) as caught:
            attempt()
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert str(word) in message
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "config", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_the_table_describes_the_parameters_of_the_model(config):
    cfg = LlamaConfig(
        32,
        16,
        24,
        3,
        6,
        2,
        8,
        tie_word_embeddings="tie_word_embeddings" in config,
        attention_bias="mlp_bias" in config,
        mlp_bias="mlp_bias" in config,
    )
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(llama.abstract_params(cfg))
    }
    assert {
        ".".join(map(str, parameter.path)): parameter.shape for parameter in table.parameters(cfg)
    } == expected
    assert table.num_parameters(cfg) == sum(map(np.prod, expected.values()))


def test_fused_layout(tmp_path):
    config = {"attention_bias": True, "mlp_bias": True}
    arrays = folders.tensors(config)
    model = checkpoint.load(folders.write_folder(tmp_path / "hf", config, arrays, shards=3))
    H, G = 8, 2
    for i, layer in enumerate(model.params["layers"]):
        theirs = {name.removeprefix(f"model.layers.{i}."): array for name, array in arrays.items()}
        attention, mlp = layer["attention"], layer["mlp"]
        for suffix, qkv in (("weight", attention["qkv_KGHD"]), ("bias", attention["qkv_bias_KGH"])):
            for k in range(2):
                for g in range(G):
                    start = (k * G + g) * H
                    np.testing.assert_array_equal(
                        qkv[k, g], theirs[f"self_attn.q_proj.{suffix}"][start : start + H]
                    )
                np.testing.assert_array_equal(
                    qkv[k, G], theirs[f"self_attn.k_proj.{suffix}"][k * H : (k + 1) * H]
                )
                np.testing.assert_array_equal(
                    qkv[k, G + 1], theirs[f"self_attn.v_proj.{suffix}"][k * H : (k + 1) * H]
                )
        np.testing.assert_array_equal(
            attention["out_DKGH"].reshape(32, 32), theirs["self_attn.o_proj.weight"]
        )
        np.testing.assert_array_equal(attention["out_bias_D"], theirs["self_attn.o_proj.bias"])
        np.testing.assert_array_equal(attention["norm_D"], theirs["input_layernorm.weight"])
        np.testing.assert_array_equal(mlp["norm_D"], theirs["post_attention_layernorm.weight"])
        for j, half in enumerate(("gate", "up")):
            np.testing.assert_array_equal(mlp["gate_up_2FD"][j], theirs[f"mlp.{half}_proj.weight"])
            np.testing.assert_array_equal(
                mlp["gate_up_bias_2F"][j], theirs[f"mlp.{half}_proj.bias"]
            )
        np.testing.assert_array_equal(mlp["down_DF"], theirs["mlp.down_proj.weight"])
        np.testing.assert_array_equal(mlp["down_bias_D"], theirs["mlp.down_proj.bias"])
    np.testing.assert_array_equal(model.params["embed_VD"], arrays["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.params["lm_head_VD"], arrays["lm_head.weight"])
    np.testing.assert_array_equal(model.params["final_norm_D"], arrays["model.norm.weight"])


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": None}, RopeConfig(10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig(500.0, "linear", 4.0)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 32),
        ),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3},
            },
            RopeConfig(7.0, "llama3", 8.0, 1.0, 4.0, 32),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, RopeConfig(9.0)),
        # With both fields, a rope_scaling that is not empty wins, as in transformers 5.24.
        (
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            RopeConfig(500.0, "linear", 4.0),
        ),
        (
            {
                "rope_parameters": {"rope_type": "llama3", **LLAMA3},
                "rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 9.0},
            },
            RopeConfig(9.0, "linear", 4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {}},
            RopeConfig(500.0, "linear", 2.0),
        ),
        (
            {
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
                "original_max_position_embeddings": 16,
            },
            RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 32),
        ),
    ],
)
def test_every_form_of_rope_fields(tmp_path, fields, rope):
    folder = folders.write_folder(tmp_path / "hf", fields)
    assert hf.read_config(folder).rope == rope
    written = hf.config_fields(hf.read_config(folder), "float32")
    (folder / "config.json").write_text(json.dumps(written))
    assert hf.read_config(folder).rope == rope


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "su", "made_up"])
def test_unknown_rope_type(tmp_path, kind):
    check_rejected(
        folders.write_folder(tmp_path / "hf", {"rope_scaling": {"rope_type": kind, "factor": 2.0}}),
        "config.json",
        repr(kind),
        "llama3",
    )


def test_optional_fields(tmp_path):
    folder = folders.write_folder(tmp_path / "hf", {"head_dim": None}, folders.tensors({}))
    config = json.loads((folder / "config.json").read_text())
    del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    cfg = hf.read_config(folder)
    assert (cfg.head_dim, cfg.num_kv_heads, cfg.rms_norm_eps) == (8, 4, 1e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
            ["MistralForCausalLM", "LlamaForCausalLM"],
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["missing"]),
        ({"eos_token_id": "two"}, ["eos_token_id", "two"]),
        ({"architectures": "LlamaForCausalLM"}, ["'LlamaForCausalLM'"]),
        ({"quantization_config": "x"}, ["invalid value"]),
        ({"rope_parameters": "linear"}, ["invalid value"]),
        ({"rope_theta": "abc"}, ["invalid value", "abc"]),
        (
            # transformers would take theta 500, the field's, and drop 9.
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            ["rope_parameters", "rope_scaling", "9.0", "500.0"],
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, ["factor", "finite"]),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ["low_freq_factor"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 0.0}},
            ["low_freq_factor"],
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    **LLAMA3,
                    "original_max_position_embeddings": 0,
                }
            },
            ["original_max"],
        ),
    ],
)
def test_unsupported_configurations_are_rejected(tmp_path, config, words):
    arrays = folders.tensors({})
    check_rejected(folders.write_folder(tmp_path / "hf", config, arrays), "config.json", *words)


@pytest.mark.parametrize(
    "field", ["rms_norm_eps", "vocab_size", "max_position_embeddings", "num_attention_heads"]
)
def test_missing_fields_are_errors(tmp_path, field):
    folder = folders.write_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    del config[field]
    (folder / "config.json").write_text(json.dumps(config))
    check_rejected(folder, field, "missing")


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", hf.INDEX]
)
def test_corrupt_json(tmp_path, file):
    folder = folders.write_folder(tmp_path / "hf", shards=2)
    (folder / file).write_text('{"a": ')
    check_rejected(folder, file)


@pytest.mark.parametrize("shards", [1, 2])
def test_missing_tensor(tmp_path, shards):
    arrays = folders.tensors({})
    del arrays[Q]
    check_rejected(
        folders.write_folder(tmp_path / "hf", arrays=arrays, shards=shards), Q, "missing"
    )


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"]
)
def test_surplus_tensor(tmp_path, name):
    arrays = folders.tensors({}) | {name: np.zeros(3, np.float32)}
    check_rejected(folders.write_folder(tmp_path / "hf", arrays=arrays), name, "surplus")


def test_misshapen_tensor(tmp_path):
    arrays = folders.tensors({}) | {Q: np.zeros((16, 32), np.float32)}
    check_rejected(folders.write_folder(tmp_path / "hf", arrays=arrays), Q, "[16, 32]", "[32, 32]")


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_dtype_that_is_not_supported(tmp_path, dtype):
    arrays = folders.tensors({}) | {Q: np.zeros((32, 32), dtype)}
    check_rejected(
        folders.write_folder(tmp_path / "hf", arrays=arrays),
        Q,
        {np.int8: "I8", np.float64: "F64"}[dtype],
    )


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(tmp_path, keep):
    folder = folders.write_folder(tmp_path / "hf")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    check_rejected(folder, path, "truncated")


def test_shards_and_index_must_agree(tmp_path):
    second = "model-00002-of-00002.safetensors"
    folder = folders.write_folder(tmp_path / "absent" / "hf", shards=2)
    (folder / second).unlink()
    check_rejected(folder, second, "not in the folder")

    folder = folders.write_folder(tmp_path / "unlisted" / "hf", shards=2)
    index = json.loads((folder / hf.INDEX).read_text())["weight_map"]
    kept = {name: file for name, file in index.items() if file != second}
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": kept}))
    check_rejected(folder, second, "missing from the index")

    folder = folders.write_folder(tmp_path / "no_index" / "hf", shards=2)
    (folder / hf.INDEX).unlink()
    check_rejected(folder, hf.INDEX)

    folder = folders.write_folder(tmp_path / "moved" / "hf", shards=2)
    other = ({"model-00001-of-00002.safetensors", second} - {index[Q]}).pop()
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": index | {Q: other}}))
    check_rejected(folder, Q)

    folder = folders.write_folder(tmp_path / "outside" / "hf", shards=2)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": index | {Q: "../model.safetensors"}}))
    check_rejected(folder, Q, "../model.safetensors")

    (tmp_path / "none" / "hf").mkdir(parents=True)
    (tmp_path / "none" / "hf" / "config.json").write_text(json.dumps(folders.CONFIG))
    check_rejected(tmp_path / "none" / "hf", "no safetensors weights")


def test_the_output_matrix_of_a_tied_model_must_equal_the_embedding(tmp_path):
    config = {"tie_word_embeddings": True}
    arrays = folders.tensors(config)
    equal = arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"].copy()}
    folder = folders.write_folder(tmp_path / "equal" / "hf", config, equal)
    assert "lm_head_VD" not in checkpoint.load(folder).params
    equal["lm_head.weight"][-1, -1] += 1
    folder = folders.write_folder(tmp_path / "other" / "hf", config, equal)
    check_rejected(folder, "lm_head.weight", "tie_word_embeddings")


def test_rotary_buffers_are_ignored(tmp_path):
    arrays = folders.tensors({}) | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)
    }
    for shards in (1, 2):
        checkpoint.load(folders.write_folder(tmp_path / str(shards), arrays=arrays, shards=shards))


def test_eos_ids_are_the_union_of_all_files(tmp_path):
    folder = folders.write_folder(tmp_path / "hf", {"eos_token_id": [7, 9]})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert checkpoint.load(folder).eos_ids == (1, 7, 9, 11)  # 1 comes from the tokenizer
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text(json.dumps(folders.CONFIG | {"eos_token_id": None}))
    assert checkpoint.load(folder).eos_ids == (11,)
    (folder / "generation_config.json").unlink()
    assert checkpoint.load(folder).eos_ids == ()
    # For absent fields, transformers would take 1 and 2.
    checkpoint.export(folder, tmp_path / "back")
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / "back" / name).read_text())
        assert (fields["bos_token_id"], fields["eos_token_id"]) == (None, None)


def test_negative_eos_ids_mean_none(tmp_path):
    folder = folders.write_folder(tmp_path / "hf", {"eos_token_id": [-1, 7]})
    assert checkpoint.open_source(folder).eos_ids == (1, 7)


@pytest.mark.parametrize(
    ("eos_id", "tokenizer", "words"),
    [
        (267, True, ["the tokenizer has 267 tokens"]),
        (288, True, ["the tokenizer has 267 tokens"]),
        (288, False, ["the model has 288 tokens"]),
    ],
)
def test_an_eos_token_that_can_never_be_emitted_is_rejected(tmp_path, eos_id, tokenizer, words):
    config = {"eos_token_id": [1, eos_id]}
    folder = folders.write_folder(tmp_path / "hf", config, tokenizer=tokenizer)
    check_rejected(folder, folder, f"token {eos_id} can never be emitted", *words)


def test_an_eos_token_of_added_tokens_decoder_can_be_emitted(tmp_path):
    folder = folders.write_folder(tmp_path / "hf", {"eos_token_id": 267})
    added = {"267": {"content": "<|im_end|>", "special": True}}
    folders.write_tokenizer(folder, added_tokens_decoder=added)
    checkpoint.convert(folder, tmp_path / "ours")
    checkpoint.export(tmp_path / "ours", tmp_path / "back")
    for name in ("hf", "ours", "back"):
        model = checkpoint.load(tmp_path / name)
        assert model.tokenizer.encode("<|im_end|>") == [0, 267]
        assert (model.eos_ids, model.num_valid_tokens) == ((1, 267), 268)


def safetensors_file(header, size=0):
    """A file with this header and `size` bytes of data."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    "content",
    [
        (2**60).to_bytes(8, "little"),
        (90 * 10**6).to_bytes(8, "little") + b"{}",
        safetensors_file({Q: {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}),
        safetensors_file({Q: {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 4]}}, 4),
        safetensors_file({Q: {"dtype": "F32", "shape": [2**40] * 9, "data_offsets": [0, 4]}}, 4),
    ],
    ids=["header", "header of 90 MB", "data", "shape", "product of a shape"],
)
def test_sizes_in_safetensors_headers_are_compared_with_the_file(tmp_path, content):
    folder = folders.write_folder(tmp_path / "hf")
    (folder / "model.safetensors").write_bytes(content)
    with limits():
        check_rejected(folder, "model.safetensors", "truncated or not a safetensors file")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("num_hidden_layers", ["50000000 layers", "21 tensors"]),
        ("vocab_size", ["lm_head", "[288, 32]"]),
        ("hidden_size", ["lm_head", "[288, 32]"]),
        ("intermediate_size", ["down_proj", "[32, 64]"]),
        ("num_attention_heads", ["o_proj", "[32, 32]"]),
    ],
)
def test_sizes_in_config_json_are_compared_with_the_tensors(tmp_path, field, words):
    config = {field: 5 * 10**7}
    folder = folders.write_folder(tmp_path / "hf", config, folders.tensors({}))
    with limits():
        check_rejected(folder, *words)


def test_the_number_of_parameters_is_counted_without_a_table():
    config = LlamaConfig(32, 16, 24, 5 * 10**7, 6, 2, 8)
    with limits():
        layers = table.num_parameters(config) - table.num_parameters(
            dataclasses.replace(config, num_layers=1)
        )
    per_layer = 16 * (6 + 2 + 2 + 6) * 8 + 3 * 16 * 24 + 2 * 16
    assert layers == (5 * 10**7 - 1) * per_layer


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", hf.INDEX, "generation_config.json"]
)
def test_dangling_links_are_named(tmp_path, file):
    """As in a Hugging Face cache without its blobs."""
    folder = folders.write_folder(tmp_path / "hf")
    if file == hf.INDEX:
        (folder / "model.safetensors").unlink()
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("../blobs/gone")
    check_rejected(folder, folder / file, "is a link to ../blobs/gone, which does not exist")


def test_a_dangling_link_to_a_shard_is_named(tmp_path):
    folder = folders.write_folder(tmp_path / "hf", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    check_rejected(folder, shard, "is a link to ../blobs/gone, which does not exist")


def test_dtypes_of_loaded_parameters(tmp_path):
    arrays = folders.tensors({}, "bfloat16")
    folder = folders.write_folder(tmp_path / "hf", arrays=arrays)
    expected = np.float32 if jax.default_backend() == "cpu" else folders.DTYPES["bfloat16"]
    assert checkpoint.load(folder).params["embed_VD"].dtype == expected
    for dtype in (*folders.DTYPES, *folders.DTYPES.values()):
        params = checkpoint.load(folder, dtype=dtype).params
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
            np.dtype(folders.DTYPES.get(dtype, dtype))
        }
    with pytest.raises(SpecJAXError, match="int8"):
        checkpoint.load(folder, dtype="int8")


def test_mixed_dtypes_load_in_the_widest(tmp_path):
    arrays = folders.tensors({}, "bfloat16")
    arrays["model.norm.weight"] = np.full(32, 1 + 2**-20, np.float32)
    opened = checkpoint.open_source(folders.write_folder(tmp_path / "hf", arrays=arrays))
    assert opened.dtype == "float32"
    assert dict(opened.parameters("float32"))["final_norm_D",][0] == np.float32(1 + 2**-20)


def test_overflow_in_float16_is_an_error(tmp_path):
    arrays = folders.tensors({}) | {"model.norm.weight": np.full(32, 1e5, np.float32)}
    folder = folders.write_folder(tmp_path / "hf", arrays=arrays)
    with pytest.raises(SpecJAXError, match=r"model\.norm\.weight does not fit into float16"):
        checkpoint.convert(folder, tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_single_file_takes_precedence_over_an_index(tmp_path):
    """As in transformers. Some repositories have both."""
    folder = folders.write_folder(tmp_path / "hf", shards=2)
    other = folders.tensors({}, seed=1)
    safetensors.numpy.save_file(other, folder / "model.safetensors")
    np.testing.assert_array_equal(
        checkpoint.load(folder).params["embed_VD"], other["model.embed_tokens.weight"]
    )


GOLDEN = sorted(
    path.parent for path in pathlib.Path(__file__).parent.glob("golden/llama/*/config.json")
)


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_transformers_loads_our_export(tmp_path, folder):
    """After conversion and export, transformers computes the logits of the original."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint.convert(folder, tmp_path / "ours")
    checkpoint.export(tmp_path / "ours", tmp_path / "back")
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(info.values()), info
    golden = np.load(folder / "golden.npz")
    with torch.no_grad():
        logits_BTV = model(torch.tensor(golden["tokens_BT"]).long()).logits.numpy()
    np.testing.assert_allclose(logits_BTV, golden["logits_BTV"], atol=2e-5)
    assert model.generation_config.eos_token_id == [1]
