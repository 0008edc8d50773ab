"""Ways to send a text through a KV cache, and faults that a cache may have on the way.

A way is a function of `Caches` (how to make, share and move caches of one kind) and a `Text`. It
runs the same forwards on the same tokens whatever the kind of cache: never one forward per window,
always what is new behind what the cache holds. So what two kinds of cache give can be compared
token by token, and what differs is the cache and its attention alone.
"""

from __future__ import annotations

import copy
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_paged import BlockPool, PagedCache

# Tokens of the forwards that follow each other. They end on both sides of every block border of 16;
# some have so few queries that the decode kernels take them, others more.
PIECES = (1, 5, 1, 18, 2, 7)
GREEDY = 8  # tokens that each way goes on with by itself


@dataclass(frozen=True)
class Scores:
    """What a way gives for the tokens that it scores.

    Attributes:
        logits: [tokens, vocabulary], what the model predicts in front of each token.
        targets: int64 [tokens], the token that the text has there.
        rows: int64 [tokens], the row that each is of.
        greedy: int64 [rows, GREEDY], how the model goes on behind the text.
        paged: of the attention calls on the cache the share that read K/V through block tables.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    greedy: torch.Tensor
    paged: float

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        starts = itertools.accumulate((len(part.greedy) for part in parts), initial=0)
        return cls(
            torch.cat([part.logits for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.rows + start for part, start in zip(parts, starts, strict=False)]),
            torch.cat([part.greedy for part in parts]),
            min(part.paged for part in parts),
        )


class Stream:
    """Forwards that follow each other through one cache.

    Args:
        cache: what they go through; what it holds already is behind them.
        mask: [rows, columns], 0 where a column is padding; None where none is.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, mask: torch.Tensor | None = None):
        self.model, self.cache, self.mask = model, cache, mask

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits ([rows, columns, vocabulary]) behind each of the new `ids`."""
        inputs = {}
        if self.mask is not None:
            stop = self.cache.get_seq_length() + ids.shape[1]
            inputs["attention_mask"] = mask = F.pad(
                self.mask, (0, max(stop - self.mask.shape[1], 0)), value=1
            )[:, :stop]
            if "position_ids" in signature(self.model.forward).parameters:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                inputs["position_ids"] = positions[:, -ids.shape[1] :]
        with torch.no_grad():
            return self.model(input_ids=ids, past_key_values=self.cache, **inputs).logits

    def pieces(self, ids: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The same in forwards of `sizes` tokens, over and over again."""
        ends = itertools.accumulate(itertools.cycle(sizes))
        ends = itertools.takewhile(lambda end: end < ids.shape[1], ends)
        return torch.cat([self(piece) for piece in ids.tensor_split(list(ends), dim=1)], dim=1)

    def score(self, ids: torch.Tensor, sizes: Sequence[int] = PIECES) -> Scores:
        """Score what follows the columns of `ids` ([rows, columns]) that the cache holds.

        The first of them is given to the model, and the last is only predicted.
        """
        start = self.cache.get_seq_length()
        logits = self.pieces(ids[:, start:-1], sizes)
        targets = ids[:, start + 1 :]
        is_token = torch.ones_like(targets) if self.mask is None else self.mask[:, start:-1]
        at, greedy = is_token.bool().nonzero(as_tuple=True), self.greedy(logits[:, -1])
        return Scores(logits[at], targets[at], at[0], greedy, self.paged())

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows, GREEDY], the likeliest tokens behind `logits` ([rows, vocabulary])."""
        tokens = [logits.argmax(-1, keepdim=True)]
        while len(tokens) < GREEDY:
            tokens.append(self(tokens[-1])[:, -1].argmax(-1, keepdim=True))
        return torch.cat(tokens, dim=1)

    def paged(self) -> float:
        if not isinstance(self.cache, PagedCache):
            return 0.0
        report = self.cache.report()
        return report.paged_calls / (report.paged_calls + sum(report.dense_calls.values()))


# -- kinds of caches -------------------------------------------------------------------------------


class RoundedCache(DynamicCache):
    """A DynamicCache that keeps K/V in another dtype, as a pool with a `kv_dtype` does.

    Args:
        kv_dtype: what they are kept in.
        rounds_new: whether a step sees its own K/V rounded too, and not as the model gave them.
    """

    def __init__(self, kv_dtype: torch.dtype, rounds_new: bool, **kwargs: object):
        super().__init__(**kwargs)
        self._kv_dtype, self._rounds_new = kv_dtype, rounds_new

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kw: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = keys, values
        largest = torch.finfo(self._kv_dtype).max
        rounded = (t.clamp(-largest, largest).to(self._kv_dtype).to(t.dtype) for t in new)
        seen = super().update(*rounded, layer_idx, *args, **kw)
        if self._rounds_new:
            return seen
        columns = keys.shape[2]
        parts = zip(seen, new, strict=True)
        return tuple(torch.cat([old[:, :, :-columns], own], dim=2) for old, own in parts)


class Caches:
    """DynamicCaches: the reference, and what a way may ask of any kind of cache.

    Args:
        model: the model.
        attention: its attention implementation.
        kv_dtype: what K/V are kept in, None for the model's own dtype.
    """

    def __init__(
        self, model: PreTrainedModel, attention: str = "sdpa", kv_dtype: torch.dtype | None = None
    ):
        self.model, self.attention, self.kv_dtype = model, attention, kv_dtype
        self._known: tuple[torch.Tensor, Cache] | None = None

    def score(self, way: Way, text: Text) -> Scores:
        """What the text gets on this way."""
        self.model.set_attn_implementation(self.attention)
        return way(self, text)

    def new(self) -> Cache:
        config = self.model.config
        if self.kv_dtype is None:
            return DynamicCache(config=config)
        # FlashInfer's kernels read all K/V from the blocks, those on the CPU only the past.
        return RoundedCache(self.kv_dtype, self.model.device.type == "cuda", config=config)

    def stream(self, cache: Cache | None = None, mask: torch.Tensor | None = None) -> Stream:
        return Stream(self.model, self.new() if cache is None else cache, mask)

    def holding(self, ids: torch.Tensor) -> Cache:
        """A cache that `ids` have gone through, in one forward."""
        stream = self.stream()
        stream(ids)
        return stream.cache

    def remember(self, ids: torch.Tensor) -> None:
        """Compute `ids`, and keep their K/V for `match`."""
        self._known = ids, self.holding(ids)

    def match(self, ids: torch.Tensor) -> Cache:
        """A cache that holds what is known of the beginnings of `ids`, as much of every row."""
        assert self._known is not None
        known, cache = self._known
        shorter = min(known.shape[1], ids.shape[1] - 1)
        same = (known[:, :shorter] == ids[:, :shorter]).long().cumprod(1).sum(1).min()
        if not same:
            return self.new()
        cache = copy.deepcopy(cache)
        cache.crop(int(same) - known.shape[1])
        return cache

    def move_out_and_back(self, cache: Cache) -> Cache:
        """The cache after its K/V have been elsewhere; a DynamicCache stays where it is."""
        return cache

    def evict_and_reload(self, cache: Cache, ids: torch.Tensor) -> Cache:
        """A cache of the same `ids` after their K/V have been in a file only."""
        return cache


class PagedCaches(Caches):
    """PagedCaches of one pool, on one backend."""

    def __init__(
        self, model: PreTrainedModel, backend: str = "auto", kv_dtype: torch.dtype | None = None
    ):
        super().__init__(model, "hf_paged", kv_dtype)
        self.backend, self.pool = backend, BlockPool(model, kv_dtype=kv_dtype)

    def score(self, way: Way, text: Text) -> Scores:
        with _environment("HF_PAGED_BACKEND", self.backend):
            scores = super().score(way, text)
        self.pool.check()
        return scores

    def new(self) -> PagedCache:
        return PagedCache(pool=self.pool)

    def remember(self, ids: torch.Tensor) -> None:
        with self.holding(ids) as cache:
            self.pool.insert_prefix(cache, ids)

    def match(self, ids: torch.Tensor) -> PagedCache:
        return self.pool.match_prefix(ids)

    def move_out_and_back(self, cache: PagedCache) -> PagedCache:
        cache.offload()
        self._poison_free_blocks()
        cache.restore()
        return cache

    def evict_and_reload(self, cache: PagedCache, ids: torch.Tensor) -> PagedCache:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "prefixes")
            self.pool.insert_prefix(cache, ids)
            self.pool.save_prefixes(path)
            cache.free()
            self.pool.evict(self.pool.num_evictable)
            self._poison_free_blocks()
            self.pool.load_prefixes(path)
        return self.pool.match_prefix(F.pad(ids, (0, 1)))  # a match leaves a token to compute

    def _poison_free_blocks(self) -> None:
        """No K/V that were there can be read any more without a trace."""
        for group in self.pool.groups:
            for storage in group.storage.values():
                storage.poison(np.flatnonzero(group.ref_counts == 0))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# -- the text --------------------------------------------------------------------------------------


class _Recorder(DynamicCache):
    """Notes how its rows are moved."""

    def __init__(self, **kwargs: object):
        super().__init__(**kwargs)
        self.moves: list[torch.Tensor] = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.moves.append(beam_idx.clone())
        super().reorder_cache(beam_idx)


@dataclass(frozen=True)
class Text:
    """What is scored.

    Attributes:
        ids: int64 [rows, columns], windows of a text.
        forwards: of a beam search on beginnings of it, the `input_ids` of each forward.
        moves: int64 [rows], for each of its forwards how the rows are moved behind it.
    """

    ids: torch.Tensor
    forwards: list[torch.Tensor]
    moves: list[torch.Tensor]

    @classmethod
    def searched(cls, model: PreTrainedModel, ids: torch.Tensor, beams: int, new: int) -> Text:
        """A text, and a beam search of transformers with a DynamicCache on its first two rows.

        What the search decides is recorded, so that it can be replayed with any cache: two searches
        that are left to themselves part at the first tie that rounding decides, and from there on
        no two numbers of theirs can be compared.
        """
        model.set_attn_implementation("sdpa")
        forwards, cache = [], _Recorder(config=model.config)
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: forwards.append(kwargs["input_ids"].clone()),
            with_kwargs=True,
        )
        prompts = ids[:2, : ids.shape[1] // 2]
        try:
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                past_key_values=cache,
                num_beams=beams,
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
            )
        finally:
            hook.remove()
        return cls(ids, forwards, cache.moves)

    @property
    def middle(self) -> int:
        """Where the second half begins, inside of a block."""
        return self.ids.shape[1] // 32 * 16 + 3

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[:, : self.middle], self.ids[:, self.middle :]

    @property
    def other(self) -> torch.Tensor:
        """Tokens of the same shape as `ids` that are other ones."""
        return self.ids.flip(1)


Way = Callable[[Caches, Text], Scores]

# -- the ways --------------------------------------------------------------------------------------


def one_at_a_time(caches: Caches, text: Text) -> Scores:
    return caches.stream().score(text.ids, [1])


def in_chunks(caches: Caches, text: Text) -> Scores:
    """Chunks of a prompt whose ends are before, on and behind the block borders."""
    return caches.stream().score(text.ids, [23, 16, 9, 1, 31])


def prefix_hit(caches: Caches, text: Text) -> Scores:
    known = text.halves[0]
    caches.remember(known)
    return _matched(caches, text, known.shape[1])


def prefix_partly_hit(caches: Caches, text: Text) -> Scores:
    """What is known leaves the text in the middle of a block."""
    common = text.middle - 21
    caches.remember(torch.cat([text.ids[:, :common], text.other[:, common : text.middle]], dim=1))
    return _matched(caches, text, common)


def prefix_miss(caches: Caches, text: Text) -> Scores:
    caches.remember(text.other[:, : text.middle])
    return _matched(caches, text, 0)


def _matched(caches: Caches, text: Text, expected: int) -> Scores:
    cache = caches.match(text.ids)
    assert cache.get_seq_length() == expected, (cache.get_seq_length(), expected)
    return caches.stream(cache).score(text.ids)


def reordered(caches: Caches, text: Text) -> Scores:
    """All rows reversed, then the first one twice and the second one gone."""
    rows = torch.arange(len(text.ids))
    order = rows.flip(0)
    again = torch.cat([rows[:1], rows[:1], rows[2:]])
    stream, (first, second) = caches.stream(), text.halves
    stream(first)
    stream.cache.reorder_cache(order)
    stream.pieces(second[order, :6], PIECES)
    stream.cache.reorder_cache(again)
    order = order[again]
    # The row that is there twice goes on in two ways.
    ids = text.ids[order].clone()
    ids[1, first.shape[1] + 6 :] = text.other[order[1], first.shape[1] + 6 :]
    return stream.score(ids)


def forked(caches: Caches, text: Text) -> Scores:
    """Two branches of one beginning, in turns; what one writes must not be seen by the other."""
    beginning = caches.holding(text.halves[0])
    branches = [caches.stream(beginning), caches.stream(copy.deepcopy(beginning))]
    texts = text.ids, torch.cat([text.halves[0], text.other[:, text.middle :]], dim=1)
    for stream, ids in zip(branches, texts, strict=True):
        stream.pieces(ids[:, text.middle : text.middle + 20], PIECES)
    return Scores.joined([s.score(ids) for s, ids in zip(branches, texts, strict=True)])


def cropped(caches: Caches, text: Text) -> Scores:
    """Tokens that were a mistake are taken back, over a block border."""
    stream = caches.stream(caches.holding(text.halves[0]))
    stream(text.other[:, text.middle : text.middle + 20])
    stream.cache.crop(-20 - 5)
    return stream.score(text.ids)


def moved_out_and_back(caches: Caches, text: Text) -> Scores:
    cache = caches.holding(text.halves[0])
    return caches.stream(caches.move_out_and_back(cache)).score(text.ids)


def evicted_and_reloaded(caches: Caches, text: Text) -> Scores:
    cache = caches.evict_and_reload(caches.holding(text.halves[0]), text.halves[0])
    assert cache.get_seq_length() == text.middle
    return caches.stream(cache).score(text.ids)


def ragged(caches: Caches, text: Text) -> Scores:
    """Left-padded rows, some of which have nothing but padding in the first chunk."""
    rows, columns = text.ids.shape
    padding = torch.arange(rows) * (columns // 2) // max(rows - 1, 1)
    mask = (torch.arange(columns) >= padding[:, None]).long().to(text.ids.device)
    return caches.stream(mask=mask).score(text.ids * mask, [9, 1, 22, *PIECES])


def beams(caches: Caches, text: Text) -> Scores:
    """A beam search replayed: at each step the tokens that it chose, and its moves of the rows."""
    stream = caches.stream()
    logits, targets = [], []
    for ids, move, chosen in zip(text.forwards, text.moves, text.forwards[1:], strict=False):
        predicted = stream(ids)[:, -1]
        stream.cache.reorder_cache(move)
        logits.append(predicted[move])
        targets.append(chosen[:, 0])
    greedy = stream.greedy(stream(text.forwards[len(logits)])[:, -1])
    rows = torch.arange(len(greedy), device=greedy.device).repeat(len(logits))
    return Scores(torch.cat(logits), torch.cat(targets), rows, greedy, stream.paged())


WAYS: dict[str, Way] = {
    "one token at a time": one_at_a_time,
    "chunked prefill": in_chunks,
    "prefix hit": prefix_hit,
    "partial prefix hit": prefix_partly_hit,
    "prefix miss": prefix_miss,
    "reordered": reordered,
    "forked": forked,
    "cropped": cropped,
    "offloaded, restored": moved_out_and_back,
    "evicted, reloaded": evicted_and_reloaded,
    "ragged batch": ragged,
    "beams": beams,
}

# -- faults ----------------------------------------------------------------------------------------
# What a cache must never do. They reach into its private state, as no public call breaks it; from
# there on the text is scored as by any other cache.


class CorruptBlock(PagedCaches):
    """One block of one layer of one row has other K/V."""

    way = moved_out_and_back

    def move_out_and_back(self, cache: PagedCache) -> PagedCache:
        group = self.pool.groups[0]
        storage = group.storage[group.layers[len(group.layers) // 2]]
        block = cache.state.tables.tables[0][0, -1 + cache.row_lengths[0] // group.block_size]
        for states in (storage.keys, storage.values):
            backwards = torch.arange(states.shape[-1] - 1, -1, -1)
            states[block] = states[block][..., backwards]  # the same numbers in wrong places
        return cache


class SwappedEntries(PagedCaches):
    """Two entries of the block table have changed places: those of one block of two rows.

    Two entries of one row would be no fault: positions are in the keys, and attention over the past
    does not depend on the order of its tokens.
    """

    way = moved_out_and_back

    def move_out_and_back(self, cache: PagedCache) -> PagedCache:
        table = cache.state.tables.tables[0]
        at = -1 + cache.row_lengths[0] // self.pool.block_size
        table[[0, 1], at] = table[[1, 0], at]
        return cache


class ShiftedToken(PagedCaches):
    """The last token of one row was written one slot too far, so that the next is written on it."""

    way = moved_out_and_back

    def move_out_and_back(self, cache: PagedCache) -> PagedCache:
        size, last = self.pool.block_size, cache.row_lengths[0] - 1
        slot = cache.block_tables[0][-1] * size + last % size
        for storage in self.pool.groups[0].storage.values():
            for states in (storage.key_slots, storage.value_slots):
                states[slot + 1] = states[slot]
                states[slot] = 0
        return cache


class StalePrefix(PagedCaches):
    """The K/V of a known prefix are those of an earlier version of it, with one other token."""

    way = prefix_hit

    def remember(self, ids: torch.Tensor) -> None:
        earlier = ids.clone()
        at = ids.shape[1] - 8
        earlier[:, at] = ids[:, at].roll(1)
        with self.holding(earlier) as cache:
            self.pool.insert_prefix(cache, ids)


FAULTS: dict[str, type[PagedCaches]] = {
    "one corrupt block": CorruptBlock,
    "two table entries swapped": SwappedEntries,
    "one token off by one slot": ShiftedToken,
    "a stale prefix": StalePrefix,
}
