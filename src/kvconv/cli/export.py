"""`kvconv export`: convert a decoder into a bundle."""

import dataclasses
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvconv.cli.common import (
    Command,
    Dtype,
    cache_dir_option,
    needs_extra,
    print_json,
    print_status,
    revision_option,
    trust_remote_code_option,
)
from kvconv.cli.stages import StageLines
from kvconv.cli.verify import describe
from kvconv.flavour import FLAVOURS
from kvconv.manifest import CacheDtype
from kvconv.names import CHAT_TEMPLATE_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from kvconv.converter import ExportReport


@click.command(cls=Command, short_help="Convert a Hugging Face decoder into a bundle.")
@click.argument("model")
@click.option(
    "-o", "--output", required=True, metavar="BUNDLE",
    type=click.Path(path_type=Path), help="Folder to write; it appears only when complete.",
)  # fmt: skip
@click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="What the bundle is for. cuda: with compiled kernels, which takes no GPU here; it runs on "
    "the CPU too.",
)  # fmt: skip
@click.option(
    "--gpu", "gpus", metavar="SM,SM,...",
    help="GPUs of --provider cuda, such as sm_80,sm_90. [default: all that kvconv knows]",
)  # fmt: skip
@click.option(
    "--dtype", type=Dtype(["float32", "float16"]),
    help="Type of weights and activations. [default: float32; float16 for cuda]",
)  # fmt: skip
@click.option(
    "--weights", type=click.Choice(["int8", "int4"]),
    help="Type of linear weights. [default: that of --dtype]",
)  # fmt: skip
@click.option(
    "--block-size", type=click.Choice(["16", "32", "64", "128", "256"]),
    help="Quantised weights that share a scale. [default: 32; 16 for int4 weights that lose "
    "more than 1%, and for int8 at accuracy level 4]",
)  # fmt: skip
@click.option(
    "--pure", is_flag=True,
    help="4 bits for all int4 weights. Otherwise those in front of attention and the LM head have "
    "8 where 4 lose more than 1%.",
)  # fmt: skip
@click.option(
    "--symmetric/--asymmetric", default=None,
    help="int4 weights without or with zero points. [default: with]",
)  # fmt: skip
@click.option(
    "--accuracy-level", type=click.Choice(["1", "2", "4"]),
    help="Products with quantised weights. 4: activations become 8-bit integers. 2: 16-bit ones. "
    "1: they stay float, which is slower. "
    f"[default: {FLAVOURS['flash'].accuracy_levels[0]}; "
    f"{FLAVOURS['standard'].accuracy_levels[0]} for standard and gqa, which have no 2]",
)  # fmt: skip
@click.option(
    "--attention", type=click.Choice(list(FLAVOURS)), default="flash", show_default=True,
    help="flash: kvconv's own op, in-place cache. standard: ONNX operators only. gqa: ONNX "
    "Runtime's GroupQueryAttention, in-place cache, no padding.",
)  # fmt: skip
@click.option(
    "--kv-cache-dtype", type=click.Choice(list(get_args(CacheDtype))),
    help="Type of keys and values in the cache; others than that of --dtype need --attention "
    "flash. [default: that of --dtype]",
)  # fmt: skip
@click.option(
    "--no-ring", is_flag=True,
    help="Let flash layers with a window keep all tokens. Otherwise they keep those of the window, "
    "which takes less memory, and which optimum and onnxruntime-genai cannot drive.",
)  # fmt: skip
@click.option(
    "--max-sequence-length", type=click.IntRange(min=2), metavar="TOKENS",
    help="Most tokens, prompt and new, that a cache may hold. [default: the model's]",
)  # fmt: skip
@click.option(
    "--opset", type=click.IntRange(18, 23), default=23, show_default=True,
    help="ONNX operator set version; lower ones serve older runtimes.",
)  # fmt: skip
@revision_option
@cache_dir_option
@trust_remote_code_option
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is there already.")
@click.option("--no-verify", is_flag=True, help="Skip the comparison with PyTorch.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON line.")
def command(
    model: str,
    output: Path,
    no_verify: bool,
    as_json: bool,
    block_size: str | None,
    accuracy_level: str | None,
    no_ring: bool,
    gpus: str | None,
    **options: Any,
) -> None:
    """Convert MODEL into a bundle that `kvconv run` and ONNX Runtime can use.

    MODEL is a hub id, a folder made by save_pretrained, a .gguf file, or OWNER/NAME/FILE.gguf for
    one on the hub. A private or gated hub model needs HF_TOKEN or `hf auth login`; without a
    network, or with HF_HUB_OFFLINE=1, what is in Hugging Face's cache serves.

    \b
    kvconv export HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2
    kvconv export models/SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2 --weights int4
    kvconv export HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2-cuda --provider cuda
    """  # noqa: D301 - click wants the control character that \b stands for
    for_cuda = options["provider"] == "cuda"
    if gpus is not None and not for_cuda:
        raise click.UsageError("--gpu is for --provider cuda.")
    with needs_extra("cpu,export"):
        from kvconv.converter import ExportOptions, export
        from kvconv.converter.kernel_builder import TritonKernels
        from kvconv.verify import Verifier

        options |= {"block_size": block_size and int(block_size), "ring": not no_ring}
        options["dtype"] = options["dtype"] or ("float16" if for_cuda else "float32")
        options |= {"accuracy_level": accuracy_level and int(accuracy_level)}
        verifier = None if no_verify else Verifier()
        kernels = TritonKernels(tuple(gpus.split(",")) if gpus else ()) if for_cuda else None
        started = time.perf_counter()
        with StageLines() as stages:
            report = export(
                model,
                output,
                ExportOptions(**options),
                verifier,
                kernels=kernels,
                progress=stages,
            )
        seconds = time.perf_counter() - started
    if as_json:
        print_json(_as_json(report))
    else:
        _show(report, seconds)


def _show(report: "ExportReport", seconds: float) -> None:
    rewrites = ", ".join(f"{name} {count}" for name, count in report.rewrites.items() if count)
    print_status(f"rewrites       {rewrites}")
    if report.weights is not None:
        stored = ", ".join(
            f"{size / 1e6:.1f} MB in {form}" for form, size in report.weights.stored_bytes.items()
        )
        print_status(f"weights        {report.weights.float_bytes / 1e6:.1f} MB became {stored}")
        for reason, size in report.weights.left_bytes.items():
            print_status(f"left float     {size / 1e6:.2f} MB, {reason}")
    for refusal in report.refusals:
        print_status(f"left alone     {refusal}")
    for line in describe(report.verification):
        print_status(line)
    memory = (
        "" if report.peak_memory_mb is None else f", peak memory {report.peak_memory_mb:.0f} MB"
    )
    print_status(
        f"bundle         {report.path}, {report.size_bytes / 1e6:.0f} MB, {seconds:.1f} s{memory}"
    )
    if (report.path / TOKENIZER_FILE).exists():
        path = shlex.quote(str(report.path))
        chat = " --chat-template" if (report.path / CHAT_TEMPLATE_FILE).exists() else ""
        cuda = " --provider cuda" if report.provider == "cuda" else ""
        print_status(f'\nNext: kvconv run {path} "What is the capital of France?"{chat}{cuda}')
    else:
        print_status(
            "\nThe model has no tokenizer, so `kvconv run` cannot use it; from Python, "
            "kvconv.runtime.Session takes token ids."
        )


def _as_json(report: "ExportReport") -> dict[str, Any]:
    return dataclasses.asdict(report) | {
        "path": str(report.path),
        "seconds": {stage: round(seconds, 3) for stage, seconds in report.seconds.items()},
    }
