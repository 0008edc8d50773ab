"""Best-first search over continuations, each branch a fork of its parent's cache.

    python examples/tree_search.py --expansions 70

The best leaf is expanded again and again: its most likely next tokens become leaves of their own. A
leaf is scored by the mean log-probability of its tokens and of a greedy look-ahead, which is then
cropped again. Hundreds of branches are alive at a time. The code is the same for both caches,
copy.deepcopy and all; on a PagedCache a copy (a fork) shares every block.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import itertools
import time
import warnings
from dataclasses import dataclass, field

import small_model
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_paged import BlockPool, PagedCache
from hf_paged.report import format_bytes


@dataclass(order=True)
class Leaf:
    """An unexplored branch: it holds the K/V of all its tokens but the last."""

    cost: float  # minus the mean log-probability
    number: int
    tokens: list[int] = field(compare=False)
    log_probability: float = field(compare=False)
    cache: Cache = field(compare=False)


def search(
    model: PreTrainedModel, cache: Cache, prompt: torch.Tensor, arguments: argparse.Namespace
) -> list[Leaf]:
    """Expand the best leaf again and again; the leaves, best first."""
    numbers = itertools.count()
    model(input_ids=prompt[:, :-1], past_key_values=cache, logits_to_keep=1)
    leaves = [Leaf(0.0, next(numbers), prompt[0, -1:].tolist(), 0.0, cache)]
    for _ in tqdm(range(arguments.expansions), desc=type(cache).__name__, leave=False):
        best = heapq.heappop(leaves)
        scores, tokens = next_tokens(model, best.cache, best.tokens[-1]).topk(arguments.width)
        for score, token in zip(scores.tolist(), tokens.tolist(), strict=True):
            branch = copy.deepcopy(best.cache)
            total, grown = best.log_probability + score, [*best.tokens, token]
            ahead = look_ahead(model, branch, token, arguments.look_ahead)
            cost = -(total + ahead) / (len(grown) - 1 + arguments.look_ahead)
            heapq.heappush(leaves, Leaf(cost, next(numbers), grown, total, branch))
    return sorted(leaves)


def next_tokens(model: PreTrainedModel, cache: Cache, token: int) -> torch.Tensor:
    """Log-probabilities of what follows `token`, which is appended to the cache."""
    logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
    return logits[0, -1].log_softmax(-1)


def look_ahead(model: PreTrainedModel, cache: Cache, token: int, steps: int) -> float:
    """The log-probability of the most likely `steps` tokens; the cache is as before."""
    total = 0.0
    for _ in range(steps):
        score, following = next_tokens(model, cache, token).max(-1)
        total, token = total + score.item(), int(following)
    cache.crop(-steps)
    return total


def held_bytes(leaves: list[Leaf]) -> int:
    """Bytes of K and V of all branches together; what branches share counts once."""
    if isinstance(leaves[0].cache, PagedCache):
        pool = leaves[0].cache.pool
        storages = [s for group in pool.groups for s in group.storage.values()]
        return pool.num_used * sum(s.num_bytes for s in storages) // pool.num_blocks
    return sum(
        layer.keys.nbytes + layer.values.nbytes for leaf in leaves for layer in leaf.cache.layers
    )


def main(arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated")
    console = Console()
    model, tokenizer = small_model.load(arguments.model)
    prompt = tokenizer(small_model.sample_text(), return_tensors="pt").input_ids
    prompt = prompt[:, : arguments.prompt_tokens]

    table = Table(title=f"{arguments.expansions} expansions of {arguments.width} branches")
    for heading in ("", "live branches", "K/V held", "seconds"):
        table.add_column(heading, justify="right" if heading else "left")
    found = []
    for attention, cache in (
        ("sdpa", DynamicCache(config=model.config)),
        ("hf_paged", PagedCache(pool=BlockPool(model.config, num_blocks=arguments.num_blocks))),
    ):
        model.set_attn_implementation(attention)
        start = time.perf_counter()
        with torch.no_grad():
            leaves = search(model, cache, prompt, arguments)
        seconds = time.perf_counter() - start
        held = format_bytes(held_bytes(leaves))
        table.add_row(type(cache).__name__, str(len(leaves)), held, f"{seconds:.1f}")
        found.append([leaf.tokens for leaf in leaves[:5]])
        del leaves, cache
    console.print(table)
    console.print(f"The five best branches are {'equal' if found[0] == found[1] else 'NOT equal'}.")
    for tokens in found[1]:
        console.print(repr(tokenizer.decode(tokens[1:])), highlight=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--expansions", type=int, default=70)
    parser.add_argument("--width", type=int, default=4, help="branches of an expanded leaf")
    parser.add_argument("--look-ahead", type=int, default=1, help="greedy tokens in a leaf's score")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument(
        "--num-blocks", type=int, default=512, help="blocks of the PagedCache's pool"
    )
    main(parser.parse_args())
