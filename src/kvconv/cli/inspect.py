"""`kvconv inspect`: what a bundle's manifest and graph say."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import click

from kvconv.cli.common import Command, print_json
from kvconv.cli.verify import describe
from kvconv.errors import BundleError
from kvconv.manifest import Manifest, check_files, read_manifest
from kvconv.names import MANIFEST_FILE, MODEL_FILE, OP_DOMAIN
from kvconv.plan import kv_cache_bytes


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Hash every file, the weights too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def command(bundle: Path, check: bool, as_json: bool) -> None:
    """Show what a bundle holds: model, layers, operators, cache bytes, files, verification."""
    manifest = read_manifest(bundle)
    check_files(bundle, manifest, hash_all=check)
    report = inspect(bundle, manifest) | {"checked": check}
    if as_json:
        print_json(report)
        return
    source = manifest.source
    click.echo(f"model         {source.model} ({manifest.architecture}, {source.kind})")
    click.echo(f"license       {source.license or 'not stated'}")
    op_version = f", {OP_DOMAIN} {manifest.op_version}" if manifest.op_version else ""
    click.echo(f"attention     {manifest.attention}, opset {manifest.opset}{op_version}")
    click.echo(f"dtype         activations {manifest.dtype}, weights {manifest.weights_dtype}")
    if manifest.quantization is not None:
        quantization = manifest.quantization
        for form, size in quantization.stored_bytes.items():
            click.echo(f"              {size / 1e6:.1f} MB in {form}")
        click.echo(
            f"              scales by {quantization.method}, accuracy level "
            f"{quantization.accuracy_level}"
        )
    click.echo(f"max sequence  {manifest.max_sequence_length} tokens")
    whole = [layer for layer in manifest.cache_layers if layer.capacity is None]
    later = kv_cache_bytes(whole, batch_size=1, max_sequence_length=1)
    rings = "" if len(whole) == len(manifest.cache_layers) else f", {later:,} once rings are full"
    click.echo(
        f"KV cache      {report['cache_bytes_per_token']:,} bytes per token and sequence{rings}"
    )
    for line in report["layers_summary"]:
        click.echo(f"              {line}")
    if (kernels := manifest.kernels) is not None:
        gpus = ", ".join(kernels.gpus)
        click.echo(f"CUDA kernels  {kernels.num_kernels}, compiled for {gpus}; others run PTX")
    if report["ops"] is None:
        click.echo('operators     not counted: that needs pip install "kvconv[export]"')
    else:
        click.echo("operators")
        for name, count in report["ops"].items():
            click.echo(f"  {count:6d}  {name}")
    for refusal in manifest.refusals:
        click.echo(f"left alone    {refusal}")
    click.echo("files")
    for name, entry in manifest.files.items():
        click.echo(f"  {entry.size:13,d}  {name}")
    click.echo(
        "every file matches its sha256"
        if check
        else "all sizes match, and the sha256 of files under 64 MB; --check hashes the others too"
    )
    click.echo("verification  " + "\n".join(describe(manifest.verification)))


def inspect(bundle: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the manifest's facts and the graph's operator counts as one JSON-able dict.

    Raises:
        BundleError: The graph cannot be read, or keeps weights in a file that the manifest does not
            list.
    """
    document = dataclasses.asdict(manifest)
    layers = document.pop("cache_layers")
    return {
        **document,
        "layers": layers,
        "layers_summary": _summary(manifest),
        "ops": _read_graph(bundle, manifest),
        "cache_bytes_per_token": kv_cache_bytes(
            manifest.cache_layers, batch_size=1, max_sequence_length=1
        ),
    }


def _read_graph(bundle: Path, manifest: Manifest) -> dict[str, int] | None:
    """Count the graph's nodes by `Type` or `domain::Type`, most frequent first.

    Returns:
        None where the onnx package is not installed: a machine that only runs bundles.
    """
    try:
        import onnx
    except ModuleNotFoundError:
        return None
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        graph = onnx.load(str(bundle / MODEL_FILE), load_external_data=False).graph
    except DecodeError as error:
        raise BundleError(
            f"{MODEL_FILE} in {bundle} is no ONNX file ({error}). Export the model again.",
            file=MODEL_FILE,
        ) from error
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value not in manifest.files:
                raise BundleError(
                    f"{MODEL_FILE} keeps {tensor.name} in {entry.value}, which {MANIFEST_FILE} "
                    f"does not list, so nobody vouches for it. Export the model again.",
                    file=entry.value,
                )
    names = (
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph.node
    )
    return dict(Counter(names).most_common())


def _summary(manifest: Manifest) -> list[str]:
    """Return one line per kind of cache layer."""
    kinds = Counter(manifest.cache_layers)
    lines = []
    for layer, count in kinds.items():
        window = f"window {layer.window_size}" if layer.window_size else "no window"
        if layer.capacity is not None:
            window += f", a ring of {layer.capacity} slots"
        lines.append(
            f"{count} layers: {layer.num_key_value_heads} KV heads, key width "
            f"{layer.key_head_dim}, value width {layer.value_head_dim}, {layer.dtype}, {window}"
        )
    return lines
