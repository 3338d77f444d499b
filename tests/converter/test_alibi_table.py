"""ALiBi computed while tracing, against slices of the table it stands for."""

import torch

from kvconv.converter.alibi_table import computed_alibi


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
