"""`kvconv run`: generate text from a bundle or a model, for one prompt or many."""

import io
import sys
from typing import Any

import click

from kvconv.cli.common import (
    Command,
    cuda_graph_option,
    needs_extra,
    prefill_chunk_option,
    print_status,
    provider_option,
    require_stdout,
    spin_option,
)
from kvconv.cli.generation import generate, print_stats
from kvconv.cli.model_cache import (
    ModelOptions,
    find_bundle,
    kept_bundle_remedy,
    model_options,
)
from kvconv.cli.prompts import read_prompts
from kvconv.cli.sampling_options import sampling_options, sampling_params
from kvconv.cli.text_input import read_stdin, to_text
from kvconv.names import CHAT_TEMPLATE_FILE

_BATCH_SIZE = 8


@click.command(cls=Command)
@click.argument("bundle")
@click.argument("prompt", required=False)
@click.option(
    "--prompts",
    metavar="FILE",
    help="Run all prompts of a file, and print a JSON line for each.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompts of --prompts that run together; changes results by rounding alone. [default: "
    f"{_BATCH_SIZE}]",
)
@click.option("--chat-template", is_flag=True, help="Wrap the prompt as one user turn.")
@click.option("--chat", "is_chat", is_flag=True, help="Hold a conversation; PROMPT begins it.")
@click.option("--system", metavar="TEXT", help="System message of --chat or --chat-template.")
@click.option(
    "--thinking/--no-thinking", default=None,
    help="Let the model think before it answers, or not, where its chat template has the switch; "
    "default: as the template has it.",
)  # fmt: skip
@sampling_options
@model_options
@click.option(
    "--max-sequence-length", type=click.IntRange(min=1), metavar="N",
    help="Most tokens in the cache, prompt included; default: what the model holds.",
)  # fmt: skip
@prefill_chunk_option
@click.option(
    "--threads", type=click.IntRange(1, 256), envvar="KVCONV_THREADS", show_envvar=True,
    metavar="N", help="Threads; default: one per core.",
)  # fmt: skip
@spin_option
@provider_option
@cuda_graph_option
@click.option(
    "--use-bundle-library", is_flag=True,
    help="Run the op library inside the bundle: code from whoever made it.",
)  # fmt: skip
@click.option("--stats", is_flag=True, help="Print speed and memory to stderr (or into the JSON).")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON line (a turn) instead of streaming."
)
def command(
    bundle: str,
    prompt: str | None,
    prompts: str | None,
    batch_size: int | None,
    chat_template: bool,
    is_chat: bool,
    system: str | None,
    thinking: bool | None,
    dtype: Any,
    revision: str | None,
    trust_remote_code: bool,
    max_sequence_length: int | None,
    prefill_chunk: int | None,
    threads: int | None,
    spin: bool,
    provider: Any,
    cuda_graph: bool,
    use_bundle_library: bool,
    stats: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text that continues PROMPT, with the model in BUNDLE.

    PROMPT is raw text; '-' reads it from standard input, less one final newline. Text streams to
    stdout, everything else goes to stderr.

    \b
    kvconv run smollm2 "What is the capital of France?" --chat-template
    kvconv run smollm2 - --temperature 0.7 --top-p 0.9 --seed 1 < prompt.txt
    kvconv run smollm2 --chat --system "Answer in one sentence."
    kvconv run smollm2 --prompts questions.jsonl --batch-size 16 > answers.jsonl
    kvconv run HuggingFaceTB/SmolLM2-135M-Instruct "Once upon a time"

    --chat reads one turn a line, from a terminal or not; a line that ends in a backslash goes on
    in the next. Each turn runs only its new tokens. Ctrl-C stops an answer, Ctrl-D leaves, /help
    lists the commands. Input that is not a terminal ends at the first turn that is refused.

    BUNDLE may also be a model as `kvconv export` takes it. It is exported the first time, and the
    bundle is kept in ~/.cache/kvconv/bundles (below XDG_CACHE_HOME, or the folder that
    KVCONV_BUNDLES names), from where it may be removed at any time; `kvconv doctor` shows its size.
    A folder or file that changed is exported again. A hub model is not asked for news: to get
    a later commit, give it as --revision.

    --prompts FILE ('-' is standard input) runs many. If the first line begins with '{', each line
    is a JSON object with a `prompt` or `messages`, and, where they differ from the options,
    max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop; an `id` comes
    back with the result. Otherwise each line is a prompt. Blank lines count for nothing. The
    results are JSON lines in the order of the prompts, as --json prints them, with an `index` from
    0. With --seed N, the prompt of index i is run like a single one with seed N + i.
    """  # noqa: D301 - click wants the control character that \b stands for
    if (prompts is None) == (prompt is None and not is_chat):
        raise click.UsageError("Give either a PROMPT (or --chat) or --prompts FILE.")
    if batch_size is not None and prompts is None:
        raise click.UsageError("--batch-size is for --prompts.")
    if (system, thinking) != (None, None) and (prompts or not (is_chat or chat_template)):
        raise click.UsageError("--system and --thinking are for --chat or PROMPT --chat-template.")
    _prepare_stdout()
    with needs_extra("cpu"):
        from kvconv.runtime import Conversation, Generator
    params = sampling_params(sampling)
    # Before an export, which takes long.
    many = None if prompts is None else read_prompts(prompts, params)
    text = to_text("Standard input", read_stdin()).removesuffix("\n") if prompt == "-" else prompt
    path = find_bundle(bundle, ModelOptions(dtype, revision, trust_remote_code))
    with kept_bundle_remedy(bundle, path):
        generator = Generator.open(
            path,
            max_sequence_length=max_sequence_length,
            threads=threads,
            provider=provider,
            use_bundle_library=use_bundle_library,
            prefill_chunk=prefill_chunk,
            spin=spin,
            cuda_graph=cuda_graph,
        )
    if many is not None:
        from kvconv.cli.batch import run_prompts

        run_prompts(
            generator,
            many,
            batch_size=batch_size or _BATCH_SIZE,
            chat_template=chat_template,
            with_stats=stats,
        )
        return
    variables = {} if thinking is None else generator.chat_template.thinking(thinking)
    messages = [] if system is None else [{"role": "system", "content": system}]
    if is_chat:
        from kvconv.cli.chat import Chat  # brings a terminal's editing and colours

        conversation = Conversation(generator, messages, variables)
        Chat(conversation, params, as_json=as_json, with_stats=stats).run(text)
        return
    assert text is not None
    if chat_template:
        messages.append({"role": "user", "content": text})
        prompt_ids = generator.encode_chat(messages, variables)
    else:
        prompt_ids = generator.encode(text)
    answer, took = generate(generator, prompt_ids, params, is_streamed=not as_json)
    is_empty = not answer.text and answer.finish_reason == "eos"
    if is_empty and not chat_template and (path / CHAT_TEMPLATE_FILE).exists():
        print_status("The model ended at once. With --chat-template it takes PROMPT as a question.")
    if as_json:
        answer.print_json(text, took if stats else None)
    else:
        click.echo()
        if stats:
            print_stats(answer, took)


def _prepare_stdout() -> None:
    """Let any text be written to stdout; a terminal that lacks a character shows `?`.

    Raises:
        KvconvError: There is no stdout.
    """
    require_stdout()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
