"""Rotary embeddings whose frequencies depend on the length of a run.

transformers recomputes the frequencies of `dynamic` and `longrope` models in every forward pass:
beyond some length all of them change. Keys that are in a cache were rotated with the old ones, so
a bundle is kept at or below that length, and there the original frequencies are the right ones.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvconv.converter.swapped import swapped
from kvconv.errors import UnsupportedModelError

_LONGROPE, _DYNAMIC = "longrope", "dynamic"
_STATIC = "default"
"""A rope type whose forward pass leaves the frequencies alone."""


def fixed_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens for which the frequencies stay as they are; None for any number.

    Args:
        config: A text config; its rope parameters may differ per layer type.
    """
    lengths = []
    for rope in filter(_is_changing, _parameters(config)):
        length = config.max_position_embeddings
        if rope["rope_type"] == _LONGROPE:
            length = getattr(config, "original_max_position_embeddings", length)
            length = rope.get("original_max_position_embeddings") or length
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
    embeddings = [module for module in model.modules() if _originals(module)]
    if not embeddings:
        raise UnsupportedModelError(
            f"{type(model).__name__} uses rope_type {sorted(changing)[0]!r}, whose frequencies "
            f"depend on the length of each run, with code of its own. kvconv knows it as "
            f"transformers' rotary embeddings compute it; set another rope_type in config.json if "
            f"the model allows it.",
            model_type=config.model_type,
        )
    with contextlib.ExitStack() as stack:
        for module in embeddings:
            rope_type: Any = module.rope_type
            static = dict.fromkeys(rope_type, _STATIC) if isinstance(rope_type, dict) else _STATIC
            # The last run may have left other frequencies behind.
            stack.enter_context(swapped(module, rope_type=static, **_originals(module)))
        yield


def _originals(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a rotary embedding's original frequencies, by the name of those in use."""
    if not hasattr(module, "rope_type"):
        return {}
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return {
        name.replace("original_", ""): frequencies
        for name, frequencies in buffers
        if name.endswith("original_inv_freq")
    }


def _parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rope parameters: one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_layer_type or [parameters]


def _is_changing(rope: dict[str, Any]) -> bool:
    rope_type = str(rope.get("rope_type"))
    return rope_type == _LONGROPE or _DYNAMIC in rope_type
