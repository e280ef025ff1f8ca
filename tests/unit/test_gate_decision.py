"""The gate promotes what is surely better and harms nobody, and nothing else."""

import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.records import ClientId, QualityRecord, Split, VersionUid
from flows.decision import GateRule, decide, missing_scores, student_t

RULE = GateRule(confidence=0.95, tolerance=0.01)
ROWS = 48
Change = Callable[[random.Random], float]


def scores(changes: Mapping[str, Change], *, seed: int = 0, uid: str = "candidate") -> dict[ClientId, QualityRecord]:
    """Per client: rows of very different difficulty, plus a change of their CE. The same seed gives the same rows."""
    found = {}
    for client, change in changes.items():
        rows, noise = random.Random(f"{seed}/{client}"), random.Random(f"{seed}/{client}/{uid}")
        tokens = [rows.randint(5, 120) for _ in range(ROWS)]
        nll = [t * (rows.uniform(0.2, 3.0) + change(noise)) for t in tokens]
        found[ClientId(client)] = QualityRecord(
            uid=VersionUid(uid),
            client_id=ClientId(client),
            split=Split.GATE,
            set_sha256=f"set of {client}",
            nll_by_row=tuple(nll),
            tokens_by_row=tuple(tokens),
            at_s=0,
        )
    return found


def none(_: random.Random) -> float:
    return 0.0


BASE = scores({"a": none, "b": none}, uid="base")


def test_a_small_but_consistent_gain_is_promoted_however_hard_the_rows_differ() -> None:
    candidate = scores({"a": lambda r: r.gauss(-0.02, 0.02), "b": lambda r: r.gauss(-0.03, 0.02)})
    decision = decide(BASE, candidate, RULE)
    assert decision.promote
    assert decision.ce_after < decision.ce_before
    assert decision.ce_after - decision.ce_before < decision.bound < 0
    assert {c: p.change < 0 for c, p in decision.by_client.items()} == {"a": True, "b": True}


def test_a_worse_candidate_is_rejected() -> None:
    decision = decide(BASE, scores({"a": lambda r: 0.05, "b": lambda r: 0.05}), RULE)
    assert not decision.promote
    assert "worse for a by 0.0500, b by 0.0500" in decision.reason


def test_a_candidate_that_harms_one_client_is_rejected_though_the_pool_gains() -> None:
    decision = decide(BASE, scores({"a": lambda r: -0.5, "b": lambda r: 0.02}), RULE)
    assert decision.ce_after < decision.ce_before
    assert not decision.promote
    assert "worse for b by 0.0200" in decision.reason


def test_no_change_is_rejected() -> None:
    decision = decide(BASE, scores({"a": none, "b": none}), RULE)
    assert not decision.promote
    assert decision.bound == pytest.approx(0, abs=1e-9)


def test_noise_is_rejected_as_often_as_the_confidence_says() -> None:
    noisy = GateRule(confidence=0.95, tolerance=math.inf)
    promoted = sum(
        decide(
            scores({"a": none, "b": none}, seed=seed, uid="base"),
            scores({"a": lambda r: r.gauss(0, 0.3), "b": lambda r: r.gauss(0, 0.3)}, seed=seed),
            noisy,
        ).promote
        for seed in range(400)
    )
    assert promoted / 400 < 0.08


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_rejected_and_named(value: float) -> None:
    candidate = scores({"a": lambda r: -1.0, "b": lambda r: value})
    decision = decide(BASE, candidate, RULE)
    assert not decision.promote
    assert decision.reason == "b: a score is not finite"


def test_scores_of_different_rows_are_not_compared() -> None:
    other = scores({"a": lambda r: -1.0, "b": lambda r: -1.0}, seed=1)
    decision = decide(BASE, other, RULE)
    assert not decision.promote
    assert "different rows" in decision.reason


def test_clients_that_scored_only_one_version_are_left_out() -> None:
    decision = decide(BASE, scores({"a": lambda r: -0.5}), RULE)
    assert decision.promote
    assert list(decision.by_client) == ["a"]


def test_nothing_to_compare_is_rejected() -> None:
    assert not decide({}, {}, RULE).promote


def test_quantiles_are_students() -> None:
    # Tables: t(0.95; 10) = 1.812, t(0.95; 94) = 1.661, t(0.99; 30) = 2.457.
    assert student_t(0.95, 10) == pytest.approx(1.812, abs=0.005)
    assert student_t(0.95, 94) == pytest.approx(1.661, abs=0.001)
    assert student_t(0.99, 30) == pytest.approx(2.457, abs=0.005)


@given(shift=st.floats(-0.2, 0.2), confidence=st.sampled_from([0.6, 0.9, 0.99]))
@settings(max_examples=40, deadline=None)
def test_promotion_means_a_bound_below_zero_and_nobody_beyond_the_tolerance(shift: float, confidence: float) -> None:
    rule = GateRule(confidence=confidence, tolerance=0.01)
    candidate = scores({"a": lambda r: r.gauss(shift, 0.1), "b": lambda r: r.gauss(shift, 0.1)})
    decision = decide(BASE, candidate, rule)
    fair = decision.bound < 0 and all(p.change <= rule.tolerance for p in decision.by_client.values())
    assert decision.promote == fair


@pytest.mark.parametrize(
    ("scored", "asked", "accepted", "min_clients", "enough"),
    [
        ("ab", "abc", "ab", 1, True),  # all that the candidate is made of
        ("a", "abc", "ab", 1, False),
        ("ac", "abc", "ab", 1, True),  # a majority
        ("ac", "abc", "ab", 3, False),
        ("ab", "abcd", "abc", 1, False),
        ("", "", "", 1, False),
    ],
)
def test_a_decision_needs_those_who_trained_or_a_majority(
    scored: str, asked: str, accepted: str, min_clients: int, enough: bool
) -> None:
    def of(names: str) -> set[ClientId]:
        return {ClientId(name) for name in names}

    lacking = missing_scores(of(scored), asked=of(asked), accepted=of(accepted), min_clients=min_clients)
    assert (lacking == "") == enough
    if lacking and asked:
        assert lacking.endswith("not scored: " + ", ".join(sorted(set(asked) - set(scored))))
