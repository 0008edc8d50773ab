"""Threads: caches of their own on one pool, and what is refused on one cache."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import tiny
from test_interrupts import BLOCK, CONFIG, OTHER, append, held, held_alone
from transformers import DynamicCache

from hf_paged import BlockPool, PagedCache, PoolExhausted

HANGING = 1800  # seconds after which threads that wait for each other are said to


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def together(*works: Callable[[], Any]) -> None:
    """Run all at once; raises what the first one raised that failed."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    faulthandler.dump_traceback_later(HANGING)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HANGING)
    faulthandler.cancel_dump_traceback_later()
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    for error in errors:
        raise error


def prompt(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 99, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_threads_on_one_bounded_pool(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy search, beams, known prefixes and eviction at once; each step checks the pool."""
    monkeypatch.setenv("HF_PAGED_DEBUG", "1")
    model = tiny(name)
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model, block_size=4, num_blocks=90)
    turns, new = 3, 3
    inputs = {
        (thread, turn): torch.cat([prompt(14, turn % 2), prompt(3, 10 * thread + turn)], 1)
        for thread in range(4)
        for turn in range(turns)
    }
    expected = {
        key: model.generate(
            ids,
            past_key_values=DynamicCache(config=model.config),
            max_new_tokens=new,
            num_beams=1 + key[0] % 2,
        )
        for key, ids in inputs.items()
    }

    def work(thread: int) -> None:
        for turn in range(turns):
            ids = inputs[thread, turn]
            with pool.match_prefix(ids) as cache:
                found = model.generate(
                    ids,
                    past_key_values=cache,
                    max_new_tokens=new,
                    num_beams=1 + thread % 2,
                )
                assert torch.equal(found, expected[thread, turn])
                pool.insert_prefix(cache, found)
            if turn % 2:
                pool.evict(2)

    together(*(lambda thread=thread: work(thread) for thread in range(4)))
    pool.check()
    assert pool.num_used == 0
    assert pool.stats()["evictions"]
    assert pool.stats()["hits"] or name != "llama"  # a window has often left a prefix behind


def test_caches_are_collected_in_one_thread_while_another_steps() -> None:
    pool = BlockPool(CONFIG, block_size=BLOCK, num_blocks=400)
    stop = threading.Event()
    gc.collect()
    gc.freeze()

    def litter() -> None:
        while not stop.is_set():
            cycle: list[Any] = [PagedCache(pool=pool)]
            append(cycle[0], [range(30)])
            cycle.append(cycle)
            del cycle
            gc.collect()

    def step() -> None:
        try:
            for _ in range(40):
                with PagedCache(pool=pool) as cache:
                    append(cache, [OTHER])
                    with cache.fork(2) as branch:
                        append(branch, [[1], [2]])
                        append(cache, [[3]])
                        assert held(branch)[0] == [12, 12]
                    assert held(cache) == held_alone((*OTHER, 3))
        finally:
            stop.set()

    together(litter, step)
    gc.unfreeze()
    gc.collect()
    pool.check()
    assert pool.num_used == 0


# One cache, several threads


REFUSED: dict[str, Callable[[PagedCache], Any]] = {
    "step": lambda cache: append(cache, [[8, 9]]),
    "fork": lambda cache: cache.fork(),
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "offload": lambda cache: cache.offload(),
    "free rows": lambda cache: cache.free_rows(torch.tensor([0])),
    "reset": lambda cache: cache.reset(),
    "insert": lambda cache: cache.pool.insert_prefix(
        cache, torch.tensor([[*OTHER, 7]]), attention_mask=torch.ones(1, 12)
    ),
}


def between_two_layers(cache: PagedCache, call: Callable[[], Any]) -> None:
    """One step of the cache, and `call` in another thread when it is half done."""
    layers = cache.layers[0], cache.layers[1]
    start = cache.get_seq_length()
    states = [torch.tensor([[[[7.0, start + layer / 2]]]]) for layer in range(2)]
    layers[0].update(states[0], -states[0])
    together(call)
    layers[1].update(states[1], -states[1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_disturb_another_threads_step_is_refused(name: str) -> None:
    cache = PagedCache(config=CONFIG, block_size=BLOCK)
    append(cache, [OTHER])

    def disturb() -> None:
        with pytest.raises(RuntimeError, match=r"is in the middle of a step .* fork\(\)"):
            REFUSED[name](cache)
        assert cache.get_seq_length() == len(OTHER)  # looking is free

    between_two_layers(cache, disturb)
    assert held(cache) == held_alone((*OTHER, 7))
    REFUSED[name](cache)
    cache.pool.check()


def test_a_cache_may_be_freed_in_another_threads_step() -> None:
    cache = PagedCache(config=CONFIG, block_size=BLOCK)
    append(cache, [OTHER])
    with pytest.raises(RuntimeError, match="was freed"):
        between_two_layers(cache, cache.free)
    cache.pool.check()
    assert cache.pool.num_used == 0


def test_a_cache_goes_on_in_another_thread() -> None:
    """After whole steps, and after the thread of a step that failed has ended."""
    cache = PagedCache(config=CONFIG, block_size=BLOCK)
    append(cache, [OTHER])
    states = torch.zeros(1, 1, 1, 2)
    together(lambda: append(cache, [[7]]))
    together(lambda: cache.update(states, states, 0))
    append(cache, [[8]])
    assert held(cache) == held_alone((*OTHER, 7, 8))


def test_two_threads_with_masks_of_one_cache() -> None:
    """The second forward made its mask before the first one added a token."""
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config)
    ids = prompt(9, 0)
    with torch.no_grad():
        model(ids[:, :7], past_key_values=cache)

    def other(*args: Any) -> None:
        hook.remove()

        def forward() -> None:
            with torch.no_grad():
                model(ids[:, 7:8], past_key_values=cache)

        together(forward)

    hook = model.model.layers[0].register_forward_pre_hook(other)  # the mask is made before it
    with torch.no_grad(), pytest.raises(RuntimeError, match="not as long as when the mask"):
        model(ids[:, 7:8], past_key_values=cache)
    with torch.no_grad():
        found = model(ids[:, 8:], past_key_values=cache).logits
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, -1:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_racing_threads_leave_whole_steps() -> None:
    """Whoever comes second is refused; nobody's K/V are mixed with another's."""
    cache = PagedCache(config=CONFIG, block_size=BLOCK)
    append(cache, [OTHER])
    refusals = []

    def work(token: int) -> None:
        for _ in range(150):
            states = torch.full((1, 1, 1, 2), float(token))
            try:
                for layer in range(2):
                    cache.update(states, states, layer)
            except RuntimeError as error:
                refusals.append(str(error))

    together(lambda: work(100), lambda: work(200))
    assert all("in the middle of a step" in words for words in refusals)
    full, window = (layer.keys[0, 0, :, 0] for layer in cache.layers)
    assert torch.equal(full[-len(window) :], window)
    assert len(full) == len(OTHER) + 300 - len(refusals)
    cache.pool.check()


# Interrupts as they really come


def test_real_signals_at_random_times() -> None:
    """SIGINT in the main thread in the middle of steps, forks, crops and frees."""
    rng, hits = random.Random(0), 0
    pool = BlockPool(CONFIG, block_size=BLOCK, num_blocks=60)
    other = PagedCache(pool=pool)
    append(other, [OTHER])
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 6e-3))
                cache = PagedCache(pool=pool)
                append(cache, [OTHER, OTHER])
                branch = cache.fork(2)
                append(branch, [[1], [2], [3], [4]])
                branch.crop(-1)
                cache.reorder_cache(torch.tensor([1, 1]))
                cache.free()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            cache = branch = None
            pool.check()
            assert held(other) == held_alone(OTHER)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits
    other.free()
    gc.collect()
    assert pool.num_used == 0


def test_a_thread_that_is_told_to_stop() -> None:
    """An exception that another thread sends (as some servers do) loses no block."""
    pool = BlockPool(CONFIG, block_size=BLOCK, num_blocks=60)
    rng = random.Random(1)
    for _ in range(20):
        started, stopped = threading.Event(), []

        def work(started: threading.Event = started, stopped: list[bool] = stopped) -> None:
            try:
                while True:
                    with PagedCache(pool=pool) as cache:
                        append(cache, [OTHER])
                        started.set()
                        append(cache.fork(3), [[1], [2], [3]])
            except SystemExit:
                stopped.append(True)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        started.wait(HANGING)
        threading.Event().wait(rng.uniform(0, 2e-3))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )
        thread.join(HANGING)
        assert stopped
        pool.check()
    gc.collect()
    assert pool.num_used == 0


def test_a_full_pool_in_one_thread_leaves_the_others_alone() -> None:
    """Threads that find the pool full are told so, and the others are not disturbed."""
    pool = BlockPool(CONFIG, block_size=BLOCK, num_blocks=12)

    def work() -> None:
        for _ in range(30):
            with contextlib.suppress(PoolExhausted), PagedCache(pool=pool) as cache:
                append(cache, [OTHER])
                append(cache, [[5] * 9])
                assert held(cache) == held_alone(OTHER + (5,) * 9)

    together(*[work] * 4)
    pool.check()
    assert pool.num_used == 0
