"""Figures of the last few seconds."""

import pytest

from serving.model import Finished, FinishReason, Slo
from serving.replica.stats import Stats, p95

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def finished(ttft_s: float = 0.5, tpot_s: float = 0.05, tokens: int = 10) -> Finished:
    return Finished(
        reason=FinishReason.LENGTH, text="", tokens=tokens, prompt_logprobs=(), queue_s=0.0, ttft_s=ttft_s,
        tpot_s=tpot_s, total_s=1.0,
    )  # fmt: skip


def test_late_and_failed_requests_are_violations() -> None:
    stats = Stats(window_s=5)
    stats.window(0.0)
    stats.finished(finished(), SLO, 10.0)
    stats.finished(finished(ttft_s=1.5), SLO, 10.0)
    stats.finished(finished(tpot_s=0.2), SLO, 10.0)
    stats.failed(10.0)
    window = stats.window(11.0)
    assert (window.finished, window.violations, stats.requests_total) == (4, 3, 4)
    assert (window.ttft_p95_s, window.tpot_p95_s) == (1.5, 0.2)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    stats = Stats(window_s=5)
    stats.window(0.0)
    stats.finished(finished(), SLO, 1.0)
    stats.stepped(50, 1.0)
    stats.sliced(2.5, 4.0)
    window = stats.window(5.0)
    assert (window.tokens_per_s, window.train_share) == (10.0, 0.5)
    later = stats.window(20.0)
    assert (later.finished, later.tokens_per_s, later.train_share, later.ttft_p95_s) == (0, 0.0, 0.0, 0.0)


def test_the_95th_percentile_is_by_nearest_rank() -> None:
    assert p95([float(n) for n in range(1, 101)]) == 95.0
    assert p95([3.0]) == pytest.approx(3.0)
