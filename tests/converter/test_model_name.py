"""What a MODEL argument names; a wrong one is refused before anything heavy is imported."""

import subprocess
import sys

import pytest

from kvconv.converter.model_name import ModelName, parse_model_name
from kvconv.errors import ModelNotFoundError


@pytest.mark.parametrize(
    ("model", "location", "hub_file"),
    [
        ("gpt2", "gpt2", None),
        ("org/name-1.5_b", "org/name-1.5_b", None),
        ("org/name/file.Q4_1.gguf", "org/name", "file.Q4_1.gguf"),
        ("org/name/Q4 K/file-1.gguf", "org/name", "Q4 K/file-1.gguf"),
    ],
)
def test_hub_names(model, location, hub_file):
    assert parse_model_name(model, "main") == ModelName(model, "hub", location, hub_file)


def test_path_that_exists_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "größe 1"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    (folder / "a b.gguf").touch()
    for path, kind in ((folder, "folder"), (folder / "a b.gguf", "gguf")):
        for text in (str(path), str(path.relative_to(tmp_path))):
            assert parse_model_name(text) == ModelName(text, kind, text)


@pytest.mark.parametrize(
    "model",
    [
        "./nowhere",
        "/no/where",
        "~/no/where",
        "~nobody-here/model",
        "a/b/c",
        "x.gguf",
        "../a/b/c.gguf",
        "a/b/../c.gguf",
        "",
    ],
)
def test_neither_path_nor_hub_name_is_refused(model):
    with pytest.raises(ModelNotFoundError, match="There is no file or folder") as info:
        parse_model_name(model)
    assert info.value.model == model


def test_folder_that_is_no_model_is_refused_with_what_it_is(tmp_path):
    def refusal():
        with pytest.raises(ModelNotFoundError) as info:
            parse_model_name(str(tmp_path))
        return str(info.value)

    assert "holds no config.json" in refusal()
    (tmp_path / "b.gguf").touch()
    assert f"Did you mean {tmp_path / 'b.gguf'}?" in refusal()
    (tmp_path / "config.json").touch()
    (tmp_path / "kvconv.json").touch()
    assert "is a bundle already" in refusal()


def test_missing_path_is_refused_without_heavy_imports(tmp_path):
    code = (
        "import sys; from kvconv.cli import main\n"
        f"sys.argv[1:] = ['export', './nowhere', '-o', {str(tmp_path / 'b')!r}]\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'huggingface_hub'} & {*sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.startswith("Error: There is no file or folder './nowhere'.")
    assert (result.returncode, result.stdout) == (1, "[]\n")
