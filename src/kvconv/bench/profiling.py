"""Where a run spends its time: ONNX Runtime's own profile, by operator, for each phase apart."""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconv.bench.measurement import Measurement
from kvconv.bench.point import Phase
from kvconv.errors import KvconvError
from kvconv.manifest import Provider

_RUN = "model_run"
_OUTSIDE = "outside the nodes"


@dataclass(frozen=True, slots=True)
class OpTime:
    """What all nodes of one operator took.

    Attributes:
        op: The operator's type, or `outside the nodes`: what ONNX Runtime needs around them.
        nodes: How many there are in one run of the graph.
        ms: Of one run of the graph: a decode step, or a chunk of the prompt.
        percent: Of the whole run.
    """

    op: str
    nodes: int
    ms: float
    percent: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where one phase spends its time.

    Attributes:
        phase: `prefill` or `decode`.
        context: Prompt tokens per row.
        batch: Rows.
        runs: Runs of the graph: chunks of the prompt, or decode steps.
        ms: Of one run, the profiling itself included.
        ops: The slowest first.
    """

    phase: Phase
    context: int
    batch: int
    runs: int
    ms: float
    ops: tuple[OpTime, ...]


def profile(
    bundle: Path,
    context: int,
    *,
    gen: int,
    batch: int,
    threads: int | None,
    use_bundle_library: bool = False,
    prefill_chunk: int | None = None,
    spin: bool = True,
    provider: Provider = "cpu",
) -> tuple[Profile, Profile]:
    """Profile a prefill and the decode behind it, in a session of their own.

    Args:
        bundle: The bundle's folder.
        context: Prompt tokens per row, >= 1.
        gen: Decode steps, >= 1.
        batch: Rows, >= 1.
        threads: See `Session`.
        use_bundle_library: See `Session`.
        prefill_chunk: See `Generator`.
        spin: See `Session`.
        provider: See `Session`. Steps on CUDA are not captured: a captured one has no nodes.

    Raises:
        CacheFullError: The depth does not fit; nothing has run.
        KvconvError: ONNX Runtime kept a part of the events only: a million of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        measurement = Measurement.open(
            bundle,
            threads=threads,
            use_bundle_library=use_bundle_library,
            prefill_chunk=prefill_chunk,
            spin=spin,
            provider=provider,
            cuda_graph=False,
            profile=Path(folder) / "profile",
        )
        prompts = measurement.prompts(context, batch)
        for _ in range(2):  # the first only warms up
            measurement.run(prompts, gen)
        events = json.loads(measurement.generator.session.end_profile().read_text())
    runs = _runs(events)
    chunks = math.ceil(context / measurement.generator.chunk_tokens(batch, context))
    if len(runs) != 2 * (chunks + gen):
        raise KvconvError(
            f"ONNX Runtime's profile holds {len(runs)} of {2 * (chunks + gen)} runs in "
            f"{len(events)} events; it keeps a million. Choose fewer tokens with --gen, or a "
            f"larger --prefill-chunk."
        )
    measured = runs[chunks + gen :]
    prefill, decode = measured[:-gen], measured[-gen:]
    return (
        _summary("prefill", context, batch, prefill),
        _summary("decode", context, batch, decode),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the graph: its microseconds, and those of its nodes by operator."""

    us: float
    nodes: dict[str, list[float]]


def _runs(events: Sequence[dict[str, Any]]) -> list[_Run]:
    """Return all runs of the graph in order; a node belongs to the run in whose span it begins."""
    spans = sorted((event["ts"], event["dur"]) for event in events if event["name"] == _RUN)
    nodes = sorted(
        (event["ts"], event["args"]["op_name"], event["dur"])
        for event in events
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time")
    )
    runs = []
    index = 0
    for start, duration in spans:
        by_op: dict[str, list[float]] = defaultdict(list)
        while index < len(nodes) and nodes[index][0] <= start + duration:
            _, op, node_duration = nodes[index]
            by_op[op].append(node_duration)
            index += 1
        runs.append(_Run(duration, by_op))
    return runs


def _summary(phase: Phase, context: int, batch: int, runs: Sequence[_Run]) -> Profile:
    total = sum(run.us for run in runs)
    seconds: dict[str, float] = defaultdict(float)
    nodes: dict[str, int] = defaultdict(int)
    for run in runs:
        for op, durations in run.nodes.items():
            seconds[op] += sum(durations)
            nodes[op] += len(durations)
    seconds[_OUTSIDE] = total - sum(seconds.values())
    ops = [
        OpTime(
            op,
            round(nodes[op] / len(runs)),
            round(us / len(runs) / 1e3, 4),
            round(100 * us / total, 2),
        )
        for op, us in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return Profile(phase, context, batch, len(runs), round(total / len(runs) / 1e3, 4), tuple(ops))
