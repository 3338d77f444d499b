"""Sizes from a config alone equal those of the model with weights, and of its export."""

import json
from pathlib import Path

import pytest

from kvconv.converter.decoder_spec import CacheShape, describe
from kvconv.converter.model_sizes import read_sizes, run_sizes
from kvconv.errors import ModelNotFoundError, UnsupportedModelError
from kvconv.manifest import RunSizes, read_manifest
from kvconv.plan import bundle_sizes
from tiny_decoders import LONGROPE, WINDOW, tiny_model
from tiny_gguf import tiny_gguf_model, write_tiny_gguf


def save_config(model, folder: Path) -> str:
    """Write config.json and nothing else: no weights, no tokenizer."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return str(folder)


def read(folder, **changes):
    options = {"dtype": "float32", "weights": None, "cache_dtype": "float32"}
    return read_sizes(folder, **options | changes)


KINDS = ("llama", "gemma3_text", "gpt2", "falcon", "mpt", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_from_the_config_equal_those_of_the_model(kind, tmp_path):
    model = tiny_model(kind)
    planned = read(save_config(model, tmp_path / "model"))
    shapes = tuple(
        CacheShape(layer.num_key_value_heads, layer.key_head_dim, layer.value_head_dim)
        for layer in planned.sizes.cache_layers
    )
    spec = describe(model)
    assert shapes == spec.cache_shapes
    assert planned.sizes.vocab_size == spec.vocab_size
    assert planned.max_sequence_length == spec.max_position_embeddings
    assert planned.sizes.weight_bytes == 4 * sum(weight.numel() for weight in model.parameters())
    assert planned.sizes.run == run_sizes(model, dtype="float32", weights=None)


def test_plan_of_a_model_is_that_of_its_bundle(exported, checkpoint):
    folder = exported("llama").path
    of_bundle = bundle_sizes(read_manifest(folder))
    of_model = read(str(checkpoint("llama"))).sizes
    assert of_model.cache_layers == of_bundle.cache_layers
    assert of_model.run == of_bundle.run == RunSizes(4, 80, 0)
    weights = (folder / "model.onnx.data").stat().st_size
    # The file has pages between its tensors, and small ones are in the graph.
    assert of_model.weight_bytes == pytest.approx(weights, abs=4096 * 20)


def test_run_sizes_of_a_llama_equal_those_worked_out_by_hand():
    model = tiny_model("llama", tie_word_embeddings=True)
    # The widest layers go from 32 to 48 numbers or back. The embedding has 259 x 32 = 8288.
    assert run_sizes(model, dtype="float32", weights=None) == RunSizes(4, 80, 8288 * 4)
    # Other layers have 2 x (32 x 32 x 3 + 3 x 32 x 48) = 15,360, which become float32.
    assert run_sizes(model, dtype="float16", weights=None) == RunSizes(4, 80, 8288 * 4 + 30_720)
    assert run_sizes(model, dtype="float16", weights="int4") == RunSizes(4, 80, 0)


def test_run_sizes_of_a_mixture_count_the_experts_of_a_token():
    # 2 of 4 experts, whose gate and up are one stack: from 32 to 2 x 48 numbers.
    assert run_sizes(tiny_model("mixtral"), dtype="float32", weights=None).activation_width == 256


def test_windows_are_those_of_the_config(tmp_path):
    planned = read(save_config(tiny_model("gemma3_text"), tmp_path / "model"))
    assert [layer.window_size for layer in planned.sizes.cache_layers] == [WINDOW, None]


def test_longrope_model_ends_where_its_frequencies_switch(tmp_path):
    planned = read(save_config(tiny_model("phi3"), tmp_path / "model"))
    assert planned.max_sequence_length == LONGROPE["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # Llama of 2 layers, width 32, vocabulary 259, untied. Norms: 5 x 32 x 4 bytes = 640.
        # Blocks of 32 with 8 bits are 34 bytes, rows come in groups of 16: embedding and head are
        # 272 rows of 1 block; q, k, v, o, gate and up 32 + 16 + 16 + 32 + 48 + 48 = 192 rows of 1,
        # down 32 rows of 2.
        # 2 x 272 x 34 + 2 x (192 + 32 x 2) x 34 + 640 = 18,496 + 17,408 + 640
        ("int8", 36_544),
        # Lossy blocks: 8 bits in blocks of 32 (34 bytes) for the head (272 rows) and q, k, v (64);
        # 4 bits in blocks of 16 (12 bytes) for the embedding (272 x 2), o, gate and up (128 x 2)
        # and down (32 x 3).
        # 272 x 34 + 272 x 24 + 2 x (64 x 34 + 256 x 12 + 96 x 12) + 640 = 9,248 + 6,528 + 12,800
        ("int4", 29_216),
    ],
)
def test_quantised_weights_equal_those_worked_out_by_hand(weights, expected, tmp_path):
    planned = read(save_config(tiny_model("llama"), tmp_path / "model"), weights=weights)
    assert planned.sizes.weight_bytes == expected


def test_gguf_file_is_planned_from_its_header(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    planned = read(str(tmp_path / "tiny.gguf"))
    assert planned.name == "tiny.gguf"
    weights = sum(weight.numel() for weight in tiny_gguf_model().parameters())
    assert planned.sizes.weight_bytes == 4 * weights


@pytest.mark.real
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", 96_579_584),
        ("gemma-3-270m-q4_k_m.gguf", 256_267_264),
    ],
)
def test_int4_weights_of_a_gguf_file_are_those_of_its_export(file, expected):
    model = Path(__file__).parents[2] / "models" / file
    planned = read(str(model), weights="int4")
    # Of an export's model.onnx.data; constants of its graph are counted there too.
    assert planned.sizes.weight_bytes == pytest.approx(expected, rel=0.001)


def test_recurrent_model_is_refused_by_its_config(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "vocab_size": 50})
    )
    with pytest.raises(UnsupportedModelError):
        read(str(tmp_path))


def test_encoder_is_refused_by_its_config(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    )
    with pytest.raises(UnsupportedModelError, match="not a decoder"):
        read(str(tmp_path))


def test_damaged_config_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        read(str(tmp_path))
