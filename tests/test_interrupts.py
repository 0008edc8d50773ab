"""Ctrl-C, and the garbage collector, in the middle of everything that a pool or a cache can do.

After an interrupt at any point the pool's accounts are right, other caches are as they were, the
cache is as before the operation or as after it, and whatever comes next gives what it always gives.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, ragged_ids, tiny, two_layer_config
from interrupts import Points

from hf_paged import BlockPool, PagedCache, PoolExhausted
from hf_paged.mask import paged_mask
from hf_paged.view import LazyMask

# An exception in a generator that is being closed can go nowhere.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIG = two_layer_config(window=6)
BLOCK = 4
KNOWN = tuple(range(50, 61))  # a prompt in the prefix index
PROMPTS = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 16, 17, 18, 19))
OTHER = tuple(range(30, 41))
STRIDE = 32  # the default run takes each 32nd point of an operation


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is there already is not looked through again
    yield
    gc.unfreeze()


def kv(tokens: Sequence[Sequence[int]], layer: int, start: int = 0) -> torch.Tensor:
    """K [rows, 1, columns, 2] that say which token they are of, where, and in which layer."""
    ids = torch.tensor(tokens, dtype=torch.float32)
    places = torch.arange(start, start + ids.shape[1]).expand_as(ids)
    return torch.stack([ids, places + layer / 2], -1)[:, None]


def append(cache: PagedCache, tokens: Sequence[Sequence[int]]) -> None:
    start = cache.get_seq_length()
    for layer in range(2):
        states = kv(tokens, layer, start)
        cache.update(states, -states, layer)


def held(cache: PagedCache) -> list[Any]:
    """Lengths, K and V of all layers."""
    if not cache.get_seq_length():
        return [0]
    layers = [(layer.keys.tolist(), layer.values.tolist()) for layer in cache.layers]
    return [cache.row_lengths, *layers]


class World:
    """A pool with a known prefix, a cache of two rows, and another cache of somebody else."""

    def __init__(self, folder: Path, num_blocks: int | None):
        self.folder = folder
        self.pool = BlockPool(CONFIG, block_size=BLOCK, num_blocks=num_blocks)
        self.cache, self.other = PagedCache(pool=self.pool), PagedCache(pool=self.pool)
        append(self.cache, PROMPTS)
        append(self.other, [OTHER])
        with PagedCache(pool=self.pool) as known:
            append(known, [KNOWN])
            self.insert(known, KNOWN)
        self.made: Any = None

    def insert(self, cache: PagedCache, tokens: Sequence[int]) -> None:
        ids = torch.tensor([tokens])
        self.pool.insert_prefix(cache, ids, attention_mask=torch.ones_like(ids))

    def match(self, tokens: Sequence[int]) -> PagedCache:
        return self.pool.match_prefix(torch.tensor([[*tokens, 0]]))

    def litter(self) -> None:
        """Leave a cache that holds blocks to the garbage collector."""
        self.cycle: list[Any] = [self.other.fork(2)]
        self.cycle.append(self.cycle)

    def collect(self) -> None:
        litter = weakref.ref(self.cycle[0])
        del self.cycle
        gc.collect()
        assert litter() is None


def saved(world: World) -> None:
    world.cache.save(world.folder / "cache")
    world.pool.save_prefixes(world.folder / "prefixes")


def one_row(world: World) -> None:
    world.cache.batch_select_indices(torch.tensor([1]))


def longer(world: World) -> None:
    one_row(world)
    world.insert(world.cache, PROMPTS[1])
    append(world.cache, [[5, 6, 7, 8, 9]])


def recorded(world: World) -> None:
    world.cache.activate_past_recording()
    append(world.cache, TWO)


def nothing(world: World) -> None:
    pass


def exhausted(world: World) -> None:
    with pytest.raises(PoolExhausted):
        append(world.cache, [[1] * 200] * 2)


def ends(world: World) -> None:
    """A decode step whose mask hides the end of a row."""
    columns = world.cache.get_seq_length()
    is_token = torch.ones(2, columns + 1, dtype=torch.bool)
    is_token[0, -3:-1] = False
    length, offset = world.cache.get_mask_sizes(1, 0)
    mask = paged_mask(2, 1, length, columns, offset, attention_mask=is_token)
    append(world.cache, [[21], [24]])
    assert isinstance(mask, LazyMask)  # and alive, as in a forward


def edited(world: World) -> None:
    with world.cache.edit(1) as (keys, values):
        keys[:, :, 2:4] += 1
        values[0] -= 1


def keep(make: Callable[[World], Any]) -> Callable[[World], None]:
    """An operation whose result is kept."""
    return lambda world: setattr(world, "made", make(world))


TWO = [[21, 22, 23], [24, 25, 26]]
# Name: (what is done first, what is interrupted).
OPERATIONS: dict[str, tuple[Callable[[World], Any], Callable[[World], Any]]] = {
    "step": (nothing, lambda w: append(w.cache, TWO)),
    "first step": (lambda w: w.cache.reset(), lambda w: append(w.cache, PROMPTS)),
    "step of a fork": (keep(lambda w: w.cache.fork()), lambda w: append(w.cache, TWO)),
    "one row for three": (one_row, lambda w: append(w.cache, [[1], [2], [3]])),
    "step that evicts": (nothing, lambda w: append(w.cache, [[1] * 60] * 2)),
    "step that grows": (nothing, lambda w: append(w.cache, [[1] * 60] * 2)),
    "full pool": (nothing, exhausted),
    "step that ends a row": (lambda w: append(w.cache, TWO), ends),
    "fork": (nothing, keep(lambda w: w.cache.fork(2))),
    "crop": (recorded, lambda w: w.cache.crop(-2)),
    "reorder": (nothing, lambda w: w.cache.reorder_cache(torch.tensor([1, 1]))),
    "repeat": (nothing, lambda w: w.cache.batch_repeat_interleave(3)),
    "edit": (keep(lambda w: w.cache.fork()), edited),
    "pickle": (nothing, lambda w: pickle.loads(pickle.dumps(w.cache))),
    "free rows": (nothing, lambda w: w.cache.free_rows(torch.tensor([0]))),
    "reset": (nothing, lambda w: w.cache.reset()),
    "free": (nothing, lambda w: w.cache.free()),
    "report": (nothing, lambda w: w.cache.report()),
    "offload": (nothing, lambda w: w.cache.offload()),
    "restore": (lambda w: w.cache.offload(), lambda w: w.cache.restore()),
    "save": (saved, lambda w: w.cache.save(w.folder / "cache")),
    "load": (saved, keep(lambda w: PagedCache.load(w.folder / "cache", CONFIG))),
    "match": (nothing, keep(lambda w: w.match(KNOWN))),
    "insert": (one_row, lambda w: w.insert(w.cache, PROMPTS[1])),
    "insert a longer one": (longer, lambda w: w.insert(w.cache, [*PROMPTS[1], 5, 6, 7, 8, 9])),
    "evict": (nothing, lambda w: w.pool.evict(3)),
    "clear prefixes": (nothing, lambda w: w.pool.clear_prefixes()),
    "save prefixes": (saved, lambda w: w.pool.save_prefixes(w.folder / "prefixes")),
    "load prefixes": (
        lambda w: (saved(w), w.pool.clear_prefixes()),
        lambda w: w.pool.load_prefixes(w.folder / "prefixes"),
    ),
    "batches": (nothing, lambda w: list(w.pool.batches([[1, 2], [3]], 2))),
    "numbers": (nothing, lambda w: (w.pool.num_free, w.pool.num_used, w.pool.check())),
    "return of blocks": (lambda w: (w.litter(), w.collect()), lambda w: w.pool.num_free),
}


def prepared(name: str, folder: Path) -> tuple[World, Callable[[], Any]]:
    """A world in which the operation can run, and the operation."""
    world = World(folder, None if name == "step that grows" else 40)
    first, operation = OPERATIONS[name]
    first(world)
    return world, lambda: operation(world)


def state(world: World) -> list[Any] | str:
    """What the cache holds, or why it cannot be used."""
    try:
        return held(world.cache)
    except RuntimeError as error:
        return str(error)


def state_after_a_step(world: World) -> list[Any] | str:
    try:
        append(world.cache, [[77]] * max(world.cache.batch_size, 1))
    except RuntimeError as error:
        if "reset() the cache" not in str(error):
            return str(error)
        world.cache.reset()  # a first step: nothing says whether the model has all of the layers
        return state_after_a_step(world)
    return held(world.cache)


def states(name: str, folder: Path) -> list[tuple[Any, Any]]:
    """What the cache holds before and after an operation, each with what a step makes of it."""
    found = []
    for is_done in (False, True):
        world, operation = prepared(name, folder)
        if is_done:
            operation()
        found.append((state(world), state_after_a_step(world)))
    return found


def check(world: World, allowed: list[tuple[Any, Any]]) -> None:
    """Everything that must hold after an operation was interrupted."""
    pool = world.pool
    pool.check()
    assert held(world.other) == held_alone(OTHER)
    with world.match(KNOWN) as found:
        length = found.get_seq_length()
        assert held(found) == (held_alone(KNOWN[:length]) if length else [0])
    for name in os.listdir(world.folder):  # each file is whole, and there is no other
        if name == "cache":
            PagedCache.load(world.folder / name, CONFIG).pool.check()
        else:
            assert BlockPool(CONFIG, block_size=BLOCK).load_prefixes(world.folder / name) > 0
    assert (state(world), state_after_a_step(world)) in allowed
    world.cache.free()
    with PagedCache(pool=pool) as fresh:
        append(fresh, PROMPTS)
        assert held(fresh) == held_alone(*PROMPTS)
    pool.check()
    for cache in (world.cache, world.other, world.made):
        if isinstance(cache, PagedCache):
            cache.free()
    pool.clear_prefixes()
    pool.check()
    assert (pool.num_used, pool.num_free) == (0, pool.num_blocks)


@functools.cache
def held_alone(*tokens: tuple[int, ...]) -> list[Any]:
    """What a cache of its own holds of these rows."""
    cache = PagedCache(config=CONFIG, block_size=BLOCK)
    append(cache, tokens)
    return held(cache)


def points(name: str, folder: Path, stride: int) -> range:
    _, operation = prepared(name, folder)
    counting = Points()
    counting.run(operation)
    assert counting.passed > 10
    return range(len(name) % stride, counting.passed, stride)


def interrupt_everywhere(name: str, folder: Path, stride: int) -> None:
    allowed = states(name, folder)
    for point in points(name, folder, stride):
        world, operation = prepared(name, folder)
        with contextlib.suppress(KeyboardInterrupt):
            Points(point).run(operation)
        check(world, allowed)


def collect_everywhere(name: str, folder: Path, stride: int) -> None:
    allowed = states(name, folder)[1:]
    places = points(name, folder, stride)
    for point in places:
        world, operation = prepared(name, folder)
        world.litter()
        Points(point, world.collect).run(operation)
        if hasattr(
            world, "cycle"
        ):  # the collector of Python itself has run while they were counted
            assert point >= places.stop - 8
            world.collect()
        check(world, allowed)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupted_operation_leaves_nothing_half_done(name: str, tmp_path: Path) -> None:
    interrupt_everywhere(name, tmp_path, STRIDE)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cache_may_be_collected_in_the_middle_of_anything(name: str, tmp_path: Path) -> None:
    collect_everywhere(name, tmp_path, 8 * STRIDE)


def interrupt_generate(name: str, num_points: int) -> None:
    """At places spread over a whole generate with beams on known prompts."""
    model = tiny(name)
    model.set_attn_implementation("hf_paged")
    inputs, pool = ragged_ids([9, 5]), BlockPool(model, block_size=BLOCK, num_blocks=60)

    def generate(cache: PagedCache) -> torch.Tensor:
        return model.generate(**inputs, past_key_values=cache, max_new_tokens=3, num_beams=2)

    def reuse() -> torch.Tensor:
        with pool.match_prefix(**inputs, num_return_sequences=2) as cache:
            found = generate(cache)
            pool.insert_prefix(cache, found)
            return found

    expected, counting = generate(PagedCache(config=model.config)), Points()
    assert torch.equal(counting.run(reuse), expected)
    for point in np.linspace(0, counting.passed - 1, num_points).astype(int):
        pool.clear_prefixes()
        reuse()  # in each of these, prefixes are matched
        cache = PagedCache(pool=pool)
        for call in (reuse, lambda cache=cache: generate(cache)):
            with contextlib.suppress(KeyboardInterrupt):
                assert torch.equal(Points(point).run(call), expected)
            pool.check()
        cache.reset()
        assert torch.equal(generate(cache), expected)
        assert torch.equal(reuse(), expected)
        cache.free()
        pool.check()
        assert pool.num_used == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_an_interrupted_generate_loses_nothing(name: str) -> None:
    interrupt_generate(name, num_points=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_generate_interrupted_at_many_points(name: str) -> None:
    interrupt_generate(name, num_points=150)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_single_point(name: str, tmp_path: Path) -> None:
    interrupt_everywhere(name, tmp_path, 1)
    collect_everywhere(name, tmp_path, 1)
