"""Many prompts through a pool of fixed size: batches that fit.

A batch is admitted only if the pool could hold every token that its rows may ever have, each row on
its own. So no step of it can find the pool full, whatever is shared or evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .arguments import token_ids
from .core.allocator import BlockAllocator, BlockGroup


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
    allocator: BlockAllocator,
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
                for group in allocator.groups
            ]
            for prompt in tokens
        ]
    ).reshape(len(tokens), len(allocator.groups))
    room, most = _room(allocator)
    never = np.flatnonzero((needs > most).any(1))
    if len(never):
        longest = max(len(tokens[index]) for index in never)
        raise ValueError(
            f"Prompts {never[:10].tolist()}{' and more' if len(never) > 10 else ''} can never fit: "
            f"with {longest} tokens and max_new_tokens={max_new_tokens} they need up to "
            f"{int(needs[never].max())} blocks of a group, of which there are {int(most.min())}; "
            "raise num_blocks or leave them out."
        )
    order = _in_groups(tokens, allocator.block_size)
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
    return token_ids(f"Prompt {index}", prompt, ndim=1).tolist()


def _reservation(group: BlockGroup, tokens: int) -> int:
    """The most blocks that a row with up to `tokens` tokens ever holds, with one that is copied."""
    blocks = -(-tokens // group.block_size)
    if group.window is not None:  # those behind a step and those in front of it
        blocks = min(blocks, 2 * ((group.window - 1) // group.block_size + 2))
    return blocks + 1


def _room(allocator: BlockAllocator) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of each group that no cache holds now, and all; infinite where a group grows."""
    groups = allocator.groups
    with allocator.lock:
        allocator.collect()
        is_bounded = np.array([group.max_blocks is not None for group in groups])
        free = np.array([group.num_free for group in groups]) + allocator.reclaimable.evictable()
        most = np.array([group.capacity for group in groups])
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
    ids = np.full((len(indices), width), pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, index in enumerate(indices):
        ids[row, width - len(tokens[index]) :] = tokens[index]
        mask[row, width - len(tokens[index]) :] = 1
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    return PromptBatch(indices, inputs)
