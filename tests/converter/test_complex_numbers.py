"""Complex arithmetic on pairs of real tensors against PyTorch's own."""

import pytest
import torch

from kvconv.converter.complex_numbers import RealArithmetic
from kvconv.errors import UnsupportedModelError

SIZE = (2, 3, 4, 6)


def rotate(heads, angles):
    """Rotate pairs of a head's elements, as llama4 writes it: [B,S,N,H] by [B,S,H/2]."""
    turns = torch.polar(torch.ones_like(angles), angles).to(heads.device) * 1.5
    pairs = torch.view_as_complex(heads.reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, :, None, :]).flatten(3)


@pytest.fixture
def heads():
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def test_rotation_equals_pytorchs_and_makes_no_complex_tensor(heads):
    angles = torch.arange(18.0).reshape(2, 3, 3)
    expected = rotate(heads, angles)
    with RealArithmetic():
        torch.testing.assert_close(rotate(heads, angles), expected)
        assert not torch.is_tensor(torch.polar(angles, angles))


def test_product_unsqueeze_and_scale_equal_pytorchs(heads):
    def compute():
        first, second = (torch.view_as_complex(part.reshape(2, 3, 4, 3, 2)) for part in parts)
        return torch.view_as_real(2 * first.unsqueeze(1) * second)

    parts = heads, heads.flip(0)
    expected = compute()
    with RealArithmetic():
        torch.testing.assert_close(compute(), expected)


def test_other_functions_are_refused_by_name(heads):
    with RealArithmetic(), pytest.raises(UnsupportedModelError, match="uses conj on complex"):
        torch.conj(torch.view_as_complex(heads.reshape(2, 3, 4, 3, 2)))
