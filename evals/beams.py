"""Beam search: blocks saved, steps a second, time to first token, against DynamicCache.

    python evals/beams.py            # about 20 minutes on 2 cores
    python evals/beams.py --quick    # under 3 minutes

Both caches run the same generate in turn; the PagedCache's prompt is prefilled first (one row for
all beams). Writes beams.json, .md and .png to evals/results/ (or --out).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, StoppingCriteria

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import alternate, machine_facts, write_results
from examples import small_model
from hf_paged import PagedCache

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TITLE = "Beam search, against DynamicCache"


class Clock(StoppingCriteria):
    """Notes when each token is there; never stops."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def run(model: Any, cache: Any, ids: torch.Tensor, beams: int, new: int) -> tuple[Any, list[float]]:
    """The best beam, and the seconds until each token."""
    model.set_attn_implementation("hf_paged" if isinstance(cache, PagedCache) else "sdpa")
    clock = Clock()
    if isinstance(cache, PagedCache):
        cache.prefill(model, ids)
    best = model.generate(
        ids,
        past_key_values=cache,
        num_beams=beams,
        min_new_tokens=new,
        max_new_tokens=new,
        stopping_criteria=[clock],
    )
    return best, [t - clock.times[0] for t in clock.times[1:]]


def compare(model: Any, ids: torch.Tensor, beams: int, new: int) -> dict[str, Any]:
    expected, theirs = run(model, DynamicCache(config=model.config), ids, beams, new)
    cache = PagedCache(config=model.config)
    found, mine = run(model, cache, ids, beams, new)
    blocks = cache.pool.stats()["peak_used"]
    unshared = beams * -(-(ids.shape[1] + new - 1) // cache.pool.block_size)
    return {
        "case": f"{beams} beams, prompt {ids.shape[1]}",
        "equal": torch.equal(found, expected),
        "peak blocks": blocks,
        "unshared": unshared,
        "saved": 1 - blocks / unshared,
        "MiB": cache.report().bytes / 2**20,
        "dynamic MiB": cache.report().dense_bytes / 2**20,
        "steps/s": (new - 1) / (mine[-1] - mine[0]),
        "dynamic steps/s": (new - 1) / (theirs[-1] - theirs[0]),
        "first token x": theirs[0] / mine[0],
        "whole x": theirs[-1] / mine[-1],
    }


def moves(rows: int, tokens: int) -> list[dict[str, Any]]:
    """Forks and reorders, which move table entries only; K/V are small as they do not matter."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=8)
    one, many = (PagedCache(config=config, share_prompts=False) for _ in range(2))
    one.update(*torch.randn(2, 1, 1, tokens, 8), 0)
    many.update(*torch.randn(2, rows, 1, tokens, 8), 0)
    before = one.pool.num_used
    order = torch.randint(0, rows, (rows,))
    forks: list[PagedCache] = []
    fork, reorder = alternate(
        200, lambda: forks.append(one.fork()), lambda: many.reorder_cache(order)
    )
    assert one.pool.num_used == before
    return [
        {"case": f"fork of {tokens} tokens", "ms": fork * 1e3},
        {"case": f"reorder of {rows} rows of {tokens} tokens", "ms": reorder * 1e3},
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    labels = [row["case"].replace(" beams, prompt", " x") for row in rows]
    axes[0].bar(labels, [row["saved"] for row in rows])
    axes[0].set_ylabel("share of blocks saved")
    axes[1].bar(labels, [row["whole x"] for row in rows])
    axes[1].axhline(1, color="grey")
    axes[1].set_ylabel("times as fast as DynamicCache")
    for axis in axes:
        axis.tick_params(axis="x", rotation=60)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, tokenizer = small_model.load()
    text = small_model.sample_text()[:30000]
    ids = tokenizer(text, return_tensors="pt").input_ids
    cases = (
        [(4, 128), (4, 512)]
        if arguments.quick
        else [(beams, prompt) for prompt in (128, 512, 2048) for beams in (2, 4, 6, 8)]
    )
    run(model, PagedCache(config=model.config), ids[:, :32], 2, 2)  # warm up
    rows = [
        compare(model, ids[:, :prompt], beams, 32) for beams, prompt in tqdm(cases, unit="case")
    ]
    results = {TITLE: rows, "Moves": moves(64, 4096)}
    write_results(arguments.out, "beams", "Beam search", machine_facts(), results)
    plot(rows, arguments.out / "beams.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cases, under three minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    main(parser.parse_args())
