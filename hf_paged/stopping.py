"""Rows of a batch that leave when they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import EncoderDecoderCache, StoppingCriteria

from .arguments import token_ids
from .cache import PagedCache


class FreeFinishedRows(StoppingCriteria):
    """Gives the blocks of rows that have ended back before their batch ends.

        stop = StoppingCriteriaList([FreeFinishedRows(cache, tokenizer.eos_token_id)])
        model.generate(**inputs, past_key_values=cache, stopping_criteria=stop)

    For greedy search and sampling; beam search moves rows. It keeps nothing of a generate, so it
    serves for any number of them on its cache; which rows have ended is what the cache has freed.

    Args:
        cache: the cache that is passed to generate.
        eos_token_id: the token, or tokens, that end a row.

    Raises:
        ValueError: the cache is not a PagedCache, or eos_token_id no token; and in generate, if
            that uses another cache, or more sequences than rows, as beam search does.
    """

    def __init__(self, cache: PagedCache | EncoderDecoderCache, eos_token_id: int | Sequence[int]):
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if not isinstance(own, PagedCache):
            raise ValueError(
                f"cache must be the PagedCache that generate gets, not {type(own).__name__}."
            )
        self._cache, self._steps = own, own.state.num_steps
        # By this name generate knows that rows end, and pads them.
        ends: Any = eos_token_id.cpu() if isinstance(eos_token_id, torch.Tensor) else eos_token_id
        ends = ends if np.ndim(ends) else [ends]
        self.eos_token_id = token_ids("eos_token_id", ends, ndim=1)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """bool [rows], the rows that have ended."""
        before, self._steps = self._steps, self._cache.state.num_steps
        freed = self._cache.freed_rows
        if self._steps == before:
            raise ValueError(
                "generate does not use the cache that FreeFinishedRows was made for, whose rows it "
                "would free; make one for each cache."
            )
        if len(freed) != len(input_ids):
            raise ValueError(
                f"generate compares {len(input_ids)} sequences on a cache of {len(freed)} rows, as "
                "beam search does; FreeFinishedRows is for greedy search and sampling, so leave it "
                "out."
            )
        ended = torch.isin(input_ids[:, -1], self.eos_token_id.to(input_ids.device))
        finished = freed | ended.cpu().numpy()
        fresh = np.flatnonzero(finished & ~freed)
        if len(fresh) and not finished.all():
            self._cache.free_rows(fresh)
        return torch.from_numpy(finished).to(input_ids.device)
