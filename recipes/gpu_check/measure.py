"""Times of the op on a GPU beside those of torch's flash attention and of copies."""

import dataclasses
import statistics
from collections.abc import Callable

import torch
from attention_case import Case, Op
from goals import (
    CACHE_GOALS,
    COPY_GOAL,
    PREFILL_GOAL,
    Result,
    decode_bytes,
    num_copies,
    prefill_flops,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PREFILL_TOKENS = (4096, 8192, 16384)
DECODE_TOKENS = (8192, 32768)
_CACHES = ("float16", "int8", "int4")
_REPLAYS = 20
_COPY_BYTES = 2**30


def case_of(head_dim: int, cache: str = "float16") -> Case:
    """Return the attention that is measured: 32 query heads over 8, one row, causal."""
    return dataclasses.replace(
        Case(), num_heads=32, kv_num_heads=8, head_dim=head_dim, value_head_dim=head_dim,
        cache=cache, batch=1,
    )  # fmt: skip


def cases() -> list[Case]:
    """Return all attentions that are measured."""
    return [case_of(head_dim, cache) for head_dim in (64, 128) for cache in _CACHES]


def measure(kernels: bytes, l2_bytes: int) -> list[Result]:
    """Return the lines of the table.

    Args:
        kernels: A file of kernels that has those of `cases()`.
        l2_bytes: Size of the GPU's L2 cache.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copy = copy_rate(stream)
        results = [Result("device to device copy, read and written", copy / 1e9, "GB/s")]
        for head_dim in (64, 128):
            for tokens in PREFILL_TOKENS:
                results.append(prefill(case_of(head_dim), tokens, kernels, l2_bytes, stream))
            for tokens in DECODE_TOKENS:
                results += decode(head_dim, tokens, kernels, l2_bytes, stream, copy)
    return results


def replay_seconds(launch: Callable[[], None], stream: torch.cuda.Stream) -> float:
    """Return the median time of what `launch` puts on the stream, captured and replayed.

    Under a graph the time of Python between the launches does not count.
    """
    launch()  # loads kernels, which cannot be captured
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_rate(stream: torch.cuda.Stream) -> float:
    """Return bytes read and written per second."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / replay_seconds(lambda: target.copy_(source) and None, stream)


def prefill(
    case: Case, tokens: int, kernels: bytes, l2_bytes: int, stream: torch.cuda.Stream
) -> Result:
    """Measure a whole prompt, cache writes included, against torch's flash attention."""
    op = Op(case, kernels, tokens)
    inputs = op.inputs(0, tokens)
    count = num_copies(sum(tensor.nbytes for tensor in inputs.values()), l2_bytes)
    copies = [op.inputs(0, tokens) for _ in range(count)]
    output = op.output(tokens)

    def launch() -> None:
        for copy in copies:
            op.run(copy, output)

    seconds = replay_seconds(launch, stream) / count
    heads = {"query": case.num_heads, "key": case.kv_num_heads, "value": case.kv_num_heads}
    split = [
        [copy[name].unflatten(-1, (n, -1)).transpose(1, 2) for name, n in heads.items()]
        for copy in copies
    ]

    def launch_torch() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for query, key, value in split:
                scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    other = replay_seconds(launch_torch, stream) / count
    op.close()
    flops = prefill_flops(tokens, case.num_heads, case.head_dim, case.value_head_dim)
    return Result(
        f"prefill {tokens}, head_dim {case.head_dim}", flops / seconds / 1e12, "TFLOP/s",
        f"SDPA flash {flops / other / 1e12:.4g}", other / seconds, PREFILL_GOAL,
    )  # fmt: skip


def decode(
    head_dim: int,
    tokens: int,
    kernels: bytes,
    l2_bytes: int,
    stream: torch.cuda.Stream,
    copy: float,
) -> list[Result]:
    """Measure a step behind `tokens`, over each kind of cache."""
    results, float_seconds = [], 0.0
    for cache in _CACHES:
        case = case_of(head_dim, cache)
        bytes_read = decode_bytes(tokens, case.batch, case.layer)
        seconds = decode_seconds(case, tokens, kernels, num_copies(bytes_read, l2_bytes), stream)
        what = f"decode at {tokens}, head_dim {head_dim}, {cache} cache"
        rate = bytes_read / seconds
        if cache == "float16":
            float_seconds = seconds
        results.append(
            Result(
                what,
                rate / 1e9,
                "GB/s",
                "copy",
                rate / copy,
                COPY_GOAL if cache == "float16" else None,
            )
        )
        if cache in CACHE_GOALS:
            goal = CACHE_GOALS[cache] if tokens >= 32768 else None
            results.append(
                Result(what, 1e6 * seconds, "us", "float16 cache", float_seconds / seconds, goal)
            )
    return results


def decode_seconds(
    case: Case, tokens: int, kernels: bytes, count: int, stream: torch.cuda.Stream
) -> float:
    """Return the time of one step; `count` caches take turns."""
    op = Op(case, kernels, tokens)
    op.past.fill_(tokens - 1)
    caches = [op.new_cache(filled=True) for _ in range(count)]
    inputs, output = op.inputs(tokens - 1, 1), op.output(1)

    def launch() -> None:
        for cache in caches:
            op.run(inputs, output, cache)

    seconds = replay_seconds(launch, stream) / count
    op.close()
    return seconds
