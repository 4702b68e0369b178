"""Makes tests/golden/llama/: small random Llamas as Hugging Face folders, and the logits that
transformers gives them.

    pip install torch transformers && python tests/golden/make_llama_goldens.py

Each folder holds config.json, model.safetensors and golden.npz, which has tokens_BT   int32   [2,
    40]     random ids logits_BTV  float32 [2, 40, V]  logits of LlamaForCausalLM in float32 (eager
    attention, positions 0-39)
Weights are wide enough (standard deviation 0.3, biases and norms random too) that logits spread
over several units and that a term left out, a wrong epsilon or a wrong rotation shows. In the
llama3 case the four wavelengths (6, 20, 63 and 199 positions) lie on all three pieces of the
scaling, whose knees are at 8 and 32: kept, ramp, divided. The same versions on the same machine
give the same bytes.
"""

import pathlib
import shutil

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent / "llama"
BASE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope_theta=100.0,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CASES = {
    "gqa": {},
    "mha_tied": dict(num_key_value_heads=4, tie_word_embeddings=True, rms_norm_eps=1e-2),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "head_dim": dict(head_dim=16),
    "rope_llama3": dict(rope_scaling=LLAMA3),
    "rope_linear": dict(rope_scaling=dict(rope_type="linear", factor=4.0), num_key_value_heads=1),
}


def main():
    torch.set_num_threads(1)
    for seed, (name, changes) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(**(BASE | changes), attn_implementation="eager")
        ).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                noise = 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + noise if "norm" in key else noise)
        tokens_BT = torch.randint(0, 96, (2, 40), generator=generator)
        with torch.no_grad():
            logits_BTV = model(tokens_BT).logits
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        np.savez_compressed(
            folder / "golden.npz",
            tokens_BT=tokens_BT.numpy().astype(np.int32),
            logits_BTV=logits_BTV.numpy(),
        )
        print(name, logits_BTV.shape, f"standard deviation of the logits {logits_BTV.std():.2f}")


if __name__ == "__main__":
    main()
