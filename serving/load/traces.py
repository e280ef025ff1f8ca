"""Readers of public request traces, and the cut and scaling that make a window of them. Pure."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from infra.errors import InvalidRequest
from serving.load.model import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One recorded request."""

    at_s: float
    """From the trace's first row."""
    context_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How recorded lengths become those of the replay."""

    context: float = 1.0
    """Factor on ``ContextTokens``."""
    generated: float = 1.0
    """Factor on ``GeneratedTokens``."""
    max_context_tokens: int = 900
    min_new_tokens: int = 16
    max_new_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of a trace, scaled to last ``seconds``; the last arrival lies inside."""

    arrivals: tuple[Arrival, ...]
    seconds: float
    start_s: float
    """Of the stretch, in the trace."""
    trace_seconds: float
    """Length of the stretch in the trace."""

    @property
    def time_scale(self) -> float:
        """Replay seconds per trace second."""
        return self.seconds / self.trace_seconds

    @property
    def rate(self) -> float:
        """Arrivals per second of the replay."""
        return len(self.arrivals) / self.seconds

    @property
    def dispersion(self) -> float:
        """Variance over mean of the arrivals in 1-second bins of the replay; 1 for Poisson arrivals."""
        bins = [0] * max(1, math.ceil(self.seconds))
        for arrival in self.arrivals:
            bins[min(len(bins) - 1, int(arrival.offset_s))] += 1
        mean = sum(bins) / len(bins)
        return sum((b - mean) ** 2 for b in bins) / len(bins) / mean if mean else 0.0


def read_azure(lines: Iterable[str]) -> list[TraceRow]:
    """Read an Azure LLM inference trace (2023): TIMESTAMP, ContextTokens, GeneratedTokens.

    Rows are sorted by time. Raises ``InvalidRequest`` that names the first bad line.
    """
    found: list[tuple[float, int, int]] = []
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            at = seconds_of(row["TIMESTAMP"])
            context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as e:
            raise InvalidRequest(f"trace line {reader.line_num}: {e!r}") from None
        if context < 0 or generated < 0:
            raise InvalidRequest(f"trace line {reader.line_num}: negative length")
        found.append((at, context, generated))
    if not found:
        raise InvalidRequest("the trace has no rows")
    found.sort(key=lambda row: row[0])
    first = found[0][0]
    return [TraceRow(at_s=at - first, context_tokens=c, generated_tokens=g) for at, c, g in found]


def seconds_of(timestamp: str) -> float:
    """Return a time stamp with any number of fractional digits in seconds; ``datetime`` takes six at most."""
    whole, _, fraction = timestamp.strip().partition(".")
    return (datetime.fromisoformat(whole) - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")


def window_by_count(
    rows: Sequence[TraceRow], *, start_s: float, seconds: float, count: int, lengths: Lengths
) -> Window:
    """Return the first ``count`` arrivals from ``start_s`` on, time scaled so that they fill ``seconds``.

    The stretch ends where the next arrival would be, so that the scaled rate is ``count / seconds`` exactly.
    Raises ``InvalidRequest`` if the trace is too short.
    """
    later = [row for row in rows if row.at_s >= start_s]
    if count < 1:
        raise InvalidRequest("a window needs at least one arrival")
    if len(later) <= count:
        raise InvalidRequest(f"the trace has {len(later)} rows from {start_s:g} s on; {count + 1} are needed")
    trace_seconds = later[count].at_s - start_s
    if trace_seconds <= 0:
        raise InvalidRequest(f"the {count} rows from {start_s:g} s on all arrive at once")
    factor = seconds / trace_seconds
    arrivals = tuple(scaled(row, (row.at_s - start_s) * factor, lengths) for row in later[:count])
    return Window(arrivals=arrivals, seconds=seconds, start_s=start_s, trace_seconds=trace_seconds)


def window_by_scale(
    rows: Sequence[TraceRow], *, start_s: float, seconds: float, time_scale: float, lengths: Lengths
) -> Window:
    """Return the arrivals of ``seconds`` of replay at ``time_scale`` replay seconds per trace second."""
    trace_seconds = seconds / time_scale
    inside = [row for row in rows if start_s <= row.at_s < start_s + trace_seconds]
    arrivals = tuple(scaled(row, (row.at_s - start_s) * time_scale, lengths) for row in inside)
    return Window(arrivals=arrivals, seconds=seconds, start_s=start_s, trace_seconds=trace_seconds)


def scaled(row: TraceRow, offset_s: float, lengths: Lengths) -> Arrival:
    """Return a row as an arrival of the replay."""
    new_tokens = round(row.generated_tokens * lengths.generated)
    return Arrival(
        offset_s=offset_s,
        context_tokens=min(lengths.max_context_tokens, max(1, round(row.context_tokens * lengths.context))),
        new_tokens=min(lengths.max_new_tokens, max(lengths.min_new_tokens, new_tokens)),
    )
