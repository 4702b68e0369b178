"""Every kernel, in every configuration that matters, compiles for an H100 and fits it."""

import gate
import pytest

from specjax.kernels.gpu import aot, resources

REPORT = """
ptxas info    : Compiling entry function 'paged_attention_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_attention_mosaic_gpu_kernel
    0 bytes stack frame, 24 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
  call void @mosaic_gpu_launch_kernel(ptr %0, i32 4, i32 8, i32 8, i32 0, i32 0, i32 0, i32 384, i32 1, i32 1, \
i32 240000, ptr %1, ptr %339)
"""


def table(text: str) -> list[list[str]]:
    """The cells of a table in Markdown, without its head."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return rows[2:]


@pytest.mark.parametrize(
    ("name", "every"), [("resources", 5), pytest.param("resources_all", 1, marks=pytest.mark.slow)]
)
def test_configurations_compile_and_fit(name, every, tmp_path):
    run = gate.run(name, tmp_path)
    assert run.code == 0, run.out[-4000:]
    chosen = list(resources.configurations())[::every]
    assert {c.kernel for c in chosen} == {c.kernel for c in resources.configurations()}
    measured = table(run.out)
    assert [row[:2] for row in measured] == [[c.kernel, c.description] for c in chosen]
    for row in measured:
        threads, registers, spilled, shared = map(int, row[2:])
        assert spilled == 0, row
        assert 0 < shared <= 232448, row
        assert 0 < threads * registers <= 65536, row


def test_the_table_in_the_repository_has_these_configurations():
    """Its numbers may be those of another version of jax, which it names."""
    text = resources.TABLE.read_text()
    assert "by jax 0." in text
    expected = [[c.kernel, c.description] for c in resources.configurations()]
    assert [row[:2] for row in table(text)] == expected
    assert len(expected) > 30


def test_spills_and_too_much_shared_memory_are_noticed():
    [found] = aot.parse_resources(REPORT)
    assert found == aot.Resources("paged_attention", 384, 168, 60, 240001)
    assert len(resources.problems(found, aot.shared_memory_limit("h100"))) == 2
    assert not resources.problems(found._replace(spill_bytes=0, shared_memory=232448), 232448)


@pytest.mark.skipif(gate.importable(), reason="the wheels are installed here")
def test_without_the_wheels_the_error_says_what_is_missing():
    with pytest.raises(RuntimeError, match="the extra 'aot'"):
        aot.mesh("h100")


def test_a_target_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="choose from a100, h100"):
        aot.mesh("h1000")


def test_a_report_of_an_unknown_form_is_an_error():
    with pytest.raises(RuntimeError, match="unknown form"):
        aot.parse_resources(REPORT.replace("spill stores", "spilled"))
    with pytest.raises(RuntimeError, match="unknown form"):
        aot.parse_resources(REPORT.replace("launch_kernel", "start"))
