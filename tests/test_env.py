"""`specjax env` on a CPU and on simulated GPUs."""

import types

import jax
import pytest

import specjax
from specjax.cli import env
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch


def gpu(index: int, capability: str = "9.0", memory: int | None = 80 * 2**30):
    return types.SimpleNamespace(
        id=index,
        device_kind="NVIDIA H100",
        platform="gpu",
        compute_capability=capability,
        memory_stats=lambda: memory and {"bytes_limit": memory},
    )


def output(capsys) -> list[str]:
    env.main(["env"])
    return capsys.readouterr().out.splitlines()


def test_a_cpu_uses_xla_and_the_reason_is_printed(capsys):
    lines = output(capsys)
    assert lines[0].split() == ["specjax", specjax.__version__]
    assert ["jax", jax.__version__] in [line.split() for line in lines]
    assert any(line.startswith("device 0") and "(cpu)" in line for line in lines)
    assert [line.split() for line in lines if line.startswith(("attention", "verification"))] == [
        ["attention", "xla"],
        ["verification", "xla"],
    ]
    assert sum("Not mosaic_gpu" in line and dispatch.missing_gpu() in line for line in lines) == 2


def test_hopper_gpus_use_the_kernels_and_the_requirements_are_printed(capsys, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu(0), gpu(1, memory=None)])
    monkeypatch.setattr(jax, "devices", lambda: [gpu(0), gpu(1)])
    lines = output(capsys)
    assert "device 0          NVIDIA H100 (gpu), compute capability 9.0, 80.0 GiB for JAX" in lines
    assert "device 1          NVIDIA H100 (gpu), compute capability 9.0" in lines
    assert sum(line.endswith(" mosaic_gpu") for line in lines) == 2
    assert any("head_dim 64 or 128" in line for line in lines)


def test_the_reason_names_the_capability_of_another_gpu(capsys, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu(0, "8.0")])
    monkeypatch.setattr(jax, "devices", lambda: [gpu(0, "8.0")])
    assert any("got 8.0" in line for line in output(capsys))


def test_no_device_is_an_error(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(
        SpecJAXError, match=r"no device for JAX_PLATFORMS=cpu: Unable to initialize"
    ):
        env.main(["env"])
