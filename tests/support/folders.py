"""Small synthetic checkpoints, written with numpy, safetensors and tokenizers only."""

import json
import pathlib
import string

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# The first tokens of a SentencePiece vocabulary.
SENTENCEPIECE_TOKENS = ["<unk>", "<s>", "</s>", *BYTE_TOKENS]
CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("user", "assistant") %}
        {{- raise_exception("no role " + message.role) }}
    {%- endif %}
    {{- "<|" + message.role + "|>" + message.content | trim }}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""


def shapes(config):
    """Name -> shape of every tensor, as transformers names them."""
    c = CONFIG | config
    D, F, H, V = c["hidden_size"], c["intermediate_size"], c["head_dim"], c["vocab_size"]
    N, K = c["num_attention_heads"], c["num_key_value_heads"]
    result = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not c["tie_word_embeddings"]:
        result["lm_head.weight"] = (V, D)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        matrices = {
            "self_attn.q_proj": (N * H, D),
            "self_attn.k_proj": (K * H, D),
            "self_attn.v_proj": (K * H, D),
            "self_attn.o_proj": (D, N * H),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }
        for name, shape in matrices.items():
            result[f"{layer}{name}.weight"] = shape
            if c.get("mlp_bias" if "mlp" in name else "attention_bias"):
                result[f"{layer}{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            result[f"{layer}{name}.weight"] = (D,)
    return result


def tensors(config, dtype="float32", seed=0):
    """Random tensors of a model."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, shape in shapes(config).items():
        result[name] = rng.standard_normal(shape).astype(DTYPES[dtype])
    return result


def backend():
    """A byte-level BPE of 267 tokens that adds a BOS token; the model's vocabulary is padded to
    288."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("o", "r"),
        ("Ã", "©"),
    ]
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    tokens = [*special, *alphabet]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    result = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(special)
    result.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return result


def byte_fallback_backend():
    """A tokenizer of the letters a to z and the byte tokens of SentencePiece."""
    tokens = [*BYTE_TOKENS, *string.ascii_lowercase]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    result = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    result.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return result


def sentencepiece_backend():
    """A tokenizer with byte fallback; encoding adds a leading space, decoding removes it."""
    tokens = [*SENTENCEPIECE_TOKENS, "▁", "a", "b", "▁a", "ab"]
    result = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    result.add_special_tokens(tokens[:3])
    result.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    result.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return result


def write_tokenizer(folder, **config):
    """tokenizer.json and tokenizer_config.json."""
    folder = pathlib.Path(folder)
    backend().save(str(folder / "tokenizer.json"))
    fields = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | config))


def write_folder(folder, config=None, arrays=None, shards=1, tokenizer=True, dtype="float32"):
    """A Hugging Face folder; with several shards, tensors alternate between them."""
    folder, config = pathlib.Path(folder), config or {}
    arrays = tensors(config, dtype) if arrays is None else arrays
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if tokenizer:
        write_tokenizer(folder)
    if shards == 1:
        safetensors.numpy.save_file(arrays, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: arrays[name] for name in list(arrays)[i::shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read_folder(folder):
    """Every tensor of a Hugging Face folder."""
    result = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        result |= safetensors.numpy.load_file(path)
    return result
