"""Fetches a model's files from the Hugging Face hub, small ones first.

The config is enough to refuse a model, so the weights are fetched by a call of their own. Access
tokens, mirrors and offline mode are Hugging Face's environment variables and work by themselves.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvconv.converter.quiet import quiet
from kvconv.errors import ModelNotFoundError

CONFIG_FILE = "config.json"

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "README.md")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def is_hub_id(model: str) -> bool:
    """Tell whether a name could be a hub id rather than a path."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def fetch_small_files(model: str, revision: str | None, cache_dir: Path | None) -> Path:
    """Fetch everything but the weights; returns the snapshot's folder, named after its commit.

    Raises:
        ModelNotFoundError: There is no such model, or it cannot be reached.
    """
    with _hub_errors(model, revision):
        hf_hub_download(model, CONFIG_FILE, revision=revision, cache_dir=cache_dir)
        return _snapshot(model, revision, cache_dir, _SMALL_FILES)


def fetch_weights(model: str, revision: str | None, cache_dir: Path | None) -> None:
    """Fetch the weights into the same snapshot: safetensors, or pickles where there are none.

    Raises:
        ModelNotFoundError: They cannot be reached.
    """
    for pattern in _WEIGHT_FILES:
        with _hub_errors(model, revision):
            folder = _snapshot(model, revision, cache_dir, [pattern])
        if any(folder.glob(pattern)):
            return


def license_of(folder: Path) -> str | None:
    """Return the license that a model card's front matter states."""
    readme = folder / "README.md"
    if not readme.is_file():
        return None
    name = ModelCard.load(readme, ignore_metadata_errors=True).data.license
    return name if isinstance(name, str) else None


def _snapshot(
    model: str, revision: str | None, cache_dir: Path | None, patterns: Sequence[str]
) -> Path:
    """Fetch the files at the top of a repository that match; subfolders hold other formats."""
    return Path(
        snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
        )
    )


@contextlib.contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn the hub library's errors into one sentence and a remedy, without its own notes."""
    try:
        with quiet():
            yield
    except RevisionNotFoundError as error:
        message = f"{model} has no revision {revision!r}. Leave --revision out for the latest."
        raise ModelNotFoundError(message, model=model) from error
    except GatedRepoError as error:
        message = (
            f"{model} needs its owner's permission. Accept its terms on its hub page, then set "
            f"HF_TOKEN to your access token."
        )
        raise ModelNotFoundError(message, model=model) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        message = (
            f"There is no folder and no hub model {model}. Check the spelling; a private model "
            f"needs HF_TOKEN."
        )
        raise ModelNotFoundError(message, model=model) from error
    except (LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        message = (
            f"{model} is not a folder here, is not in the local cache, and the hub cannot be "
            f"reached. Connect to the network (and unset HF_HUB_OFFLINE), or give a folder or a "
            f".gguf file."
        )
        raise ModelNotFoundError(message, model=model) from error
    except HfHubHTTPError as error:
        message = f"The hub did not give {model}: {error}. Try again, or give a local folder."
        raise ModelNotFoundError(message, model=model) from error
