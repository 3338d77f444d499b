"""Loading: what is read, and what is refused with one sentence before it costs anything."""

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlavaConfig

from kvconv.converter.load import load_model
from kvconv.errors import ModelNotFoundError, UnsupportedModelError
from kvconv.manifest import Source
from tiny_decoders import CONFIGS, tiny_model
from tiny_gguf import tiny_gguf_model, write_tiny_gguf

WEIGHTS = "model.safetensors"


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


def assert_loaded(folder, weights):
    """The loaded model holds exactly these weights, as float32."""
    loaded = load_model(str(folder)).model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight.float()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_checkpoint_of_another_dtype_is_converted_exactly(copied, dtype):
    weights = {name: w.to(dtype) for name, w in load_file(copied / WEIGHTS).items()}
    save_file(weights, copied / WEIGHTS, metadata={"format": "pt"})
    assert_loaded(copied, weights)


def test_sharded_checkpoint_is_loaded_whole(copied):
    weights = load_file(copied / WEIGHTS)
    (copied / WEIGHTS).unlink()
    tiny_model("llama").save_pretrained(copied, max_shard_size="60KB")
    assert len(list(copied.glob("*.safetensors"))) == 3
    assert_loaded(copied, weights)


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickle_of_tensors_is_loaded(copied, is_zip):
    weights = load_file(copied / WEIGHTS)
    (copied / WEIGHTS).unlink()
    torch.save(weights, copied / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert_loaded(copied, weights)


class _Code:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


def test_pickle_that_runs_code_is_refused(copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (copied / WEIGHTS).unlink()
    torch.save({"model.norm.weight": _Code()}, copied / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="could run code"):
        load_model(str(copied))
    assert not Path("ran").exists()


@pytest.mark.parametrize("in_file", [False, True], ids=["absent", "in the file"])
def test_tied_embeddings_share_memory_whether_the_head_is_in_the_file_or_not(
    checkpoint, tmp_path, in_file
):
    folder = Path(shutil.copytree(checkpoint("llama", tie_word_embeddings=True), tmp_path / "m"))
    if in_file:
        weights = load_file(folder / WEIGHTS)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    model = load_model(str(folder)).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_untied_embeddings_stay_apart_even_when_they_are_equal(copied):
    weights = load_file(copied / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, copied / WEIGHTS, metadata={"format": "pt"})
    assert_loaded(copied, weights)


def test_extra_buffers_of_old_checkpoints_are_ignored(copied):
    weights = load_file(copied / WEIGHTS)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights | extra, copied / WEIGHTS, metadata={"format": "pt"})
    assert_loaded(copied, weights)


def test_weight_of_the_wrong_shape_is_refused_with_both_shapes(copied):
    weights = load_file(copied / WEIGHTS) | {"model.norm.weight": torch.ones(4)}
    save_file(weights, copied / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"model\.norm\.weight is \(4,\) .* \(32,\)"):
        load_model(str(copied))


def test_untied_head_that_is_missing_is_refused(copied):
    weights = load_file(copied / WEIGHTS)
    del weights["lm_head.weight"]
    save_file(weights, copied / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"1 are missing, for example lm_head\.weight"):
        load_model(str(copied))


def test_snapshot_of_links_in_a_folder_with_an_odd_name_is_loaded_and_left_alone(
    checkpoint, tmp_path
):
    blobs = Path(shutil.copytree(checkpoint("llama"), tmp_path / "blobs"))
    folder = tmp_path / "größe, 漢字 & spaces"
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(Path("..", "blobs", path.name))
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert load_model(str(folder)).source == Source(folder.name, "folder")
        assert {path.name for path in folder.iterdir()} == {path.name for path in blobs.iterdir()}
    finally:
        folder.chmod(0o755)


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


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM"], ids=str)
def test_architectures_that_are_not_a_list_of_names_do_not_matter(copied, architectures):
    change_config(copied, architectures=architectures)
    assert_loaded(copied, load_file(copied / WEIGHTS))


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_model_without_a_language_head_is_refused(copied, name):
    change_config(copied, architectures=[name])
    with pytest.raises(UnsupportedModelError, match=f"is a {name}, not a decoder"):
        load_model(str(copied))


def test_multimodal_model_is_refused_with_a_hint(tmp_path):
    text = LlamaConfig(**CONFIGS["llama"])
    config = LlavaConfig(text_config=text, architectures=["LlavaForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Its decoder, saved as a model of its own"):
        load_model(str(tmp_path))


def test_unknown_architecture_asks_for_a_newer_transformers(copied):
    change_config(copied, model_type="odd")
    with pytest.raises(UnsupportedModelError, match="Upgrade transformers"):
        load_model(str(copied))


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
    ids=str,
)
def test_quantised_checkpoint_is_refused_by_method(copied, settings, method):
    change_config(copied, quantization_config=settings)
    with pytest.raises(UnsupportedModelError, match=f"quantised with {method}"):
        load_model(str(copied))


def test_model_code_that_needs_a_package_is_refused_by_its_name(copied):
    auto_map = {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}
    change_config(copied, model_type="odd", auto_map=auto_map)
    (copied / "code.py").write_text("import no_such_package\n")
    with pytest.raises(UnsupportedModelError, match="not installed: .*no_such_package"):
        load_model(str(copied), trust_remote_code=True)


def test_part_of_a_split_gguf_file_is_refused(tmp_path):
    path = tmp_path / "tiny-00001-of-00002.gguf"
    write_tiny_gguf(path, num_parts=2)
    with pytest.raises(UnsupportedModelError, match="one of 2 parts"):
        load_model(str(path))
