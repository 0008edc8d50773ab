"""Is anything lost? PagedCache against DynamicCache, token by token, on real text.

    python -m evals.parity                       # Python's own help, SmolLM2
    python -m evals.parity --quick               # a small text, under 3 minutes on one core
    python -m evals.parity --file book.txt --model NAME
    python -m evals.parity --dataset Salesforce/wikitext --config wikitext-2-raw-v1

The text is teacher-forced through each cache in every way of `evals/ways.py`: the same forwards on
the same tokens, so that only the cache and its attention differ. Faults that are put into a
PagedCache on purpose (negative controls) go the same way through the same gates, every time. The
exit status is 1 if a way fails a gate or a fault passes all. Writes parity.json, .md and .png to
evals/results/ (or --out).

The reference is DynamicCache with sdpa. How far the same with eager attention is from it, which
nobody takes for another model, is measured in the same run on the same tokens: the noise floor.

In float32 the gates are a largest difference of 1e-4 between two normalised logits
(log-probabilities: what is added to all logits of a token alike changes no prediction), the same
likeliest token everywhere, and the same tokens when both go on greedily. 1e-4 is tight: at the most
sensitive of the 2,104 tokens scored, DynamicCache with sdpa is itself 1.1e-4 from the same model in
float64 on one thread (with eager attention 0.6e-4, PagedCache less than that), and 1.5e-4 from
eager attention. So 2.5 times the floor is allowed where that is more. "max logit" has the
difference before normalising.

In bfloat16 rounding decides what the logits are, and no two ways to compute attention agree. Two
statistics of the KL divergence are gated by the floor's:

- its mean, which is what is lost of the information in a token. Noise that is as large is above
  that of the floor every other time, so three standard errors of the difference of two such means
  are allowed. Rounding gives each token a small KL, so that the error is small.
- its mean in the worst row, which shows a fault in one row that the mean over all may hide. Rows
  are few and have few tokens, so 2.5 times the floor's is allowed. KL grows as the square of the
  noise: this is noise 1.6 times as large.

The maximum and the 99.9th percentile are not gated, as one or two tokens decide them. Nor is top-1:
a tie between two tokens goes one way or the other. Errors of means take tokens for independent.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import Rows, machine_facts, write_results
from evals.ways import FAULTS, WAYS, Caches, PagedCaches, Scores, Text
from examples import small_model
from hf_paged.backends import backend_for

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTROLS = "Faults put in on purpose: each must fail a gate"
MAX_LOG_PROB = 1e-4  # between two log-probabilities of a model in float32
FLOORS = 2.5  # how many times the floor is allowed, where few tokens decide a statistic
AT_ONCE = 16  # tokens whose distributions are in float64 at one time


@dataclass(frozen=True)
class Setting:
    """A dtype of the model, and what K/V are kept in (None: the same)."""

    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        kept = "" if self.kv_dtype is None else f", K/V in {_name(self.kv_dtype)}"
        return _name(self.dtype) + kept

    @property
    def is_exact(self) -> bool:
        """Whether rounding is so fine that logits can be compared as they are.

        Not where K/V are kept in fewer bits: noise of any size makes some number round the other
        way, and that is as large a difference as their own rounding.
        """
        return self.dtype == torch.float32 and self.kv_dtype is None

    @property
    def ways(self) -> tuple[str, ...]:
        """For K/V in fewer bits those that write, move and read them differently.

        All faults are put into one of these.
        """
        return tuple(WAYS) if self.kv_dtype is None else STORING


STORING = (
    "chunked prefill",
    "prefix hit",
    "offloaded, restored",
    "evicted, reloaded",
    "ragged batch",
)
# float32 first, as the model is loaded in it and then converted.
SETTINGS = [
    Setting(torch.float32),
    Setting(torch.float32, torch.bfloat16),
    Setting(torch.bfloat16),
    Setting(torch.bfloat16, torch.float8_e4m3fn),
]


@dataclass(frozen=True)
class Parity:
    """How far the scores of a cache are from a reference's, over the same tokens.

    Attributes:
        tokens: how many were scored.
        perplexity, reference: of the cache and of the reference.
        likelihood: mean over the tokens of the log-likelihood (nats) less the reference's.
        error: the standard error of that mean, from the paired differences of the tokens.
        kl: mean of the KL divergence of the cache's prediction from the reference's (nats).
        kl_error: the standard error of that mean.
        kl_row: the largest of the rows' means.
        kl_999, kl_max: its 99.9th percentile and maximum.
        max_logit, rms_logit: difference of logits, over all tokens and the whole vocabulary.
        max_log_prob: the largest difference of their log-softmax, which does not see what is added
            to all logits of a token alike.
        top1: share of the tokens for which both find the same token likeliest.
        greedy: whether both go on with the same tokens behind the text.
    """

    tokens: int
    perplexity: float
    reference: float
    likelihood: float
    error: float
    kl: float
    kl_error: float
    kl_row: float
    kl_999: float
    kl_max: float
    max_logit: float
    rms_logit: float
    max_log_prob: float
    top1: float
    greedy: bool

    @classmethod
    def of(cls, scores: Scores, reference: Scores) -> Parity:
        assert torch.equal(scores.targets, reference.targets)
        parts = (
            _compared(*(logits.double() for logits in pair), targets)
            for *pair, targets in zip(
                scores.logits.split(AT_ONCE),
                reference.logits.split(AT_ONCE),
                scores.targets.split(AT_ONCE),
                strict=True,
            )
        )
        own, other, kl, largest, square, shift, same = (
            torch.cat(column).cpu() for column in zip(*parts, strict=True)
        )
        return cls(
            tokens=len(own),
            perplexity=math.exp(-own.mean()),
            reference=math.exp(-other.mean()),
            likelihood=float((own - other).mean()),
            error=float((own - other).std() / math.sqrt(len(own))),
            kl=float(kl.mean()),
            kl_error=float(kl.std() / math.sqrt(len(kl))),
            kl_row=float(_row_means(kl, scores.rows.cpu()).max()),
            kl_999=float(kl.quantile(0.999)),
            kl_max=float(kl.max()),
            max_logit=float(largest.max()),
            rms_logit=float(square.mean().sqrt()),
            max_log_prob=float(shift.max()),
            top1=float(same.double().mean()),
            greedy=torch.equal(scores.greedy, reference.greedy),
        )

    def failed(self, setting: Setting, floor: Parity) -> list[str]:
        """The gates that it fails; a comparison with NaN is false, so NaN fails.

        Args:
            floor: how far eager attention with a DynamicCache is from the reference.
        """
        if setting.is_exact:
            gates = {
                "max log-prob": self.max_log_prob <= max(MAX_LOG_PROB, FLOORS * floor.max_log_prob),
                "top-1": self.top1 == 1,
                "greedy": self.greedy,
            }
        else:
            sampling = 3 * math.sqrt(2) * floor.kl_error
            gates = {
                "KL": self.kl <= floor.kl + sampling,
                "KL of a row": self.kl_row <= FLOORS * floor.kl_row,
            }
        return [name for name, is_passed in gates.items() if not is_passed]

    def row(self, case: str, **more: Any) -> dict[str, Any]:
        return {
            "case": case,
            "tokens": self.tokens,
            "perplexity": self.perplexity,
            "reference": self.reference,
            "d log-lik.": self.likelihood,
            "s.e.": self.error,
            "KL": self.kl,
            "KL row": self.kl_row,
            "KL 99.9%": self.kl_999,
            "KL max": self.kl_max,
            "max logit": self.max_logit,
            "rms logit": self.rms_logit,
            "max log-prob": self.max_log_prob,
            "top-1": self.top1,
            "greedy": self.greedy,
            **more,
        }


def _compared(
    logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Of each token: both log-likelihoods, KL, largest and mean square difference of logits,
    largest difference of log-probabilities, same top-1."""
    own, other = logits.log_softmax(-1), reference.log_softmax(-1)
    likelihoods = (p.gather(-1, targets[:, None])[:, 0] for p in (own, other))
    kl = (other.exp() * (other - own)).sum(-1)
    difference = logits - reference
    largest, square = difference.abs().amax(-1), difference.square().mean(-1)
    same = logits.argmax(-1) == reference.argmax(-1)
    return *likelihoods, kl, largest, square, (own - other).abs().amax(-1), same


def _row_means(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[rows], the mean of each row's values."""
    return torch.bincount(rows, values) / torch.bincount(rows)


# -- what is compared ------------------------------------------------------------------------------


def backends(device: str) -> list[str]:
    """The attention backends that run on a device, the one that is taken by itself first."""
    auto = backend_for("auto", torch.device(device))
    return ["dense"] if isinstance(auto, str) else [auto.name, "dense"]


def compared(
    model: PreTrainedModel, text: Text, setting: Setting, case: str, names: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Table, row) of each kind of cache and each fault on one way."""
    way, kv_dtype = WAYS[case], setting.kv_dtype
    reference = Caches(model, "sdpa", kv_dtype).score(way, text)
    floor = Parity.of(Caches(model, "eager", kv_dtype).score(way, text), reference)
    yield f"{setting}: DynamicCache, eager (the noise floor)", floor.row(case)

    def judged(name: str, caches: PagedCaches) -> dict[str, Any]:
        scores = caches.score(way, text)
        parity = Parity.of(scores, reference)
        failed = ", ".join(parity.failed(setting, floor))
        return parity.row(name, **{"KL floor": floor.kl}, paged=scores.paged, failed=failed)

    for backend in names:
        caches = PagedCaches(model, backend, kv_dtype)
        yield f"{setting}: PagedCache, {backend}", judged(case, caches)
        for name, fault in FAULTS.items():
            if fault.way is way:
                caches = fault(model, backend, kv_dtype)
                yield CONTROLS, judged(f"{name}: {setting}, {backend}", caches)


def rows_of(setting: Setting, backends: int) -> int:
    """How many rows `compared` gives."""
    ways = [WAYS[case] for case in setting.ways]
    faults = sum(fault.way in ways for fault in FAULTS.values())
    return len(ways) * (1 + backends) + faults * backends


def windows(ids: list[int], rows: int, columns: int) -> torch.Tensor:
    """int64 [rows, columns], random parts of a text that do not overlap."""
    whole = len(ids) // columns
    if whole < rows:
        raise ValueError(
            f"The text has {len(ids)} tokens, {rows} windows of {columns} need {rows * columns}."
        )
    starts = torch.randperm(whole)[:rows] * columns
    return torch.tensor(ids)[starts[:, None] + torch.arange(columns)]


def read(arguments: argparse.Namespace) -> str:
    """The text that is asked for, as much of it as could be needed."""
    if arguments.file is not None:
        return arguments.file.read_text(encoding="utf-8")
    if arguments.dataset is None:
        return small_model.sample_text()
    from datasets import load_dataset

    rows = load_dataset(arguments.dataset, arguments.config, split=arguments.split, streaming=True)
    return "\n".join(row[arguments.column] for row in itertools.islice(rows, 10_000))


def plot(results: dict[str, Rows], settings: list[Setting], path: Path) -> None:
    """A panel a setting: what is gated of each cache on each way, and the noise floor."""
    figure, axes = plt.subplots(1, len(settings), figsize=(5 * len(settings), 5), squeeze=False)
    for axis, setting in zip(axes[0], settings, strict=True):
        column = "max log-prob" if setting.is_exact else "KL"
        for table, rows in results.items():
            of, _, kind = table.partition(": ")
            if of == str(setting):
                ways, values = zip(*((row["case"], row[column]) for row in rows), strict=True)
                axis.plot(ways, values, "o", alpha=0.7, label=kind)
        if setting.is_exact:
            axis.axhline(MAX_LOG_PROB, color="grey", label="gate")
        axis.set_yscale("log")
        axis.set_title(str(setting), fontsize="medium")
        axis.set_ylabel("largest difference of log-probs" if setting.is_exact else "mean KL, nats")
        axis.tick_params(axis="x", rotation=90)
        axis.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: argparse.Namespace) -> int:
    torch.manual_seed(arguments.seed)
    rows, columns, new = (3, 64, 8) if arguments.quick else (8, 264, 48)
    model, tokenizer = small_model.load(arguments.model, device=arguments.device)
    ids = windows(tokenizer(read(arguments)).input_ids, rows, columns).to(model.device)
    text = Text.searched(model, ids, beams=4, new=new)
    results: dict[str, Rows] = {}
    names = backends(arguments.device)[: 1 if arguments.quick else None]
    settings = [s for s in SETTINGS if s.kv_dtype is None or not arguments.quick]
    total = sum(rows_of(setting, len(names)) for setting in settings)
    with tqdm(total=total, unit="row") as bar:
        for setting in settings:
            model = model.to(setting.dtype)
            for case in setting.ways:
                bar.set_description(f"{setting}, {case}")
                for table, row in compared(model, text, setting, case, names):
                    results.setdefault(table, []).append(row)
                    bar.update()
    facts = {
        **machine_facts(),
        "model": arguments.model or small_model.HUB_NAME,
        "text": str(arguments.dataset or arguments.file or "Python's own help"),
        "windows": f"{rows} of {columns} tokens",
    }
    write_results(arguments.out, "parity", "PagedCache against DynamicCache", facts, results)
    plot(results, settings, arguments.out / "parity.png")
    wrong = [
        f"{table}, {row['case']}: {row['failed'] or 'not caught'}"
        for table, found in results.items()
        for row in found
        if "failed" in row and bool(row["failed"]) != (table == CONTROLS)
    ]
    print(
        "\n".join(["FAILED", *wrong]) if wrong else "Every gate passed, every control was caught."
    )
    return int(bool(wrong))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--file", type=Path, help="a text; without one it is Python's own help")
    text.add_argument("--dataset", help="a name or folder that datasets.load_dataset takes")
    parser.add_argument("--config", help="of the dataset")
    parser.add_argument("--split", default="test", help="of the dataset (%(default)s)")
    parser.add_argument("--column", default="text", help="of the dataset (%(default)s)")
    parser.add_argument("--model", help="a hub name or a folder; without it SmolLM2-135M")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the windows' places (%(default)s)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small text, no other backend than the best, and no K/V in fewer bits",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
