"""The same answers with a DynamicCache and with a PagedCache: speed, first token, memory.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen2.5-0.5B-Instruct --max-new-tokens 64

Six questions of different lengths about one handbook (handbook.txt) are answered as one batch, in
three ways. All are warmed up before they are timed, and they take turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # to import these takes seconds, so it waits until the arguments are read
    import torch
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from hf_paged import CacheReport

HANDBOOK = Path(__file__).with_name("handbook.txt")
QUESTIONS = [
    "When is the library open?",
    "Can I reserve a hammer?",
    "How much does a membership cost for a student?",
    "What do I need if I want to borrow a chainsaw?",
    "My drill is four days late. What does that cost, and is there a limit to what I have to pay?",
    "I would like to have the wood splitter on a Saturday. How many days ahead must I reserve it, "
    "and until when will it be kept for me on that day?",
]
ROUNDS = 2  # timed runs of each way
LINE = "{:<26}{:>10}{:>14}{:>12}"


# -- the three ways --------------------------------------------------------------------------------


def dynamic_cache(model: PreTrainedModel, inputs: Any, beginning: torch.Tensor) -> Cache:
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    return DynamicCache(config=model.config)


def paged_cache(model: PreTrainedModel, inputs: Any, beginning: torch.Tensor) -> Cache:
    from hf_paged import PagedCache

    model.set_attn_implementation("hf_paged")
    return PagedCache(config=model.config)


def paged_cache_of_pool(model: PreTrainedModel, inputs: Any, beginning: torch.Tensor) -> Cache:
    """Compute what the prompts begin with once; the cache of the batch then holds it already."""
    from hf_paged import BlockPool, PagedCache

    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model)
    with PagedCache(pool=pool) as first:
        first.prefill(model, beginning)
        pool.insert_prefix(first, beginning)
    return pool.match_prefix(**inputs)


WAYS = {
    "DynamicCache": dynamic_cache,
    "PagedCache": paged_cache,
    "PagedCache, match_prefix": paged_cache_of_pool,
}


class Run(NamedTuple):
    """One generate.

    Attributes:
        ids: int64 [rows, prompt + new], the prompts and the answers.
        first_token, seconds: the time until all rows have their first token, and the whole time.
        held: bytes of K and V at the end.
        report: the same and more of a PagedCache, None of another.
    """

    ids: torch.Tensor
    first_token: float
    seconds: float
    held: int
    report: CacheReport | None


def run(
    make_cache: Callable[..., Cache],
    model: PreTrainedModel,
    inputs: Any,
    beginning: torch.Tensor,
    max_new_tokens: int,
    on_token: Callable[[], object],
) -> Run:
    """Answer the prompts with a new cache; what it takes to make the cache is timed too."""
    import torch

    from hf_paged import PagedCache

    times = []

    def note_time(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """A stopping criterion that never stops: generate calls it behind each token."""
        input_ids[:, -1].tolist()  # waits until a GPU has computed it
        times.append(time.perf_counter())
        on_token()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    start = time.perf_counter()
    cache = make_cache(model, inputs, beginning)
    ids = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        stopping_criteria=[note_time],
    )
    seconds = time.perf_counter() - start
    if isinstance(cache, PagedCache):
        report = cache.report()
        held = report.bytes
    else:
        report = None
        held = sum(states.nbytes for layer in cache for states in layer[:2] if states is not None)
    return Run(ids, times[0] - start, seconds, held, report)


# -- prompts ---------------------------------------------------------------------------------------


def read_prompts(path: Path | None) -> list[str]:
    """The lines of a file; without one the questions, each behind the handbook.

    Raises:
        ValueError, OSError: the file cannot be read or holds no prompt.
    """
    if path is None:
        handbook = HANDBOOK.read_text(encoding="utf-8")
        return [f"{handbook}\n{question}" for question in QUESTIONS]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8.") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt (one a line).")
    return prompts


def token_ids(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    """Token ids of each prompt: as a user's message if the model chats, or else as it is."""
    if tokenizer.chat_template is None:
        return tokenizer(prompts).input_ids
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    return tokenizer(texts, add_special_tokens=False).input_ids


def batch(tokenizer: PreTrainedTokenizerBase, prompts: list[str], room: int | None) -> tuple:
    """(inputs, beginning): a batch padded on the left, and int64 [1, tokens], what all begin with.

    Args:
        room: the most tokens that a prompt may have, None if any number.

    Raises:
        ValueError: a prompt is too long, or the prompts have no beginning in common.
    """
    import torch

    rows = token_ids(tokenizer, prompts)
    longest = max(map(len, rows))
    if room is not None and longest > room:
        raise ValueError(
            f"A prompt has {longest} tokens, but besides --max-new-tokens the model takes {room}."
        )
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    beginning = [column[0] for column in alike]
    if len(beginning) < 2:
        raise ValueError("The prompts begin with different tokens, so there is nothing to share.")
    print(
        f"{len(rows)} prompts of {min(map(len, rows))} to {longest} tokens; the first "
        f"{len(beginning)} are the same in all."
    )
    return tokenizer.pad({"input_ids": rows}, return_tensors="pt"), torch.tensor([beginning])


# -- the comparison --------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace) -> int:
    """Load, warm up, time and print; 1 if the ways differ in float32, else 0.

    Raises:
        ValueError, OSError: an argument is wrong.
    """
    prompts = read_prompts(arguments.prompts)

    import small_model
    import torch
    from tqdm import tqdm
    from transformers.utils import logging

    # Newer versions of transformers have renamed generate's argument to `cache`; both work.
    warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated")
    logging.disable_progress_bar()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used: {error}") from None
    print(f"Loading {arguments.model or small_model.HUB_NAME} ({arguments.dtype}, {device}) ...")
    try:
        model, tokenizer = small_model.load(
            arguments.model, dtype=getattr(torch, arguments.dtype), device=device
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {arguments.model} cannot be loaded: {error}") from None
    new, room = arguments.max_new_tokens, getattr(model.config, "max_position_embeddings", None)
    inputs, beginning = batch(tokenizer, prompts, None if room is None else room - new)
    inputs, beginning = inputs.to(device), beginning.to(device)

    print("Warming up: kernels are compiled once, and then kept on disk ...", flush=True)
    ids = beginning[:, :32].repeat(len(prompts), 1)
    short = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for make_cache in WAYS.values():
        run(make_cache, model, short, beginning[:, :16], 2, lambda: None)

    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    with tqdm(total=ROUNDS * len(WAYS) * new, unit="step", disable=None, leave=False) as bar:
        for _ in range(ROUNDS):
            for name, make_cache in WAYS.items():
                bar.set_description(name)
                runs[name].append(run(make_cache, model, inputs, beginning, new, bar.update))

    expected = runs["DynamicCache"][0].ids
    answers = expected[:, inputs["input_ids"].shape[1] :]
    shown = QUESTIONS if arguments.prompts is None else prompts
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    for question, text in zip(shown, texts, strict=True):
        print(f"\n> {question}\n{' '.join(text.split())}")
    if arguments.model is None:
        print("\n(So small a model is often wrong. What is compared here is the caches.)")
    end = model.generation_config.eos_token_id
    is_end = torch.isin(answers, torch.tensor([] if end is None else end, device=device)).long()
    print_table(runs, tokens=int((is_end.cumsum(1) == is_end).sum()))  # no padding behind an end

    if all(torch.equal(run.ids, expected) for own in runs.values() for run in own):
        print("All runs gave the same tokens.")
        return 0
    print("The runs did NOT give the same tokens.")
    if arguments.dtype == "float32":
        return 1
    print(f"In {arguments.dtype} rounding may decide which of two likely tokens comes next.")
    return 0


def print_table(runs: dict[str, list[Run]], tokens: int) -> None:
    """What each way took and holds; `tokens` is how many one run has generated."""
    from hf_paged.report import format_bytes

    print("\n" + LINE.format("", "tokens/s", "first token", "K/V held"))
    for name, own in runs.items():
        speed = tokens * len(own) / sum(run.seconds for run in own)
        first_token = sum(run.first_token for run in own) / len(own)
        held = format_bytes(own[-1].held)
        print(LINE.format(name, f"{speed:.1f}", f"{first_token:.2f} s", held))
    print(
        f"\nMeans of {ROUNDS} runs of each way, in turn; the time for the prompts is counted too.\n"
        "PagedCache is the same call with another cache: what all prompts begin with is stored\n"
        "once, but computed in each row. With match_prefix it is computed once, too.\n"
        f"\n{runs['PagedCache'][-1].report}"
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--max-new-tokens", type=positive, default=32, metavar="N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    arguments = parser.parse_args()
    try:
        return compare(arguments)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"quickstart.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
