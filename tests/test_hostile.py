"""Input that nobody should give: damaged and forged files, odd prompts, masks, values and batches.

Each gives the right result (that of DynamicCache) or a clear error. How many were tried is counted
and asserted.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FULL, SLIDING, ragged_ids, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_snapshot import tampered
from transformers import DynamicCache, LlamaConfig

from hf_paged import BlockPool, PagedCache, PoolExhausted
from hf_paged.prefix.identity import encode_extra_key

KINDS = ["cache", "prefixes"]
# How many are tried: damaged files of each kind, and masks for each model and backend.
DAMAGED, MANY_DAMAGED, MASKS = 70, 3000, 50


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny("gemma3_text", num_hidden_layers=2, layer_types=[SLIDING, FULL])
    model.set_attn_implementation("hf_paged")
    return model


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    pool = BlockPool(model.config, block_size=4)
    with torch.no_grad():
        cache = PagedCache(pool=pool)
        inputs = ragged_ids([9, 5])
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        model(**inputs, position_ids=positions, past_key_values=cache)
    pool.insert_prefix(cache, inputs["input_ids"])
    cache.save(folder / "cache")
    pool.save_prefixes(folder / "prefixes")
    return {kind: folder / kind for kind in KINDS}


def contents(kind: str, path: Path, config: Any) -> list[Any]:
    """What a file gives; ValueError or OSError if it is refused, and then nothing was loaded."""
    if kind == "cache":
        cache = PagedCache.load(path, config)
        cache.pool.check()
        return [cache.row_lengths, *((x.keys.tolist(), x.values.tolist()) for x in cache.layers)]
    pool = BlockPool(config, block_size=4)
    try:
        pool.load_prefixes(path)
    except (ValueError, OSError):
        assert (pool.num_used, pool.num_evictable) == (0, 0)
        pool.check()
        raise
    pool.check()
    ids = ragged_ids([9, 5])
    found = pool.match_prefix(**ids)
    return [found.row_lengths, *((x.keys.tolist(), x.values.tolist()) for x in found.layers)]


def is_refused(kind: str, path: Path, config: Any, whole: list[Any]) -> bool:
    """Whether a damaged file is refused in words; if not, it must give what the whole one gives."""
    found, words = None, ""
    try:
        found = contents(kind, path, config)
    except ValueError as error:
        words = str(error)
    assert found == whole or "cannot be loaded" in words or "damaged or no file" in words
    return found is None


# Damaged files


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_are_noticed(
    kind: str, saved: dict[str, Path], model: Any, tmp_path: Path
) -> None:
    flips = damage(kind, saved, model, tmp_path, examples=100)
    assert flips >= DAMAGED


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_flipped_bits_are_noticed(
    kind: str, saved: dict[str, Path], model: Any, tmp_path: Path
) -> None:
    assert damage(kind, saved, model, tmp_path, examples=5000) >= MANY_DAMAGED


def damage(kind: str, saved: dict[str, Path], model: Any, folder: Path, examples: int) -> int:
    """Flip bits and cut files off at places that hypothesis chooses; says how many were tried."""
    data, whole = saved[kind].read_bytes(), contents(kind, saved[kind], model.config)
    head = 8 + struct.unpack("<Q", data[:8])[0]
    tried: set[tuple[int, int]] = set()
    place = st.one_of(st.integers(0, head - 1), st.integers(head, len(data) - 1))

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(place, st.integers(0, 8))
    def flip_or_cut(at: int, bit: int) -> None:
        damaged = bytearray(data)
        if bit == 8:
            del damaged[at:]
        else:
            damaged[at] ^= 1 << bit
        (folder / "damaged").write_bytes(damaged)
        refused = is_refused(kind, folder / "damaged", model.config, whole)
        assert refused or at < head  # a space in the header's JSON may become another one
        tried.add((at, bit))

    flip_or_cut()
    return len(tried)


def forged(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


HUGE = 10**12
HEADERS: dict[str, bytes] = {
    "more elements than bytes": forged(
        {"lengths": {"dtype": "I64", "shape": [HUGE], "data_offsets": [0, 8 * HUGE]}}
    ),
    "a shape that is not its bytes": forged(
        {"lengths": {"dtype": "I64", "shape": [HUGE], "data_offsets": [0, 8]}}, bytes(8)
    ),
    "a shape that overflows": forged(
        {"lengths": {"dtype": "I64", "shape": [2**62, 4], "data_offsets": [0, 0]}}
    ),
    "a negative shape": forged(
        {"lengths": {"dtype": "I64", "shape": [-1], "data_offsets": [0, 0]}}
    ),
    "a header longer than the file": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "deep JSON": struct.pack("<Q", 2 * 10**5) + b"[" * 10**5 + b"]" * 10**5,
    "no metadata": forged({}),
    "a pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94.",
    "text": b"hello" * 100,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HEADERS)
def test_forged_headers_are_refused(name: str, kind: str, model: Any, tmp_path: Path) -> None:
    (tmp_path / "forged").write_bytes(HEADERS[name])
    assert is_refused(kind, tmp_path / "forged", model.config, [])


# What a forger who knows the format changes, with the right checksum.
FORGERIES: dict[str, Any] = {
    "rows of 10^12 tokens": lambda t, facts: t.update(lengths=t["lengths"] + HUGE),
    "no row, 10^12 columns": lambda t, facts: t.update(
        {
            "lengths": torch.zeros(0, dtype=torch.int64),
            "is_token": torch.zeros(0, HUGE, dtype=torch.bool),
        }
    ),
    "tables 10^12 wide": lambda t, facts: t.update(
        {
            "lengths": torch.zeros(0, dtype=torch.int64),
            "table.0": torch.zeros(0, HUGE, dtype=torch.int64),
            "table.1": torch.zeros(0, HUGE, dtype=torch.int64),
        }
    ),
    "10^12 blocks without heads": lambda t, facts: t.update(
        {f"layer.{i}.{x}": torch.zeros(HUGE, 4, 0, 16) for i in (0, 1) for x in ("keys", "values")}
    ),
    "blocks that no row has": lambda t, facts: t.update(
        {name: torch.cat([x, x]) for name, x in t.items() if name.startswith("layer.")}
    ),
    "a block of another layer": lambda t, facts: t.update({"table.0": t["table.0"] + 1}),
    "a block size of 10^12": lambda t, facts: facts.update(block_size=HUGE),
    "a layer of 10^12": lambda t, facts: t.update({f"layer.{HUGE}.keys": torch.zeros(1)}),
    "a name that is a path": lambda t, facts: t.update(
        {"../../escape": torch.zeros(1), "layer./etc/passwd.keys": torch.zeros(1)}
    ),
    "a dtype that is code": lambda t, facts: facts.update(kv_dtype="load"),
    "facts that are a list": lambda t, facts: facts.update(windows={}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused(
    name: str, kind: str, saved: dict[str, Path], model: Any, tmp_path: Path
) -> None:
    path = tampered(saved[kind], tmp_path / "forged", FORGERIES[name])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert is_refused(kind, path, model.config, [])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 256 * 1024  # KiB: nothing of the claimed size was allocated
    assert os.listdir(tmp_path) == ["forged"]


def test_a_file_without_blocks_makes_no_storage(model: Any, tmp_path: Path) -> None:
    """However large it says that a head is."""
    pool = BlockPool(model.config, block_size=4, num_blocks=1000)
    pool.save_prefixes(tmp_path / "prefixes")
    names = [f"layer.{layer}.{part}" for layer in (0, 1) for part in ("keys", "values")]

    def forge(tensors: dict[str, Any], facts: dict[str, Any]) -> None:
        tensors.update({name: torch.zeros(0, 4, 1, HUGE) for name in names})
        facts["given_dtypes"] = {"0": "float32", "1": "float32"}

    path = tampered(tmp_path / "prefixes", tmp_path / "forged", forge)
    assert pool.load_prefixes(path) == 0
    assert not any(group.storage for group in pool.groups)


@pytest.mark.parametrize("name", ["x" * 250, "with space", "ünïcödé", ".hidden"])
def test_any_name_that_the_file_system_takes(name: str, model: Any, tmp_path: Path) -> None:
    pool = BlockPool(model.config, block_size=4)
    pool.save_prefixes(tmp_path / name)
    assert pool.load_prefixes(tmp_path / name) == 0
    assert os.listdir(tmp_path) == [name]


def test_places_that_cannot_be_written_or_read(model: Any, tmp_path: Path) -> None:
    pool = BlockPool(model.config, block_size=4)
    with pytest.raises(OSError, match="none"):
        pool.save_prefixes(tmp_path / "none" / "prefixes")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        pool.save_prefixes(tmp_path / "folder")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        pool.load_prefixes(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
    assert not os.listdir(tmp_path / "folder")


# A disk that is full, a process that is killed

SAVER = """
import resource, signal, sys
sys.path[:0] = ["tests", "."]
import torch
from hf_paged import BlockPool, PagedCache
from transformers import LlamaConfig
config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
def cache(value):
    cache = PagedCache(config=config)
    states = torch.full((1, 2, 256, 8), float(value))
    for layer in range(2):
        cache.update(states, states, layer)
    return cache
path, how = sys.argv[1:]
old, new = cache(1), cache(2)
if how != "loop":
    old.save(path)
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        new.save(path)
    except OSError as error:
        assert "cannot be written" in str(error), error
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        new.pool.check()
        new.save(path + ".later")
        print("refused")
elif how == "killed":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills it in the middle of a write
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    new.save(path)
else:
    print("saving", flush=True)
    while True:
        old.save(path)
        new.save(path)
"""


def saver(path: Path, how: str) -> subprocess.Popen:
    args = [sys.executable, "-c", SAVER, str(path), how]
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


SAVED = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8)


def value_in(path: Path) -> float:
    cache = PagedCache.load(path, SAVED)
    values = {float(value) for layer in cache.layers for value in layer.keys.unique()}
    assert len(values) == 1
    assert cache.row_lengths == [256]
    return values.pop()


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    out, errors = saver(tmp_path / "cache", "full").communicate()
    assert out == "refused\n", errors
    assert sorted(os.listdir(tmp_path)) == ["cache", "cache.later"]
    assert value_in(tmp_path / "cache") == 1
    assert value_in(tmp_path / "cache.later") == 2


def test_a_process_killed_in_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    process = saver(tmp_path / "cache", "killed")
    process.communicate()
    assert process.returncode == -signal.SIGXFSZ
    assert len(os.listdir(tmp_path)) == 2  # what it had written is left behind, and in no one's way
    assert value_in(tmp_path / "cache") == 1
    again = PagedCache.load(tmp_path / "cache", SAVED)
    again.save(tmp_path / "cache")
    assert value_in(tmp_path / "cache") == 1


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_a_whole_file(tmp_path: Path) -> None:
    path, rng, found = tmp_path / "cache", np.random.default_rng(0), set()
    for _ in range(8):
        process = saver(path, "loop")
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.02, 0.1))
        process.kill()
        process.communicate()
        if path.exists():
            found.add(value_in(path))
    assert found
    assert found <= {1, 2}


# Prompts, masks, values, batches


@pytest.fixture(params=["llama", "gemma3_text"])
def both(request: pytest.FixtureRequest, tiny_model: Any) -> Any:
    return tiny_model(request.param)


def expected(model: Any, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    try:
        return model.generate(
            **inputs, past_key_values=DynamicCache(config=model.config), max_new_tokens=4
        )
    finally:
        model.set_attn_implementation("hf_paged")


def generated(model: Any, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4)
    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=4)
    cache.pool.check()
    cache.free()
    assert cache.pool.num_used == 0
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 65, 256])
def test_batches_of_1_to_256(rows: int, tiny_model: Any) -> None:
    model = tiny_model("gemma3_text")
    lengths = np.random.default_rng(rows).integers(1, 14, rows).tolist()
    inputs = ragged_ids(lengths, seed=rows)
    assert torch.equal(generated(model, **inputs), expected(model, **inputs))


LAYOUTS = {
    "int32": lambda ids: ids.int(),
    "int32, strided": lambda ids: torch.stack([ids, ids], 2).int()[:, :, 1],
    "transposed": lambda ids: ids.T.contiguous().T,
    "every other column": lambda ids: ids.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda ids: ids[:1].expand(3, -1),
    "a slice": lambda ids: torch.cat([ids, ids], 1)[:, : ids.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_ids_of_any_layout(both: Any, layout: str) -> None:
    ids = LAYOUTS[layout](ragged_ids([11, 11])["input_ids"])
    if layout != "int32":
        assert not ids.is_contiguous()
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        assert torch.equal(generated(both, **inputs), expected(both, **inputs))


@pytest.mark.parametrize("backend", ["cpu", "dense"])
def test_masks_with_holes(both: Any, backend: str) -> None:
    """Random masks over a prompt and a later chunk: every query that sees something is right."""
    tried = 0

    @settings(max_examples=MASKS, deadline=None, database=None, derandomize=True)
    @given(st.lists(st.lists(st.booleans(), min_size=13, max_size=13), min_size=1, max_size=4))
    def compare(rows: list[list[bool]]) -> None:
        nonlocal tried
        mask = torch.tensor(rows).long()
        ids = ragged_ids([13] * len(rows))["input_ids"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = []
        for attention, cache in (
            ("sdpa", DynamicCache(config=both.config)),
            ("hf_paged", PagedCache(config=both.config, block_size=4, backend=backend)),
        ):
            both.set_attn_implementation(attention)
            with torch.no_grad():
                logits = [
                    both(
                        ids[:, start:stop],
                        attention_mask=mask[:, :stop],
                        position_ids=positions[:, start:stop],
                        past_key_values=cache,
                    ).logits
                    for start, stop in ((0, 9), (9, 12), (12, 13))
                ]
            found.append(torch.cat(logits, 1))
        cache.pool.check()
        real = mask.bool()
        torch.testing.assert_close(found[1][real], found[0][real], atol=2e-4, rtol=1e-3)
        tried += 1

    compare()
    assert tried >= MASKS


def test_a_prompt_of_no_tokens(both: Any) -> None:
    """As with DynamicCache: generate refuses it or begins with a BOS token."""
    empty = torch.zeros(1, 0, dtype=torch.long)

    def outcome(run: Any) -> Any:
        try:
            return run(both, input_ids=empty).tolist()
        except (ValueError, RuntimeError, IndexError) as error:
            return type(error)

    assert outcome(generated) == outcome(expected)
    pool = BlockPool(both.config)
    with pytest.raises(ValueError, match="no tokens"):
        pool.match_prefix(empty)
    with pytest.raises(ValueError, match="Prompt 1"):
        next(iter(pool.batches([[1], []], 4)))
    cache = PagedCache(pool=pool).prefill(both, empty)
    assert cache.get_seq_length() == 0


def test_rows_of_only_padding(both: Any) -> None:
    """The other rows are right; of these nothing is stored, and nothing is NaN."""
    inputs = ragged_ids([9, 0, 5, 0])
    found = generated(both, **inputs)
    want = expected(both, **inputs)
    assert torch.equal(found[[0, 2]], want[[0, 2]])
    cache = PagedCache(config=both.config, block_size=4)
    with torch.no_grad():
        logits = both(**inputs, past_key_values=cache).logits
    assert cache.row_lengths == [9, 0, 5, 0]
    assert logits.isfinite().all()
    only = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    only["attention_mask"] = only["input_ids"].clone()
    assert generated(both, **only).shape == (2, 9)


def test_prompts_longer_than_the_pool(both: Any) -> None:
    both.set_attn_implementation("hf_paged")
    pool = BlockPool(both.config, block_size=4, num_blocks=6)
    cache = PagedCache(pool=pool)
    for _ in range(2):
        with pytest.raises(PoolExhausted, match="num_blocks"):
            both.generate(**ragged_ids([25]), past_key_values=cache, max_new_tokens=2)
        assert (pool.num_used, cache.get_seq_length()) == (0, 0)
        pool.check()
    short = ragged_ids([9])
    found = both.generate(**short, past_key_values=cache, max_new_tokens=4)
    assert torch.equal(found, expected(both, **short))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", ["cpu", "dense"])
def test_bad_values_stay_in_their_row(both: Any, backend: str, bad: float) -> None:
    """Embeddings of one row overflow: its K/V are bad in all layers, and no other row's are."""
    both.set_attn_implementation("hf_paged")
    inputs = ragged_ids([11, 6, 9])
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    embedded = both.get_input_embeddings()(inputs["input_ids"]).detach()
    pool = BlockPool(both.config, block_size=4, num_blocks=40)

    def run(spoil: bool) -> list[torch.Tensor]:
        states = embedded.clone()
        if spoil:
            states[1, 7:] = bad
        outs = []
        with PagedCache(pool=pool, backend=backend) as cache, torch.no_grad():
            for start, stop in ((0, 9), (9, 10), (10, 11)):
                outs.append(
                    both(
                        inputs_embeds=states[:, start:stop],
                        attention_mask=mask[:, :stop],
                        position_ids=positions[:, start:stop],
                        past_key_values=cache,
                    ).logits
                )
        return outs

    clean, spoiled = run(False), run(True)
    for one, other in zip(clean, spoiled, strict=True):
        assert torch.equal(one[[0, 2]], other[[0, 2]])
    assert not spoiled[-1][1].isfinite().any()
    # Its blocks, bad values and all, go to others.
    for one, other in zip(clean, run(False), strict=True):
        assert torch.equal(one, other)


# No data crosses rows or tenants


KEY = st.recursive(
    st.none() | st.text(max_size=4) | st.integers() | st.binary(max_size=4),
    lambda keys: st.lists(keys, max_size=3).map(tuple),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(KEY, KEY)
def test_two_extra_keys_are_one_only_if_equal(one: Any, other: Any) -> None:
    def typed(key: Any) -> Any:
        return [typed(part) for part in key] if isinstance(key, tuple) else (type(key), key)

    is_same = encode_extra_key(one) == encode_extra_key(other)
    assert is_same == (typed(one) == typed(other))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text"])
def test_blocks_poisoned_while_nobody_holds_them(
    name: str, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_PAGED_DEBUG=1: all goes as without, on a pool whose blocks change hands all the time."""
    model = tiny_model(name)
    model.set_attn_implementation("hf_paged")
    inputs = ragged_ids([9, 14, 3])

    def run() -> list[torch.Tensor]:
        pool, outs = BlockPool(model.config, block_size=4, num_blocks=60), []
        for beams in (1, 3, 1):
            with pool.match_prefix(**inputs, num_return_sequences=beams) as cache:
                kwargs = {"past_key_values": cache, "max_new_tokens": 5, "num_beams": beams}
                outs.append(model.generate(**inputs, **kwargs))
                pool.insert_prefix(cache, outs[-1])
                with cache.fork() as branch:
                    branch.offload()
                    branch.restore()
            pool.evict(4)
        return outs

    plain = run()
    monkeypatch.setenv("HF_PAGED_DEBUG", "1")
    for one, other in zip(plain, run(), strict=True):
        assert torch.equal(one, other)


def test_poison_shows_what_reads_a_free_block(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setenv("HF_PAGED_DEBUG", "1")
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model.config, block_size=4, num_blocks=20)
    secret, cache = PagedCache(pool=pool), PagedCache(pool=pool)
    ids = ragged_ids([8])["input_ids"]
    with torch.no_grad():
        model(ids, past_key_values=secret)
        model(ids, past_key_values=cache)
    stolen = secret.state.tables.tables[0][0, 0]
    secret.free()
    for group in pool.groups:  # nothing that the secret's owner wrote is left
        free = np.flatnonzero(group.ref_counts == 0)
        for storage in group.storage.values():
            assert storage.keys[free].isnan().all()
            assert storage.values[free].isnan().all()
    cache.state.tables.tables[0][0, 0] = stolen  # the fault that the poison is for
    monkeypatch.setattr(pool.allocator, "check", lambda: None)
    with torch.no_grad():
        assert model(ids[:, :1], past_key_values=cache).logits.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_stored_dtype_can_be_poisoned(
    dtype: torch.dtype, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_DEBUG", "1")
    pool = BlockPool(model.config, block_size=4, kv_dtype=dtype)
    with torch.no_grad(), PagedCache(pool=pool) as cache:
        assert model(**ragged_ids([9, 5]), past_key_values=cache).logits.isfinite().all()
    storage = pool.groups[0].storage[1]
    assert storage.keys.float().isnan().all()
