"""A bundle with another graph over the weights of a whole one, made in seconds."""

import dataclasses
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import onnx

from kvconv import names
from kvconv.converter.rewrite import read_graph, rewrite, write_graph
from kvconv.manifest import CacheDtype, file_entry, read_manifest


def derive(
    source: Path,
    target: Path,
    *,
    without: Collection[str] = (),
    cache_dtype: CacheDtype | None = None,
) -> Path:
    """Rewrite a flash bundle's graph once more; its weights become links to those of `source`.

    Args:
        source: The bundle; rules that were left out of it apply now.
        target: The folder to write; what was there is gone.
        without: Rules to leave out.
        cache_dtype: How keys and values are stored; None as they are. A quantised cache cannot
            become another one.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)
    manifest = read_manifest(source)
    graph = read_graph(source / names.MODEL_FILE)
    report = rewrite(
        graph, attention="flash", opset=manifest.opset, cache_dtype=cache_dtype, without=without
    )
    path = target / names.MODEL_FILE
    path.unlink()
    write_graph(graph, path)
    (target / names.MANIFEST_FILE).unlink()
    imports = onnx.load(path, load_external_data=False).opset_import
    dataclasses.replace(
        manifest,
        op_version=next(entry.version for entry in imports if entry.domain == names.OP_DOMAIN),
        rewrites=report.counts,
        files={**manifest.files, names.MODEL_FILE: file_entry(path)},
        cache_layers=tuple(
            dataclasses.replace(layer, dtype=cache_dtype or layer.dtype)
            for layer in manifest.cache_layers
        ),
        inputs=(*(tensor.name for tensor in graph.inputs), names.NUM_LOGITS_TO_KEEP),
        outputs=tuple(tensor.name for tensor in graph.outputs),
    ).write(target)
    return target
