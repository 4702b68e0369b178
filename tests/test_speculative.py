"""Which drafter an engine uses: the forms of vLLM, and everything that is refused."""

from __future__ import annotations

import pathlib
import re

import pytest

from specjax.checkpoints_convert import eagle
from specjax.engine import load, speculative
from specjax.engine.speculative import SpeculativeConfig
from specjax.errors import SpecJAXError
from support import folders

HEAD = next(eagle.BUNDLED.glob("*"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    return str(folders.write_folder(tmp_path_factory.mktemp("draft") / "model"))


def filled(fields: dict, draft: str) -> dict:
    """Fields with the path of the draft in place of "DRAFT", and that of a head for "HEAD"."""
    paths = {"DRAFT": draft, "HEAD": str(HEAD)}
    return {
        name: paths.get(value, value) if isinstance(value, str) else value
        for name, value in fields.items()
    }


def test_a_checkpoint_tells_its_drafter(draft, tmp_path):
    assert load.find_drafter(draft) == "draft_model"
    assert load.find_drafter(HEAD) == "eagle"
    load.convert(draft, tmp_path / "converted")
    assert load.find_drafter(tmp_path / "converted") == "draft_model"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"model": None}, SpeculativeConfig()),
        ({"model": "none"}, SpeculativeConfig()),
        (
            {"model": "ngram", "num_speculative_tokens": 4},
            SpeculativeConfig("ngram", None, 4),
        ),
        ({"model": "ngram,eagle"}, SpeculativeConfig("ngram,eagle")),
        (
            {"model": "DRAFT", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2},
            SpeculativeConfig("draft_model", "DRAFT", 5, draft_tensor_parallel_size=2),
        ),
        ({"model": "HEAD"}, SpeculativeConfig("eagle", "HEAD")),
    ],
)
def test_a_speculative_model(draft, arguments, expected):
    expected = SpeculativeConfig(**filled(vars(expected), draft))
    assert speculative.from_model(**filled(arguments, draft)) == expected


def test_the_name_of_a_drafter_comes_before_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("ngram").mkdir()
    assert speculative.from_model("ngram").drafter == "ngram"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5},
            SpeculativeConfig("ngram", None, 4, {"max_n": 5}),
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 1, "max_n": 3, "model": None},
            SpeculativeConfig("ngram", None, None, {"min_n": 1, "max_n": 3}),
        ),
        (
            {"model": "DRAFT", "num_speculative_tokens": 5},
            SpeculativeConfig("draft_model", "DRAFT", 5),
        ),
        (
            {
                "method": "draft_model",
                "model": "DRAFT",
                "draft_tensor_parallel_size": 2,
                "rejection_sample_method": "standard",
                "draft_sample_method": "probabilistic",
            },
            SpeculativeConfig(
                "draft_model", "DRAFT", draft_tensor_parallel_size=2, verify="rejection"
            ),
        ),
        ({"method": "eagle3", "model": "HEAD"}, SpeculativeConfig("eagle", "HEAD")),
        ({"method": "ngram,eagle"}, SpeculativeConfig("ngram,eagle")),
        ({"model": "ngram"}, SpeculativeConfig("ngram")),
    ],
)
def test_a_speculative_config(draft, fields, expected):
    expected = SpeculativeConfig(**filled(vars(expected), draft))
    assert speculative.from_dict(filled(fields, draft)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None, "num_speculative_tokens": 3}, "num_speculative_tokens is 3, but no specu"),
        ({"model": "none", "draft_tensor_parallel_size": 2}, "of drafts is 2, but no speculative"),
        ({"model": None, "revision": "v1"}, "the revision of a draft is 'v1', but no speculative"),
        ({"model": "ngram", "revision": "v1"}, "revision 'v1' is for a draft, but 'ngram' is a dr"),
        ({"model": "ngram", "draft_tensor_parallel_size": 2}, "the drafter 'ngram' has no draft"),
        ({"model": "DRAFT", "draft_tensor_parallel_size": 0}, "must be an integer of at least 1, "),
        ({"model": "ngram,medusa"}, "unknown drafter 'medusa'; choose from none, draft_model, ea"),
        ({"model": "./no/such"}, "./no/such does not exist; give the folder of a model, or the na"),
        (
            {"model": "ngrm"},
            "'ngrm' is not a drafter (draft_model, eagle, ngram), and ngrm is neit",
        ),
        ({"model": 3}, "a model must be a path or a name, got 3"),
    ],
)
def test_a_speculative_model_that_cannot_be_used(draft, arguments, message):
    with pytest.raises(SpecJAXError, match=re.escape(message)):
        speculative.from_model(**filled(arguments, draft))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("ngram", "speculative_config must be a dict, got 'ngram'"),
        ({}, "speculative_config requires a method or a model, got {}"),
        ({"num_speculative_tokens": 3}, "requires a method or a model, got {'num_speculative_tok"),
        ({"method": 3}, "method of speculative_config must be a string, got {'method': 3}"),
        ({"method": "medusa"}, "unknown drafter 'medusa'; choose from none, draft_model, eagle, n"),
        ({"method": "none"}, "speculative_config must be None for plain decoding, got method 'no"),
        ({"method": "ngram", "revision": "v1"}, "speculative_config: revision 'v1' requires a mo"),
        (
            {"method": "ngram", "parallel_drafting": True},
            "speculative_config: unknown key 'parallel_drafting' for the drafter 'ngram'; choose "
            "from method, model, revision, num_speculative_tokens, draft_tensor_parallel_size, "
            "rejection_sample_method, draft_sample_method, min_n, max_n, prompt_lookup_min, "
            "prompt_lookup_max",
        ),
        (
            {"model": "DRAFT", "prompt_lookup_max": 3},
            "unknown key 'prompt_lookup_max' for the drafter 'draft_model'; choose from method",
        ),
        (
            {"method": "ngram", "rejection_sample_method": "block"},
            "rejection_sample_method must be one of 'standard', got 'block'",
        ),
        (
            {"method": "ngram", "draft_sample_method": "greedy"},
            "draft_sample_method must be 'probabilistic', since drafts are sampled from the",
        ),
    ],
)
def test_a_speculative_config_that_cannot_be_used(draft, fields, message):
    with pytest.raises(SpecJAXError, match=re.escape(message)):
        speculative.from_dict(filled(fields, draft) if isinstance(fields, dict) else fields)
