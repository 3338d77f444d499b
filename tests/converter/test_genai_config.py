"""genai_config.json: written where onnxruntime-genai can run the bundle, and nowhere else."""

import dataclasses
import json

from kvconv.converter.genai_config import genai_config
from kvconv.manifest import CacheLayer, RunSizes, read_manifest
from kvconv.names import GENAI_CONFIG_FILE
from tiny_bundle import write_bundle


def test_export_writes_a_config_that_the_manifest_lists(exported):
    bundle = exported("llama").path
    manifest = read_manifest(bundle)
    document = json.loads((bundle / GENAI_CONFIG_FILE).read_text())
    assert GENAI_CONFIG_FILE in manifest.files
    decoder = document["model"]["decoder"]
    assert decoder["session_options"]["custom_ops_library"] in manifest.files
    assert decoder["num_hidden_layers"] == len(manifest.cache_layers)
    assert decoder["inputs"]["past_key_names"] % 0 in manifest.inputs
    assert decoder["outputs"]["present_value_names"] % 1 in manifest.outputs
    assert document["search"]["past_present_share_buffer"] is True


def test_caches_that_genai_does_not_know_get_none(tmp_path):
    manifest = dataclasses.replace(
        read_manifest(write_bundle(tmp_path / "bundle", attention="flash")),
        run_sizes=RunSizes(2, 16, 0),
    )
    assert genai_config(manifest) is not None

    def config(*layers: CacheLayer) -> object:
        return genai_config(dataclasses.replace(manifest, cache_layers=layers))

    plain = manifest.cache_layers[0]
    assert config(plain, plain) is not None
    assert config(dataclasses.replace(plain, dtype="int8")) is None
    assert config(plain, dataclasses.replace(plain, num_key_value_heads=3)) is None
    assert config(dataclasses.replace(plain, value_head_dim=4)) is None
    ring = dataclasses.replace(plain, window_size=4, cache_mode="ring", capacity=8)
    assert config(plain, ring) is None
    assert genai_config(dataclasses.replace(manifest, run_sizes=None)) is None
