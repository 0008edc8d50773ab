"""lm-evaluation-harness on a pool: `lm_eval --model hf-paged --model_args pretrained=NAME ...`.

The harness asks for the log-likelihood of each answer behind its few-shot examples and question,
and its `hf` model computes all of that for every answer. Here a context is computed once for all of
its answers, behind whatever the pool knows of its beginning, and they follow in one ragged batch.

Newer versions of the harness find this module by its entry point ("lm_eval.models"). Up to 0.4.13
they have no such thing, and the command is

    python -m hf_paged.integrations.lm_eval --model hf-paged ...

or, in a program, `import hf_paged.integrations.lm_eval`. Nothing else in hf_paged imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from ..cache import PagedCache
from ..core.allocator import PoolExhausted
from ..pool import BlockPool
from ..prefill import argument_names, cache_argument

# (the texts or None, the context's tokens, the continuation's tokens)
Request = tuple[tuple[str, str] | None, list[int], list[int]]


class Row(NamedTuple):
    """What the model reads to score a continuation.

    Attributes:
        context: the tokens in front of it, at least one.
        continuation: its tokens but the last.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.context) + len(self.continuation)


@register_model("hf-paged")
class PagedHFLM(HFLM):
    """The harness's `hf` model on a `BlockPool`: the same scores, contexts computed once.

    A batch is `batch_size` contexts with all of their continuations. What the pool cannot hold at
    once is split, and what it cannot hold alone is computed as `hf` does.

    Args:
        max_memory: bytes of the pool over all layers, as an int or as text such as "4GiB".
        block_size: token slots in a block.
        kwargs: what `hf` takes.

    Raises:
        ValueError: the model is no causal language model, has virtual tokens in front of every
            prompt, or its prefixes cannot be reused exactly.
    """

    def __init__(
        self, *args: Any, max_memory: int | str = "4GiB", block_size: int = 16, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        if self.AUTO_MODEL_CLASS is not AutoModelForCausalLM:
            raise ValueError("hf-paged is for causal language models; use --model hf for others.")
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("hf-paged has no place for PEFT's virtual tokens; use --model hf.")
        self.model.set_attn_implementation("hf_paged")
        self.pool = BlockPool(self.model, block_size=block_size, max_memory=max_memory)
        self._longest_prefix = self.pool.model.spec.longest_prefix

    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """For each request the log-likelihood, and whether greedy decoding gives the continuation.

        As in `hf`, what is longer than the model takes loses its beginning.

        Raises:
            ValueError: a continuation has no tokens, or more than the model takes.
        """
        numbers: dict[Row, list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"Request {number} has {len(continuation)} tokens to score, which must be 1 to "
                    f"max_length={self.max_length}."
                )
            tokens = (*context, *continuation)[-(self.max_length + 1) :]
            split = len(tokens) - len(continuation)
            numbers.setdefault(Row(tokens[:split], tokens[split:-1]), []).append(number)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0) as bar:
            for batch in self._batches(numbers, self._contexts_at_once(requests, override_bs)):
                for row, logits in zip(batch, self._logits(batch), strict=True):
                    log_probs = torch.log_softmax(logits, -1, dtype=self.softmax_dtype)
                    for number in numbers[row]:
                        texts, _, continuation = requests[number]
                        answers[number] = _answer(log_probs, continuation)
                        if texts is not None:
                            self.cache_hook.add_partial("loglikelihood", texts, answers[number])
                        bar.update()
        return [answers[number] for number in range(len(requests))]

    def _contexts_at_once(self, requests: Sequence[Request], override_bs: int | None) -> int:
        """The batch size, which the harness finds out where it is "auto"."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        longest_first = sorted(requests, key=lambda request: -len(request[1]) - len(request[2]))
        return override_bs or self._detect_batch_size(longest_first, 0)

    def _batches(self, rows: Iterable[Row], most_contexts: int) -> Iterator[list[Row]]:
        """Rows that begin alike are neighbours, the longest first, and so are those of a context.

        Continuations end a batch before they are more to compute than as many whole rows.
        """
        size = self.pool.block_size
        batch: list[Row] = []
        for row in sorted(rows, key=lambda r: (r.context[:size], -len(r.context), r)):
            tried = [*batch, row]
            width = 1 + max(len(other.continuation) for other in tried)
            if batch and (
                len({other.context for other in tried}) > most_contexts
                or len(tried) * width > most_contexts * max(other.num_tokens for other in tried)
            ):
                yield batch
                tried = [row]
            batch = tried
        if batch:
            yield batch

    def _logits(self, batch: list[Row]) -> list[torch.Tensor]:
        """For each row [1 + continuation, vocab], what the model says from its context on."""
        if self._can_reuse(max(row.num_tokens for row in batch)):
            with suppress(PoolExhausted):
                return self._paged_logits(batch)
        if len(batch) > 1:
            half = len(batch) // 2
            return self._logits(batch[:half]) + self._logits(batch[half:])
        [row] = batch
        tokens = [row.context + row.continuation]
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)
        return [self._model_call(ids)[0, len(row.context) - 1 :]]

    @torch.no_grad()
    def _paged_logits(self, batch: list[Row]) -> list[torch.Tensor]:
        contexts = list(dict.fromkeys(row.context for row in batch))
        numbers = [contexts.index(row.context) for row in batch]
        context_of_row = torch.tensor(numbers, dtype=torch.long, device="cpu")
        ids, mask = self._padded(contexts, "left")
        with self.pool.match_prefix(ids, mask) as cache, self._autocast():
            self._compute(cache, ids, mask)
            cache.batch_select_indices(context_of_row)
            read = [(row.context[-1], *row.continuation) for row in batch]
            ids, is_token = self._padded(read, "right")
            mask = torch.cat([mask[context_of_row, :-1], is_token], 1)
            inputs = {"input_ids": ids, "attention_mask": mask}
            if "position_ids" in argument_names(self.model):
                inputs["position_ids"] = (mask.cumsum(1) - 1)[:, -ids.shape[1] :]
            logits = self.model(**inputs, **cache_argument(self.model, cache)).logits
        return [row[: len(tokens)] for row, tokens in zip(logits, read, strict=True)]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> torch.Tensor:
        """As in `hf`: int64 [rows, tokens], `context` and what follows it, padded on the right."""
        mask = kwargs.get("attention_mask")
        copies = max(kwargs.get("num_beams") or 1, kwargs.get("num_return_sequences") or 1)
        if self._can_reuse(max_length):
            with suppress(PoolExhausted), self.pool.match_prefix(context, mask) as cache:
                with self._autocast():
                    self._compute(cache, context, mask)
                cache.batch_repeat_interleave(copies)
                return super()._model_generate(
                    context, max_length, stop, past_key_values=cache, **kwargs
                )
        if len(context) == 1:
            return super()._model_generate(context, max_length, stop, **kwargs)
        half = len(context) // 2
        sequences: list[torch.Tensor] = []
        for rows in (slice(half), slice(half, None)):
            if mask is not None:
                kwargs["attention_mask"] = mask[rows]
            sequences += self._model_generate(context[rows], max_length, stop, **kwargs)
        return pad_sequence(sequences, True, self.tokenizer.pad_token_id)

    def _compute(self, cache: PagedCache, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Fill a cache with all but the last token of contexts, and let the pool know them."""
        cache.prefill(self.model, ids, mask)
        if cache.get_seq_length():
            self.pool.insert_prefix(cache, ids)

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _can_reuse(self, tokens: int) -> bool:
        """Whether the K/V of a row's beginning are those that it would have alone."""
        return self._longest_prefix is None or tokens <= self._longest_prefix

    def _padded(
        self, rows: Iterable[tuple[int, ...]], side: Literal["left", "right"]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, int64 [rows, tokens]."""
        ids = [torch.tensor(row, dtype=torch.long, device=self.device) for row in rows]
        return (
            pad_sequence(ids, batch_first=True, padding_side=side),
            pad_sequence(
                [torch.ones_like(row) for row in ids], batch_first=True, padding_side=side
            ),
        )


def _answer(log_probs: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Of [continuation, vocab] log-probabilities the sum, and whether all tokens are likeliest."""
    tokens = torch.tensor(continuation, dtype=torch.long, device=log_probs.device)
    is_greedy = bool((log_probs.argmax(-1) == tokens).all())
    return float(log_probs.gather(1, tokens[:, None]).sum()), is_greedy


if __name__ == "__main__":
    cli_evaluate()
