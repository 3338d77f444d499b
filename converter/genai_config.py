"""genai_config.json: how onnxruntime-genai opens a bundle, in its own words.

That program drives one decoder whose layers are alike, with caches that grow or that are shared
buffers, of the type that the graph names; it hands over ids, mask and positions.
"""

from collections.abc import Callable
from typing import Any

from kvconv import names
from kvconv.manifest import Manifest

_INPUTS = {names.INPUT_IDS, names.ATTENTION_MASK, names.POSITION_IDS, names.NUM_LOGITS_TO_KEEP}


def genai_config(manifest: Manifest) -> dict[str, Any] | None:
    """Return the contents of the file, or None where onnxruntime-genai could not run the bundle.

    It cannot where layers differ in heads or widths, are rings, or have caches with scales.
    """
    sizes = {
        (layer.num_key_value_heads, layer.key_head_dim, layer.value_head_dim)
        for layer in manifest.cache_layers
    }
    caches = {
        name
        for layer in range(len(manifest.cache_layers))
        for name in (names.past_key(layer), names.past_value(layer))
    }
    if len(sizes) != 1 or not set(manifest.inputs) <= _INPUTS | caches:
        return None
    ((num_key_value_heads, key_head_dim, value_head_dim),) = sizes
    if key_head_dim != value_head_dim or manifest.cache_layers[0].dtype == "bfloat16":
        return None
    options: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": []}
    if manifest.op_version is not None:
        options["custom_ops_library"] = names.LIBRARY_FILE
    fed = (names.INPUT_IDS, names.ATTENTION_MASK, names.POSITION_IDS)
    tokens = {
        "bos_token_id": manifest.bos_token_id,
        "eos_token_id": list(manifest.eos_token_ids),
        "pad_token_id": manifest.pad_token_id,
    }
    return {
        "model": {
            "type": "decoder",
            **{name: value for name, value in tokens.items() if value not in (None, [])},
            "context_length": manifest.max_sequence_length,
            "vocab_size": manifest.vocab_size,
            "decoder": {
                "filename": names.MODEL_FILE,
                "session_options": options,
                "head_size": key_head_dim,
                "num_key_value_heads": num_key_value_heads,
                "num_hidden_layers": len(manifest.cache_layers),
                "inputs": {
                    **{name: name for name in fed if name in manifest.inputs},
                    "past_key_names": _of_layers(names.past_key),
                    "past_value_names": _of_layers(names.past_value),
                },
                "outputs": {
                    "logits": names.LOGITS,
                    "present_key_names": _of_layers(names.present_key),
                    "present_value_names": _of_layers(names.present_value),
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": manifest.max_sequence_length,
            "past_present_share_buffer": manifest.attention != "standard",
        },
    }


def _of_layers(name_of: Callable[[int], str]) -> str:
    return name_of(0).replace("0", "%d")
