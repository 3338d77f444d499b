"""Latent attention: what its cache holds, what is refused, and that the model is left as it was."""

import pytest
import torch

from kvconv.converter.decoder_spec import CacheShape, describe
from kvconv.converter.mla import LatentLayer, absorb, absorbed, expand, latent_layers
from kvconv.errors import UnsupportedModelError
from tiny_decoders import CONFIGS, tiny_model

_CONFIG = CONFIGS["deepseek_v3"]
RANK, ROPE = _CONFIG["kv_lora_rank"], _CONFIG["qk_rope_head_dim"]
BATCH, NEW, TOTAL = 2, 3, 5


@pytest.fixture(scope="module")
def model():
    return tiny_model("deepseek_v3")


def test_cache_holds_one_latent_per_token_for_all_heads(model):
    assert describe(model).cache_shapes == (CacheShape(1, RANK + ROPE, RANK),) * 2


def test_absorbed_attention_equals_attention_over_expanded_keys_and_values(model):
    generator = torch.Generator().manual_seed(0)
    module = latent_layers(model)[1]
    width = module.qk_nope_head_dim + ROPE
    query = torch.randn(BATCH, module.num_heads, NEW, width, generator=generator)
    latent = torch.randn(BATCH, 1, TOTAL, RANK, generator=generator)
    rope = torch.randn(BATCH, 1, TOTAL, ROPE, generator=generator)
    key, value = module.expand_kv(latent, rope)
    scores = query @ key.transpose(2, 3)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    with absorbed(model):
        layer = LatentLayer()
        layer.update(latent[:, :, :2], rope[:, :, :2])
        key, value = module.expand_kv(*layer.update(latent[:, :, 2:], rope[:, :, 2:]))
        assert key.shape == (BATCH, 1, TOTAL, RANK + ROPE)
        assert value.shape == (BATCH, 1, TOTAL, RANK)
        latent_scores = absorb(module, query) @ key.transpose(2, 3)
        output = (latent_scores.softmax(-1) @ value).transpose(1, 2)
        torch.testing.assert_close(latent_scores, scores, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(expand(module, output), expected, rtol=1e-4, atol=1e-4)


def test_absorbed_shares_the_weights_and_leaves_no_trace_behind(model):
    module = latent_layers(model)[0]
    tokens = torch.arange(6)[None]
    before = model(input_ids=tokens).logits
    state, expand_kv = set(dict(module.named_buffers())), module.expand_kv
    with absorbed(model):
        start = module.kv_b_proj.weight.untyped_storage().data_ptr()
        added = [b for n, b in module.named_buffers() if n not in state]
        assert [buffer.untyped_storage().data_ptr() for buffer in added] == [start, start]
        assert module.expand_kv is not expand_kv
    assert set(dict(module.named_buffers())) == state
    assert module.expand_kv == expand_kv
    torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=0, atol=0)


def test_other_attention_is_left_alone(model):
    llama = tiny_model("llama", num_hidden_layers=1)
    assert latent_layers(llama) == {}
    query = torch.randn(1, 4, 2, 8)
    with absorbed(llama):
        assert absorb(llama.model.layers[0].self_attn, query) is query
        assert expand(llama.model.layers[0].self_attn, query) is query


def test_layer_with_an_indexer_or_a_bias_is_refused_by_name():
    model = tiny_model("deepseek_v3")
    module = model.model.layers[1].self_attn
    module.indexer = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="DeepseekV3Attention selects .* indexer"):
        describe(model)
    del module.indexer
    module.kv_b_proj.bias = torch.nn.Parameter(torch.ones(module.kv_b_proj.out_features))
    with pytest.raises(UnsupportedModelError, match="kv_b_proj has a bias"):
        describe(model)
