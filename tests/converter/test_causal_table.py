"""Causal masks that models keep as tables, against what is computed in their place."""

import pytest
import torch

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
