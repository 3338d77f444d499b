"""Measure a random mixture of experts in a bundle against transformers, side by side.

Usage: python recipes/bench/experts.py FOLDER [--experts 8] [--layers 4] [--intermediate-size 1792]

Exports a Mixtral of noise (hidden size 512) into FOLDER, then runs prefill and decode in turns in
one process, so that a busy machine slows all. Prints what the export took, the time to load, and
the best tokens/s of each with its ratio to transformers with experts_implementation "eager".
FOLDER needs twice the float32 weights; they are removed at the end.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

from kvconv.runtime import Bundle, Session

PROMPT_TOKENS = 256
HIDDEN_SIZE = 512


def save_random_mixtral(folder: Path, arguments: argparse.Namespace) -> int:
    """Save a random checkpoint; returns the bytes of its weights."""
    config = MixtralConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=arguments.experts,
        num_experts_per_tok=arguments.experts_per_token,
        vocab_size=4096,
        max_position_embeddings=4096,
        sliding_window=None,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weight.nbytes for weight in model.parameters())


def transformers_steps(
    model: MixtralForCausalLM, implementation: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a prefill and a decode step after one."""
    prompt = torch.arange(PROMPT_TOKENS)[None] * 37 % 4096
    cache = DynamicCache(config=model.config)

    def prefill() -> None:
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            model(input_ids=prompt, cache=DynamicCache(config=model.config))

    def decode() -> None:
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            if not cache.get_seq_length():
                model(input_ids=prompt, cache=cache)
            model(input_ids=prompt[:, :1], cache=cache)

    return prefill, decode


def bundle_steps(session: Session) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a prefill and a decode step after one."""
    prompt = np.arange(PROMPT_TOKENS)[None] * 37 % 4096
    cache = session.new_cache(1, 1024)
    session.run(cache, prompt)

    def prefill() -> None:
        cache.rewind(0)
        session.run(cache, prompt)

    def decode() -> None:
        session.run(cache, prompt[:, :1])
        cache.rewind(PROMPT_TOKENS)

    return prefill, decode


def best_seconds(steps: list[Callable[[], object]], turns: int) -> list[float]:
    """Return the shortest time of each of several steps that take turns."""
    best = [float("inf")] * len(steps)
    for turn in range(turns + 1):
        for index, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if turn:  # the first is a warm-up
                best[index] = min(best[index], time.perf_counter() - start)
    return best


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=8, help="experts per layer [8]")
    parser.add_argument("--experts-per-token", type=int, default=2, help="routed to [2]")
    parser.add_argument("--layers", type=int, default=4, help="layers [4]")
    parser.add_argument("--intermediate-size", type=int, default=1792, help="of an expert [1792]")
    parser.add_argument("--threads", type=int, default=2, help="threads [2]")
    arguments = parser.parse_args()

    checkpoint = arguments.folder / "random-mixtral"
    bundle = arguments.folder / "random-mixtral-bundle"
    try:
        weight_bytes = save_random_mixtral(checkpoint, arguments)
        kvconv = [sys.executable, "-c", "from kvconv.cli import main; main()"]
        export = [*kvconv, "export", str(checkpoint), "-o", str(bundle), "--json"]
        exported = subprocess.run(export, check=True, stdout=subprocess.PIPE, text=True)
        report = json.loads(exported.stdout)
        print({stage: round(seconds, 1) for stage, seconds in report["seconds"].items()})
        worst = max(check["max_abs"] for check in report["verification"]["checks"])
        ratio = report["peak_memory_mb"] * 1e6 / weight_bytes
        print(f"weights {weight_bytes / 1e6:.0f} MB, max abs {worst:.1e}")
        print(f"peak memory {report['peak_memory_mb']:.0f} MB, {ratio:.2f}x the weights")

        nodes = len(onnx.load(bundle / "model.onnx", load_external_data=False).graph.node)
        start = time.perf_counter()
        session = Session(Bundle.open(bundle), threads=arguments.threads)
        print(f"{nodes} nodes, loaded in {time.perf_counter() - start:.1f} s")

        torch.set_num_threads(arguments.threads)
        model = MixtralForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        rivals = {
            "transformers eager": transformers_steps(model, "eager"),
            "transformers grouped_mm": transformers_steps(model, "grouped_mm"),
            "kvconv": bundle_steps(session),
        }
        for phase, tokens, turns in (("prefill", PROMPT_TOKENS, 5), ("decode", 1, 40)):
            steps = [pair[phase == "decode"] for pair in rivals.values()]
            seconds = best_seconds(steps, turns)
            for name, best in zip(rivals, seconds, strict=True):
                print(f"{phase:8} {name:24} {tokens / best:8.1f} tok/s  {seconds[0] / best:.2f}x")
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.rmtree(bundle, ignore_errors=True)


if __name__ == "__main__":
    main()
