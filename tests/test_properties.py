"""Random sequences of operations on a cache, against plain lists of tensors."""

from __future__ import annotations

import pytest
import torch
from conftest import two_layer_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hf_paged import BlockPool, PagedCache, PoolExhausted

WINDOW = 6
CONFIG = two_layer_config(WINDOW)


class CacheMachine(RuleBasedStateMachine):
    """Caches on one bounded pool; each has a model: one tensor [rows, columns] of token numbers.

    Layer 0 attends to everything, layer 1 to a window. K is the token's number, V its negative.
    """

    @initialize(block_size=st.integers(1, 5), num_blocks=st.integers(8, 40))
    def make(self, block_size: int, num_blocks: int) -> None:
        self.pool = BlockPool(CONFIG, block_size=block_size, num_blocks=num_blocks)
        self.caches: list[tuple[PagedCache, torch.Tensor]] = []
        self.next = 1

    @rule(rows=st.integers(1, 3), tokens=st.integers(1, 9))
    def start(self, rows: int, tokens: int) -> None:
        self.caches.append((PagedCache(pool=self.pool), torch.zeros(rows, 0)))
        self._append(len(self.caches) - 1, rows, tokens)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), tokens=st.integers(1, 5), spread=st.integers(1, 3))
    def append(self, data: st.DataObject, tokens: int, spread: int) -> None:
        at = self._choose(data)
        rows = len(self.caches[at][1])
        self._append(at, spread if rows == 1 else rows, tokens)

    def _append(self, at: int, rows: int, tokens: int) -> None:
        cache, model = self.caches[at]
        new = torch.arange(self.next, self.next + rows * tokens).view(rows, tokens).float()
        self.next += rows * tokens
        states = new[:, None, :, None].expand(rows, 1, tokens, 2)
        before = cache.block_tables
        try:
            for layer in range(2):
                cache.update(states, -states, layer)
        except PoolExhausted:
            assert cache.block_tables == before
            assert cache.get_seq_length() == model.shape[1]
            return
        grown = torch.cat([model.expand(rows, -1) if len(model) == 1 else model, new], 1)
        self.caches[at] = (cache, grown)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        cache, model = self.caches[self._choose(data)]
        used = self.pool.num_used
        self.caches.append((cache.fork(n), model.repeat_interleave(n, 0)))
        assert self.pool.num_used == used

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        at = self._choose(data)
        cache, model = self.caches[at]
        if not model.shape[1]:
            return
        rows = data.draw(st.lists(st.integers(0, len(model) - 1), min_size=1, max_size=4))
        cache.reorder_cache(torch.tensor(rows))
        self.caches[at] = (cache, model[rows])

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        at = self._choose(data)
        cache, model = self.caches[at]
        count = data.draw(st.integers(0, model.shape[1]))
        try:
            cache.crop(-count)
        except RuntimeError:  # the window has moved on
            assert count
            assert model.shape[1] >= WINDOW
            return
        self.caches[at] = (cache, model[:, : model.shape[1] - count])

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), how=st.sampled_from(["free", "drop", "reset"]))
    def end(self, data: st.DataObject, how: str) -> None:
        at = self._choose(data)
        cache, model = self.caches[at]
        if how == "reset":
            cache.reset()
            self.caches[at] = (cache, model[:, :0])
            return
        del self.caches[at]
        if how == "free":
            cache.free()

    def _choose(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.caches) - 1))

    @invariant()
    def reads_are_bit_equal(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for cache, model in self.caches:
            columns = model.shape[1]
            assert cache.get_seq_length() == columns
            if columns:
                window = model[:, max(columns - WINDOW + 1, 0) :]
                for layer, tokens in zip(cache.layers, (model, window), strict=True):
                    assert torch.equal(layer.keys[:, 0, :, 0], tokens)
                    assert torch.equal(layer.values[:, 0, :, 1], -tokens)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.caches.clear()
            assert self.pool.num_used == 0


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCache = CacheMachine.TestCase


@pytest.mark.slow
def test_many_more_sequences() -> None:
    long = settings(max_examples=1500, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(CacheMachine, settings=long)
