"""Print docs/models.md: tiny decoders of many kinds, exported in every flavour and verified.

Usage: python recipes/docs/models.py [NAME ...] > docs/models.md

`make models-table` does that; it takes about ten minutes.

The decoders are those of tests/tiny_decoders.py, whose random weights make each feature matter.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from kvconv.flavour import FLAVOURS
from kvconv.manifest import AttentionFlavour

_TESTS = Path(__file__).resolve().parents[2] / "tests"
_FEATURES = {
    "llama": "the plain case",
    "llama+llama3": "Llama 3's rope scaling",
    "mistral": "sliding window",
    "qwen2": "biases",
    "qwen3": "query and key norms, head_dim of its own",
    "gemma2": "two softcaps, alternating windows",
    "gemma3_text": "alternating windows, two rope thetas",
    "phi3": "packed projections, longrope",
    "gpt2": "learned positions, Conv1D",
    "gpt_neox": "partial rotary, parallel residual",
    "gptj": "interleaved rotary",
    "bloom": "ALiBi",
    "falcon": "multi-query attention",
    "falcon+alibi": "rounded ALiBi, grouped heads",
    "gpt_neo": "windows, no scale",
    "mpt": "ALiBi",
    "mixtral": "mixture of experts",
    "gpt_oss": "mixture of experts, sinks, alternating windows, YaRN",
    "deepseek_v3": "latent attention of unequal widths, mixture of experts",
    "llama4_text": "chunked attention, mixture of experts",
    "smollm3": "layers without positions",
    "cohere": "interleaved rotary, parallel residual",
}
_HEAD = """\
# Kinds of decoders

Written by `make models-table` on {threads} threads. Each row is a random decoder of two layers
whose weights make its features matter (`tests/tiny_decoders.py`), exported in float32. A cell holds
the largest difference between any logit of the bundle and PyTorch's, over whole prefill, 16 decode
steps, rewinding, chunked prefill and a left-padded batch (which `gqa` does not take), and the
seconds that the export took, verification included. The spread of the logits is about 1. Other
kinds go the same way: an export that is not exact is refused by its verification.

| model type | what is special | {flavours} |
|---|---|{rule}|
"""


class Cell(NamedTuple):
    """One export: its largest error and seconds as text, or the refusal."""

    text: str
    refusal: str | None = None


def export_cell(name: str, flavour: AttentionFlavour, folder: Path) -> Cell:
    """Export one tiny decoder and verify it."""
    from kvconv.converter import ExportOptions, export
    from kvconv.errors import KvconvError
    from kvconv.verify import Verifier

    options = ExportOptions(attention=flavour)
    started = time.perf_counter()
    try:
        report = export(
            str(folder / name), folder / f"{name}-{flavour}", options, Verifier(prompt_tokens=48)
        )
    except KvconvError as error:
        return Cell("refused", str(error))
    seconds = time.perf_counter() - started
    worst = max(check.max_abs for check in report.verification.checks)
    return Cell(f"{worst:.1e}, {seconds:.1f} s")


def models_page(wanted: list[str]) -> str:
    """Return docs/models.md as text."""
    from tiny_decoders import CONFIGS, save_tiny

    head = {
        "threads": len(os.sched_getaffinity(0)),
        "flavours": " | ".join(FLAVOURS),
        "rule": "|".join(["---"] * len(FLAVOURS)),
    }
    lines, notes = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in wanted or CONFIGS:
            save_tiny(folder / name, name)
            cells = []
            for flavour in FLAVOURS:
                cell = export_cell(name, flavour, folder)
                print(name, flavour, *filter(None, cell), file=sys.stderr)
                if cell.refusal is None:
                    cells.append(cell.text)
                else:
                    notes.append(f"{name}, {flavour}: {cell.refusal}")
                    cells.append(f"{cell.text} ({len(notes)})")
            lines.append(f"| {name} | {_FEATURES.get(name, '')} | {' | '.join(cells)} |")
    refusals = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    page = _HEAD.format(**head) + "\n".join(lines) + "\n"
    return page + (f"\nRefusals, as `kvconv export` prints them:\n\n{refusals}\n" if notes else "")


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="rows; all by default")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(_TESTS))
    print(models_page(arguments.names), end="")


if __name__ == "__main__":
    main()
