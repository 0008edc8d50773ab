"""The examples that read input, run as scripts on the real model: a piped chat, a stopped batch."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

EXAMPLES = Path(__file__).parents[1] / "examples"
# The first prompts begin alike; the lengths differ, so that batches are padded.
PROMPTS = [
    "What is the capital of France?",
    "What is the capital of Italy, and what is it known for?",
    "What is the capital of Spain?",
    "Name a colour.",
    "Say hello\u2028to everyone.",
]


@pytest.fixture
def script(real, monkeypatch) -> Callable[..., int]:
    """Runs an example with arguments and returns its exit status; the model is the tests' own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import small_model

    model, _ = real
    before = model.config._attn_implementation
    monkeypatch.setattr(small_model, "load", lambda *args, **kwargs: real)

    def run(name: str, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return ended.value.code

    yield run
    model.set_attn_implementation(before)


def plain_chat(real: Any, messages: list[str], new: int) -> list[tuple[int, int, str]]:
    """(tokens of the prompt, tokens with the answer, answer) of each turn, without reuse."""
    from chat import next_prompt

    model, tokenizer = real
    model.set_attn_implementation("sdpa")
    turns, history = [], []
    for message in messages:
        prompt = next_prompt(tokenizer, history, message)
        history = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            past_key_values=DynamicCache(config=model.config),
            do_sample=False,
            max_new_tokens=new,
        )[0].tolist()
        text = tokenizer.decode(history[len(prompt) :], skip_special_tokens=True)
        turns.append((len(prompt), len(history), text))
    return turns


def test_a_piped_chat_answers_as_without_reuse_and_computes_only_what_is_new(
    script, real, monkeypatch, capsys
):
    messages = ["Hello!", "What is two plus two?", "And three?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(messages)))
    assert script("chat.py", "--max-new-tokens", 12) == 0
    output = capsys.readouterr().out
    found = re.findall(
        r"reused (\d+) of (\d+) tokens, first token after .* s, (\d+) tokens", output
    )
    expected = plain_chat(real, messages, 12)
    # All that the turn before has computed, which is not its last token.
    known = [0, *(total - 1 for _, total, _ in expected[:-1])]
    assert [tuple(map(int, turn)) for turn in found] == [
        (reused, prompt, total - prompt)
        for reused, (prompt, total, _) in zip(known, expected, strict=True)
    ]
    for _, _, text in expected:
        assert text in output


def test_a_chat_begins_anew_and_knows_what_its_template_begins_with(
    script, real, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n\n/new\nHello!\n/quit\nnever read\n"))
    assert script("chat.py", "--max-new-tokens", 4) == 0
    (_, prompt, _), (reused, *again) = re.findall(
        r"reused (\d+) of (\d+) tokens, .* s, (\d+) tokens", capsys.readouterr().out
    )
    assert again[0] == prompt
    assert int(reused) == int(prompt) - 1


@pytest.mark.parametrize("ended_by_itself", [True, False])
def test_the_next_prompt_is_the_one_of_the_template(real, script, ended_by_itself):
    from chat import next_prompt

    _, tokenizer = real
    history = next_prompt(tokenizer, [], "Hello!", "Be brief.")
    history += tokenizer("Hi there.").input_ids + [tokenizer.eos_token_id] * ended_by_itself
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi there."},
        {"role": "user", "content": "Bye."},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found = next_prompt(tokenizer, history, "Bye.", "Be brief.")
    assert found[: len(history)] == history
    assert tokenizer.decode(found) == whole


def test_a_batch_run_that_was_killed_goes_on_to_the_same_file(script, real, monkeypatch, tmp_path):
    model, _ = real
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    settings = ["--max-new-tokens", 6, "--batch-size", 2]
    assert script("batch_inference.py", prompts, tmp_path / "whole.jsonl", *settings) == 0
    whole = (tmp_path / "whole.jsonl").read_bytes()

    generate, rows = model.generate, []

    def stop_at_the_second_batch(**kwargs: Any) -> torch.Tensor:
        if len(rows) == 2:
            raise KeyboardInterrupt
        rows.extend(kwargs["input_ids"])
        return generate(**kwargs)

    stopped = tmp_path / "stopped.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", stop_at_the_second_batch)
        assert script("batch_inference.py", prompts, stopped, *settings) == 130
    answered = stopped.read_bytes()
    assert len(answered.splitlines()) == 2
    stopped.write_bytes(answered + whole.splitlines()[-1][:20])  # killed within a line

    def note(**kwargs: Any) -> torch.Tensor:
        rows.extend(kwargs["input_ids"])
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", note)
    assert script("batch_inference.py", prompts, stopped, *settings) == 0
    assert stopped.read_bytes() == whole
    assert len(rows) == len(PROMPTS)  # no prompt was answered twice
    assert [json.loads(line)["prompt"] for line in whole.splitlines()] == PROMPTS

    # And once more, when all is done.
    assert script("batch_inference.py", prompts, stopped, *settings) == 0
    assert stopped.read_bytes() == whole


def test_a_batch_run_answers_as_each_prompt_does_alone(script, real, tmp_path):
    model, tokenizer = real
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    assert script("batch_inference.py", prompts, answers, "--max-new-tokens", 6) == 0
    model.set_attn_implementation("sdpa")
    for prompt, line in zip(PROMPTS, answers.read_bytes().splitlines(), strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        inputs = tokenizer(text, return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=6)
        alone = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert json.loads(line)["answer"] == alone


@pytest.mark.parametrize(
    "answers",
    ['{"index": 0, "prompt": "another", "answer": ""}\n', "no JSON\n", "notes in a single line"],
)
def test_a_batch_run_leaves_files_that_are_not_its_own(script, tmp_path, capsys, answers):
    (tmp_path / "prompts.txt").write_text("a prompt\n")
    path = tmp_path / "answers.jsonl"
    path.write_text(answers)
    assert script("batch_inference.py", tmp_path / "prompts.txt", path) == 1
    assert "holds answers to other prompts" in capsys.readouterr().out
    assert path.read_text() == answers
