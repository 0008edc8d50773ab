"""Many prompts through a pool of fixed size: batches that fit, and rows that leave early.

A batch is admitted only if the pool could hold every token that its rows may ever have, each row on
its own. So no step of it can find the pool full, whatever is shared or evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import StoppingCriteria

if TYPE_CHECKING:
    from .cache import PagedCache
    from .pool import BlockGroup, BlockPool


@dataclass(frozen=True)
class PromptBatch:
    """Prompts to generate for together.

    Attributes:
        indices: their numbers in the list that they come from.
        inputs: input_ids and attention_mask, int64 [prompts, tokens], padded on the left, for
            `generate(**batch.inputs, ...)` and `match_prefix(**batch.inputs)`.
    """

    indices: list[int]
    inputs: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.indices)


def batches(
    pool: BlockPool,
    prompts: Sequence[Any],
    max_new_tokens: int,
    num_return_sequences: int,
    max_prompts: int | None,
    pad_token_id: int,
) -> Iterator[PromptBatch]:
    """See `BlockPool.batches`."""
    tokens = [_token_list(prompt, index) for index, prompt in enumerate(prompts)]
    needs = np.array(
        [
            [
                num_return_sequences * _reservation(group, len(prompt) + max_new_tokens)
                for group in pool.groups
            ]
            for prompt in tokens
        ]
    ).reshape(len(tokens), len(pool.groups))
    room, most = _room(pool)
    never = np.flatnonzero((needs > most).any(1))
    if len(never):
        longest = max(len(tokens[index]) for index in never)
        raise ValueError(
            f"Prompts {never[:10].tolist()}{' and more' if len(never) > 10 else ''} can never fit: "
            f"with {longest} tokens and max_new_tokens={max_new_tokens} they need up to "
            f"{int(needs[never].max())} blocks of a group, of which there are {int(most.min())}; "
            "raise num_blocks or leave them out."
        )
    order = _in_groups(tokens, pool.block_size)
    return _admit(order, tokens, needs, room, max_prompts, pad_token_id)


def _admit(
    order: list[int],
    tokens: list[list[int]],
    needs: np.ndarray,
    room: np.ndarray,
    max_prompts: int | None,
    pad_token_id: int,
) -> Iterator[PromptBatch]:
    """Batches in `order`.

    Raises:
        RuntimeError: caches hold so much of the pool that a prompt has no room.
    """
    batch: list[int] = []
    for index in order:
        if (needs[index] > room).any():
            raise RuntimeError(
                f"Prompt {index} needs {int(needs[index].max())} blocks of a group, and caches "
                f"leave {int(room.min())}; free() the caches that are not used any more."
            )
        full = len(batch) == max_prompts or (needs[[*batch, index]].sum(0) > room).any()
        if batch and full:
            yield _padded(batch, tokens, pad_token_id)
            batch = []
        batch.append(index)
    if batch:
        yield _padded(batch, tokens, pad_token_id)


def _token_list(prompt: Any, index: int) -> list[int]:
    ids = np.asarray(prompt)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"Prompt {index} must be its token ids, a list or 1-D tensor of whole numbers and at "
            "least one; tokenize texts first."
        )
    return ids.tolist()


def _reservation(group: BlockGroup, tokens: int) -> int:
    """The most blocks that a row with up to `tokens` tokens ever holds, with one that is copied."""
    blocks = -(-tokens // group.block_size)
    if group.window is not None:  # those behind a step and those in front of it
        blocks = min(blocks, 2 * ((group.window - 1) // group.block_size + 2))
    return blocks + 1


def _room(pool: BlockPool) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of each group that no cache holds now, and all; infinite where a group grows."""
    with pool.lock:
        pool.collect()
        is_bounded = np.array([group.max_blocks is not None for group in pool.groups])
        free = np.array([group.num_free for group in pool.groups]) + pool.index.evictable()
        most = np.array([group.capacity for group in pool.groups])
    return np.where(is_bounded, free, np.inf), np.where(is_bounded, most, np.inf)


def _in_groups(tokens: list[list[int]], block_size: int) -> list[int]:
    """An order in which prompts that begin with the same block are neighbours, the longest first,
    and so are prompts that share nothing but are about as long."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(tokens):
        groups.setdefault(tuple(prompt[:block_size]), []).append(index)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    together = [group for group in groups.values() if len(group) > 1]
    return [
        index
        for group in [*together, alone]
        for index in sorted(group, key=lambda at: -len(tokens[at]))
    ]


def _padded(indices: list[int], tokens: list[list[int]], pad_token_id: int) -> PromptBatch:
    width = max(len(tokens[index]) for index in indices)
    ids = torch.full((len(indices), width), pad_token_id)
    mask = torch.zeros_like(ids)
    for row, index in enumerate(indices):
        ids[row, width - len(tokens[index]) :] = torch.tensor(tokens[index])
        mask[row, width - len(tokens[index]) :] = 1
    return PromptBatch(indices, {"input_ids": ids, "attention_mask": mask})


class FreeFinishedRows(StoppingCriteria):
    """Gives the blocks of rows that have ended back before their batch ends.

        stop = StoppingCriteriaList([FreeFinishedRows(cache, tokenizer.eos_token_id)])
        model.generate(**inputs, past_key_values=cache, stopping_criteria=stop)

    For greedy search and sampling; beam search moves rows.

    Args:
        cache: the cache that is passed to generate.
        eos_token_id: the token, or tokens, that end a row.
    """

    def __init__(self, cache: PagedCache, eos_token_id: int | Sequence[int]):
        if eos_token_id is None:
            raise ValueError("FreeFinishedRows needs the eos_token_id that ends a row.")
        self._cache = cache
        # By this name generate knows that rows end, and pads them.
        self.eos_token_id = torch.as_tensor(eos_token_id).reshape(-1)
        self._finished, self._columns = torch.zeros(0, dtype=torch.bool), 0

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """bool [rows], the rows that have ended."""
        ended = torch.isin(input_ids[:, -1], self.eos_token_id.to(input_ids.device))
        if self._columns + 1 != input_ids.shape[1] or self._finished.shape != ended.shape:
            self._finished = torch.zeros_like(ended)  # another generate has begun
        self._columns, before = input_ids.shape[1], self._finished
        self._finished = before | ended
        fresh = self._finished & ~before
        if fresh.any() and not self._finished.all():
            self._cache.free_rows(fresh.nonzero()[:, 0])
        return self._finished
