"""Decode steps that begin before the host has their mask, as where it runs ahead of a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ragged_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from hf_paged import PagedCache, PoolExhausted
from hf_paged.batch import Batch
from hf_paged.pool import ENV_DEBUG
from hf_paged.transfer import Download

Build = Callable[[str], PreTrainedModel]
LENGTHS = [6, 3, 5]
BLOCK = 4


class Masks:
    """Whether masks arrive late, and when they are read."""

    def __init__(self) -> None:
        self.are_late = True
        self.order: list[Any] = []


@pytest.fixture
def masks() -> Iterator[Masks]:
    masks, array = Masks(), Download.array

    def read(download: Download) -> np.ndarray:
        masks.order.append("mask")
        return array(download)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Download, "has_arrived", lambda download: not masks.are_late)
        patch.setattr(Download, "array", read)
        yield masks


class Loop:
    """A loop of forwards of a ragged batch, with a PagedCache and with a DynamicCache."""

    def __init__(self, model: PreTrainedModel, **kwargs: Any):
        self.model = model
        self.cache: Any = PagedCache(config=model.config, **{"block_size": BLOCK, **kwargs})
        self.dynamic: Any = DynamicCache(config=model.config)
        inputs = ragged_ids(LENGTHS)
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.compare()

    def decode(self, *grows: int) -> None:
        """One column more, in which the rows that grow (all if it is not said) have a token."""
        self.begin(*grows)
        self.compare()

    def begin(self, *grows: int) -> None:
        new = torch.tensor(grows or [1] * len(LENGTHS))[:, None]
        self.mask = torch.cat([self.mask, new], 1)
        self.ids = 3 + torch.arange(len(LENGTHS))[:, None] + self.mask.shape[1]
        self.positions = self.mask.sum(1, keepdim=True) - 1

    def compare(self) -> None:
        found, expected = self.forward("hf_paged", self.cache), self.forward("eager", self.dynamic)
        is_token = self.mask[:, -self.ids.shape[1] :].bool()
        torch.testing.assert_close(found[is_token], expected[is_token], atol=1e-4, rtol=1e-4)
        self.cache.pool.check()

    def forward(self, attention: str, cache: Any) -> torch.Tensor:
        self.model.set_attn_implementation(attention)
        with torch.no_grad():
            return self.model(
                input_ids=self.ids,
                attention_mask=self.mask,
                position_ids=self.positions,
                past_key_values=cache,
            ).logits

    def check_stored(self) -> None:
        """The cache holds what the mask shows, and no block more."""
        lengths = self.mask.sum(1).tolist()
        assert self.cache.row_lengths == lengths
        blocks = [len(row) for row in self.cache.block_tables]
        assert blocks == [-(-length // BLOCK) for length in lengths]


def read_order(loop: Loop, masks: Masks) -> list[Any]:
    """The layers of a forward and the masks that are read, in their order."""
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *args, n=n: masks.order.append(n))
        for n, layer in enumerate(loop.model.model.layers)
    ]
    masks.order.clear()
    loop.forward("hf_paged", loop.cache)
    for hook in hooks:
        hook.remove()
    return masks.order


@pytest.mark.parametrize(("name", "count"), [("llama", 1), ("gemma2", 2), ("llama4_text", 2)])
def test_masks_are_read_when_all_layers_are_under_way(
    tiny_model: Build, masks: Masks, name: str, count: int
) -> None:
    loop = Loop(tiny_model(name))
    for _ in range(6):
        loop.begin()
        assert read_order(loop, masks) == [0, 1, 2, 3, *["mask"] * count]
    loop.check_stored()
    assert not loop.cache.report().dense_calls


class NoReads(TorchDispatchMode):
    """Refuses operations whose result, or its shape, the host would wait for on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4_text"])
def test_a_decode_step_reads_nothing_back(tiny_model: Build, masks: Masks, name: str) -> None:
    """Neither the cache nor what transformers does around it, apart from masks (see above)."""
    loop = Loop(tiny_model(name))
    with NoReads():
        for _ in range(6):
            loop.begin()
            loop.forward("hf_paged", loop.cache)
    assert not loop.cache.report().dense_calls


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4_text"])
def test_rows_that_have_ended_store_nothing(tiny_model: Build, masks: Masks, name: str) -> None:
    """Their column is padding, which is known only when their K/V are written."""
    loop = Loop(tiny_model(name))
    for grows in (
        (1, 1, 1),
        (1, 1, 0),
        (1, 1, 0),
        (1, 1, 1),
        (0, 0, 1),
        *[(1, 0, 1)] * 4,
        (1, 1, 1),
    ):
        loop.decode(*grows)
        if name == "llama":
            loop.check_stored()
        else:
            assert loop.cache.row_lengths == loop.mask.sum(1).tolist()
    assert not loop.cache.report().dense_calls


def test_what_has_ended_can_be_forked_and_cropped(tiny_model: Build, masks: Masks) -> None:
    loop = Loop(tiny_model("llama"))
    loop.decode(1, 0, 1)
    fork = loop.cache.fork()
    assert fork.row_lengths == [7, 3, 6]
    loop.cache.crop(-1)
    assert (loop.cache.row_lengths, fork.row_lengths) == ([6, 3, 5], [7, 3, 6])
    loop.cache.pool.check()


def test_hidden_tokens_undo_the_step_and_the_next_one_waits(
    tiny_model: Build, masks: Masks
) -> None:
    loop = Loop(tiny_model("llama"))
    loop.decode()
    loop.begin()
    loop.mask[0, 2] = 0
    before = loop.cache.block_tables
    with pytest.raises(RuntimeError, match=r"hides tokens .* is undone, so run it once more"):
        loop.forward("hf_paged", loop.cache)
    assert loop.cache.row_lengths == [7, 4, 6]
    assert loop.cache.block_tables == before
    loop.compare()
    for _ in range(3):  # nothing is taken for granted while tokens are hidden
        loop.decode()
    loop.mask[0, 2] = 1
    loop.decode()
    loop.decode()
    loop.check_stored()
    assert loop.cache.report().dense_calls.keys() == {
        "a mask that is more than causal, sliding or chunked"
    }


def own_mask(loop: Loop, make: Callable[..., Any] = create_causal_mask) -> Any:
    """The mask of a forward, made by its caller, who may use it again."""
    loop.model.set_attn_implementation("hf_paged")
    return make(
        config=loop.model.config,
        inputs_embeds=loop.model.get_input_embeddings()(loop.ids),
        attention_mask=loop.mask,
        past_key_values=loop.cache,
        position_ids=loop.positions,
    )


@pytest.mark.parametrize("error", [RuntimeError, InterruptedError])
def test_a_mask_that_was_guessed_is_read_when_it_is_used_again(
    tiny_model: Build, masks: Masks, error: type[Exception]
) -> None:
    """The step that guessed it is undone, or has failed before it was compared."""
    loop = Loop(tiny_model("llama"))
    loop.decode()
    loop.begin()
    two_dimensional = loop.mask.clone()
    two_dimensional[0, 2] = 0
    loop.mask = two_dimensional
    loop.mask = own_mask(loop)

    def fail(*args: Any) -> None:
        if error is InterruptedError:
            raise InterruptedError

    hook = loop.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error):
        loop.forward("hf_paged", loop.cache)
    hook.remove()
    masks.are_late = error is RuntimeError
    found = loop.forward("hf_paged", loop.cache)
    loop.mask = two_dimensional
    expected = loop.forward("eager", loop.dynamic)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_any_of_several_masks_that_hides_tokens_undoes_the_step(
    tiny_model: Build, masks: Masks
) -> None:
    loop = Loop(tiny_model("gemma2"))
    loop.begin()
    shown = loop.mask
    loop.mask = shown.clone()
    loop.mask[0, 2] = 0
    full = own_mask(loop)
    loop.mask = shown
    sliding = own_mask(loop, create_sliding_window_causal_mask)
    loop.mask = {"full_attention": full, "sliding_attention": sliding}
    with pytest.raises(RuntimeError, match="hides tokens"):
        loop.forward("hf_paged", loop.cache)


def test_gathered_keys_and_values_need_no_guess(tiny_model: Build, masks: Masks) -> None:
    """Attention reads the whole mask then, so a step that hides tokens is as good as any."""
    loop = Loop(tiny_model("llama"), backend="dense")
    loop.decode()
    loop.begin(1, 0, 1)
    loop.mask[0, 2] = 0
    loop.compare()
    assert loop.cache.row_lengths == [8, 4, 7]
    assert loop.cache.known_tables()[1] == 7  # the K/V behind are not those of the whole rows


def test_a_mask_that_is_no_pattern_needs_no_guess(tiny_model: Build, masks: Masks) -> None:
    loop = Loop(tiny_model("llama"))
    loop.decode()
    loop.begin()
    loop.mask[0, 2] = 0
    expected = loop.forward("eager", loop.dynamic)
    loop.mask = own_mask(
        loop, partial(create_causal_mask, and_mask_function=lambda b, h, q, k: q == q)
    )
    found = loop.forward("hf_paged", loop.cache)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_copies_of_a_cache_whose_tokens_are_hidden_wait(
    tiny_model: Build, masks: Masks, tmp_path: Path
) -> None:
    loop = Loop(tiny_model("llama"))
    loop.mask[0, 2] = masks.are_late = False
    loop.decode()
    masks.are_late = True
    loop.cache.save(tmp_path / "cache")
    original = loop.cache
    loop.begin()
    expected = loop.forward("eager", loop.dynamic)
    for cache in (original.fork(), PagedCache.load(tmp_path / "cache", loop.model.config)):
        found = loop.forward("hf_paged", cache)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_steps_of_several_columns_wait(tiny_model: Build, masks: Masks) -> None:
    loop = Loop(tiny_model("llama"))
    loop.decode()
    loop.begin(0, 1, 1)
    ids = loop.ids
    loop.begin()
    loop.ids = torch.cat([ids, loop.ids], 1)
    loop.positions = (loop.mask.cumsum(1) - 1)[:, -2:]
    loop.compare()
    loop.check_stored()


@pytest.mark.parametrize("ends", [(0, 1, 1), (1, 0, 1), (0, 0, 1)])
def test_a_first_step_of_rows_that_begin_alike(
    tiny_model: Build, masks: Masks, ends: tuple[int, ...]
) -> None:
    """The row that has ended may be the one whose block the others share."""
    loop = Loop(tiny_model("llama"))
    loop.cache.reset()
    loop.dynamic, loop.mask = DynamicCache(config=loop.model.config), loop.mask[:, :0]
    loop.begin(*ends)
    loop.ids[:] = 7
    loop.compare()
    loop.check_stored()
    for _ in range(5):
        loop.decode()
    loop.check_stored()


def test_a_first_step_that_only_fits_without_the_rows_that_have_ended(
    tiny_model: Build, masks: Masks
) -> None:
    loop = Loop(tiny_model("llama"), block_size=1, num_blocks=21)
    loop.cache.reset()
    other = PagedCache(pool=loop.cache.pool)
    other.prefill(loop.model, torch.ones(1, 20, dtype=torch.long))
    loop.dynamic = DynamicCache(config=loop.model.config)
    loop.mask = torch.tensor([1, 0, 1, 0])[:, None]
    loop.ids, loop.positions = torch.tensor([7, 3, 7, 4])[:, None], torch.zeros_like(loop.mask)
    loop.compare()  # two blocks are left, and two rows that may share one
    other.free()
    loop.begin(1, 1, 1, 1)
    loop.ids = torch.full_like(loop.positions, 5)
    loop.compare()
    assert loop.cache.row_lengths == [2, 1, 2, 1]


def test_no_block_that_was_given_back_is_read(
    tiny_model: Build, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row that has ended took at a block border stays its own until the step is over."""
    monkeypatch.setenv(ENV_DEBUG, "1")
    update = Batch.update

    def collecting(batch: Batch, *args: Any) -> Any:
        pages = update(batch, *args)
        batch.pool.collect()  # as another thread may do at any time
        return pages

    monkeypatch.setattr(Batch, "update", collecting)
    loop = Loop(tiny_model("llama"))
    loop.decode()
    loop.begin(1, 0, 1)  # the second row has 4 tokens
    assert loop.forward("hf_paged", loop.cache).isfinite().all()
    loop.check_stored()
    loop.cache.pool.check()
    loop.begin()
    loop.forward("hf_paged", loop.cache)
    loop.check_stored()
    assert loop.cache.pool.num_used == sum(map(len, loop.cache.block_tables))
    assert loop.cache.pool.copies == 0


def test_padding_that_is_shown_undoes_the_step(tiny_model: Build, masks: Masks) -> None:
    loop = Loop(tiny_model("llama"))
    loop.begin()
    loop.mask[1, 0] = 1
    with pytest.raises(ValueError, match="shows columns that were padding"):
        loop.forward("hf_paged", loop.cache)
    loop.mask[1, 0] = 0
    loop.compare()
    loop.check_stored()


def test_a_row_that_has_ended_needs_no_block_of_a_full_pool(
    tiny_model: Build, masks: Masks
) -> None:
    loop = Loop(tiny_model("llama"), num_blocks=5)
    loop.decode(1, 1, 1)
    loop.decode(1, 0, 1)  # 8, 4 and 7 tokens fill their blocks but for one slot
    loop.decode(0, 0, 1)
    loop.check_stored()
    loop.begin(0, 1, 0)
    with pytest.raises(PoolExhausted):
        loop.forward("hf_paged", loop.cache)
    assert loop.cache.row_lengths == [8, 4, 8]


def test_freed_rows_do_not_make_the_others_wait(tiny_model: Build, masks: Masks) -> None:
    loop = Loop(tiny_model("llama"))
    loop.cache.free_rows(torch.tensor([1]))
    for _ in range(4):
        loop.begin()
        assert read_order(loop, masks) == [0, 1, 2, 3, "mask"]
    assert loop.cache.row_lengths == [10, 0, 9]


def test_a_cache_whose_step_failed_before_its_mask_was_read_gives_its_blocks_back(
    tiny_model: Build, masks: Masks
) -> None:
    loop = Loop(tiny_model("llama"))
    loop.begin()

    def fail(*args: Any) -> None:
        raise InterruptedError

    hook = loop.model.model.layers[2].register_forward_pre_hook(fail)
    with contextlib.suppress(InterruptedError):
        loop.forward("hf_paged", loop.cache)
    hook.remove()
    pool = loop.cache.pool
    assert pool.num_used
    gc.disable()
    try:
        del loop.cache
        assert not pool.num_used
    finally:
        gc.enable()


@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_masks_of_any_kind_at_any_time(
    tiny_model: Build, masks: Masks, data: st.DataObject
) -> None:
    masks.are_late = True
    loop = Loop(tiny_model(data.draw(st.sampled_from(["llama", "gemma2"]))))
    rows = range(len(LENGTHS))
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        masks.are_late = data.draw(st.booleans(), "late")
        is_stored = loop.mask.bool()
        loop.begin(*data.draw(st.tuples(*[st.sampled_from([1, 1, 0])] * len(LENGTHS)), "grows"))
        shown = loop.mask
        hidden = data.draw(st.sampled_from([False, False, False, True]), "hidden")
        if hidden:
            row = data.draw(st.sampled_from(rows), "row")
            column = data.draw(st.sampled_from(is_stored[row].nonzero()[:, 0].tolist()), "column")
            loop.mask = shown.clone()
            loop.mask[row, column] = 0
        before = loop.cache.row_lengths
        try:
            loop.compare()
        except RuntimeError:
            assert masks.are_late
            assert hidden
            assert loop.cache.row_lengths == before
            loop.compare()
        loop.mask = shown
        assert loop.cache.row_lengths == shown.sum(1).tolist()
