"""What a decoder takes of memory, from its config alone: sizes for `kvconv.plan`, no weights.

The model is made on PyTorch's meta device, where tensors have shapes and no memory, and runs on two
tokens there: cache shapes come from what it returns, as in an export.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from kvconv.cache_layout import ELEMENT_BYTES
from kvconv.converter.decoder_spec import (
    cache_layers,
    cache_shapes,
    max_positions,
    run_two_tokens,
)
from kvconv.converter.linear_sizes import linear_sizes
from kvconv.converter.load import LoadedModel, load_skeleton
from kvconv.converter.quiet import quiet
from kvconv.converter.rope import fixed_length
from kvconv.converter.weight_sizes import weight_bytes
from kvconv.errors import UnsupportedModelError, root_cause
from kvconv.manifest import (
    ActivationDtype,
    CacheDtype,
    CacheLayer,
    QuantizedDtype,
    RunSizes,
    ring_capacity,
)
from kvconv.plan import DecoderSizes


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A decoder that was not exported.

    Attributes:
        name: As a manifest would say it.
        architecture: Class name.
        max_sequence_length: Most tokens that an export would hold; None if the config is silent.
        sizes: What an export would take.
    """

    name: str
    architecture: str
    max_sequence_length: int | None
    sizes: DecoderSizes


def read_sizes(
    model: str,
    *,
    dtype: ActivationDtype,
    weights: QuantizedDtype | None,
    cache_dtype: CacheDtype,
    ring: bool = True,
    revision: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
) -> PlannedModel:
    """Return what the flash bundle of a model would take.

    Args:
        model: Hub id, folder, or `.gguf` file.
        dtype: Of activations, and of weights unless `weights` says otherwise.
        weights: Of linear weights; None is `dtype`.
        cache_dtype: Of keys and values.
        ring: Whether windowed layers become rings.
        revision: See `load_model`, as for the others.
        cache_dir: See there.
        trust_remote_code: See there.

    Raises:
        ModelNotFoundError: There is no such model, or its config is damaged.
        UnsupportedModelError: It is no decoder with a plain KV cache, or does not run without its
            weights.
    """
    loaded = load_skeleton(
        model, revision=revision, cache_dir=cache_dir, trust_remote_code=trust_remote_code
    )
    with quiet():
        return _sizes(loaded, dtype, weights, cache_dtype, ring=ring)


def _sizes(
    loaded: LoadedModel,
    dtype: ActivationDtype,
    weights: QuantizedDtype | None,
    cache_dtype: CacheDtype,
    *,
    ring: bool,
) -> PlannedModel:
    model = loaded.model
    config = model.config.get_text_config(decoder=True)
    model.config.pad_token_id = None  # GPT-2 looks for it among the ids, which have no values here
    order: list[str] = []
    for linear in linear_sizes(model):
        if linear.module is not None:
            linear.module.register_forward_hook(partial(_note, order, linear.name))
    try:
        output = run_two_tokens(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run without weights: {root_cause(error)} Export it, "
            f"and give the bundle to kvconv plan.",
            model_type=config.model_type,
        ) from error
    lengths = (max_positions(config), fixed_length(config))
    max_sequence_length = min((length for length in lengths if length), default=None)
    windows = _windows(config, cache_layers(output))
    rings = [ring_capacity(window, max_sequence_length) if ring else None for window in windows]
    layers = tuple(
        CacheLayer(
            num_key_value_heads=shape.num_key_value_heads,
            key_head_dim=shape.key_head_dim,
            value_head_dim=shape.value_head_dim,
            dtype=cache_dtype,
            window_size=window,
            cache_mode="auto" if capacity is None else "ring",
            capacity=capacity,
        )
        for shape, window, capacity in zip(cache_shapes(model, output), windows, rings, strict=True)
    )
    sizes = DecoderSizes(
        cache_layers=layers,
        attention="flash",
        weight_bytes=weight_bytes(model, order, dtype=dtype, weights=weights, gguf=loaded.gguf),
        vocab_size=output.logits.shape[-1],
        run=run_sizes(model, dtype=dtype, weights=weights),
    )
    return PlannedModel(
        name=loaded.source.model,
        architecture=type(model).__name__,
        max_sequence_length=max_sequence_length,
        sizes=sizes,
    )


def _windows(config: PreTrainedConfig, layers: Sequence[Any]) -> list[int | None]:
    """Return the tokens that a query of each cache layer sees, as an export finds them."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    kinds = getattr(config, "attention_layers", None) or kinds  # GPT-Neo
    windows: list[int | None] = [getattr(layer, "sliding_window", None) for layer in layers]
    for index, kind in enumerate(kinds[: len(windows)]):
        if kind == "local":  # its cache keeps all tokens
            windows[index] = config.window_size
        elif kind == "chunked_attention":  # a chunk is no window: its mask stays a bias
            windows[index] = None
    return windows


def _note(order: list[str], name: str, *_: object) -> None:
    order.append(name)


def run_sizes(
    model: PreTrainedModel, *, dtype: ActivationDtype, weights: QuantizedDtype | None
) -> RunSizes:
    """Return what a run takes of memory beside weights and cache.

    Args:
        model: With or without weights.
        dtype: Of the activations.
        weights: Of linear weights; None is `dtype`.
    """
    config = model.config.get_text_config(decoder=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    linears = {id(linear.parameter): linear for linear in linear_sizes(model)}
    # ONNX Runtime's CPU multiplies float16 as float32 (x86), and lets go of what it packed.
    packed = sum(linear.parameter.numel() for linear in linears.values()) * 4
    dropped = sum(
        linear.parameter.numel() for linear in linears.values() if not (linear.is_head and is_tied)
    )
    dropped *= ELEMENT_BYTES[dtype]
    return RunSizes(
        num_attention_heads=config.num_attention_heads,
        activation_width=max(
            linear.active * (linear.out_features + linear.in_features)
            for linear in linears.values()
            if not linear.is_head
        ),
        packed_bytes=packed - dropped if weights is None else 0,
    )
