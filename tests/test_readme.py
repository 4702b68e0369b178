"""The README's Python code, run with a small model in place of the real one."""

import pathlib
import re

import specjax
from specjax.engine import hub
from support import folders

CONFIG = {"num_hidden_layers": 1, "max_position_embeddings": 1024}
README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    folder, load = (
        folders.write_folder(tmp_path / "model", CONFIG),
        specjax.load,
    )
    monkeypatch.setattr(specjax, "load", lambda path, **options: load(folder, **options))
    monkeypatch.setattr(hub, "resolve", lambda name, revision=None: folder)
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert "drafts accepted" in capsys.readouterr().out
    drafter = blocks[4].split("class Similar")[1].split("result =")[0].strip()
    assert len(drafter.splitlines()) < 30, "the README promises a drafter in fewer lines"


def test_the_files_it_names_exist():
    for name in re.findall(r"`((?:tests|specjax|configs)/[\w/.]+\.\w+)`", README.read_text()):
        assert (README.parent / name).exists() or name == "specjax/drafters/similar.py", name
