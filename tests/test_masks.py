"""What masks do to a cache: rows that end, tokens that are hidden later on, masks of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import ragged_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from hf_paged import BlockPool, PagedCache, PoolExhausted
from hf_paged.core.forward import CacheState
from hf_paged.core.storage import ENV_DEBUG

Build = Callable[[str], PreTrainedModel]
LENGTHS = [6, 3, 5]
BLOCK = 4
SPECIAL = "a mask that is more than causal, sliding or chunked"


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

    def append(self, columns: int) -> None:
        """As many columns more, with a token in every row."""
        self.mask = torch.nn.functional.pad(self.mask, (0, columns), value=1)
        self.ids = 3 + torch.arange(3 * columns).view(3, columns) % 90
        self.positions = (self.mask.cumsum(1) - 1)[:, -columns:]
        self.compare()

    def forward_dict(self, attention: str, cache: Any, sliding: torch.Tensor) -> torch.Tensor:
        """A forward whose sliding layers have another 2-D mask than the others."""
        self.model.set_attn_implementation(attention)
        arguments = {
            "config": self.model.config,
            "inputs_embeds": self.model.get_input_embeddings()(self.ids),
            "past_key_values": cache,
            "position_ids": self.positions,
        }
        whole, full = self.mask, create_causal_mask(attention_mask=self.mask, **arguments)
        window = create_sliding_window_causal_mask(attention_mask=sliding, **arguments)
        self.mask = {"full_attention": full, "sliding_attention": window}
        out = self.forward(attention, cache)
        self.mask = whole
        return out

    def check_stored(self) -> None:
        """The cache holds what the mask shows, and no block more."""
        lengths = self.mask.sum(1).tolist()
        assert self.cache.row_lengths == lengths
        blocks = [len(row) for row in self.cache.block_tables]
        assert blocks == [-(-length // BLOCK) for length in lengths]


class NoReads(TorchDispatchMode):
    """Refuses operations whose result, or its shape, the host would wait for on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_decode_step_waits_for_nothing_but_its_mask(tiny_model: Build, name: str) -> None:
    """Neither the cache nor what transformers does around it reads anything back from a device."""
    loop = Loop(tiny_model(name))
    loop.decode()
    with NoReads():
        for _ in range(6):
            loop.begin()
            loop.forward("hf_paged", loop.cache)
    assert not loop.cache.report().dense_calls


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4_text"])
def test_rows_that_have_ended_store_nothing(tiny_model: Build, name: str) -> None:
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


def test_what_has_ended_can_be_forked_and_cropped(tiny_model: Build) -> None:
    loop = Loop(tiny_model("llama"))
    loop.decode(1, 0, 1)
    fork = loop.cache.fork()
    assert fork.row_lengths == [7, 3, 6]
    loop.cache.crop(-1)
    assert (loop.cache.row_lengths, fork.row_lengths) == ([6, 3, 5], [7, 3, 6])
    loop.cache.pool.check()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("new", [1, 3, 11])
def test_hidden_tokens_stay_paged(tiny_model: Build, name: str, new: int) -> None:
    """One stored token that the mask hid sent the whole batch to the gathered path."""
    loop = Loop(tiny_model(name))
    loop.decode()
    loop.mask[0, 2] = loop.mask[2, 3] = 0
    loop.mask[2, 5] = 0
    for _ in range(3):
        loop.append(new)
    expected = loop.mask.sum(1) + torch.tensor([1, 0, 2])
    assert loop.cache.row_lengths == expected.tolist()  # what is hidden may be shown again
    softcap = name == "gemma2" and new == 11  # the kernel takes no prompts under a softcap
    assert softcap or not loop.cache.report().dense_calls
    loop.mask[0, 2] = 1
    loop.decode()


def test_chunks_behind_hidden_tokens_are_gathered(tiny_model: Build) -> None:
    """transformers counts chunks from the first token that is shown, not from the first stored."""
    loop = Loop(tiny_model("llama4_text"))
    loop.mask[0, :2] = 0
    for _ in range(4):
        loop.decode()
    assert loop.cache.report().dense_calls == {SPECIAL: 8}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("new", [1, 3, 11])
def test_hidden_ends_give_their_blocks_back(tiny_model: Build, name: str, new: int) -> None:
    """The second turn of a batch kept, and hid, what generate fed to rows that had ended."""
    loop = Loop(tiny_model(name))
    for _ in range(9):
        loop.decode()
    loop.mask[1, -7:] = loop.mask[2, -1] = 0
    blocks = loop.cache.pool.num_used
    for at in range(3):
        loop.append(new)
        assert loop.cache.row_lengths == loop.mask.sum(1).tolist()
        assert loop.cache.pool.num_used < blocks or new > 1 or at
    if name == "llama":
        loop.check_stored()
    softcap = name == "gemma2" and new == 11
    assert softcap or not loop.cache.report().dense_calls
    loop.begin()
    loop.mask[1, 11] = 1
    with pytest.raises(ValueError, match=r"hid at a row's end"):
        loop.forward("hf_paged", loop.cache)


def test_a_second_turn_of_a_batch_is_paged(tiny_model: Build) -> None:
    """Rows that end early are fed padding by generate, which the next turn's mask hides."""
    model = tiny_model("llama")
    inputs, turn = ragged_ids([9, 4, 7]), ragged_ids([5, 5, 5], seed=1)["input_ids"]
    model.set_attn_implementation("sdpa")
    free = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    eos = int(free[1, 12])  # ends the second row early
    answers = []
    for attention, make in (("sdpa", DynamicCache), ("hf_paged", PagedCache)):
        model.set_attn_implementation(attention)
        cache: Any = make(config=model.config)
        options = {"max_new_tokens": 12, "do_sample": False, "past_key_values": cache}
        first = model.generate(**inputs, **options, eos_token_id=eos, pad_token_id=0)
        ended = (first[:, 9:] == eos).cumsum(1).cumsum(1) > 1
        mask = torch.cat([inputs["attention_mask"], (~ended).long(), torch.ones_like(turn)], 1)
        ids = torch.cat([first, turn], 1)
        answers.append(model.generate(ids, attention_mask=mask, **options))
    assert ended.any()
    assert torch.equal(*answers)
    assert not cache.report().dense_calls
    assert cache.row_lengths == (mask.sum(1) + 11).tolist()


def test_a_step_that_ends_rows_can_fail(tiny_model: Build) -> None:
    """What the mask hides at a row's end is given back when the step is complete, not before."""
    loop = Loop(tiny_model("llama"))
    for _ in range(3):
        loop.decode()
    loop.begin()
    loop.mask[1, -4:-1] = 0
    state = loop.cache.block_tables, loop.cache.row_lengths, loop.cache.layers[3].keys

    def fail(*args: Any) -> None:
        raise InterruptedError

    hook = loop.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        loop.forward("hf_paged", loop.cache)
    hook.remove()
    loop.cache.crop(0)
    loop.cache.pool.check()
    assert (loop.cache.block_tables, loop.cache.row_lengths) == state[:2]
    torch.testing.assert_close(loop.cache.layers[3].keys, state[2], rtol=0, atol=0)
    loop.compare()
    loop.check_stored()
    assert loop.cache.pool.num_used == sum(map(len, loop.cache.block_tables))


def test_a_fork_keeps_what_the_original_ends(tiny_model: Build) -> None:
    loop = Loop(tiny_model("llama"))
    for _ in range(5):
        loop.decode()
    fork, shown = loop.cache.fork(), loop.mask
    loop.begin()
    loop.mask[0, -4:-1] = 0
    loop.compare()
    hidden, loop.cache = loop.cache, fork
    loop.dynamic.crop(-1)
    loop.mask = shown
    loop.decode()
    hidden.free()
    loop.check_stored()


def test_what_is_in_front_of_a_hidden_end_is_indexed(tiny_model: Build) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model.config, block_size=BLOCK)
    cache = PagedCache(pool=pool)
    ids = ragged_ids([20])["input_ids"]
    mask = torch.ones_like(ids)
    model(ids[:, :15], past_key_values=cache)
    mask[0, 11:15] = 0
    model(ids[:, 15:], attention_mask=mask, past_key_values=cache)
    assert pool.insert_prefix(cache, ids) == 8  # two blocks of the 11 tokens in front
    assert pool.match_prefix(ids).get_seq_length() == 8


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


@pytest.mark.parametrize("other", ["sdpa", "4-D"])
def test_a_kept_exception_keeps_no_mask(tiny_model: Build, other: str) -> None:
    """While its traceback lived, a failed forward's mask was taken for the next one's."""
    loop = Loop(tiny_model("llama"))
    loop.begin(1, 0, 1)

    def fail(*args: Any) -> None:
        raise MemoryError

    hook = loop.model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError) as kept:
        loop.forward("hf_paged", loop.cache)
    hook.remove()
    loop.mask[:, -1] = 1  # the next one has a token in each row
    loop.positions = loop.mask.sum(1, keepdim=True) - 1
    expected = loop.forward("eager", loop.dynamic)
    if other == "sdpa":
        found = loop.forward("sdpa", loop.cache)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert loop.cache.row_lengths == [7, 4, 6]
    else:
        loop.mask = loop.mask[:, None, None].bool()
        with pytest.raises(ValueError, match="run the forward once more"):
            loop.forward("hf_paged", loop.cache)
        loop.cache.crop(0)
        assert loop.cache.row_lengths == [6, 3, 5]
    assert isinstance(kept.value, MemoryError)


def test_a_mask_of_its_caller_is_used_again(tiny_model: Build) -> None:
    loop = Loop(tiny_model("llama"))
    loop.begin(1, 0, 1)
    two_dimensional, loop.mask = loop.mask, own_mask(loop)

    def fail(*args: Any) -> None:
        raise InterruptedError

    hook = loop.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        loop.forward("hf_paged", loop.cache)
    hook.remove()
    found = loop.forward("hf_paged", loop.cache)
    loop.mask = two_dimensional
    expected = loop.forward("eager", loop.dynamic)
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], atol=1e-4, rtol=1e-4)
    assert loop.cache.row_lengths == [7, 3, 6]


def test_a_4d_mask_that_shows_padding_is_refused(tiny_model: Build) -> None:
    """Padding is not stored, so a mask of the caller's own that showed it looked at zeros."""
    loop = Loop(tiny_model("llama"))
    loop.begin()
    loop.mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match="columns that were padding"):
        loop.forward("hf_paged", loop.cache)
    loop.mask[1, ..., :3] = loop.mask[2, ..., :1] = False
    found = loop.forward("hf_paged", loop.cache)
    expected = loop.forward("sdpa", loop.dynamic)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_masks_of_one_step_that_differ_in_what_they_hide(tiny_model: Build) -> None:
    """What the one hides must not be taken for what the other does."""
    loop = Loop(tiny_model("gemma2"))
    loop.begin()
    shown = loop.mask
    loop.mask = shown.clone()
    loop.mask[0, 2] = 0
    expected = loop.forward_dict("eager", loop.dynamic, shown)
    found = loop.forward_dict("hf_paged", loop.cache, shown)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["4-D", "dict", "and_mask_function"])
def test_what_a_mask_of_ones_own_has_made_is_not_indexed(tiny_model: Build, kind: str) -> None:
    """The next prompt hit K/V that had been computed under a mask that is more than causal."""
    model = tiny_model("gemma2" if kind == "dict" else "llama")
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model.config, block_size=BLOCK)
    cache = PagedCache(pool=pool)
    ids = ragged_ids([20])["input_ids"]
    model(ids[:, :10], past_key_values=cache)
    mask: Any = torch.ones(1, 1, 10, 20, dtype=torch.bool).tril(10)
    mask[..., 3:6] = False
    if kind == "dict":
        mask = {"full_attention": mask, "sliding_attention": mask.triu(10 - 7)[..., 3:]}
    if kind == "and_mask_function":
        mask = create_causal_mask(
            config=model.config,
            inputs_embeds=model.get_input_embeddings()(ids[:, 10:]),
            attention_mask=None,
            past_key_values=cache,
            and_mask_function=lambda b, h, q, k: k != 3,
        )
    model(ids[:, 10:], attention_mask=mask, past_key_values=cache)
    inserted = pool.insert_prefix(cache, ids, attention_mask=torch.ones_like(ids))
    assert inserted == 8  # the blocks in front of that forward
    hit = pool.match_prefix(ids)
    found = model(ids[:, hit.get_seq_length() :], past_key_values=hit).logits[:, -1]
    expected = model(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_gathered_keys_and_values_of_a_mask_that_hides(tiny_model: Build) -> None:
    loop = Loop(tiny_model("llama"), backend="dense")
    loop.decode()
    loop.begin(1, 0, 1)
    loop.mask[0, 2] = 0
    loop.compare()
    assert loop.cache.row_lengths == [8, 4, 7]
    assert (
        loop.cache.state.provenance.known_columns == 7
    )  # the K/V behind are not those of the whole rows


def test_a_mask_that_is_no_pattern_and_hides(tiny_model: Build) -> None:
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


@pytest.mark.parametrize("ends", [(0, 1, 1), (1, 0, 1), (0, 0, 1)])
def test_a_first_step_of_rows_that_begin_alike(tiny_model: Build, ends: tuple[int, ...]) -> None:
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


def test_no_block_that_was_given_back_is_read(
    tiny_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a mask ends stays in its blocks until the step is over."""
    monkeypatch.setenv(ENV_DEBUG, "1")
    update = CacheState.update

    def collecting(state: CacheState, *args: Any) -> Any:
        pages = update(state, *args)
        state.allocator.collect()  # as another thread may do at any time
        return pages

    monkeypatch.setattr(CacheState, "update", collecting)
    loop = Loop(tiny_model("llama"))
    for _ in range(5):
        loop.decode()
    loop.begin(1, 0, 1)
    loop.mask[0, -6:-1] = 0
    assert loop.forward("hf_paged", loop.cache)[[0, 2]].isfinite().all()
    loop.cache.pool.check()
    for _ in range(2):
        loop.begin()
        assert loop.forward("hf_paged", loop.cache).isfinite().all()
    loop.check_stored()
    assert loop.cache.pool.num_used == sum(map(len, loop.cache.block_tables))


def test_padding_that_is_shown_is_refused(tiny_model: Build) -> None:
    loop = Loop(tiny_model("llama"))
    loop.begin()
    loop.mask[1, 0] = 1
    with pytest.raises(ValueError, match="shows columns that were padding"):
        loop.forward("hf_paged", loop.cache)
    loop.mask[1, 0] = 0
    loop.compare()
    loop.check_stored()


def test_a_row_that_has_ended_needs_no_block_of_a_full_pool(tiny_model: Build) -> None:
    loop = Loop(tiny_model("llama"), num_blocks=5)
    loop.decode(1, 1, 1)
    loop.decode(1, 0, 1)  # 8, 4 and 7 tokens fill their blocks but for one slot
    loop.decode(0, 0, 1)
    loop.check_stored()
    loop.begin(0, 1, 0)
    with pytest.raises(PoolExhausted):
        loop.forward("hf_paged", loop.cache)
    assert loop.cache.row_lengths == [8, 4, 8]


@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_masks_of_any_kind_at_any_time(tiny_model: Build, data: st.DataObject) -> None:
    """Rows grow or not, tokens are hidden and shown again, ends are hidden for good."""
    loop = Loop(tiny_model(data.draw(st.sampled_from(["llama", "gemma2"]))))
    rows = range(len(LENGTHS))
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        is_stored = loop.mask.bool()
        loop.begin(*data.draw(st.tuples(*[st.sampled_from([1, 1, 0])] * len(LENGTHS)), "grows"))
        shown = loop.mask
        if data.draw(st.sampled_from([False, False, False, True]), "hidden"):
            row = data.draw(st.sampled_from(rows), "row")
            columns = is_stored[row].nonzero()[:, 0].tolist()
            if columns:
                first = data.draw(st.sampled_from(columns), "first")
                last = data.draw(st.sampled_from(columns), "last")
                loop.mask = shown.clone()
                loop.mask[row, first : last + 1] = 0
                if last == columns[-1] and first <= last and shown[row, -1]:
                    shown = loop.mask  # it has ended the row there
        loop.compare()
        loop.mask = shown
        assert loop.cache.row_lengths == shown.sum(1).tolist()
