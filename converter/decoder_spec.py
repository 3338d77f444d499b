"""The facts about a decoder that the rest of the converter needs, gathered once.

Cache shapes are read from what one small run really returned, never guessed from config names, so
a new architecture needs no entry anywhere. Special token ids come from the generation config
first, because that is what decides how transformers' `generate` ends.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from kvconv.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of one layer: [batch_size, num_key_value_heads, tokens, head_dim] (BNSH)."""

    num_key_value_heads: int
    key_head_dim: int
    value_head_dim: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder as the converter sees it.

    Attributes:
        architecture: Class name, for example `LlamaForCausalLM`.
        model_type: Hugging Face model type, for example `llama`.
        dtype: Type of weights and activations, `float32` or `float16`.
        cache_shapes: One entry per cache layer, by layer index.
        cache_argument: Name of the forward argument that takes the cache.
        has_position_ids: Whether the forward takes position_ids.
        vocab_size: Width of the logits.
        max_position_embeddings: Most tokens the model was made for; None if the config is silent.
        rope_switch_length: Tokens beyond which all rotary frequencies change, cached keys' too
            (longrope); None for models without such a switch.
        eos_token_ids: Ids that end a generation, ascending; may be empty.
        bos_token_id: Id that starts a text, if there is one.
        pad_token_id: Id for padded slots, if there is one.
    """

    architecture: str
    model_type: str
    dtype: str
    cache_shapes: tuple[CacheShape, ...]
    cache_argument: str
    has_position_ids: bool
    vocab_size: int
    max_position_embeddings: int | None
    rope_switch_length: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None


def describe(model: PreTrainedModel) -> DecoderSpec:
    """Gather the facts about a loaded decoder; runs it once on two tokens.

    Args:
        model: In eval mode, on the CPU.

    Raises:
        UnsupportedModelError: The model keeps no key and value per layer (it is recurrent, hybrid
            or an encoder), or has a feature that a fixed graph cannot express.
    """
    architecture, config = type(model).__name__, model.config.get_text_config(decoder=True)
    rope_switch_length = _rope_switch_length(architecture, config)
    parameters = inspect.signature(model.forward).parameters
    with torch.no_grad():
        output = model(input_ids=torch.zeros((1, 2), dtype=torch.int64), use_cache=True)
    generation = model.generation_config or GenerationConfig()
    return DecoderSpec(
        architecture=architecture,
        model_type=config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        cache_shapes=_cache_shapes(architecture, config, output),
        cache_argument="cache" if "cache" in parameters else "past_key_values",
        has_position_ids="position_ids" in parameters,
        vocab_size=output.logits.shape[-1],
        max_position_embeddings=_first(
            *(getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        ),
        rope_switch_length=rope_switch_length,
        eos_token_ids=_token_ids(generation.eos_token_id, getattr(config, "eos_token_id", None)),
        bos_token_id=_first(generation.bos_token_id, getattr(config, "bos_token_id", None)),
        pad_token_id=_first(generation.pad_token_id, getattr(config, "pad_token_id", None)),
    )


def _rope_switch_length(architecture: str, config: PreTrainedConfig) -> int | None:
    """Return the length at which longrope switches frequencies, if the model has longrope.

    Raises:
        UnsupportedModelError: Python recomputes the frequencies from each run's length (dynamic
            NTK), which tracing would freeze.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer_type or [parameters]:
        rope_type = str(rope.get("rope_type"))
        if "dynamic" in rope_type:
            raise UnsupportedModelError(
                f"{architecture} uses rope_type {rope_type!r}, whose frequencies depend on the "
                f"length of each run; kvconv supports default, linear, llama3, yarn and longrope. "
                f"Set another rope_type in config.json if the model allows it.",
                model_type=config.model_type,
            )
        if rope_type == "longrope":
            length = rope.get("original_max_position_embeddings")
            return int(length or config.original_max_position_embeddings)
    return None


def _cache_shapes(
    architecture: str, config: PreTrainedConfig, output: object
) -> tuple[CacheShape, ...]:
    cache = getattr(output, "cache", None)
    if cache is None:
        cache = getattr(output, "past_key_values", None)
    layers = getattr(cache, "layers", None) or ()
    shapes: list[CacheShape] = []
    for layer in layers:
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if key is None or value is None or key.dim() != 4 or value.dim() != 4:
            shapes.clear()
            break
        shapes.append(CacheShape(key.shape[1], key.shape[3], value.shape[3]))
    if not shapes:
        raise UnsupportedModelError(
            f"{architecture} (model type {config.model_type!r}) does not keep one key and value "
            f"per layer and token. kvconv converts decoders with a plain KV cache; recurrent and "
            f"hybrid models are not supported.",
            model_type=config.model_type,
        )
    return tuple(shapes)


def _token_ids(*sources: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the ids of the first source that states any: an id or several."""
    for source in sources:
        if source is not None:
            return tuple(sorted({source} if isinstance(source, int) else set(source)))
    return ()


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)
