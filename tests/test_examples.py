"""The examples, run as scripts on the real model: the quickstart, a piped chat, a stopped batch."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged import PagedCache

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


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of PROMPTS, one a line."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(prompt.replace("\u2028", " ") for prompt in PROMPTS))
    return path


def noted_generates(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[tuple[Any, ...]]:
    """Notes of each generate its (input_ids, new tokens, cache, tokens that the cache held)."""
    generate, noted = model.generate, []

    def note(**kwargs: Any) -> torch.Tensor:
        cache = kwargs["past_key_values"]
        held = cache.get_seq_length()
        noted.append((kwargs["input_ids"], kwargs["max_new_tokens"], cache, held))
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", note)
    return noted


def test_the_quickstart_times_the_same_work_in_turn_once_all_is_warm(
    script, real, monkeypatch, prompts
):
    """The quickstart timed the kernel's compilation, and only for one of the two caches."""
    model, _ = real
    noted = noted_generates(monkeypatch, model)
    assert script("quickstart.py", "--prompts", prompts, "--max-new-tokens", 5) == 0
    kinds = [(isinstance(cache, PagedCache), held > 0) for _, _, cache, held in noted]
    assert kinds == 3 * [(False, False), (True, False), (True, True)]
    warm_up, timed = noted[:3], noted[3:]
    assert {new for _, new, _, _ in warm_up} == {2}
    assert {new for _, new, _, _ in timed} == {5}
    assert all(torch.equal(ids, timed[0][0]) for ids, *_ in timed)
    assert len(timed[0][0]) == len(PROMPTS)


def test_the_quickstart_prints_what_each_way_holds_and_no_special_token(
    script, real, monkeypatch, capsys, prompts
):
    """Ends of answers were printed as "<|im_end|>" over and over."""
    model, tokenizer = real
    noted = noted_generates(monkeypatch, model)
    assert script("quickstart.py", "--prompts", prompts, "--max-new-tokens", 12) == 0
    output = capsys.readouterr().out
    assert not [token for token in tokenizer.all_special_tokens if token in output]
    assert "All runs gave the same tokens." in output

    ids, _, dynamic, _ = noted[6]
    model.set_attn_implementation("sdpa")
    mask = torch.arange(ids.shape[1]) >= (ids == tokenizer.pad_token_id).int().argmin(1)[:, None]
    answers = model.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        past_key_values=DynamicCache(config=model.config),
        do_sample=False,
        max_new_tokens=12,
    )[:, ids.shape[1] :]
    assert (answers == tokenizer.eos_token_id).any()  # there is something not to print
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    for text in texts:
        assert " ".join(text.split()) in output

    rows = re.findall(r"^(\w+Cache.*?) +([\d.]+) +([\d.]+) s +([\d.]+) MiB$", output, re.M)
    held = {name: float(mebibytes) for name, *_, mebibytes in rows}
    assert list(held) == ["DynamicCache", "PagedCache", "PagedCache, match_prefix"]
    tensors = sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers)
    assert held["DynamicCache"] == pytest.approx(tensors / 2**20, abs=0.05)
    for name, (_, _, cache, _) in zip(list(held)[1:], noted[7:9], strict=True):
        assert held[name] == pytest.approx(cache.report().bytes / 2**20, abs=0.05)
        assert held[name] < held["DynamicCache"]
    report = noted[7][2].report()
    assert f"{report.blocks}, each of 16 token slots" in output


def test_the_quickstart_fails_where_the_tokens_differ(script, real, monkeypatch, capsys, prompts):
    """Texts that are not equal must not pass for equal ones."""
    model, _ = real
    generate = model.generate

    def wrong(**kwargs: Any) -> torch.Tensor:
        ids = generate(**kwargs)
        if isinstance(kwargs["past_key_values"], PagedCache):
            ids[-1, -1] += 1
        return ids

    monkeypatch.setattr(model, "generate", wrong)
    assert script("quickstart.py", "--prompts", prompts, "--max-new-tokens", 2) == 1
    assert "NOT give the same tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "missing.txt"], "No such file"),
        (["--prompts", "empty.txt"], "holds no prompt"),
        (["--prompts", "latin.txt"], "is not text in UTF-8"),
        (["--prompts", "long.txt"], "besides --max-new-tokens the model takes"),
        (["--max-new-tokens", "8192"], "besides --max-new-tokens the model takes"),
        (["--max-new-tokens", "0"], "must be a whole number of at least 1"),
        (["--device", "toaster"], "--device toaster cannot be used"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_the_quickstart_says_in_a_line_what_is_wrong(
    script, monkeypatch, tmp_path, capsys, arguments, message
):
    """A wrong argument ended in a traceback, or in the middle of the work."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n\n")
    Path("latin.txt").write_bytes("Wie heißt du?".encode("latin-1"))
    Path("long.txt").write_text("word " * 9000)
    assert script("quickstart.py", *arguments) in (1, 2)
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("quickstart.py: ")
    assert message in errors[-1]
    assert all(line.startswith(("usage: ", " ")) for line in errors[:-1])  # argparse's own


def test_the_quickstart_names_a_model_that_is_not_there(monkeypatch, tmp_path, capsys):
    """The model that could not be loaded must be named, in one line."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    assert ended.value.code == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert f"--model {tmp_path} cannot be loaded" in error


def test_the_quickstart_ends_cleanly_when_it_is_stopped(script, real, monkeypatch, capsys, prompts):
    """Ctrl-C ended in a traceback."""
    generate, calls = real[0].generate, []

    def stopped(**kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(**kwargs)

    monkeypatch.setattr(real[0], "generate", stopped)
    assert script("quickstart.py", "--prompts", prompts, "--max-new-tokens", 2) == 130
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "Stopped."
    assert "tokens/s" not in captured.out


def test_the_quickstarts_help_imports_neither_torch_nor_transformers():
    """--help took as long as importing torch and transformers takes."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['quickstart.py', '--help']; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"try: runpy.run_path({str(EXAMPLES / 'quickstart.py')!r}, run_name='__main__')\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "print({'torch', 'transformers', 'hf_paged'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-new-tokens" in done.stdout
    assert done.stdout.endswith("set()\n")


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
