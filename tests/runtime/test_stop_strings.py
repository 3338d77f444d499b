import random

import pytest

from kvconv.runtime.stop_strings import StopFilter


def shown(stop: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stop_filter, texts = StopFilter(stop), []
    for piece in pieces:
        text, is_stopped = stop_filter.push(piece)
        texts.append(text)
        if is_stopped:
            return texts, True
    return [*texts, stop_filter.flush()], False


@pytest.mark.parametrize(
    ("stop", "pieces", "texts", "is_stopped"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["END"], ["onE", "N", "D", "x"], ["on", "", ""], True),
        (["END"], ["E", "N", "X"], ["", "", "ENX", ""], False),
        (["END"], ["E", "N"], ["", "", "EN"], False),
        (["END"], ["one END two"], ["one "], True),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], True),
        (["aab"], ["aa", "a", "b"], ["", "a", ""], True),
        (["b", "ab"], ["xab"], ["x"], True),
        (["abXY", "bZ"], ["ab", "Z"], ["", "a"], True),
        (["é"], ["caf", "é"], ["caf", ""], True),
    ],
)
def test_text_ends_before_the_stop_string(stop, pieces, texts, is_stopped):
    assert shown(stop, pieces) == (texts, is_stopped)


@pytest.mark.parametrize("seed", range(5))
def test_any_cutting_into_pieces_shows_the_same_text(seed):
    generator = random.Random(seed)
    for _ in range(200):
        text = "".join(generator.choice("abc") for _ in range(30))
        stop = "".join(generator.choice("abc") for _ in range(generator.randrange(1, 5)))
        cuts = sorted(generator.randrange(31) for _ in range(8))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 30], strict=True)]
        texts, is_stopped = shown([stop], pieces)
        assert "".join(texts) == text.partition(stop)[0]
        assert is_stopped == (stop in text)
