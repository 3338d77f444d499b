"""The table of arguments says what the C++ launcher says."""

import re
from pathlib import Path

from kvconv.custom_ops.triton import arguments

HEADER = Path(__file__).parents[3] / "custom_ops" / "src" / "cuda" / "kernel_pack.h"


def test_ids_are_those_of_the_launcher():
    enum = re.search(r"enum class Argument.*?\{(.*?)\};", HEADER.read_text(), re.DOTALL)[1]
    in_cpp = {
        re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower(): int(number)
        for name, number in re.findall(r"k(\w+) = (\d+)", enum)
    }
    in_cpp["softcap"] = in_cpp.pop("softcap_value")
    assert in_cpp == {name: argument.id for name, argument in arguments.ARGUMENTS.items()}


def test_arguments_are_in_the_order_of_their_ids():
    ids = [argument.id for argument in arguments.ARGUMENTS.values()]
    assert ids == sorted(set(ids))


def test_aligned_are_all_pointers_but_the_length_and_the_token_strides():
    aligned = {name for name, argument in arguments.ARGUMENTS.items() if argument.aligned}
    pointers = {
        name for name, argument in arguments.ARGUMENTS.items() if argument.type.startswith("*")
    }
    assert pointers - aligned == {"past_sequence_length"}
    assert aligned - pointers == {
        "query_token_stride", "key_token_stride", "value_token_stride",
    }  # fmt: skip


def test_every_name_in_the_tables_of_kinds_is_an_argument():
    used = set().union(*arguments.ALWAYS.values(), *arguments.OF_CACHE.values())
    for features in arguments.OF_FEATURE.values():
        used |= set().union(*features.values())
    assert used == set(arguments.ARGUMENTS)
