"""Norms of query and key heads behind a packed projection become one node."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from kvconv import names
from kvconv.converter.rewrite import head_norm
from kvconv.converter.rewrite.graph import Editor, find, set_operand, sort
from kvconv.converter.rewrite.match import columns
from rewrite_graphs import (
    BATCH,
    SEQUENCE,
    Builder,
    decoder,
    make_feeds,
    make_mask,
    open_session,
    run,
)
