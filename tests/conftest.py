"""Settings made before JAX starts, and fixtures that every test may use."""

# ruff: noqa: E402

from __future__ import annotations

import os
import pathlib

import jax

# Before jax makes its backend. Code generation takes most of the time that a tiny model needs;
# these change no step before it. A flag that XLA does not know ends the process, and the last of
# them does not exist in all versions. Eight devices are for what runs on a mesh; everything else
# runs on the first.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

# Compiled programs are kept between runs, one folder for each worker: JAX does not write its files
# atomically. A program that is read from there still counts as compiled.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
CACHE = pathlib.Path(__file__).parents[1] / ".cache" / "xla-tests" / jax.__version__ / WORKER
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

import pytest
from absl import flags

from specjax.cli import main
from support.cli import Outcome


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped():
    """Compiled programs are memory maps, of which Linux gives a process 65,530. Beyond them XLA
    dies of a segmentation fault."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `specjax ARGUMENTS` in this process. Flags are global, so those of the run are removed
    after it."""
    monkeypatch.setattr(
        main, "_configure_jax", lambda: None
    )  # a test leaves no compilation cache behind
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments) -> Outcome:
        capsys.readouterr()
        try:
            code = main.main(["specjax", *map(str, arguments)])
        finally:
            for name in list(flags.FLAGS):
                if flags.FLAGS.find_module_defining_flag(name).startswith("specjax."):
                    delattr(flags.FLAGS, name)
            flags.FLAGS.unparse_flags()
        return Outcome(code, *capsys.readouterr())

    return run
