"""Llama 4's attention temperature follows positions, not slots."""

import pytest
import torch

from kvconv.converter.temperature import tuned_by_position
from tiny_decoders import padded_batch, tiny_model


@pytest.fixture
def model():
    """Return a decoder whose temperature changes with every fourth token."""
    model = tiny_model("llama4_text")
    model.set_attn_implementation("eager")
    return model


def _logits(model, row, *, padded):
    """Run one row of `padded_batch`, with its padding or without; returns those of its tokens."""
    input_ids, mask, positions = (tensor[row : row + 1] for tensor in padded_batch(length=20))
    start = int((mask == 0).sum())
    first = 0 if padded else start
    logits = model(
        input_ids=input_ids[:, first:],
        attention_mask=mask[:, first:],
        position_ids=positions[:, first:],
    ).logits
    return logits[:, start - first :]


def test_temperature_of_a_padded_prompt_is_that_of_the_prompt_alone(model):
    alone, counting_slots = _logits(model, 2, padded=False), _logits(model, 2, padded=True)
    with tuned_by_position(model):
        found = _logits(model, 2, padded=True)
    assert (counting_slots - alone).abs().max() > 0.01  # else the prompt shows nothing
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


def test_temperature_without_padding_stays_and_comes_back(model):
    before, padded = _logits(model, 0, padded=True), _logits(model, 2, padded=True)
    with tuned_by_position(model):
        torch.testing.assert_close(_logits(model, 0, padded=True), before, atol=1e-6, rtol=0)
    assert torch.equal(_logits(model, 2, padded=True), padded)
    model.model.layers[1].self_attn.attn_temperature_tuning = False
    assert (_logits(model, 0, padded=True) - before).abs().max() > 0.05
