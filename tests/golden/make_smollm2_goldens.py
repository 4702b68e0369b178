"""Makes tests/golden/smollm2_tokens.json and smollm2_greedy.json from the GGUF file of
SmolLM2-135M-Instruct.

    pip install torch transformers accelerate regex gguf
    python tests/golden/make_smollm2_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf

smollm2_tokens.json: [{"text": ..., "ids": [...]}, ...], 200 strings. The vocabulary and merges are
those that transformers reads from the file; transformers (5.24) does not know the pre-tokeniser
"smollm", so it is set here to that of the model's own tokenizer.json:
Digits(individual_digits=True), ByteLevel(add_prefix_space=False). Every string is also encoded by
`reference_encode`, a plain BPE after llama.cpp's regular expressions for "smollm"; the two must
agree.

smollm2_greedy.json: [{"name", "prompt_ids", "generated_ids", "text", "smallest_margin"}, ...], 5
prompts, 48 greedy tokens by transformers in float32 with a key-value cache. End-of-sequence tokens
(id 2) do not end `generated_ids`, but they do end `text`, which is what a user would see.
`smallest_margin` is the least distance between the best and the second logit on the way: how much
rounding it takes to get another text. The weights are our export of our conversion; the script
first checks them against transformers' own reading.
"""

import functools
import json
import pathlib
import random
import sys
import tempfile

import gguf
import regex
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from specjax.engine import load as checkpoint

HERE = pathlib.Path(__file__).parent
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<repo_name>",
    "<file_sep>",
    "<jupyter_code>",
]
TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t",
    " \n ",
    "\r\n",
    "a",
    " a",
    "a ",
    "  a  b   c    d",
    "\u00a0nbsp\u2003em\u200bzero",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "It's John's; they'll've I'd we're you've can't",
    "IT'S JOHN'S, THEY'LL",
    "don\u2019t \u201cquote\u201d \u2014 dash\u2026",
    "antidisestablishmentarianism",
    "ALLCAPS lower MiXeD",
    "0",
    "7",
    "42",
    "123456789",
    "3.14159",
    "1,000,000.00",
    "2024-02-29T23:59:59Z",
    "v1.2.3-rc4",
    "0xDEADBEEF",
    "1e-5",
    "12abc34",
    "\u0661\u0662\u0663",
    "\u00bd cup, x\u00b2 + y\u00b3",
    "\u2167 and \u2460\u2461",
    "\u0967\u0968\u0969",
    "\uff11\uff12\uff13",
    "phone: +49 (0)30 1234-5678",
    "def add(a, b):\n    return a + b\n",
    "for (int i = 0; i < 10; ++i) { sum += a[i]; }",
    "x = [1, 2, 3]  # list\n\ty = {'k': None}\n",
    "SELECT * FROM users WHERE id = 42 AND name LIKE '%o''neil%';",
    "#include <stdio.h>\nint main(void) { return 0; }\n",
    '<html><body class="a b">&nbsp;</body></html>',
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true}',
    "https://example.com/path?q=1&r=%20#frag",
    "user@example.org",
    "C:\\Windows\\System32",
    "$HOME/.config && ls -la | grep x > /dev/null 2>&1",
    '```python\nprint(f"{x!r:>10}")\n```',
    "a==b!=c<=d>=e&&f||g??h",
    "....",
    "--- *** ___ ===",
    "!!!???",
    "((()))[[[]]]{{{}}}",
    "\\n\\t\\u00e9",
    "\\frac{a}{b} \\sum_{i=0}^{\\infty} x_i",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "E = mc^2",
    "50% off & 20\u20ac + 5\u00a3 = \u00a525",
    "caf\u00e9 na\u00efve r\u00e9sum\u00e9",
    "cafe\u0301 (combining)",
    "Stra\u00dfe \u00c4\u00d6\u00dc \u00e4\u00f6\u00fc",
    "\u00bfQu\u00e9 tal, se\u00f1or?",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3068\u30ab\u30bf\u30ab\u30ca",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "Ti\u1ebfng Vi\u1ec7t c\u00f3 d\u1ea5u",
    "\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0",
    "\U00020000\U0001d54f rare planes",
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f44d\U0001f3fd thumbs",
    "\U0001f1e9\U0001f1ea flags \U0001f1ef\U0001f1f5",
    "\u2764\ufe0f heart",
    "a\U0001f680b\U0001f680 c",
    "\u2192 \u21d2 \u2200x\u2208\u211d: x\u2265\u221a2",
    "\ufffd replacement",
    "\x00\x01\x7f control",
    "\ufeffBOM",
    "line\u2028sep\u2029par\x0bvt\x0cff\x85nel",
    "trailing spaces   ",
    "   leading spaces",
    "tab\tsep\tvalues\n1\t2\t3",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "text<|im_end|>more",
    "<|im_start|><|im_start|>",
    "<|im_end|> \n<|endoftext|>",
    "<repo_name>a/b<file_sep>main.py\nprint(1)",
    "<|im_start",
    "|im_end|>",
    "<| im_end |>",
    "<jupyter_code>1+1<jupyter_output>2",
    "<|IM_END|>",
]
PROMPTS = {
    "json": [
        {
            "role": "user",
            "content": "Repeat this JSON with the age changed to 37:\n"
            '{"name": "Ada Lovelace", "age": 36, "city": "London", "skills": ["math", "poetry"], "active": true}',
        }
    ],
    "code": 'def factorial(n):\n    """Return n factorial."""\n',
    "prose": "Once upon a time, in a small village by the sea, there lived",
    "answer": [
        {
            "role": "user",
            "content": "The Amazon rainforest covers 5.5 million square kilometres. Most of it, about 60 "
            "percent, lies in Brazil, followed by Peru with 13 percent. Which country holds most of the rainforest?",
        }
    ],
    "unicode": [
        {
            "role": "user",
            "content": "Traduis en fran\u00e7ais : \u00abI would like a caf\u00e9 cr\u00e8me \u2615, please\u00bb.",
        }
    ],
}


def texts():
    """TEXTS, then seeded random mixtures of words, scripts, digits, blanks and special tokens: 200
    in all."""
    rng = random.Random(0)
    ranges = [
        (0x20, 0x7F),
        (0x30, 0x3A),
        (0xA0, 0x180),
        (0x370, 0x400),
        (0x400, 0x460),
        (0x4E00, 0x4F00),
        (0x1F600, 0x1F640),
        (0x0660, 0x066A),
        (0x2000, 0x2040),
        (0x0900, 0x0970),
    ]
    pieces = [piece for text in TEXTS for piece in text.split(" ") if piece]
    result = list(TEXTS)
    while len(result) < 200:
        parts = []
        for _ in range(rng.randrange(2, 12)):
            low, high = rng.choice(ranges)
            parts.append(
                rng.choice(
                    [
                        rng.choice(pieces),
                        "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 6))),
                        str(rng.randrange(10 ** rng.randrange(1, 8))),
                        rng.choice([" ", "  ", "\n", "\t", "\n    ", ", "]),
                        rng.choice(SPECIAL) if rng.random() < 0.3 else " ",
                    ]
                )
            )
        result.append(rng.choice(["", " "]).join(parts))
    return result


def reference_encode(path):
    """A plain byte-level BPE straight from the file, with llama.cpp's regular expressions for
    "smollm"."""
    field = gguf.GGUFReader(path).get_field
    tokens, merges = (
        field("tokenizer.ggml.tokens").contents(),
        field("tokenizer.ggml.merges").contents(),
    )
    types = field("tokenizer.ggml.token_type").contents()
    ids = {token: id_ for id_, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    control = sorted(
        (token for token, type_ in zip(tokens, types, strict=True) if type_ == 3),
        key=len,
        reverse=True,
    )
    specials = regex.compile("(" + "|".join(map(regex.escape, control)) + ")")
    words = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {
        byte: chr(256 + i)
        for i, byte in enumerate(byte for byte in range(256) if byte not in printable)
    }

    @functools.cache
    def word_ids(word):
        parts = [spelling[byte] for byte in word.encode()]
        while len(parts) > 1:
            best = min(
                range(len(parts) - 1), key=lambda i: ranks.get((parts[i], parts[i + 1]), len(ranks))
            )
            if (parts[best], parts[best + 1]) not in ranks:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return [ids[part] for part in parts]

    def encode(text):
        result = []
        for segment in specials.split(text):
            if segment in control:
                result.append(ids[segment])
                continue
            for piece in regex.split(
                r"(\p{N})", segment
            ):  # every digit alone, as "\p{N}" comes first
                for word in words.findall(piece):
                    result += word_ids(word)
        return result

    return encode


def write(name, rows):
    (HERE / name).write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def main(path):
    path = pathlib.Path(path)
    source = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    reference = reference_encode(path)
    rows = [{"text": text, "ids": tokenizer.encode(text)} for text in texts()]
    for row in rows:
        assert row["ids"] == reference(row["text"]), (row, reference(row["text"]))
    write("smollm2_tokens.json", rows)

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoint.export(path, folder / "hf", dtype="float32")
        model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    theirs = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).state_dict()
    model.generation_config.eos_token_id = None
    ours = model.state_dict()
    assert theirs.keys() == ours.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )

    rows = []
    for name, prompt in PROMPTS.items():
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )
        prompt_ids = tokenizer.encode(text)
        result = model.generate(
            torch.tensor([prompt_ids]),
            do_sample=False,
            max_new_tokens=48,
            output_logits=True,
            return_dict_in_generate=True,
        )
        generated = result.sequences[0, len(prompt_ids) :].tolist()
        end = generated.index(2) if 2 in generated else None
        best_two = torch.cat(result.logits).topk(2).values
        rows.append(
            {
                "name": name,
                "prompt_ids": prompt_ids,
                "generated_ids": generated,
                "text": tokenizer.decode(generated[:end], skip_special_tokens=True),
                "smallest_margin": round((best_two[:, 0] - best_two[:, 1]).min().item(), 4),
            }
        )
        print(name, len(generated), rows[-1]["smallest_margin"], repr(rows[-1]["text"]))
    write("smollm2_greedy.json", rows)


if __name__ == "__main__":
    main(sys.argv[1])
