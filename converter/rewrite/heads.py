"""Rule `heads`: FlashAttention reads projections and feeds the next one without moving heads.

The op takes [B,S,N*H] (B batch, S sequence, N heads, H head_dim), which is what a projection
gives; so the Reshape to heads, the Transpose, and their inverses in front of the op cancel. They
are recognised by evaluation: between projection and operand nothing may change but the layout.
Likewise behind the op, where a model merges the heads again.
"""

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import NotEvaluableError
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    find,
    get_operand,
    operand_heads,
    replace_uses,
    set_operand,
)
from kvconv.converter.rewrite.region import (
    Layout,
    Region,
    Walker,
    flatten_heads,
    is_close,
    probe_heads,
    to_layout,
)

NAME = "heads"
_NODES_NEEDED = {"BSD": 0, "BSNH": 1, "BNSH": 2}


def apply(editor: Editor) -> Outcome:
    """Shorten the way into and out of every FlashAttention node; counts operands shortened."""
    graph = editor.graph
    walker = Walker(graph)
    known: dict[object, Layout | None] = {}
    count = 0
    for node in find(graph, names.OP_NAME, names.OP_DOMAIN):
        sizes = operand_heads(node)
        for name, (heads, width) in sizes.items():
            operand = get_operand(node, name)
            if operand is None or get_operand(node, "key") is None:
                continue  # packed already
            regions = walker.regions(operand)
            match = _pattern(graph, regions, heads, width, known)
            if match is not None:
                stem, layout = match
                set_operand(node, name, flatten_heads(editor, stem, layout, heads * width))
                count += 1
        count += _merge_output(graph, node, sizes["query"][0], sizes["value"][1], known)
    return Outcome(count)


def _pattern(
    graph: gs.Graph,
    regions: list[Region],
    heads: int,
    width: int,
    known: dict[object, Layout | None],
) -> tuple[gs.Variable, Layout] | None:
    """Return the farthest stem that holds the operand's numbers, if that saves nodes."""
    for region in reversed(regions):
        key = (region.key(), heads, width)
        if key not in known:
            known[key] = None if region.tables else _check(graph, region, heads, width)
        layout = known[key]
        if layout is not None and _NODES_NEEDED[layout] < len(region.nodes):
            return region.stem, layout
    return None


def _check(graph: gs.Graph, region: Region, heads: int, width: int) -> Layout | None:
    """Return the layout in which a stem holds exactly the operand's numbers."""
    values = probe_heads(heads, width)
    for layout in region.layouts(heads, width):
        try:
            operand, _ = region.run(graph, values, layout)
        except NotEvaluableError:
            continue
        if is_close(operand, to_layout(values, "BSD").astype(operand.dtype)):
            return layout
    return None


def _merge_output(
    graph: gs.Graph, node: gs.Node, heads: int, width: int, known: dict[object, Layout | None]
) -> int:
    """Drop `Reshape to heads, Reshape back` behind the op."""
    output = node.outputs[0]
    count = 0
    for split in list(output.outputs):
        if split.op != "Reshape":
            continue
        for merge in list(split.outputs[0].outputs):
            if merge.op != "Reshape":
                continue
            region = Region(merge.outputs[0], output, (merge, split), ())
            key = ("output", region.key(), heads, width)
            if key not in known:
                known[key] = _check(graph, region, heads, width)
            if known[key] == "BSD":
                replace_uses(merge.outputs[0], output)
                count += 1
    return count
