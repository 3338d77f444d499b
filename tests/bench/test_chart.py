"""The chart is written, or refused before anything is measured."""

import pytest

from kvconv.bench import Sample, to_points
from kvconv.bench.chart import check_chart, draw_chart
from kvconv.errors import OutputExistsError
from scripted_session import MANIFEST


def test_chart_is_an_image_of_all_bundles(tmp_path):
    points = [
        point
        for context in (128, 512)
        for point in to_points(
            [Sample(context, 1, 0.5, 1.0, (0,) * 9, None, None, None)],
            MANIFEST,
            weights=None,
            bandwidth=None,
        )
    ]
    for name, beginning in (("speed.png", b"\x89PNG"), ("speed.svg", b"<?xml")):
        check_chart(tmp_path / name)
        draw_chart({"one": points, "two": points}, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(beginning)
    for label in (">one<", ">two<", ">prefill<", ">decode<"):
        drawn = (tmp_path / "speed.svg").read_text()
        assert label in drawn or label.strip("><") in drawn


@pytest.mark.parametrize("is_there", [True, False])
def test_check_changes_no_file(tmp_path, is_there):
    chart = tmp_path / "speed.PNG"
    if is_there:
        chart.write_text("old")
    check_chart(chart)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"] * is_there


@pytest.mark.parametrize("name", ["speed", "speed.xyz", "speed.pgf"])
def test_chart_of_no_image_format_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"no image format; choose one of .*\.png"):
        check_chart(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["absent/speed.png", "folder.png"])
def test_chart_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OutputExistsError, match="choose") as caught:
        check_chart(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
