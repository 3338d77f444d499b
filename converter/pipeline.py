"""The story of an export: load, trace, write weights, rewrite, bundle, verify.

The PyTorch model is gone before ONNX Runtime opens the result, and weights stream from the one to
the other through the file, so memory holds about one copy of them at any time. Heavy modules are
imported where a stage needs them: a refusal of the output path must not wait for PyTorch.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconv import names
from kvconv.converter import bundle
from kvconv.converter.model_name import parse_model_name
from kvconv.converter.options import (
    ExportOptions,
    ExportReport,
    Progress,
    Verifier,
    WeightsReport,
)
from kvconv.errors import ExportError
from kvconv.manifest import (
    CacheDtype,
    CacheLayer,
    Manifest,
    Quantization,
    RunSizes,
    Source,
)
from kvconv.memory import peak_rss_mb, peak_rss_of_children_mb, release_memory

_MOST_QUANTIZED_BYTES = 1.5
"""Of a weight: 8 bits, and its share of a block's scales, which an embedding may have twice."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvconv.converter.decoder_spec import DecoderSpec
    from kvconv.converter.rewrite import RewriteReport


def export(
    model: str,
    output: str | Path,
    options: ExportOptions | None = None,
    verifier: Verifier | None = None,
    *,
    progress: Progress | None = None,
) -> ExportReport:
    """Convert a decoder into a bundle.

    Args:
        model: Hub id, local folder, or .gguf file.
        output: The bundle to write; it appears only when it is complete.
        options: Everything else; None is the defaults.
        verifier: Compares the result with PyTorch; None skips that, and the manifest says so.
        progress: Hears the name of each stage as it begins.

    Raises:
        OutputExistsError: The output is there already, or cannot be written.
        ModelNotFoundError: There is no such model, or its files are damaged.
        UnsupportedModelError: The model is no decoder, or has a feature that kvconv lacks.
        ExportError: Tracing or writing failed.
        RewriteError: An attention could not be rewritten.
        VerificationError: The result differs from PyTorch by more than the dtype's tolerance.
    """
    options = options or ExportOptions()
    stages = _Stages(progress)
    with bundle.new_bundle(Path(output), overwrite=options.overwrite) as folder:
        traced = _trace(model, options, verifier, folder, stages)
        release_memory()
        with stages("rewrite"):
            report = _rewrite(folder, options, traced.max_sequence_length)
            report = dataclasses.replace(report, counts=traced.counts | report.counts)
        with stages("finish"):
            manifest = _finish(folder, options, traced, report)
        verification = manifest.verification
        if verifier is not None:
            with stages("verify"):
                verification = verifier.compare(folder, traced.reference)
            verification.require_passed()
            dataclasses.replace(manifest, verification=verification).write(folder)
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return ExportReport(
        path=Path(output),
        rewrites=dict(report.counts),
        refusals=manifest.refusals,
        seconds=stages.seconds,
        verification=verification,
        peak_memory_mb=max(
            (peak for peak in (peak_rss_mb(), peak_rss_of_children_mb()) if peak), default=None
        ),
        size_bytes=size_bytes,
        weights=traced.weights,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Traced:
    """What outlives the PyTorch model."""

    spec: "DecoderSpec"
    source: Source
    max_sequence_length: int
    notices: tuple[str, ...]
    reference: object
    weights: WeightsReport | None
    counts: dict[str, int]
    run_sizes: RunSizes


class _Stages:
    """Times the stages and announces them."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self._progress is not None:
            self._progress(stage)
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


def _trace(
    model: str,
    options: ExportOptions,
    verifier: Verifier | None,
    folder: Path,
    stages: _Stages,
) -> _Traced:
    """Do all that needs PyTorch; its model dies with this function's frame."""
    revision = options.revision
    options.cache_dtype()  # both refuse what contradicts itself before anything is loaded
    options.quantization()
    if parse_model_name(model, revision).kind == "hub":
        with stages("start"):  # some seconds, which are no download
            from kvconv.converter.load import fetch
        with stages(names.DOWNLOAD_STAGE):
            revision = fetch(
                model,
                revision=revision,
                cache_dir=options.cache_dir,
                trust_remote_code=options.trust_remote_code,
            )
    with stages("load"):
        from kvconv.converter.decoder_spec import describe
        from kvconv.converter.interleaved import sort_columns
        from kvconv.converter.load import load_model
        from kvconv.converter.model_sizes import run_sizes
        from kvconv.converter.packed import pack
        from kvconv.converter.quiet import quiet
        from kvconv.converter.simplify import simplify
        from kvconv.converter.trace import trace
        from kvconv.converter.weights import lay_out, save

        loaded = load_model(
            model,
            revision=revision,
            cache_dir=options.cache_dir,
            trust_remote_code=options.trust_remote_code,
            dtype=options.dtype,
        )
        spec = describe(loaded.model)
        max_sequence_length, notices = _max_sequence_length(spec, options.max_sequence_length)
        parameters = {id(weight): weight for weight in loaded.model.parameters()}
        stored_bytes = sum(
            weight.numel() * (_MOST_QUANTIZED_BYTES if options.weights else weight.itemsize)
            for weight in parameters.values()
        )
        bundle.check_free_space(folder, math.ceil(stored_bytes))
        del parameters
        release_memory()  # what reading the checkpoint took
    reference = None
    if verifier is not None:
        with stages("reference"), quiet():
            reference = verifier.reference(
                loaded.model, loaded.tokenizer, max_sequence_length=max_sequence_length
            )
            release_memory()
    with stages("trace"):
        graph = trace(loaded.model, spec, opset=options.opset)
        lay_out(graph)
        counts = {"pack": 0 if "pack" in options.without else pack(graph)}
        simplify(graph)
        counts["sort_columns"] = 0 if "sort_columns" in options.without else sort_columns(graph)
        quantized = None
        if options.weights is not None:
            from kvconv.converter.quantization import quantize

            quantized, weights = quantize(graph, options)
            if verifier is not None:
                for weight in weights:
                    weight.round_when_written()
        release_memory()
    with stages("write weights"):
        save(graph, folder)
        _save_configs(loaded.model, loaded.tokenizer, folder, spec.vocab_size)
    if quantized is not None and verifier is not None:
        with stages("rounded reference"), quiet():
            release_memory()
            reference = verifier.reference(
                loaded.model,
                loaded.tokenizer,
                max_sequence_length=max_sequence_length,
                float_weights=reference,
            )
            release_memory()
    return _Traced(
        spec,
        loaded.source,
        max_sequence_length,
        notices,
        reference,
        quantized,
        counts,
        run_sizes(loaded.model, dtype=options.dtype, weights=options.weights),
    )


def _max_sequence_length(spec: "DecoderSpec", wanted: int | None) -> tuple[int, tuple[str, ...]]:
    """Return the most tokens a bundle may hold, and sentences about what that leaves out."""
    largest, fixed = spec.max_position_embeddings, spec.fixed_rope_length
    if wanted is None and largest is None:
        raise ExportError(
            f"The config of {spec.architecture} does not say how many tokens it was made for. "
            f"Say it with --max-sequence-length."
        )
    if wanted is not None and largest is not None and wanted > largest:
        raise ExportError(
            f"--max-sequence-length is {wanted}, but {spec.architecture} was made for {largest} "
            f"tokens. Choose at most {largest}."
        )
    length = largest if wanted is None else wanted
    assert length is not None
    if fixed is None or length <= fixed:
        return length, ()
    reason = (
        f"{spec.architecture} changes all its rotary frequencies beyond {fixed} tokens (longrope), "
        f"which keys in a cache cannot follow"
    )
    if wanted is not None:
        raise ExportError(
            f"--max-sequence-length is {wanted}, but {reason}. Choose at most {fixed}."
        )
    return fixed, (f"max_sequence_length: {fixed} of {largest} tokens: {reason}",)


def _save_configs(
    model: Any, tokenizer: "PreTrainedTokenizerBase | None", folder: Path, vocab_size: int
) -> None:
    from kvconv.converter.quiet import quiet
    from kvconv.converter.tokenizer import save_tokenizer

    with quiet():
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.generation_config is not None:
            # Not save_pretrained: that refuses settings which contradict each other, and published
            # models have such.
            model.generation_config.to_json_file(folder / "generation_config.json")
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder, vocab_size)


def _rewrite(folder: Path, options: ExportOptions, max_sequence_length: int) -> "RewriteReport":
    from kvconv.converter.rewrite import read_graph, rewrite, write_graph

    path = folder / names.MODEL_FILE
    graph = read_graph(path)
    report = rewrite(
        graph,
        attention=options.attention,
        opset=options.opset,
        max_sequence_length=max_sequence_length,
        cache_dtype=options.cache_dtype(),
        without=(options.without - {"pack", "sort_columns"})
        | ({"ring"} if not options.ring else set()),
    )
    write_graph(graph, path)
    return report


def _finish(
    folder: Path, options: ExportOptions, traced: _Traced, report: "RewriteReport"
) -> Manifest:
    """Add the op library and the manifest; the folder is a bundle afterwards."""
    import shutil

    import onnx

    from kvconv.converter.genai_config import write_genai_config
    from kvconv.custom_ops import library_path

    if options.attention == "flash":
        shutil.copyfile(library_path(), folder / names.LIBRARY_FILE)
    onnx.checker.check_model(folder / names.MODEL_FILE)
    model = onnx.load(folder / names.MODEL_FILE, load_external_data=False)
    graph, domains = model.graph, {entry.domain: entry.version for entry in model.opset_import}
    spec = traced.spec
    manifest = Manifest(
        source=traced.source,
        architecture=spec.architecture,
        model_type=spec.model_type,
        attention=options.attention,
        dtype=options.dtype,
        weights_dtype=options.weights or options.dtype,
        quantization=_quantization(options, traced.weights),
        opset=options.opset,
        op_version=domains.get(names.OP_DOMAIN),
        vocab_size=spec.vocab_size,
        max_sequence_length=traced.max_sequence_length,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        pad_token_id=spec.pad_token_id,
        cache_layers=_cache_layers(spec, options.cache_dtype(), report),
        inputs=tuple(value.name for value in graph.input),
        outputs=tuple(value.name for value in graph.output),
        rewrites=report.counts,
        files={},
        run_sizes=traced.run_sizes,
        refusals=(*traced.notices, *map(str, report.refusals)),
    )
    write_genai_config(folder, manifest)
    manifest = dataclasses.replace(manifest, files=bundle.list_files(folder))
    manifest.write(folder)
    return manifest


def _quantization(options: ExportOptions, report: WeightsReport | None) -> Quantization | None:
    quantization = options.quantization()
    if quantization is None or report is None:
        return None
    return dataclasses.replace(quantization, stored_bytes=report.stored_bytes)


def _cache_layers(
    spec: "DecoderSpec", dtype: CacheDtype, report: "RewriteReport"
) -> tuple[CacheLayer, ...]:
    return tuple(
        CacheLayer(
            num_key_value_heads=shape.num_key_value_heads,
            key_head_dim=shape.key_head_dim,
            value_head_dim=shape.value_head_dim,
            dtype=dtype,
            window_size=window,
            cache_mode="auto" if capacity is None else "ring",
            capacity=capacity,
        )
        for shape, window, capacity in zip(
            spec.cache_shapes, report.windows, report.ring_capacities, strict=True
        )
    )
