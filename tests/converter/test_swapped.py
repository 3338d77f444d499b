"""Attributes that are swapped for a while come back, whatever happens meanwhile."""

from types import SimpleNamespace

import pytest

from kvconv.converter.swapped import swapped


def test_swapped_attributes_are_others_in_the_block_and_come_back_after_an_error() -> None:
    owner = SimpleNamespace(first=1, second=2, third=3)
    seen = []

    def fail() -> None:
        seen.append(dict(vars(owner)))
        raise KeyError

    with pytest.raises(KeyError), swapped(owner, first="a", second="b"):
        fail()
    assert seen == [{"first": "a", "second": "b", "third": 3}]
    assert vars(owner) == {"first": 1, "second": 2, "third": 3}


def test_swapping_what_is_not_there_changes_nothing() -> None:
    owner = SimpleNamespace(first=1)
    with pytest.raises(AttributeError, match="absent"), swapped(owner, first=2, absent=3):
        pass
    assert vars(owner) == {"first": 1}
