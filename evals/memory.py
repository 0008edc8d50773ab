"""What each cache holds over the steps of a generate: bytes, blocks, slots without a token.

    python -m evals.memory            # about 15 minutes on 2 cores
    python -m evals.memory --quick    # under 3 minutes

The same generate runs with each cache, and after each step what the cache holds is counted: K and
V, and what a quantized cache keeps besides. A slot is room for one token of one row; waste is the
share of the slots that hold no token of a row that goes on. Writes memory.json, .md and .png to
evals/results/ (or --out), the bytes and blocks of every step to the .json; the exit status is 1
where a goal is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from tqdm import tqdm
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LogitsProcessor,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import machine_facts, write_results
from examples import small_model
from hf_paged import BlockPool, FreeFinishedRows, PagedCache

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20
GOAL = 0.04  # of the slots of a ragged batch, the useful 96.3% of the PagedAttention paper
GOALS = [  # words of a table's heading, its row, the column that is to be below the goal
    ("prompts of", "PagedCache", "waste, most"),
    ("rows of", "blocks of 16", "waste, worst batch"),
]
RAGGED = [256, 800, 300, 410, 512, 275, 640, 350]
THREE = [(37, 90), (180, 20), (410, 128)]  # tokens of a prompt and of its answer
SIX_BLOCKS = [(25, 1), (47, 1), (12, 1)]  # as many tokens as are in 2, 3 and 1 blocks of 16
MAX_LENGTH = 2048  # what a contiguous cache reserves where it does not know how long answers get
SEED = 0


class Held(NamedTuple):
    """What a cache holds after a step."""

    bytes: int
    slots: int
    tokens: int  # of rows that go on; one that several rows share counts once
    blocks: int | None = None  # of a PagedCache

    @property
    def waste(self) -> float:
        return 1 - self.tokens / self.slots


class Watch(StoppingCriteria):
    """Notes what a cache holds after each step; never stops.

    Args:
        cache: the cache that is passed to generate.
        prompts: tokens of each row's prompt.
        answers: tokens that each row gets, where they differ.
    """

    def __init__(self, cache: Cache, prompts: list[int], answers: list[int] | None = None):
        self.cache, self.prompts, self.answers = cache, prompts, answers
        self.steps: list[Held] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        made = len(self.steps)  # tokens of each answer that are in the cache
        if isinstance(self.cache, PagedCache):
            report = self.cache.report()
            tokens = report.slots - report.wasted_slots
            held = Held(report.bytes, report.slots, tokens, report.blocks)
        else:
            answers = self.answers or [made + 1] * len(self.prompts)
            tokens = sum(
                prompt + made
                for prompt, answer in zip(self.prompts, answers, strict=True)
                if made < answer
            )
            columns = getattr(self.cache.layers[0], "max_cache_len", self.cache.get_seq_length())
            held = Held(kept_bytes(self.cache), columns * len(self.prompts), tokens)
        self.steps.append(held)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class EndRows(LogitsProcessor):
    """Ends each row after as many tokens as are given, and not before.

    Args:
        prompt: columns of the prompts.
        answers: tokens of each row's answer, the one that ends it included.
        eos_token_id: the token that ends a row.
    """

    def __init__(self, prompt: int, answers: list[int], eos_token_id: int):
        self.prompt, self.answers = prompt, torch.tensor(answers)
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = input_ids.shape[1] - self.prompt + 1 >= self.answers
        scores[:, self.eos_token_id] = torch.where(ends, torch.inf, -torch.inf)
        return scores


@dataclass
class Case:
    """A generate to run with each cache."""

    name: str
    prompts: list[int]  # tokens of each prompt
    new: int
    rows: int = 1  # of each prompt
    kwargs: dict[str, Any] = field(default_factory=dict)


def kept_bytes(cache: Cache) -> int:
    """Bytes of all tensors that the layers of a cache keep, each memory once."""
    memories = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in plain_tensors(vars(layer))
    }
    return sum(memories.values())


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest of containers, and those that a tensor subclass is made of."""
    if hasattr(value, "__tensor_flatten__"):
        value = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from plain_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plain_tensors(item)


def caches(config: Any, longest: int) -> dict[str, Callable[[], Cache]]:
    """What makes each cache, StaticCache for rows of `longest` tokens."""
    return {
        "DynamicCache": partial(DynamicCache, config=config),
        "StaticCache": partial(StaticCache, config=config, max_cache_len=longest),
        "QuantizedCache, 8 bits (fp8)": partial(QuantizedCache, "fp8", config),
        "QuantizedCache, 4 bits (quanto)": partial(QuantizedCache, "quanto", config),
        "PagedCache": partial(PagedCache, config=config),
    }


def prompt_ids(tokenizer: Any, lengths: list[int]) -> Any:
    """input_ids and attention_mask of prompts of these lengths, padded on the left."""
    ids = tokenizer(small_model.sample_text()[:60000]).input_ids
    rows = [ids[700 * row : 700 * row + length] for row, length in enumerate(lengths)]
    return tokenizer.pad({"input_ids": rows}, return_tensors="pt")


def watched(model: Any, tokenizer: Any, make: Callable[[], Cache], case: Case) -> list[Held]:
    """What a cache holds after each step of a case."""
    cache = make()
    model.set_attn_implementation("hf_paged" if isinstance(cache, PagedCache) else "sdpa")
    rows = [prompt for prompt in case.prompts for _ in range(case.rows)]
    watch = Watch(cache, rows)
    set_seed(SEED)
    model.generate(
        **prompt_ids(tokenizer, case.prompts),
        past_key_values=cache,
        min_new_tokens=case.new,
        max_new_tokens=case.new,
        stopping_criteria=[watch],
        **case.kwargs,
    )
    return watch.steps


def compared(
    model: Any, tokenizer: Any, case: Case
) -> tuple[list[dict[str, Any]], dict[str, list[Held]]]:
    """A row for each cache, and what each holds after each step."""
    rows, steps = [], {}
    longest = max(case.prompts) + case.new
    for name, make in caches(model.config, longest).items():
        try:
            make()
        except (ImportError, ValueError) as error:  # the backend of a quantized cache
            print(f"{name} is left out: {error}", file=sys.stderr)
            rows.append({"case": f"{name}: not installed", **dict.fromkeys(list(rows[0])[1:], "")})
            continue
        held = steps[name] = watched(model, tokenizer, make, case)
        rows.append(
            {
                "case": name,
                "MiB after the prompt": held[0].bytes / MIB,
                "MiB at the end": held[-1].bytes / MIB,
                "of DynamicCache": held[-1].bytes / steps["DynamicCache"][-1].bytes,
                "blocks at the end": held[-1].blocks,
                "slots at the end": held[-1].slots,
                "waste, mean": statistics.fmean(step.waste for step in held),
                "waste, most": max(step.waste for step in held),
                **by_step(held),
            }
        )
    return rows, steps


def three_requests(
    model: Any, tokenizer: Any, requests: list[tuple[int, int]], max_length: int
) -> tuple[list[dict[str, Any]], dict[str, list[Held]]]:
    """Requests whose answers end one after the other, as an engine's users send them.

    A contiguous cache has to reserve what a request may come to; blocks are taken as tokens come,
    and given back when a row ends.
    """
    prompts, answers = map(list, zip(*requests, strict=True))
    columns, new = max(prompts), max(answers)
    eos = model.generation_config.eos_token_id
    ways: dict[str, Callable[[], Cache]] = {
        f"reserved for max_length={max_length} (StaticCache)": partial(
            StaticCache, config=model.config, max_cache_len=max_length
        ),
        f"reserved for max_new_tokens={new} (StaticCache)": partial(
            StaticCache, config=model.config, max_cache_len=columns + new
        ),
        "padded (DynamicCache)": partial(DynamicCache, config=model.config),
        "blocks (PagedCache, FreeFinishedRows)": partial(PagedCache, config=model.config),
    }
    rows, steps = [], {}
    for name, make in ways.items():
        cache = make()
        criteria: list[StoppingCriteria] = [Watch(cache, prompts, answers)]
        is_paged = isinstance(cache, PagedCache)
        if is_paged:
            criteria.append(FreeFinishedRows(cache, eos))
        model.set_attn_implementation("hf_paged" if is_paged else "sdpa")
        model.generate(
            **prompt_ids(tokenizer, prompts),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=new,
            logits_processor=[EndRows(columns, answers, eos)],
            stopping_criteria=criteria,
        )
        held = steps[name] = criteria[0].steps
        rows.append(
            {
                "case": name,
                "blocks, most": max((step.blocks for step in held if step.blocks), default=None),
                "slots, most": max(step.slots for step in held),
                "MiB, most": max(step.bytes for step in held) / MIB,
                "waste, mean": statistics.fmean(step.waste for step in held),
                "useful, mean": 1 - statistics.fmean(step.waste for step in held),
                **by_step(held),
            }
        )
    return rows, steps


def by_step(held: list[Held]) -> dict[str, list[int | None]]:
    """What was held after each step, for the .json."""
    return {
        "bytes by step": [step.bytes for step in held],
        "blocks by step": [step.blocks for step in held],
    }


def ragged_batches(block_size: int, batches: int, rows: int, new: int) -> dict[str, Any]:
    """Random batches of 256 to 2,048 tokens a row; K/V are small as they do not matter."""
    numbers = random.Random(SEED)
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=2)
    waste: list[float] = []  # of a batch after a step
    most = 0
    for _ in range(batches):
        pool = BlockPool(config, block_size=block_size)
        lengths = [int(256 * 8 ** numbers.random()) for _ in range(rows)]
        batch = [PagedCache(pool=pool, block_size=block_size) for _ in lengths]
        for step in range(new):
            for cache, length in zip(batch, lengths, strict=True):
                cache.update(*torch.zeros(2, 1, 1, length if step == 0 else 1, 2), 0)
            reports = [cache.report() for cache in batch]
            empty = [report.wasted_slots for report in reports]
            waste.append(sum(empty) / sum(report.slots for report in reports))
            most = max(most, *empty)
    assert most < block_size, f"a row wastes {most} slots, more than a block of {block_size}"
    return {
        "case": f"blocks of {block_size}",
        "waste, mean": statistics.fmean(waste),
        "waste, worst batch": max(waste),
        "useful, mean": 1 - statistics.fmean(waste),
        "most slots wasted in a row": most,
    }


def missed(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """A sentence for each ragged batch whose waste is not below the goal."""
    for heading, rows in results.items():
        for batches, case, worst in GOALS:
            for row in rows:
                if batches in heading and row["case"] == case and not row[worst] < GOAL:
                    yield f"{heading}: {case} wastes {row[worst]:.1%}, the goal is {GOAL:.0%}."


def plot(curves: dict[str, dict[str, list[Held]]], path: Path) -> None:
    """MiB over the steps, one panel a case."""
    figure, axes = plt.subplots(1, len(curves), figsize=(5 * len(curves), 4))
    for axis, (title, steps) in zip(axes, curves.items(), strict=True):
        for name, held in steps.items():
            axis.plot([step.bytes / MIB for step in held], label=name)
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("step")
        axis.set_ylabel("MiB of K/V")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def cases(quick: bool) -> Iterable[Case]:
    """A ragged batch, beams and parallel samples."""
    prompts, new = ([256, 300, 280, 350], 16) if quick else (RAGGED, 64)
    shared, rows = (256, 4) if quick else (512, 8)
    ragged = f"{len(prompts)} prompts of {min(prompts)} to {max(prompts)} tokens"
    yield Case(ragged, prompts, new, kwargs={"do_sample": False})
    yield Case(f"{rows} beams on {shared} tokens", [shared], new, rows, {"num_beams": rows})
    yield Case(
        f"{rows} samples of {shared} tokens",
        [shared],
        new,
        rows,
        {"do_sample": True, "num_return_sequences": rows},
    )


def main(arguments: argparse.Namespace) -> int:
    quick = arguments.quick
    model, tokenizer = small_model.load()
    results: dict[str, list[dict[str, Any]]] = {}
    curves: dict[str, dict[str, list[Held]]] = {}
    for case in tqdm(list(cases(quick)), unit="case"):
        results[case.name], curves[case.name] = compared(model, tokenizer, case)
    name = "Three requests, of which each may come to the longest"
    requests = [(prompt, answer // 4) for prompt, answer in THREE] if quick else THREE
    results[name], curves[name] = three_requests(model, tokenizer, requests, MAX_LENGTH)
    name = "Three requests of 25, 47 and 12 tokens"
    results[name], _ = three_requests(model, tokenizer, SIX_BLOCKS, MAX_LENGTH)
    batches = (4, 8, 8) if quick else (32, 16, 32)
    results[f"{batches[0]} random batches of {batches[1]} rows of 256 to 2,048 tokens"] = [
        ragged_batches(size, *batches) for size in tqdm((8, 16, 32, 64), unit="block size")
    ]
    facts = {
        **machine_facts(),
        "waste": "share of the slots that hold no token of a row that goes on",
        "useful, as published": "PagedAttention (2023) reports 96.3% for its blocks and 20.4% to "
        "38.2% for contiguous caches",
    }
    write_results(arguments.out, "memory", "Memory", facts, results)
    plot(curves, arguments.out / "memory.png")
    failures = list(missed(results))
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller cases, under three minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    sys.exit(main(parser.parse_args()))
