"""Damaged and incomplete checkpoints: the file at fault is named before anything is loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvconv.converter.checkpoint_files import weight_files
from kvconv.converter.load import load_model
from kvconv.errors import ModelNotFoundError, UnsupportedModelError
from tiny_decoders import tiny_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(copied):
    """The same in three shards."""
    (copied / WEIGHTS).unlink()
    tiny_model("llama").save_pretrained(copied, max_shard_size="60KB")
    return copied


def refusal(folder):
    with pytest.raises(ModelNotFoundError) as info:
        load_model(str(folder))
    assert info.value.model == str(folder)
    return str(info.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xe9"], ids=str)
def test_settings_that_are_no_json_object_are_refused_by_name(copied, name, content):
    (copied / name).write_bytes(content)
    assert f"{name} of {copied} is damaged" in refusal(copied)


def test_config_without_a_model_type_is_refused(copied):
    (copied / "config.json").write_text("{}")
    assert "model_type" in refusal(copied)


@pytest.mark.parametrize("size", [0, 4, 1000, 130_000])
def test_truncated_shard_is_refused_by_name(sharded, size):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: min(size, len(content) - 1)])
    assert f"{shard.name} of {sharded} is damaged or incomplete" in refusal(sharded)


def test_missing_shard_is_refused_by_name(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lists 3 weight files, and 1 of them are missing, for example {shard.name}" in refusal(
        sharded
    )


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_git_lfs_pointer_is_refused_with_the_command_to_type(copied, name):
    (copied / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"
    )
    assert "Git LFS pointer; `git lfs pull`" in refusal(copied)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_damaged_index_is_refused_by_name(sharded, content):
    (sharded / INDEX).write_text(content)
    assert f"{INDEX} of {sharded} is damaged" in refusal(sharded)


def test_folder_without_weights_is_refused_and_its_gguf_file_offered(copied):
    (copied / WEIGHTS).unlink()
    assert "holds no weights: none of model.safetensors, " in refusal(copied)
    (copied / "b.gguf").touch()
    assert refusal(copied).endswith(f"Name one of its GGUF files instead: {copied / 'b.gguf'}")


@pytest.mark.parametrize("size", [0, 5000])
def test_truncated_pickle_is_refused_by_name(copied, size):
    torch.save(load_file(copied / WEIGHTS), copied / "pytorch_model.bin")
    (copied / WEIGHTS).unlink()
    content = (copied / "pytorch_model.bin").read_bytes()
    (copied / "pytorch_model.bin").write_bytes(content[:size])
    assert f"pytorch_model.bin of {copied} is damaged or incomplete" in refusal(copied)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")], ids=str
)
def test_weights_that_are_no_plain_floats_are_refused(copied, dtype, name):
    weights = load_file(copied / WEIGHTS)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(48, 32).to(dtype)
    save_file(weights, copied / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"mlp\.up_proj\.weight as {name}"):
        load_model(str(copied))


def test_weights_are_chosen_in_the_order_of_transformers(tmp_path):
    def chosen(*names):
        return weight_files("m", tmp_path, names)

    assert chosen("config.json", "consolidated.safetensors") == ()
    assert chosen("pytorch_model.bin") == ("pytorch_model.bin",)
    assert chosen("pytorch_model.bin", WEIGHTS) == (WEIGHTS,)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b", "y": "a", "z": "b"}}))
    assert chosen("pytorch_model.bin") == ("a", "b")
    assert chosen("pytorch_model.bin", WEIGHTS) == (WEIGHTS,)
