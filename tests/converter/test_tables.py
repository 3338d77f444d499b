"""Tables that models keep, against what is computed in their place while tracing."""

import pytest
import torch

from kvconv.converter.alibi_table import computed_alibi
from kvconv.converter.attention import spelled_out_attention
from kvconv.converter.causal_table import computed_tables

POSITIONS = 9


def holder(table: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("table", table, persistent=False)
    return torch.nn.Sequential(module)


def band(window: int) -> torch.Tensor:
    row = torch.arange(POSITIONS)[:, None]
    return ((row.T <= row) & (row.T > row - window))[None, None]


@pytest.mark.parametrize("window", [1, 4, POSITIONS])
def test_causal_table_computes_what_it_holds_and_beyond(window: int) -> None:
    table = band(window)
    model = holder(table)
    with computed_tables(model):
        computed = model[0].table
        assert not isinstance(computed, torch.Tensor)
        for start, end in ((0, 1), (0, 9), (3, 7), (8, 9)):
            expected = table[:, :, start:end, :end]
            assert torch.equal(computed[:, :, start:end, :end], expected)
        assert torch.equal(computed[..., :2], table[..., :2])
        assert torch.equal(computed[:, :, -2:, :4], table[:, :, -2:, :4])
        beyond = computed[:, :, 20:21, :21]
        assert beyond.sum() == (21 if window == POSITIONS else window)
    assert model[0].table is table
    assert "table" in model[0]._non_persistent_buffers_set


@pytest.mark.parametrize(
    "table",
    [
        band(4).float(),
        band(4).flip(3),
        torch.zeros(1, 1, POSITIONS, POSITIONS, dtype=torch.bool),
        torch.ones(1, 1, POSITIONS, POSITIONS, dtype=torch.bool),
        band(4)[0, 0],
    ],
    ids=["float", "flipped", "nothing", "everything", "rank 2"],
)
def test_causal_table_of_another_meaning_stays(table: torch.Tensor) -> None:
    model = holder(table)
    with computed_tables(model):
        assert model[0].table is table


def test_alibi_table_adds_what_a_slice_of_it_would() -> None:
    slopes = torch.tensor([0.5, 0.125])[:, None, None]

    class Model(torch.nn.Module):
        def build_mpt_alibi_tensor(self, num_heads: int, length: int) -> torch.Tensor:
            assert num_heads == 2
            return slopes * torch.arange(1 - length, 1)

    model = Model()
    scores = torch.randn(3, 2, 4, 7)
    with computed_alibi(model):
        bias = model.build_mpt_alibi_tensor(2, 64)
        assert bias.size(1) == bias.size(2) == 0
        computed = scores + bias[:, 0:, 0:]
    table = model.build_mpt_alibi_tensor(2, 64)
    assert torch.equal(computed, scores + table[:, :, -7:])


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
