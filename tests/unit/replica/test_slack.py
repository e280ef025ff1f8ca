"""Time left for background work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.replica.slack import (
    TPOT_MARGIN,
    TTFT_MARGIN,
    Awaited,
    Demand,
    ShareMeter,
    StepCosts,
    Stream,
    allowance_s,
    slack_s,
)

NOW = 100.0


def costs(decode_s: float = 0.05, token_s: float = 0.001) -> StepCosts:
    known = StepCosts()
    known.observe(decodes=1, prefill_tokens=0, seconds=decode_s)
    known.observe(decodes=0, prefill_tokens=100, seconds=100 * token_s)
    return known


def stream(*, tokens: int = 10, ahead_s: float = 0.0, tpot_s: float = 0.2, left: int = 10) -> Stream:
    """One whose mean gap is at its target's margin, less ``ahead_s`` in all."""
    first_s = NOW - TPOT_MARGIN * tpot_s * (tokens - 1) + ahead_s
    return Stream(first_s=first_s, last_s=NOW, tokens=tokens, tpot_s=tpot_s, left=left)


def test_nobody_waits_nothing_is_late() -> None:
    assert slack_s(Demand(), costs(), NOW) == math.inf


def test_a_stream_leaves_what_its_target_leaves_after_the_next_step() -> None:
    assert slack_s(Demand(streams=[stream()], budget=128), costs(), NOW) == pytest.approx(TPOT_MARGIN * 0.2 - 0.05)


def test_a_stream_that_is_late_leaves_nothing() -> None:
    assert slack_s(Demand(streams=[stream(), stream(ahead_s=-1)], budget=128), costs(), NOW) == 0


def test_a_stream_that_is_ahead_still_gets_its_next_token_within_its_target() -> None:
    demand = Demand(streams=[stream(ahead_s=5)], budget=128)
    assert slack_s(demand, costs(), NOW) == pytest.approx(0.2 - 0.05)


def test_a_prompt_leaves_what_its_target_leaves_after_computing_it() -> None:
    awaited = [Awaited(due_s=NOW - 0.1, ttft_s=2.0, tokens=300)]
    assert slack_s(Demand(awaited=awaited, budget=128), costs(), NOW) == pytest.approx(2 * TTFT_MARGIN - 0.1 - 0.3)


def test_prompts_wait_for_those_before_them() -> None:
    awaited = [Awaited(due_s=NOW, ttft_s=2.0, tokens=300)] * 2
    assert slack_s(Demand(awaited=awaited, budget=128), costs(), NOW) == pytest.approx(2 * TTFT_MARGIN - 0.6)


def test_without_a_free_row_serving_comes_first() -> None:
    assert slack_s(Demand(streams=[stream(ahead_s=5)], blocked=True, budget=128), costs(), NOW) == 0


def test_rows_that_fill_up_take_slack_away() -> None:
    whole, half, full = (
        slack_s(Demand(streams=[stream()], budget=128, free_rows=f), costs(), NOW) for f in (0.5, 0.25, 0.0)
    )
    assert half == pytest.approx(whole / 2)
    assert full == 0


def test_a_step_may_last_until_some_stream_would_miss_its_target() -> None:
    on_time = Stream(first_s=NOW - 1.9, last_s=NOW, tokens=11, tpot_s=0.2, left=9)
    ahead = Stream(first_s=NOW - 1.0, last_s=NOW, tokens=11, tpot_s=0.2, left=9)
    assert allowance_s([ahead, on_time], costs(), NOW) == pytest.approx(11 * 0.2 - 1.9)
    assert allowance_s([], costs(), NOW) == math.inf


def test_a_stream_that_has_missed_its_target_for_good_holds_nobody_back() -> None:
    behind = Stream(first_s=NOW - 2.5, last_s=NOW, tokens=11, tpot_s=0.2, left=9)
    lost = Stream(first_s=NOW - 2.5, last_s=NOW, tokens=11, tpot_s=0.2, left=1)
    assert allowance_s([behind], costs(), NOW) < 0, "it can still catch up"
    assert allowance_s([lost], costs(), NOW) == math.inf


def test_how_many_prompt_tokens_a_step_can_take() -> None:
    known = costs(decode_s=0.05, token_s=0.001)
    assert known.prefill_tokens(0.1, decodes=1) in (49, 50)
    assert known.prefill_tokens(0.01, decodes=1) == 0
    assert known.prefill_tokens(math.inf, decodes=1) > 10**6
    assert StepCosts().prefill_tokens(0.01, decodes=1) > 10**6, "nothing is known yet"


def test_before_anything_is_measured_a_guess_is_made() -> None:
    unknown = StepCosts()
    assert unknown.step_s(decodes=3, prefill_tokens=0) > 0
    assert unknown.step_s(decodes=0, prefill_tokens=9) > 0
    assert unknown.step_s(decodes=0, prefill_tokens=0) == 0


def test_costs_follow_what_is_measured() -> None:
    known = costs()
    for _ in range(50):
        known.observe(decodes=8, prefill_tokens=0, seconds=0.1)
    assert known.step_s(decodes=8, prefill_tokens=0) == pytest.approx(0.1)
    assert known.step_s(decodes=1, prefill_tokens=0) == pytest.approx(0.05)
    assert known.step_s(decodes=8, prefill_tokens=100) == pytest.approx(0.2)
    assert known.prefill_s(240, decodes=8, budget=128) == pytest.approx(0.2 + 0.24 + 0.0, rel=0.1)


@given(
    st.floats(0, 1),
    st.lists(st.floats(0.001, 0.05), min_size=50, max_size=80),
)
def test_background_work_keeps_to_its_share(share: float, slices: list[float]) -> None:
    meter, now_s, spent_s = ShareMeter(window_s=0.2), 0.0, 0.0
    for seconds in slices:
        for _ in range(1000):
            if meter.allowed(share, now_s):
                spent_s += seconds
                meter.spend(seconds)
                now_s += seconds
                break
            now_s += 0.01
    assert spent_s <= share * now_s + 0.2 + 0.05 or share >= 1


def test_a_share_of_nothing_is_nothing_and_one_is_everything() -> None:
    meter = ShareMeter()
    assert not any(meter.allowed(0.0, t / 10) for t in range(100))
    assert meter.allowed(1.0, 10.0)
    meter.spend(100)
    assert meter.allowed(1.0, 10.0)
