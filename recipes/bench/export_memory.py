"""Export a Llama of 1.24 billion random parameters and print its peak memory and stage times.

Usage: python recipes/bench/export_memory.py FOLDER

Needs about 8 GB of disk in FOLDER (the checkpoint in bfloat16, and the bundle in float32) and 12 GB
of memory; both are removed at the end. The shape is Llama 3.2 1B's, the weights are noise.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path


def save_random_llama(folder: Path) -> int:
    """Save a random bfloat16 checkpoint; returns the bytes of its weights in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return 4 * sum(weight.numel() for weight in model.parameters())


def main() -> None:
    """Run the measurement; each step in a process of its own, so that peaks do not mix."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    checkpoint, bundle = arguments.folder / "random-llama", arguments.folder / "random-llama-bundle"
    if arguments.save_only:
        print(save_random_llama(checkpoint))
        return

    try:
        command = [sys.executable, __file__, str(arguments.folder), "--save-only"]
        saved = subprocess.run(command, check=True, capture_output=True, text=True)
        weight_bytes = int(saved.stdout.split()[-1])
        kvconv = [sys.executable, "-c", "from kvconv.cli import main; main()"]
        export = [*kvconv, "export", str(checkpoint), "-o", str(bundle), "--json"]
        exported = subprocess.run(export, check=True, stdout=subprocess.PIPE, text=True)
        report = json.loads(exported.stdout)
        print({stage: round(seconds, 1) for stage, seconds in report["seconds"].items()})
        worst = max(check["max_abs"] for check in report["verification"]["checks"])
        ratio = report["peak_memory_mb"] * 1e6 / weight_bytes
        print(f"{sum(report['seconds'].values()):.0f} s, max abs {worst:.1e}")
        print(f"peak memory {report['peak_memory_mb']:.0f} MB, {ratio:.2f}x the float32 weights")
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.rmtree(bundle, ignore_errors=True)


if __name__ == "__main__":
    main()
