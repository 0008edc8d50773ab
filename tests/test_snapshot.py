"""Caches and prefixes outside of their pool: moved out, saved, loaded, and damaged files."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ragged_ids, tiny
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3NextConfig

from hf_paged import BlockPool, PagedCache, PoolExhausted, serialization
from hf_paged.core.rows import settled_tables

ARCHITECTURES = ["llama", "gemma3_text", "mistral"]
INPUTS = ragged_ids([20, 9])


def model_of(architecture: str) -> Any:
    model = tiny(architecture)
    model.set_attn_implementation("hf_paged")
    return model


def filled(model: Any, pool: BlockPool) -> tuple[PagedCache, torch.Tensor]:
    cache = PagedCache(pool=pool)
    out = model.generate(**INPUTS, past_key_values=cache, max_new_tokens=6)
    return cache, out


def continued(model: Any, cache: Any, out: torch.Tensor) -> torch.Tensor:
    mask = torch.nn.functional.pad(INPUTS["attention_mask"], (0, 6), value=1)
    return model.generate(out, attention_mask=mask, past_key_values=cache, max_new_tokens=5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cache_moves_out_and_in(architecture: str) -> None:
    model = model_of(architecture)
    pool = BlockPool(model, block_size=4, num_blocks=20)
    cache, out = filled(model, pool)
    expected = continued(model, cache.fork(), out)
    cache.offload()
    assert pool.num_used == 0
    for use in (cache.get_seq_length, cache.report, lambda: cache.crop(-1), lambda: cache.fork()):
        with pytest.raises(RuntimeError, match=r"restore\(\) it first"):
            use()
    with PagedCache(pool=pool) as other:
        states = torch.zeros(18, model.config.num_key_value_heads, 4, 16)
        states += torch.arange(18)[:, None, None, None]  # rows that have nothing to share
        for layer in range(model.config.num_hidden_layers):
            other.update(states, states, layer)
        with pytest.raises(PoolExhausted):
            cache.restore()
    cache.restore()
    pool.check()
    assert torch.equal(continued(model, cache, out), expected)


def test_blocks_return_to_the_device_of_their_layer() -> None:
    """With K/V on another device than what was moved out; "meta" stands for that."""
    model = model_of("llama")
    cache, _ = filled(model, BlockPool(model.config, block_size=4))
    tables = settled_tables(cache.state)
    moved_out = serialization.Snapshot.take(
        cache.pool.storage, tables.tokens.lengths, tables.tables
    )
    pool = BlockPool(model.config, block_size=4)
    with PagedCache(pool=pool) as other:
        states = torch.empty(1, model.config.num_key_value_heads, 1, 16, device="meta")
        for layer in range(model.config.num_hidden_layers):
            other.update(states, states, layer)
    placed = moved_out.place(pool.storage, tables.tokens, None)
    for table, before in zip(placed.tables, tables.tables, strict=True):
        assert (table >= 0).sum() == (before >= 0).sum() > 0
    pool.check()


@pytest.mark.parametrize("name", ["eos_token_id", "use_cache", "attention_dropout", "id2label"])
def test_what_changes_no_kv_does_not_matter(name: str, tmp_path: Path) -> None:
    model = model_of("llama")
    cache, out = filled(model, BlockPool(model, block_size=4))
    cache.save(tmp_path / "cache")
    expected = continued(model, cache, out)
    value = {"use_cache": False, "attention_dropout": 0.5, "id2label": {0: "no"}}.get(name, 7)
    setattr(model.config, name, value)
    assert torch.equal(continued(model, PagedCache.load(tmp_path / "cache", model), out), expected)


def test_a_cache_of_nothing_but_padding_is_saved_and_read(tmp_path: Path) -> None:
    """Loaded into a pool that has no block yet."""
    model = model_of("gemma3_text")
    cache = PagedCache(pool=BlockPool(model, block_size=4))
    with torch.no_grad():
        ids = ragged_ids([25, 25])["input_ids"]
        model(ids, attention_mask=torch.zeros_like(ids), past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = PagedCache.load(tmp_path / "cache", model)
    assert (loaded.get_seq_length(), loaded.row_lengths, loaded.pool.num_blocks) == (25, [0, 0], 0)
    assert [layer.keys for layer in loaded.layers] == [None] * 4  # of no block, so of no shape
    with torch.no_grad():
        model(torch.ones(2, 1, dtype=torch.long), past_key_values=loaded)
    assert loaded.row_lengths == [1, 1]
    for layer, shown in zip(loaded.layers, (7, 26, 7, 26), strict=True):
        assert torch.equal(layer.keys[:, :, :-1], torch.zeros(2, 2, shown - 1, 16))
        assert layer.keys[:, :, -1].any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_cache_goes_on(architecture: str, tmp_path: Path) -> None:
    model = model_of(architecture)
    cache, out = filled(model, BlockPool(model.config, block_size=4))
    cache.save(tmp_path / "cache")
    loaded = PagedCache.load(tmp_path / "cache", model.config)
    loaded.pool.check()
    assert loaded.row_lengths == cache.row_lengths
    assert loaded.pool.block_size == 4
    assert torch.equal(continued(model, loaded, out), continued(model, cache, out))
    assert os.listdir(tmp_path) == ["cache"]


def test_a_saved_cache_is_of_the_weights_that_computed_it(tmp_path: Path) -> None:
    model = model_of("llama")
    cache, _ = filled(model, BlockPool(model, block_size=4))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] += 1
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="other weights"):
        PagedCache.load(tmp_path / "cache", model)


def test_a_loaded_cache_knows_that_it_may_hold_padding(tmp_path: Path) -> None:
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    cache, out = filled(model, BlockPool(model.config, block_size=4))
    cache.save(tmp_path / "cache")
    loaded = PagedCache.load(tmp_path / "cache", model.config)
    with pytest.raises(ValueError, match="padding may be stored like tokens"):
        loaded.pool.insert_prefix(loaded, out)


def test_padding_between_tokens_is_saved(tmp_path: Path) -> None:
    model, ids = model_of("llama"), ragged_ids([6, 6])["input_ids"]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    cache = PagedCache(config=model.config, block_size=4)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        step = {"input_ids": ids[:, :1], "attention_mask": torch.cat([mask, mask[:, :1]], 1)}
        model(**step, past_key_values=cache)
        cache.save(tmp_path / "cache")
        loaded = PagedCache.load(tmp_path / "cache", model.config)
        step["attention_mask"] = torch.cat([step["attention_mask"], mask[:, :1]], 1)
        logits = [model(**step, past_key_values=c).logits for c in (cache, loaded)]
    assert torch.equal(*logits)


CHILD = """
import sys
sys.path[:0] = ["tests", "."]
import torch
from test_snapshot import BlockPool, INPUTS, model_of
model = model_of(sys.argv[1])
pool = BlockPool(model, block_size=4)
assert pool.load_prefixes(sys.argv[2]) == 39
pool.check()
cache = pool.match_prefix(**INPUTS)
assert cache.row_lengths == [19, 8], cache.row_lengths
out = model.generate(**INPUTS, past_key_values=cache, max_new_tokens=6)
torch.save(out, sys.argv[3])
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefixes_are_known_in_another_process(architecture: str, tmp_path: Path) -> None:
    model = model_of(architecture)
    pool = BlockPool(model, block_size=4)
    cache = PagedCache(pool=pool).prefill(model, **INPUTS)
    assert pool.insert_prefix(cache, INPUTS["input_ids"]) == 27
    other = ragged_ids([12], seed=5)["input_ids"]
    with torch.no_grad(), PagedCache(pool=pool) as more:
        model(input_ids=other, past_key_values=more)
        assert pool.insert_prefix(more, other, extra_key=("tenant", 1)) == 12
    pool.save_prefixes(tmp_path / "prefixes")
    args = [architecture, str(tmp_path / "prefixes"), str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", CHILD, *args], check=True, capture_output=True)
    expected = model.generate(
        **INPUTS, past_key_values=DynamicCache(config=model.config), max_new_tokens=6
    )
    assert torch.equal(torch.load(tmp_path / "out"), expected)
    # What is known already is neither loaded twice nor counted.
    assert pool.load_prefixes(tmp_path / "prefixes") == 0
    pool.check()
    with pool.match_prefix(other, extra_key=("tenant", 1)) as found:
        assert found.row_lengths == [11]


def test_a_pool_that_stores_another_dtype_is_saved_as_such(tmp_path: Path) -> None:
    model = model_of("llama")
    pool = BlockPool(model.config, block_size=4, dtype=torch.float32, kv_dtype=torch.bfloat16)
    cache, out = filled(model, pool)
    pool.insert_prefix(cache, out)
    cache.save(tmp_path / "cache")
    pool.save_prefixes(tmp_path / "prefixes")
    loaded = PagedCache.load(tmp_path / "cache", model.config)
    assert torch.equal(continued(model, loaded, out), continued(model, cache.fork(), out))
    again = BlockPool(model.config, block_size=4, dtype=torch.float32, kv_dtype=torch.bfloat16)
    assert again.load_prefixes(tmp_path / "prefixes") > 0
    with pytest.raises(ValueError, match="kv_dtype is bfloat16"):
        BlockPool(model.config, block_size=4).load_prefixes(tmp_path / "prefixes")


def test_the_least_recently_used_is_still_so_after_loading(tmp_path: Path) -> None:
    model = model_of("llama")
    pool = BlockPool(model, block_size=4)
    prompts = [ragged_ids([8], seed=seed)["input_ids"] for seed in range(3)]
    for ids in prompts:
        with torch.no_grad(), PagedCache(pool=pool) as cache:
            model(input_ids=ids, past_key_values=cache)
            pool.insert_prefix(cache, ids)
    pool.match_prefix(prompts[0]).free()
    pool.save_prefixes(tmp_path / "prefixes")
    small = BlockPool(model, block_size=4, num_blocks=6)
    assert small.load_prefixes(tmp_path / "prefixes") == 24
    assert small.evict(2) == 2
    known = [small.match_prefix(ids).get_seq_length() for ids in prompts]
    assert known == [7, 0, 7]


def test_a_pool_too_small_for_a_file_stays_as_it_is(tmp_path: Path) -> None:
    model = model_of("llama")
    pool = BlockPool(model, block_size=4)
    cache, out = filled(model, pool)
    pool.insert_prefix(cache, out)
    pool.save_prefixes(tmp_path / "prefixes")
    small = BlockPool(model, block_size=4, num_blocks=5)
    with pytest.raises(PoolExhausted):
        small.load_prefixes(tmp_path / "prefixes")
    small.check()
    assert small.num_free == 5


def test_an_empty_index_is_saved_and_loaded(tmp_path: Path) -> None:
    pool = BlockPool(model_of("llama"))
    pool.save_prefixes(tmp_path / "prefixes")
    assert pool.load_prefixes(tmp_path / "prefixes") == 0


def test_an_index_that_was_empty_is_loaded_into_a_pool_in_use(tmp_path: Path) -> None:
    """Its file has no layers, as no K/V had been seen when it was written."""
    model = model_of("llama")
    BlockPool(model).save_prefixes(tmp_path / "prefixes")
    pool = BlockPool(model)
    cache, out = filled(model, pool)
    pool.insert_prefix(cache, out)
    assert pool.load_prefixes(tmp_path / "prefixes") == 0
    assert pool.match_prefix(**INPUTS).get_seq_length() == 19


# Files that must not be taken


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("saved")
    model = model_of("gemma3_text")
    pool = BlockPool(model, block_size=4)
    cache, out = filled(model, pool)
    pool.insert_prefix(cache, out)
    cache.save(folder / "cache")
    pool.save_prefixes(folder / "prefixes")
    return {"model": model, "cache": folder / "cache", "prefixes": folder / "prefixes"}


def load(kind: str, path: Path, model: Any, **kwargs: Any) -> None:
    if kind == "cache":
        PagedCache.load(path, model)
    else:
        pool = BlockPool(model, **{"block_size": 4, **kwargs})
        try:
            pool.load_prefixes(path)
        finally:
            pool.check()
            assert pool.num_used == 0


def refusal(kind: str, path: Path, model: Any) -> str | None:
    try:
        load(kind, path, model)
    except (ValueError, PoolExhausted) as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["cache", "prefixes"])
def test_another_model_is_refused(saved: dict[str, Any], kind: str) -> None:
    other = tiny("gemma3_text", sliding_window=9, query_pre_attn_scalar=8)
    values = "config has other values for query_pre_attn_scalar, sliding_window"
    for wrong in (other, other.config):
        with pytest.raises(ValueError, match=values):
            load(kind, saved[kind], wrong)
    with pytest.raises(ValueError, match="it is of a gemma3_text model, not of a llama model"):
        load(kind, saved[kind], tiny("llama"))
    wrong = tiny("gemma3_text")
    with torch.no_grad():
        wrong.lm_head.weight += 1
    with pytest.raises(ValueError, match="it was computed by other weights"):
        load(kind, saved[kind], wrong)
    load(kind, saved[kind], saved["model"])


@pytest.mark.parametrize("kind", ["cache", "prefixes"])
def test_a_file_and_a_pool_must_both_know_weights_or_none(kind: str, tmp_path: Path) -> None:
    """Else these may be others; the error says so, and not that they are."""
    model = model_of("llama")
    for source, other, message in (
        (model, model.config, "a config does not say whether the model has these; load it for the"),
        (model.config, model, "made from a config, so it does not say which weights computed it"),
    ):
        pool = BlockPool(source, block_size=4)
        cache, out = filled(model, pool)
        pool.insert_prefix(cache, out)
        cache.save(tmp_path / "cache")
        pool.save_prefixes(tmp_path / "prefixes")
        cache.free()
        with pytest.raises(ValueError, match=message):
            load(kind, tmp_path / kind, other)
        load(kind, tmp_path / kind, source)


@pytest.mark.parametrize("kind", ["cache", "prefixes"])
def test_other_adapters_are_refused(kind: str, tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(model_of("llama"), config)
    pool = BlockPool(model, block_size=4)
    cache = PagedCache(pool=pool)
    out = model.generate(**INPUTS, past_key_values=cache, max_new_tokens=6)
    pool.insert_prefix(cache, out)
    cache.save(tmp_path / "cache")
    pool.save_prefixes(tmp_path / "prefixes")
    with model.disable_adapter(), pytest.raises(ValueError, match="computed with other adapters"):
        load(kind, tmp_path / kind, model)
    load(kind, tmp_path / kind, model)


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    """Of the same model, after it was made bfloat16: for its pool as it is, and for a new one."""
    model = model_of("llama")
    pool = BlockPool(model, block_size=4)
    cache, out = filled(model, pool)
    pool.insert_prefix(cache, out)
    cache.free()
    pool.save_prefixes(tmp_path / "prefixes")
    model.to(torch.bfloat16)
    for other in (pool, BlockPool(model, block_size=4)):
        used = other.num_blocks - other.num_free
        with pytest.raises(ValueError, match="it was computed by other weights"):
            other.load_prefixes(tmp_path / "prefixes")
        other.check()
        assert other.num_blocks - other.num_free == used


def test_another_block_size_and_kind_are_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="block_size is 4, the pool's is 8"):
        load("prefixes", saved["prefixes"], saved["model"], block_size=8)
    with pytest.raises(ValueError, match="holds 'cache', not 'prefixes'"):
        load("prefixes", saved["cache"], saved["model"])
    with pytest.raises(FileNotFoundError):
        load("cache", saved["cache"].with_name("none"), saved["model"])


@pytest.mark.parametrize("kind", ["cache", "prefixes"])
def test_truncated_files_are_refused(saved: dict[str, Any], kind: str, tmp_path: Path) -> None:
    whole = saved[kind].read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged or no file of hf_paged"):
            load(kind, tmp_path / "cut", saved["model"])


def tampered(path: Path, target: Path, change: Any) -> Path:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    facts = json.loads(metadata["facts"])
    change(tensors, facts)
    metadata["facts"] = json.dumps(facts)
    metadata["checksum"] = serialization.checksum(metadata["facts"], tensors)
    save_file(tensors, target, metadata)
    return target


def _set(name: str, value: Any) -> Any:
    return lambda tensors, facts: tensors.__setitem__(name, value(tensors[name]))


BAD_IN_BOTH = [
    _set("lengths", lambda t: t + 100),
    _set("lengths", lambda t: -t),
    _set("lengths", lambda t: t.float()),
    _set("lengths", lambda t: t[:1]),
    _set("table.0", lambda t: t + 1000),
    _set("table.0", lambda t: t - 1000),
    _set("table.0", lambda t: t[:, :2].contiguous()),
    _set("table.0", lambda t: torch.full_like(t, -1)),
    _set("table.1", lambda t: t[None]),
    _set("table.1", lambda t: t.int()),
    _set("layer.0.keys", lambda t: t[:1].clone()),
    _set("layer.0.keys", lambda t: t.flatten(0, 1).clone()),
    _set("layer.1.values", lambda t: t[:, :, :1].half()),
    lambda tensors, facts: tensors.pop("layer.0.values"),
    lambda tensors, facts: tensors.pop("table.1"),
    lambda tensors, facts: tensors.update({"layer.99.keys": tensors["layer.0.keys"].clone()}),
    lambda tensors, facts: tensors.update({"layer.../x.keys": torch.zeros(1)}),
    lambda tensors, facts: facts.update(windows=[None]),
    lambda tensors, facts: facts.update(block_size=0),
    lambda tensors, facts: facts.update(block_size="4"),
    lambda tensors, facts: facts.pop("identity"),
    lambda tensors, facts: facts.clear(),
]
BAD_IN_ONE = [
    ("cache", lambda tensors, facts: tensors.pop("is_token")),
    ("cache", _set("is_token", lambda t: ~t)),
    ("cache", _set("is_token", lambda t: t.int())),
    ("cache", _set("is_token", lambda t: t[0].clone())),
    ("cache", lambda tensors, facts: facts.pop("known")),
    ("cache", lambda tensors, facts: facts.update(known=-1)),
    ("cache", lambda tensors, facts: facts.update(known=99)),
    ("cache", lambda tensors, facts: facts.update(known="20")),
    ("prefixes", _set("tokens", lambda t: t[1:].clone())),
    ("prefixes", _set("tokens", lambda t: t.float())),
    ("prefixes", lambda tensors, facts: tensors.pop("tokens")),
    ("prefixes", lambda tensors, facts: facts["extra_keys"].pop()),
    ("prefixes", lambda tensors, facts: facts.update(extra_keys=[1] * 2)),
]


@pytest.mark.parametrize(
    ("kind", "change"), [*itertools.product(["cache", "prefixes"], BAD_IN_BOTH), *BAD_IN_ONE]
)
def test_a_file_whose_parts_do_not_fit_is_refused(
    saved: dict[str, Any], kind: str, change: Any, tmp_path: Path
) -> None:
    path = tampered(saved[kind], tmp_path / "tampered", change)
    with pytest.raises(ValueError, match=r"cannot be loaded|damaged"):
        load(kind, path, saved["model"])


def test_a_failed_write_leaves_the_old_file(
    saved: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BlockPool(saved["model"], block_size=4)
    path = tmp_path / "prefixes"
    path.write_bytes(b"old")

    def full_disk(tensors: Any, name: str, metadata: Any) -> None:
        Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serialization, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        pool.save_prefixes(path)
    assert os.listdir(tmp_path) == ["prefixes"]
    assert path.read_bytes() == b"old"


def test_nothing_but_tokens_is_written(tmp_path: Path) -> None:
    """Slots behind a row's end still hold what others wrote there; a file must not."""
    model = model_of("llama")
    pool = BlockPool(model, block_size=16, num_blocks=2)
    with torch.no_grad():
        with PagedCache(pool=pool) as other:
            model(input_ids=ragged_ids([32], seed=1)["input_ids"], past_key_values=other)
        cache = PagedCache(pool=pool)
        model(input_ids=ragged_ids([5])["input_ids"], past_key_values=cache)
    cache.save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="pt") as file:
        keys = file.get_tensor("layer.0.keys")
    assert keys.shape[0] == 1
    assert keys[0, :5].any()
    assert not keys[0, 5:].any()


def test_a_cache_with_other_states_is_not_saved(tmp_path: Path) -> None:
    config = Qwen3NextConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    with pytest.raises(ValueError, match="cannot be saved"):
        PagedCache(config=config).save(tmp_path / "cache")
