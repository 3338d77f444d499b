"""Which files of a checkpoint hold its weights: the ones that transformers would read.

Repositories often hold the same weights several times (`pytorch_model.bin` beside
`model.safetensors`, `consolidated.safetensors` beside shards), so patterns would fetch too much.
"""

import json
from collections.abc import Collection
from pathlib import Path

from kvconv.errors import ModelNotFoundError

_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""A whole checkpoint and the index of a sharded one, in the order of transformers' preference."""


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


def _shards(model: str, index: Path) -> tuple[str, ...]:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return tuple(str(shard) for shard in shards)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelNotFoundError(
            f"{index.name} of {model} is damaged: it does not say which file holds which weight. "
            f"Download the model again.",
            model=model,
        ) from error
