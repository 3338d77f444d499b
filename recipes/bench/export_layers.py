"""Export one random Llama with 2, 8 and 32 layers and print what each further layer costs.

Usage: python recipes/bench/export_layers.py [--layers 2,8,32] [--attention flash]

Seconds are the processor's, not the clock's, so that other programs disturb them less. The first
export of a process pays for imports and caches; a model of one layer goes first and is not shown.
"""

import argparse
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kvconv.flavour import FLAVOURS


class Cost(NamedTuple):
    """Processor seconds of one export, in all and of tracing alone."""

    num_layers: int
    seconds: float
    trace_seconds: float


def save_random_llama(folder: Path, num_layers: int) -> Path:
    """Save a small random checkpoint; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure(folder: Path, num_layers: int, attention: str) -> Cost:
    """Export a model of so many layers, without verification."""
    from kvconv.converter import ExportOptions, export

    checkpoint = save_random_llama(folder / f"layers-{num_layers}", num_layers)
    stages: list[tuple[str, float]] = []
    start = time.process_time()
    export(
        str(checkpoint),
        folder / f"bundle-{num_layers}",
        ExportOptions(attention=attention),  # type: ignore[arg-type]  # the parser's choices
        progress=lambda stage: stages.append((stage, time.process_time())),
    )
    end = time.process_time()
    began = dict(stages)
    return Cost(num_layers, end - start, began["write weights"] - began["trace"])


def main() -> None:
    """Measure and print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", default="2,8,32", help="numbers of layers [2,8,32]")
    parser.add_argument("--attention", default="flash", choices=list(FLAVOURS))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measure(folder, 1, arguments.attention)
        costs = [
            measure(folder, int(number), arguments.attention)
            for number in arguments.layers.split(",")
        ]
    print("layers | export | per layer | trace | per layer   (processor seconds)")
    for cost in costs:
        layers = cost.num_layers
        print(
            f"{layers:6d} | {cost.seconds:6.1f} | {cost.seconds / layers:9.2f} | "
            f"{cost.trace_seconds:5.1f} | {cost.trace_seconds / layers:9.2f}"
        )
    for few, many in pairwise(costs):
        further = (many.seconds - few.seconds) / (many.num_layers - few.num_layers)
        print(f"from {few.num_layers} to {many.num_layers}: {further:.2f} s per further layer")


if __name__ == "__main__":
    main()
