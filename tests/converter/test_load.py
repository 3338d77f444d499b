"""Loading: what is read, and what is refused with one sentence before it costs anything."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from kvconv.converter.load import load_model
from kvconv.errors import ModelNotFoundError, UnsupportedModelError
from kvconv.manifest import Source
from tiny_gguf import tiny_gguf_model, write_tiny_gguf

WEIGHTS = "model.safetensors"


@pytest.fixture
def copied(checkpoint, tmp_path):
    """A tiny checkpoint of the test's own, to be spoilt."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_folder_is_loaded_at_the_dtype_asked_for(checkpoint, dtype):
    folder = checkpoint("llama")
    loaded = load_model(str(folder), dtype=dtype)
    assert loaded.source == Source(folder.name, "folder")
    assert {weight.dtype for weight in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert not loaded.model.training
    assert loaded.tokenizer("a")["input_ids"] == [256, 97]


def test_bfloat16_checkpoint_is_widened_exactly(copied):
    weights = {name: w.to(torch.bfloat16) for name, w in load_file(copied / WEIGHTS).items()}
    save_file(weights, copied / WEIGHTS, metadata={"format": "pt"})
    loaded = load_model(str(copied)).model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight.float()), name


def test_license_comes_from_the_model_card(copied):
    (copied / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    assert load_model(str(copied)).source.license == "apache-2.0"


def test_folder_without_tokenizer_has_none(copied):
    for path in copied.glob("*token*"):
        path.unlink()
    assert load_model(str(copied)).tokenizer is None


def test_gguf_file_is_loaded_with_its_license_and_can_be_saved(gguf_file, tmp_path):
    loaded = load_model(str(gguf_file))
    assert loaded.source == Source(gguf_file.name, "gguf", license="mit")
    written = tiny_gguf_model()
    found = loaded.model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(found, written.model.layers[0].mlp.down_proj.weight)
    loaded.model.config.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_dequantising_in_slices_changes_nothing(monkeypatch):
    from kvconv.converter import gguf_reading

    monkeypatch.setattr(gguf_reading, "_SLICE_BYTES", 64)
    array = np.random.default_rng(1).normal(size=(37, 64)).astype(np.float32)
    quantised = gguf.quantize(array, gguf.GGMLQuantizationType.Q4_1)
    expected = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q4_1)
    with gguf_reading.fast_reading(remember=True):
        found = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(found, expected)
    assert not isinstance(gguf.GGUFReader, type(gguf.dequantize))


def test_hub_model_is_found_in_the_cache_and_keeps_its_commit(checkpoint, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(checkpoint("llama"), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    loaded = load_model("someone/tiny", cache_dir=tmp_path)
    assert loaded.source == Source("someone/tiny", "hub", revision=commit)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "There is no file or folder"),
        ("no/such/folder", "There is no file or folder"),
        ("nowhere.gguf", "There is no file or folder"),
        ("someone/absent", "hub cannot be reached"),
        (__file__, "not a .gguf file"),
    ],
    ids=["path", "folders", "gguf", "hub id offline", "other file"],
)
def test_missing_model_is_refused_with_a_remedy(model, message):
    with pytest.raises(ModelNotFoundError, match=message) as info:
        load_model(model)
    assert info.value.model == model


def test_folder_with_only_a_gguf_file_says_so(gguf_file):
    with pytest.raises(ModelNotFoundError, match=r"Did you mean .*tiny\.gguf"):
        load_model(str(gguf_file.parent))


def test_revision_of_a_local_model_is_refused(checkpoint):
    with pytest.raises(ModelNotFoundError, match="no revision 'main'"):
        load_model(str(checkpoint("llama")), revision="main")


def test_bert_is_refused_before_its_weights_are_read(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError, match="is a BertForMaskedLM, not a decoder") as info:
        load_model(str(tmp_path))
    assert info.value.model_type == "bert"


def test_truncated_safetensors_are_refused(copied):
    weights = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(weights[: len(weights) // 2])
    with pytest.raises(
        ModelNotFoundError, match=r"model\.safetensors of .* damaged or incomplete: .*\. Download"
    ):
        load_model(str(copied))


@pytest.mark.parametrize("fraction", [0.0005, 0.5, 0.99], ids=["header", "half", "almost whole"])
def test_truncated_gguf_is_refused(gguf_file, tmp_path, fraction):
    data = gguf_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(ModelNotFoundError, match="damaged or incomplete"):
        load_model(str(cut))


def test_missing_weight_is_refused_by_name(copied):
    weights = load_file(copied / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, copied / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"1 are missing, .* model\.norm\.weight"):
        load_model(str(copied))


def test_code_that_comes_with_the_model_does_not_run_unasked(copied):
    change_config(copied, model_type="odd", auto_map={"AutoConfig": "code.Config"})
    (copied / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code"):
        load_model(str(copied))


def test_unknown_architecture_asks_for_a_newer_transformers(copied):
    change_config(copied, model_type="odd")
    with pytest.raises(UnsupportedModelError, match="Upgrade transformers"):
        load_model(str(copied))


def test_quantised_checkpoint_is_refused_by_method(copied):
    change_config(copied, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantised with gptq"):
        load_model(str(copied))
