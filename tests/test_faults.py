"""What goes wrong is said at once, in words, and leaves the cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ragged_ids, two_layer_config
from interrupts import interrupt
from transformers import DynamicCache, PreTrainedModel

from hf_paged import BlockPool, PagedCache, PoolExhausted
from hf_paged.backends.cpu import prompt as cpu
from hf_paged.backends.cpu import runner
from hf_paged.core import storage as storage_module
from hf_paged.core.kv_storage import KVStorage

Build = Callable[[str], PreTrainedModel]


@pytest.fixture
def model(tiny_model: Build) -> PreTrainedModel:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    return model


@pytest.mark.parametrize("block_size", [0, -16, 1.5, "16", True, None])
def test_block_size_is_a_whole_number(model: PreTrainedModel, block_size: Any) -> None:
    with pytest.raises(ValueError, match="block_size"):
        PagedCache(config=model.config, block_size=block_size)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "config .* or pool"),
        ({"config": 1, "pool": 1}, "config .* or pool"),
        ({"config": "gpt2"}, "config must be"),
        ({"config": {"hidden_size": 8}}, "config must be"),
        ({"pool": "a pool"}, "pool must be"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 2.0}, "num_blocks"),
        ({"num_blocks": 4, "max_memory": "1GiB"}, "num_blocks and max_memory"),
        ({"max_memory": "four"}, "max_memory"),
        ({"max_memory": -1}, "max_memory"),
        ({"max_memory": True}, "max_memory"),
        ({"max_memory": 100}, "less than one block"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_contradictory_arguments(model: PreTrainedModel, kwargs: dict, words: str) -> None:
    if kwargs and not {"config", "pool"} & kwargs.keys():
        kwargs = {"config": model.config, **kwargs}
    with pytest.raises(ValueError, match=words):
        PagedCache(**kwargs)


@pytest.mark.parametrize("name", ["dtype", "kv_dtype"])
@pytest.mark.parametrize("kind", [torch.int8, torch.bool, torch.complex64, "bfloat16", float])
def test_a_dtype_that_cannot_hold_kv(model: PreTrainedModel, name: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a floating-point torch.dtype"):
        BlockPool(model.config, **{name: kind})


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_another_number_of_rows(model: PreTrainedModel, rows: int) -> None:
    ids, mask = torch.arange(1, 11).view(2, 5), torch.ones(rows, 5, dtype=torch.long)
    mask[:, 0] = 0
    with pytest.raises(ValueError, match=f"has {rows} rows for a batch of 2"):
        model(ids, attention_mask=mask, past_key_values=PagedCache(config=model.config))


def test_a_pool_fixes_its_own_sizes(model: PreTrainedModel) -> None:
    pool = BlockPool(model.config, block_size=8)
    for kwargs in ({"num_blocks": 4}, {"max_memory": "1GiB"}, {"block_size": 4}):
        with pytest.raises(ValueError, match="pool"):
            PagedCache(pool=pool, **kwargs)
    assert PagedCache(pool=pool, block_size=8).pool is pool


def prefilled(model: PreTrainedModel, lengths: list[int], **kwargs: Any) -> PagedCache:
    cache = PagedCache(config=model.config, block_size=4, **kwargs)
    with torch.no_grad():
        model(**ragged_ids(lengths), past_key_values=cache)
    return cache


def unchanged(cache: PagedCache, call: Callable[[], Any], error: type, words: str) -> None:
    """`call` raises `error`, and the cache's tables and contents are as before."""
    state = cache.block_tables, cache.row_lengths, cache.pool.num_used
    keys = [layer.keys for layer in cache.layers]
    with pytest.raises(error, match=words), torch.no_grad():
        call()
    assert state == (cache.block_tables, cache.row_lengths, cache.pool.num_used)
    for layer, before in zip(cache.layers, keys, strict=True):
        assert torch.equal(layer.keys, before)
    cache.pool.check()


def test_another_batch_size(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9, 5])
    for rows in (1, 3, 4):
        ids = torch.ones(rows, 1, dtype=torch.long)
        call = lambda: model(input_ids=ids, past_key_values=cache)  # noqa: B023, E731
        unchanged(cache, call, ValueError, f"holds 2 rows, the input has {rows}")


def test_states_of_another_kind(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9, 5])
    good = torch.zeros(2, 2, 1, 16)
    for bad, words in (
        (good.double(), "float64"),
        (good[:, :1], r"\(kv_heads, head_dim\)"),
        (good[..., :8], r"\(kv_heads, head_dim\)"),
        (good.to("meta"), "meta"),
        (good[0], "must be"),
    ):
        unchanged(cache, lambda bad=bad: cache.update(bad, bad, 0), ValueError, words)
    unchanged(cache, lambda: cache.update(good, good[:, :, :0], 0), ValueError, "must be")


def test_mask_of_another_length(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9, 5])
    ids = torch.ones(2, 1, dtype=torch.long)
    for length in (1, 9, 11):
        mask = torch.ones(2, length, dtype=torch.long)
        call = lambda: model(input_ids=ids, attention_mask=mask, past_key_values=cache)  # noqa: B023, E731
        unchanged(cache, call, ValueError, "attention_mask covers")


def test_padding_cannot_become_a_token(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9, 5])
    ids, mask = torch.ones(2, 1, dtype=torch.long), torch.ones(2, 10, dtype=torch.long)
    call = lambda: model(input_ids=ids, attention_mask=mask, past_key_values=cache)  # noqa: E731
    unchanged(cache, call, ValueError, "were padding")


def test_crop_of_more_than_there_is(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9, 5])
    unchanged(cache, lambda: cache.crop(-10), ValueError, "Cannot crop 10 tokens")
    unchanged(cache, lambda: cache.crop(3), ValueError, "minus the number")
    cache.crop(-9)
    assert cache.row_lengths == [0, 0]


def test_crop_into_padding(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9, 5])
    cache.crop(-6)
    assert cache.row_lengths == [3, 0]
    assert [len(table) for table in cache.block_tables] == [1, 0]
    cache.pool.check()


def test_full_pool_says_what_to_change(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9, 5], num_blocks=5)
    assert cache.pool.num_free == 0
    ids = torch.ones(2, 4, dtype=torch.long)
    unchanged(
        cache,
        lambda: model(input_ids=ids, past_key_values=cache),
        PoolExhausted,
        r"needs 2 more blocks .* 0 of 5 are free .* num_blocks .* max_new_tokens",
    )
    with torch.no_grad():  # what still fits goes on
        model(input_ids=ids[:, :3], past_key_values=cache)
    assert cache.row_lengths == [12, 8]


def test_generate_in_a_full_pool_leaves_a_usable_cache(model: PreTrainedModel) -> None:
    inputs = ragged_ids([9, 5])
    cache = PagedCache(config=model.config, block_size=4, num_blocks=6)
    with pytest.raises(PoolExhausted):
        model.generate(**inputs, past_key_values=cache, max_new_tokens=20)
    cache.pool.check()
    cache.reset()
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
    model.set_attn_implementation("sdpa")
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=3))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("prompt_first", [True, False], ids=["in a decode", "in the prefill"])
@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("place", ["self_attn.q_proj", "mlp"], ids=["before update", "behind it"])
def test_a_forward_that_fails_is_rolled_back(
    tiny_model: Build, name: str, prompt_first: bool, layer: int, place: str
) -> None:
    """The next call continues from the last complete step, whichever layer the failure was in."""
    model = tiny_model(name)
    inputs = ragged_ids([13, 6])
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model.set_attn_implementation("sdpa")
    expected = model.generate(**inputs, max_new_tokens=6)
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4)
    if prompt_first:
        prompt = {key: value[:, :-1] for key, value in inputs.items()}
        with torch.no_grad():
            model(**prompt, position_ids=positions[:, :-1], past_key_values=cache)
    before = cache.get_seq_length()
    hook = model.model.layers[layer].get_submodule(place).register_forward_hook(interrupt)
    ids, mask = inputs["input_ids"][:, before:], inputs["attention_mask"]
    with pytest.raises(KeyboardInterrupt) as held, torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    hook.remove()
    assert held is not None  # its traceback keeps the failed forward's frames alive
    # The last layer had its K/V when its MLP failed: then the step is complete, and is cropped.
    if layer == 3 and place == "mlp":
        cache.crop(-(cache.get_seq_length() - before))
    assert cache.get_seq_length() == before
    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=6)
    assert torch.equal(found, expected)
    cache.pool.check()


def test_a_failed_fork_is_one_row_again(model: PreTrainedModel) -> None:
    """One row that was given four is one row after the failure, and can be given three."""
    cache = prefilled(model, [9])
    before, blocks = cache.layers[0].keys, cache.block_tables
    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(input_ids=torch.ones(4, 2, dtype=torch.long), past_key_values=cache)
    hook.remove()
    cache.crop(0)
    assert (cache.batch_size, cache.block_tables) == (1, blocks)
    assert torch.equal(cache.layers[0].keys, before)
    with torch.no_grad():
        model(input_ids=torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    assert cache.row_lengths == [10, 10, 10]
    cache.pool.check()


def test_a_failed_first_step_leaves_no_rows(model: PreTrainedModel) -> None:
    cache = PagedCache(config=model.config, block_size=4)
    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(**ragged_ids([9, 5]), past_key_values=cache)
    hook.remove()
    cache.crop(0)
    assert (cache.batch_size, cache.block_tables, cache.pool.num_used) == (-1, [], 0)


@pytest.mark.parametrize("layer", range(4))
def test_a_write_that_fails_is_rolled_back(
    model: PreTrainedModel, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the last layer, where no later one would be seen to be behind."""
    cache = prefilled(model, [9, 5])
    storage = cache.pool.groups[0].storage[layer]
    monkeypatch.setattr(storage, "write", interrupt)
    ids = torch.ones(2, 3, dtype=torch.long)
    unchanged(cache, lambda: model(ids, past_key_values=cache), KeyboardInterrupt, "^$")
    monkeypatch.undo()
    assert cache.get_seq_length() == 9
    with torch.no_grad():
        model(ids[:, :2], past_key_values=cache)
    assert cache.row_lengths == [11, 7]


@pytest.mark.parametrize("call", range(4))
def test_a_kernel_that_raises(
    model: PreTrainedModel, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each layer: the step is rolled back, and the same step then works."""
    cache = prefilled(model, [9, 5])
    ids = torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad():
        expected = model(ids, past_key_values=cache.fork()).logits
    attend, calls = runner.attend, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == call + 1:
            raise RuntimeError("no thread could be started")
        return attend(*args)

    monkeypatch.setattr(runner, "attend", failing)
    step = lambda: model(ids, past_key_values=cache)  # noqa: E731
    with pytest.raises(RuntimeError, match="no thread"), torch.no_grad():
        step()
    if call == 3:  # all layers had their K/V
        cache.crop(-1)
    assert cache.get_seq_length() == 9
    with torch.no_grad():
        assert torch.equal(step().logits, expected)
    cache.pool.check()


@pytest.mark.parametrize("lengths", [[9, 9], [9, 5]], ids=["even", "ragged"])
@pytest.mark.parametrize("behind", [0, 6], ids=["a prompt", "a chunk behind one"])
def test_a_prompts_kernel_that_raises(
    tiny_model: Build, lengths: list[int], behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its calls, by row and layer: the step is rolled back, and then works."""
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    monkeypatch.setattr(runner, "refusal", lambda call: "not of interest here")
    inputs, flash, calls = ragged_ids(lengths), cpu._flash, []
    fails_at = -1

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == fails_at:
            raise RuntimeError("no thread could be started")
        return flash(*args, **kwargs)

    monkeypatch.setattr(cpu, "_flash", failing)

    def begun() -> PagedCache:
        cache = PagedCache(config=model.config, block_size=4)
        if behind:
            step(cache, 0, behind)
        return cache

    def step(cache: PagedCache, start: int, stop: int) -> torch.Tensor:
        ids, mask = inputs["input_ids"][:, start:stop], inputs["attention_mask"][:, :stop]
        with torch.no_grad():
            return model(ids, attention_mask=mask, past_key_values=cache).logits

    cache = begun()
    calls.clear()
    expected, count = step(cache, behind, 9), len(calls)
    was_complete = []
    for at in range(1, count + 1):
        cache, fails_at = begun(), at
        calls.clear()
        with pytest.raises(RuntimeError, match="no thread"):
            step(cache, behind, 9)
        was_complete.append(cache.get_seq_length() == 9)
        if was_complete[-1]:  # all layers had their K/V
            cache.crop(behind - 9)
        assert cache.get_seq_length() == behind
        assert torch.equal(step(cache, behind, 9), expected)
        cache.pool.check()
        fails_at = -1
    assert was_complete.index(True) >= 3  # in the last of 4 layers only
    assert all(was_complete[was_complete.index(True) :])


@pytest.mark.parametrize("tensor", range(8))
def test_growth_that_fails_anywhere_is_made_good(
    tiny_model: Build, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K or V of any of 2 layers of 2 groups runs out of memory: nothing has changed."""
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    cache = prefilled(model, [9, 5])
    ids = ragged_ids([40, 40], seed=1)["input_ids"]
    with torch.no_grad():
        expected = model(ids, past_key_values=prefilled(model, [9, 5])).logits
    grown, calls = storage_module._grown, []

    def failing(memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
        calls.append(num_blocks)
        if len(calls) == tensor + 1:
            raise MemoryError
        return grown(memory, num_blocks)

    monkeypatch.setattr(storage_module, "_grown", failing)
    unchanged(cache, lambda: model(ids, past_key_values=cache), MemoryError, "^$")
    with torch.no_grad():
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)
    cache.pool.check()


@pytest.mark.parametrize("how", ["forward", "generate"])
@pytest.mark.parametrize("tensor", range(8))
def test_a_first_allocation_that_fails_is_made_good(
    tiny_model: Build, tensor: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K or V of any of 4 layers finds no memory when it is first stored: the same call once more is
    as on a new cache, and so is another one, at the latest after the reset that it asks for."""
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    inputs, other = ragged_ids([9, 5]), ragged_ids([12, 7, 3], seed=1)

    def run(cache: PagedCache, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if how == "generate":
            return model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
        with torch.no_grad():
            return model(**inputs, past_key_values=cache).logits

    empty_blocks = KVStorage._empty_blocks
    for then in (inputs, other):
        expected = run(PagedCache(config=model.config, block_size=4), then)
        cache, calls = PagedCache(config=model.config, block_size=4), []

        def failing(*args: Any, calls: list[Any] = calls) -> torch.Tensor:
            calls.append(args)
            if len(calls) == tensor + 1:
                raise MemoryError
            return empty_blocks(*args)

        monkeypatch.setattr(KVStorage, "_empty_blocks", failing)
        with pytest.raises(MemoryError):
            run(cache, inputs)
        cache.pool.check()
        if then is other and tensor > 1:  # a layer has its K/V, and another is what fails
            with pytest.raises(RuntimeError, match=r"reset\(\) the cache"):
                run(cache, then)
            cache.reset()
        assert torch.equal(run(cache, then), expected)
        cache.pool.check()
        cache.free()
        assert cache.pool.num_used == 0


def test_more_than_max_memory_is_refused_each_time() -> None:
    """K/V that are larger than the config says, in a layer behind the first."""
    pool = BlockPool(two_layer_config(8), max_memory="1MiB", dtype=torch.float32)
    cache = PagedCache(pool=pool)
    states = torch.zeros(1, 1, 3, 2)
    for _ in range(2):
        cache.update(states, states, 0)
        with pytest.raises(ValueError, match="max_memory cannot be kept"):
            cache.update(states.repeat(1, 4, 1, 1), states.repeat(1, 4, 1, 1), 1)
        cache.reset()
    assert pool.num_used == 0


def test_config_is_left_alone(model: PreTrainedModel) -> None:
    before = model.config.to_dict()
    model.generate(
        **ragged_ids([5]), past_key_values=PagedCache(config=model.config), max_new_tokens=2
    )
    assert model.config.to_dict() == before


def test_a_view_of_an_earlier_step_is_refused(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9])
    new = torch.zeros(1, 2, 1, 16)
    views = [cache.update(new, new, layer) for layer in range(4)]
    cache.update(new, new, 0)
    with pytest.raises(RuntimeError, match="earlier step"):
        views[0][0].sum()


def test_writing_into_a_view_is_refused(model: PreTrainedModel) -> None:
    cache = prefilled(model, [9])
    new = torch.zeros(1, 2, 1, 16)
    keys, _ = cache.update(new, new, 0)
    with pytest.raises(RuntimeError, match=r"never reach its blocks; .* cache\.edit\(layer\)"):
        keys.zero_()
    with pytest.raises(RuntimeError, match=r"never reach its blocks; .* cache\.edit\(layer\)"):
        keys[:, :, 0] = 1


def test_dynamic_cache_of_the_same_model_is_unaffected(model: PreTrainedModel) -> None:
    inputs = ragged_ids([9, 5])
    found = model.generate(
        **inputs, past_key_values=DynamicCache(config=model.config), max_new_tokens=4
    )
    model.set_attn_implementation("sdpa")
    assert torch.equal(found, model.generate(**inputs, max_new_tokens=4))


def test_a_pool_can_store_in_another_dtype(model: PreTrainedModel) -> None:
    inputs = ragged_ids([9, 5])
    outs = []
    for dtype in (None, torch.bfloat16):
        pool = BlockPool(model.config, kv_dtype=dtype)
        with torch.no_grad():
            cache = PagedCache(pool=pool)
            model(**inputs, past_key_values=cache)
            outs.append(model(inputs["input_ids"][:, :1], past_key_values=cache).logits)
        assert pool.groups[0].storage[0].keys.dtype == (dtype or torch.float32)
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs, atol=0.5, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_k_v_in_8_bits_are_gathered_and_moved_out_with_padding(
    model: PreTrainedModel, dtype: torch.dtype
) -> None:
    inputs = ragged_ids([9, 5])
    cache = PagedCache(pool=BlockPool(model.config, kv_dtype=dtype), backend="dense")
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.offload()
        cache.restore()
        step = {"input_ids": inputs["input_ids"][:, :1], "past_key_values": cache}
        logits = model(**step).logits
        assert logits.isfinite().all()
        cache.crop(-1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        assert torch.equal(model(**step, attention_mask=mask).logits, logits)
    assert cache.pool.groups[0].storage[0].keys.dtype == dtype
    assert cache.layers[0].keys.dtype == torch.float32  # as a DynamicCache has them


def test_a_pool_made_for_another_dtype_or_device(model: PreTrainedModel) -> None:
    for kwargs, words in (({"dtype": torch.bfloat16}, "bfloat16"), ({"device": "meta"}, "meta")):
        pool = BlockPool(model.config, **kwargs)
        with pytest.raises(ValueError, match=words), torch.no_grad():
            model(**ragged_ids([9, 5]), past_key_values=PagedCache(pool=pool))
        assert pool.num_used == 0
        assert PagedCache(pool=pool).report().bytes == 0
