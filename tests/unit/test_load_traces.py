"""Reading the Azure trace, cutting and scaling a window of it."""

import itertools

import pytest

from infra.errors import InvalidRequest
from serving.datasets import trace_path
from serving.load.traces import Lengths, TraceRow, read_azure, window_by_count, window_by_scale

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def rows(*at_s: float) -> list[TraceRow]:
    return [TraceRow(at_s=at, context_tokens=2400, generated_tokens=20) for at in at_s]


def test_seven_fractional_digits_and_a_day_border_are_read() -> None:
    found = read_azure(
        [HEADER, "2023-11-16 23:59:59.9999999,100,5", "2023-11-17 00:00:00.5000000,200,6", "2023-11-17 00:00:02,7,1"]
    )
    assert [row.at_s for row in found] == pytest.approx([0.0, 0.5000001, 2.0000001])
    assert [(row.context_tokens, row.generated_tokens) for row in found] == [(100, 5), (200, 6), (7, 1)]


def test_rows_come_out_in_time_order() -> None:
    found = read_azure([HEADER, "2023-11-16 00:00:02.0,1,1", "2023-11-16 00:00:01.0,2,2"])
    assert [row.context_tokens for row in found] == [2, 1]
    assert found[0].at_s == 0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEADER, "2023-11-16 00:00:00.0,100,5", "2023-11-16 00:00:01.0,x,5"], "line 3"),
        ([HEADER, "yesterday,100,5"], "line 2"),
        ([HEADER, "2023-11-16 00:00:00.0,100"], "line 2"),
        ([HEADER, "2023-11-16 00:00:00.0,-1,5"], "negative"),
        (["a,b", "1,2"], "TIMESTAMP"),
        ([HEADER], "no rows"),
    ],
)
def test_a_bad_trace_is_refused_by_line(lines: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_azure(lines)


def test_the_shipped_trace_is_read() -> None:
    found = read_azure(trace_path().read_text(encoding="utf-8").splitlines())
    assert len(found) > 1_000
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(found))


def test_a_window_by_count_offers_exactly_the_rate_asked_for() -> None:
    window = window_by_count(rows(0, 10, 12, 16, 20, 30), start_s=10, seconds=45, count=3, lengths=Lengths())
    # Rows at 10, 12 and 16; the next would come at 20: ten trace seconds become 45.
    assert [a.offset_s for a in window.arrivals] == pytest.approx([0, 9, 27])
    assert window.time_scale == pytest.approx(4.5)
    assert window.trace_seconds == pytest.approx(10)
    assert window.rate == pytest.approx(3 / 45)


def test_a_window_by_scale_takes_what_falls_into_it() -> None:
    window = window_by_scale(rows(0, 4, 5, 9.9, 10), start_s=4, seconds=12, time_scale=2, lengths=Lengths())
    assert [a.offset_s for a in window.arrivals] == pytest.approx([0, 2, 11.8])


def test_lengths_are_scaled_and_kept_within_bounds() -> None:
    lengths = Lengths(context=1 / 24, generated=0.5, max_context_tokens=200, min_new_tokens=16, max_new_tokens=64)
    trace = [
        TraceRow(at_s=0, context_tokens=2400, generated_tokens=100),
        TraceRow(at_s=1, context_tokens=7437, generated_tokens=1899),
        TraceRow(at_s=2, context_tokens=3, generated_tokens=1),
        TraceRow(at_s=3, context_tokens=3, generated_tokens=1),
    ]
    window = window_by_count(trace, start_s=0, seconds=10, count=3, lengths=lengths)
    assert [(a.context_tokens, a.new_tokens) for a in window.arrivals] == [(100, 50), (200, 64), (1, 16)]


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="4 are needed"):
        window_by_count(rows(0, 1, 2), start_s=0, seconds=45, count=3, lengths=Lengths())
    with pytest.raises(InvalidRequest, match="all arrive at once"):
        window_by_count(rows(0, 0, 0), start_s=0, seconds=45, count=2, lengths=Lengths())


def test_dispersion_is_zero_for_an_even_stream_and_high_for_a_burst() -> None:
    even = window_by_count(rows(*range(11)), start_s=0, seconds=10, count=10, lengths=Lengths())
    burst = window_by_count(rows(*[0] * 10, 10), start_s=0, seconds=10, count=10, lengths=Lengths())
    assert even.dispersion == pytest.approx(0)
    # All ten in one of ten bins: variance 9, mean 1.
    assert burst.dispersion == pytest.approx(9)
