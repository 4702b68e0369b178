"""Which implementation runs, on machines that need not be at hand."""

import types

import jax
import pytest

from specjax.kernels import dispatch


def on(monkeypatch, platform: str, capability: str | None = None, **facts):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability, **facts)
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize("unsupported", [None, "it needs other shapes"])
def test_hopper_runs_the_kernels_where_they_can_do_it(monkeypatch, unsupported):
    on(monkeypatch, "gpu", "9.0")
    assert dispatch.choose(None, unsupported) == ("xla" if unsupported else "mosaic_gpu")
    assert dispatch.choose("xla", unsupported) == "xla"
    if unsupported:
        with pytest.raises(ValueError, match="'mosaic_gpu' cannot run here: it needs other shapes"):
            dispatch.choose("mosaic_gpu", unsupported)
    else:
        assert dispatch.choose("mosaic_gpu") == "mosaic_gpu"


@pytest.mark.parametrize(
    ("platform", "capability", "reason"),
    [
        ("cpu", None, "JAX runs on 'cpu'"),
        ("gpu", "8.0", "this one has 8.0"),
        ("gpu", "10.0", "this one has 10.0"),
        ("gpu", "gfx942", "JAX runs on"),
    ],
)
def test_elsewhere_a_wish_for_the_kernels_is_refused_with_the_reason(
    monkeypatch, platform, capability, reason
):
    on(monkeypatch, platform, capability)
    assert dispatch.choose(None) == "xla"
    with pytest.raises(ValueError, match=reason):
        dispatch.choose("mosaic_gpu")


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'triton' does not exist; there is: mosaic_gpu, xla"):
        dispatch.choose("triton")


def test_compiling_for_a_gpu_that_is_absent():
    with dispatch.compiling_for((9, 0)):
        assert dispatch.choose(None) == "mosaic_gpu"
    with dispatch.compiling_for((8, 0)):
        assert dispatch.choose(None) == "xla"
    assert dispatch.choose(None) == "xla"


def test_the_default_device_decides(monkeypatch):
    cpu = jax.devices()[1]
    on(monkeypatch, "gpu", "9.0", core_count=114)
    assert dispatch.choose(None) == "mosaic_gpu" and dispatch.num_processors() == 114
    with jax.default_device(cpu):
        assert dispatch.choose(None) == "xla" and dispatch.num_processors() == 132
