"""SmolLM2 and Gemma 3: export, verification and generation against transformers.

Run with `make test-real`, which fetches both models. Each bundle is exported once.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from kvconv import custom_ops
from kvconv.cli import main
from kvconv.converter.load import load_model
from kvconv.converter.rewrite import read_graph, rewrite, write_graph
from kvconv.manifest import file_entry, read_manifest
from kvconv.names import (
    LOGITS,
    MODEL_FILE,
    NUM_LOGITS_TO_KEEP,
    POSITION_IDS,
    WEIGHTS_FILE,
    past_key,
    past_value,
    present_key,
    present_value,
)
from kvconv.plan import kv_cache_bytes
from kvconv.runtime import Bundle, Conversation, Generator, SamplingParams
from real_models import MODELS, PROMPTS

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
MAX_ABS = {"smollm2": 2e-4, "gemma3": 1e-3}


@pytest.fixture(scope="session", params=MODELS)
def real(request, export):
    """Yield (name, bundle folder, PyTorch model and tokenizer) for each model."""
    name = request.param
    loaded = load_model(
        str(MODELS[name]),
        revision=None,
        cache_dir=None,
        trust_remote_code=False,
        dtype="float32",
    )
    return name, export(name), loaded


def test_verification_is_within_the_promised_figures(real):
    name, bundle, _ = real
    verification = Bundle.open(bundle).manifest.verification
    assert verification.status == "passed"
    assert len(verification.checks) == 5
    for check in verification.checks:
        assert check.max_abs <= MAX_ABS[name], check
        assert check.top1 == 1.0, check
    assert not verification.not_checked


def test_greedy_tokens_equal_transformers(real):
    import torch

    _, bundle, loaded = real
    generator = Generator.open(bundle)
    for prompt in PROMPTS:
        inputs = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            wanted = loaded.model.generate(inputs, max_new_tokens=48, do_sample=False)
        events = generator.generate([generator.encode(prompt)], SamplingParams(max_new_tokens=48))
        found = [event.token_id for event in events]
        assert found == wanted[0, inputs.shape[1] :].tolist(), prompt


@pytest.mark.parametrize("real", ["gemma3"], indirect=True)
def test_rings_take_a_quarter_and_give_transformers_logits_after_wrapping_twice(real):
    """2000 tokens cross the window of 512 three times, and wrap a ring of 768 slots twice."""
    import torch

    (_, bundle, loaded), limit = real, 8192
    generator = Generator.open(bundle)
    text = "\n".join(f"{number}. {PROMPTS[number % 9]}" for number in range(300))
    ids = np.array([generator.encode(text)[:2000]])
    cache = generator.session.new_cache(1, limit)
    layers = generator.session.manifest.cache_layers
    assert cache.nbytes == kv_cache_bytes(layers, batch_size=1, max_sequence_length=limit)
    whole = [dataclasses.replace(layer, capacity=None) for layer in layers]
    assert cache.nbytes <= kv_cache_bytes(whole, batch_size=1, max_sequence_length=limit) / 4
    found = generator.prefill(cache, ids)[0, -1]
    with torch.inference_mode():
        wanted = loaded.model(torch.tensor(ids), use_cache=False, logits_to_keep=1).logits[0, -1]
    np.testing.assert_allclose(found, wanted.numpy(), atol=MAX_ABS["gemma3"], rtol=0)


@pytest.mark.parametrize(("name", "new_tokens"), [("smollm2", 16), ("gemma3", 6)])
def test_batches_of_any_size_give_the_tokens_of_single_runs(export, tmp_path, name, new_tokens):
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    for seed, line in enumerate(lines[::3]):
        line |= {"temperature": 0.8, "top_p": 0.95, "seed": seed}
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["run", str(export(name)), "--prompts", str(file)]
    arguments += ["--max-new-tokens", str(new_tokens), "--batch-size"]
    results = {}
    for batch_size in (1, 3, 8):
        result = CliRunner().invoke(main, [*arguments, str(batch_size)])
        assert result.exit_code == 0, result.output
        results[batch_size] = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in results[1]] == list(PROMPTS)
    assert results[3] == results[1]
    assert results[8] == results[1]


def test_the_capital_of_france_is_paris(export):
    arguments = ["run", str(export("smollm2")), "What is the capital of France?"]
    result = CliRunner().invoke(main, [*arguments, "--chat-template", "--json", "--stats"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "eos"
    assert answer["stats"]["new_tokens"] == len(answer["token_ids"])


@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_turns_of_a_conversation_equal_fresh_prefills(export, attention):
    """The answers' tokens and their last logits, with most of each prompt out of the cache."""
    generator = Generator.open(export("smollm2", attention))
    conversation = Conversation(generator, [{"role": "system", "content": "Be brief, please. 🙂"}])
    params = SamplingParams(max_new_tokens=20)
    run, logits = generator.session.run, []

    def remembered(*arguments, **options):
        logits.append(run(*arguments, **options).copy())
        return logits[-1]

    generator.session.run = remembered
    for text in ("Name three colours of the sky.", "今日は\n\nAnd of the sea?", "Which is best?"):
        ids = [event.token_id for event in conversation.say(text, params)]
        found = logits[-1][0, -1]
        prompt_ids = generator.encode_chat(conversation.messages[:-1])
        events = generator.generate([prompt_ids], params)
        assert ids == [event.token_id for event in events]
        cache = generator.session.new_cache(1, 512)
        fresh = generator.prefill(cache, np.array([[*prompt_ids, *ids[:-1]]]))[0, -1]
        np.testing.assert_allclose(found, fresh, atol=2e-4, rtol=0)
    turn = conversation.turn
    assert turn.cached_tokens > 0.5 * turn.prompt_tokens


def test_standard_and_flash_agree_in_concat_mode_in_plain_onnxruntime(export):
    """Neither uses kvconv's runtime; only the flash bundle needs the op library."""
    ids = np.random.default_rng(5).integers(100, 40_000, (2, 23))
    mask = np.ones_like(ids)
    mask[1, :6] = 0
    standard = _run_concat(export("smollm2", "standard"), ids, mask, library=None)
    flash = _run_concat(export("smollm2"), ids, mask, library=custom_ops.library_path())
    for wanted, found in zip(standard, flash, strict=True):
        valid = mask[:, -wanted.shape[1] :] == 1
        # Twice what either may be off PyTorch.
        np.testing.assert_allclose(found[valid], wanted[valid], atol=4e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "dtype", "part", "most_kl"),
    [
        ("smollm2", "int8", 0.27, 1e-3),
        ("smollm2", "int4", 0.16, 0.03),
        ("gemma3", "int4", 0.16, 0.03),
    ],
)
def test_quantised_cache_is_small_and_close_to_a_float_one(
    export, tmp_path, name, dtype, part, most_kl
):
    """Over the weights of the float32 bundle; one run is compared with chunks and steps as well."""
    whole = export(name)
    manifest = read_manifest(whole)
    graph = read_graph(whole / MODEL_FILE)
    rewrite(graph, attention="flash", opset=23, cache_dtype=dtype)
    write_graph(graph, tmp_path / MODEL_FILE)
    for file in manifest.files.keys() - {MODEL_FILE}:
        (tmp_path / file).hardlink_to(whole / file)
    dataclasses.replace(
        manifest,
        inputs=(*(tensor.name for tensor in graph.inputs), NUM_LOGITS_TO_KEEP),
        outputs=tuple(tensor.name for tensor in graph.outputs),
        files={**manifest.files, MODEL_FILE: file_entry(tmp_path / MODEL_FILE)},
        cache_layers=tuple(
            dataclasses.replace(layer, dtype=dtype) for layer in manifest.cache_layers
        ),
    ).write(tmp_path)
    logits, sizes = [], []
    for bundle in (whole, tmp_path):
        generator = Generator.open(bundle)
        ids = np.array([generator.encode(PROMPTS[-1])])
        cache = generator.session.new_cache(1, ids.size)
        logits.append(generator.session.run(cache, ids, num_logits_to_keep=0)[0])
        sizes.append(cache.nbytes)
    assert sizes[1] < part * sizes[0]
    wanted, found = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in logits)
    kl = (np.exp(wanted) * (wanted - found)).sum(axis=-1).mean()
    assert 0 < kl < most_kl
    cache.reset()
    generator.session.run(cache, ids[:, :-5])
    steps = [
        generator.session.run(cache, ids[:, i : i + 1])[0, -1]
        for i in range(ids.size - 5, ids.size)
    ]
    # Rounded another way, a float may meet the next code: as `kvconv.verify.logits` has it.
    assert np.abs(np.array(steps) - logits[1][-5:]).max() < 0.5 * logits[1].std()


def test_gqa_gives_the_tokens_of_flash(export, tmp_path):
    """The flash bundle's attention becomes gqa's, over the same weights; its other ops stay."""
    flash = export("smollm2")
    manifest = read_manifest(flash)
    graph = read_graph(flash / MODEL_FILE)
    limit = manifest.max_sequence_length
    report = rewrite(graph, attention="gqa", opset=23, max_sequence_length=limit)
    assert report.counts["gqa"] == 30
    assert report.refusals == ()
    write_graph(graph, tmp_path / MODEL_FILE)
    for name in manifest.files:
        if name != MODEL_FILE:
            (tmp_path / name).hardlink_to(flash / name)
    dataclasses.replace(
        manifest,
        attention="gqa",
        inputs=tuple(name for name in manifest.inputs if name != POSITION_IDS),
        files={**manifest.files, MODEL_FILE: file_entry(tmp_path / MODEL_FILE)},
    ).write(tmp_path)
    tokens = []
    for bundle in (flash, tmp_path):
        generator = Generator.open(bundle)
        prompt = generator.encode(PROMPTS[-1])
        events = generator.generate([prompt], SamplingParams(max_new_tokens=16))
        tokens.append([event.token_id for event in events])
    assert tokens[0] == tokens[1]


def test_int4_answers_and_its_weights_are_mapped_once(export):
    """One run touches every weight; the embedding is read twice and must be there once."""
    bundle = export("smollm2", weights="int4")
    manifest = read_manifest(bundle)
    assert manifest.verification.status == "passed"
    assert manifest.quantization.stored_bytes.keys() == {
        "4 bits, blocks of 32",  # the layers, which the file has in such blocks
        "8 bits, blocks of 32",  # the embedding, which it has in 8 bits
    }
    code = f"""
from kvconv.runtime import Bundle, Session
def kilobytes():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]), int(fields["RssFile"].split()[0])
before = kilobytes()
session = Session(Bundle.open({str(bundle)!r}), threads=1)
session.run(session.new_cache(1, 16), [[5]])
print(*(after - start for after, start in zip(kilobytes(), before)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    anonymous, mapped = (1024 * int(number) for number in result.stdout.split())
    weights = manifest.files[WEIGHTS_FILE].size
    assert weights < 1e8
    assert mapped < weights + 20e6  # ONNX Runtime's and our libraries are files as well
    assert anonymous < 25e6


def test_num_logits_to_keep_is_overridable(real):
    _, bundle, _ = real
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(custom_ops.library_path()))
    session = ort.InferenceSession(bundle / "model.onnx", options)
    names = [value.name for value in session.get_overridable_initializers()]
    assert names == [NUM_LOGITS_TO_KEEP]


def test_keeping_one_logit_saves_memory(export):
    peak = {keep: _prefill_peak_mb(export("smollm2"), 2048, keep) for keep in (0, 1)}
    assert peak[0] - peak[1] >= 300, peak


def _run_concat(bundle, ids, mask, library):
    """Prefill 20 tokens, then 2, then 1, with growing concat caches; return each run's logits."""
    manifest = Bundle.open(bundle).manifest
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    if library:
        options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(bundle / "model.onnx", options)
    feeds = {}
    for i, layer in enumerate(manifest.cache_layers):
        shape = (len(ids), layer.num_key_value_heads, 0)
        feeds[past_key(i)] = np.zeros((*shape, layer.key_head_dim), np.float32)
        feeds[past_value(i)] = np.zeros((*shape, layer.value_head_dim), np.float32)
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
    results = []
    for start, end in ((0, 20), (20, 22), (22, 23)):
        feeds |= {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        feeds["position_ids"] = positions[:, start:end]
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        results.append(outputs[LOGITS])
        for i in range(len(manifest.cache_layers)):
            feeds[past_key(i)] = outputs[present_key(i)]
            feeds[past_value(i)] = outputs[present_value(i)]
    return results


def _prefill_peak_mb(bundle, length, keep):
    code = f"""
import numpy as np
from kvconv.memory import peak_rss_mb
from kvconv.runtime import Bundle, Session
session = Session(Bundle.open({str(bundle)!r}), threads=2)
ids = np.random.default_rng(0).integers(100, 40000, (1, {length}))
session.run(session.new_cache(1, {length}), ids, num_logits_to_keep={keep})
print(peak_rss_mb())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return float(result.stdout)


def test_python_example_of_the_readme_prints_what_it_says(export, capsys):
    readme = (ROOT / "README.md").read_text()
    code = readme.partition("```python\n")[2].partition("```")[0]
    assert '"demo/smollm2"' in code
    exec(compile(code.replace('"demo/smollm2"', repr(str(export("smollm2")))), "README", "exec"))
    assert capsys.readouterr().out.strip() == "The capital of France is Paris."
    assert "```\nThe capital of France is Paris.\n```" in readme
