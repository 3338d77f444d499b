"""Models on the hub, through a small hub on the loopback interface.

huggingface_hub reads its environment when it is imported, so most cases change its constants in
this process; one export runs as a user runs it, with the environment variables.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
from click.testing import CliRunner
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from hub_server import TOKEN, HubServer, commit_of
from kvconv.cli import main
from kvconv.converter.load import load_model
from kvconv.converter.model_sizes import read_sizes
from kvconv.errors import ExportError, ModelNotFoundError, UnsupportedModelError
from kvconv.manifest import Source, read_manifest
from tiny_gguf import write_tiny_gguf

MODEL = "org/tiny"
WEIGHTS = "model.safetensors"
BERT = b'{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'
CARD = b"---\nlicense: mit\n---\n# A model\n"


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"README.md": CARD}


@pytest.fixture(scope="session")
def files(checkpoint):
    return read_files(checkpoint("llama"))


@pytest.fixture(scope="session")
def sharded(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    model.save_pretrained(folder, max_shard_size="60KB")
    files = read_files(folder)
    assert sum(name.endswith(".safetensors") for name in files) > 1
    return files


def visit(monkeypatch, url, *, offline=False):
    """Point huggingface_hub at a hub, as its environment variables would."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer() as server:
        visit(monkeypatch, server.url)
        yield server


@pytest.fixture
def load(tmp_path):
    """Load a model with a cache of the test's own."""
    return lambda model=MODEL, **options: load_model(model, cache_dir=tmp_path, **options)


def refusal(load, model=MODEL, **options):
    """Return what a refusal says; it must name the model."""
    with pytest.raises(ModelNotFoundError) as info:
        load(model, **options)
    assert info.value.model == model
    return str(info.value)


def test_only_the_files_that_are_read_are_fetched_and_only_once(hub, load, files):
    same_weights_again = {
        "pytorch_model.bin": b"0" * 1000,
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model-1.bin"}}',
        "consolidated.00.pth": b"0",
        "consolidated.safetensors": b"0",
        "model.fp16.safetensors": b"0",
        "flax_model.msgpack": b"0",
        "model.onnx": b"0",
        "onnx/model.onnx": b"0",
        "original/model.safetensors": b"0",
        "figure.png": b"0",
    }
    commit = hub.add(MODEL, files | same_weights_again)
    assert load().source == Source(MODEL, "hub", revision=commit, license="mit")
    assert hub.downloaded() == {*files, "pytorch_model.bin.index.json"}
    assert hub.bytes_sent[WEIGHTS] == len(files[WEIGHTS])
    hub.requests.clear()
    assert load().source.revision == commit
    assert hub.requests == [("GET", f"/api/models/{MODEL}/revision/main")]


def test_sharded_weights_are_fetched_by_their_index(hub, load, sharded, files):
    hub.add(MODEL, sharded | {"consolidated.safetensors": b"0"})
    loaded = load().model.state_dict()
    assert hub.downloaded() == set(sharded)
    for name, weight in safetensors.torch.load(files[WEIGHTS]).items():
        assert loaded[name].equal(weight), name


def test_plan_fetches_the_config_and_nothing_else(hub, tmp_path, files):
    hub.add(MODEL, files | {"other.json": b"{}"})
    options = {"dtype": "float32", "weights": None, "cache_dtype": "float32"}
    assert read_sizes(MODEL, cache_dir=tmp_path, **options).name == MODEL
    assert hub.downloaded() == {"config.json"}


def test_plan_of_a_gguf_file_on_the_hub_does_not_fetch_it(hub, tmp_path):
    hub.add(MODEL, {"README.md": CARD, "tiny.gguf": b"0"})
    options = {"dtype": "float32", "weights": None, "cache_dtype": "float32"}
    with pytest.raises(ModelNotFoundError, match="not on this machine.*hf download"):
        read_sizes(f"{MODEL}/tiny.gguf", cache_dir=tmp_path, **options)
    assert "tiny.gguf" not in hub.downloaded()


@pytest.mark.parametrize("kind", ["branch", "tag", "commit"])
def test_revision_decides_which_commit_is_read(hub, load, files, checkpoint, kind):
    hub.add(MODEL, files)
    old = commit_of("old")
    repository = hub.repositories[MODEL]
    repository.commits[old] = read_files(checkpoint("llama", num_hidden_layers=1))
    repository.branches |= {"branch": old, "tag": old}
    loaded = load(revision=old if kind == "commit" else kind)
    assert loaded.source.revision == old
    assert loaded.model.config.num_hidden_layers == 1
    assert load().model.config.num_hidden_layers == 2


def test_private_and_gated_models_need_a_token(hub, load, files, monkeypatch):
    hub.add("org/private", files, private=True)
    hub.add("org/gated", files, gated=True)
    private, gated = refusal(load, "org/private"), refusal(load, "org/gated")
    assert "no hub model org/private" in private
    assert f"Accept them on {hub.url}/org/gated" in gated
    for text in (private, gated):
        assert "HF_TOKEN" in text
        assert "hf auth login" in text
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for model in ("org/private", "org/gated"):
        assert "refuses the access token" in refusal(load, model)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for model in ("org/private", "org/gated"):
        assert load(model).source.model == model


def test_what_is_not_on_the_hub_is_named(hub, load, files, sharded):
    hub.add(MODEL, files)
    assert "no hub model org/absent" in refusal(load, "org/absent")
    assert "no hub model not--valid" in refusal(load, "not--valid")
    assert "no revision 'nope'" in refusal(load, revision="nope")
    without = dict(files)
    del without[WEIGHTS]
    hub.add("org/no-weights", without)
    assert "none of model.safetensors" in refusal(load, "org/no-weights")
    shard = next(name for name in sharded if name.startswith("model-00002"))
    hub.add("org/no-shard", {name: sharded[name] for name in sharded if name != shard})
    assert shard in refusal(load, "org/no-shard")
    hub.add("org/no-config", {WEIGHTS: files[WEIGHTS]})
    assert "has no config.json" in refusal(load, "org/no-config")
    assert WEIGHTS not in hub.downloaded()


def test_model_without_a_tokenizer_is_loaded_without(hub, load, files):
    hub.add(MODEL, {name: files[name] for name in files if "token" not in name})
    assert load().tokenizer is None


def test_weights_are_not_fetched_for_a_config_that_is_refused(hub, load, files):
    hub.add(MODEL, files | {"config.json": BERT})
    with pytest.raises(UnsupportedModelError, match="not a decoder"):
        load()
    assert WEIGHTS not in hub.downloaded()


def test_connection_cut_in_mid_file_is_taken_up_where_it_broke(hub, load, files, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add(MODEL, files)
    hub.cuts[WEIGHTS] = [50_000]
    load()
    assert hub.ranges == {WEIGHTS: [50_000]}
    assert hub.bytes_sent[WEIGHTS] == len(files[WEIGHTS])


def test_connection_that_keeps_breaking_is_refused_and_the_next_call_goes_on(
    hub, load, sharded, monkeypatch
):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    shards = sorted(name for name in sharded if name.endswith(".safetensors"))
    hub.add(MODEL, sharded)
    hub.cuts[shards[-1]] = [0] * 6
    text = refusal(load)
    assert "the connection broke" in text
    assert "complete are not fetched again" in text
    sent = dict(hub.bytes_sent)
    assert sent[shards[0]] == len(sharded[shards[0]])
    hub.bytes_sent.clear()
    load()
    assert shards[-1] in hub.downloaded()
    assert hub.downloaded().isdisjoint(name for name in sent if sent[name])


@pytest.mark.parametrize(
    ("status", "message"),
    [(500, "answered 500 Internal Server Error"), (429, "answered 429"), (403, "may not read")],
)
def test_hub_that_refuses_says_how_and_the_cache_still_serves(hub, load, files, status, message):
    hub.add(MODEL, files)
    hub.status = status
    assert message in refusal(load)
    hub.status = None
    commit = load().source.revision
    hub.status = status
    assert load().source.revision == commit


def test_without_a_network_the_cache_serves_and_nothing_else(tmp_path, load, files, monkeypatch):
    with HubServer() as hub:
        visit(monkeypatch, hub.url)
        commit = hub.add(MODEL, files)
        load()
    nobody_listens = "http://127.0.0.1:9"
    for offline, message in ((False, f"hub at {nobody_listens} cannot be"), (True, "HF_HUB_OFFL")):
        visit(monkeypatch, nobody_listens, offline=offline)
        assert load().source.revision == commit
        assert message in refusal(load, "org/other")
    weights = next(tmp_path.glob(f"models--org--tiny/snapshots/*/{WEIGHTS}"))
    weights.unlink()
    assert "not all in the local cache" in refusal(load)


def test_disk_without_room_is_refused_before_the_download(hub, load, files, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    hub.add(MODEL, files)
    with pytest.raises(ExportError, match=r"0 MB free, and 0 MB of org/tiny .* --cache-dir"):
        load()
    assert WEIGHTS not in hub.downloaded()


def test_gguf_file_on_the_hub_is_fetched_alone(hub, load, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    content = path.read_bytes()
    commit = hub.add("org/gguf", {"tiny.gguf": content, "Q2/other.gguf": b"0", "README.md": CARD})
    loaded = load("org/gguf/tiny.gguf")
    assert loaded.source == Source("org/gguf/tiny.gguf", "hub", revision=commit, license="mit")
    assert loaded.model.config.model_type == "llama"
    assert hub.downloaded() == {"tiny.gguf", "README.md"}
    assert "It has Q2/other.gguf, tiny.gguf." in refusal(load, "org/gguf/absent.gguf")
    assert "org/gguf/Q2/other.gguf" in refusal(load, "org/gguf")
    hub.add("org/in-folders", {"Q4/small.gguf": content})
    assert load("org/in-folders/Q4/small.gguf").source.license == "mit"


def test_export_by_id_records_the_commit_and_times_the_download(hub, checkpoint, tmp_path):
    commit = hub.add(MODEL, read_files(checkpoint("llama", num_hidden_layers=1)))
    arguments = ["-o", tmp_path / "bundle", "--cache-dir", tmp_path / "cache", "--no-verify"]
    result = CliRunner().invoke(main, ["export", MODEL, *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["seconds"])[:3] == ["start", "download", "load"]
    source = Source(MODEL, "hub", revision=commit, license="mit")
    assert read_manifest(tmp_path / "bundle").source == source
    assert hub.requests[-1][1].endswith(WEIGHTS)  # the stage "load" asked for nothing more


def test_environment_variables_of_the_hub_work_from_the_command_line(files, tmp_path):
    environment = os.environ | {
        "HF_ENDPOINT": "", "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, "-c", "from kvconv.cli import main; main()", "export", "org/bert"]
    with HubServer() as hub:
        environment["HF_ENDPOINT"] = hub.url
        hub.add("org/bert", {"config.json": BERT}, private=True)
        result = subprocess.run(
            [*command, "-o", str(tmp_path / "bundle")],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert last.startswith("Error: org/bert is a BertForMaskedLM, not a decoder")
    assert hub.downloaded() == {"config.json"}
