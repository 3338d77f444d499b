"""Rotary embeddings whose frequencies depend on the length of a run.

transformers recomputes the frequencies of `dynamic` and `longrope` models in every forward pass:
beyond some length all of them change. Keys that are in a cache were rotated with the old ones, so
a bundle is kept at or below that length, and there the original frequencies are the right ones.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvconv.errors import UnsupportedModelError

_STATIC = "default"
"""A rope type whose forward pass leaves the frequencies alone."""


def fixed_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens for which the frequencies stay as they are; None for any number.

    Args:
        config: A text config; its rope parameters may differ per layer type.
    """
    lengths = []
    for rope in _parameters(config):
        length: int | None = config.max_position_embeddings
        if rope.get("rope_type") == "longrope":
            length = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", length
            )
        elif not _is_dynamic(rope.get("rope_type")):
            continue
        if length is not None:
            lengths.append(int(length))
    return min(lengths, default=None)


@contextlib.contextmanager
def original_frequencies(model: PreTrainedModel) -> Iterator[None]:
    """Keep all rotary embeddings at the frequencies that they have up to `fixed_length`.

    Raises:
        UnsupportedModelError: The config has rope parameters that change with the length, but the
            model computes its frequencies with code of its own.
    """
    config = model.config.get_text_config(decoder=True)
    changing = {rope["rope_type"] for rope in _parameters(config) if _is_changing(rope)}
    if not changing:
        yield
        return
    changed = [(module, module.rope_type) for module in model.modules() if _restore(module)]
    if not changed:
        raise UnsupportedModelError(
            f"{type(model).__name__} uses rope_type {sorted(changing)[0]!r}, whose frequencies "
            f"depend on the length of each run, with code of its own. kvconv knows it as "
            f"transformers' rotary embeddings compute it; set another rope_type in config.json if "
            f"the model allows it.",
            model_type=config.model_type,
        )
    for module, rope_type in changed:
        module.rope_type = (
            dict.fromkeys(rope_type, _STATIC) if isinstance(rope_type, Mapping) else _STATIC
        )
    try:
        yield
    finally:
        for module, rope_type in changed:
            module.rope_type = rope_type


def _restore(module: torch.nn.Module) -> bool:
    """Put a rotary embedding's original frequencies back; tells whether it is one."""
    if not hasattr(module, "rope_type"):
        return False
    originals = [name for name, _ in module.named_buffers(recurse=False) if "original_" in name]
    for name in originals:
        frequencies = getattr(module, name.replace("original_", ""))
        with torch.no_grad():
            frequencies.copy_(getattr(module, name))
    return bool(originals)


def _parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rope parameters: one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_layer_type or [parameters]


def _is_changing(rope: dict[str, Any]) -> bool:
    return rope.get("rope_type") == "longrope" or _is_dynamic(rope.get("rope_type"))


def _is_dynamic(rope_type: object) -> bool:
    return isinstance(rope_type, str) and "dynamic" in rope_type
