"""`kvconv verify`: compare a bundle's logits with PyTorch's."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from kvconv.cli.common import (
    Command,
    cache_dir_option,
    needs_extra,
    print_json,
    print_status,
    provider_option,
    trust_remote_code_option,
)
from kvconv.manifest import (
    FLOAT_WEIGHTS,
    CheckResult,
    Verification,
    check_files,
    read_manifest,
)


@click.command(cls=Command, context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--model", default=None, metavar="MODEL",
    help="The PyTorch model to compare with: hub id, folder or .gguf file. "
    "Default: the hub model that the bundle was exported from; others must be given.",
)  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(min=4), help="Length of the test prompt.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads for ONNX Runtime.")
@provider_option
@cache_dir_option
@trust_remote_code_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def command(
    bundle: Path,
    model: str | None,
    prompt_tokens: int | None,
    threads: int | None,
    provider: Any,
    cache_dir: Path | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Compare a bundle's logits with PyTorch's, and record the result in its manifest.

    Needs the model that the bundle was exported from. Runs whole and chunked prefill, decode, a
    left-padded batch, and rewind, as far as the bundle's attention takes them. Exit code 1 when a
    check exceeds the tolerance of the bundle's dtype.
    """
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)  # before PyTorch's model is loaded, which takes long
    source = manifest.source
    if model is None and source.kind != "hub":
        # The manifest holds no path, and the same name elsewhere may be another model.
        what = "GGUF file" if source.kind == "gguf" else "folder"
        raise click.UsageError(
            f"The bundle was exported from the {what} {source.model}. Say where it is with --model."
        )
    with needs_extra("cpu,export"):
        from kvconv.converter.load import load_model
        from kvconv.verify import Verifier, record, require_same_model

        verifier = Verifier(prompt_tokens=prompt_tokens, threads=threads, provider=provider)
        print_status(f"loading {model or source.model}")
        loaded = load_model(
            model or source.model,
            revision=None if model else source.revision,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            dtype=manifest.dtype,
        )
        require_same_model(manifest, loaded.model)
        print_status("running PyTorch")
        reference = verifier.reference(
            loaded.model, loaded.tokenizer, max_sequence_length=manifest.max_sequence_length
        )
        del loaded
        print_status("running the bundle")
        result = verifier.compare(bundle, reference)
    if as_json:
        print_json({"bundle": str(bundle), **dataclasses.asdict(result)})
    else:
        click.echo("\n".join(describe(result)))
    try:
        record(bundle, manifest, result)
    except OSError as error:
        print_status(f"not recorded in the manifest: {error.strerror or error}")
    result.require_passed()


def describe(result: Verification) -> list[str]:
    """Return a verification as lines of text, one per check."""
    if result.status == "skipped":
        return ["not verified"]
    quantized = any(check.name == FLOAT_WEIGHTS for check in result.checks)
    what = "the same weights'" if quantized else "PyTorch's"
    lines = [f"{result.status} (float logits within {result.tolerance:.3g} of {what})"]
    lines += [_describe_check(check) for check in result.checks]
    return lines + [f"not checked: {sentence}" for sentence in result.not_checked]


def _describe_check(check: CheckResult) -> str:
    mark = "ok  " if check.passed else "FAIL"
    return (
        f"  {mark} {check.name:<22} max abs {check.max_abs:.2e}  mean {check.mean_abs:.2e}  "
        f"KL {check.kl:.1e}  top-1 {100 * check.top1:.1f}%  ({check.positions} positions)"
    )
