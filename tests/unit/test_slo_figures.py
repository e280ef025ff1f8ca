"""TTFT, TPOT, attainment, quality, percentiles and a window's figures, worked by hand."""

import pytest

from serving.load.capacity import Level, Sweep, enough, figures, sustained
from serving.load.figures import mean, percentile, ratio, window_figures
from serving.load.model import Outcome
from serving.model import Slo
from serving.slo import Timing, attainment, goodput, quality, within

SLO = Slo(ttft_s=1.0, tpot_s=0.25)


def outcome(
    index: int = 0,
    *,
    at: float = 0.0,
    first: float | None = 0.5,
    last: float | None = 2.4,
    tokens: int = 20,
    uid: str | None = "u1",
    failure: str | None = None,
) -> Outcome:
    return Outcome(
        index=index,
        scheduled_s=at,
        sent_s=at + 0.002,
        first_s=first,
        last_s=last,
        tokens=tokens,
        wanted_tokens=20,
        prompt_tokens=50,
        status=200,
        failure=failure,
        uid=uid,
        token_s=tuple((first or 0) + 0.1 * i for i in range(tokens)),
    )


def test_latency_counts_from_the_scheduled_arrival() -> None:
    timing = Timing(scheduled_s=10, first_s=10.6, last_s=12.5, tokens=20)
    assert timing.ttft_s == pytest.approx(0.6)
    assert timing.tpot_s == pytest.approx(0.1)
    assert timing.e2e_s == pytest.approx(2.5)


def test_a_single_token_has_no_gap() -> None:
    assert Timing(scheduled_s=0, first_s=1, last_s=1, tokens=1).tpot_s == 0


@pytest.mark.parametrize(
    ("first", "last", "good"),
    [(1.0, 5.75, True), (1.01, 2.0, False), (0.5, 5.26, False), (0.5, 0.5, True)],
)
def test_an_answer_is_good_when_both_targets_are_met(first: float, last: float, good: bool) -> None:
    assert within(Timing(scheduled_s=0, first_s=first, last_s=last, tokens=20), SLO) is good


def test_attainment_has_every_arrival_in_its_denominator() -> None:
    assert attainment(3, 4) == 0.75
    assert attainment(0, 0) == 1.0


def test_quality_weighs_cross_entropies_by_answers() -> None:
    # (1.0 · 3 + 2.0 · 1) / 4 = 1.25 nats → 0.8.
    assert quality([(1.0, 3), (2.0, 1)]) == pytest.approx(0.8)
    assert quality([(1.0, 0)]) is None
    assert quality([]) is None
    assert goodput(2.0, 0.8) == pytest.approx(1.6)
    assert goodput(2.0, None) is None


def test_percentiles_interpolate_linearly() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([1, 2, 3, 4], 0.95) == pytest.approx(3.85)
    assert percentile([7], 0.99) == 7
    assert percentile([], 0.5) is None


def test_a_window_by_hand() -> None:
    found = window_figures(
        [
            outcome(0),
            outcome(1, at=1.0, first=2.5, last=4.0),  # TTFT 1.5 s: late, but complete
            outcome(2, at=2.0, first=2.4, last=4.3, uid="u2"),
            outcome(3, at=3.0, first=3.5, last=4.0, failure="the stream ended before the answer did"),
            outcome(4, at=4.0, first=None, last=None, tokens=0, uid=None, failure="429 overloaded: full"),
        ],
        seconds=10,
        slo=SLO,
        ce_by_uid={"u1": 1.0, "u2": 0.7},
    )
    assert (found.arrivals, found.failed, found.good) == (5, 2, 2)
    assert found.good_rps == pytest.approx(0.2)
    assert found.attainment == pytest.approx(0.4)
    assert found.ttft_ms.p50 == pytest.approx(500)
    assert found.e2e_ms.p50 == pytest.approx(2400)
    # Three complete answers: two under u1, one under u2 → CE (1 + 1 + 0.7) / 3 = 0.9.
    assert found.q == pytest.approx(1 / 0.9)
    assert found.goodput == pytest.approx(0.2 / 0.9)
    assert found.answers_by_uid == {"u1": 2, "u2": 1}
    assert found.failures == {"the stream ended before the answer did": 1, "429 overloaded: full": 1}
    assert found.late_ms == pytest.approx(2)


def test_answers_of_unmeasured_versions_are_counted_but_carry_no_weight() -> None:
    found = window_figures([outcome(0), outcome(1, uid="u9")], seconds=10, slo=SLO, ce_by_uid={"u1": 2.0})
    assert found.q == pytest.approx(0.5)
    assert found.unscored == 1


def test_a_window_without_an_answer_has_no_latency_and_no_quality() -> None:
    found = window_figures([outcome(failure="x")], seconds=10, slo=SLO, ce_by_uid={"u1": 1.0})
    assert (found.ttft_ms.p50, found.q, found.goodput) == (None, None, None)
    assert found.attainment == 0


def test_means_and_ratios_do_not_guess_what_is_missing() -> None:
    assert mean([1.0, 2.0]) == 1.5
    assert mean([1.0, None]) is None
    assert mean([]) is None
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(1.0, 0.0) is None
    assert ratio(None, 1.0) is None


def test_a_level_of_calibration_counts_tokens_after_it_has_settled() -> None:
    sweep = Sweep(settle_s=1.0, measure_s=4.0)
    outcomes = [
        outcome(0, at=0.0, first=0.5, last=2.4),  # began while settling: its later tokens count, its latency does not
        outcome(1, at=2.0, first=2.5, last=4.4),
        outcome(2, at=3.0, first=4.5, last=6.4),  # TTFT 1.5 s, five tokens within
    ]
    level = figures(outcomes, SLO, sweep, 2, 20.0)
    within_time = 15 + 20 + 5
    assert level.rate == pytest.approx(within_time / 20 / 4)
    assert level.attainment == pytest.approx(0.5)
    assert (level.answers, level.failures) == (2, {})


def level(concurrency: int, rate: float, kept: float, **failures: int) -> Level:
    return Level(concurrency=concurrency, rate=rate, attainment=kept, answers=20, failures=failures)


def test_capacity_is_the_best_rate_that_kept_the_slo() -> None:
    sweep = Sweep(keep=0.95)
    levels = [level(3, 1.5, 1.0), level(6, 2.4, 0.97), level(10, 2.9, 0.80), level(16, 2.7, 0.2)]
    assert sustained(levels, sweep) == 2.4
    assert sustained([level(3, 1.5, 1.0, refused=1)], sweep) == 0


def test_a_sweep_ends_when_more_load_cannot_help() -> None:
    sweep = Sweep(stop_below=0.7, min_gain=1.02)
    assert not enough([level(3, 1.5, 1.0)], sweep)
    assert not enough([level(3, 1.5, 1.0), level(6, 2.4, 0.9)], sweep)
    assert enough([level(3, 1.5, 1.0), level(6, 2.4, 0.5)], sweep)
    assert enough([level(3, 1.5, 1.0), level(6, 1.51, 1.0)], sweep)
