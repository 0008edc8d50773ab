"""Is the CUDA backend right, and how fast is it, on this machine?

    python evals/gpu_check.py              # under 8 minutes, once the kernels are built
    python evals/gpu_check.py --prebuild   # builds them; needs nvcc, but no GPU

Every path is compared with the dense reference in float64, and small models with themselves in
float32; then come times by CUDA events, with the share of the memory bandwidth that a copy
reaches. Writes gpu_check.json and .md to evals/results/ (or --out). The exit status is 1 if a
result is wrong.

Without a GPU, kernels are built for the architectures that are named, and are found again where
FLASHINFER_WORKSPACE_BASE is the same; linking needs some libcuda.so:

    echo | gcc -shared -fPIC -x c - -o /tmp/stub/libcuda.so
    CUDA_HOME=/usr/local/cuda FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=8 \
        FLASHINFER_EXTRA_LDFLAGS=-L/tmp/stub FLASHINFER_WORKSPACE_BASE=$PWD/kernels \
        python evals/gpu_check.py --prebuild
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import Rows, machine_facts, write_results
from hf_paged import BlockPool, PagedCache
from hf_paged.attention import paged_attention
from hf_paged.backends import flashinfer as backend
from hf_paged.backends.dense import reference_attention
from hf_paged.core.metadata import MaskFacts, Pattern
from hf_paged.mask import paged_mask
from hf_paged.view import LazyMask

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Rounding of the output, and of the weights that the kernels multiply values by.
TOLERANCE = {F16: 4e-3, BF16: 2e-2}
GIB = 1 << 30
DEVICE = "cuda"
CORRECTNESS = "Attention against the dense reference in float64, models against float32"


# Models whose masks, windows and positions are made on the device.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 99,
}
MIXED = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "layer_types": MIXED},
    "llama4_text": {
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "num_local_experts": 1,
        "intermediate_size_mlp": 256,
    },
}


class AttentionLayer(torch.nn.Module):
    """As much of an attention layer as an attention function reads."""

    is_causal = True


@dataclass(frozen=True)
class Case:
    """Rows with `past` tokens each and `new` more; with `is_fork` all rows share their past."""

    past: tuple[int, ...]
    new: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_fork: bool = False

    def __str__(self) -> str:
        parts = [f"{self.heads[0]}/{self.heads[1]}/{self.dim} {_name(self.dtype)}"]
        parts += [f"{len(self.past)} rows of {min(self.past)} to {max(self.past)} + {self.new}"]
        parts += [f"K/V {_name(self.kv_dtype)}"] if self.kv_dtype else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"softcap {self.softcap}"] if self.softcap else []
        parts += ["sinks"] if self.has_sinks else []
        parts += ["cascade"] if self.is_fork else []
        return ", ".join(parts)

    @property
    def kernels(self) -> set[tuple[Any, ...]]:
        """(kind, query dtype, K/V dtype, head_dim, window?, softcap?) of what it runs."""
        dim = next(dim for dim in backend.HEAD_DIMS if dim >= self.dim)
        kinds = {"prefill"}  # the tokens in front of the step
        if self.new == 1 and self.heads[0] // self.heads[1] < backend.TENSOR_CORE_GROUP:
            kinds.add("decode")
        options = (dim, self.window is not None, self.softcap is not None)
        return {(kind, self.dtype, self.kv_dtype or self.dtype, *options) for kind in kinds}


RAGGED = (0, 1, 17, 300, 1500, 33)
CASES = [
    *(Case(RAGGED, new) for new in (1, 5, 200)),
    Case(RAGGED, 1, heads=(32, 32)),
    *(Case(RAGGED, new, heads=(9, 3), dim=64) for new in (1, 40)),
    *(Case(RAGGED, new, heads=(7, 1), dim=80) for new in (1, 40)),
    *(Case(RAGGED, new, heads=(10, 2), dtype=F16) for new in (1, 40)),
    *(Case(RAGGED, new, kv_dtype=E4M3) for new in (1, 40)),
    *(Case(RAGGED, new, window=256) for new in (1, 40, 700)),
    *(Case(RAGGED, new, softcap=30.0) for new in (1, 40)),
    *(Case(RAGGED, new, dim=64, heads=(64, 8), window=128, has_sinks=True) for new in (1, 40)),
    Case((40_000,) * 8, 1, is_fork=True),
    Case((40_000, 7, 20_000), 1),
]


def attention_error(case: Case) -> float:
    """The largest error of a call, in parts of its tolerance; more than 1 is wrong."""
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    rows, columns = len(case.past), max(case.past) + case.new
    kv_heads, past = case.heads[1], max(case.past)
    cache = one_layer_cache(case.heads, case.dim, case.window, case.kv_dtype)
    query = torch.randn(rows, case.heads[0], case.new, case.dim, device=device).to(case.dtype)
    states = torch.randn(2, rows, kv_heads, columns, case.dim, device=device).to(case.dtype)
    is_token = torch.arange(columns) >= past - torch.tensor(case.past)[:, None]
    if case.is_fork:
        states[:, :, :, :past] = states[:, :1, :, :past]
    if past:
        known = slice(0, 1) if case.is_fork else slice(None)
        append(cache, states[:, known, :, :past], is_token[known, :past])
    if case.is_fork:
        cache.batch_repeat_interleave(rows)
    views = append(cache, states[:, :, :, past:], is_token)
    sinks = torch.randn(case.heads[0], device=device) if case.has_sinks else None
    metadata = views[0].pages.states.metadata
    pattern = Pattern() if case.window is None else Pattern("sliding", case.window)
    facts = MaskFacts(rows, case.new, metadata.kv_length, metadata.kv_offset, pattern)
    mask = LazyMask(facts, torch.bool, device, lambda: None)
    found, _ = paged_attention(
        AttentionLayer(), query, *views, mask, softcap=case.softcap, s_aux=sinks
    )
    if cache.report().dense_calls:
        raise RuntimeError(f"{case} was gathered: {cache.report().dense_calls}")
    stored = states.to(case.kv_dtype or case.dtype)
    worst = 0.0
    for row in range(rows):  # one at a time, as float64 takes much memory
        visible = is_token[row].to(device) & window_mask(case, columns, device)
        expected, _ = reference_attention(
            query[row : row + 1].double(),
            *(t[row : row + 1].double() for t in stored),
            visible,
            softcap=case.softcap,
            sinks=None if sinks is None else sinks.double(),
        )
        error = (found[row].double() - expected[0]).abs() / (1 + expected[0].abs())
        worst = max(worst, float(error.max()))
    return worst / TOLERANCE[case.dtype]


def window_mask(case: Case, columns: int, device: torch.device) -> torch.Tensor:
    """bool [new, columns], what the last queries may look at if all columns are tokens."""
    column = torch.arange(columns, device=device)
    query = column[-case.new :, None]
    mask = column <= query
    return mask if case.window is None else mask & (column > query - case.window)


def one_layer_cache(
    heads: tuple[int, int],
    dim: int,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> PagedCache:
    config = LlamaConfig(
        num_hidden_layers=1,
        attn_implementation="hf_paged",
        num_attention_heads=heads[1],
        hidden_size=heads[1] * dim,
        layer_types=["sliding_attention" if window else "full_attention"],
        sliding_window=window,
    )
    return PagedCache(pool=BlockPool(config, kv_dtype=kv_dtype), backend="flashinfer")


def append(cache: PagedCache, states: torch.Tensor, is_token: torch.Tensor) -> Any:
    """Add K and V ([2, rows, heads, columns, dim]) to a cache of one layer, without the padding.

    Args:
        is_token: bool [rows, all columns].
    """
    mask = mask_of(cache, is_token, states.shape[3])
    assert isinstance(mask, LazyMask)  # and alive, as in a forward
    return cache.update(states[0], states[1], 0)


def mask_of(cache: PagedCache, is_token: torch.Tensor, new: int) -> torch.Tensor | None:
    """The mask of a forward of `new` columns as a model asks for it, which tells of padding."""
    rows, columns = is_token.shape
    length, offset = cache.get_mask_sizes(new, 0)
    return paged_mask(rows, new, length, columns - new, offset, attention_mask=is_token)


def correctness() -> Iterator[dict[str, Any]]:
    minimum = backend.CASCADE_MIN_BYTES
    for case in CASES:
        backend.CASCADE_MIN_BYTES = 1 if case.is_fork else minimum
        error = attention_error(case)
        yield {"case": str(case), "error / tolerance": error, "ok": error <= 1}
    backend.CASCADE_MIN_BYTES = minimum
    for model_type in MODELS:
        error = model_error(model_type)
        yield {"case": f"model {model_type}", "error / tolerance": error, "ok": error <= 1}


def model_error(model_type: str) -> float:
    """The largest error of a small random model's logits, in parts of twice DynamicCache's own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config, dtype=BF16).eval().to(DEVICE)
    exact = copy.deepcopy(model).float()
    cache = PagedCache(config=config, backend="flashinfer")
    expected = ragged_logits(exact, "eager", DynamicCache(config=config))
    floor = (ragged_logits(model, "eager", DynamicCache(config=config)) - expected).abs().max()
    error = (ragged_logits(model, "hf_paged", cache) - expected).abs().max()
    if cache.report().dense_calls:
        raise RuntimeError(f"{model_type} was gathered: {cache.report().dense_calls}")
    return float(error / (2 * floor))


def ragged_logits(model: Any, attention: str, cache: Any) -> torch.Tensor:
    """Logits of left-padded prompts and of some decode steps behind them."""
    model.set_attn_implementation(attention)
    lengths, new = torch.tensor([30, 11, 3]), 6
    columns = int(lengths.max()) + new
    ids = torch.randint(3, 99, (3, columns), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = (torch.arange(columns) >= lengths.max() - lengths[:, None]).long().to(DEVICE)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits, start = [], 0
    for stop in range(columns - new, columns + 1):
        out = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
        )
        logits.append(out.logits.float())
        start = stop
    return torch.cat(logits, 1)[mask.bool()]


# -- times -----------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any], rounds: int = 20) -> tuple[float, float]:
    """Medians over rounds: on the device by CUDA events, and until the call returns."""
    call()
    device, host = [], []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        host.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    ms, _ = milliseconds(lambda: target.copy_(source))
    return 2 * source.nbytes / ms * 1e3


def decode_kernel(
    heads: tuple[int, int], dim: int, rows: int, tokens: int, bandwidth: float
) -> dict[str, Any]:
    """The attention of one decode step, planned; the update and the plan are host time."""
    cache = one_layer_cache(heads, dim)
    states = torch.randn(2, rows, heads[1], tokens, dim, device=DEVICE, dtype=BF16)
    cache.update(*states, 0)
    new = torch.randn(2, rows, heads[1], 1, dim, device=DEVICE, dtype=BF16)
    query = torch.randn(rows, heads[0], 1, dim, device=DEVICE, dtype=BF16)
    views = cache.update(*new, 0)
    layer = AttentionLayer()
    ms, _ = milliseconds(lambda: paged_attention(layer, query, *views, None), 50)
    assert not cache.report().dense_calls, cache.report()
    size = states.nbytes + new.nbytes

    def step() -> None:
        paged_attention(layer, query, *cache.update(*new, 0), None)

    with no_waiting():
        _, host = milliseconds_without_sync(step)
    return {
        "case": f"{heads[0]}/{heads[1]}/{dim} bfloat16 {rows}x{tokens}",
        "ms": ms,
        "GB/s": size / ms / 1e6,
        "of copy bandwidth": size / ms * 1e3 / bandwidth,
        "host ms a step": host,
    }


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def milliseconds_without_sync(call: Callable[[], Any], rounds: int = 20) -> tuple[float, float]:
    """(total, median) host time of calls that follow each other."""
    host = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        host.append((time.perf_counter() - start) * 1e3)
    return sum(host), statistics.median(host)


def random_llama(layers: int, hidden: int, heads: tuple[int, int]) -> LlamaForCausalLM:
    """A random model in bfloat16; (32, 4096, (32, 8)) has the shape of Llama 3 8B."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=32_000,
        max_position_embeddings=16_384,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(DEVICE):
        default = torch.get_default_dtype()
        torch.set_default_dtype(BF16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def filled(model: LlamaForCausalLM, cache: Any, lengths: list[int]) -> Any:
    """A cache that holds random K/V, left-padded to the longest of `lengths`."""
    config, columns = model.config, max(lengths)
    shape = (len(lengths), config.num_key_value_heads, columns, config.head_dim)
    if isinstance(cache, PagedCache):
        is_token = torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]
        mask = mask_of(cache, is_token, columns)
        assert isinstance(mask, LazyMask)
    for layer in range(config.num_hidden_layers):
        states = torch.randn(shape, device=DEVICE, dtype=BF16)
        cache.update(states, states, layer)
    return cache


def ways(
    model: LlamaForCausalLM, columns: int, num_blocks: int | None = None
) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Name -> (attention implementation, how to make the cache)."""
    config = model.config
    found: dict[str, tuple[str, Callable[[], Any]]] = {
        "PagedCache": ("hf_paged", lambda: PagedCache(config=config, num_blocks=num_blocks)),
        "DynamicCache, sdpa": ("sdpa", lambda: DynamicCache(config=config)),
        "StaticCache, sdpa": ("sdpa", lambda: StaticCache(config=config, max_cache_len=columns)),
    }
    if importlib.util.find_spec("flash_attn") is not None:
        make = found["DynamicCache, sdpa"][1]
        found["DynamicCache, flash attention 2"] = ("flash_attention_2", make)
    return found


def blocks(lengths: list[int], new: int) -> int:
    """Blocks of 16 tokens that rows of these lengths need for `new` tokens more."""
    return sum(-(-(length + new) // 16) for length in lengths)


def decode_steps(model: LlamaForCausalLM, rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    ids = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)
    num_blocks = blocks([tokens] * rows, 32)
    for name, (attention, make) in ways(model, tokens + 32, num_blocks).items():
        model.set_attn_implementation(attention)
        free_memory()
        cache = None
        try:
            cache = filled(model, make(), [tokens] * rows)
            torch.cuda.reset_peak_memory_stats()
            ms, host = milliseconds(
                lambda cache=cache: model(input_ids=ids, past_key_values=cache), 12
            )
            found = {"ms": ms, "host ms": host, "peak GiB": peak_gib()}
        except torch.OutOfMemoryError:
            found = {"ms": "out of memory", "host ms": "", "peak GiB": ""}
        yield {"case": f"{rows}x{tokens}, {name}", **found}


def generates(model: LlamaForCausalLM, new: int = 64) -> Iterator[dict[str, Any]]:
    """Ragged prompts, 64 new tokens."""
    lengths = [64, 600, 128, 2000, 350, 90, 1480, 256]
    width = max(lengths)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long().to(DEVICE)
    ids = torch.randint(5, 30_000, mask.shape, device=DEVICE) * mask
    options = {"max_new_tokens": new, "do_sample": False}
    for name, (attention, make) in ways(model, width + new).items():
        model.set_attn_implementation(attention)

        def run(make: Callable[[], Any] = make) -> None:
            cache = make()
            model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)

        yield {"case": name, **timed(run)}
    model.set_attn_implementation("sdpa")
    prompts = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    run_batch = lambda: model.generate_batch(inputs=prompts, generation_config=config)  # noqa: E731
    yield {"case": "generate_batch", **timed(run_batch)}


def beams(model: LlamaForCausalLM, tokens: int = 4096, new: int = 32) -> Iterator[dict[str, Any]]:
    """8 beams on one prompt."""
    ids = torch.randint(5, 30_000, (1, tokens), device=DEVICE)
    options = {"num_beams": 8, "max_new_tokens": new, "do_sample": False}
    minimum = backend.CASCADE_MIN_BYTES
    for way, note, limit in (
        ("PagedCache", "", minimum),
        ("PagedCache", ", always a cascade", 1),
        ("PagedCache", ", never a cascade", 1 << 60),
        ("DynamicCache, sdpa", "", minimum),
    ):
        backend.CASCADE_MIN_BYTES = limit
        attention, make = ways(model, tokens)[way]
        model.set_attn_implementation(attention)

        def run(make: Callable[[], Any] = make) -> None:
            model.generate(input_ids=ids, past_key_values=make(), **options)

        yield {"case": way + note, **timed(run)}
    backend.CASCADE_MIN_BYTES = minimum


def timed(run: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of the second run of two, and the peak of its memory beyond what was held."""
    free_memory()
    try:
        run()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return {"s": time.perf_counter() - start, "peak GiB": peak_gib() - held / GIB}
    except torch.OutOfMemoryError:
        return {"s": "out of memory", "peak GiB": ""}


def largest_batches(model: LlamaForCausalLM) -> Iterator[dict[str, Any]]:
    """The most ragged rows (256 to 8,192 tokens) with which a decode step runs."""
    for name in ("PagedCache", "DynamicCache, sdpa"):

        def fits(rows: int, name: str = name) -> bool:
            lengths = [256 + 1021 * i % 7937 for i in range(rows)]
            attention, make = ways(model, 0, blocks(lengths, 1))[name]
            model.set_attn_implementation(attention)
            ids = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)
            free_memory()
            try:
                cache = filled(model, make(), lengths)
                model(input_ids=ids, past_key_values=cache)
                return True
            except torch.OutOfMemoryError:
                return False

        yield {"case": name, "rows": largest(fits, 8)}


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits, to within an eighth."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(high // 8, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def collected(rows: Iterable[dict[str, Any]]) -> Rows:
    """All rows; if one fails, those in front of it and what was wrong."""
    found: Rows = []
    try:
        for row in rows:
            found.append(row)
    except Exception as error:
        what = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        columns = found[0] if found else {"case": ""}
        found.append({**dict.fromkeys(columns, ""), "case": what})
    return found


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / GIB


# -- kernels ---------------------------------------------------------------------------------------


def kernels() -> list[tuple[Any, ...]]:
    """What the cases and the times run, as `Case.kernels` names it."""
    return sorted({kernel for case in CASES for kernel in case.kernels}, key=str)


def prebuild() -> None:
    """Build the kernels that this script runs, where they are not built yet."""
    from flashinfer.jit.attention.modules import (
        _gen_batch_prefill_primary_module,
        gen_batch_decode_module,
    )
    from flashinfer.jit.cascade import gen_cascade_module

    specs = [gen_cascade_module()]
    for kind, query, stored, dim, has_window, has_softcap in kernels():
        options = (query, stored, query, torch.int32, dim, dim, 0, has_window, has_softcap)
        specs.append(
            gen_batch_decode_module(*options)
            if kind == "decode"
            else _gen_batch_prefill_primary_module("fa2", *options, False, False)
        )
    for spec in tqdm(specs, unit="kernel"):
        spec.build()
        print(spec.get_library_path())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: argparse.Namespace) -> int:
    if arguments.prebuild:
        prebuild()
        return 0
    if not torch.cuda.is_available():
        sys.exit("gpu_check needs a CUDA device; --prebuild builds its kernels without one.")
    results: dict[str, Rows] = {}
    with torch.no_grad():
        results[CORRECTNESS] = collected(
            tqdm(correctness(), total=len(CASES) + len(MODELS), unit="case")
        )
        bandwidth = copy_bandwidth()
        free_memory()
        results["Decode attention"] = [
            decode_kernel(heads, 128, rows, tokens, bandwidth)
            for heads in ((32, 8), (32, 32))
            for rows, tokens in ((1, 512), (1, 8192), (8, 4096), (64, 4096))
        ]
        free_memory()
        model = random_llama(32, 4096, (32, 8))
        parts = {
            "Decode step, shape of Llama 3 8B": lambda: itertools.chain(
                decode_steps(model, 1, 512), decode_steps(model, 64, 4096)
            ),
            "generate, 8 ragged prompts of 64 to 2,000 tokens, 64 new": lambda: generates(model),
            "8 beams on 4,096 tokens, 32 new": lambda: beams(model),
            "Largest batch of 256 to 8,192 tokens": lambda: largest_batches(model),
        }
        for title, rows in tqdm(parts.items(), unit="part"):
            results[title] = collected(rows())
    facts = {
        **machine_facts(),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "copy GB/s": round(bandwidth / 1e9),
    }
    write_results(arguments.out, "gpu_check", "CUDA backend", facts, results)
    return int(not all(row.get("ok") for row in results[CORRECTNESS]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prebuild", action="store_true", help="only build the kernels")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    sys.exit(main(parser.parse_args()))
