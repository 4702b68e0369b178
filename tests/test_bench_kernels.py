"""`specjax bench kernels` without a GPU, and that what runs on one can at least be collected."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from specjax.cli import bench_kernels
from specjax.kernels.gpu import bench
from specjax.kernels.paged_attention import mosaic_gpu as attention_kernel
from specjax.kernels.sampling import mosaic_gpu as verify_kernel
from support.cli import check_refused

ROOT = pathlib.Path(__file__).parents[1]
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="JAX before 0.11 (that is, on Python 3.11) has no interpreter for Mosaic GPU kernels",
)


class TestRefusals:
    def test_without_a_gpu(self, command, tmp_path):
        outcome = command("bench", "kernels", f"--output={tmp_path / 'new.json'}")
        check_refused(
            outcome,
            "the kernels cannot run here: it needs an NVIDIA GPU of compute capability 9.0 "
            "(Hopper), and JAX runs on 'cpu'",
        )
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ([], "--output"),
            (["--output=/does/not/exist"], "/does/not/exist"),
            (["--output=new", "--page_size=48"], "--page_size must be 16, 32, 64 or 128, got 48"),
            (
                ["--output=new", "--budget_seconds=0"],
                "--budget_seconds must be a positive number, got 0",
            ),
            (["--output=new", "more"], "'more' is not a flag"),
        ],
    )
    def test_arguments(self, command, tmp_path, monkeypatch, arguments, reason):
        monkeypatch.chdir(tmp_path)
        check_refused(command("bench", "kernels", *arguments), reason)

    def test_an_output_that_exists(self, command, tmp_path):
        (tmp_path / "there").write_text("keep me")
        check_refused(
            command("bench", "kernels", f"--output={tmp_path / 'there'}", "--tiny"),
            "there",
            "exists",
        )
        assert (tmp_path / "there").read_text() == "keep me"

    def test_words_that_are_no_command(self, command):
        check_refused(
            command("bench", "kernel", "--target=x"),
            "'bench kernel' does not exist",
            "bench kernels",
        )
        check_refused(
            command("kernels"), "'kernels' does not exist", "bench decode", "bench kernels"
        )

    @pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="this JAX has the interpreter")
    def test_tiny_without_an_interpreter(self, command, tmp_path):
        outcome = command("bench", "kernels", f"--output={tmp_path / 'new.json'}", "--tiny")
        check_refused(
            outcome, "the interpreter for Mosaic GPU kernels comes with jax 0.11", jax.__version__
        )


def test_help(command):
    assert "\n  bench kernels" in command("--help").out
    assert "\n  bench kernels" in command("bench", "--help").out
    outcome = command("bench", "kernels", "--help")
    assert "--page_size" in outcome.out and "--target" not in outcome.out


@needs_interpreter
def test_tiny(command, tmp_path):
    output = tmp_path / "figures.json"
    outcome = command("bench", "kernels", f"--output={output}", "--tiny")
    assert (outcome.code, outcome.err) == (0, "")
    result = json.loads(
        output.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert result["command"] == [f"--output={output}", "--tiny"]
    assert (
        result["versions"]["jax"] == jax.__version__
        and result["device"] == "cpu"
        and result["interpreted"]
    )
    assert len(result["checks"]) == 2 and result["failures"] == []
    assert result["copy_bytes_per_second"] > 0 and result["fixed_seconds"] > 0
    rows = {(row["operation"], row["case"]): row for row in result["rows"]}
    assert list(rows) == [
        ("attention", "B=1 context=64 T=1"),
        ("attention", "B=1 context=128 T=3 tree"),
        ("draw", "B=1 K=2 V=256 bfloat16"),
        ("reject", "B=1 K=2 V=256 bfloat16"),
    ]
    for row in rows.values():
        assert set(row) == {
            "operation",
            "case",
            "bytes",
            "in_l2",
            "goal",
            "seconds",
            "skipped",
            "share",
        }
        assert set(row["seconds"]) == set(row["share"]) == {"mosaic_gpu", "xla"}
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert (
            row["share"]["xla"]
            == row["bytes"] / row["seconds"]["xla"] / result["copy_bytes_per_second"]
        )
        assert row["case"] in outcome.out
    sizes = [row["bytes"] for row in rows.values()]
    assert sizes == [(64 + 2) * 256, (128 + 3 * 2) * 256, 3 * 256 * 2, 2 * 256 * 2]
    assert set(rows["attention", "B=1 context=64 T=1"]["skipped"]) == {"jax"}
    assert "2 checks, 0 failures" in outcome.out


@needs_interpreter
class TestBrokenKernelsAreFound:
    """The check that finds them is named, nothing is timed, and the exit code is 1."""

    def test_attention(self, command, tmp_path, monkeypatch):
        right = attention_kernel.paged_attention
        monkeypatch.setattr(
            attention_kernel,
            "paged_attention",
            lambda *args, **kwargs: jnp.roll(right(*args, **kwargs), 1, axis=3),
        )
        self.check(
            command,
            tmp_path,
            monkeypatch,
            "attention, tree of 4 after (-1, 70)",
            "of the outputs are wrong",
        )

    def test_draws(self, command, tmp_path, monkeypatch):
        right = verify_kernel.scan
        monkeypatch.setattr(
            verify_kernel,
            "scan",
            lambda *args, **kwargs: (scan := right(*args, **kwargs))._replace(token=scan.token + 1),
        )
        self.check(
            command, tmp_path, monkeypatch, "verification, V=300, bfloat16", "drawn tokens: "
        )

    def test_residuals(self, command, tmp_path, monkeypatch):
        right = verify_kernel.residual
        monkeypatch.setattr(
            verify_kernel,
            "residual",
            lambda *args, **kwargs: (race := right(*args, **kwargs))._replace(
                token=race.target_token
            ),
        )
        self.check(
            command,
            tmp_path,
            monkeypatch,
            "verification, V=300, bfloat16",
            "tokens after the accepted",
        )

    @staticmethod
    def check(command, tmp_path, monkeypatch, name, problem):
        sizes = bench.TINY._replace(
            check_works=bench.TINY.check_works if name.startswith("attention") else (),
            check_vocab_sizes=() if name.startswith("attention") else ((300, "bfloat16"),),
        )
        monkeypatch.setattr(
            bench_kernels.bench, "TINY", sizes
        )  # only what is about this kernel: it takes its time
        output = tmp_path / "figures.json"
        outcome = command("bench", "kernels", f"--output={output}", "--tiny")
        assert outcome.code == 1
        result = json.loads(output.read_text())
        assert result["rows"] == [] and result["failures"]
        assert all(failure.startswith(name) for failure in result["failures"])
        assert any(problem in failure for failure in result["failures"])
        assert f"specjax: failed: {name}" in outcome.err


class TestGPU:
    """`pytest -m gpu` in a process of its own."""

    @staticmethod
    def pytest(*arguments):
        words = [
            sys.executable,
            "-m",
            "pytest",
            "tests/gpu",
            "-p",
            "no:cacheprovider",
            "-q",
            *arguments,
        ]
        return subprocess.run(
            words,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    def test_is_not_run_unless_asked_for(self):
        done = self.pytest("--collect-only")
        assert done.returncode == 5 and " deselected" in done.stdout, (
            done.stdout
        )  # 5: no tests were collected

    def test_fails_where_there_is_none(self):
        done = self.pytest("-m", "gpu", "-k", "TestAttention and ragged or second_call")
        assert done.returncode == 1, done.stdout
        assert (
            "2 errors" in done.stdout
            and "it needs an NVIDIA GPU of compute capability 9.0" in done.stdout
        )
        assert not re.search(r"\d passed", done.stdout)
