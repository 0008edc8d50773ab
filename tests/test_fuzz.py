"""Random sequences of all public operations on one small pool, against a dense reference.

Real models of two layers with random weights run on several caches that share a bounded pool. After
each operation every cache holds what it must (see `fuzz_reference`), and the pool adds up. The
longer run does 50,000 operations:

    pytest -m slow tests/test_fuzz.py
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from conftest import FULL, SLIDING, check_used, tiny
from fuzz_reference import (
    PAD,
    ROOT,
    Failed,
    Reference,
    Tracked,
    Watch,
    as_inputs,
    check_cache,
    positions,
)
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
from transformers import PreTrainedModel, StoppingCriteriaList

from hf_paged import BlockPool, FreeFinishedRows, PagedCache, PoolExhausted
from hf_paged.core.storage import ENV_DEBUG

T = TypeVar("T")

VOCAB, WINDOW, MOST_CACHES = 9, 5, 5
# Layer groups: full attention, a window, both, and chunks.
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]},
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", FULL],
        "no_rope_layers": [1, 0],
    },
}
POISONED = "gemma3_text"
# Prompts begin with one of these and end with a token of their own; two of them begin alike.
TEXTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 5, 7],
    [1, 2, 3, 4, 8, 7, 6, 5, 4, 3, 2, 1],
    [5, 5, 6, 5, 5, 6, 5, 5, 6, 5, 5, 6],  # of which prompt lookup finds the continuation
]
GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {},
    "rows that end early": {},
}
ALONE = ("prompt lookup", "assisted")  # which take one prompt and an empty cache

prompts = st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(1, 3)).map(
    lambda drawn: [*TEXTS[drawn[0]][: drawn[1] - 1], drawn[2]]
)
batches = st.lists(prompts, min_size=1, max_size=3)
tenants = st.sampled_from(["a", "b"])
new_tokens = st.integers(1, 4)
fails = st.sampled_from([None, None, None, (0, 0), (0, 1), (1, 0), (2, 0)])

# How often each operation was done, and what came of it, over all examples; by the kind of model.
OPERATIONS: dict[str, Counter[str]] = {kind: Counter() for kind in SMALL}
OUTCOMES: dict[str, Counter[str]] = {kind: Counter() for kind in SMALL}


@once
def models(kind: str) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """The model on hf_paged, the same without, and an assistant that is right at times."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, **SMALL[kind]}
    model, plain, assistant = (tiny(kind, **sizes) for _ in range(3))
    model.set_attn_implementation("hf_paged")
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model, plain, assistant


class Fuzz(RuleBasedStateMachine):
    """Caches and known prefixes on a pool; `caches` says what each of them holds, `indexed` which
    tokens are known to each tenant."""

    kind: str

    @initialize(block_size=st.integers(1, 5), num_blocks=st.integers(12, 48))
    def make(self, block_size: int, num_blocks: int) -> None:
        self.model, plain, self.assistant = models(self.kind)
        self.pool = BlockPool(self.model.config, block_size=block_size, num_blocks=num_blocks)
        self.is_full_attention = [group.window for group in self.pool.groups] == [None]
        self.reference = Reference(plain)
        self.tree = self.reference.tree
        self.watch = Watch(self.model, self.reference)
        self.caches: list[Tracked] = []
        self.folder = tempfile.TemporaryDirectory()
        self.saved: tuple[dict[str, set[int]], bool] | None = None
        self._evictions = 0
        self._forget()
        torch.manual_seed(0)

    def _forget(self) -> None:
        self.indexed: dict[str, set[int]] = {"a": set(), "b": set()}
        self.has_evicted = False

    # Forwards

    @rule(rows=batches, share=st.booleans(), backend=st.sampled_from(["cpu", "dense"]))
    def start(self, rows: list[list[int]], share: bool, backend: str) -> None:
        tracked = self._add(PagedCache(pool=self.pool, share_prompts=share, backend=backend))
        self._forward(tracked, rows, "forward")

    @precondition(lambda self: self._usable())
    @rule(data=st.data(), rows=batches, count=new_tokens, ragged=st.booleans())
    def append(self, data: Any, rows: list[list[int]], count: int, ragged: bool) -> None:
        tracked = self._choose(data)
        self._forward(tracked, self._new_rows(tracked, rows, count, ragged), "forward")

    @rule(
        data=st.data(), rows=batches, count=new_tokens, layer=st.integers(0, 1), first=st.booleans()
    )
    def fail(self, data: Any, rows: list[list[int]], count: int, layer: int, first: bool) -> None:
        """A step that a layer ends; if it was a cache's first, then the same once more.

        That may not fit: a layer that the first attempt did not reach may find that rows which
        began alike do not share.
        """
        if first or not self._usable():
            tracked, new = self._add(PagedCache(pool=self.pool)), rows
        else:
            tracked = self._choose(data)
            new = self._new_rows(tracked, rows, count, False)
        before = tracked.columns
        self.watch.fails = (0, layer)
        if not self._forward(tracked, new, "forward that fails") and tracked.is_torn:
            assert tracked.columns == before
            self._forward(tracked, new, "forward again")
            tracked.is_torn = False

    @rule(rows=batches, chunk_size=st.none() | st.integers(1, 5))
    def prefill(self, rows: list[list[int]], chunk_size: int | None) -> None:
        tracked, inputs = self._add(PagedCache(pool=self.pool)), as_inputs(rows)
        self._run(
            tracked, lambda: tracked.cache.prefill(self.model, **inputs, chunk_size=chunk_size)
        )
        self._count("prefill")

    def _new_rows(
        self, tracked: Tracked, rows: list[list[int]], count: int, ragged: bool
    ) -> list[list[int]]:
        """Up to `count` new tokens a row; for any number of rows if the cache has one or none."""
        if len(tracked.rows) > 1 and tracked.columns:
            rows = [rows[at % len(rows)] for at in range(len(tracked.rows))]
        if any(tracked.freed):
            count = 1
        if not ragged:
            return [(row * count)[:count] for row in rows]
        return [row[-count:] for row in rows]

    def _forward(self, tracked: Tracked, new: list[list[int]], name: str) -> bool:
        """A plain forward of new tokens; says whether it came through."""
        past = self._items(tracked) if tracked.columns else [[] for _ in new]
        if len(past) == 1:
            past = past * len(new)
        new = [[PAD] * (max(map(len, new)) - len(row)) + row for row in new]
        whole = as_inputs([row + items for row, items in zip(past, new, strict=True)])
        ids, mask, columns = whole["input_ids"], whole["attention_mask"], len(past[0])
        given = {"attention_mask": mask, "position_ids": positions(mask)[:, columns:]}
        if mask.all():
            given = {}

        def call() -> bool:
            with torch.no_grad():
                self.model(ids[:, columns:], past_key_values=tracked.cache, **given)
            return True

        self._count(name)
        return bool(self._run(tracked, call))

    def _run(self, tracked: Tracked, call: Callable[[], T]) -> T | None:
        """What `call`, which runs the model on a cache, returns; None if a step has failed."""
        self.watch.tracked = tracked
        tables, columns = tracked.cache.block_tables, tracked.columns
        if tracked.is_torn:  # those of the step that has failed
            tables = []
        try:
            return call()
        except PoolExhausted as error:
            self._note("pool full")
            self._check_exhausted(error)
            if tracked.columns == columns and self.pool.groups[0].window is None:
                assert tracked.cache.block_tables == tables
        except Failed:
            self._note("failed")
            if tracked.columns or not tracked.is_torn:
                tracked.crop(0)  # rolls it back
        finally:
            self.watch.fails = None
            self.watch.verify()
            self._note_evictions()
        return None

    def _check_exhausted(self, error: PoolExhausted) -> None:
        assert error.needed > error.free + error.evictable, "what it needs is there"

    # generate

    @rule(
        kind=st.sampled_from(sorted(GENERATE)),
        rows=batches,
        begin=st.sampled_from(["empty", "match", "match", "prefill"]),
        tenant=tenants,
        count=new_tokens,
        fails=fails,
        insert=st.booleans(),
    )
    def generate(
        self,
        kind: str,
        rows: list[list[int]],
        begin: str,
        tenant: str,
        count: int,
        fails: tuple[int, int] | None,
        insert: bool,
    ) -> None:
        if kind in ALONE:
            rows, begin = rows[:1], "empty"
        inputs = as_inputs(rows)
        repeats = self._repeats(kind) if len(rows) > 1 else 1
        if begin == "match":
            tracked = self._match(rows, tenant, repeats)
        else:
            tracked = self._add(PagedCache(pool=self.pool))
        if begin == "prefill":
            call = lambda: tracked.cache.prefill(self.model, **inputs)  # noqa: E731
            if self._run(tracked, call) is None:
                return
            tracked.batch_repeat_interleave(repeats)
        self.watch.fails = fails
        sequences = self._generate(tracked, inputs, kind, count)
        if sequences is not None and insert:
            self._insert(tracked, tenant, sequences)

    @precondition(lambda self: self._usable())
    @rule(data=st.data(), rows=batches, count=new_tokens, ragged=st.booleans(), fails=fails)
    def chat(
        self,
        data: Any,
        rows: list[list[int]],
        count: int,
        ragged: bool,
        fails: tuple[int, int] | None,
    ) -> None:
        """Another turn: generate with all that a cache holds and new tokens as the prompt."""
        tracked = self._choose(data)
        if any(tracked.freed) or not tracked.columns:
            return
        kinds = ["greedy", "chunked prefill"]
        if len(tracked.rows) == 1:
            kinds += ["sampling", "beams"]
        past, rows = self._items(tracked), rows[: len(tracked.rows)]
        new = self._new_rows(tracked, rows, count, ragged)
        width = max(map(len, new))
        inputs = as_inputs(
            [
                row + [PAD] * (width - len(items)) + items
                for row, items in zip(past, new, strict=True)
            ]
        )
        self.watch.fails = fails
        self._generate(tracked, inputs, data.draw(st.sampled_from(kinds)), 2)

    @rule(
        rows=st.lists(prompts, min_size=1, max_size=4),
        kind=st.sampled_from(["greedy", "sampling", "beams"]),
        tenant=tenants,
        count=new_tokens,
    )
    def batches_that_fit(self, rows: list[list[int]], kind: str, tenant: str, count: int) -> None:
        """None of them finds the pool full."""
        repeats = self._repeats(kind)
        while len(self.caches) >= MOST_CACHES:
            self._drop(0)
        try:
            fitting = self.pool.batches(rows, count, num_return_sequences=repeats, max_prompts=2)
            for batch in fitting:
                some = [rows[index] for index in batch.indices]
                tracked = self._match(some, tenant, repeats if len(some) > 1 else 1)
                sequences = self._generate(tracked, batch.inputs, kind, count)
                assert sequences is not None, "the pool was full"
                self._insert(tracked, tenant, sequences)
                self._end(tracked)
        except PoolExhausted:
            raise
        except (ValueError, RuntimeError) as error:
            words = str(error)
            assert "can never fit" in words or "caches leave" in words
            self._note("no room for a batch")

    def _repeats(self, kind: str) -> int:
        options = GENERATE[kind]
        return options.get("num_beams") or options.get("num_return_sequences", 1)

    def _generate(
        self, tracked: Tracked, inputs: dict[str, torch.Tensor], kind: str, count: int
    ) -> torch.Tensor | None:
        options = dict(GENERATE[kind])
        if kind == "assisted":
            options["assistant_model"] = self.assistant
        if kind == "rows that end early":
            stop = FreeFinishedRows(tracked.cache, [1, 2, 3, 4])
            options["stopping_criteria"] = StoppingCriteriaList([stop])

        def call() -> torch.Tensor:
            with tracked.moves():
                return self.model.generate(
                    **inputs,
                    past_key_values=tracked.cache,
                    max_new_tokens=count,
                    pad_token_id=0,
                    **options,
                )

        self._count(f"generate: {kind}")
        sequences = self._run(tracked, call)
        if sequences is not None and "num_beams" not in options:
            width = inputs["input_ids"].shape[1]
            for row, is_freed, sequence in zip(
                self._items(tracked), tracked.freed, sequences.tolist(), strict=True
            ):
                assert len(row) >= width
                assert is_freed or [max(item, 0) for item in row] == sequence[: len(row)]
        return sequences

    # Moves

    @precondition(lambda self: self._usable())
    @rule(data=st.data(), n=st.integers(1, 3), deep=st.booleans())
    def fork(self, data: Any, n: int, deep: bool) -> None:
        tracked, used = self._choose(data), self.pool.num_used
        forked = copy.deepcopy(tracked.cache) if deep else tracked.cache.fork(n)
        assert self.pool.num_used == used
        self._count("fork")
        self._keep(tracked.like(forked, 1 if deep else n))

    @precondition(lambda self: self._usable())
    @rule(
        data=st.data(),
        how=st.sampled_from(["reorder_cache", "batch_select_indices", "batch_repeat_interleave"]),
    )
    def move(self, data: Any, how: str) -> None:
        tracked, used = self._choose(data), self.pool.num_used
        if not tracked.columns:
            return
        if how == "batch_repeat_interleave":
            tracked.batch_repeat_interleave(2 if len(tracked.rows) < 4 else 1)
        else:
            row = st.integers(0, len(tracked.rows) - 1)
            rows = data.draw(st.lists(row, min_size=1, max_size=4))
            getattr(tracked, how)(torch.tensor(rows))
        assert self.pool.num_used <= used
        self._count(how)

    @precondition(lambda self: self._usable())
    @rule(data=st.data(), count=st.integers(0, 9))
    def crop(self, data: Any, count: int) -> None:
        tracked = self._choose(data)
        count = min(count, tracked.columns)
        self._count("crop")
        try:
            tracked.crop(-count)
        except RuntimeError:
            self._note("crop refused")
            assert not self.is_full_attention
            assert tracked.columns - count < tracked.safe

    @precondition(lambda self: self._usable())
    @rule(data=st.data())
    def record_past(self, data: Any) -> None:
        self._choose(data).cache.activate_past_recording()
        self._count("activate_past_recording")

    @precondition(lambda self: self._usable())
    @rule(data=st.data())
    def free_rows(self, data: Any) -> None:
        tracked = self._choose(data)
        if tracked.columns:
            row = st.integers(0, len(tracked.rows) - 1)
            tracked.free_rows(torch.tensor(data.draw(st.lists(row, min_size=1, max_size=2))))
            self._count("free_rows")

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), how=st.sampled_from(["free", "drop", "with", "reset"]))
    def end(self, data: Any, how: str) -> None:
        tracked = self._choose(data, self.caches)
        self._count(how)
        if how == "reset":
            tracked.reset()
        elif how == "drop":
            self._drop(self.caches.index(tracked))
        elif how == "with":
            with tracked.cache:
                pass
            self._end(tracked)
        else:
            self._end(tracked)

    # Prefixes

    @rule(rows=batches, tenant=tenants, repeats=st.integers(1, 2))
    def match(self, rows: list[list[int]], tenant: str, repeats: int) -> None:
        tracked = self._match(rows, tenant, repeats)
        width = max(map(len, rows))
        padded = [[PAD] * (width - len(row)) + row for row in rows for _ in range(repeats)]
        self._forward(tracked, [row[tracked.columns :] for row in padded], "forward")

    def _match(self, rows: list[list[int]], tenant: str, repeats: int) -> Tracked:
        cache = self.pool.match_prefix(
            **as_inputs(rows), extra_key=tenant, num_return_sequences=repeats
        )
        width = max(map(len, rows))
        nodes = [self.tree.grow(ROOT, [PAD] * (width - len(row)) + row) for row in rows]
        known = min(width - 1, *(self._common(row, tenant) for row in nodes))
        columns = cache.get_seq_length()
        assert columns <= known, "more is matched than is known"
        if self.is_full_attention and not self.has_evicted:
            assert columns == known, "less is matched than is known"
        self._count("match_prefix")
        self._note("known" if columns else "not known")
        tracked = self._add(cache)
        if columns:
            tracked.extend([row[:columns] for row in nodes for _ in range(repeats)])
            tracked.has_completed = False
        return tracked

    def _common(self, nodes: list[int], tenant: str) -> int:
        """The columns of a row of which nothing or the tokens are known."""
        known = self.indexed[tenant]
        return next((at for at, n in enumerate(nodes) if n != ROOT and n not in known), len(nodes))

    @precondition(lambda self: self._usable())
    @rule(data=st.data(), tenant=tenants)
    def insert(self, data: Any, tenant: str) -> None:
        tracked = self._choose(data)
        if tracked.columns:
            self._insert(tracked, tenant, as_inputs(self._items(tracked))["input_ids"])

    def _insert(self, tracked: Tracked, tenant: str, sequences: torch.Tensor) -> None:
        count, free = len(sequences), self.pool.num_free
        try:
            fresh = self.pool.insert_prefix(tracked.cache, sequences, extra_key=tenant)
        except ValueError:
            tree, rows = self.tree, tracked.rows
            if not any(node != ROOT and tree.item(node) == PAD for row in rows for node in row):
                raise  # there is no padding behind a token
            self._note("insert refused")
            return
        self._count("insert_prefix")
        assert self.pool.num_free >= free, "what is known is stored twice"
        nodes: set[int] = set()
        for index in range(count):
            row = tracked.rows[index * len(tracked.rows) // count][: tracked.known_columns]
            row = [node for node in row if node != ROOT]
            if tracked.known_columns < tracked.columns:  # whole blocks
                row = row[: len(row) // self.pool.block_size * self.pool.block_size]
            nodes.update(row)
        if not self.has_evicted:
            assert fresh == len(nodes - self.indexed[tenant])
        self.indexed[tenant] |= nodes

    @precondition(lambda self: any(self.indexed.values()))
    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        free, evictable = self.pool.num_free, self.pool.num_evictable
        freed = self.pool.evict(n)
        assert self.pool.num_free == free + freed
        assert self.pool.num_evictable == evictable - freed
        assert freed >= min(n, evictable)
        self._count("evict")
        self._note_evictions()

    @precondition(lambda self: any(self.indexed.values()))
    @rule()
    def clear_prefixes(self) -> None:
        most = self.pool.num_evictable + self.pool.num_free
        self.pool.clear_prefixes()
        assert self.pool.num_evictable == 0
        assert self.pool.num_free >= most
        self._forget()
        self._count("clear_prefixes")

    def _note_evictions(self) -> None:
        evictions = self.pool.stats()["evictions"]
        if evictions > self._evictions:
            self.has_evicted, self._evictions = True, evictions
            self._note("evicted")

    # In and out

    @precondition(lambda self: self._usable())
    @rule(data=st.data())
    def offload(self, data: Any) -> None:
        tracked = self._choose(data)
        tracked.cache.offload()
        tracked.is_outside = True
        self._count("offload")

    @precondition(lambda self: self._outside())
    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        tracked = self._choose(data, self._outside())
        try:
            tracked.cache.restore()
        except PoolExhausted as error:
            self._check_exhausted(error)
            self._note("no room to restore")
        else:
            tracked.is_outside = False
            self._count("restore")
        self._note_evictions()

    @precondition(lambda self: self._usable())
    @rule(data=st.data(), rows=batches, count=new_tokens)
    def save_and_load(self, data: Any, rows: list[list[int]], count: int) -> None:
        """A saved cache is another one in a pool of its own, and goes on there."""
        tracked, path = self._choose(data), Path(self.folder.name) / "cache"
        tracked.cache.save(path)
        loaded = tracked.like(PagedCache.load(path, self.model.config))
        loaded.has_completed = False
        check_cache(loaded, self.reference)
        assert self._forward(loaded, self._new_rows(loaded, rows, count, False), "load")
        check_cache(loaded, self.reference)
        loaded.cache.pool.check()

    @rule()
    def save_prefixes(self) -> None:
        self.pool.save_prefixes(Path(self.folder.name) / "prefixes")
        self.saved = copy.deepcopy(self.indexed), self.has_evicted
        self._count("save_prefixes")

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load_prefixes(self) -> None:
        assert self.saved is not None
        (indexed, has_evicted), self.saved = self.saved, None
        try:
            fresh = self.pool.load_prefixes(Path(self.folder.name) / "prefixes")
        except PoolExhausted as error:
            self._check_exhausted(error)
            self._note("no room for prefixes")
        else:
            self._count("load_prefixes")
            self._note_evictions()
            self.has_evicted |= has_evicted
            if not self.has_evicted:
                assert fresh == sum(len(indexed[t] - self.indexed[t]) for t in indexed)
            for tenant, nodes in indexed.items():
                self.indexed[tenant] |= nodes

    # What is refused

    @precondition(lambda self: self._usable())
    @rule(data=st.data(), what=st.sampled_from(["crop", "states", "pool", "mask"]))
    def refused(self, data: Any, what: str) -> None:
        tracked = self._choose(data)
        holds_none = self.pool.num_free == self.pool.num_blocks  # and takes states of any kind
        if not tracked.columns or (what == "states" and holds_none):
            return
        cache, rows = tracked.cache, len(tracked.rows)
        with pytest.raises(ValueError), torch.no_grad():  # noqa: PT011, PT012
            if what == "crop":
                cache.crop(-tracked.columns - 1)
            elif what == "pool":
                other = BlockPool(self.model.config, num_blocks=1)
                other.insert_prefix(cache, as_inputs(self._items(tracked))["input_ids"])
            elif what == "states":
                states = torch.zeros(rows + (rows > 1), 1 + (rows > 1), 1, 16)
                cache.update(states, states, 0)
            else:
                ids, self.watch.tracked = torch.ones(rows, 1, dtype=torch.long), tracked
                mask = torch.ones(rows, tracked.columns, dtype=torch.long)
                self.model(ids, attention_mask=mask, past_key_values=cache)
        self._count("refused")

    @precondition(lambda self: self._outside())
    @rule(data=st.data())
    def use_outside(self, data: Any) -> None:
        """A cache that is offloaded cannot be used."""
        tracked = self._choose(data, self._outside())
        for call in (
            tracked.cache.fork,
            lambda: tracked.cache.crop(-1),
            lambda: tracked.cache.reorder_cache(torch.tensor([0])),
            lambda: tracked.cache.update(*torch.zeros(2, 1, 2, 1, 16), 0),
        ):
            with pytest.raises(RuntimeError, match="restore"):
                call()
        self._count("refused")

    # Bookkeeping

    def _usable(self) -> list[Tracked]:
        return [tracked for tracked in self.caches if not tracked.is_outside]

    def _outside(self) -> list[Tracked]:
        return [tracked for tracked in self.caches if tracked.is_outside]

    def _choose(self, data: Any, among: list[Tracked] | None = None) -> Tracked:
        # Numbers, since hypothesis keeps what it has drawn alive.
        among = self._usable() if among is None else among
        return among[data.draw(st.integers(0, len(among) - 1))]

    def _items(self, tracked: Tracked) -> list[list[int]]:
        return [[self.tree.item(node) for node in row] for row in tracked.rows]

    def _add(self, cache: PagedCache) -> Tracked:
        return self._keep(Tracked(cache))

    def _keep(self, tracked: Tracked) -> Tracked:
        while len(self.caches) >= MOST_CACHES:
            self._drop(0)
        self.caches.append(tracked)
        return tracked

    def _drop(self, index: int) -> None:
        """Leave a cache to the garbage collector."""
        if self.watch.tracked is self.caches[index]:
            self.watch.tracked = None
        del self.caches[index]

    def _end(self, tracked: Tracked) -> None:
        tracked.cache.free()
        self.caches = [other for other in self.caches if other is not tracked]
        with pytest.raises(RuntimeError, match="was freed"):
            tracked.cache.get_seq_length()

    def _count(self, operation: str) -> None:
        OPERATIONS[self.kind][operation] += 1

    def _note(self, outcome: str) -> None:
        OUTCOMES[self.kind][outcome] += 1

    @invariant()
    def all_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check()
        check_used(pool, [tracked.cache for tracked in self.caches])
        for tracked in self._usable():
            check_cache(tracked, self.reference)
            if tracked.is_torn:  # nothing but the same step may follow
                tracked.reset()

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()
        if not hasattr(self, "pool"):
            return
        self.watch.close()
        self.watch.tracked = None
        self.caches.clear()
        self.folder.cleanup()
        if sys.exc_info()[0] is not None:  # what has failed is said already
            return
        pool = self.pool
        assert pool.num_used == 0, "blocks are lost"
        for tenant, nodes in self.indexed.items():
            for node in nodes - {self.tree.parent(node) for node in nodes}:
                ids = [self.tree.item(n) for n in self.tree.path(node)] + [VOCAB - 1]
                check_cache(self._match([ids], tenant, 1), self.reference)
                self.caches.clear()
        pool.clear_prefixes()
        pool.check()
        assert pool.num_free == pool.num_blocks, "blocks are lost"


@pytest.fixture(autouse=True)
def poison(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of model runs with blocks that are NaN while nobody holds them."""
    if kind == POISONED:
        monkeypatch.setenv(ENV_DEBUG, "1")


def run(kind: str, examples: int) -> None:
    machine = type(f"Fuzz_{kind}", (Fuzz,), {"kind": kind})
    OPERATIONS[kind].clear()
    OUTCOMES[kind].clear()
    long = settings(max_examples=examples, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(machine, settings=long)
    print(kind, OPERATIONS[kind].total(), OPERATIONS[kind], OUTCOMES[kind])


@pytest.mark.parametrize("kind", SMALL)
def test_any_operations(kind: str) -> None:
    run(kind, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_many_more_operations(kind: str) -> None:
    """50,000 in all; each of them, and each of their outcomes, many times."""
    run(kind, 310)
    done, came = OPERATIONS[kind], OUTCOMES[kind]
    assert done.total() >= 50_000 / len(SMALL)
    for name in ("restore", "forward again", *(f"generate: {name}" for name in GENERATE)):
        assert done[name] >= 10, done
    assert min(done.values()) >= 10, done
    for outcome in ("pool full", "failed", "known", "evicted"):
        assert came[outcome] >= 50, came
    assert came["no room for a batch"] >= 10, came
