"""Check `cache_use`: where the cache may be a shared buffer nothing but the op looks at it.

In the shared buffer mode a cache holds stale and unwritten slots and its dimension 2 is a
capacity, so any other reader would compute nonsense without an error.
"""

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Refusal, is_past

NAME = "cache_use"
_OPS = (
    (names.OP_DOMAIN, names.OP_NAME),
    (names.ORT_DOMAIN, names.GROUP_QUERY_ATTENTION),
)


def check(graph: gs.Graph) -> tuple[Refusal, ...]:
    """Return one refusal per node that reads past_key_values.* or present.* and may not."""
    cached = [t for t in graph.inputs if is_past(t)]
    cached += [t for t in graph.outputs if t.name.startswith("present.")]
    return tuple(
        Refusal(NAME, node.name or node.op, f"it reads {tensor.name} ({node.op})")
        for tensor in cached
        for node in tensor.outputs
        if (node.domain, node.op) not in _OPS
    )
