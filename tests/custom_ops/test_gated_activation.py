"""kvconv::GatedActivation against PyTorch's activations in float64."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional

import one_node

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def expected_of(x: npt.NDArray, activation: str) -> npt.NDArray[np.float64]:
    gate, up = torch.from_numpy(x.astype(np.float64)).chunk(2, dim=-1)
    return (FUNCTIONS[activation](gate) * up).numpy()


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 1536])
def test_output_is_activation_of_gate_times_up(activation: str, kind: str, size: int) -> None:
    x = (np.random.default_rng(size).standard_normal((2, 3, 2 * size)) * 3).astype(kind)
    actual = one_node.run(
        "GatedActivation", {"input": x}, {"activation": activation}, output_type=kind
    )
    expected = expected_of(x, activation)
    assert actual.shape == expected.shape
    tolerance = 2e-6 if kind == "float32" else 1e-3
    assert np.allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_every_gate_is_accurate(activation: str) -> None:
    gate = np.concatenate([np.linspace(-100, 100, 20001), [1e-30, -1e-30, 0.0]])
    x = np.concatenate([gate, np.ones_like(gate)]).astype(np.float32)[None]
    actual = one_node.run("GatedActivation", {"input": x}, {"activation": activation}, threads=2)
    assert np.allclose(actual, expected_of(x, activation), rtol=2e-6, atol=3e-7)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_infinite_and_missing_gates(activation: str) -> None:
    x = np.array([[np.inf, -np.inf, np.nan, 2.0, 2.0, 2.0]], dtype=np.float32)
    actual = one_node.run("GatedActivation", {"input": x}, {"activation": activation})
    assert actual[0, 0] == np.inf
    assert np.isnan(actual[0, 2])


def test_no_elements() -> None:
    x = np.zeros((2, 0, 8), dtype=np.float32)
    assert one_node.run("GatedActivation", {"input": x}, {"activation": "silu"}).shape == (2, 0, 4)
