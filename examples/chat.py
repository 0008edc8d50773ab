"""A chat in the terminal whose history stays in a pool, so that a turn computes only what is new.

    python examples/chat.py
    printf 'Hello!\nTell me more.\n' | python examples/chat.py --max-new-tokens 32

/new begins another conversation; /quit, or the end of the input, leaves.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import small_model
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_paged import BlockPool


class Printer(TextStreamer):
    """Prints an answer while it comes and notes how long its first token took, in seconds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console
        self.start = time.perf_counter()
        self.first_token: float | None = None

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt and self.first_token is None:
            self.first_token = time.perf_counter() - self.start
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        end = "\n" if stream_end else ""
        self.console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)


def next_prompt(
    tokenizer: PreTrainedTokenizerBase, history: list[int], message: str, system: str | None = None
) -> list[int]:
    """Token ids of a conversation with the user's next message.

    The ids of `history` are kept as they are. To tokenize the whole text again could give other
    ids for an answer than those that were generated, and the pool knows only these.

    Args:
        history: ids of the last prompt and its answer; none at the beginning.

    Raises:
        ValueError: the chat template rewrites what was said before.
    """

    def render(*turns: str) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        for turn, content in enumerate(turns):
            messages.append({"role": "assistant" if turn % 2 else "user", "content": content})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    if not history:
        return encode(render(message))
    # What the template puts behind an answer, found with something short in the history's place.
    before, text = render("?") + ".", render("?", ".", message)
    if not text.startswith(before):
        raise ValueError("The chat template rewrites earlier turns, so they cannot be kept.")
    added = encode(text[len(before) :])
    has_ended = history[-1] == added[0]  # or max_new_tokens has cut the answer off
    return history + added[has_ended:]


def answer(
    model: PreTrainedModel, pool: BlockPool, prompt: list[int], **kwargs: Any
) -> tuple[list[int], int]:
    """The prompt with its answer, which the pool then knows, and how many tokens it knew before."""
    ids = torch.tensor([prompt], device=model.device)
    with pool.match_prefix(ids) as cache:
        reused = cache.get_seq_length()
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            **kwargs,
        )
        pool.insert_prefix(cache, sequences)
    return sequences[0].tolist(), reused


def read_message(console: Console) -> str | None:
    """The user's next message, None at the end of the input."""
    try:
        message = console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    if not sys.stdin.isatty():
        console.print(message, markup=False, highlight=False, soft_wrap=True)
    return None if message == "/quit" else message


def main(arguments: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated")
    console = Console()
    console.print(f"Loading {arguments.model or small_model.HUB_NAME} ...")
    try:
        model, tokenizer = small_model.load(arguments.model, device=arguments.device)
    except OSError as error:
        console.print(f"[red]There is no model {arguments.model!r}:[/red] {error}", soft_wrap=True)
        return 1
    if tokenizer.chat_template is None:
        console.print("[red]This model has no chat template; take an instruct model.[/red]")
        return 1
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model, max_memory=arguments.max_memory)
    history: list[int] = []
    while (message := read_message(console)) is not None:
        if message == "/new":
            history = []
        if message in ("", "/new"):
            continue
        prompt = next_prompt(tokenizer, history, message, arguments.system)
        if len(prompt) + arguments.max_new_tokens > model.config.max_position_embeddings:
            console.print(
                "[red]The conversation is too long for the model;[/red] begin a /new one."
            )
            continue
        printer = Printer(tokenizer, console)
        try:
            history, reused = answer(
                model, pool, prompt, streamer=printer, max_new_tokens=arguments.max_new_tokens
            )
        except KeyboardInterrupt:
            console.print("\n[red]Stopped;[/red] this message is forgotten.")
            continue
        console.print(
            f"[dim]reused {reused} of {len(prompt)} tokens, first token after "
            f"{printer.first_token:.2f} s, {len(history) - len(prompt)} tokens in "
            f"{time.perf_counter() - printer.start:.2f} s[/dim]",
            highlight=False,
            soft_wrap=True,
        )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--system", help="what the model is told before the first message")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-memory", default="1GiB", help="of the pool; then it forgets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sys.exit(main(parser.parse_args()))
