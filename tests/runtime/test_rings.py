"""Bundles with rings against those of the same decoder whose caches hold all tokens.

The decoder has windows of 4 tokens, so its rings have 260 slots: 900 tokens wrap them three times.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from kvconv import names
from kvconv.cli import main
from kvconv.errors import BundleError, CacheFullError, RewindError
from kvconv.manifest import RING_SLACK, read_manifest
from kvconv.plan import bundle_sizes, plan
from kvconv.runtime import Bundle, Conversation, Generator, KVCache, SamplingParams, Session
from kvconv.runtime.chat_template import ChatTemplate
from kvconv.runtime.tokenizer import Tokenizer
from scripted_session import collect
from tiny_bundle import VOCAB_SIZE
from tiny_decoders import WINDOW

CAPACITY = WINDOW + RING_SLACK
LENGTH = 900
IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, (2, LENGTH))
ATOL = 3e-5
STRIPS_OLD_TURNS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] "
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:1] }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}[assistant] "
)


class Pair(NamedTuple):
    """Two bundles of one decoder."""

    ring: Generator
    whole: Generator


@pytest.fixture(scope="module")
def folders(made_once: Callable[..., Path], checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    from kvconv.converter import ExportOptions, export

    def fill(folder: Path) -> None:
        model = str(checkpoint("gemma3_text", max_position_embeddings=2000))
        export(model, folder / "ring")
        export(model, folder / "whole", ExportOptions(ring=False))

    folder = made_once("rings", fill)
    return folder / "ring", folder / "whole"


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Pair:
    def open_endless(folder: Path) -> Generator:
        """Open a bundle whose generations end at no token."""
        bundle = Bundle.open(folder)
        manifest = dataclasses.replace(bundle.manifest, eos_token_ids=())
        session = Session(dataclasses.replace(bundle, manifest=manifest), threads=1)
        return Generator(session, Tokenizer.open(bundle))

    return Pair(*map(open_endless, folders))


@pytest.fixture(scope="module")
def wanted(pair: Pair) -> npt.NDArray[np.float32]:
    """Logits of all of IDS, from one run over whole caches."""
    session = pair.whole.session
    return session.run(session.new_cache(2, LENGTH), IDS, num_logits_to_keep=0)


def feed(session: Session, cache: KVCache, ids: npt.NDArray, *sizes: int) -> npt.NDArray:
    """Run ids in pieces of these sizes, over and over; return the logits of all."""
    pieces, start, turn = [], 0, 0
    while start < ids.shape[1]:
        end = min(start + sizes[turn % len(sizes)], ids.shape[1])
        pieces.append(session.run(cache, ids[:, start:end], num_logits_to_keep=0))
        start, turn = end, turn + 1
    return np.concatenate(pieces, axis=1)


def test_manifest_says_which_layers_are_rings_and_what_cannot_drive_them(folders) -> None:
    ring, whole = map(read_manifest, folders)
    windowed, full = ring.cache_layers
    assert (windowed.cache_mode, windowed.capacity, windowed.window_size) == ("ring", 260, 4)
    assert (full.cache_mode, full.capacity, full.window_size) == ("auto", None, None)
    assert names.PAST_SEQUENCE_LENGTH in ring.inputs
    assert ring.op_version == 3
    (note,) = ring.refusals
    assert "optimum" in note
    assert "--no-ring" in note
    assert [layer.cache_mode for layer in whole.cache_layers] == ["auto", "auto"]
    assert names.PAST_SEQUENCE_LENGTH not in whole.inputs
    assert whole.op_version == 2
    assert whole.refusals == ()


@pytest.mark.parametrize("sizes", [(256,), (257,), (1, 3, 17, 64, 31, 128, 257), (1,)], ids=str)
def test_logits_equal_those_of_whole_caches(pair: Pair, wanted, sizes) -> None:
    cache = pair.ring.session.new_cache(2, LENGTH)
    found = feed(pair.ring.session, cache, IDS, *sizes)
    np.testing.assert_allclose(found, wanted, atol=ATOL, rtol=0)


def test_left_padded_batch_equals_that_of_whole_caches(pair: Pair) -> None:
    prompts = [IDS[0, :700].tolist(), IDS[1, :290].tolist(), IDS[1, :3].tolist()]
    params = SamplingParams(max_new_tokens=300)
    found, expected = (collect(generator, prompts, params)[0] for generator in pair)
    assert found == expected
    alone = [collect(pair.ring, [prompt], params)[0][0] for prompt in prompts[1:]]
    assert found[1:] == alone


def test_fork_of_a_wrapped_ring_goes_on_by_itself(pair: Pair, wanted) -> None:
    session = pair.ring.session
    cache = session.new_cache(2, LENGTH)
    feed(session, cache, IDS[:, :700], 200)
    fork = cache.fork()
    feed(session, cache, IDS[:, :200], 200)  # other tokens
    found = feed(session, fork, IDS[:, 700:], 100)
    np.testing.assert_allclose(found, wanted[:, 700:], atol=ATOL, rtol=0)
    fork = fork.fork()
    with pytest.raises(RewindError):
        fork.rewind(LENGTH - RING_SLACK - 2)


@pytest.mark.parametrize("back", [1, 100, RING_SLACK + 1])
def test_rewind_within_the_slack_gives_the_same_logits_again(pair: Pair, wanted, back: int) -> None:
    session = pair.ring.session
    cache = session.new_cache(2, LENGTH)
    feed(session, cache, IDS[:, :600], 256)
    feed(session, cache, (IDS[:, 600:640] + 1) % VOCAB_SIZE, 7)  # tokens that are taken back
    length = 640 - back
    cache.rewind(length)
    kept = min(length, 600)
    cache.rewind(kept)
    found = feed(session, cache, IDS[:, kept:], 250)
    np.testing.assert_allclose(found, wanted[:, kept:], atol=ATOL, rtol=0)


def test_rewind_beyond_the_slack_is_refused_and_says_what_can_be_taken_back(
    pair: Pair, wanted
) -> None:
    session = pair.ring.session
    cache = session.new_cache(2, LENGTH)
    feed(session, cache, IDS[:, :600], 200)
    assert cache.shortest_rewind == 600 - 257
    with pytest.raises(RewindError, match=r"forget 258 of its 600 .* 257 can .* to 343 ") as caught:
        cache.rewind(342)
    assert (caught.value.length, caught.value.shortest) == (342, 343)
    assert cache.length == 600
    cache.rewind(500)
    with pytest.raises(RewindError, match="forget 158 of its 500 .* 157 can"):
        cache.rewind(342)  # what is lost stays lost
    cache.rewind(0)
    assert cache.shortest_rewind == 0
    found = feed(session, cache, IDS[:, :400], 256)
    np.testing.assert_allclose(found, wanted[:, :400], atol=ATOL, rtol=0)


def test_ring_that_has_not_wrapped_can_be_rewound_to_any_length(pair: Pair) -> None:
    session = pair.ring.session
    cache = session.new_cache(2, LENGTH)
    feed(session, cache, IDS[:, :CAPACITY], 200)
    cache.rewind(1)
    feed(session, cache, IDS[:, 1 : CAPACITY + 1], 200)
    assert cache.shortest_rewind == CAPACITY + 1 - RING_SLACK - 1 == WINDOW


def test_run_that_a_ring_cannot_take_is_refused_before_it_runs(pair: Pair) -> None:
    session = pair.ring.session
    cache = session.new_cache(2, LENGTH)
    with pytest.raises(CacheFullError, match="258 new tokens, .* at most 257") as caught:
        session.run(cache, IDS[:, :258])
    assert (caught.value.needed, caught.value.capacity) == (258, 257)
    assert (cache.length, cache.shortest_rewind) == (0, 0)


def test_chunk_that_a_ring_cannot_take_is_refused_at_once(pair: Pair) -> None:
    with pytest.raises(CacheFullError, match="prefill-chunk is 257, .* at most 256 .* --no-ring"):
        Generator(pair.ring.session, pair.ring.tokenizer, prefill_chunk=257)
    with pytest.raises(CacheFullError, match="prefill-chunk is 512"):
        pair.ring.chunk_tokens(1, 900, 512)
    assert pair.ring.chunk_tokens(1, 900) == 256
    assert pair.whole.chunk_tokens(1, 900) == 512


@pytest.mark.parametrize("context", [100, CAPACITY, LENGTH])
def test_buffers_are_what_the_plan_counts(pair: Pair, context: int) -> None:
    planned, whole = (
        plan(bundle_sizes(generator.session.manifest), batch_size=2, context=context)
        for generator in pair
    )
    cache = pair.ring.session.new_cache(2, context)
    assert cache.nbytes == planned.cache_bytes
    # Half of the layers: 2 rows x 2 heads x (8 + 8) x 4 bytes a slot.
    assert whole.cache_bytes - planned.cache_bytes == 256 * max(0, context - CAPACITY)


def test_cache_shorter_than_the_ring_holds_all_and_rewinds_to_any_length(
    pair: Pair, wanted
) -> None:
    session = pair.ring.session
    cache = session.new_cache(2, 100)
    feed(session, cache, IDS[:, :100], 100)
    cache.rewind(10)
    found = feed(session, cache, IDS[:, 10:100], 90)
    np.testing.assert_allclose(found, wanted[:, 10:100], atol=ATOL, rtol=0)


def test_conversation_starts_over_where_a_ring_has_lost_the_past(pair: Pair) -> None:
    """The template cuts old answers, so a turn rewinds to the start of the answer before it."""
    for generator in pair:
        generator.chat_template = ChatTemplate(STRIPS_OLD_TURNS, {"bos_token": "<s>"})
    ring, whole = (Conversation(generator) for generator in pair)
    cached = []
    for text, new_tokens in (("Hi" * 200, 300), ("Who?", 40), ("Why?", 40)):
        params = SamplingParams(max_new_tokens=new_tokens)
        answers = [[e.token_id for e in chat.say(text, params)] for chat in (ring, whole)]
        assert answers[0] == answers[1]
        cached.append((ring.turn.cached_tokens, whole.turn.cached_tokens))
    assert cached[1][0] == 0 < cached[1][1]  # 300 tokens back are too many,
    assert cached[2][0] == cached[2][1] > 0  # 40 are not


def command(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands_drive_rings_and_count_them(folders, tmp_path) -> None:
    ring, whole = folders
    text = command("inspect", ring)
    assert "window 4, a ring of 260 slots" in text
    assert "256 bytes per token and sequence, 128 once rings are full" in text
    (tmp_path / "prompts").write_text(f"{'a' * 700}\n{'b' * 20}\n")
    arguments = ["--prompts", tmp_path / "prompts", "--batch-size", 2, "--max-new-tokens", 300]
    assert command("run", ring, *arguments) == command("run", whole, *arguments)
    depths = ["--depths", 600, "--gen", 20, "--threads", 1, "--json"]
    whats = [json.loads(line)["what"] for line in command("bench", ring, *depths).splitlines()]
    assert whats[0] == "prefill"
    planned = json.loads(command("plan", ring, "--context", 1000, "--json"))
    assert [part["slots"] for part in planned["cache"]] == [260, 1000]


@pytest.mark.parametrize("name", ["run", "plan", "bench"])
def test_commands_refuse_chunks_that_rings_cannot_take(folders, name: str) -> None:
    prompt = ["Hi"] if name == "run" else []
    result = CliRunner().invoke(main, [name, str(folders[0]), *prompt, "--prefill-chunk", "257"])
    assert result.exit_code == 1
    assert "--prefill-chunk is 257, and the ring caches of this bundle take at most 256" in (
        result.stderr
    )


def test_plan_of_the_model_counts_what_each_export_makes(folders, checkpoint) -> None:
    from kvconv.converter.model_sizes import read_sizes

    model = str(checkpoint("gemma3_text", max_position_embeddings=2000))
    for folder, is_ring in zip(folders, (True, False), strict=True):
        planned = read_sizes(
            model, dtype="float32", weights=None, cache_dtype="float32", ring=is_ring
        )
        assert planned.sizes.cache_layers == read_manifest(folder).cache_layers


def test_graph_without_the_length_is_refused_for_a_manifest_with_rings(folders, tmp_path) -> None:
    ring, whole = folders
    folder = Path(shutil.copytree(whole, tmp_path / "bundle"))
    layers = read_manifest(ring).cache_layers
    dataclasses.replace(read_manifest(folder), cache_layers=layers).write(folder)
    with pytest.raises(BundleError, match="differ in past_sequence_length"):
        Session(Bundle.open(folder), threads=1)
