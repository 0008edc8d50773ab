"""Blocks, tables and counts: the worked examples of PagedAttention, and copy-on-write."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from conftest import ragged_ids, tiny, two_layer_config
from transformers import LlamaConfig, MistralConfig

from hf_paged import BlockPool, PagedCache, PoolExhausted

CONFIG = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, hidden_size=8
)


def states(rows: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [rows, 1, tokens, 4] of which no two entries are equal."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, 1, tokens, 4, generator=generator)
    return keys, values


def append(cache: PagedCache, rows: int, tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """One step of `tokens` new tokens a row through both layers; returns layer 0's K and V."""
    new = states(rows, tokens, seed)
    for layer in range(2):
        cache.update(*(s + layer for s in new), layer)
    return list(new)


def filled(pool: BlockPool, *lengths: int) -> list[PagedCache]:
    """One cache of one row for each length."""
    caches = []
    for seed, length in enumerate(lengths):
        caches.append(PagedCache(pool=pool))
        append(caches[-1], 1, length, seed)
    return caches


def test_three_requests_take_six_blocks() -> None:
    pool = BlockPool(CONFIG, num_blocks=64)
    caches = filled(pool, 25, 47, 12)
    assert [len(cache.block_tables[0]) for cache in caches] == [2, 3, 1]
    reports = [cache.report() for cache in caches]
    assert sum(report.slots for report in reports) == 96
    assert sum(report.wasted_slots for report in reports) == 12
    assert pool.num_free == 58
    assert pool.num_used == 6
    # Three contiguous reservations of 2,048 would not even fit once in the pool's 1,024 slots.
    assert pool.num_blocks * pool.block_size == 1024 < 2048
    pool.check()


def test_position_maps_to_block_and_offset() -> None:
    """Table [0, 5, 9]: position 37 is in block 9 at offset 5."""
    pool = BlockPool(CONFIG, num_blocks=16)
    target, other = PagedCache(pool=pool), PagedCache(pool=pool)
    append(target, 1, 16)
    append(other, 1, 4 * 16)
    append(target, 1, 16)
    append(other, 1, 3 * 16)
    keys, values = append(target, 1, 10, seed=1)
    assert target.block_tables == [[0, 5, 9]]
    storage = pool.groups[0].storage[0]
    assert torch.equal(storage.keys[9, 5, 0], keys[0, 0, 37 - 32])
    assert torch.equal(storage.values[9, 5, 0], values[0, 0, 37 - 32])


def test_growing_moves_nothing() -> None:
    pool = BlockPool(CONFIG, num_blocks=64)
    (cache,) = filled(pool, 47)
    table = cache.block_tables[0]
    before = pool.groups[0].storage[0].keys[table].clone()
    append(cache, 1, 10, seed=1)
    assert cache.block_tables[0][:3] == table
    assert len(cache.block_tables[0]) == 4
    after = pool.groups[0].storage[0].keys[table]
    assert torch.equal(after.flatten(0, 1)[:47], before.flatten(0, 1)[:47])
    append(cache, 1, 20, seed=2)
    assert len(cache.block_tables[0]) == 5


def test_shared_blocks_are_copied_when_written() -> None:
    """24 tokens in blocks of 16: the first to write copies 8 entries and redirects itself only."""
    pool = BlockPool(CONFIG, num_blocks=64)
    (one,) = filled(pool, 24)
    two = one.fork()
    assert one.block_tables == two.block_tables
    assert pool.num_used == 2
    table, before = one.block_tables[0], one.layers[0].keys.clone()
    append(two, 1, 1, seed=5)
    assert pool.num_used == 3
    assert pool.stats()["copies"] == 1
    assert one.block_tables[0] == table
    assert two.block_tables[0][0] == table[0]
    assert two.block_tables[0][1] != table[1]
    assert torch.equal(one.layers[0].keys, before)
    assert torch.equal(two.layers[0].keys[:, :, :24], before)
    append(one, 1, 1, seed=6)  # now the only holder: nothing to copy
    assert pool.stats()["copies"] == 1
    pool.check()


def test_full_blocks_are_never_copied() -> None:
    pool = BlockPool(CONFIG, num_blocks=64)
    (cache,) = filled(pool, 800)
    fork = cache.fork(3)
    append(fork, 3, 1)
    append(cache, 1, 1)
    assert pool.stats()["copies"] == 0
    assert pool.num_used == 50 + 4


def test_rows_that_all_write_leave_one_original() -> None:
    pool = BlockPool(CONFIG, num_blocks=64)
    (cache,) = filled(pool, 24)
    cache.batch_repeat_interleave(4)
    append(cache, 4, 1)
    assert pool.stats()["copies"] == 3
    assert len({table[1] for table in cache.block_tables}) == 4
    pool.check()


def test_reorder_moves_full_tail_and_shared_blocks() -> None:
    """With beam_idx [1, 1, 0, 0] every region of a row must follow it, keys apart from values."""
    pool = BlockPool(CONFIG, num_blocks=64)
    cache = PagedCache(pool=pool)
    append(cache, 2, 20)
    cache.batch_repeat_interleave(2)
    append(cache, 4, 1, seed=1)
    before = [torch.cat([layer.keys, layer.values]) for layer in cache.layers]
    cache.reorder_cache(torch.tensor([2, 2, 0, 0]))
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(torch.cat([layer.keys, layer.values]), old[[2, 2, 0, 0, 6, 6, 4, 4]])
    assert pool.num_used == 4  # two full blocks, two tails: what was dropped is free at once
    pool.check()


def test_unbounded_pool_grows_and_keeps_contents() -> None:
    cache = PagedCache(config=CONFIG, block_size=4)
    new = [append(cache, 2, n, seed=n) for n in (3, 1, 60, 1, 300)]
    assert torch.equal(cache.layers[0].keys, torch.cat([k for k, _ in new], 2))
    assert torch.equal(cache.layers[1].values, torch.cat([v for _, v in new], 2) + 1)
    cache.pool.check()


def test_max_memory_bounds_the_bytes() -> None:
    pool = BlockPool(CONFIG, max_memory="64KiB")
    filled(pool, 40)
    held = sum(s.num_bytes for group in pool.groups for s in group.storage.values())
    assert 0.95 * 65536 < held <= 65536
    # A K/V size that the config does not tell is corrected at the first K/V.
    pool = BlockPool(CONFIG, max_memory="64KiB")
    cache = PagedCache(pool=pool)
    wide = torch.zeros(1, 1, 3, 16)
    for layer in range(2):
        cache.update(wide, wide, layer)
    held = sum(s.num_bytes for group in pool.groups for s in group.storage.values())
    assert 0.9 * 65536 < held <= 65536


def test_blocks_return_when_a_cache_is_collected() -> None:
    pool = BlockPool(CONFIG, num_blocks=64)
    caches = filled(pool, 25, 47)
    caches.append(caches[0].fork(2))
    gc.disable()  # by reference counting alone: no cycle may hold a cache
    try:
        del caches
        assert pool.num_used == 0
    finally:
        gc.enable()
    pool.check()


def test_context_manager_and_free() -> None:
    pool = BlockPool(CONFIG, num_blocks=64)
    with PagedCache(pool=pool) as cache:
        append(cache, 1, 20)
        assert pool.num_used == 2
    assert pool.num_used == 0
    cache.free()  # a second time does nothing
    for use in (
        lambda: append(cache, 1, 1),
        cache.get_seq_length,
        cache.fork,
        lambda: cache.crop(0),
        cache.report,
        cache.restore,
        cache._repr_html_,
        lambda: cache.block_tables,
        lambda: cache.batch_size,
    ):
        with pytest.raises(RuntimeError, match="was freed"):
            use()


def test_a_notebook_shows_the_block_map() -> None:
    cache = PagedCache(config=two_layer_config(window=6), block_size=4)

    def step(tokens: int) -> None:
        for layer in range(2):
            cache.update(*torch.rand(2, max(cache.batch_size, 2), 1, tokens, 2), layer)

    step(14)
    branch = cache.fork()
    step(5)
    page = cache._repr_html_()
    full, window = page.split("full attention")[1].split("window of 6")
    for part, shared, own in ((full, "███", "█▆"), (window, "█", "█▆")):
        assert part.count(f">{shared}</span>") == part.count(f">{own}</span> 19 tokens") == 2
    assert window.count(">··</span>") == 2
    branch.free()
    assert ">███</span>" not in cache._repr_html_()
    cache.batch_repeat_interleave(20)
    step(400)
    page = cache._repr_html_()
    assert page.count("and 9 more 419 tokens") == 2 * 32
    assert page.count("and 8 rows more") == 2


def test_reset_starts_over() -> None:
    pool = BlockPool(CONFIG, num_blocks=64)
    cache = PagedCache(pool=pool)
    append(cache, 2, 20)
    cache.reset()
    assert (pool.num_used, cache.get_seq_length(), cache.batch_size) == (0, 0, -1)
    new = append(cache, 3, 5)
    assert torch.equal(cache.layers[0].keys, new[0])


def test_window_blocks_return_to_the_pool() -> None:
    config = MistralConfig(
        sliding_window=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        hidden_size=8,
    )
    pool = BlockPool(config, block_size=4, num_blocks=16)
    cache = PagedCache(pool=pool)
    new = [append(cache, 1, 6)]
    # A window of 8 and a prompt of 6: nothing is dropped at 8, the right token at 9.
    for length in range(7, 40):
        assert cache.get_mask_sizes(1, 0) == (min(length, 8), max(length - 8, 0))
        new.append(append(cache, 1, 1, seed=length))
        everything = torch.cat([k for k, _ in new], 2)
        assert torch.equal(cache.layers[0].keys, everything[:, :, max(length - 7, 0) : length])
        assert pool.num_used <= 3
        pool.check()


def test_long_prompt_takes_only_the_blocks_of_its_window() -> None:
    config = MistralConfig(
        sliding_window=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        hidden_size=8,
    )
    pool = BlockPool(config, block_size=4, num_blocks=3)
    cache = PagedCache(pool=pool)
    keys, _ = append(cache, 1, 101)
    assert pool.num_used == 3
    assert torch.equal(cache.layers[1].keys, keys[:, :, -7:] + 1)
    append(cache, 1, 1)
    pool.check()


def test_fork_that_runs_out_changes_nothing() -> None:
    """One row that is given eight needs seven copies of its tail; there are room for two."""
    pool = BlockPool(CONFIG, num_blocks=4)
    (cache,) = filled(pool, 24)
    before = cache.layers[0].keys
    with pytest.raises(PoolExhausted, match="needs 7 more blocks") as error:
        append(cache, 8, 1)
    assert (error.value.needed, error.value.free, error.value.total) == (7, 2, 4)
    assert (cache.batch_size, cache.get_seq_length(), pool.num_used) == (1, 24, 2)
    assert torch.equal(cache.layers[0].keys, before)
    append(cache, 1, 1)
    pool.check()


def test_check_notices_what_is_wrong() -> None:
    for spoil in (
        lambda group, table: group.incref(table[0, :1]),
        lambda group, table: np.copyto(table[0, 1:2], table[0, 0]),
        lambda group, table: group.decref(table[0, :1]),
        lambda group, table: np.copyto(table[0, 1:2], -1),
    ):
        pool = BlockPool(CONFIG, num_blocks=8)
        (cache,) = filled(pool, 24)
        spoil(pool.groups[0], cache.state.tables.tables[0])
        with pytest.raises(AssertionError):
            pool.check()
        cache.state.tables.tables[0][:] = -1  # so that the collector does not trip over it


def test_debug_variable_checks_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_DEBUG", "1")
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config)
    inputs = ragged_ids([5, 9])
    model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
    group = cache.pool.groups[0]
    group.ref_counts[0] += 1
    with pytest.raises(AssertionError, match="counts"), torch.no_grad():
        model(input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
    group.ref_counts[0] -= 1
