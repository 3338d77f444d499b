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


@pytest.mark.parametrize(("model_type", "length"), [("gpt2", 128), ("mpt", 128), ("bloom", None)])
def test_most_tokens_are_what_the_config_calls_them(model_type, length):
    assert describe(tiny_model(model_type)).max_position_embeddings == length


def test_recurrent_model_is_refused():
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=64)
    with pytest.raises(UnsupportedModelError, match="plain KV cache") as info:
        describe(AutoModelForCausalLM.from_config(config).eval())
    assert info.value.model_type == "mamba"


def test_length_dependent_rope_is_refused_by_name():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="rope_type 'dynamic'"):
        describe(tiny_model("llama", rope_parameters=rope))


def test_longrope_says_where_it_switches():
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    assert describe(tiny_model("llama", rope_parameters=rope)).rope_switch_length == 16
    assert describe(tiny_model("llama")).rope_switch_length is None
