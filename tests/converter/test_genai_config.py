"""What onnxruntime-genai is told, and of which bundles."""

from dataclasses import replace

import pytest

from kvconv import names
from kvconv.converter.genai_config import genai_config
from kvconv.manifest import CacheLayer
from scripted_session import MANIFEST

LAYER = CacheLayer(2, 16, 16, "float32")


def manifest_of(layers, *more_inputs, **changes):
    caches = [f(i) for i in range(len(layers)) for f in (names.past_key, names.past_value)]
    inputs = (names.INPUT_IDS, names.ATTENTION_MASK, *more_inputs, *caches)
    manifest = replace(
        MANIFEST,
        op_version=2,
        vocab_size=99,
        max_sequence_length=64,
        eos_token_ids=(2, 7),
        bos_token_id=None,
        pad_token_id=0,
        cache_layers=tuple(layers),
        inputs=inputs,
    )
    return replace(manifest, **changes)


def test_names_sizes_and_the_library_are_those_of_the_bundle():
    config = genai_config(manifest_of([LAYER] * 3, names.POSITION_IDS))
    model, decoder = config["model"], config["model"]["decoder"]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([2, 7], 0)
    assert "bos_token_id" not in model
    assert decoder["session_options"]["custom_ops_library"] == names.LIBRARY_FILE
    assert (decoder["num_hidden_layers"], decoder["head_size"]) == (3, 16)
    assert decoder["num_key_value_heads"] == 2
    assert decoder["inputs"]["past_key_names"] % 10 == names.past_key(10)
    assert decoder["outputs"]["present_value_names"] % 10 == names.present_value(10)
    assert decoder["inputs"]["position_ids"] == names.POSITION_IDS
    assert config["search"]["past_present_share_buffer"]


def test_standard_bundle_has_growing_caches_and_no_library():
    config = genai_config(manifest_of([LAYER], attention="standard", op_version=None))
    assert "custom_ops_library" not in config["model"]["decoder"]["session_options"]
    assert "position_ids" not in config["model"]["decoder"]["inputs"]
    assert not config["search"]["past_present_share_buffer"]


@pytest.mark.parametrize(
    "manifest",
    [
        manifest_of([LAYER], names.PAST_SEQUENCE_LENGTH),
        manifest_of([LAYER], names.past(0, "key_scale")),
        manifest_of([LAYER, replace(LAYER, num_key_value_heads=4)]),
        manifest_of([replace(LAYER, value_head_dim=8)]),
        manifest_of([replace(LAYER, dtype="bfloat16")]),
    ],
    ids=["rings", "scales", "heads differ", "widths differ", "bfloat16"],
)
def test_what_that_program_cannot_run_has_no_file(manifest):
    assert genai_config(manifest) is None
