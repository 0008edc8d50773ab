"""Mixed work on a full pool for minutes: nothing grows, nothing slows down, nothing is lost.

HF_PAGED_SOAK_MINUTES is how long, 3 if it is not set. `evals/soak.py` is the same with a report.
"""

from __future__ import annotations

import os

import pytest

from evals.soak import soak, thirds

# What allocators keep and give back differs by a few MiB from one time to another. A leak of a
# block's K/V in each operation would be 30 times this in 3 minutes.
MEMORY_NOISE = 16  # MiB


@pytest.mark.slow
def test_nothing_grows_in_long_use() -> None:
    work, samples = soak(float(os.environ.get("HF_PAGED_SOAK_MINUTES", "3")))
    first, _, last = thirds(samples)
    print(first, last, work.done, work.pool.stats(), sep="\n")
    assert last["resident MiB"] - first["resident MiB"] < MEMORY_NOISE
    assert last["objects"] < 1.02 * first["objects"]
    # CPU time, so that other processes do not count; work that grows with the time would show.
    assert last["operations / CPU s"] > first["operations / CPU s"] / 2
    assert first["in use"] > 0.85
    assert work.pool.stats()["evictions"] > 0
    assert work.done["pool full"] > 0
    assert work.end() == 0
