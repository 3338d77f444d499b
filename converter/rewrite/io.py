"""Reads and writes ONNX files as onnx-graphsurgeon graphs, without touching the weights file."""

from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from kvconv import names
from kvconv.converter.rewrite.graph import find, get_operand
from kvconv.converter.rewrite.ring import is_ring

G_LOGGER.severity = G_LOGGER.ERROR  # its warnings go to stdout, which is for results
_OVERRIDABLE = (names.NUM_LOGITS_TO_KEEP,)


def read_graph(path: Path) -> gs.Graph:
    """Read a graph; constants in the weights file stay references to it."""
    return gs.import_onnx(onnx.load(path, load_external_data=False))


def write_graph(graph: gs.Graph, path: Path) -> None:
    """Write a graph; references into the weights file are written as they were read.

    Overridable initializers get their graph input back, and only operator domains in use are
    imported.
    """
    domains = {node.domain or "" for node in graph.nodes} | {""}
    imports = {entry.domain: entry.version for entry in graph.import_domains or []}
    imports |= {names.OP_DOMAIN: _op_version(graph), names.ORT_DOMAIN: 1}
    imports.setdefault("", graph.opset)
    model = gs.export_onnx(
        graph,
        opset_imports=[
            onnx.helper.make_opsetid(domain, version)
            for domain, version in sorted(imports.items())
            if domain in domains
        ],
    )
    restore_overridable(model)
    path.write_bytes(model.SerializeToString())


def _op_version(graph: gs.Graph) -> int:
    """Return the least version of kvconv's operator domain that runs a graph."""
    nodes = find(graph, names.OP_NAME, names.OP_DOMAIN)
    has_rings = any(
        is_ring(node) or get_operand(node, "past_key_scale") is not None for node in nodes
    )
    return names.RING_OP_VERSION if has_rings else names.FLOAT_CACHES_OP_VERSION


def restore_overridable(model: onnx.ModelProto) -> None:
    """List num_logits_to_keep among the graph inputs, which makes the initializer overridable."""
    listed = {entry.name for entry in model.graph.input}
    for initializer in model.graph.initializer:
        if initializer.name in _OVERRIDABLE and initializer.name not in listed:
            model.graph.input.append(
                onnx.helper.make_tensor_value_info(
                    initializer.name, initializer.data_type, list(initializer.dims)
                )
            )
