"""Laws of the load generator's figures."""

import math

from hypothesis import given
from hypothesis import strategies as st

from serving.load.figures import percentile, window_figures
from serving.load.model import Outcome
from serving.load.prompts import PromptMaker, Source
from serving.load.traces import Lengths, TraceRow, window_by_count
from serving.model import Slo
from serving.rows import Row

SLO = Slo(ttft_s=1.0, tpot_s=0.25)
CE = {"a": 0.5, "b": 1.5}


@st.composite
def outcomes(draw: st.DrawFn) -> list[Outcome]:
    found: list[Outcome] = []
    for i in range(draw(st.integers(0, 30))):
        at = draw(st.floats(0, 45))
        first = at + draw(st.floats(0.001, 5))
        failed = draw(st.booleans())
        found.append(
            Outcome(
                index=i,
                scheduled_s=at,
                sent_s=at,
                first_s=first,
                last_s=first + draw(st.floats(0, 20)),
                tokens=draw(st.integers(1, 64)),
                wanted_tokens=64,
                prompt_tokens=10,
                failure="broke off" if failed else None,
                uid=draw(st.sampled_from(["a", "b", "unknown", None])),
            )
        )
    return found


@given(outcomes(), st.floats(1, 100))
def test_attainment_is_a_share_and_goodput_a_product(found: list[Outcome], seconds: float) -> None:
    figures = window_figures(found, seconds=seconds, slo=SLO, ce_by_uid=CE)
    assert 0 <= figures.attainment <= 1
    assert figures.good + figures.failed <= figures.arrivals == len(found)
    assert sum(figures.answers_by_uid.values()) == figures.arrivals - figures.failed
    assert math.isclose(figures.good_rps * seconds, figures.good)
    if figures.q is None:
        assert figures.goodput is None
    else:
        assert 1 / 1.5 - 1e-9 <= figures.q <= 1 / 0.5 + 1e-9
        assert figures.goodput is not None
        assert math.isclose(figures.goodput, figures.good_rps * figures.q)


@given(outcomes(), st.floats(1, 100))
def test_a_further_failure_never_helps(found: list[Outcome], seconds: float) -> None:
    lost = Outcome(index=99, scheduled_s=0, sent_s=0, wanted_tokens=1, prompt_tokens=1, failure="refused")
    before = window_figures(found, seconds=seconds, slo=SLO, ce_by_uid=CE)
    after = window_figures([*found, lost], seconds=seconds, slo=SLO, ce_by_uid=CE)
    assert after.attainment <= before.attainment
    assert (after.good_rps, after.q, after.ttft_ms) == (before.good_rps, before.q, before.ttft_ms)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_percentiles_lie_within_the_values_and_grow(values: list[float], one: float, two: float) -> None:
    ordered = sorted(values)
    low, high = percentile(ordered, min(one, two)), percentile(ordered, max(one, two))
    assert low is not None
    assert high is not None
    slack = 1e-9 * max(1.0, ordered[-1])
    assert ordered[0] - slack <= low <= high + slack
    assert high <= ordered[-1] + slack


@given(
    st.lists(st.floats(0.001, 100), min_size=3, max_size=60),
    st.integers(1, 60),
    st.floats(1, 100),
    st.integers(0, 9_000),
)
def test_a_window_keeps_order_and_lies_within_its_seconds(
    gaps: list[float], count: int, seconds: float, tokens: int
) -> None:
    at, rows = 0.0, []
    for gap in gaps:
        rows.append(TraceRow(at_s=at, context_tokens=tokens, generated_tokens=tokens))
        at += gap
    count = min(count, len(rows) - 1)
    lengths = Lengths(context=1 / 24)
    window = window_by_count(rows, start_s=0, seconds=seconds, count=count, lengths=lengths)
    offsets = [a.offset_s for a in window.arrivals]
    assert len(offsets) == count
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] <= seconds
    assert all(lengths.min_new_tokens <= a.new_tokens <= lengths.max_new_tokens for a in window.arrivals)
    assert all(1 <= a.context_tokens <= lengths.max_context_tokens for a in window.arrivals)


@given(st.integers(1, 400), st.integers(0, 50))
def test_a_prompt_is_never_longer_than_asked_unless_the_shortest_question_is(tokens: int, turn: int) -> None:
    source = Source(
        questions=tuple(Row("q " * (5 + 3 * i), "x") for i in range(8)),
        examples=tuple(Row(f"e{i}", "y " * (4 + 5 * (i % 7))) for i in range(20)),
    )
    maker = PromptMaker(sources=[source], count=lambda text: len(text.split()))
    shortest = min(maker.tokens(maker.question(source, i, 10_000)) for i in range(8))
    assert maker.tokens(maker.fill(source, turn, tokens)) <= max(tokens, shortest)
