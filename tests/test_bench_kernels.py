"""`specjax bench kernels` without a GPU, and the collection of the tests for a GPU."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from specjax.kernels import dispatch
from specjax.kernels.gpu import bench, check
from specjax.kernels.paged_attention import mosaic_gpu as attention_kernel
from specjax.kernels.sampling import mosaic_gpu as sampling_kernel
from support.cli import check_refused

ROOT = pathlib.Path(__file__).parents[1]
needs_interpreter = pytest.mark.skipif(
    dispatch.missing_interpreter() is not None, reason=str(dispatch.missing_interpreter())
)


class TestRefusals:
    def test_without_a_gpu(self, command, tmp_path):
        outcome = command("bench", "kernels", f"--output={tmp_path / 'new.json'}")
        check_refused(
            outcome,
            "the kernels cannot run here: requires an NVIDIA GPU of compute capability 9.0 "
            "(Hopper), but JAX runs on 'cpu'",
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

    def test_unknown_commands(self, command):
        check_refused(
            command("bench", "kernel", "--target=x"),
            "unknown command 'bench kernel'; choose from",
            "bench kernels",
        )
        outcome = command("kernels")
        check_refused(outcome, "unknown command 'kernels'", "bench decode", "bench kernels")

    @pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="this JAX has the interpreter")
    def test_tiny_without_an_interpreter(self, command, tmp_path):
        outcome = command("bench", "kernels", f"--output={tmp_path / 'new.json'}", "--tiny")
        check_refused(
            outcome, "'interpret' cannot run here: requires jax 0.11 or newer", jax.__version__
        )


def test_help(command):
    assert "\n  bench kernels" in command("--help").out
    assert "\n  bench kernels" in command("bench", "--help").out
    outcome = command("bench", "kernels", "--help")
    assert "--page_size" in outcome.out and "--target" not in outcome.out


@needs_interpreter
def test_tiny(command, tmp_path):
    output = tmp_path / "figures.json"
    # Enough time for all figures on a busy machine.
    flags = [f"--output={output}", "--budget_seconds=100000.0", "--tiny"]
    outcome = command("bench", "kernels", *flags)
    assert (outcome.code, outcome.err) == (0, "")
    result = json.loads(
        output.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert result["command"] == flags
    assert (
        result["versions"]["jax"] == jax.__version__
        and result["device"] == "cpu"
        and result["interpreted"]
    )
    assert len(result["checks"]) == 6 and result["failures"] == []
    assert result["copy_bytes_per_second"] > 0 and result["fixed_seconds"] > 0
    rows = {(row["operation"], row["case"]): row for row in result["rows"]}
    assert list(rows) == [
        ("attention", "B=1 context=64 T=1"),
        ("attention", "B=1 context=128 T=3 tree"),
        ("sample_pass", "B=1 M=2 V=256 bfloat16 with noise"),
        ("residual_pass", "B=1 M=2 V=256 bfloat16 sampled drafts"),
        ("sample_pass", "B=1 M=2 V=256 bfloat16 without noise"),
        ("residual_pass", "B=1 M=2 V=256 bfloat16 one-hot drafts"),
        ("residual_pass", "B=1 M=2 V=256 bfloat16 mixed drafts"),
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
    rows_of_logits = [3, 2, 3, 1, 2]
    passes = [count * 256 * 2 for count in rows_of_logits]
    assert sizes == [(64 + 2) * 256, (128 + 3 * 2) * 256, *passes]
    assert set(rows["attention", "B=1 context=64 T=1"]["skipped"]) == {"jax"}
    assert "6 checks, 0 failures" in outcome.out


@needs_interpreter
class TestBrokenKernelsAreFound:
    """The error names the failed check, nothing is timed, and the exit code is 1."""

    def test_attention(self, command, tmp_path, monkeypatch):
        right = attention_kernel.paged_attention

        def shifted(*args, **kwargs):
            return jnp.roll(right(*args, **kwargs), 1, axis=3)

        monkeypatch.setattr(attention_kernel, "paged_attention", shifted)
        failures = self.failures(command, tmp_path, monkeypatch, check_vocab_sizes=())
        assert len(failures) == 1
        assert failures[0].startswith("attention, tree of 4 after (-1, 70)")
        assert "of the outputs are wrong" in failures[0]

    def test_sampled_tokens(self, command, tmp_path, monkeypatch):
        right = sampling_kernel.sample_pass

        def shifted(*args, **kwargs):
            stats = right(*args, **kwargs)
            return stats._replace(token=stats.token + 1)

        monkeypatch.setattr(sampling_kernel, "sample_pass", shifted)
        failures = self.failures(command, tmp_path, monkeypatch, check_works=())
        for name, failure in zip(("with noise", "without noise"), failures, strict=True):
            assert failure.startswith(f"sample_pass, {name}, V=300, bfloat16: sampled tokens: ")

    def test_residuals_without_subtraction(self, command, tmp_path, monkeypatch):
        right = sampling_kernel.residual_pass

        def of_target(*args, **kwargs):
            sample = right(*args, **kwargs)
            return sample._replace(token=sample.target_token)

        monkeypatch.setattr(sampling_kernel, "residual_pass", of_target)
        self.check_residuals(command, tmp_path, monkeypatch, "tokens of the residual: ")

    def test_residuals_of_one_kind_of_rows(self, command, tmp_path, monkeypatch):
        """A fault in mixed rows: q is a distribution where it should be one-hot."""
        right = sampling_kernel.residual_pass

        def sampled(target, distributions, draft_B, sampled_B, *args, **kwargs):
            return right(target, distributions, draft_B, None, *args, **kwargs)

        monkeypatch.setattr(sampling_kernel, "residual_pass", sampled)
        failures = self.failures(command, tmp_path, monkeypatch, check_works=())
        assert failures
        for failure in failures:
            assert failure.startswith("residual_pass, mixed drafts, V=300, bfloat16: ")

    def check_residuals(self, command, tmp_path, monkeypatch, problem):
        failures = self.failures(command, tmp_path, monkeypatch, check_works=())
        assert len(failures) == len(check.DRAFTS)
        for drafts, failure in zip(check.DRAFTS, failures, strict=True):
            assert failure.startswith(f"residual_pass, {drafts} drafts, V=300, bfloat16: {problem}")

    @staticmethod
    def failures(command, tmp_path, monkeypatch, **sizes):
        """Failures of a tiny run; `sizes` leaves out slow checks of other kernels."""
        monkeypatch.setattr(bench, "TINY", bench.TINY._replace(**sizes))
        output = tmp_path / "figures.json"
        outcome = command("bench", "kernels", f"--output={output}", "--tiny")
        assert outcome.code == 1
        result = json.loads(output.read_text())
        assert result["rows"] == []
        for failure in result["failures"]:
            assert f"specjax: failed: {failure}" in outcome.err
        return result["failures"]


class TestGPU:
    """`pytest -m gpu` in a subprocess."""

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

    def test_is_deselected_by_default(self):
        done = self.pytest("--collect-only")
        assert done.returncode == 5 and " deselected" in done.stdout, (
            done.stdout
        )  # 5: no tests were collected

    def test_fails_without_a_gpu(self):
        done = self.pytest("-m", "gpu", "-k", "TestAttention and ragged or second_call")
        assert done.returncode == 1, done.stdout
        assert (
            "2 errors" in done.stdout
            and "requires an NVIDIA GPU of compute capability 9.0" in done.stdout
        )
        assert not re.search(r"\d passed", done.stdout)
