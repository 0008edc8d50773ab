"""lm-evaluation-harness: `--model hf-paged` against its own `--model hf`, on tasks without a hub.

    python -m evals.harness            # about 30 minutes on 2 cores
    python -m evals.harness --quick    # under 3 minutes

Both models answer the same few-shot questions of the tasks in evals/tasks; log-likelihoods, greedy
flags and texts must be equal. Tokens are counted by a hook on the model. Writes harness.json, .md
and .png to evals/results/ (or --out). The same tasks from the command line:

    python -m hf_paged.integrations.lm_eval --model hf-paged --model_args pretrained=NAME \\
        --include_path evals/tasks --tasks continuations --batch_size 8
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import matplotlib
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import machine_facts, write_results
from evals.prefix_reuse import Tokens
from examples import small_model
from hf_paged.integrations.lm_eval import PagedHFLM

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASKS = Path(__file__).parent / "tasks"
TOLERANCE = 1e-3  # of a log-likelihood, summed over a continuation's tokens, in float32
GOAL = 2  # times as fast, where answers are scored
TITLE = "Few-shot questions, against the harness's own model"


class Evaluation:
    """A task evaluated by one model: its answers, its scores, and what they took."""

    def __init__(self, lm: HFLM, task: str, limit: int | None):
        tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
        start = time.perf_counter()
        with Tokens(lm.model) as tokens:
            found = lm_eval.simple_evaluate(
                lm, tasks=[task], task_manager=tasks, limit=limit, bootstrap_iters=0
            )
        self.seconds, self.tokens = time.perf_counter() - start, tokens.count
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        self.answers = [answer for sample in samples for [answer] in sample["resps"]]
        self.questions = len(samples)
        self.scores = {
            name.partition(",")[0]: score
            for name, score in found["results"][task].items()
            if isinstance(score, float) and "stderr" not in name
        }


def compare(
    model: Any, tokenizer: Any, task: str, batch_size: int, limit: int | None
) -> dict[str, Any]:
    """A task by both models, one after the other."""
    model.set_attn_implementation("sdpa")  # hf-paged sets its own
    theirs, mine = (
        Evaluation(make(model, tokenizer=tokenizer, batch_size=batch_size), task, limit)
        for make in (HFLM, PagedHFLM)
    )
    are_scored = isinstance(mine.answers[0], tuple)
    pairs = list(zip(mine.answers, theirs.answers, strict=True))
    return {
        "case": f"{task}, batches of {batch_size}",
        "questions": mine.questions,
        "scores": ", ".join(f"{name} {score:.3f}" for name, score in mine.scores.items()),
        "equal scores": mine.scores == theirs.scores,
        "equal answers": all(a[1] == b[1] if are_scored else a == b for a, b in pairs),
        "max log-likelihood difference": max(abs(a[0] - b[0]) for a, b in pairs)
        if are_scored
        else "",
        "tokens": mine.tokens,
        "hf tokens": theirs.tokens,
        "s": mine.seconds,
        "hf s": theirs.seconds,
        "x": theirs.seconds / mine.seconds,
    }


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each answer that differs, and for each goal that is missed."""
    wrong = [
        f"{row['case']}: the answers or scores are not those of hf."
        for row in rows
        if not (row["equal scores"] and row["equal answers"])
        or (row["max log-likelihood difference"] or 0) > TOLERANCE
    ]
    slow = [
        f"{row['case']}: {row['x']:.2f} times as fast as hf, the goal is {GOAL}."
        for row in rows
        if row["max log-likelihood difference"] != "" and row["x"] < GOAL
    ]
    return wrong + slow


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    labels = [row["case"].replace(", ", "\n") for row in rows]
    places = range(len(rows))
    for axis, key in zip(axes, ("tokens", "s"), strict=True):
        axis.bar([p - 0.2 for p in places], [row[f"hf {key}"] for row in rows], 0.4, label="hf")
        axis.bar([p + 0.2 for p in places], [row[key] for row in rows], 0.4, label="hf-paged")
        axis.set_xticks(list(places), labels, fontsize="small")
        axis.legend()
    axes[0].set_ylabel("tokens computed")
    axes[1].set_ylabel("seconds")
    figure.suptitle("lm-evaluation-harness, five examples a question, SmolLM2-135M in float32")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: argparse.Namespace) -> int:
    torch.manual_seed(0)
    cases = (
        [("continuations", 4, 12), ("continuations_written", 2, 6)]
        if arguments.quick
        else [
            ("continuations", 8, None),
            ("continuations", 1, 100),
            ("continuations_written", 8, 64),
        ]
    )
    model, tokenizer = small_model.load()
    rows = [compare(model, tokenizer, *case) for case in tqdm(cases, unit="case")]
    facts = {**machine_facts(), "lm_eval": version("lm_eval")}
    write_results(arguments.out, "harness", "lm-evaluation-harness", facts, {TITLE: rows})
    plot(rows, arguments.out / "harness.png")
    failures = missed(rows)
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few questions, under three minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    sys.exit(main(parser.parse_args()))
