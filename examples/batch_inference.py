"""Answers to a file of prompts, through a pool of fixed size; a run that was stopped goes on.

    python examples/batch_inference.py prompts.txt answers.jsonl
    python examples/batch_inference.py prompts.jsonl answers.jsonl --system "Answer in one word."

Prompts are lines of text, or of JSON with a "prompt" in each (.jsonl). Each answer is a line of
JSON, on disk as soon as its batch has ended; at the end the lines are put in the prompts' order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import small_model
import torch
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_paged import BlockPool, FreeFinishedRows

BEGINNING = b'{"index": '  # of each line of answers


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, without empty lines.

    Raises:
        ValueError: a line is not JSON with a "prompt", or there is none at all.
    """
    prompts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                prompt = json.loads(line)["prompt"] if path.suffix == ".jsonl" else line.strip()
            except (ValueError, KeyError, TypeError):
                prompt = None
            if not isinstance(prompt, str):
                raise ValueError(f'Line {number} of {path} is not JSON with a text "prompt".')
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompt.")
    return prompts


def read_answered(path: Path, prompts: list[str]) -> set[int]:
    """The indices of prompts that a file answers; the half line of a run that died is cut off.

    Raises:
        ValueError: its answers are to other prompts.
    """
    if not path.exists():
        return set()
    written = path.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    half = written[len(whole) :]
    try:
        records = [json.loads(line) for line in whole.splitlines()]
        is_foreign = any(prompts[record["index"]] != record["prompt"] for record in records)
    except (ValueError, KeyError, TypeError, IndexError):
        is_foreign = True
    if is_foreign or half[: len(BEGINNING)] != BEGINNING[: len(half)]:
        raise ValueError(f"{path} holds answers to other prompts; choose another file.")
    os.truncate(path, len(whole))
    return {record["index"] for record in records}


def sort_answers(path: Path) -> None:
    """Put the lines in the prompts' order; the file is replaced at once."""
    lines = path.read_bytes().splitlines(keepends=True)
    beside = path.with_name(f"{path.name}.sorted")
    beside.write_bytes(b"".join(sorted(lines, key=lambda line: json.loads(line)["index"])))
    os.replace(beside, path)


def token_ids(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], system: str | None
) -> list[list[int]]:
    """Token ids of each prompt: as a user's message if the model chats, or else as it is."""
    if tokenizer.chat_template is None:
        return tokenizer([f"{system or ''}{prompt}" for prompt in prompts]).input_ids
    start = [{"role": "system", "content": system}] if system else []
    texts = [
        tokenizer.apply_chat_template(
            [*start, {"role": "user", "content": prompt}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for prompt in prompts
    ]
    return tokenizer(texts, add_special_tokens=False).input_ids


def answers(
    model: PreTrainedModel,
    pool: BlockPool,
    prompts: list[list[int]],
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[tuple[int, list[int]]]:
    """(index of a prompt, ids of its answer), a batch at a time.

    Raises:
        ValueError: a prompt can never fit into the pool.
    """
    for batch in pool.batches(prompts, max_new_tokens, max_prompts=batch_size):
        inputs = {name: tensor.to(model.device) for name, tensor in batch.inputs.items()}
        with pool.match_prefix(**inputs) as cache:
            # The prompts are indexed before their rows can end and give their blocks back.
            cache.prefill(model, **inputs)
            pool.insert_prefix(cache, inputs["input_ids"])
            sequences = model.generate(
                **inputs,
                past_key_values=cache,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                stopping_criteria=[FreeFinishedRows(cache, model.generation_config.eos_token_id)],
            )
        width = inputs["input_ids"].shape[1]
        yield from zip(batch.indices, sequences[:, width:].tolist(), strict=True)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Answer the prompts that are not answered yet.

    Raises:
        ValueError, OSError: the prompts, the answers or the model cannot be used.
    """
    prompts = read_prompts(arguments.prompts)
    answered = read_answered(arguments.answers, prompts)
    left = [index for index in range(len(prompts)) if index not in answered]
    console.print(f"{len(answered)} of {len(prompts)} prompts are answered already.")
    if left:
        model, tokenizer = small_model.load(arguments.model, device=arguments.device)
        model.set_attn_implementation("hf_paged")
        pool = BlockPool(model, max_memory=arguments.max_memory)
        ids = token_ids(tokenizer, [prompts[index] for index in left], arguments.system)
        found = answers(model, pool, ids, arguments.max_new_tokens, arguments.batch_size)
        with (
            tqdm(total=len(prompts), initial=len(answered), unit="prompt") as bar,
            arguments.answers.open("ab", buffering=0) as file,
        ):
            for number, answer in found:
                record = {
                    "index": left[number],
                    "prompt": prompts[left[number]],
                    "answer": tokenizer.decode(answer, skip_special_tokens=True),
                }
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                bar.update()
        stats = pool.stats()
        console.print(
            f"{stats['matched_tokens']} of {sum(map(len, ids))} prompt tokens reused, at most "
            f"{stats['peak_used']} of {pool.num_blocks} blocks used.",
            highlight=False,
            soft_wrap=True,
        )
    sort_answers(arguments.answers)


def main(arguments: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated")
    console = Console()
    try:
        run(arguments, console)
    except KeyboardInterrupt:
        console.print("[red]Stopped.[/red] The same command goes on from here.")
        return 130
    except (OSError, ValueError) as error:
        console.print(f"[red]{error}[/red]", soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, help="a file of prompts")
    parser.add_argument("answers", type=Path, help="the JSONL file to write or to go on with")
    parser.add_argument("--model", help="hub name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--system", help="what the model is told before each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16, help="the most prompts of a batch")
    parser.add_argument("--max-memory", default="1GiB", help="of the pool")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sys.exit(main(parser.parse_args()))
