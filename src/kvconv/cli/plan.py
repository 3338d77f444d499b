"""`kvconv plan`: what a model or a bundle takes of memory, and what fits, before anything runs."""

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvconv import memory
from kvconv.cli.common import (
    Command,
    Dtype,
    cache_dir_option,
    needs_extra,
    prefill_chunk_option,
    print_json,
    revision_option,
    trust_remote_code_option,
)
from kvconv.cli.plan_advice import Subject, advice
from kvconv.errors import CacheFullError
from kvconv.manifest import ActivationDtype, CacheDtype, read_manifest
from kvconv.names import MANIFEST_FILE
from kvconv.plan import bundle_sizes, check_chunk, largest, plan

if TYPE_CHECKING:
    from kvconv.plan import Plan

DEFAULT_CONTEXT_TOKENS = 4096
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)b?", re.IGNORECASE)


class MemorySize(click.ParamType[int]):
    """A number of bytes such as 16GB, 512 MB or 24GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the bytes, or refuse what is no size."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(value.strip())
        if found is None or (found[3] and not found[2]):
            self.fail(f"{value!r} is no size. Give one such as 16GB, 800MB or 24GiB.", param, ctx)
        units = _BINARY_UNITS if found[3] else _UNITS
        size = int(float(found[1]) * units[found[2].lower()])
        if size < 1:
            self.fail(f"{value!r} is no memory at all. Give a size such as 16GB.", param, ctx)
        return size


@click.command(cls=Command)
@click.argument("model", metavar="MODEL_OR_BUNDLE")
@click.option(
    "--context", type=click.IntRange(min=1), metavar="TOKENS",
    help="Tokens per row, prompt and new. "
    f"[default: {DEFAULT_CONTEXT_TOKENS}, or what the model holds if that is less]",
)  # fmt: skip
@click.option(
    "--batch", "batch_size", type=click.IntRange(min=1), default=1, show_default=True,
    metavar="ROWS", help="Sequences held at once.",
)  # fmt: skip
@click.option(
    "--dtype", type=Dtype(["float32", "float16"]),
    help="Type of a model's weights and activations. [default: float32]",
)  # fmt: skip
@click.option(
    "--weights", type=click.Choice(["int8", "int4"]),
    help="Type of a model's linear weights. [default: that of --dtype]",
)  # fmt: skip
@click.option(
    "--kv-cache-dtype", type=click.Choice(list(get_args(CacheDtype))),
    help="Type of a model's keys and values. [default: that of --dtype]",
)  # fmt: skip
@click.option(
    "--no-ring", is_flag=True, help="Plan a model as kvconv export --no-ring would write it."
)
@click.option(
    "--memory", "memory_bytes", type=MemorySize(),
    help="Memory to fit into, such as 16GB or 24GiB. [default: what is free here]",
)  # fmt: skip
@prefill_chunk_option
@revision_option
@cache_dir_option
@trust_remote_code_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def command(
    model: str,
    context: int | None,
    batch_size: int,
    memory_bytes: int | None,
    prefill_chunk: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Count the memory that a model or a bundle takes; no weights are fetched or read.

    Of a hub model only config.json is fetched, of a .gguf file the header is read. Keys and values
    are exact to the byte, as are float weights; workspace and program are estimates.

    \b
    kvconv plan HuggingFaceTB/SmolLM2-135M-Instruct --context 8192 --batch 4
    kvconv plan smollm2 --memory 2GB
    """  # noqa: D301 - click wants the control character that \b stands for
    subject = _subject(model, options)
    limit = subject.max_sequence_length
    context = context or min(DEFAULT_CONTEXT_TOKENS, limit or DEFAULT_CONTEXT_TOKENS)
    if limit is not None and context > limit:
        raise CacheFullError(
            f"--context is {context}; {subject.name} holds at most {limit} tokens. Choose at most "
            f"{limit}.",
            needed=context,
            capacity=limit,
        )
    check_chunk(subject.sizes.cache_layers, prefill_chunk)
    report = _report(
        subject,
        plan(subject.sizes, batch_size=batch_size, context=context, prefill_chunk=prefill_chunk),
        memory_bytes or memory.free_memory_bytes(),
        is_free_memory=memory_bytes is None,
        prefill_chunk=prefill_chunk,
    )
    if as_json:
        print_json(report)
    else:
        _show(report)


def _subject(model: str, options: dict[str, Any]) -> Subject:
    """Read what is to be planned.

    Raises:
        click.UsageError: It is a bundle, and options say how it is exported.
    """
    path = Path(os.path.expanduser(model))  # the ~ of an unknown user stays
    if (path / MANIFEST_FILE).is_file():
        # --cache-dir may come from the environment.
        given = [name for name, value in options.items() if value and name != "cache_dir"]
        manifest = read_manifest(path)
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
            raise click.UsageError(
                f"{model} is a bundle of {manifest.dtype} activations, {manifest.weights_dtype} "
                f"weights and a {manifest.cache_layers[0].dtype} cache, and {flags} says how a "
                f"model is exported. Leave it out, or give the model."
            )
        return Subject(
            name=manifest.source.model,
            architecture=manifest.architecture,
            max_sequence_length=manifest.max_sequence_length,
            weights_dtype=manifest.weights_dtype,
            cache_dtype=manifest.cache_layers[0].dtype,
            dtype=manifest.dtype,
            sizes=bundle_sizes(manifest),
        )
    with needs_extra("cpu,export"):
        from kvconv.converter.model_sizes import read_sizes
    dtype: ActivationDtype = options.pop("dtype") or "float32"
    cache_dtype: CacheDtype = options.pop("kv_cache_dtype") or dtype
    ring = not options.pop("no_ring")
    planned = read_sizes(model, dtype=dtype, cache_dtype=cache_dtype, ring=ring, **options)
    return Subject(
        name=planned.name,
        architecture=planned.architecture,
        max_sequence_length=planned.max_sequence_length,
        weights_dtype=options["weights"] or dtype,
        cache_dtype=cache_dtype,
        dtype=dtype,
        sizes=planned.sizes,
    )


def _report(
    subject: Subject,
    planned: "Plan",
    memory_bytes: int | None,
    *,
    is_free_memory: bool,
    prefill_chunk: int | None,
) -> dict[str, Any]:
    """Return everything that is printed, as one JSON-able dict."""

    def fits(batch_size: int, context: int) -> bool:
        candidate = plan(
            subject.sizes, batch_size=batch_size, context=context, prefill_chunk=prefill_chunk
        )
        return memory_bytes is None or candidate.total <= memory_bytes

    batch_size, context = planned.batch_size, planned.context
    is_known = memory_bytes is not None
    most_tokens = subject.max_sequence_length
    return {
        "model": subject.name,
        "architecture": subject.architecture,
        "dtype": subject.dtype,
        "weights_dtype": subject.weights_dtype,
        "kv_cache_dtype": subject.cache_dtype,
        "max_sequence_length": most_tokens,
        "num_layers": len(subject.sizes.cache_layers),
        "num_attention_heads": subject.sizes.run and subject.sizes.run.num_attention_heads,
        "num_key_value_heads": subject.sizes.cache_layers[0].num_key_value_heads,
        **dataclasses.asdict(planned),
        "cache_bytes": planned.cache_bytes,
        "total": planned.total,
        "memory": memory_bytes,
        "is_free_memory": is_free_memory,
        "fits": planned.total <= memory_bytes if memory_bytes is not None else None,
        "largest_batch": largest(lambda n: fits(n, context)) if is_known else None,
        "largest_context": largest(lambda n: fits(batch_size, n), most_tokens)
        if is_known
        else None,
        "advice": advice(subject, planned, memory_bytes),
    }


def _show(report: dict[str, Any]) -> None:
    heads = report["num_attention_heads"]
    head_text = f"{heads} query and " if heads else ""
    click.echo(
        f"model         {report['model']} ({report['architecture']}, "
        f"{report['num_layers']} layers, {head_text}{report['num_key_value_heads']} KV heads)"
    )
    click.echo(
        f"plan          {report['batch_size']} x {report['context']} tokens, {report['dtype']} "
        f"activations, {report['weights_dtype']} weights, {report['kv_cache_dtype']} cache"
    )
    _row("weights", report["weights"])
    if report["packed"]:
        _row("packed", report["packed"], "float weights as ONNX Runtime multiplies with them")
    for part in report["cache"]:
        window = part["window_size"]
        kind = "that see all tokens" if window is None else f"with a window of {window}"
        _row(
            "KV cache",
            part["data_bytes"],
            f"{part['num_layers']} layers {kind}, {part['slots']} slots a row",
        )
    if scales := sum(part["scale_bytes"] for part in report["cache"]):
        _row("scales", scales, "of the KV cache")
    if report["growth"]:
        _row("growth", report["growth"], "presents beside pasts: the cache grows")
    _row("logits", report["logits"])
    unknown = "not known: export again" if heads is None else "estimate"
    _row("workspace", report["workspace"], unknown)
    _row("program", report["program"], "estimate")
    _row("total", report["total"])
    if report["memory"] is not None:
        what = "free here" if report["is_free_memory"] else "given"
        verdict = "it fits" if report["fits"] else "it does not fit"
        _row("memory", report["memory"], f"{what}: {verdict}")
        limited = report["largest_context"] == report["max_sequence_length"]
        _largest("largest batch", report["largest_batch"], f"rows of {report['context']} tokens")
        _largest(
            "largest length",
            report["largest_context"],
            f"tokens in a batch of {report['batch_size']}"
            f"{', all that the model holds' if limited else ''}",
        )
    else:
        click.echo("memory        this system does not say what is free; see --memory")
    for sentence in report["advice"]:
        click.echo(f"advice        {sentence}")


def _largest(name: str, number: int, comment: str) -> None:
    if number:
        _row(name, number, comment)
    else:
        click.echo(f"{name:14s}{'none':>17s}  {comment}")


def _row(name: str, size: int, comment: str = "") -> None:
    click.echo(f"{name:14s}{size:17,d}  {comment}".rstrip())
