"""What is measured on a GPU, what it is compared with, and how the table says it."""

import json
from typing import Any, NamedTuple

from kvconv.cache_layout import stored_tensors
from kvconv.manifest import CacheLayer


class Result(NamedTuple):
    """One line of the table.

    Attributes:
        what: What was measured, with its sizes.
        value: The number.
        unit: Of the number.
        versus: What the ratio is to; empty where there is none.
        ratio: value over the other, the way in which more is better; None where there is none.
        goal: What the ratio should be at least; None where there is none.
    """

    what: str
    value: float
    unit: str
    versus: str = ""
    ratio: float | None = None
    goal: float | None = None

    @property
    def verdict(self) -> str:
        """`ok` or `MISSED`; empty without a goal."""
        if self.goal is None or self.ratio is None:
            return ""
        return "ok" if self.ratio >= self.goal else "MISSED"


PREFILL_GOAL = 0.9
"""Of the speed of torch SDPA's flash backend, at 4096 to 16384 tokens."""
COPY_GOAL = 0.8
"""Of the bandwidth of copies on the device, for decoding at 8192 tokens and more."""
CACHE_GOALS = {"int8": 1.6, "int4": 2.5}
"""Decoding at 32768 tokens over a quantised cache, by the speed over a float16 one."""
GRAPH_GOAL = 1.3
"""A decode step of a model with CUDA graph, by one without."""


def prefill_flops(tokens: int, num_heads: int, head_dim: int, value_head_dim: int) -> float:
    """Return the floating point operations of causal attention: half of all pairs, two products."""
    pairs = tokens * (tokens + 1) / 2
    return 2 * num_heads * pairs * (head_dim + value_head_dim)


def decode_bytes(tokens: int, batch: int, layer: CacheLayer) -> int:
    """Return the bytes of the cache that a decode step reads, scales included."""
    return tokens * batch * sum(tensor.slot_bytes for tensor in stored_tensors(layer))


def num_copies(bytes_of_one: int, l2_bytes: int) -> int:
    """Return how many inputs take turns so that none is in the L2 cache when it comes again."""
    return max(2, -(-4 * l2_bytes // max(bytes_of_one, 1)))


def table(results: list[Result]) -> str:
    """Return the results as lines of text."""
    rows = [("what", "value", "versus", "ratio", "goal", "")]
    for result in results:
        rows.append(
            (
                result.what,
                f"{result.value:.4g} {result.unit}",
                result.versus,
                "" if result.ratio is None else f"{result.ratio:.2f}x",
                "" if result.goal is None else f"{result.goal:.2f}x",
                result.verdict,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def as_json(machine: dict[str, Any], results: list[Result], notes: list[str]) -> str:
    """Return everything as one JSON document."""
    lines = [{**result._asdict(), "verdict": result.verdict} for result in results]
    document = {"machine": machine, "results": lines, "not_checked": notes}
    return json.dumps(document, indent=2) + "\n"
