"""`lm_eval --model hf-paged` against the harness's own `hf`: equal scores, less computed."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from evals import harness
from evals.prefix_reuse import Tokens
from hf_paged.integrations import lm_eval as paged_lm
from hf_paged.integrations.lm_eval import PagedHFLM

VOCAB = 49152  # of the real model's tokenizer
TASKS = Path(__file__).parents[1] / "evals" / "tasks"


@pytest.fixture(scope="module")
def pair(real) -> Callable[..., tuple[HFLM, PagedHFLM]]:
    """The harness's model and ours on the same weights."""
    built: dict[str, PreTrainedModel] = {}

    def make(kind: str = "llama", batch_size: Any = 1, max_length: int = 512, **kwargs: Any):
        if kind not in built:
            built[kind] = tiny(kind, vocab_size=VOCAB)
        shared = {"tokenizer": real[1], "batch_size": batch_size, "max_length": max_length}
        return (
            HFLM(copy.deepcopy(built[kind]), **shared),
            PagedHFLM(copy.deepcopy(built[kind]), **shared, **kwargs),
        )

    return make


def tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def questions(lm: HFLM) -> list[tuple[None, list[int], list[int]]]:
    """Answers to questions behind the same examples, and what else a task may ask."""
    examples = tokens(70, 0)
    asked = [
        (None, examples + tokens(5 + 7 * question, question + 1), tokens(length, 10 * length))
        for question in range(4)
        for length in (1, 1, 3, 19)
    ]
    context = examples + tokens(9, 99)
    greedy = lm.model.generate(
        torch.tensor([context]), do_sample=False, max_new_tokens=4, pad_token_id=0
    )[0, len(context) :].tolist()
    return [
        *asked,
        (None, context, greedy),
        (None, context, [*greedy[:3], greedy[3] - 1]),
        asked[3],  # once more
        (None, tokens(1, 7), tokens(30, 8)),  # a text without a context, as rolling windows are
        (None, tokens(1, 7), tokens(2, 9)),
        (None, tokens(3, 5), tokens(120, 6)),  # an answer longer than its context
    ]


def assert_equal(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    torch.testing.assert_close(
        torch.tensor([score for score, _ in found]),
        torch.tensor([score for score, _ in expected]),
        atol=2e-3,
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("llama", 1), ("llama", 3), ("gemma3_text", 3), ("gpt_oss", 3)]
)
def test_log_likelihoods_are_those_of_hf(pair, kind, batch_size):
    hf, paged = pair(kind, batch_size)
    asked = questions(hf)
    expected = hf._loglikelihood_tokens(asked, disable_tqdm=True)
    assert any(is_greedy for _, is_greedy in expected)
    assert_equal(paged._loglikelihood_tokens(asked, disable_tqdm=True), expected)
    assert_equal(paged._loglikelihood_tokens(asked, disable_tqdm=True), expected)
    paged.pool.check()


def test_an_adapter_of_peft_is_used(pair):
    hf, paged = pair(batch_size=3)
    plain = hf._loglikelihood_tokens(questions(hf), disable_tqdm=True)
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(hf.model, config)
    shared = {"tokenizer": hf.tokenizer, "batch_size": 3, "max_length": 512}
    hf, paged = (kind(copy.deepcopy(wrapped), **shared) for kind in (HFLM, PagedHFLM))
    asked = questions(hf)
    expected = hf._loglikelihood_tokens(asked, disable_tqdm=True)
    assert expected != plain
    assert_equal(paged._loglikelihood_tokens(asked, disable_tqdm=True), expected)


def test_virtual_tokens_of_peft_are_refused(pair):
    hf, _ = pair()
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    wrapped = get_peft_model(copy.deepcopy(hf.model), config)
    with pytest.raises(ValueError, match="virtual tokens"):
        PagedHFLM(wrapped, tokenizer=hf.tokenizer)


def test_what_is_longer_than_the_model_takes_loses_its_beginning(pair):
    hf, paged = pair(batch_size=2, max_length=64)
    asked = [(None, tokens(100, 0), tokens(length, length)) for length in (1, 5, 63, 64)] + [
        (None, tokens(20, 1), tokens(4, 2))
    ]
    assert_equal(
        paged._loglikelihood_tokens(asked, disable_tqdm=True),
        hf._loglikelihood_tokens(asked, disable_tqdm=True),
    )
    for length in (0, 65):
        with pytest.raises(ValueError, match=f"{length} tokens to score"):
            paged._loglikelihood_tokens([(None, tokens(9, 3), tokens(length, 4))], True)


def test_a_context_is_computed_once_and_answers_only_behind_it(pair):
    _, paged = pair(batch_size=1)
    examples, question = tokens(64, 0), tokens(6, 1)
    answers = [tokens(length, seed) for seed, length in enumerate((4, 4, 2), 5)]
    with Tokens(paged.model) as counted:
        paged._loglikelihood_tokens(
            [(None, examples + question, answer) for answer in answers], disable_tqdm=True
        )
    # All of the context but its last token, and that with each answer but its last, padded.
    assert counted.count == 69 + 3 * 4
    with Tokens(paged.model) as counted:
        paged._loglikelihood_tokens([(None, examples + tokens(9, 2), [7])], disable_tqdm=True)
    assert counted.count == 9  # behind the examples


def test_single_token_answers_are_read_from_one_row(pair):
    _, paged = pair(batch_size=1)
    context = tokens(20, 0)
    with Tokens(paged.model) as counted:
        paged._loglikelihood_tokens([(None, context, [n]) for n in (5, 6, 7, 8)], True)
    assert counted.count == len(context)


def test_texts_are_scored_and_empty_and_rolling_ones_too(pair):
    hf, paged = pair(batch_size=2, max_length=32)
    arguments = [("", " a beginning"), ("The sea is", " salty"), ("The sea is ", "deep and wide")]
    asked = [Instance("loglikelihood", {}, pair_, number) for number, pair_ in enumerate(arguments)]
    assert_equal(
        paged.loglikelihood(asked, disable_tqdm=True), hf.loglikelihood(asked, disable_tqdm=True)
    )
    texts = ["A short one.", "A text of many more tokens than the model takes at once. " * 6]
    rolling = [
        Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)
    ]
    found, expected = (lm.loglikelihood_rolling(rolling, disable_tqdm=True) for lm in (paged, hf))
    assert found == pytest.approx(expected, rel=1e-5)


# Bytes of a block of 16 tokens in a tiny model.
BLOCK = 16 * 4 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("blocks", "evicts"),
    [
        (24, True),  # holds a batch, and evicts others' examples for it
        (11, True),  # holds a row, but no batch
        (2, False),  # holds none of the long rows
    ],
)
def test_a_pool_that_is_full_evicts_splits_and_never_fails(pair, blocks, evicts):
    hf, paged = pair(batch_size=4, max_memory=blocks * BLOCK)
    asked = questions(hf)
    asked += [(None, tokens(100, seed), tokens(5, seed)) for seed in range(20, 28)]
    assert_equal(
        paged._loglikelihood_tokens(asked, disable_tqdm=True),
        hf._loglikelihood_tokens(asked, disable_tqdm=True),
    )
    assert paged.pool.num_blocks == blocks
    assert (paged.pool.stats()["evictions"] > 0) == evicts
    paged.pool.check()
    assert paged.pool.num_used == 0  # no cache is left


def written(lm: HFLM, contexts: list[str], **kwargs: Any) -> list[str]:
    settings = {"until": ["###"], "max_gen_toks": 6, **kwargs}
    asked = [
        Instance("generate_until", {}, (context, settings), number)
        for number, context in enumerate(contexts)
    ]
    return lm.generate_until(asked, disable_tqdm=True)


CONTEXTS = [f"{'Examples come first. ' * 4}Question {n}: {'why? ' * n}" for n in (1, 4, 2, 9)]


@pytest.mark.parametrize("blocks", [1000, 8, 2])
def test_texts_are_written_as_by_hf(pair, blocks):
    hf, paged = pair(batch_size=3, max_memory=blocks * BLOCK)
    assert written(paged, CONTEXTS) == written(hf, CONTEXTS)
    if blocks == 1000:
        with Tokens(paged.model) as counted:
            written(paged, CONTEXTS)
        assert counted.count == len(CONTEXTS) * 6  # the prompts are known
    paged.pool.check()


def test_beams_are_those_of_hf(pair):
    hf, paged = pair(batch_size=2)
    assert written(paged, CONTEXTS, num_beams=3) == written(hf, CONTEXTS, num_beams=3)


def test_an_encoder_decoder_model_is_refused(real):
    config = T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="use --model hf"):
        PagedHFLM(model, tokenizer=real[1])


def test_newer_versions_of_the_harness_find_the_model_by_its_entry_point():
    [found] = entry_points(group="lm_eval.models", name="hf-paged")
    assert found.load() is PagedHFLM


# evals/harness.py


def test_the_eval_compares_scores_and_written_answers(real):
    model = tiny("llama", vocab_size=VOCAB, max_position_embeddings=2048)
    scored, written = (
        harness.compare(model, real[1], task, 2, limit)
        for task, limit in (("continuations", 3), ("continuations_written", 4))
    )
    for row, questions in ((scored, 3), (written, 4)):  # two batches at least, to share
        assert row["questions"] == questions
        assert row["equal scores"]
        assert row["equal answers"]
        assert 0 < row["tokens"] < row["hf tokens"]
    assert scored["scores"].startswith("acc")
    assert 0 <= scored["max log-likelihood difference"] < harness.TOLERANCE
    assert written["max log-likelihood difference"] == ""


def test_the_eval_says_what_differs_and_what_is_slow():
    good = {
        "case": "a",
        "equal scores": True,
        "equal answers": True,
        "max log-likelihood difference": 1e-5,
        "x": 2.1,
    }
    assert harness.missed([good, {**good, "max log-likelihood difference": "", "x": 1.1}]) == []
    for name, value, said in [
        ("equal scores", False, "not those of hf"),
        ("equal answers", False, "not those of hf"),
        ("max log-likelihood difference", 2e-3, "not those of hf"),
        ("x", 1.9, "1.90 times"),
    ]:
        [sentence] = harness.missed([good, {**good, name: value}])
        assert said in sentence


@pytest.mark.slow  # the harness looks through thousands of tasks of its own
def test_the_command_gives_the_scores_of_hf(real, tmp_path, monkeypatch, capsys):
    tiny("llama", vocab_size=VOCAB).save_pretrained(tmp_path)
    real[1].save_pretrained(tmp_path)
    arguments = [
        "--model_args", f"pretrained={tmp_path}", "--include_path", str(TASKS),
        "--tasks", "continuations", "--limit", "3", "--device", "cpu", "--batch_size", "2",
    ]  # fmt: skip
    paged = subprocess.run(
        [sys.executable, "-m", paged_lm.__name__, "--model", "hf-paged", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "hf", *arguments])
    cli_evaluate()
    expected = [line for line in capsys.readouterr().out.splitlines() if "|acc" in line]
    assert len(expected) == 2
    assert [line for line in paged.stdout.splitlines() if "|acc" in line] == expected
