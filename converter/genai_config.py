"""`genai_config.json`: what lets onnxruntime-genai open the same folder.

It knows one shape of cache for all layers, float ones, and neither rings nor scales; a bundle that
has something else gets no such file.
"""

import json
from pathlib import Path
from typing import Any

from kvconv import names
from kvconv.flavour import FLAVOURS
from kvconv.manifest import Manifest

_ANY_DECODER = "decoder"  # genai's model type without habits of its own
_FALLBACK_ID = 0  # genai wants ids where a model has none


def write_genai_config(folder: Path, manifest: Manifest) -> None:
    """Write the file, if onnxruntime-genai can run the bundle.

    Args:
        folder: The bundle.
        manifest: What it will be; its files do not matter.
    """
    document = genai_config(manifest)
    if document is not None:
        text = json.dumps(document, indent=2) + "\n"
        (folder / names.GENAI_CONFIG_FILE).write_text(text, encoding="utf-8")


def genai_config(manifest: Manifest) -> dict[str, Any] | None:
    """Return what genai must know of a bundle; None where it cannot run it."""
    shapes = {
        (layer.num_key_value_heads, layer.key_head_dim, layer.value_head_dim)
        for layer in manifest.cache_layers
    }
    has_known_caches = all(
        layer.cache_mode == "auto" and layer.dtype in ("float32", "float16")
        for layer in manifest.cache_layers
    )
    if len(shapes) != 1 or not has_known_caches or manifest.run_sizes is None:
        return None
    ((num_key_value_heads, key_head_dim, value_head_dim),) = shapes
    if key_head_dim != value_head_dim:
        return None
    options: dict[str, Any] = {"provider_options": []}
    if manifest.op_version is not None:
        options["custom_ops_library"] = names.LIBRARY_FILE
    inputs = {name: name for name in (names.INPUT_IDS, names.ATTENTION_MASK)}
    if names.POSITION_IDS in manifest.inputs:
        inputs[names.POSITION_IDS] = names.POSITION_IDS
    pad = next(
        (i for i in (manifest.pad_token_id, *manifest.eos_token_ids) if i is not None), _FALLBACK_ID
    )
    return {
        "model": {
            "type": _ANY_DECODER,
            "vocab_size": manifest.vocab_size,
            "context_length": manifest.max_sequence_length,
            "bos_token_id": _FALLBACK_ID
            if manifest.bos_token_id is None
            else manifest.bos_token_id,
            "eos_token_id": list(manifest.eos_token_ids) or _FALLBACK_ID,
            "pad_token_id": pad,
            "decoder": {
                "session_options": options,
                "filename": names.MODEL_FILE,
                "head_size": key_head_dim,
                "num_attention_heads": manifest.run_sizes.num_attention_heads,
                "num_key_value_heads": num_key_value_heads,
                "num_hidden_layers": len(manifest.cache_layers),
                "inputs": {
                    **inputs,
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": names.LOGITS,
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": manifest.max_sequence_length,
            "past_present_share_buffer": FLAVOURS[manifest.attention].shared_buffer,
        },
    }
