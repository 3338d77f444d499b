"""Rule `length_input`: on CUDA, the number of tokens in the cache is an input of the graph.

    before   FlashAttention(.., attention_mask)                        past = its width - sequence
    after    FlashAttention(.., attention_mask, past_sequence_length)  the mask may be wider

A captured CUDA graph runs the same launches on the same shapes at every step, so the mask is as
wide as the cache's capacity, and how full the cache is stands in device memory. The same graph runs
on the CPU. Graphs for the CPU alone stay as they are: their past may also be as long as what it
holds, which optimum and other programs rely on.
"""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    find,
    get_operand,
    set_operand,
)

NAME = "length_input"


def apply(editor: Editor) -> Outcome:
    """Let every FlashAttention node of a graph for CUDA read past_sequence_length."""
    if editor.provider != "cuda":
        return Outcome(0)
    nodes = [
        node
        for node in find(editor.graph, names.OP_NAME, names.OP_DOMAIN)
        if get_operand(node, "past_sequence_length") is None
    ]
    for node in nodes:
        length = editor.add_input(names.PAST_SEQUENCE_LENGTH, np.int32, [1])
        set_operand(node, "past_sequence_length", length)
    reason = (
        "caches on CUDA are shared buffers whose length is an input, which optimum and "
        "onnxruntime-genai cannot drive; an export without --provider cuda writes a bundle for them"
    )
    return Outcome(len(nodes), (Refusal(NAME, names.PAST_SEQUENCE_LENGTH, reason),))


def check(graph: gs.Graph) -> tuple[Refusal, ...]:
    """Say what else reads attention_mask: a mask as wide as the capacity would mislead it."""
    return tuple(
        Refusal(
            NAME,
            node.name,
            f"{node.op} reads {names.ATTENTION_MASK}, whose width it takes "
            f"for the number of tokens",
        )
        for node in graph.nodes
        if (node.op, node.domain) != (names.OP_NAME, names.OP_DOMAIN)
        and any(tensor.name == names.ATTENTION_MASK for tensor in node.inputs)
    )
