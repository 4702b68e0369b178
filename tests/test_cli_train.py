"""`specjax train`, from prompts to a drafter for `specjax generate`."""

import json

import numpy as np
import pytest

import specjax
from specjax import files
from specjax.engine import load as checkpoint
from specjax.train import data
from support import folders
from support.cli import check_refused, write_lines, write_model, write_prompts

RUN = ("--max_seq_len=24", "--steps=6", "--batch_size=2", "--learning_rate=0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "target", num_hidden_layers=2)


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"prompt": "hello world", "domain": "a"},
        {"prompt": "or", "domain": "b"},
        {"prompt": "hello hello hello", "domain": "a"},
        {"prompt": "world or", "domain": "b"},
        {"prompt": "hello " * 30, "domain": "b"},
    ]
    return write_prompts(tmp_path / "prompts.jsonl", *rows)


def test_a_head_from_prompts_to_decoding(command, folder, prompts, tmp_path):
    output = tmp_path / "run"
    generate = (f"--self_generate={prompts}", "--generate_batch_size=4")
    first = command(
        "train", f"--target={folder}", f"--output={output}", *generate, *RUN, "--only_generate"
    )
    assert (first.code, first.err) == (0, "")
    assert "1 of 5 prompts are longer than half a row (12 tokens)" in first.out
    shards = sorted((output / "rows").glob("*.safetensors"))
    assert len(shards) == 1
    arguments = (
        "train",
        f"--target={folder}",
        f"--output={output}",
        *generate,
        f"--held_out={output / 'rows'}",
        "--eval_every=3",
        "--num_draft_tokens=40",
        "--ttt_steps=2",
        *RUN,
    )
    stopped = command(*arguments, "--max_minutes=0")
    assert (stopped.code, stopped.err) == (0, "")
    assert "step 1 of 6: the same command resumes the run" in stopped.out
    outcome = command(*arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert (
        "Accepted on held-out rows, by draft position" in outcome.out
        and "step 3: held out:" in outcome.out
    )
    scores = json.loads((output / "evaluation.json").read_text())
    assert scores["step"] in (3, 6) and {score["domain"] for score in scores["scores"]} == {
        "a",
        "b",
        "all",
    }
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    head = specjax.load_drafter("eagle", output / "drafter", specjax.load(folder))
    assert head.config.num_draft_tokens == 40 and head.config.aux_layers == (1,)

    run = command(
        "generate",
        f"--target={folder}",
        "--drafter=ngram,eagle",
        f"--draft={output / 'drafter'}",
        "--prompt=hello",
        "--max_new_tokens=12",
        "--compare",
    )
    assert (run.code, run.err) == (0, "")
    assert "identical" in run.out

    check_refused(command(*arguments, "--learning_rate=0.5"), "learning_rate=0.01, got 0.5")
    check_refused(command(*arguments, "--loss=tv"), "loss='kl', got 'tv'")
    (tmp_path / "other" / "drafter").mkdir(parents=True)
    other = [
        argument.replace(str(output), str(tmp_path / "other"))
        if "--output" in argument
        else argument
        for argument in arguments
    ]
    check_refused(command(*other), str(tmp_path / "other" / "drafter"), "exists")


def test_a_draft_model_from_texts_to_decoding(command, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("hello world or hello world or " * 60)
    small = folders.write_folder(tmp_path / "small", {"num_hidden_layers": 1})
    output = tmp_path / "run"
    outcome = command(
        "train",
        f"--target={folder}",
        f"--output={output}",
        "--drafter=draft_model",
        f"--data={text}",
        f"--draft_config={small}",
        f"--held_out={text}",
        "--loss=tv",
        *RUN,
    )
    assert (outcome.code, outcome.err) == (0, "")
    draft = specjax.load(output / "drafter")
    assert draft.config.num_layers == 1 and draft.tokenizer is not None
    run = command(
        "generate",
        f"--target={folder}",
        "--drafter=draft_model",
        f"--draft={output / 'drafter'}",
        "--prompt=hello",
        "--max_new_tokens=8",
        "--compare",
    )
    assert run.code == 0 and "identical" in run.out
    more = command(
        "train",
        f"--target={folder}",
        f"--output={tmp_path / 'more'}",
        "--drafter=draft_model",
        f"--data={text}",
        f"--draft={output / 'drafter'}",
        *RUN,
    )
    assert (more.code, more.err) == (0, "")
    changed = specjax.load(tmp_path / "more" / "drafter").params["embed_VD"]
    assert np.abs(changed - draft.params["embed_VD"]).max() > 1e-3


def test_a_run_does_not_resume_with_edited_texts(command, folder, tmp_path):
    paths = {name: tmp_path / f"{name}.txt" for name in ("data", "held_out")}
    for path in paths.values():
        path.write_text("hello world or " * 40)
    arguments = (
        "train",
        f"--target={folder}",
        f"--output={tmp_path / 'run'}",
        *RUN,
        *(f"--{name}={path}" for name, path in paths.items()),
    )
    assert command(*arguments, "--max_minutes=0").code == 0
    for name, field in (("held_out", "held_out_contents"), ("data", "contents")):
        paths[name].write_text("hello world or " * 20 + "hello or world " + "hello world or " * 19)
        check_refused(command(*arguments), f"was created with {field}=", "the same flags and files")
        paths[name].write_text("hello world or " * 40)
    assert command(*arguments).code == 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["no training data", "--data", "--self_generate"]),
        (["--data={text}", "--aux_layers=a"], ["--aux_layers must be numbers of layers"]),
        (
            ["--data={text}", "--aux_layers=1,5"],
            ["aux_layers must be rising layers of the target, 0 to 1, got 1, 5"],
        ),
        (
            ["--data={text}", "--num_draft_tokens=0"],
            ["--num_draft_tokens=0: 0 is not a positive integer"],
        ),
        (["--data={text}", "--num_draft_tokens=9999"], ["num_draft_tokens must be in 1 to"]),
        (["--data={text}", "--max_seq_len=12"], ["--max_seq_len must be at least 14"]),
        (
            ["--data={text}", "--only_generate"],
            ["--only_generate applies only with --self_generate"],
        ),
        (
            ["--data={text}", "--temperatures=1"],
            ["--temperatures applies only with --self_generate"],
        ),
        (
            ["--data={text}", "--max_seq_len=99"],
            ["--max_seq_len=99 exceeds the context of the target, 64 tokens"],
        ),
        (
            ["--data={text}", "--patience=2"],
            ["--patience=2 requires --held_out"],
        ),
        (
            ["--data={text}", "--held_out={text}", "--patience=2", "--eval_every=0"],
            ["--eval_every=0", "before the end"],
        ),
        (
            ["--data={rows}", "--max_seq_len=24"],
            ["--max_seq_len=24, but rows of --data have 32 positions"],
        ),
        (["--data={prompts}"], ["prompts.jsonl, line 1: a prompt requires a 'completion'"]),
        (["--data={rows}/rows.json"], ["rows.json: texts must be in files named .txt or .jsonl"]),
        (
            [
                "--data={text}",
                "--tensor_parallel=2",
                "--draft_tensor_parallel=2",
                "--drafter=draft_model",
                "--draft={odd}",
            ],
            ["the draft cannot be split over 2 devices: its 1 kv heads are not"],
        ),
        (["--data={text}", "--batch_size=999"], ["rows to train on, fewer than a batch of 999"]),
        (["--self_generate={sampled}"], ["sampled.jsonl, line 1: unknown key 'seed'"]),
        (["--data={text}", "--learning_rate=-1"], ["learning_rate must be positive"]),
        (
            ["--data={text}", "--draft_config=x"],
            ["--draft_config applies only to --drafter=draft_model"],
        ),
        (["--data={text}", "--drafter=draft_model"], ["either --draft or --draft_config"]),
        (
            ["--data={text}", "--drafter=draft_model", "--aux_layers=1"],
            ["--aux_layers applies only to --drafter=eagle"],
        ),
        (["--data={broken}"], ["broken.jsonl, line 2: not JSON"]),
        (["--data={empty}"], ["there is no text to train on in", "empty.txt"]),
        (["--data={tmp}"], ["has no rows (*.safetensors, rows.json)"]),
        (["--data=nowhere.txt"], ["cannot read nowhere.txt"]),
        (["--data=nowhere/rows"], ["cannot read nowhere/rows"]),
        (["--data={text}", "--draft={tmp}"], ["not the folder of an EAGLE head"]),
        (["--data={text}", "--data_parallel=3", "--tensor_parallel=4"], ["requires 12 devices"]),
        (
            ["--data={text}", "--data_parallel=4"],
            ["2 rows at a time", "cannot be split over data_parallel=4"],
        ),
        (
            ["--data={text}", "--gradient_accumulation_steps=3"],
            ["gradient_accumulation_steps=3 does not divide batch_size=2"],
        ),
    ],
)
def test_errors_before_anything_is_computed(command, folder, tmp_path, arguments, parts):
    paths = {
        "text": tmp_path / "text.txt",
        "broken": tmp_path / "broken.jsonl",
        "empty": tmp_path / "empty.txt",
        "sampled": tmp_path / "sampled.jsonl",
        "tmp": tmp_path / "folder",
        "rows": tmp_path / "rows",
        "prompts": tmp_path / "prompts.jsonl",
        "odd": folders.write_folder(tmp_path / "odd", {"num_key_value_heads": 1}),
    }
    paths["text"].write_text("hello world or " * 40)
    write_lines(paths["broken"], '"hello world"', "{")
    write_prompts(paths["sampled"], {"prompt": "hello", "seed": 1})
    paths["empty"].write_text("")
    paths["tmp"].mkdir()
    write_prompts(paths["prompts"], {"prompt": "hello"})
    paths["rows"].mkdir()
    config = checkpoint.open_source(folder).config
    data.write_shard(
        paths["rows"] / "rows-0.safetensors",
        data.Rows(
            *(np.full(shape, 20, np.int32) for shape in ((4, 32), 4, 4)),
            np.zeros(4, np.float32),
            [""] * 4,
            {},
        ),
    )
    files.write_json(paths["rows"] / data.ABOUT, {"target": config.to_dict()})
    output = tmp_path / "run"
    check_refused(
        command(
            "train",
            f"--target={folder}",
            f"--output={output}",
            *RUN,
            *(argument.format(**paths) for argument in arguments),
        ),
        *parts,
    )
    assert not output.exists()
