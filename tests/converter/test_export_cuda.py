"""Exports for CUDA: the graph, its kernels and the runtime's device path, all run on the CPU."""

import shutil

import numpy as np
import onnx
import pytest

from kvconv import names
from kvconv.converter import ExportOptions, export
from kvconv.converter.kernel_input import attach
from kvconv.errors import ExportError, RewriteError
from kvconv.manifest import Kernels, check_files, read_manifest
from kvconv.runtime import Bundle, Session
from kvconv.verify import Verifier

KERNELS = Kernels(("sm_80", "sm_90"), 4)
CONTENT = b"kernels"
TOKENS = [5, 9, 2, 77, 31, 8, 8, 1, 60, 4]


class Kernel:
    """Stands for the compiler: what it returns is only carried around here."""

    def build(self, model_path):
        assert onnx.load(model_path, load_external_data=False).graph.node
        return CONTENT, KERNELS


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, checkpoint):
    path = tmp_path_factory.mktemp("cuda") / "bundle"
    options = ExportOptions(provider="cuda", dtype="float16", weights="int4")
    export(
        str(checkpoint("gemma3_text")),
        path,
        options,
        Verifier(prompt_tokens=24, threads=1),
        kernels=Kernel(),
    )
    return path


def graph_of(folder):
    return onnx.load(folder / names.MODEL_FILE, load_external_data=False).graph


def test_graph_takes_the_length_and_has_no_operator_without_a_cuda_kernel(bundle):
    nodes = graph_of(bundle).node
    own = [node for node in nodes if node.domain == names.OP_DOMAIN]
    assert {node.op_type for node in own} == {names.OP_NAME}
    length = names.FLASH_ATTENTION_INPUTS.index("past_sequence_length")
    assert {node.input[length] for node in own} == {names.PAST_SEQUENCE_LENGTH}
    assert {node.domain for node in nodes if node.op_type == names.MATMUL_NBITS} == {
        names.ORT_DOMAIN
    }
    manifest = read_manifest(bundle)
    assert names.PAST_SEQUENCE_LENGTH in manifest.inputs
    assert manifest.op_version == names.OP_VERSION


def test_kernels_are_a_file_of_the_bundle_and_an_input_of_each_attention(bundle):
    manifest = read_manifest(bundle)
    assert manifest.kernels == KERNELS
    check_files(bundle, manifest, hash_all=True)
    assert (bundle / names.KERNELS_FILE).read_bytes() == CONTENT
    graph = graph_of(bundle)
    (initializer,) = [t for t in graph.initializer if t.name == names.KERNELS_INITIALIZER]
    assert list(initializer.dims) == [len(CONTENT)]
    assert {entry.key: entry.value for entry in initializer.external_data} == {
        "location": names.KERNELS_FILE,
        "offset": "0",
        "length": str(len(CONTENT)),
    }
    attentions = [node for node in graph.node if node.op_type == names.OP_NAME]
    assert {node.input[-1] for node in attentions} == {names.KERNELS_INITIALIZER}
    assert {len(node.input) for node in attentions} == {len(names.FLASH_ATTENTION_INPUTS)}


def test_attach_again_changes_the_size_alone(bundle, tmp_path):
    model = tmp_path / names.MODEL_FILE
    shutil.copyfile(bundle / names.MODEL_FILE, model)
    before = model.read_bytes()
    attach(model, len(CONTENT))
    assert model.read_bytes() == before
    attach(model, 12345)
    graph = graph_of(tmp_path)
    (initializer,) = [t for t in graph.initializer if t.name == names.KERNELS_INITIALIZER]
    assert list(initializer.dims) == [12345]
    attach(model, len(CONTENT))
    assert model.read_bytes() == before


def test_verification_says_that_no_kernel_ran(bundle):
    verification = read_manifest(bundle).verification
    assert verification.status == "passed"
    assert verification.not_checked == ("CUDA kernels: the bundle was run on the CPU",)


def test_moved_bundle_runs_on_a_device_as_on_the_cpu(bundle, tmp_path):
    """The device is the CPU: what is bound, copied and masked is the same on a GPU."""
    folder = shutil.copytree(bundle, tmp_path / "moved elsewhere")
    session = Session(Bundle.open(folder), threads=1)
    prompts = np.array([TOKENS, TOKENS[::-1]])
    mask = np.ones((2, 40), np.int64)
    mask[0, :3] = 0
    logits, caches = [], []
    for device in (None, "cpu"):
        session._device = device
        cache = session.new_cache(2, 40)
        found = [session.run(cache, prompts, attention_mask=mask[:, : len(TOKENS)]).copy()]
        step = session.decode_step(cache, mask, np.empty_like(found[0]))
        found += [step.run([token, token + 1]).copy() for token in (3, 4, 5)]
        cache.rewind(len(TOKENS) + 1)
        again = session.run(cache, [[4, 5], [5, 6]], attention_mask=mask[:, : len(TOKENS) + 3])
        logits.append([*found, again])
        fork = cache.fork()
        logits[-1].append(session.run(fork, [[7], [8]], attention_mask=mask[:, : fork.length + 1]))
        caches.append(cache)
    for on_host, on_device in zip(*logits, strict=True):
        assert np.array_equal(on_host, on_device)
    np.testing.assert_allclose(logits[1][3], logits[1][4], atol=0.05)
    assert caches[0].nbytes == caches[1].nbytes


def test_steps_of_a_cache_share_their_addresses_as_a_captured_graph_needs(bundle):
    session = Session(Bundle.open(bundle), threads=1)
    session._device = "cpu"
    cache, other = session.new_cache(1, 20), session.new_cache(1, 20)
    mask = np.ones((1, 20), np.int64)
    graph_ids, bound = [], []

    def steps(cache):
        logits = session.run(cache, [TOKENS[:3]])
        step = session.decode_step(cache, mask, logits)

        def execute(binding, graph_id):
            graph_ids.append(graph_id)
            values = [value for _, value in step._copies]
            values += [step._device_mask, step._device_logits, cache._device_length]
            bound.append([value.data_ptr() for value in values])
            session._execute(binding, graph_id)

        step._execute_graph = execute
        return [step.run([token]).copy() for token in (7, 8)]

    first, alone = steps(cache), steps(other)
    cache.rewind(0)
    again = steps(cache)
    assert np.array_equal(first, again)
    assert np.array_equal(first, alone)
    assert graph_ids[:2] == graph_ids[4:] == [cache.graph_id] * 2
    assert graph_ids[2:4] == [other.graph_id] * 2 != [cache.graph_id] * 2
    assert bound[0] == bound[1] == bound[4] == bound[5]
    assert not set(bound[0]) & set(bound[2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "gqa"}, "--attention gqa was asked for with --provider cuda"),
        ({"attention": "standard"}, "--attention standard was asked for with --provider cuda"),
        ({"weights": "int4", "accuracy_level": 4}, "the operator of CUDA computes it as level 1"),
    ],
)
def test_options_without_a_meaning_on_cuda_are_refused(options, words):
    with pytest.raises(ExportError, match=words):
        ExportOptions(provider="cuda", **options).quantization()


def test_kernels_come_with_cuda_and_with_nothing_else(tmp_path, checkpoint):
    for provider, kernels in (("cuda", None), ("cpu", Kernel())):
        with pytest.raises(ValueError, match="bundles for CUDA have kernels"):
            export(
                str(checkpoint("llama")),
                tmp_path / "bundle",
                ExportOptions(provider=provider),
                kernels=kernels,
            )


@pytest.mark.kinds
def test_model_that_reads_the_masks_width_is_refused(tmp_path, checkpoint):
    with pytest.raises(RewriteError, match="reads attention_mask, whose width"):
        export(
            str(checkpoint("llama4_text")),
            tmp_path / "bundle",
            ExportOptions(provider="cuda"),
            kernels=Kernel(),
        )
    assert not (tmp_path / "bundle").exists()
