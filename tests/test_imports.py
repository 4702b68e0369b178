"""Rules that the source text shows: imports flow one way, and only `main` reads flags.

Imports inside functions count too.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

from specjax.drafters import registry

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = {
    "specjax.kernels": ROOT / "kernels",
    "specjax.checkpoints_convert": ROOT / "checkpoints_convert",
    "specjax": ROOT / "specjax",
}

# Lowest first. A module imports from lower layers; within the last two layers, any import that
# forms no cycle is allowed.
LAYERS = (
    ("specjax.errors", "specjax.lax_utils", "specjax.linear"),
    ("specjax.dtypes",),
    ("specjax.config",),
    ("specjax.parallel",),
    ("specjax.kv_cache", "specjax.sampling", "specjax.processors"),
    ("specjax.llama",),
    ("specjax.drafters",),
    ("specjax.verify",),
    ("specjax.decode",),
    ("specjax",),  # engine, formats, tokenizer and all else outside the core
    ("specjax.cli",),
)


def sources() -> dict[str, pathlib.Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [
                part
                for part in path.relative_to(folder).with_suffix("").parts
                if part != "__init__"
            ]
            found[".".join([package, *parts])] = path
    return found


SOURCES = sources()


def imports(module: str) -> set[str]:
    """Modules of specjax that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in SOURCES or name in FOLDERS else node.module for name in names}
    # `from specjax import x` in the package's own __init__ names no module.
    return {name for name in found if name.split(".")[0] == "specjax" and name != module}


def layer(module: str) -> int:
    # A longer prefix is more specific: specjax.cli.main is in the layer of specjax.cli, not of
    # specjax.
    matches = [
        (len(name), i)
        for i, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    return max(matches)[1]


def in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_imports_only_from_lower_layers(module):
    for imported in imports(module):
        if in_package(module, "specjax.kernels"):
            assert in_package(imported, "specjax.kernels"), f"{module} imports {imported}"
        elif not in_package(imported, "specjax.kernels"):
            same_is_fine = layer(module) >= len(LAYERS) - 2 or imported in (
                "specjax.drafters",
                "specjax.drafters.base",
                "specjax.drafters.first_of",
            )
            assert layer(imported) < layer(module) + same_is_fine, f"{module} imports {imported}"


def test_there_are_no_import_cycles():
    finished, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in finished:
            path.append(module)
            for imported in imports(module) & SOURCES.keys():
                visit(imported)
            path.pop()
            finished.add(module)

    # A package's __init__ and its modules may name each other.
    for module in SOURCES:
        if SOURCES[module].name != "__init__.py":
            visit(module)


def test_imports_of_the_core_are_found():
    """Guards the tests above against finding nothing."""
    assert {"specjax.errors", "specjax.config", "specjax.kernels.dispatch"} <= SOURCES.keys()
    assert {
        "specjax.llama",
        "specjax.verify",
        "specjax.drafters.base",
        "specjax.sampling",
    } <= imports("specjax.decode")
    assert "specjax.kernels.paged_attention" in imports("specjax.llama")


def test_commands_do_not_import_pallas():
    """Commands import it only with a kernel that needs it."""
    module = "jax.experimental.pallas.mosaic_gpu"
    code = f"import sys, specjax.cli.generate; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# These modules show, compare or measure particular drafters, or export their types.
MAY_NAME_DRAFTERS = {
    "specjax",
    "specjax.bench.baselines",
    "specjax.bench.gpu",
    "specjax.cli.bench_baselines",
    "specjax.cli.demo",
}


def names_a_drafter(module: str) -> list[str]:
    """Imports of a drafter's own modules, and strings that are the names of drafters."""
    own_modules = {f"specjax.drafters.{name}" for name in registry.names()}
    for drafter in registry.names():
        for own in registry.modules(drafter):
            own_modules |= {own.FORMAT, own.OBJECTIVE} - {None}
    if module in own_modules or module.startswith("specjax.drafters"):
        return []
    found = sorted(imports(module) & own_modules)
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(",")
            found += [node.value] * any(part in registry.names() for part in parts)
    return found


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - MAY_NAME_DRAFTERS))
def test_no_other_module_names_a_drafter(module):
    """A drafter has one file for its algorithm, one for checkpoints and one for its objective."""
    assert not names_a_drafter(module)


def test_names_of_drafters_are_found():
    """Guards the test above against finding nothing."""
    assert "ngram" in names_a_drafter("specjax.cli.demo")
    assert names_a_drafter("specjax") == ["specjax.checkpoints_convert.eagle"]


# Functions of `specjax.cli.flags` that read flags for `main`.
FLAG_READERS = ("decoding", "mesh_degrees", "read", "given", "invocation")
COMMANDS = sorted(
    module
    for module in SOURCES
    if in_package(module, "specjax.cli") and module != "specjax.cli.flags"
)


def reads_of_flags(source: str) -> list[str]:
    """Functions other than `main` that read flags, in the order of the source."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name == "main":
            continue
        for node in ast.walk(function):
            is_global = isinstance(node, ast.Name) and node.id == "FLAGS"
            # `flags.FLAGS`, or a reader of `specjax.cli.flags`, which commands call `common_flags`.
            names = {"flags": ("FLAGS",), "common_flags": FLAG_READERS}
            is_attribute = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.attr in names.get(node.value.id, ())
            )
            if is_global or is_attribute:
                found.append(function.name)
    return found


@pytest.mark.parametrize("module", COMMANDS)
def test_only_main_reads_flags(module):
    readers = reads_of_flags(SOURCES[module].read_text())
    # The help of a command is printed from absl's flags; no value is read.
    assert readers == (["_describe"] if module == "specjax.cli.main" else [])


@pytest.mark.parametrize(
    "read", ["FLAGS.steps", "flags.FLAGS.steps", "common_flags.mesh_degrees()"]
)
def test_reads_of_flags_are_found(read):
    """Guards the test above against finding nothing."""
    source = f"def main(argv):\n    {read}\n\n\ndef _objective():\n    return {read}\n"
    assert reads_of_flags(source) == ["_objective"]
