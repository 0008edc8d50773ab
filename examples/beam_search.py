"""Beam search that stores a prompt once: memory over time and speed, against DynamicCache.

python examples/beam_search.py --beams 8 --prompt-tokens 512
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import small_model
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria

from hf_paged import PagedCache
from hf_paged.report import format_bytes


class Watch(StoppingCriteria):
    """Notes each token's time, and the bytes and blocks that the cache holds then; never stops."""

    def __init__(self, cache: Cache, total: int):
        self.cache, self.bar = cache, tqdm(total=total, desc=type(cache).__name__, leave=False)
        self.start = time.perf_counter()
        self.seconds: list[float] = []
        self.held: list[int] = []
        self.blocks: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seconds.append(time.perf_counter() - self.start)
        self.held.append(held_bytes(self.cache))
        if isinstance(self.cache, PagedCache):
            self.blocks.append(self.cache.report().blocks)
        self.bar.update()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def held_bytes(cache: Cache) -> int:
    """Bytes of K and V that a cache holds."""
    if isinstance(cache, PagedCache):
        return cache.report().bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def search(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, arguments: argparse.Namespace
) -> tuple[torch.Tensor, Watch]:
    """The best beam's ids, and what was seen on the way."""
    watch = Watch(cache, arguments.max_new_tokens)
    if isinstance(cache, PagedCache):
        cache.prefill(model, ids)  # the prompt goes through the model once, not once a beam
    best = model.generate(
        ids,
        past_key_values=cache,
        num_beams=arguments.beams,
        max_new_tokens=arguments.max_new_tokens,
        stopping_criteria=[watch],
    )
    watch.bar.close()
    return best, watch


def main(arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated")
    console = Console()
    model, tokenizer = small_model.load(arguments.model)
    ids = tokenizer(small_model.sample_text(), return_tensors="pt").input_ids
    ids = ids[:, : arguments.prompt_tokens]

    best, watches = [], []
    for attention, kind in (("sdpa", DynamicCache), ("hf_paged", PagedCache)):
        model.set_attn_implementation(attention)
        found, watch = search(model, kind(config=model.config), ids, arguments)
        best.append(found)
        watches.append(watch)

    dynamic, paged = watches
    table = Table(title=f"{arguments.beams} beams, a prompt of {ids.shape[1]} tokens")
    for heading in ("new tokens", "DynamicCache", "PagedCache", "blocks", "saved"):
        table.add_column(heading, justify="right")
    for step in range(0, len(paged.held), max(1, len(paged.held) // 8)):
        saved = 1 - paged.held[step] / dynamic.held[step]
        held = (format_bytes(watch.held[step]) for watch in watches)
        table.add_row(str(step + 1), *held, str(paged.blocks[step]), f"{saved:.0%}")
    console.print(table)
    for name, pick in (("first token", 0), ("all tokens", -1)):
        seconds = [watch.seconds[pick] for watch in watches]
        console.print(
            f"{name}: {seconds[0]:.2f} s on DynamicCache, {seconds[1]:.2f} s on PagedCache "
            f"({seconds[0] / seconds[1]:.1f}x)"
        )
    console.print(str(paged.cache.report()), highlight=False)
    console.print(f"The best beams are {'equal' if torch.equal(*best) else 'NOT equal'}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    main(parser.parse_args())
