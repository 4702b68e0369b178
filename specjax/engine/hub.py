"""From the name of a model to its local folder: a path, the Hugging Face cache, a download."""

from __future__ import annotations

import os
import pathlib
import re

from specjax import files
from specjax.checkpoints_convert import hf
from specjax.errors import SpecJAXError

REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")
DEFAULT_REVISION = "main"
# What is read of a repository. In patterns of huggingface_hub `*` stands for folders too.
CONFIG = "config.json"
DOWNLOADED = (
    CONFIG,
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "params/*",
)
# The same weights again, in another format.
NOT_DOWNLOADED = ("*/*.safetensors", "consolidated*.safetensors")
_ADVICE = (
    "give the folder of a model, or the name of a repository of Hugging Face, such as "
    "meta-llama/Llama-3.2-1B-Instruct"
)


def resolve(
    name: str | os.PathLike, revision: str | None = None, *, has_weights: bool = True
) -> pathlib.Path:
    """Returns the local folder or file of a model.

    Args:
      name: a path; or the name of a Hugging Face repository, such as
        "meta-llama/Llama-3.2-1B-Instruct". A path that exists comes first. A repository is looked
        up in the local cache, where nothing is asked of the network, and downloaded if it is not
        there, with progress on stderr.
      revision: branch, tag or commit of the repository; "main" by default.
      has_weights: if False, config.json is enough, and nothing else is downloaded.

    Raises:
      SpecJAXError: if there is no such path, and the repository is not in the cache and cannot be
        downloaded. The message says what was tried.
    """
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise SpecJAXError(f"a model must be a path or a name, got {name!r}; {_ADVICE}")
    path = files.expand(name)
    if files.exists(path):
        if revision is not None:
            raise SpecJAXError(
                f"revision {revision!r} is for a repository of Hugging Face, but {name} is a local "
                "path"
            )
        return path
    name = os.path.expanduser(name)
    if not REPOSITORY.fullmatch(name) or name.endswith(".gguf"):
        raise SpecJAXError(f"{name} does not exist; {_ADVICE}")
    revision = DEFAULT_REVISION if revision is None else revision
    cache = cache_folder()
    cached = _find(cache, name, revision)
    missing = [] if cached is None else _missing_files(cached, has_weights)
    if cached is not None and not missing:
        return cached
    tried = f"{name} is neither a local path nor in the Hugging Face cache {cache}"
    if cached is not None:
        tried = f"{name} is incomplete in the Hugging Face cache {cache}, without {missing[0]}"
    patterns = DOWNLOADED if has_weights else (CONFIG,)
    return _download(name, revision, cache, patterns, tried)


def cache_folder() -> pathlib.Path:
    """Returns the folder in which Hugging Face libraries keep repositories."""
    folder = os.environ.get("HF_HUB_CACHE")
    if not folder:
        parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.environ.get("HF_HOME") or os.path.join(parent, "huggingface")
        folder = os.path.join(home, "hub")
    return files.expand(os.path.expandvars(folder))


def _find(cache: pathlib.Path, name: str, revision: str) -> pathlib.Path | None:
    """Returns the folder of a repository in the cache; None if it has none."""
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = revision
    if not COMMIT.fullmatch(revision):
        reference = repository / "refs" / revision
        if ".." in pathlib.PurePath(revision).parts or not reference.is_file():
            return None
        commit = files.read_text(reference).strip()
    folder = repository / "snapshots" / commit
    return folder if folder.is_dir() else None


def _missing_files(folder: pathlib.Path, has_weights: bool) -> list[str]:
    """Returns the files that a folder lacks where its download was interrupted."""
    names = [CONFIG]
    has_index = not (folder / hf.SINGLE).exists() and (folder / hf.INDEX).exists()
    if has_weights and has_index:
        weight_map = files.read_json(folder / hf.INDEX).get("weight_map") or {}
        names += sorted(set(map(str, weight_map.values())))
    elif has_weights and not any(folder.glob("*.safetensors")) and not (folder / "params").exists():
        names.append(hf.SINGLE)
    return [name for name in names if not (folder / name).exists()]


def _is_offline() -> bool:
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _download(
    name: str, revision: str, cache: pathlib.Path, patterns: tuple[str, ...], tried: str
) -> pathlib.Path:
    """Downloads what is read of a repository into the cache, and returns its folder there.

    Args:
      name: of the repository.
      revision: branch, tag or commit.
      cache: the cache.
      patterns: of the files.
      tried: what the message of an error begins with.
    """
    if "/" not in name:
        raise SpecJAXError(f"{tried}; {_ADVICE}")
    if _is_offline():
        raise SpecJAXError(f"{tried}, and HF_HUB_OFFLINE forbids to download it; {_ADVICE}")
    try:
        import huggingface_hub
    except ImportError as error:
        raise SpecJAXError(
            f"{tried}, and huggingface_hub, which downloads models, is not installed; install it, "
            "or give the folder of a model"
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            allow_patterns=list(patterns),
            ignore_patterns=list(NOT_DOWNLOADED),
        )
    except Exception as error:  # of the hub, of HTTP, of files: all mean that there is no model
        reason = _reason(error, name, revision)
        raise SpecJAXError(f"{tried}, and cannot be downloaded: {reason}") from error
    return pathlib.Path(folder)


def _reason(error: Exception, name: str, revision: str) -> str:
    """Returns why a repository cannot be downloaded, and what would be right."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"access is restricted; accept the terms at https://huggingface.co/{name} and log in "
            "with `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "Hugging Face has no such repository, or it is private; check the name, or log in with "
            "`hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # such as a network that cannot be reached
    return f"{type(error).__name__}: {files.one_line(error)}"
