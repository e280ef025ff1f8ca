"""What a soak must show. Pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.wire.control import Status
from tests.soak.control import Operator
from tests.soak.replay import Replayed
from tests.soak.sender import Outcome, describe
from tests.soak.vitals import Vitals, busy_gauges

MEMORY_GROWTH = 0.03
"""Of the PSS, from after the warm-up to the end; both are medians over a sixth of the load's time."""
MORE_THREADS, MORE_FDS = 4, 6
"""Threads come lazily up to a pool's size, descriptors with what is kept open; a leak would be a hundred times more."""
ALIKE = 0.5
"""Of the controls, the part that may agree: versions differ little, and some short answers are the same by chance."""
JUDGED_MINUTES = 3.0
"""Shorter soaks are smoke tests: memory has not settled, and not everything need have happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to show."""

    name: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that a soak has seen."""

    minutes: float
    outcomes: Sequence[Outcome]
    operator: Operator
    metrics: Mapping[str, Mapping[str, float]]
    """After the end."""
    status: Status
    timeline: Sequence[Vitals]
    """While the load ran."""
    before: Vitals
    """Quiet, after the warm-up."""
    after: Vitals
    """Quiet, at the end."""
    errors: Mapping[str, int]
    """Logged."""
    exit_code: int | None
    swaps: Counter[str]
    """By kind."""
    across: int
    """Answers kept during which their adapter's version changed."""
    replayed: Replayed


def checks(seen: Seen) -> list[Check]:
    """Return every check."""
    return [
        _requests(seen),
        _conserved(seen),
        _control(seen),
        _exercised(seen),
        _quiet(seen),
        _memory(seen),
        _flat("threads", seen.before.threads, seen.after.threads, MORE_THREADS),
        _flat("descriptors", seen.before.fds, seen.after.fds, MORE_FDS),
        Check(name="log", ok=not seen.errors, found=_listed([f"{n}× {line}" for line, n in seen.errors.items()])),
        Check(name="stopped in order", ok=seen.exit_code == 0, found=f"exit code {seen.exit_code}"),
        _reproduced(seen.replayed),
        _telling(seen.replayed),
    ]


def memory_growth(timeline: Sequence[Vitals]) -> float:
    """Return the PSS's growth from the second to the last sixth of the samples; 0 for fewer than twelve."""
    part = len(timeline) // 6
    if part < 2:
        return 0.0
    early = statistics.median(v.pss_bytes for v in timeline[part : 2 * part])
    late = statistics.median(v.pss_bytes for v in timeline[-part:])
    return late / early - 1


def _requests(seen: Seen) -> Check:
    wrong = [f"{describe(o.ask)}: {o.note}" for o in seen.outcomes if o.end == "wrong"]
    ends = Counter(o.end for o in seen.outcomes)
    told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    return Check(name="every request ended as it must", ok=not wrong, found=_listed(wrong) if wrong else told)


def _conserved(seen: Seen) -> Check:
    """The replica's own count: what came in went out, by exactly one way."""
    came = sum(seen.metrics["tgi_request_count"].values())
    whole = sum(seen.metrics["tgi_request_success"].values())
    failed = sum(seen.metrics.get("tgi_request_failure", {}).values())
    found = f"{came:g} came, {whole:g} were answered, {failed:g} were not"
    return Check(name="no request is lost", ok=came == whole + failed, found=found)


def _control(seen: Seen) -> Check:
    done = ", ".join(f"{what} {count}" for what, count in sorted(seen.operator.done.items()))
    wrong = seen.operator.wrong
    return Check(name="control actions ended as they must", ok=not wrong, found=_listed(wrong) if wrong else done)


def _exercised(seen: Seen) -> Check:
    """A soak in which nothing happened shows nothing."""
    ends = Counter(o.end for o in seen.outcomes)
    needed = {"answers": ends["answered"], "federated swaps": seen.swaps["federated"]}
    if seen.minutes >= JUDGED_MINUTES:
        needed |= {
            "refusals for want of room": ends["overloaded"],
            "refusals of bad requests": ends["refused"],
            "callers who left": ends["left"],
            "local swaps": seen.swaps["local"],
            "rollback swaps": seen.swaps["rollback"],
            "answers across a swap": seen.across,
        }
    missing = [what for what, count in needed.items() if count == 0]
    told = ", ".join(f"{kind} swaps {count}" for kind, count in sorted(seen.swaps.items()))
    told = f"{told}, {seen.across} kept answers across a swap"
    return Check(name="all of it happened", ok=not missing, found=f"none: {missing}" if missing else told)


def _quiet(seen: Seen) -> Check:
    busy, status = busy_gauges(seen.metrics), seen.status
    busy += [f"{what} = {count}" for what, count in (("queued", status.queued), ("running", status.running)) if count]
    busy += [f"{count} pins of {uid[:12]}" for uid, count in status.pins.items()]
    return Check(name="counters at zero", ok=not busy, found=_listed(busy))


def _memory(seen: Seen) -> Check:
    growth = memory_growth(seen.timeline)
    judged = seen.minutes >= JUDGED_MINUTES
    peak = max((v.pss_bytes for v in seen.timeline), default=0)
    bar = f"bar {MEMORY_GROWTH:.0%}" if judged else "too short to be judged"
    found = f"{growth:+.2%} ({bar}), at most {peak / 1e6:.0f} MB"
    return Check(name="memory flat", ok=growth <= MEMORY_GROWTH or not judged, found=found)


def _flat(what: str, before: int, after: int, more: int) -> Check:
    return Check(name=f"{what} flat", ok=after <= before + more, found=f"{before} → {after}")


def _reproduced(replayed: Replayed) -> Check:
    wrong = [m.told() for m in replayed.mismatches] + [f"no weights of {what}" for what in replayed.unknown]
    told = f"{replayed.answers} answers ({replayed.tokens} tokens) of {replayed.versions} versions"
    ok = not wrong and replayed.answers > 0
    return Check(name="its version alone gives every answer", ok=ok, found=_listed(wrong) if wrong else told)


def _telling(replayed: Replayed) -> Check:
    told = f"{replayed.controls_alike} of {replayed.controls} answers are another version's too"
    ok = replayed.controls_alike <= ALIKE * replayed.controls
    return Check(name="versions can be told apart", ok=ok, found=told)


def _listed(what: Sequence[str], most: int = 12) -> str:
    return "; ".join(what[:most]) + (f"; and {len(what) - most} more" if len(what) > most else "") or "none"
