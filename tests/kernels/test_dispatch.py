"""The choice of an implementation, on simulated devices."""

import types

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels import dispatch


def on(monkeypatch, platform: str, capability: str | None = None, **facts):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability, **facts)
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize("unsupported", [None, "requires other shapes"])
def test_hopper_runs_the_kernels_if_they_support_the_arguments(monkeypatch, unsupported):
    on(monkeypatch, "gpu", "9.0")
    assert dispatch.choose(None, unsupported) == ("xla" if unsupported else "mosaic_gpu")
    assert dispatch.choose("xla", unsupported) == "xla"
    if unsupported:
        with pytest.raises(ValueError, match="'mosaic_gpu' cannot run here: requires other shapes"):
            dispatch.choose("mosaic_gpu", unsupported)
    else:
        assert dispatch.choose("mosaic_gpu") == "mosaic_gpu"


@pytest.mark.parametrize(
    ("platform", "capability", "reason"),
    [
        ("cpu", None, "JAX runs on 'cpu'"),
        ("gpu", "8.0", "9.0 .Hopper., got 8.0"),
        ("gpu", "10.0", "9.0 .Hopper., got 10.0"),
        ("gpu", "gfx942", "JAX runs on"),
    ],
)
def test_elsewhere_an_explicit_choice_of_the_kernels_is_an_error_with_the_reason(
    monkeypatch, platform, capability, reason
):
    on(monkeypatch, platform, capability)
    assert dispatch.choose(None) == "xla"
    with pytest.raises(ValueError, match=reason):
        dispatch.choose("mosaic_gpu")


def test_an_unknown_name_is_an_error():
    expected = "unknown implementation 'triton'; choose from mosaic_gpu, xla, interpret"
    with pytest.raises(ValueError, match=expected):
        dispatch.choose("triton")


class TestInterpreter:
    """`interpret`: the function of `mosaic_gpu` with an argument, by explicit choice only."""

    NAME = "specjax.kernels.sampling"

    def test_it_calls_the_kernel_with_an_argument(self, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
        parameters = object()
        monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda: parameters, raising=False)
        assert dispatch.choose("interpret") == "interpret"
        interpreted = dispatch.function(self.NAME, "sample_pass", "interpret")
        assert interpreted.func is dispatch.function(self.NAME, "sample_pass", "mosaic_gpu")
        assert interpreted.keywords == {"interpret": parameters}

    def test_before_jax_0_11_the_error_names_the_version(self, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 10, 9))
        monkeypatch.setattr(jax, "__version__", "0.10.9")
        expected = "'interpret' cannot run here: requires jax 0.11 or newer .*, got 0.10.9"
        with pytest.raises(ValueError, match=expected):
            dispatch.choose("interpret")

    def test_it_supports_what_the_kernel_supports(self, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
        with pytest.raises(ValueError, match="'interpret' cannot run here: requires other shapes"):
            dispatch.choose("interpret", "requires other shapes")

    def test_it_is_never_the_default(self, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
        on(monkeypatch, "cpu")
        assert dispatch.choose(None) == "xla"
        on(monkeypatch, "gpu", "9.0")
        assert dispatch.choose(None) == "mosaic_gpu"


def test_compiling_for_a_gpu_that_is_absent():
    with dispatch.compiling_for((9, 0)):
        assert dispatch.choose(None) == "mosaic_gpu"
    with dispatch.compiling_for((8, 0)):
        assert dispatch.choose(None) == "xla"
    assert dispatch.choose(None) == "xla"


def test_the_choice_follows_the_default_device(monkeypatch):
    cpu = jax.devices()[1]
    on(monkeypatch, "gpu", "9.0", core_count=114)
    assert dispatch.choose(None) == "mosaic_gpu" and dispatch.num_processors() == 114
    with jax.default_device(cpu):
        assert dispatch.choose(None) == "xla" and dispatch.num_processors() == 132
