"""How far two sets of logits are apart, and how far they may be."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconv.manifest import AccuracyLevel, CacheDtype, CheckResult, Manifest
from kvconv.verify.reference import FloatArray


@dataclass(frozen=True, slots=True)
class Limits:
    """What a check may find at most.

    Attributes:
        max_abs: Largest absolute logit difference.
        tie: Where the argmax differs, largest difference of the reference's own two logits.
        kl: Largest mean KL divergence, in nats.
    """

    max_abs: float
    tie: float
    kl: float

    @classmethod
    def of(cls, dtype: str, spread: float) -> "Limits":
        """Return the limits for a type of activations, weights or cache.

        Args:
            dtype: A key of the table below.
            spread: Standard deviation of the logits.
        """
        max_abs, tie, kl = _PER_SPREAD[dtype]
        return cls(max_abs * spread, tie * spread, kl * spread**2)

    @classmethod
    def of_bundle(cls, manifest: Manifest, spread: float) -> "Limits":
        """Return the limits against a model with the very same weights, and a cache as exact.

        Each is that of the coarsest rounding: of activations between operators (their dtype), of
        those that a product with quantised weights makes, of keys and values in the cache.
        """
        limits = cls.of(manifest.dtype, spread)
        if manifest.quantization is not None:
            level = manifest.quantization.accuracy_level
            limits = limits.at_least(cls.of(ROUNDED_ACTIVATIONS.get(level, manifest.dtype), spread))
        dtype = manifest.cache_layers[0].dtype
        return limits.at_least(cls.of(STEPS_OF_CACHES.get(dtype, dtype), spread))

    def at_least(self, other: "Limits") -> "Limits":
        """Return the larger of each two limits."""
        return Limits(
            max(self.max_abs, other.max_abs), max(self.tie, other.tie), max(self.kl, other.kl)
        )


# Errors of standard deviation e give a divergence of e^2 / 2. With float activations typical errors
# must be no more than a quarter of the largest one allowed, hence its square / 32.
_PER_SPREAD = {
    "float32": (2e-4, 2e-4, 2e-4**2 / 32),
    "float16": (0.06, 0.02, 0.06**2 / 32),
    # Weights as they were before they were rounded: another model, close by. A wrong rotation or
    # window is farther off.
    "int8": (1.0, 0.5, 0.004),
    "int4": (5.0, 5.0, 0.12),
    # The same weights with activations that become 8-bit integers, or these in other pieces: a
    # difference in the last bit of a float is one step of such an integer, now and then.
    "8-bit activations": (1.5, 0.5, 0.002),
    "16-bit activations": (0.01, 0.01, 0.01**2 / 32),
    # Keys and values as they were before they were rounded.
    "bfloat16": (0.3, 0.1, 5e-4),
    "int8 cache": (0.3, 0.1, 5e-4),
    "int4 cache": (3.0, 2.0, 0.03),
    # The same ones in runs of other sizes, which differ in the last bits: as for 8-bit activations.
    "steps of an int8 cache": (0.3, 0.1, 5e-4),
    "steps of an int4 cache": (2.0, 1.0, 5e-3),
}
"""What is compared -> Limits of logits with standard deviation 1."""
ROUNDED_ACTIVATIONS: Mapping[AccuracyLevel, str] = {
    4: "8-bit activations",
    2: "16-bit activations",
}
"""Accuracy level -> what is compared; at other levels activations are what the manifest says."""
FLOAT_CACHES: Mapping[CacheDtype, str] = {"int8": "int8 cache", "int4": "int4 cache"}
"""Quantised cache -> what is compared with PyTorch, whose cache is not."""
STEPS_OF_CACHES: Mapping[CacheDtype, str] = {
    "int8": "steps of an int8 cache",
    "int4": "steps of an int4 cache",
}
"""Quantised cache -> what is compared with the bundle itself."""


def compare_logits(name: str, found: FloatArray, wanted: FloatArray, limits: Limits) -> CheckResult:
    """Compare two sets of logits, both [positions, vocab_size] float32.

    A different argmax fails a check unless PyTorch's own two logits are a tie within the limits.
    Non-finite differences count as the largest float.
    """
    difference = np.abs(found - wanted)
    largest = float(np.finfo(np.float32).max)
    np.nan_to_num(difference, copy=False, nan=largest, posinf=largest)
    rows = np.arange(len(wanted))
    best_found, best_wanted = found.argmax(axis=-1), wanted.argmax(axis=-1)
    margin = wanted[rows, best_wanted] - wanted[rows, best_found]
    max_abs = float(difference.max())
    kl = _mean_kl(wanted, found)
    apart = float(margin.max())
    facts = (
        (max_abs, limits.max_abs, f"the logits differ by up to {max_abs:.3g}"),
        (kl, limits.kl, f"the KL divergence is {kl:.3g}"),
        (apart, limits.tie, f"another token is likeliest that PyTorch puts {apart:.3g} lower"),
    )
    exceeded = tuple(
        f"{fact} (tolerance {limit:.3g})" for value, limit, fact in facts if not value <= limit
    )
    return CheckResult(
        name=name,
        positions=len(wanted),
        max_abs=max_abs,
        mean_abs=float(difference.mean(dtype=np.float64)),
        kl=kl,
        top1=float((best_found == best_wanted).mean()),
        passed=not exceeded,
        exceeded=exceeded,
    )


def _mean_kl(wanted: FloatArray, found: FloatArray) -> float:
    total = 0.0
    with np.errstate(invalid="ignore"):  # infinite logits; the result is checked below
        for row_wanted, row_found in zip(wanted, found, strict=True):
            p, q = (_log_softmax(row.astype(np.float64)) for row in (row_wanted, row_found))
            total += float(np.exp(p) @ (p - q))
    mean = total / len(wanted)
    # Rounding may leave a sum of tiny terms just below zero.
    return max(mean, 0.0) if np.isfinite(mean) else float(np.finfo(np.float32).max)


def _log_softmax(row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = row - row.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
