"""The files of a checkpoint: which ones transformers would read, and whether they are whole.

Repositories often hold the same weights several times (`pytorch_model.bin` beside
`model.safetensors`, `consolidated.safetensors` beside shards), so patterns would fetch too much.
The checks are cheap: they read small files and the headers of large ones, and name what is wrong.
"""

import json
import zipfile
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvconv.errors import ModelNotFoundError, UnsupportedModelError, root_cause

_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""A whole checkpoint and the index of a sharded one, in the order of transformers' preference."""
_JSON_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_FLOATS = {"F64", "F32", "F16", "BF16"}
_ZIP_MAGIC = b"PK"
_LFS_POINTER = b"version https://git-lfs"


def check_small_files(model: str, folder: Path) -> None:
    """Refuse damaged settings; transformers goes on without some, and loses EOS ids with them.

    Raises:
        ModelNotFoundError: A file is there, and is not a JSON object.
    """
    for path in (*folder.glob("*.json"), *folder.glob("*.model")):
        _check_no_pointer(model, path)
    for name in _JSON_OBJECTS:
        path = folder / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise _damaged(model, name, root_cause(error)) from error
        if not isinstance(value, dict):
            raise _damaged(model, name, f"it is not a JSON object but {str(value)[:40]!r}.")


def weight_files(model: str, folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the files that hold the weights; none if there are no weights.

    Args:
        model: What the user calls the model, for errors.
        folder: Holds the index of a sharded checkpoint.
        names: The files that there are, here or on the hub.

    Raises:
        ModelNotFoundError: The index is damaged.
    """
    for whole, index in _WEIGHTS:
        if whole in names:
            return (whole,)
        if (folder / index).is_file():
            return _shards(model, folder / index)
    return ()


def require_weight_files(
    model: str, wanted: Collection[str], names: Collection[str], *, remedy: str
) -> None:
    """Refuse a checkpoint without weights, or with some missing.

    Raises:
        ModelNotFoundError: Says which file is missing, and the remedy.
    """
    if not wanted:
        gguf_files = sorted(name for name in names if name.endswith(".gguf"))
        if gguf_files:
            remedy = f"Name one of its GGUF files instead: {model.rstrip('/')}/{gguf_files[0]}"
        expected = ", ".join(name for pair in _WEIGHTS for name in pair)
        raise ModelNotFoundError(
            f"{model} holds no weights: none of {expected} is there. {remedy}", model=model
        )
    absent = sorted(set(wanted) - set(names))
    if absent:
        raise ModelNotFoundError(
            f"{model} is incomplete: its index lists {len(wanted)} weight files, and "
            f"{len(absent)} of them are missing, for example {absent[0]}. {remedy}",
            model=model,
        )


def check_weight_files(model: str, folder: Path, names: Collection[str]) -> None:
    """Refuse weight files that are cut off or damaged, or hold what are no plain floats.

    Raises:
        ModelNotFoundError: Names the file that is not whole.
        UnsupportedModelError: Weights are integers or 8-bit floats, whose scales nobody applies.
    """
    for name in names:
        path = folder / name
        _check_no_pointer(model, path)
        if path.suffix != ".safetensors":
            with path.open("rb") as file:
                is_zip = file.read(2) == _ZIP_MAGIC  # older pickles are none
            if path.stat().st_size == 0 or (is_zip and not zipfile.is_zipfile(path)):
                raise _damaged(model, name, "it ends too early.")
            continue
        try:
            with safe_open(path, framework="numpy") as tensors:
                dtypes = {key: str(tensors.get_slice(key).get_dtype()) for key in tensors.keys()}
        except SafetensorError as error:
            raise _damaged(model, name, root_cause(error)) from error
        for key, dtype in dtypes.items():
            if key.endswith(".weight") and dtype not in _FLOATS:
                raise UnsupportedModelError(
                    f"{name} of {model} holds {key} as {dtype}, and its config.json does not say "
                    f"which quantisation that is. Give the unquantised model, or a .gguf file."
                )


def _check_no_pointer(model: str, path: Path) -> None:
    """Refuse what git leaves where Git LFS was not installed when a repository was cloned."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise _damaged(
                model, path.name, "it is a Git LFS pointer; `git lfs pull` fetches the file itself."
            )


def _shards(model: str, index: Path) -> tuple[str, ...]:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return tuple(str(shard) for shard in shards)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = "it does not say which file holds which weight."
        raise _damaged(model, index.name, reason) from error


def _damaged(model: str, name: str, reason: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{name} of {model} is damaged or incomplete: {reason} Download the model again.",
        model=model,
    )
