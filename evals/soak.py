"""A soak: mixed work on a full pool for a long time, and what has grown by its end.

    python evals/soak.py                # 30 minutes
    python evals/soak.py --minutes 3    # as `pytest -m slow tests/test_soak.py` does

A small random model with full attention and windows serves chats, samples, beams, forks, failed
steps and files until caches hold 97% of the blocks for full attention; then the oldest go. The
first third of the time is compared with the last: resident memory, Python objects, and the speed.

A machine's own speed wanders over half an hour. So each 50 operations, timed in CPU seconds, are
followed by the same generate with a DynamicCache of a copy of the model (the reference), and the
speed is how many operations are done in the time that one reference takes.

The exit status is 1 if the speed falls by more than a fifth, memory grows, less than 95% of those
blocks are taken in the median, or a block is not given back. Writes soak.json, .md and .png to
evals/results/ (or --out).
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import psutil
import torch
from tqdm import tqdm
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import machine_facts, write_results
from hf_paged import BlockPool, PagedCache, PoolExhausted

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SLOWEST = 0.8  # of the speed in the first third
# What allocators keep and give back differs by a few MiB from one time to another. From the first
# third of 3 minutes to the last there are some 2,000 operations: 8 KiB lost in each would show.
# Objects do grow: for each size that safetensors (0.8) writes, ctypes makes types that stay.
MEMORY_NOISE = 16  # MiB
MIB = 2**20
NUM_BLOCKS = 256
MOST_IN_USE = 0.97  # of the full-attention blocks, by caches after an operation
LEAST_TAKEN = 0.95  # of them, by caches or known prefixes: the median
WARM_UP = 0.1  # of the time, in which allocators and caches fill
PER_SAMPLE = 50  # operations from one look at memory to the next
VOCAB = 512
TENANTS = ["a", None]
GENERATE: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 4, "num_return_sequences": 2},
    {"prefill_chunk_size": 24},
]


class Sample(NamedTuple):
    """Some operations, and how things are after them."""

    minutes: float  # since the beginning
    cpu_seconds: float  # of the operations
    reference: float  # CPU seconds of the reference that follows them
    resident: int  # bytes
    objects: int
    in_use: float  # of the full-attention blocks, by caches
    not_free: float  # of the same, by caches or known prefixes


class Failed(Exception):
    """What a layer raises in a step that is to fail."""


class Work:
    """Operations on a pool, one at a time.

    Args:
        folder: where what is saved goes.
        seed: of what is drawn.

    Attributes:
        done: how often each operation was done, and how often the pool was full.
    """

    def __init__(self, folder: Path, seed: int = 0):
        torch.manual_seed(seed)
        self._draw, self._folder = random.Random(seed), folder
        config = Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"] * 2,
            eos_token_id=None,
            pad_token_id=0,
        )
        self._model = Gemma3ForCausalLM(config).eval()
        self._model.set_attn_implementation("hf_paged")
        self._model.generation_config.eos_token_id = None
        self.pool = BlockPool(self._model, num_blocks=NUM_BLOCKS)
        self._caches: deque[PagedCache] = deque()
        self._systems = [self._tokens(40) for _ in range(2)]
        self.done: Counter[str] = Counter()
        # Each as often as it stands here.
        self._operations: list[Callable[[], None]] = [
            *[self.generate] * 6,
            *[self.fork] * 4,
            *[self.speculate] * 2,
            *[self.fail] * 2,
            *[self.move_out_and_in] * 2,
            self.save_and_load,
            self.save_prefixes,
            self.evict,
        ]

    def reference(self) -> Callable[[], Any]:
        """Work that is the same whenever it is called, and that needs nothing of this library."""
        model = copy.deepcopy(self._model)
        model.set_attn_implementation("sdpa")
        ids = torch.tensor([self._tokens(40)])

        def run() -> None:
            cache = DynamicCache(config=model.config)
            model.generate(ids, past_key_values=cache, max_new_tokens=64, do_sample=False)

        return run

    def step(self) -> None:
        """One operation; then the oldest caches go until as much as is allowed is in use."""
        operation = self._draw.choice(self._operations) if self._caches else self.generate
        try:
            operation()
        except PoolExhausted:
            self.done["pool full"] += 1
        self.done[operation.__name__] += 1
        while self.in_use() > MOST_IN_USE:
            cache = self._caches.popleft()
            if self._draw.random() < 0.5:  # the garbage collector frees the others
                cache.free()

    def in_use(self) -> float:
        """The share of the full-attention blocks that caches hold."""
        tables = [table for cache in self._caches for table in cache.block_tables]
        return len(set().union(*tables)) / NUM_BLOCKS

    def not_free(self) -> float:
        """The share of the full-attention blocks that caches or known prefixes hold."""
        self.pool.allocator.collect()
        [group] = [group for group in self.pool.groups if group.window is None]
        return group.num_used / NUM_BLOCKS

    def end(self) -> int:
        """Give all back; says how many blocks did not come back."""
        self._caches.clear()
        gc.collect()
        self.pool.clear_prefixes()
        self.pool.check()
        return self.pool.num_blocks - self.pool.num_free

    def generate(self) -> None:
        """Prompts behind what is known of them; their answers become known."""
        if self._draw.random() < 0.05:
            self._systems[self._draw.randrange(len(self._systems))] = self._tokens(40)
        options, system = self._draw.choice(GENERATE), self._draw.choice(self._systems)
        rows = [
            [*system, *self._tokens(self._draw.randint(1, 60))]
            for _ in range(self._draw.randint(1, 3))
        ]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        repeats = options.get("num_beams") or options.get("num_return_sequences", 1)
        tenant = self._draw.choice(TENANTS)
        cache = self.pool.match_prefix(
            **inputs, extra_key=tenant, num_return_sequences=repeats if len(rows) > 1 else 1
        )
        count = self._draw.randint(2, 12)
        sequences = self._model.generate(
            **inputs, past_key_values=cache, max_new_tokens=count, suppress_tokens=[0], **options
        )
        self.pool.insert_prefix(cache, sequences, extra_key=tenant)
        self._caches.append(cache)

    def fork(self) -> None:
        """Branches of a cache, in another order, that go on on their own."""
        forked = self._draw.choice(self._caches).fork(self._draw.randint(1, 3))
        rows = list(range(forked.batch_size))
        self._draw.shuffle(rows)
        forked.reorder_cache(torch.tensor(rows[:6]))
        self._forward(forked, self._draw.randint(1, 8))
        self._caches.append(forked)

    def speculate(self) -> None:
        """Tokens that are taken back."""
        cache, count = self._draw.choice(self._caches), self._draw.randint(1, 6)
        cache.activate_past_recording()
        self._forward(cache, count)
        cache.crop(-count)

    def fail(self) -> None:
        """A step that a layer ends, and the next one."""
        cache = self._draw.choice(self._caches).fork()
        layer = self._model.model.layers[self._draw.randrange(3)]
        hook = layer.mlp.register_forward_pre_hook(_fail)
        try:
            self._forward(cache, 3)
        except Failed:
            pass
        finally:
            hook.remove()
        self._forward(cache, 1)

    def move_out_and_in(self) -> None:
        """A cache that waits outside of the pool."""
        cache = self._draw.choice(self._caches)
        self._caches.remove(cache)
        cache.offload()
        cache.restore()
        self._caches.append(cache)

    def save_and_load(self) -> None:
        """A cache in a file, and from it in a pool of its own."""
        path = self._folder / "cache.safetensors"
        self._draw.choice(self._caches).save(path)
        with PagedCache.load(path, self._model) as loaded:
            self._forward(loaded, 2)

    def save_prefixes(self) -> None:
        """All known prefixes in a file and back."""
        path = self._folder / "prefixes.safetensors"
        self.pool.save_prefixes(path)
        self.pool.evict(16)
        self.pool.load_prefixes(path)

    def evict(self) -> None:
        """Some of the known prefixes are forgotten."""
        self.pool.evict(self._draw.randint(1, 32))

    def _forward(self, cache: PagedCache, count: int) -> None:
        ids = torch.tensor([self._tokens(count) for _ in range(cache.batch_size)])
        with torch.no_grad():
            self._model(ids, past_key_values=cache)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1, VOCAB) for _ in range(count)]


def _fail(*args: Any) -> None:
    raise Failed


def soak(minutes: float) -> tuple[Work, list[Sample]]:
    """Work for some minutes and three samples at least; they are those behind the warm-up."""
    torch.set_num_threads(1)  # a second one is no use on tensors as small as these
    process, samples = psutil.Process(), []
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder))
        reference = work.reference()
        start, spent = time.monotonic(), 0.0
        with tqdm(total=round(60 * minutes), unit="s", disable=None) as progress:
            while spent < 60 * minutes or len(samples) < 3:
                times = [time.process_time()]
                for _ in range(PER_SAMPLE):
                    work.step()
                times.append(time.process_time())
                reference()
                times.append(time.process_time())
                work.pool.check()
                gc.collect()
                spent = time.monotonic() - start
                progress.update(min(round(spent), progress.total) - progress.n)
                sample = Sample(
                    spent / 60,
                    times[1] - times[0],
                    times[2] - times[1],
                    process.memory_info().rss,
                    len(gc.get_objects()),
                    work.in_use(),
                    work.not_free(),
                )
                if spent > WARM_UP * 60 * minutes:
                    samples.append(sample)
    return work, samples


def thirds(samples: list[Sample]) -> list[dict[str, Any]]:
    """Medians of each third of the samples, and its speed."""
    rows = []
    for index, name in enumerate(("first third", "second third", "last third")):
        part = samples[index * len(samples) // 3 : (index + 1) * len(samples) // 3]
        operations = PER_SAMPLE * len(part)
        seconds = sum(s.cpu_seconds for s in part)
        reference = statistics.fmean(s.reference for s in part)
        rows.append(
            {
                "case": name,
                "operations": operations,
                "operations / CPU s": operations / seconds,
                "reference CPU s": reference,
                "operations / reference": operations / seconds * reference,
                "resident MiB": statistics.median(s.resident for s in part) / MIB,
                "objects": round(statistics.median(s.objects for s in part)),
                "in use": statistics.median(s.in_use for s in part),
                "not free": statistics.median(s.not_free for s in part),
            }
        )
    return rows


def lost(first: dict[str, Any], last: dict[str, Any], blocks: int) -> Iterator[str]:
    """A sentence for what has grown or is gone, and for a pool that was not full.

    Args:
        first, last: of `thirds`.
        blocks: how many did not come back.
    """
    grown = last["resident MiB"] - first["resident MiB"]
    if not grown < MEMORY_NOISE:
        yield f"Resident memory has grown by {grown:.1f} MiB."
    if blocks:
        yield f"{blocks} blocks did not come back."
    for third in (first, last):
        if not third["not free"] >= LEAST_TAKEN:
            yield f"In the {third['case']} {third['not free']:.1%} of the pool are taken."


def slowed(first: dict[str, Any], last: dict[str, Any]) -> Iterator[str]:
    """A sentence if the last third is slower than the first."""
    share = last["operations / reference"] / first["operations / reference"]
    if not share >= SLOWEST:
        yield f"The last third has {share:.0%} of the speed of the first."


def plot(samples: list[Sample], path: Path) -> None:
    """Speed and memory over the time."""
    panels = {
        "operations a CPU second": [PER_SAMPLE / s.cpu_seconds for s in samples],
        "operations in a reference's time": [
            PER_SAMPLE / s.cpu_seconds * s.reference for s in samples
        ],
        "resident MiB": [s.resident / MIB for s in samples],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(15, 4))
    for axis, (label, values) in zip(axes, panels.items(), strict=True):
        axis.plot([s.minutes for s in samples], values, ".")
        axis.set_xlabel("minute")
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.1 * max(values))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: argparse.Namespace) -> int:
    work, samples = soak(arguments.minutes)
    rows, pool, left = thirds(samples), work.pool.stats(), work.end()
    results = {
        "Thirds of the time": rows,
        "Operations": [{"case": name, "times": n} for name, n in sorted(work.done.items())],
        "Pool": [
            {"case": name, "times": n}
            for name, n in {**pool, "blocks that did not come back": left}.items()
        ],
    }
    facts = {**machine_facts(), "minutes": arguments.minutes}
    write_results(arguments.out, "soak", "Soak", facts, results)
    plot(samples, arguments.out / "soak.png")
    failures = [*lost(rows[0], rows[-1], left), *slowed(rows[0], rows[-1])]
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    sys.exit(main(parser.parse_args()))
