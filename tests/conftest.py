"""Settings made before JAX starts, and fixtures that every test may use."""

# ruff: noqa: E402

from __future__ import annotations

import os
import pathlib

import jax

from support import xla

# Before JAX creates its backend. Eight devices are for meshes; all else runs on the first one.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), xla.quick_flags(8)])

# A path that does not exist may be the name of a Hugging Face repository: no test asks the network.
os.environ["HF_HUB_OFFLINE"] = "1"

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

# With `--dist loadfile --no-loadscope-reorder`, workers take files in the order of collection. The
# longest ones come first, so that no worker has one of them left when the others are done.
LONGEST = (
    "test_smollm2.py",
    "test_decode.py",
    "test_parallel.py",
    "test_drafters.py",
    "test_train.py",
    "test_generate.py",
    "test_bench.py",
    "test_decode_step.py",
    "test_mesh_step.py",
    "test_processes.py",
    "test_eagle.py",
    "test_sampling_kernels.py",
)


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped():
    """Drops compiled programs when there are many.

    They are memory maps, of which Linux allows a process 65,530. XLA crashes beyond this limit.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `specjax ARGUMENTS` in this process.

    Flags are global, so those of the command are removed after the run.
    """
    monkeypatch.setattr(main, "_configure_jax", lambda: None)  # no compilation cache is left behind
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
