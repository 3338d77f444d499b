"""Rule `float32_logits`: the logits leave a half-precision graph as float32."""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Editor, Outcome, write_instead

NAME = "float32_logits"


def apply(editor: Editor) -> Outcome:
    """Append a Cast to `logits` where it is not float32."""
    logits = _pattern(editor.graph)
    if logits is None:
        return Outcome(0)
    _rewrite(editor, logits)
    return Outcome(1)


def _pattern(graph: gs.Graph) -> gs.Variable | None:
    logits = next((t for t in graph.outputs if t.name == names.LOGITS), None)
    return None if logits is None or logits.dtype == np.float32 else logits


def _rewrite(editor: Editor, logits: gs.Variable) -> None:
    half = gs.Variable(editor.fresh("logits"), logits.dtype, logits.shape)
    write_instead(logits, half)
    editor.add_node("Cast", [half], [logits], {"to": np.float32})
    logits.dtype = np.dtype(np.float32)
