"""The facts about a decoder that the rest of the converter needs, gathered once.

Cache shapes are read from what one small run really returned, never guessed from config names, so
a new architecture needs no entry anywhere. Special token ids come from the generation config
first, because that is what decides how transformers' `generate` ends.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.utils import ModelOutput

from kvconv.converter.mla import latent_layers
from kvconv.converter.rope import fixed_length
from kvconv.errors import UnsupportedModelError, root_cause

# Where configs say how many tokens a model was made for: the usual name, MPT's and BLOOM's.
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")


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
        fixed_rope_length: Most tokens for which the rotary frequencies stay as they are (longrope,
            dynamic); None for any number.
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
    fixed_rope_length: int | None
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
    parameters = inspect.signature(model.forward).parameters
    output = run_two_tokens(model)
    has_position_ids = "position_ids" in parameters
    if has_position_ids:
        _check_positions(model, output.logits)
    generation = model.generation_config or GenerationConfig()
    return DecoderSpec(
        architecture=architecture,
        model_type=config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        cache_shapes=cache_shapes(model, output),
        cache_argument="cache" if "cache" in parameters else "past_key_values",
        has_position_ids=has_position_ids,
        vocab_size=output.logits.shape[-1],
        max_position_embeddings=max_positions(config),
        fixed_rope_length=fixed_length(config),
        eos_token_ids=_token_ids(generation.eos_token_id, getattr(config, "eos_token_id", None)),
        bos_token_id=_first(generation.bos_token_id, getattr(config, "bos_token_id", None)),
        pad_token_id=_first(generation.pad_token_id, getattr(config, "pad_token_id", None)),
    )


def run_two_tokens(model: PreTrainedModel, **inputs: torch.Tensor) -> ModelOutput:
    """Run a model on two tokens, which a decoder needs nothing else for."""
    try:
        with torch.no_grad():
            input_ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
            output: ModelOutput = model(input_ids=input_ids, use_cache=True, **inputs)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on two token ids: {root_cause(error)} kvconv "
            f"converts decoders that need nothing but token ids.",
            model_type=model.config.model_type,
        ) from error
    return output


def _check_positions(model: PreTrainedModel, logits: torch.Tensor) -> None:
    """Refuse a model whose own positions are not 0, 1, ..., which every runtime passes."""
    counted = run_two_tokens(model, position_ids=torch.arange(2)[None]).logits
    # Logits that are not finite are for verification to refuse; here they compare as equal.
    if ((counted - logits).abs() > 0.02 * logits.std()).any():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not count positions from 0 (RoBERTa and its kin count "
            f"from padding_idx + 1, and by token ids), so position_ids would mean something else. "
            f"kvconv does not convert such a model.",
            model_type=model.config.model_type,
        )


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the most tokens that a decoder was made for; None if its config is silent."""
    return _first(*(getattr(config, name, None) for name in _LENGTHS))


def cache_layers(output: object) -> Sequence[Any]:
    """Return the layers of the cache that a run returned; (None,) if it returned none."""
    cache = getattr(output, "cache", None)
    if cache is None:
        cache = getattr(output, "past_key_values", None)
    return getattr(cache, "layers", None) or (None,)


def cache_shapes(model: PreTrainedModel, output: object) -> tuple[CacheShape, ...]:
    """Return the shape of each cache layer, from what a run returned.

    Raises:
        UnsupportedModelError: A layer keeps something else than one key and value per token.
    """
    architecture, config = type(model).__name__, model.config.get_text_config(decoder=True)
    latent, layers = latent_layers(model), cache_layers(output)
    for index, layer in enumerate(layers):
        if (oddity := _oddity(layer)) is not None:
            kinds = sorted(set(getattr(config, "layer_types", None) or ()))
            raise UnsupportedModelError(
                f"{architecture} (model type {config.model_type!r}"
                f"{', layers of ' + ' and '.join(kinds) if kinds else ''}) {oddity} in layer "
                f"{index}. kvconv converts decoders with a plain KV cache: one key and value per "
                f"layer and token.",
                model_type=config.model_type,
            )
    return tuple(_cache_shape(layer, index in latent) for index, layer in enumerate(layers))


def _cache_shape(layer: Any, is_latent: bool) -> CacheShape:
    heads, key_head_dim, value_head_dim = (
        layer.keys.shape[1],
        layer.keys.shape[3],
        layer.values.shape[3],
    )
    if is_latent:  # transformers keeps the two parts of our key apart
        return CacheShape(heads, key_head_dim + value_head_dim, key_head_dim)
    return CacheShape(heads, key_head_dim, value_head_dim)


def _oddity(layer: Any) -> str | None:
    """Return what a cache layer holds that a plain one does not, or None."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "keeps a recurrent or convolution state"
    if isinstance(layer, DummyLayer):
        return "has no cache of its own, or shares that of another layer,"
    if layer is not None and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        return f"keeps a {type(layer).__name__}"
    key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
    if key is None or value is None or key.dim() != 4 or value.dim() != 4:
        return "does not keep a key and value"
    return None


def _token_ids(*sources: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the ids of the first source that states any: an id or several.

    Raises:
        UnsupportedModelError: It states something else.
    """
    for source in sources:
        if source is None:
            continue
        ids = list(source) if isinstance(source, Iterable) else [source]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise UnsupportedModelError(
                f"eos_token_id is {source!r}, which is neither a token id nor several. Correct it "
                f"in the model's generation_config.json or config.json."
            )
        return tuple(sorted({token_id for token_id in ids if token_id >= 0}))
    return ()


def _first(*numbers: int | None) -> int | None:
    """Return the first number that is one; some configs say -1 for none."""
    return next((number for number in numbers if number is not None and number >= 0), None)
