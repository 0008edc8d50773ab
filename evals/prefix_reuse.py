"""Prompts reused across calls: few-shot questions, a chat, and what the index itself costs.

    python evals/prefix_reuse.py            # about 8 minutes on 2 cores
    python evals/prefix_reuse.py --quick    # under 2 minutes

Every way answers a question in turn, with the same generate (greedy, as many new tokens), and the
answers must be equal. Tokens are counted by a hook on the model. Writes prefix_reuse.json, .md and
.png to evals/results/ (or --out); the exit status is 1 where answers differ or a goal is missed.
Goals are for the whole run only: with --quick there is less to reuse.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import small_model
from chat import next_prompt

from evals.beams import Clock
from evals.common import Rows, alternate, machine_facts, write_results
from hf_paged import BlockPool, PagedCache

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20
BATCHES_GOAL = 5  # times the questions/s of DynamicCache, in batches
COPIES_GOAL = 0.1  # of the K/V bytes that deep copies keep
INDEX_GOAL = 1  # percent of the time
MATCH_GOAL = 2  # ms
MESSAGES = [  # of the chat
    "Hello! I would like to learn about the sea.",
    "Why is it salty?",
    "And why are lakes not salty, then?",
    "What lives at the very bottom?",
    "How deep is it there, in kilometres?",
    "Has anybody been there?",
    "What did they travel in?",
    "How thick are the walls of such a vessel?",
    "Let us talk about whales instead. Which one is the largest?",
    "What does it eat?",
    "How much of that in a day?",
    "Do whales sleep?",
    "How long can they hold their breath?",
    "Which whales sing, and why?",
    "Could one hear that from a boat?",
    "What is the oldest animal in the sea?",
    "And the oldest plant?",
    "Name three seas that begin with a B.",
    "Which of them is the coldest?",
    "Thank you. Please sum up what we spoke about.",
]


class Tokens:
    """Counts the tokens, padding included, that go through a model while it is open."""

    def __init__(self, model: Any):
        self.body, self.count = model.base_model, 0

    def __enter__(self) -> Tokens:
        self.hook = self.body.register_forward_pre_hook(self._add, with_kwargs=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self.hook.remove()

    def _add(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.count += kwargs["input_ids"].numel()


class Recompute:
    """A new DynamicCache for every prompt."""

    name, attention = "DynamicCache", "sdpa"

    def __init__(self, model: Any):
        self.model = model
        self.kept_bytes = 0  # K/V of all caches so far, had they been kept
        self.index_seconds = 0.0

    def begin(self, inputs: dict[str, torch.Tensor]) -> Cache:
        return DynamicCache(config=self.model.config)

    def end(self, cache: Cache, sequences: torch.Tensor) -> None:
        self.kept_bytes += dynamic_bytes(cache)


class DeepCopy(Recompute):
    """transformers' own recipe: the prefix computed once, and the cache copied for every prompt."""

    name = "copy.deepcopy"

    def __init__(self, model: Any, prefix: list[int]):
        super().__init__(model)
        self.prefix = torch.tensor([prefix])
        self.cache: DynamicCache | None = None

    def begin(self, inputs: dict[str, torch.Tensor]) -> Cache:
        if self.cache is None:
            self.cache = DynamicCache(config=self.model.config)
            with torch.no_grad():
                self.model(input_ids=self.prefix, past_key_values=self.cache, logits_to_keep=1)
            self.kept_bytes += dynamic_bytes(self.cache)
        return copy.deepcopy(self.cache)


class Index(Recompute):
    """The prefix index of a BlockPool."""

    name, attention = "prefix index", "hf_paged"

    def __init__(self, model: Any, num_blocks: int):
        super().__init__(model)
        self.pool = BlockPool(model, num_blocks=num_blocks)

    def begin(self, inputs: dict[str, torch.Tensor]) -> Cache:
        start = time.perf_counter()
        cache = self.pool.match_prefix(**inputs)
        self.index_seconds += time.perf_counter() - start
        return cache

    def end(self, cache: Cache, sequences: torch.Tensor) -> None:
        assert isinstance(cache, PagedCache)
        start = time.perf_counter()
        self.pool.insert_prefix(cache, sequences)
        self.index_seconds += time.perf_counter() - start
        storages = [s for group in self.pool.groups for s in group.storage.values()]
        blocks = self.pool.num_blocks - self.pool.num_free
        self.kept_bytes = blocks * sum(s.num_bytes for s in storages) // self.pool.num_blocks
        cache.free()


class Trial:
    """Prompts answered in one way: their answers, and what they took."""

    def __init__(self, way: Recompute, new: int):
        self.way, self.new = way, new
        self.answers: list[torch.Tensor] = []
        self.prompts = 0
        self.seconds: list[float] = []  # of each generate and what is around it
        self.first: list[float] = []  # until the first token
        self.forwarded: list[int] = []  # tokens

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        model = self.way.model
        model.set_attn_implementation(self.way.attention)
        with Tokens(model) as tokens:
            clock = Clock()
            cache = self.way.begin(inputs)
            sequences = model.generate(
                **inputs,
                past_key_values=cache,
                do_sample=False,
                min_new_tokens=self.new,
                max_new_tokens=self.new,
                stopping_criteria=[clock],
            )
            self.way.end(cache, sequences)
            self.seconds.append(time.perf_counter() - clock.times[0])
        self.first.append(clock.times[1] - clock.times[0])
        self.forwarded.append(tokens.count)
        self.prompts += len(sequences)
        self.answers.append(sequences)
        return sequences

    def row(self, baseline: Trial) -> dict[str, Any]:
        stats = self.way.pool.stats() if isinstance(self.way, Index) else None
        return {
            "case": self.way.name,
            "equal": all(map(torch.equal, self.answers, baseline.answers)),
            "tokens forwarded": sum(self.forwarded),
            "hit rate": stats["hits"] / (stats["hits"] + stats["misses"]) if stats else 0.0,
            "questions/s": self.prompts / sum(self.seconds),
            "x": sum(baseline.seconds) / sum(self.seconds),
            "first token ms": statistics.median(self.first) * 1e3,
            "K/V MiB": self.way.kept_bytes / MIB,
            "K/V of it": self.way.kept_bytes / baseline.way.kept_bytes,
            "index %": 100 * self.way.index_seconds / sum(self.seconds),
        }


def dynamic_bytes(cache: Cache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def inputs_of(ids: list[int]) -> dict[str, torch.Tensor]:
    input_ids = torch.tensor([ids])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def few_shot_prompts(tokenizer: Any, tokens: int, questions: int) -> tuple[list[int], list]:
    """A prefix of about `tokens` tokens of solved sums, and unsolved ones as ids behind it."""
    numbers = random.Random(0)
    prefix = tokenizer("Solve each sum.\n\n").input_ids

    def question() -> tuple[str, int]:
        a, b = (numbers.randint(1, 10 ** numbers.randint(1, 4)) for _ in range(2))
        return f"Question: What is {a} plus {b}?\nAnswer:", a + b

    while len(prefix) < tokens:
        text, result = question()
        prefix += tokenizer(f"{text} {result}\n\n").input_ids
    return prefix, [tokenizer(question()[0]).input_ids for _ in range(questions)]


def fewest_tokens(prompts: list[list[int]], sequences: list[torch.Tensor]) -> int:
    """What must be forwarded if everything computed before is reused, to the token."""
    total, known = 0, []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        common = max((common_prefix(prompt, other) for other in known), default=0)
        computed = sequence[0, :-1].tolist()
        total += len(computed) - min(common, len(prompt) - 1)
        known.append(computed)
    return total


def common_prefix(a: list[int], b: list[int]) -> int:
    return next(
        (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def few_shot(model: Any, prefix: list[int], questions: list, new: int) -> Rows:
    """One question at a time, each way in turn."""
    prompts = [prefix + question for question in questions]
    longest = -(-(max(map(len, prompts)) + new) // 16)
    ways = [Recompute(model), DeepCopy(model, prefix), Index(model, longest + 8 * len(prompts))]
    trials = [Trial(way, new) for way in ways]
    for prompt in tqdm(prompts, desc="few-shot", unit="question", leave=False):
        for trial in trials:
            trial.run(inputs_of(prompt))
    bound = len(prefix) + sum(len(question) + new - 1 for question in questions)
    fewest = fewest_tokens(prompts, trials[-1].answers)
    forwarded = sum(trials[-1].forwarded)
    assert forwarded == fewest <= bound, (forwarded, fewest, bound)
    return [trial.row(trials[0]) for trial in trials]


def batched(model: Any, prefix: list[int], questions: list, new: int, rows: int) -> Rows:
    """Ragged batches as pool.batches makes them, the first question alone so that all know it."""
    prompts = [prefix + question for question in questions]
    longest = -(-(max(map(len, prompts)) + new) // 16)
    index = Index(model, (rows + 2) * (longest + 1))
    trials = [Trial(Recompute(model), new), Trial(index, new)]
    batches = [
        inputs_of(prompts[0]),
        *(batch.inputs for batch in index.pool.batches(prompts[1:], new, max_prompts=rows)),
    ]
    for inputs in tqdm(batches, desc="batched", unit="batch", leave=False):
        for trial in trials:
            trial.run(inputs)
    return [trial.row(trials[0]) for trial in trials]


def chat(model: Any, tokenizer: Any, messages: list[str], new: int) -> Rows:
    """A turn a row, against the whole history computed again."""
    index = Index(model, 64 * (len(messages) + 1))
    dynamic, paged = (Trial(way, new) for way in (Recompute(model), index))
    rows, history = [], []
    for number, message in enumerate(tqdm(messages, desc="chat", unit="turn", leave=False), 1):
        prompt, before = next_prompt(tokenizer, history, message), index.index_seconds
        known = index.pool.stats()["matched_tokens"]
        expected, found = (trial.run(inputs_of(prompt))[0].tolist() for trial in (dynamic, paged))
        # A turn's last token goes through the model at the beginning of the next one.
        fresh = len(found) - len(history) - (not history)
        assert paged.forwarded[-1] == fresh, (paged.forwarded[-1], fresh)
        rows.append(
            {
                "case": f"turn {number}",
                "equal": found == expected,
                "prompt": len(prompt),
                "hit rate": (index.pool.stats()["matched_tokens"] - known) / len(prompt),
                "forwarded": paged.forwarded[-1],
                "dynamic forwarded": dynamic.forwarded[-1],
                "first token ms": paged.first[-1] * 1e3,
                "dynamic ms": dynamic.first[-1] * 1e3,
                "x": dynamic.first[-1] / paged.first[-1],
                "index %": 100 * (index.index_seconds - before) / paged.seconds[-1],
            }
        )
        history = found
    prompts = sum(row["prompt"] for row in rows)
    total = {
        "case": "all turns",
        "equal": all(row["equal"] for row in rows),
        "prompt": prompts,
        "hit rate": index.pool.stats()["matched_tokens"] / prompts,
        "forwarded": sum(paged.forwarded),
        "dynamic forwarded": sum(dynamic.forwarded),
        "first token ms": sum(paged.first) * 1e3,
        "dynamic ms": sum(dynamic.first) * 1e3,
        "x": sum(dynamic.first) / sum(paged.first),
        "index %": 100 * index.index_seconds / sum(paged.seconds),
    }
    return [*rows, total]


def trees(tokens: int, prompts: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Matching a prompt among many; K/V are small as they do not matter."""
    shapes = {
        "leave it all along": lambda: random.randrange(tokens),
        "leave it at one token": lambda: tokens // 2 + 5,
    }
    for shape, depth in shapes.items():
        random.seed(0)
        base = [random.randrange(1000) for _ in range(tokens)]
        others = [
            base[: depth()] + [1000 + number] + [random.randrange(1000) for _ in range(63)]
            for number in range(prompts - 1)
        ]
        pool = pool_that_knows([base, *others])
        whole = torch.tensor([base])
        [match] = alternate(rounds, partial(match_and_free, pool, whole))
        with pool.match_prefix(whole) as cache:
            assert cache.get_seq_length() == tokens - 1
            [insert] = alternate(
                rounds,
                partial(pool.insert_prefix, cache, whole, attention_mask=torch.ones_like(whole)),
            )
        yield {
            "case": f"{prompts} prompts that {shape}, {tokens} tokens",
            "blocks": pool.num_used + pool.num_evictable,
            "match ms": match * 1e3,
            "insert ms": insert * 1e3,
        }


def pool_that_knows(prompts: list[list[int]]) -> BlockPool:
    """K/V are of one layer and two numbers a token."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=2)
    pool = BlockPool(config)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with pool.match_prefix(ids) as cache:
            missing = len(prompt) - cache.get_seq_length()
            cache.update(*torch.zeros(2, 1, 1, missing, 2), 0)
            pool.insert_prefix(cache, ids, attention_mask=torch.ones_like(ids))
    return pool


def match_and_free(pool: BlockPool, ids: torch.Tensor) -> None:
    pool.match_prefix(ids).free()


def differing(*tables: Rows) -> Iterator[str]:
    """A sentence for each row whose answers are not those of DynamicCache."""
    for row in itertools.chain(*tables):
        if not row["equal"]:
            yield f"{row['case']}: other answers than with DynamicCache."


def missed(few: Rows, batches: Rows, turns: Rows, trees: Rows) -> Iterator[str]:
    """A sentence for each goal that is missed."""
    _, copies, index = few
    if not batches[-1]["x"] >= BATCHES_GOAL:
        yield f"In batches {batches[-1]['x']:.1f} times DynamicCache, the goal is {BATCHES_GOAL}."
    if not index["questions/s"] > copies["questions/s"]:
        yield "One at a time the index is not faster than deep copies."
    if not index["K/V MiB"] <= COPIES_GOAL * copies["K/V MiB"]:
        share = index["K/V MiB"] / copies["K/V MiB"]
        yield f"The index keeps {share:.0%} of the deep copies' K/V, the goal is {COPIES_GOAL:.0%}."
    for row in (index, batches[-1], turns[-1]):
        if not row["index %"] < INDEX_GOAL:
            yield f"{row['case']}: {row['index %']:.2f}% is index work, the goal is {INDEX_GOAL}%."
    for row in trees:
        if not row["match ms"] < MATCH_GOAL:
            yield f"{row['case']}: matched in {row['match ms']:.1f} ms, the goal is {MATCH_GOAL}."


def plot(few: Rows, turns: Rows, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    axes[0].bar([row["case"] for row in few], [row["questions/s"] for row in few])
    axes[0].set_ylabel("questions/s")
    numbers = range(1, len(turns))
    for key, label in (("dynamic ms", "DynamicCache"), ("first token ms", "prefix index")):
        axes[1].plot(numbers, [row[key] for row in turns[:-1]], marker=".", label=label)
    axes[1].set_xlabel("turn")
    axes[1].set_ylabel("ms to the first token")
    axes[1].set_ylim(bottom=0)
    axes[1].legend()
    figure.suptitle("Few-shot questions and a chat, SmolLM2-135M in float32")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: argparse.Namespace) -> int:
    torch.manual_seed(0)
    quick = arguments.quick
    model, tokenizer = small_model.load()
    prefix, questions = few_shot_prompts(tokenizer, *((400, 6) if quick else (1000, 32)))
    for way in (Recompute(model), Index(model, 8)):  # warm up
        Trial(way, 2).run(inputs_of(prefix[:32]))
    new, rows = 4, 3 if quick else 8
    few = few_shot(model, prefix, questions, new)
    batches = batched(model, prefix, questions, new, rows)
    turns = chat(model, tokenizer, MESSAGES[:4] if quick else MESSAGES, 8 if quick else 24)
    known = list(trees(8192, 1000, 30))
    results = {
        f"{len(questions)} questions on {len(prefix)} tokens, one at a time": few,
        f"The same in batches of {rows}": batches,
        "A chat, against the history computed again": turns,
        "The index alone": known,
    }
    facts = {
        **machine_facts(),
        "prefix + questions + new": len(prefix) + sum(len(q) + new - 1 for q in questions),
        "hit rate": "of the prompts those of which a beginning was known; in the chat, of tokens",
        "K/V MiB": "of all caches after the last question, had each been kept; the deep copies' "
        "original and all that the index knows are counted",
        "index %": "of the time of generate and what is around it, spent in match and insert",
    }
    write_results(arguments.out, "prefix_reuse", "Prompts reused across calls", facts, results)
    plot(few, turns, arguments.out / "prefix_reuse.png")
    failures = [*differing(few, batches, turns)]
    if not quick:
        failures += missed(few, batches, turns, known)
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer questions, under two minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    sys.exit(main(parser.parse_args()))
