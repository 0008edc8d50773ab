"""The same generate on a DynamicCache and on a PagedCache: texts, speed, memory.

python examples/quickstart.py
python examples/quickstart.py --model Qwen/Qwen2.5-0.5B-Instruct --max-new-tokens 128
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import small_model
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria

import hf_paged
from hf_paged.report import format_bytes

PROMPTS = [
    "The capital of France is",
    "Here is a short story about a lighthouse keeper who found a letter in a bottle:",
    "To make bread you need flour, water, salt and yeast. First,",
    "Paged memory, as operating systems have used it for sixty years, splits an address space "
    "into pages of one size, so that memory which looks contiguous to a program may lie anywhere. "
    "The same idea, applied to the keys and values of a language model, means that",
]


class Progress(StoppingCriteria):
    """Moves a bar by one at each generated token, and never stops."""

    def __init__(self, bar: tqdm):
        self.bar = bar

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.bar.update()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(
    model: PreTrainedModel, inputs: Any, cache: Cache, max_new_tokens: int
) -> tuple[torch.Tensor, float]:
    """Generated ids [batch, prompt + new], and new tokens a second over all rows."""
    with tqdm(total=max_new_tokens, desc=type(cache).__name__, unit="token", leave=False) as bar:
        start = time.perf_counter()
        ids = model.generate(
            **inputs,
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            stopping_criteria=[Progress(bar)],
        )
        seconds = time.perf_counter() - start
    return ids, (ids.shape[1] - inputs["input_ids"].shape[1]) * len(ids) / seconds


def main(arguments: argparse.Namespace) -> int:
    console = Console()
    # Newer versions of transformers have renamed generate's argument to `cache`; both work.
    warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated")
    console.print(f"Loading {arguments.model or small_model.HUB_NAME} ...")
    try:
        model, tokenizer = small_model.load(
            arguments.model, dtype=getattr(torch, arguments.dtype), device=arguments.device
        )
    except OSError as error:
        console.print(f"[red]There is no model {arguments.model!r}:[/red] {error}", soft_wrap=True)
        return 1
    prompts = PROMPTS
    if arguments.prompts:
        try:
            lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            console.print(f"[red]Cannot read the prompts:[/red] {error}", soft_wrap=True)
            return 1
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            console.print(f"[red]{arguments.prompts} holds no prompt (one a line).[/red]")
            return 1
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(arguments.device)

    dynamic = DynamicCache(config=model.config)
    dynamic_ids, dynamic_speed = generate(model, inputs, dynamic, arguments.max_new_tokens)

    model.set_attn_implementation("hf_paged")
    paged = hf_paged.PagedCache(config=model.config)
    paged_ids, paged_speed = generate(model, inputs, paged, arguments.max_new_tokens)

    is_equal = torch.equal(dynamic_ids, paged_ids)
    start = inputs["input_ids"].shape[1]
    for prompt, text in zip(prompts, tokenizer.batch_decode(paged_ids[:, start:]), strict=True):
        console.print(f"\n[bold]{prompt}[/bold]{text}", highlight=False, soft_wrap=True)

    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers)
    table = Table(title=f"{len(prompts)} prompts, {arguments.max_new_tokens} new tokens each")
    for heading in ("", "DynamicCache", "PagedCache"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("tokens/s", f"{dynamic_speed:.1f}", f"{paged_speed:.1f}")
    table.add_row("K/V held", format_bytes(held), format_bytes(paged.report().bytes))
    console.print()
    console.print(table)
    console.print(str(paged.report()), highlight=False)
    console.print(f"The texts are {'equal' if is_equal else 'NOT equal'}.")
    return 0 if is_equal or arguments.dtype != "float32" else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sys.exit(main(parser.parse_args()))
