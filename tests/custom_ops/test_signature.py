"""The operator's signature is the same in C++ and in Python."""

import re
from pathlib import Path

from kvconv import names

SOURCE = Path(__file__).parents[2] / "custom_ops/src/attention_op.h"


def test_inputs_have_the_same_names_in_the_same_order():
    text = SOURCE.read_text()
    start = text.index('"query"')
    block = text[start : text.index("}", start)]
    assert tuple(re.findall(r'"(\w+)"', block)) == names.FLASH_ATTENTION_INPUTS
