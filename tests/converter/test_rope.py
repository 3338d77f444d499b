"""Rotary embeddings whose frequencies depend on the length of a run."""

import pytest
import torch
from transformers import AutoConfig

from kvconv.converter.rope import fixed_length, original_frequencies
from kvconv.errors import UnsupportedModelError
from tiny_decoders import LAYER_TYPES, LLAMA3_ROPE, LONGROPE, tiny_model

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}


def rotate(embedding, last_position):
    """Return cos of a run that ends at a position."""
    positions = torch.arange(last_position + 1)[None]
    return embedding(torch.zeros(1, 1, 8), positions)[0][0, :9]


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_original_frequencies_hold_beyond_the_switch_and_come_back(rope):
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=16)
    embedding = model.model.rotary_emb
    short, long = rotate(embedding, 8), rotate(embedding, 40)
    assert (short - long).abs().max() > 0.01
    with original_frequencies(model):  # the last run left other frequencies behind
        assert torch.equal(rotate(embedding, 8), short)
        assert torch.equal(rotate(embedding, 40), short)
    assert torch.equal(rotate(embedding, 40), long)


def test_original_frequencies_of_each_layer_type_hold():
    ropes = {"sliding_attention": LONGROPE | {"factor": 2.0}, "full_attention": DYNAMIC}
    model = tiny_model("gemma3_text", rope_parameters=ropes)
    with original_frequencies(model):
        assert set(model.model.rotary_emb.rope_type.values()) == {"default"}
    assert set(model.model.rotary_emb.rope_type.values()) == {"longrope", "dynamic"}


@pytest.mark.parametrize(
    ("ropes", "length"),
    [((DYNAMIC, LLAMA3_ROPE), 128), ((LONGROPE, DYNAMIC), 16), ((LLAMA3_ROPE,) * 2, None)],
    ids=["dynamic", "longrope and dynamic", "llama3"],
)
def test_fixed_length_is_the_least_of_all_layer_types(ropes, length):
    parameters = dict(zip(LAYER_TYPES, ropes, strict=True))
    config = AutoConfig.for_model(
        "gemma3_text", rope_parameters=parameters, max_position_embeddings=128
    )
    assert fixed_length(config) == length


def test_model_with_rotary_code_of_its_own_is_refused_with_the_rope_type():
    model = tiny_model("llama", num_hidden_layers=1, rope_parameters=DYNAMIC)
    model.model.rotary_emb = torch.nn.Identity()
    with (
        pytest.raises(UnsupportedModelError, match="rope_type 'dynamic'.* with code of its own"),
        original_frequencies(model),
    ):
        pass
