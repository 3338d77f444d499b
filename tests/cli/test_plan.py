"""kvconv plan: what it prints for models and bundles, what fits, and what it refuses."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from kvconv import memory
from kvconv.cli import main
from kvconv.cli.plan import MemorySize
from kvconv.manifest import RunSizes, read_manifest
from kvconv.runtime import Bundle, Session
from tiny_bundle import MAX_SEQUENCE_LENGTH, write_bundle

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama-70b")
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(folder)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory) -> str:
    """Give a model of the same shape but for its 2 layers, which is counted sooner."""
    folder = tmp_path_factory.mktemp("two-layers")
    (folder / "config.json").write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": 2}))
    return str(folder)


@pytest.fixture(scope="module")
def gemma_3(tmp_path_factory) -> str:
    """Give the shape of Gemma 3 270M: 15 of its 18 layers see 512 tokens."""
    folder = tmp_path_factory.mktemp("gemma-3")
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def bundle(tmp_path) -> str:
    return str(write_bundle(tmp_path / "a bundle", attention="flash"))


def plan(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def report(*arguments):
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_llama_70b_is_counted_by_its_config_alone(llama_70b):
    found = report(llama_70b, "--dtype", "float16", "--memory", "320GB")
    # Each layer: q and o 2 x 8192 x 8192, k and v 2 x 8192 x 1024, three of 8192 x 28672, two norms
    # of 8192 = 855,654,400. 80 of them, embedding and head 2 x 128256 x 8192, and a norm.
    assert found["weights"] == 2 * 70_553_706_496
    assert found["cache_bytes"] == 1_342_177_280  # worked out in tests/test_plan.py
    assert found["logits"] == 128_256 * 4
    assert (found["batch_size"], found["context"]) == (1, 4096)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (64, 8)
    assert found["fits"] is True


def test_largest_batch_and_context_are_the_last_that_fit(two_layers):
    options = ["--dtype", "float16", "--weights", "int4", "--memory", "4.5GB"]
    found = report(two_layers, *options)
    for option, key in (("--batch", "largest_batch"), ("--context", "largest_context")):
        most = found[key]
        assert most > 1
        assert report(two_layers, *options, option, most)["fits"] is True
        assert report(two_layers, *options, option, most + 1)["fits"] is False


def test_what_does_not_fit_says_so_and_what_to_change(two_layers):
    result = plan(two_layers, "--memory", "4GiB")
    assert result.exit_code == 0
    assert " 4,294,967,296  given: it does not fit" in result.stdout
    assert "largest batch              none" in result.stdout
    assert "--weights int4" in result.stdout


def test_long_context_advises_on_the_cache_with_figures(llama_70b):
    options = ["--dtype", "float16", "--context", "131072", "--batch", "8"]
    text = "\n".join(report(llama_70b, *options)["advice"])
    # 32 x 8 times the cache of 4096 tokens: 343,597,383,680 bytes
    assert "55% of the total" in text
    assert "--kv-cache-dtype 343.60 GB of cache would be int8 182.54 GB, int4 107.37 GB" in text
    assert "64 query heads share 8 of keys and values, or the cache would be 2748.78 GB" in text
    assert "MQA would make it 42.95 GB" in text
    assert "pays from 2880 tokens on" in text  # 36864 x 5 x 4 bytes / (64 heads x 4 bytes)
    assert "leave 171.80 GB idle" in text


def test_rings_take_a_quarter_of_gemma_3s_cache_and_the_advice_says_so(gemma_3):
    flags = ["--context", "8192", "--batch", "4"]
    ring, whole = report(gemma_3, *flags), report(gemma_3, *flags, "--no-ring")
    # A slot takes 2 x 256 x 4 bytes: 4 rows x (15 x 768 + 3 x 8192) slots, and 4 x 18 x 8192.
    assert ring["cache_bytes"] == 4 * 36_096 * 2048 == 295_698_432
    assert whole["cache_bytes"] == 4 * 147_456 * 2048 == 1_207_959_552
    assert [part["slots"] for part in ring["cache"]] == [768, 8192]
    assert [part["slots"] for part in whole["cache"]] == [8192, 8192]
    assert ring["run_tokens"] == 4 * 256
    assert any(
        "rings help already: 15 of 18 layers" in text and "would be 1.21 GB" in text
        for text in ring["advice"]
    )
    assert any(
        "15 of 18 layers see a window only" in text and "295.7 MB instead of 1.21 GB" in text
        for text in whole["advice"]
    )


def test_model_without_shared_heads_is_told_what_they_would_save(tmp_path):
    config = LLAMA_70B | {"num_hidden_layers": 2, "num_key_value_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # 2 x 16 rows x 2 layers x 4096 tokens x 64 heads x 128 x 2 bytes = 4,294,967,296, an eighth
    found = report(tmp_path, "--dtype", "float16", "--batch", "16")
    assert any(
        "one for 8 query heads the cache would be 536.9 MB" in text for text in found["advice"]
    )


@pytest.mark.parametrize(
    ("dtype", "cache_bytes"),
    [
        ("int8", 17_825_792),  # 2 x 2 x 4096 x 8 heads of 128 + 8 bytes
        ("int4", 10_485_760),  # 2 x 4096 x 8 x (80 + 64 + 2 x 8)
    ],
)
def test_quantised_cache_is_counted_with_its_scales(two_layers, dtype, cache_bytes):
    found = report(two_layers, "--dtype", "float16", "--kv-cache-dtype", dtype)
    assert found["cache_bytes"] == cache_bytes
    # 65,536 key heads and as many value heads, with 4 scales of 2 bytes each
    assert [part["scale_bytes"] for part in found["cache"]] == [1_048_576]


def test_bundle_cache_equals_the_buffers_that_the_runtime_allocates(bundle):
    found = report(bundle, "--batch", "3", "--context", "17")
    cache = Session(Bundle.open(bundle)).new_cache(3, 17)
    assert (
        found["cache_bytes"] == cache.nbytes == sum(part["data_bytes"] for part in found["cache"])
    )


def test_bundle_context_is_what_it_holds_by_default(bundle):
    assert report(bundle)["context"] == MAX_SEQUENCE_LENGTH
    result = plan(bundle, "--context", MAX_SEQUENCE_LENGTH + 1)
    assert result.exit_code == 1
    assert f"holds at most {MAX_SEQUENCE_LENGTH} tokens" in result.stderr


def test_bundle_that_does_not_say_what_a_run_takes_says_so(bundle):
    assert "0  not known: export again" in plan(bundle).stdout


def test_bundle_whose_attention_writes_scores_is_told_what_flash_saves(tmp_path):
    folder = write_bundle(tmp_path / "bundle", attention="standard")
    manifest = read_manifest(folder)
    # Scores of 64 heads x 64 x 64 x 4 bytes, twice; activations of 64 x 2 x 5 x 4.
    sizes = RunSizes(num_attention_heads=64, activation_width=2, packed_bytes=0)
    dataclasses.replace(manifest, run_sizes=sizes).write(folder)
    found = report(folder, "--context", 64)
    assert found["workspace"] == 2 * 1_048_576 + 2560
    assert found["growth"] == found["cache_bytes"]
    assert any("--attention flash: scores of 1.0 MB" in text for text in found["advice"])


def test_memory_is_what_is_free_by_default(bundle, monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 10**9)
    found = report(bundle)
    assert (found["memory"], found["is_free_memory"], found["fits"]) == (10**9, True, True)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: None)
    found = report(bundle)
    assert (found["memory"], found["fits"], found["largest_batch"]) == (None, None, None)
    assert "does not say what is free" in plan(bundle).stdout


@pytest.mark.parametrize(
    "options",
    [["--dtype", "float16"], ["--weights", "int4"], ["--kv-cache-dtype", "int8"], ["--no-ring"]],
    ids=" ".join,
)
def test_options_of_an_export_are_refused_for_a_bundle(bundle, options):
    result = plan(bundle, *options)
    assert result.exit_code == 2
    assert f"{options[0]} says how a model is exported" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--context", "0"], 2, "x>=1"),
        (["--batch", "-1"], 2, "x>=1"),
        (["--memory", "much"], 2, "is no size"),
        (["--memory", "0GB"], 2, "no memory at all"),
        (["--dtype", "bfloat16"], 2, "need CUDA"),
        (["--context", "131073"], 1, "holds at most 131072 tokens"),
    ],
    ids=str,
)
def test_bad_input_is_refused_with_its_value(two_layers, options, exit_code, message):
    result = plan(two_layers, *options)
    assert result.exit_code == exit_code
    assert message in result.stderr


def test_path_that_is_not_there_is_one_line():
    result = plan("./absent/model")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "There is no file or folder" in result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GB", 16 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5 g", 15 * 10**8),
        ("800mb", 8 * 10**8),
        ("2ki", 2048),
        ("12345", 12345),
    ],
)
def test_memory_sizes_are_read_with_their_units(text, expected):
    assert MemorySize().convert(text, None, None) == expected
