"""How fast: attention calls, decode steps, prefill, host work, a whole generate and its memory.

    python evals/throughput.py            # about 10 minutes on 2 cores
    python evals/throughput.py --quick    # under 2 minutes

Baseline and candidate alternate within one process, and what is reported are medians and their
ratios. Writes throughput.json, .md and .png to evals/results/ (or --out).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import psutil
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import alternate, machine_facts, write_results
from examples import small_model
from hf_paged import PagedCache
from hf_paged.attention import paged_attention
from hf_paged.backends import AttentionCall
from hf_paged.mask import paged_mask

matplotlib.use("Agg")
import matplotlib.pyplot as plt

F32, BF16 = torch.float32, torch.bfloat16
LARGER_THAN_CACHES = 1_500_000_000  # bytes of K/V that a kernel benchmark cycles over
CALL = "Attention call, against folded SDPA on contiguous K/V"
STEP = "Decode step, against DynamicCache"
CALLS = [  # heads, kv_heads, head_dim, dtype, rows, tokens
    (32, 8, 128, F32, 16, 2048),
    (32, 8, 128, BF16, 16, 2048),
    (9, 3, 64, F32, 8, 2048),
    (9, 3, 64, F32, 1, 8192),
    (9, 3, 64, BF16, 8, 2048),
    (32, 32, 64, F32, 4, 2048),
    (32, 1, 128, F32, 16, 2048),
    (32, 1, 128, BF16, 16, 2048),
]
STEPS = [(F32, 8, 2048), (F32, 1, 8192), (F32, 1, 512), (BF16, 8, 2048), (BF16, 1, 8192)]
RAGGED = [64, 600, 128, 200, 350, 90, 480, 256]


class AttentionLayer(torch.nn.Module):
    """As much of an attention layer as an attention function reads."""

    is_causal = True


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory."""
    data = torch.ones(LARGER_THAN_CACHES // 4)
    return data.nbytes / alternate(5, data.sum)[0]


def cache_of_one_layer(
    kv_heads: int, dim: int, dtype: torch.dtype, rows: int, tokens: int
) -> PagedCache:
    """A filled cache whose blocks are scattered over the pool, with room for as many tokens."""
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=kv_heads,
        hidden_size=kv_heads * dim,
        attn_implementation="hf_paged",
    )
    cache = PagedCache(config=config, num_blocks=2 * rows * (tokens // 16 + 1))
    free = cache.pool.groups[0]._free
    free[:] = free[torch.randperm(len(free)).numpy()]
    states = torch.randn(rows, kv_heads, tokens, dim).to(dtype)
    cache.update(states, states.flip(2), 0)
    return cache


def attention_call(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    bandwidth: float,
) -> dict[str, Any]:
    """One token a row and the attention over all, against folded SDPA on contiguous K/V."""
    size = 2 * rows * tokens * kv_heads * dim * dtype.itemsize
    layers = max(2, LARGER_THAN_CACHES // 2 // size)
    caches = [cache_of_one_layer(kv_heads, dim, dtype, rows, tokens) for _ in range(layers)]
    dense = [torch.randn(2, rows, kv_heads, tokens, dim).to(dtype) for _ in range(layers)]
    query = torch.randn(rows, heads, 1, dim).to(dtype)
    new = torch.randn(rows, kv_heads, 1, dim).to(dtype)
    folded = query.view(rows, kv_heads, heads // kv_heads, dim)
    turns = [itertools.cycle(range(layers)) for _ in range(2)]

    def paged() -> None:
        views = caches[next(turns[0])].update(new, new, 0)
        paged_attention(AttentionLayer(), query, *views, None)

    def sdpa() -> None:
        F.scaled_dot_product_attention(folded, *dense[next(turns[1])])

    mine, theirs = alternate(max(8, 3 * layers), paged, sdpa)
    return {
        "case": f"{heads}/{kv_heads}/{dim} {str(dtype)[6:]} {rows}x{tokens}",
        "ms": mine * 1e3,
        "sdpa ms": theirs * 1e3,
        "GB/s": size / mine / 1e9,
        "of bandwidth": size / mine / bandwidth,
        "ratio": theirs / mine,
    }


def decode_step(model: Any, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One forward of one token a row, on the real model."""
    ids = torch.randint(5, 40000, (rows, tokens))
    dynamic = filled(model, DynamicCache(config=model.config), "sdpa", ids)
    paged = filled(model, PagedCache(config=model.config), "hf_paged", ids)

    def step(cache: Any, attention: str) -> None:
        model.set_attn_implementation(attention)
        model(input_ids=ids[:, :1], past_key_values=cache)

    theirs, mine = alternate(rounds, lambda: step(dynamic, "sdpa"), lambda: step(paged, "hf_paged"))
    report = paged.report()
    return {
        "case": f"{str(model.dtype)[6:]} {rows}x{tokens}",
        "ms": mine * 1e3,
        "dynamic ms": theirs * 1e3,
        "MiB": report.bytes / 2**20,
        "dynamic MiB": report.dense_bytes / 2**20,
        "ratio": theirs / mine,
    }


def filled(model: Any, cache: Any, attention: str, ids: torch.Tensor) -> Any:
    model.set_attn_implementation(attention)
    for start in range(0, ids.shape[1], 1024):
        model(input_ids=ids[:, start : start + 1024], past_key_values=cache, logits_to_keep=1)
    return cache


def prefill(heads: int, kv_heads: int, dim: int, tokens: int, rounds: int) -> dict[str, Any]:
    """New tokens behind as many cached ones, against one masked SDPA on contiguous K/V."""
    cache = cache_of_one_layer(kv_heads, dim, F32, 1, tokens)
    query = torch.randn(1, heads, tokens, dim)
    keys, values = torch.randn(2, 1, kv_heads, 2 * tokens, dim)
    mask = torch.ones(tokens, 2 * tokens, dtype=torch.bool).tril(tokens)
    new = [t[:, :, tokens:].contiguous() for t in (keys, values)]

    def paged() -> None:
        past, (length, offset) = cache.get_seq_length(), cache.get_mask_sizes(tokens, 0)
        view_mask = paged_mask(1, tokens, length, past, offset)
        paged_attention(AttentionLayer(), query, *cache.update(*new, 0), view_mask)
        cache.crop(-tokens)

    def sdpa() -> None:
        repeated = (t.repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
        F.scaled_dot_product_attention(query, *repeated, attn_mask=mask)

    mine, theirs = alternate(rounds, paged, sdpa)
    return {
        "case": f"{heads}/{kv_heads}/{dim} float32, {tokens} on {tokens}",
        "ms": mine * 1e3,
        "sdpa ms": theirs * 1e3,
        "ratio": theirs / mine,
    }


def ragged_inputs(tokenizer: Any, quick: bool) -> Any:
    lengths = [n // 4 for n in RAGGED] if quick else RAGGED
    ids = tokenizer(small_model.sample_text()[:60000]).input_ids
    pieces = [ids[700 * i : 700 * i + n] for i, n in enumerate(lengths)]
    return tokenizer.pad({"input_ids": pieces}, return_tensors="pt")


def run_generate(way: str, quick: bool) -> tuple[float, int]:
    """Seconds of a generate on the ragged batch, and by how much resident memory grew in it."""
    model, tokenizer = small_model.load()
    inputs, new = ragged_inputs(tokenizer, quick), 16 if quick else 64
    generate_once(model, inputs, way, 2)  # warm up
    gc.collect()
    process, peak, is_done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not is_done.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = generate_once(model, inputs, way, new)
    is_done.set()
    watcher.join()
    return seconds, peak[0] - before


def generate_once(model: Any, inputs: Any, way: str, new: int) -> float:
    start = time.perf_counter()
    if way == "generate_batch":
        model.set_attn_implementation("sdpa")
        ids = [
            row[mask.bool()].tolist()
            for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
        model.generate_batch(inputs=ids, generation_config=config)
    else:
        model.set_attn_implementation("hf_paged" if way == "PagedCache" else "sdpa")
        cache = (PagedCache if way == "PagedCache" else DynamicCache)(config=model.config)
        model.generate(
            **inputs, past_key_values=cache, min_new_tokens=new, max_new_tokens=new, do_sample=False
        )
    return time.perf_counter() - start


def generates(quick: bool) -> Iterator[dict[str, Any]]:
    """A whole generate, each in a process of its own; memory is read in a run of its own."""
    ways = ["PagedCache", "DynamicCache"] + ([] if quick else ["generate_batch"])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 if quick else 3):
        for way in ways:
            seconds[way].append(in_a_process(way, quick)[0])
    # glibc then gives a tensor back when it is freed, so that what is resident is what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    peaks = {way: in_a_process(way, quick)[1] for way in ways}
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    medians = {way: statistics.median(spent) for way, spent in seconds.items()}
    for way in ways:
        yield {
            "case": way,
            "s": medians[way],
            "peak MiB": peaks[way] / 2**20,
            "ratio": medians[way] / medians["PagedCache"],
        }


def in_a_process(way: str, quick: bool) -> tuple[float, int]:
    """A killed process (`generate_batch` takes most of the memory) raises BrokenProcessPool."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(run_generate, way, quick).result()


class Clock(StoppingCriteria):
    """When each token of a generate was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def compiled_step(model: Any, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """A decode step inside generate, in turns: eager on two caches, compiled on two others."""
    config, start = model.config, torch.randint(5, 40000, (rows, tokens))
    most = tokens + 9 * (rounds + 1)
    caches: dict[str, tuple[Any, str, bool]] = {
        "DynamicCache": (DynamicCache(config=config), "sdpa", False),
        "eager": (PagedCache(config=config, num_blocks=rows * (most // 16 + 1)), "hf_paged", False),
        "compiled": (
            PagedCache(config=config, num_blocks=rows * (most // 16 + 1), compile=True),
            "hf_paged",
            True,
        ),
        "StaticCache": (StaticCache(config=config, max_cache_len=most), "sdpa", True),
    }
    compiling = CompileConfig(mode=None)
    compiling._compile_all_devices = True
    ids, compile_s = {}, {}
    spent: dict[str, list[float]] = {way: [] for way in caches}
    for way, (cache, attention, _) in caches.items():
        filled(model, cache, attention, start[:, :-1])
        ids[way] = start
    for turn in range(rounds + 1):  # the first one compiles
        for way, (cache, attention, is_compiled) in caches.items():
            model.set_attn_implementation(attention)
            clock, begin = Clock(), time.perf_counter()
            ids[way] = model.generate(
                ids[way],
                attention_mask=torch.ones_like(ids[way]),
                past_key_values=cache,
                max_new_tokens=9,
                min_new_tokens=9,
                do_sample=False,
                pad_token_id=0,
                compile_config=compiling if is_compiled else None,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
            if not turn:
                compile_s[way] = time.perf_counter() - begin
            else:  # the first token is computed eagerly
                spent[way] += [b - a for a, b in itertools.pairwise(clock.times)][1:]
    ms = {way: statistics.median(times) * 1e3 for way, times in spent.items()}
    return {
        "case": f"{str(model.dtype)[6:]} {rows}x{tokens}",
        **{f"{way} ms": one for way, one in ms.items()},
        "x DynamicCache": ms["DynamicCache"] / ms["compiled"],
        "x StaticCache": ms["StaticCache"] / ms["compiled"],
        "compiling s": compile_s["compiled"],
    }


class NoAttention:
    """A backend that computes nothing: what is left of a step is host work."""

    name = "none"

    def stored_dims(self, dtype: torch.dtype, key_dim: int, value_dim: int) -> tuple[int, int]:
        return key_dim, value_dim

    def refusal(self, call: AttentionCall) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.query


def host_work(rows: int, rounds: int, layers: int = 8) -> dict[str, Any]:
    """What a decode step costs besides attention: in each layer, and once (mask, blocks, plan)."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_size=64,
        attn_implementation="hf_paged",
    )
    cache = PagedCache(config=config, backend=NoAttention())
    new, module = torch.randn(rows, 4, 1, 16), AttentionLayer()
    steps, each = [], []
    for _ in range(rounds):
        times = [time.perf_counter()]
        past, (length, offset) = cache.get_seq_length(), cache.get_mask_sizes(1, 0)
        mask = paged_mask(rows, 1, length, past, offset)
        for layer in range(layers):
            paged_attention(module, new, *cache.update(new, new, layer), mask)
            times.append(time.perf_counter())
        # The first layer finds what the step costs once, the last one ends it.
        each.append(statistics.median(b - a for a, b in itertools.pairwise(times[1:-1])))
        steps.append(times[-1] - times[0] - layers * each[-1])
    once, layer_ms = (statistics.median(spent) * 1e3 for spent in (steps, each))
    return {"case": f"batch {rows}", "once a step, ms": once, "a layer, ms": layer_ms}


def plot(steps: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    labels = [row["case"] for row in steps]
    for axis, (mine, theirs, unit) in zip(
        axes, [("ms", "dynamic ms", "ms a step"), ("MiB", "dynamic MiB", "MiB of K/V")], strict=True
    ):
        places = range(len(steps))
        axis.bar(
            [p - 0.2 for p in places], [row[theirs] for row in steps], 0.4, label="DynamicCache"
        )
        axis.bar([p + 0.2 for p in places], [row[mine] for row in steps], 0.4, label="PagedCache")
        axis.set_xticks(list(places), labels, rotation=20)
        axis.set_ylabel(unit)
        axis.legend()
    figure.suptitle("One decode step of SmolLM2-135M, by dtype and batch x context")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    quick = arguments.quick
    models = {dtype: small_model.load(dtype=dtype)[0] for dtype in (F32, BF16)}
    calls = CALLS[:2] if quick else CALLS
    steps = [(F32, 1, 512), (F32, 4, 1024)] if quick else STEPS
    compiled = [(F32, 1, 128)] if quick else [(F32, 1, 512), (F32, 8, 2048), (BF16, 8, 2048)]
    cached = 512 if quick else 2048
    parts = {
        CALL: (attention_call(*call, bandwidth) for call in calls),
        STEP: (decode_step(models[step[0]], *step[1:], 10 if quick else 30) for step in steps),
        "Prefill behind a cached prefix, against one masked SDPA": (
            prefill(*heads, cached, 4 if quick else 10) for heads in ((9, 3, 64), (32, 8, 128))
        ),
        "A decode step in generate, eager and compiled": (
            compiled_step(models[step[0]], *step[1:], 2 if quick else 4) for step in compiled
        ),
        "Host work of a decode step": (host_work(rows, 200) for rows in (8, 64)),
        "generate on 8 ragged prompts": generates(quick),
    }
    results: dict[str, list[dict[str, Any]]] = {}
    with torch.no_grad():
        for title, rows in tqdm(parts.items(), unit="part"):
            results[title] = list(tqdm(rows, desc=title, leave=False, unit="case"))
    facts = {**machine_facts(), "read GB/s": round(bandwidth / 1e9, 1)}
    write_results(arguments.out, "throughput", "Throughput", facts, results)
    plot(results[STEP], arguments.out / "throughput.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller cases, under two minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    main(parser.parse_args())
