"""How many requests per second a fleet sustains within its SLO, measured by short closed-loop runs.

Each level keeps a fixed number of requests in flight, with the lengths of the window that will be replayed. The
rate at a level is tokens received within the measured seconds over the mix's mean tokens per answer, which is
steadier in a few seconds than counting answers. Capacity is the best rate of a level that kept the SLO.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from infra.errors import NoReplica
from serving.load.model import Call, Outcome
from serving.load.sender import Target, send
from serving.model import Slo
from serving.slo import within

MEASURE_S = 4.0
"""Of a level, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What a fixed number of requests in flight gave."""

    concurrency: int
    rate: float
    """Requests per second."""
    attainment: float
    """Share of the answers that met the SLO."""
    answers: int
    failures: Mapping[str, int] = field(default_factory=dict)
    """Requests without a complete answer, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a calibration."""

    rate: float
    """Requests per second that the fleet sustains within the SLO."""
    levels: tuple[Level, ...]
    seconds: float
    """How long the measurement took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How to measure."""

    concurrencies: Sequence[int] = (2, 4, 7, 12)
    settle_s: float = 1.5
    """Left out at the start of a level: all its requests begin at once."""
    measure_s: float = MEASURE_S
    keep: float = 0.9
    """Attainment that counts as within the SLO."""
    stop_below: float = 0.7
    """A level that attains less ends the sweep."""
    min_gain: float = 1.02
    """A level that is not this much faster than the best before it ends the sweep too."""


async def measure(target: Target, calls: Sequence[Call], slo: Slo, sweep: Sweep) -> Capacity:
    """Measure capacity with ``calls`` in rotation. Raises ``NoReplica`` if no level kept the SLO."""
    begun = time.monotonic()
    source = cycle(calls)
    mean_tokens = sum(call.new_tokens for call in calls) / len(calls)
    levels: list[Level] = []
    for concurrency in sweep.concurrencies:
        outcomes = await closed_loop(target, source, concurrency, sweep.settle_s + sweep.measure_s)
        levels.append(figures(outcomes, slo, sweep, concurrency, mean_tokens))
        if enough(levels, sweep):
            break
    rate = sustained(levels, sweep)
    if rate == 0:
        raise NoReplica(f"the fleet kept the SLO at no load: {'; '.join(map(told, levels))}")
    return Capacity(rate=rate, levels=tuple(levels), seconds=time.monotonic() - begun)


async def prefill_rate(target: Target, calls: Sequence[Call], *, callers: int, seconds: float) -> float:
    """Return prompt tokens per second until the first token of ``callers`` requests at a time.

    With as many callers as replicas nobody waits for another one's prompt. Raises ``NoReplica`` without an answer.
    """
    outcomes = await closed_loop(target, cycle([replace(call, new_tokens=1) for call in calls]), callers, seconds)
    answered = [(o.prompt_tokens, t.first_s - t.scheduled_s) for o in outcomes if (t := o.timing) is not None]
    if not answered:
        raise NoReplica("no request was answered")
    return sum(tokens for tokens, _ in answered) / max(1e-6, sum(waited_s for _, waited_s in answered))


def told(level: Level) -> str:
    """Return a level in words."""
    reasons = "".join(f", {count} failed ({reason})" for reason, count in level.failures.items())
    return f"{level.concurrency} in flight: {level.attainment:.0%} of {level.answers} answers in time{reasons}"


def sustained(levels: Sequence[Level], sweep: Sweep) -> float:
    """Return the best rate of a level that kept the SLO without a failure; 0 if none did."""
    return max((x.rate for x in levels if x.attainment >= sweep.keep and not x.failures), default=0.0)


def enough(levels: Sequence[Level], sweep: Sweep) -> bool:
    """Return whether a further level could only be worse."""
    last = levels[-1]
    if last.attainment < sweep.stop_below:
        return True
    before = max((level.rate for level in levels[:-1]), default=0.0)
    return last.rate < before * sweep.min_gain


async def closed_loop(target: Target, source: Iterator[Call], concurrency: int, seconds: float) -> list[Outcome]:
    """Keep ``concurrency`` requests in flight for ``seconds``, let the last ones finish, return all outcomes."""
    start = time.monotonic()
    outcomes: list[Outcome] = []

    def now_s() -> float:
        return time.monotonic() - start

    async with target.client() as client:

        async def caller() -> None:
            while now_s() < seconds:
                call = replace(next(source), offset_s=now_s())
                outcome = await send(client, target, call, scheduled_s=call.offset_s, now_s=now_s)
                outcomes.append(outcome)
                if outcome.failure is not None:
                    await asyncio.sleep(FAILURE_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(caller())
    return outcomes


FAILURE_PAUSE_S = 0.2
"""A refusing server is not asked in a tight loop."""


def figures(outcomes: Sequence[Outcome], slo: Slo, sweep: Sweep, concurrency: int, mean_tokens: float) -> Level:
    """Return a level's figures over its measured seconds."""
    begin, end = sweep.settle_s, sweep.settle_s + sweep.measure_s
    tokens = sum(begin <= at < end for outcome in outcomes for at in outcome.token_s)
    # Where answers take longer than a level lasts, the first ones are all there is.
    settled = [outcome for outcome in outcomes if outcome.scheduled_s >= begin] or outcomes
    timings = [t for outcome in settled if (t := outcome.timing) is not None]
    good = sum(within(timing, slo) for timing in timings)
    return Level(
        concurrency=concurrency,
        rate=tokens / mean_tokens / sweep.measure_s,
        attainment=good / len(settled) if settled else 0.0,
        answers=len(timings),
        failures=Counter(outcome.failure for outcome in outcomes if outcome.failure is not None),
    )
