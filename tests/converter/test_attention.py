"""Attention spelled out for tracing, against PyTorch's own function."""

import pytest
import torch

from kvconv.converter.attention import spelled_out_attention


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_spelled_out_attention_computes_what_pytorch_does(mask: str) -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    numbers = torch.randn(2, 1, 5, 5)
    keywords = {
        "none": {"scale": 0.3},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": numbers},
    }[mask]
    call = {"query": query, "key": key, "value": value, "enable_gqa": True, **keywords}
    expected = torch.nn.functional.scaled_dot_product_attention(**call)
    with spelled_out_attention():
        actual = torch.nn.functional.scaled_dot_product_attention(**call)
    torch.testing.assert_close(actual, expected)
