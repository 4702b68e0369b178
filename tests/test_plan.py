"""`specjax plan`: figures, compared with arithmetic by hand, and errors."""

import json
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
from absl import flags

from specjax.bench import plan
from specjax.cli import main
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from support import folders

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
A100 = plan.GPUS["a100-80gb"]


def config(name):
    return checkpoint.read_model_config(CONFIGS / name)


def make(target="llama-3-70b", draft="llama-3-8b", gpu=A100, **options):
    options = {"tensor_parallel": 4, "draft_tensor_parallel": 2 if draft else 1} | options
    workload = plan.Workload(dtype=BFLOAT16, **options)
    return plan.make(config(target), draft and config(draft), gpu, workload)


@pytest.mark.parametrize(
    "name, billions",
    [
        ("llama-3-70b", 70.553706496),
        ("llama-3-8b", 8.030261248),
        ("llama-3.1-8b", 8.030261248),
        ("llama-3.2-1b", 1.235814400),
    ],
)
def test_the_bundled_shapes_have_the_published_number_of_parameters(name, billions):
    assert make(
        name, None, tensor_parallel=1, gpu=plan.Gpu(1e12, 1.0, 1.0)
    ).target.weights == round(2e9 * billions)


def test_the_bundled_shapes_and_their_rope():
    assert {path.parent.name for path in CONFIGS.glob("*/config.json")} == {
        "llama-3-70b",
        "llama-3-8b",
        "llama-3.1-8b",
        "llama-3.2-1b",
    }
    scaling = {name: config(name).rope for name in ("llama-3-8b", "llama-3.1-8b", "llama-3.2-1b")}
    assert [(rope.theta, rope.rope_type, rope.factor) for rope in scaling.values()] == [
        (5e5, "default", 1),
        (5e5, "llama3", 8),
        (5e5, "llama3", 32),
    ]


class TestMemory:
    """Llama-3-70B on four devices with Llama-3-8B on two of them."""

    def test_weights(self):
        # Norms are replicated: 2 per layer and the final one.
        norms, draft_norms = 161 * 8192, 65 * 4096
        made = make()
        assert made.target.weights == 2 * ((70553706496 - norms) // 4 + norms)
        assert made.draft.weights == 2 * ((8030261248 - draft_norms) // 2 + draft_norms)
        assert made.both.weights == made.target.weights + made.draft.weights

    def test_an_embedding_is_not_read_unless_it_is_the_output_matrix(self):
        made = make()
        assert made.target.weights - made.target.read == 2 * 128256 * 8192 // 4
        tied = make("llama-3.2-1b", None, tensor_parallel=1)
        assert tied.target.weights == tied.target.read

    def test_kv(self):
        made = make()
        assert (made.target.kv_per_token, made.draft.kv_per_token) == (
            2 * 80 * 2 * 128 * 2,
            2 * 32 * 4 * 128 * 2,
        )
        assert make(tensor_parallel=8).target.kv_per_token == 2 * 80 * 1 * 128 * 2
        assert make(draft=None).both == make().target

    @pytest.mark.parametrize("rows, batch_size, data_parallel", [(1, 1, 1), (3, 3, 1), (2, 3, 2)])
    def test_tokens_that_fit(self, rows, batch_size, data_parallel):
        made = make(
            batch_size=batch_size,
            data_parallel=data_parallel,
            context=100,
            gpu_memory_utilization=0.9,
        )
        # Logits: 6 rows with a quarter of the vocabulary, 5 with half of it. Activations: a chunk
        # of 128 tokens with a quarter of the target's F.
        reserve = 4 * rows * (6 * 128256 // 4 + 5 * 128256 // 2 + 128 * 2 * 28672 // 4)
        assert made.reserve == reserve
        free = 0.9 * 80e9 - made.both.weights - reserve
        assert (
            made.kv_tokens * made.both.kv_per_token
            <= free
            < (made.kv_tokens + 1) * made.both.kv_per_token
        )


class TestSpeed:
    def test_a_pass_over_one_sequence_is_bound_by_memory(self):
        made = make()
        assert made.plain.reading == pytest.approx(
            (2 * (70553706496 - 128256 * 8192) / 4 + 1024 * 81920) / 2.039e12, rel=1e-4
        )
        assert made.plain.roofline == made.plain.reading == made.verify.roofline
        assert made.drafting.roofline == pytest.approx(
            (2 * (8030261248 - 128256 * 4096) / 2 + 1024 * 65536) / 2.039e12, rel=1e-4
        )

    def test_a_pass_over_a_large_batch_is_bound_by_compute(self):
        made = make(batch_size=200, context=256)
        matrices, attention = 2 * (70553706496 - 128256 * 8192) / 4, 4 * 80 * 16 * 128 * 256
        assert made.plain.computing == pytest.approx(
            200 * (matrices + attention) / 312e12, rel=1e-4
        )
        assert (
            made.verify.roofline == made.verify.computing == pytest.approx(6 * made.plain.computing)
        )
        draft = 2 * (8030261248 - 128256 * 4096) / 2 + 4 * 32 * 16 * 128 * 256
        assert made.drafting.computing == pytest.approx(200 * draft / 312e12, rel=1e-4)
        assert made.plain.reading == pytest.approx(
            (matrices + 200 * 256 * 81920) / 2.039e12, rel=1e-4
        )

    def test_speedup(self):
        made = make(num_speculative_tokens=3)
        cost = 1 + 3 * made.drafting.roofline / made.plain.roofline
        assert made.speedup(0.5) == pytest.approx((1 + 0.5 + 0.25 + 0.125) / cost)
        assert made.speedup(0) == pytest.approx(1 / cost)
        assert make(draft=None, num_speculative_tokens=3).speedup(1) == pytest.approx(
            4
        )  # drafts that cost nothing
        assert make(batch_size=2).tokens_per_second == pytest.approx(
            2 / make(batch_size=2).plain.roofline
        )

    def test_a_measured_speed_slows_the_target_only(self):
        made = make(plain_tokens_per_second=23.8)
        assert made.tokens_per_second == pytest.approx(23.8)
        assert make(plain_tokens_per_second=40, batch_size=2).tokens_per_second == pytest.approx(40)
        assert made.drafting == make().drafting
        assert made.speedup(1) == pytest.approx(6 / (1 + 5 * made.drafting.roofline * 23.8))
        with pytest.raises(
            SpecJAXError, match=r"=90 is above what the roofline of a step allows, 58\.5"
        ):
            make(plain_tokens_per_second=90)


def test_both_formats_and_folders_without_weights_are_read(tmp_path):
    folder = folders.write_folder(tmp_path / "hf", {"num_hidden_layers": 1})
    checkpoint.convert(folder, tmp_path / "ours")
    expected = checkpoint.open_source(folder).config
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert (
        checkpoint.read_model_config(folder)
        == checkpoint.read_model_config(tmp_path / "ours")
        == expected
    )
    fields = json.loads((tmp_path / "ours" / "config.json").read_text())
    del fields["model"]["vocab_size"]
    (tmp_path / "ours" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(SpecJAXError, match=r"ours/config\.json: .*vocab_size"):
        checkpoint.read_model_config(tmp_path / "ours")


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `specjax plan ARGUMENTS` in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(main, "_configure_jax", lambda: None)
    monkeypatch.chdir(CONFIGS.parent)

    def run(*arguments):
        try:
            code = main.main(["specjax", "plan", *arguments])
        finally:
            for name in list(flags.FLAGS):
                if flags.FLAGS.find_module_defining_flag(name).startswith("specjax."):
                    delattr(flags.FLAGS, name)
            flags.FLAGS.unparse_flags()
        return code, *capsys.readouterr()

    return run


PAIR = (
    "--target=configs/llama-3-70b",
    "--draft=configs/llama-3-8b",
    "--tensor_parallel=4",
    "--gpu=a100-80gb",
)


def cells(line):
    return [cell.strip() for cell in re.split("[│┃]", line)]


def test_the_command_prints_the_plan(command):
    code, out, err = command(*PAIR, "--draft_tensor_parallel=2", "--acceptance=0.784,0.5")
    assert (code, err) == (0, "")
    made, table = make(), [cells(line) for line in out.splitlines()]
    assert ["weights", "35.28 GB", "8.03 GB", "43.31 GB"] in table
    assert ["KV bytes per token", "81,920", "65,536", "147,456"] in table
    assert ["tokens of KV that fit at 0.92", "", "", f"{made.kv_tokens:,}"] in table
    assert ["target, 6 tokens", "17.09 ms", "0.68 ms", "17.09 ms"] in table
    assert [
        "α = 0.784",
        "3.55",
        "1.70x",
        f"{made.speedup(0.784) / made.plain.roofline:.1f}",
    ] in table
    assert [
        "α = 0.5",
        "1.97",
        f"{made.speedup(0.5):.2f}x",
        f"{made.speedup(0.5) / made.plain.roofline:.1f}",
    ] in table
    assert "without launches, all-reduces and sampling" in out
    assert "predicted, K = 5; plain: 58.5 tokens/s" in out


def test_the_comparison_in_the_document_is_what_the_command_prints(command):
    document = (CONFIGS / "README.md").read_text()
    for degree in (1, 2, 4):
        for measured in ((), ("--plain_tokens_per_second=23.8",)):
            _, out, _ = command(
                *PAIR,
                f"--draft_tensor_parallel={degree}",
                "--acceptance=.784,.862,.719,.541",
                *measured,
            )
            speedups = re.findall(r"(\d\.\d\d)x", out)
            assert len(speedups) == 4
            cells_of_row = [
                "23.8" if measured else "58.5",
                *(f"{speedup}×" for speedup in speedups),
            ]
            row = f"| {' | '.join(cells_of_row)} |"
            assert row in document, row


@pytest.mark.parametrize(
    "name, arguments",
    [
        (
            "llama31_8b_llama32_1b",
            (
                "--target=configs/llama-3.1-8b",
                "--draft=configs/llama-3.2-1b",
                "--num_speculative_tokens=4",
            ),
        ),
        ("llama3_70b_llama3_8b_tp4", (*PAIR[:3], "--draft_tensor_parallel=4")),
    ],
)
def test_the_comments_of_the_flag_files_agree_with_the_plan(command, name, arguments):
    _, out, _ = command(*arguments, "--gpu=h100-80gb", "--acceptance=0.7")
    # The comment may be wrapped within a figure.
    text = (CONFIGS / f"{name}.flags").read_text().replace("\n# ", " ")
    plain, speedup = (
        re.search(r"plain: ([\d.]+) tokens/s", out)[1],
        re.search(r"(\d\.\d\d)x", out)[1],
    )
    weights = cells(next(line for line in out.splitlines() if "weights" in line))[-1].removesuffix(
        " GB"
    )
    for figure in (
        f"at most {float(plain):.0f} tokens/s",
        f" {speedup}x",
        f" {float(weights):.1f} GB",
    ):
        assert figure in text, figure
    for argument in arguments[2:]:
        assert argument in text


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (
            PAIR[:2],
            [
                "does not fit",
                "73.60 GB",
                "157.70 GB",
                "weights of the target 141.11, of the draft model 16.06",
            ],
        ),
        (
            (*PAIR, "--batch_size=64", "--context=8192"),
            ["does not fit", "KV of 64 x 8192 tokens 111.67"],
        ),
        (
            (PAIR[0], "--tensor_parallel=3"),
            ["the target cannot be split over 3 devices", "8 kv heads", "1, 2, 4, 8"],
        ),
        (
            (*PAIR, "--tensor_parallel=48", "--draft_tensor_parallel=16"),
            ["cannot be split over", "devices"],
        ),
        (
            (*PAIR, "--draft_tensor_parallel=3"),
            ["draft_tensor_parallel=3 must divide tensor_parallel=4"],
        ),
        (
            (PAIR[0], PAIR[2], "--draft_tensor_parallel=2"),
            ["draft_tensor_parallel=2", "no draft model"],
        ),
        ((*PAIR, "--gpu_memory_utilization=nan"), ["gpu_memory_utilization", "nan"]),
        ((*PAIR, "--gpu_memory_utilization=1.01"), ["gpu_memory_utilization", "1.01"]),
        ((*PAIR, "--plain_tokens_per_second=nan"), ["plain_tokens_per_second=nan"]),
        ((*PAIR, "--acceptance=0.5,1.5"), ["--acceptance", "0.5,1.5"]),
        ((*PAIR, "--acceptance=high"), ["--acceptance", "'high'"]),
        ((*PAIR, "--batch_size=0"), ["--batch_size=0"]),
        ((*PAIR, "--gpu=h101"), ["--gpu=h101", "h100-80gb"]),
        (("--target=./configs/none",), ["./configs/none does not exist"]),
    ],
)
def test_errors(command, arguments, parts):
    code, out, err = command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert all(part in err for part in parts), err


def test_models_with_different_vocabularies_are_rejected(command, tmp_path):
    folders.write_folder(tmp_path / "small", {"num_hidden_layers": 1})
    code, _, err = command(*PAIR, f"--draft={tmp_path / 'small'}")
    assert code == 2
    assert "the target has 128256 tokens and the draft model 288" in err
