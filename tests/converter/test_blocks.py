"""Blocks: exact on grids, no worse than plain rounding elsewhere, and what zero points may be."""

import pytest
import torch

from kvconv.converter.blocks import quantize


def grid(rows: int, num_blocks: int, low: int, high: int) -> torch.Tensor:
    """Return weights on grids of a scale and an offset per block, as GGUF's Q4_1 has them."""
    generator = torch.Generator().manual_seed(low + high)
    q = torch.randint(low, high + 1, (rows, num_blocks, 32), generator=generator).float()
    q[..., 0], q[..., 1] = low, high
    scales = (torch.rand((rows, num_blocks, 1), generator=generator) + 0.5).half().float() * 0.01
    offsets = torch.randn((rows, num_blocks, 1), generator=generator).half().float() * 0.05
    return (q * scales.half().float() + offsets).reshape(rows, -1)


def noise(rows: int, columns: int) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(3)) * 0.05


def loss(weight: torch.Tensor, bits: int, **options) -> float:
    options = {"block_size": 32, "zero_points": "float", "scale_dtype": torch.float16} | options
    found = quantize(weight, bits=bits, **options).dequantize(bits)[:, : weight.shape[1]]
    return float((found - weight).norm() / weight.norm())


@pytest.mark.parametrize("steps", [15, 14, 12, 9])
def test_weights_on_a_grid_are_met_exactly(steps):
    """Where most blocks of a weight use the whole grid and some do not."""
    weight = torch.cat([grid(8, 4, 0, 15), grid(8, 4, 15 - steps, 15)])
    assert loss(weight, 4) < 2e-3


def test_8_bit_weights_of_gguf_are_met_exactly():
    q = torch.randint(-127, 128, (8, 128), generator=torch.Generator().manual_seed(1))
    q[:, ::32] = 127
    assert loss(q * 0.0078125, 8, zero_points="none") == 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_rounding_between_minimum_and_maximum_is_beaten(bits, block_size):
    weight = noise(16, 256)
    blocks = weight.reshape(16, -1, block_size)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    plain = ((blocks - low) / step).round() * step + low
    error = float((plain.reshape(16, -1) - weight).norm() / weight.norm())
    zero_points = "float" if bits == 4 else "none"
    allowed = error * (0.98 if bits == 4 else 1.3)  # 8 bits have no zero point
    assert loss(weight, bits, block_size=block_size, zero_points=zero_points) < allowed


def test_more_freedom_of_zero_points_loses_less():
    weight = noise(16, 256)
    losses = [loss(weight, 4, zero_points=kind) for kind in ("none", "integer", "float")]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 1.05 * losses[2]


@pytest.mark.parametrize("zero_points", ["none", "integer", "float"])
@pytest.mark.parametrize("columns", [1, 31, 32, 33])
def test_blocks_that_the_row_does_not_fill(zero_points, columns):
    weight = noise(3, columns)
    blocks = quantize(
        weight, bits=4, block_size=32, zero_points=zero_points, scale_dtype=torch.float16
    )
    width = -(-columns // 32)
    assert blocks.q.shape == (3, 32 * width)
    assert blocks.scales.shape == (3, width)
    assert int(blocks.q.max()) <= 15
    assert loss(weight, 4, zero_points=zero_points) < 0.2


@pytest.mark.parametrize("zero_points", ["none", "integer", "float"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 300.0])
def test_blocks_of_one_value(zero_points, value):
    weight = torch.full((2, 64), value)
    blocks = quantize(
        weight, bits=4, block_size=32, zero_points=zero_points, scale_dtype=torch.float16
    )
    found = blocks.dequantize(4)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, weight, rtol=0.07, atol=1e-7)


@pytest.mark.parametrize(("zero_points", "bits"), [("none", 8), ("none", 4), ("integer", 4)])
def test_blocks_too_small_for_a_scale_become_zeros(zero_points, bits):
    weight = noise(64, 64) * 1e-42
    blocks = quantize(
        weight, bits=bits, block_size=32, zero_points=zero_points, scale_dtype=torch.float32
    )
    assert blocks.dequantize(bits).abs().max() < 1e-41


def test_a_block_far_from_zero_keeps_its_zero_point_finite():
    weight = 1000 + noise(4, 64)
    blocks = quantize(weight, bits=4, block_size=32, zero_points="float", scale_dtype=torch.float16)
    assert torch.isfinite(blocks.zero_points).all()
    torch.testing.assert_close(blocks.dequantize(4), weight, rtol=0.04, atol=0)


def test_one_outlier_does_not_cost_the_other_blocks():
    weight = noise(2, 64)
    weight[0, 3] = 40.0
    found = quantize(
        weight, bits=4, block_size=32, zero_points="float", scale_dtype=torch.float16
    ).dequantize(4)
    assert float((found - weight)[0, 32:].abs().max()) < 0.02
    assert float((found - weight)[1].abs().max()) < 0.02


def test_rounding_twice_changes_nothing():
    once = quantize(
        noise(8, 96), bits=4, block_size=32, zero_points="float", scale_dtype=torch.float16
    ).dequantize(4)
    assert loss(once, 4) < 1e-3


@pytest.mark.parametrize(("zero_points", "bits"), [("integer", 8), ("float", 8), ("none", 5)])
def test_a_combination_that_does_not_exist_is_refused(zero_points, bits):
    words = f"bits is {bits} and zero_points is '{zero_points}'; bits is 4, or 8 with 'none'"
    with pytest.raises(ValueError, match=words):
        loss(noise(2, 64), bits, zero_points=zero_points)
