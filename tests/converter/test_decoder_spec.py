"""What is read off a decoder, and which decoders are refused."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvconv.converter.decoder_spec import CacheShape, describe
from kvconv.errors import UnsupportedModelError
from tiny_decoders import tiny_model


def test_facts_come_from_a_run_and_from_the_configs():
    spec = describe(tiny_model("llama"))
    assert spec.architecture == "LlamaForCausalLM"
    assert spec.cache_shapes == (CacheShape(2, 8, 8),) * 2
    assert (spec.vocab_size, spec.max_position_embeddings) == (259, 128)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (256, (257,), 258)
    assert spec.has_position_ids


def test_eos_ids_are_a_set_and_the_generation_config_decides():
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=[9, 4, 9])
    assert describe(model).eos_token_ids == (4, 9)
    model.generation_config = GenerationConfig()
    model.config.eos_token_id = [7, 5]
    assert describe(model).eos_token_ids == (5, 7)


def test_ids_of_minus_one_mean_none_and_texts_are_refused():
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(pad_token_id=-1, eos_token_id=[-1, 3])
    model.config.pad_token_id = -1
    spec = describe(model)
    assert (spec.pad_token_id, spec.eos_token_ids) == (None, (3,))
    model.generation_config.eos_token_id = "</s>"
    with pytest.raises(UnsupportedModelError, match="eos_token_id is '</s>'"):
        describe(model)


@pytest.mark.parametrize(("model_type", "length"), [("gpt2", 128), ("mpt", 128), ("bloom", 128)])
def test_most_tokens_are_what_the_config_calls_them(model_type, length):
    assert describe(tiny_model(model_type)).max_position_embeddings == length


def test_recurrent_model_is_refused():
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=64)
    with pytest.raises(UnsupportedModelError, match="plain KV cache") as info:
        describe(AutoModelForCausalLM.from_config(config).eval())
    assert info.value.model_type == "mamba"


def test_hybrid_model_is_refused_with_its_kinds_of_layers():
    config = AutoConfig.for_model(
        "lfm2", hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(
        UnsupportedModelError, match=r"of conv and full_attention\) keeps a recurrent .* layer 0"
    ):
        describe(AutoModelForCausalLM.from_config(config).eval())


def test_model_whose_layers_share_a_cache_is_refused_with_the_layer():
    model = tiny_model(
        "gemma3n_text", hidden_size=16, intermediate_size=16, num_hidden_layers=3, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_kv_shared_layers=1,
        layer_types=["full_attention"] * 3, hidden_size_per_layer_input=8, laurel_rank=4,
        vocab_size_per_layer_input=259, activation_sparsity_pattern=[0.0] * 3,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="shares that of another layer, in layer 2"):
        describe(model)


def test_model_that_counts_positions_otherwise_is_refused():
    model = tiny_model(
        "roberta", hidden_size=16, intermediate_size=16, num_hidden_layers=1, is_decoder=True,
        num_attention_heads=2, pad_token_id=1,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="Roberta.* does not count positions from 0"):
        describe(model)


def test_model_that_needs_more_than_token_ids_is_refused_with_the_cause(monkeypatch):
    model = tiny_model("llama", num_hidden_layers=1)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda pixels, **inputs: forward(**inputs))
    with pytest.raises(UnsupportedModelError, match="on two token ids: .* argument: 'pixels'"):
        describe(model)


@pytest.mark.parametrize(
    ("model_type", "length"), [("phi3", 16), ("llama", None)], ids=["longrope", "default"]
)
def test_fixed_rope_length_is_where_frequencies_change(model_type, length):
    assert describe(tiny_model(model_type)).fixed_rope_length == length
