"""Fetches a model's files from the Hugging Face hub, small ones first.

The config is enough to refuse a model, so the weights are fetched by a call of their own. Access
tokens, mirrors and offline mode are Hugging Face's environment variables and work by themselves.
Files that are in the cache are not fetched again; without a network the cache alone serves.
"""

import contextlib
import glob
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, constants, errors, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from kvconv.converter.checkpoint_files import require_weight_files, weight_files
from kvconv.converter.model_name import CONFIG_FILE
from kvconv.converter.quiet import quiet
from kvconv.errors import ExportError, ModelNotFoundError, root_cause

_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md")

# The HTTP library's; the hub's version decides which library that is.
_HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]


def fetch_small_files(
    model: str, revision: str | None, cache_dir: Path | None, *, config_only: bool = False
) -> Path:
    """Fetch everything but the weights; returns the snapshot's folder, named after its commit.

    Args:
        model: Hub id.
        revision: Branch, tag or commit; None for the default branch.
        cache_dir: Where hub files are kept; None is Hugging Face's own cache.
        config_only: Fetch the config, and code that may come with it, and nothing else.

    Raises:
        ModelNotFoundError: There is no such model, it cannot be reached, or it has no config.
    """
    # Subfolders hold other formats.
    patterns = (CONFIG_FILE, "*.py") if config_only else _SMALL_FILES
    folder = _snapshot(model, revision, cache_dir, patterns, ignore=("*/*",))
    if not (folder / CONFIG_FILE).is_file():
        gguf_files = [name for name in _list_files(model, folder.name) if name.endswith(".gguf")]
        remedy = (
            f"Name one of its GGUF files: {model}/{sorted(gguf_files)[0]}"
            if gguf_files
            else "Give a model that transformers can load."
        )
        raise ModelNotFoundError(
            f"The hub model {model} has no {CONFIG_FILE}. {remedy}", model=model
        )
    return folder


def fetch_weights(model: str, folder: Path, cache_dir: Path | None) -> None:
    """Fetch the weights into a snapshot: safetensors, or pickles where there are none.

    Args:
        model: Hub id.
        folder: The snapshot that `fetch_small_files` returned.
        cache_dir: The same as there.

    Raises:
        ModelNotFoundError: They cannot be reached, or some are missing on the hub.
        ExportError: The disk has no room for them.
    """
    here = {path.name for path in folder.iterdir()}
    wanted = weight_files(model, folder, here)
    if wanted and here.issuperset(wanted):
        return
    there = _list_files(model, folder.name)
    wanted = weight_files(model, folder, there)
    remedy = "The fault is on the hub: choose another --revision, or another model."
    require_weight_files(model, wanted, there, remedy=remedy)
    missing = {name: there[name] for name in wanted if name not in here}
    _check_free_space(model, folder, sum(missing.values()))
    _snapshot(model, folder.name, cache_dir, [glob.escape(name) for name in missing])


def fetch_gguf_file(
    model: str,
    file: str,
    revision: str | None,
    cache_dir: Path | None,
    *,
    only_cached: bool = False,
) -> Path:
    """Fetch one GGUF file of a hub model; returns the snapshot's folder, named after its commit.

    Args:
        model: Hub id.
        file: The file's name.
        revision: Branch, tag or commit; None for the default branch.
        cache_dir: Where hub files are kept; None is Hugging Face's own cache.
        only_cached: Refuse to fetch it: its header is all that is wanted.

    Raises:
        ModelNotFoundError: There is no such model or file, or it cannot be reached.
        ExportError: The disk has no room for it.
    """
    folder = _snapshot(model, revision, cache_dir, ["README.md"])
    if (folder / file).is_file():
        return folder
    if only_cached:
        raise ModelNotFoundError(
            f"{model}/{file} is not on this machine, and its header cannot be read without "
            f"fetching all of it. Give the hub model that it was made from, or fetch it first "
            f"(hf download {model} {file}).",
            model=f"{model}/{file}",
        )
    there = _list_files(model, folder.name)
    if file not in there:
        others = sorted(name for name in there if name.endswith(".gguf"))
        remedy = f"It has {', '.join(others[:5])}." if others else "It has no GGUF files at all."
        raise ModelNotFoundError(
            f"The hub model {model} has no file {file}. {remedy}", model=f"{model}/{file}"
        )
    folder.mkdir(parents=True, exist_ok=True)  # there may be no model card
    _check_free_space(model, folder, there[file])
    return _snapshot(model, folder.name, cache_dir, [glob.escape(file)])


def license_of(folder: Path) -> str | None:
    """Return the license that a model card's front matter states."""
    readme = folder / "README.md"
    if not readme.is_file():
        return None
    name = ModelCard.load(readme, ignore_metadata_errors=True).data.license
    return name if isinstance(name, str) else None


class _Bar(tqdm):
    """A progress bar on terminals only, which goes away when it is full."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"disable": None, "leave": False} | kwargs)


def _snapshot(
    model: str,
    revision: str | None,
    cache_dir: Path | None,
    patterns: Sequence[str],
    *,
    ignore: Sequence[str] = (),
) -> Path:
    """Fetch the files that match, as far as they are not in the cache; returns their folder."""
    with _hub_errors(model, revision):
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignore),
                tqdm_class=_Bar,
            )
        )


def _list_files(model: str, commit: str) -> dict[str, int]:
    """Return the files on the hub with their sizes in bytes."""
    with _hub_errors(model, commit):
        siblings = HfApi().model_info(model, revision=commit, files_metadata=True).siblings
    return {sibling.rfilename: sibling.size or 0 for sibling in siblings or ()}


def _check_free_space(model: str, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"The disk of the cache {folder.parents[2]} has {free / 1e6:.0f} MB free, and "
            f"{needed / 1e6:.0f} MB of {model} must be fetched. Free some space, or choose another "
            f"place with --cache-dir."
        )


@contextlib.contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn the hub library's errors into one sentence and a remedy, without its own notes."""
    try:
        with quiet(progress=True):
            yield
    # RuntimeError: what the library for Xet storage raises, in Rust, for most of its troubles.
    except (_HTTPError, HFValidationError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # it is about this machine: a full disk, permissions
        raise ModelNotFoundError(_explain(model, revision, error), model=model) from error


def _explain(model: str, revision: str | None, error: Exception) -> str:
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub was of no help
    page = f"{constants.ENDPOINT}/{model}"
    match error:
        case RevisionNotFoundError():
            return f"{model} has no revision {revision!r}. Leave --revision out for the latest."
        case GatedRepoError():
            return (
                f"{model} is gated: its owner wants terms to be accepted first. Accept them on "
                f"{page}, then set HF_TOKEN to a token of that account, or run `hf auth login`."
            )
        case RepositoryNotFoundError() | HFValidationError():
            return (
                f"There is no folder and no hub model {model}. Check the spelling; a private model "
                f"needs an access token: set HF_TOKEN, or run `hf auth login`."
            )
        case HfHubHTTPError(response=response) if response.status_code == 401:
            return (
                f"The hub refuses the access token that was sent for {model}. Set HF_TOKEN to a "
                f"valid one, or run `hf auth login`; tokens are made at {constants.ENDPOINT}"
                f"/settings/tokens."
            )
        case HfHubHTTPError(response=response) if response.status_code == 403:
            return (
                f"The access token that was sent may not read {model}. Give the token that right "
                f"at {constants.ENDPOINT}/settings/tokens, or set HF_TOKEN to another one."
            )
        case HfHubHTTPError(response=response):
            return (
                f"The hub at {constants.ENDPOINT} did not give {model}: it answered "
                f"{response.status_code} {response.reason_phrase}. Try again later, or give a "
                f"local folder."
            )
        case OfflineModeIsEnabled() | LocalEntryNotFoundError():
            return (
                f"{model} is not a folder here, its files are not all in the local cache, and the "
                f"hub cannot be reached because HF_HUB_OFFLINE is set. Unset it, or give a folder "
                f"or a .gguf file."
            )
    return (
        f"The hub at {constants.ENDPOINT} cannot be reached for {model}, or the connection broke: "
        f"{root_cause(error)} Check the network and try again (files that are complete are not "
        f"fetched again), or give a folder or a .gguf file."
    )
