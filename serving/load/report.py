"""From figures to the report's parts: ratios, swaps, checks. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from serving.load.figures import WindowFigures, mean, percentiles_ms, ratio
from serving.load.model import Outcome
from serving.load.schema import (
    CePart,
    CheckPart,
    Kind,
    RatioPart,
    RatioRow,
    RequestRow,
    RoundPart,
    ServePart,
    Spread,
    SwapPart,
    SwapRow,
    WindowPart,
)


def load_fields(figures: WindowFigures, label_of: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a ``LoadPart``."""
    by_version: dict[str, int] = {}
    for uid, answers in figures.answers_by_uid.items():
        label = label_of.get(uid, uid or "unknown")
        by_version[label] = by_version.get(label, 0) + answers
    return {
        "seconds": figures.seconds,
        "arrivals": figures.arrivals,
        "failed": figures.failed,
        "good_rps": figures.good_rps,
        "attainment": figures.attainment,
        "ttft_ms": Spread.of(figures.ttft_ms),
        "tpot_ms": Spread.of(figures.tpot_ms),
        "e2e_ms": Spread.of(figures.e2e_ms),
        "q": figures.q,
        "goodput": figures.goodput,
        "good": figures.good,
        "answers_by_version": dict(sorted(by_version.items())),
        "unscored": figures.unscored,
        "failures": dict(figures.failures),
        "output_tokens": figures.output_tokens,
        "late_ms": figures.late_ms,
    }


def window_part(
    figures: WindowFigures,
    *,
    name: str,
    kind: Kind,
    start_s: float,
    train_tokens: int,
    train_tokens_while_decoding: int,
    label_of: Mapping[str, str],
) -> WindowPart:
    """Return a window's part."""
    return WindowPart(
        **load_fields(figures, label_of),
        name=name,
        kind=kind,
        start_s=start_s,
        train_tokens=train_tokens,
        train_tokens_while_decoding=train_tokens_while_decoding,
    )


def ratio_part(windows: Sequence[WindowPart]) -> RatioPart:
    """Return C over S: of the means, and of each C window over the last S window before it."""
    static = [window for window in windows if window.kind == "static"]
    collm = [window for window in windows if window.kind == "collm"]
    rows: list[RatioRow] = []
    before: WindowPart | None = None
    for window in windows:
        if window.kind == "static":
            before = window
        elif before is not None:
            rows.append(
                RatioRow(
                    window=window.name,
                    against=before.name,
                    goodput=ratio(window.goodput, before.goodput),
                    good_rps=ratio(window.good_rps, before.good_rps),
                    q=ratio(window.q, before.q),
                    attainment=ratio(window.attainment, before.attainment),
                )
            )
    return RatioPart(
        goodput=ratio(mean(w.goodput for w in collm), mean(w.goodput for w in static)),
        good_rps=ratio(mean(w.good_rps for w in collm), mean(w.good_rps for w in static)),
        q=ratio(mean(w.q for w in collm), mean(w.q for w in static)),
        attainment=ratio(mean(w.attainment for w in collm), mean(w.attainment for w in static)),
        by_window=rows,
    )


def swap_part(rows: Sequence[SwapRow], *, set_up: int) -> SwapPart:
    """Return the swaps' part."""
    return SwapPart(
        count=len(rows),
        pause_ms=Spread.of(percentiles_ms(row.pause_ms / 1_000 for row in rows)),
        max_pause_ms=max((row.pause_ms for row in rows), default=None),
        local=sum(row.kind == "local" for row in rows),
        federated=sum(row.kind == "federated" for row in rows),
        set_up=set_up,
        rows=list(rows),
    )


def serve_part(rows: Sequence[SwapRow]) -> ServePart:
    """Return the delay from ready to served, all swaps together and by kind."""
    every = Spread.of(percentiles_ms(row.delay_ms / 1_000 for row in rows))
    local, federated = (
        Spread.of(percentiles_ms(row.delay_ms / 1_000 for row in rows if row.kind == kind))
        for kind in ("local", "federated")
    )
    return ServePart(p50=every.p50, p95=every.p95, p99=every.p99, local=local, federated=federated)


def request_row(
    outcome: Outcome, *, window: str, start_s: float, good: bool, label: str | None, ce: float | None
) -> RequestRow:
    """Return one arrival for the timeline."""
    timing = outcome.timing
    return RequestRow(
        at_s=round(start_s + outcome.scheduled_s, 3),
        window=window,
        ttft_ms=None if timing is None else round(1_000 * timing.ttft_s, 1),
        tpot_ms=None if timing is None else round(1_000 * timing.tpot_s, 2),
        good=good,
        failed=timing is None,
        version=label,
        replica=outcome.replica,
        ce=ce,
    )


def checks(
    windows: Sequence[WindowPart], ratios: RatioPart, ce: CePart, rounds: Sequence[RoundPart]
) -> list[CheckPart]:
    """Return what a sound run shows, and whether this one did."""
    static = [window.attainment for window in windows if window.kind == "static"]
    beside = [window.train_tokens_while_decoding for window in windows if window.kind == "collm"]
    failed = sum(window.failed for window in windows)
    promoted = sum(part.decision == "promoted" for part in rounds)
    worse = [client for client, both in ce.by_client.items() if both.end > both.start]
    return [
        CheckPart(name="failed requests", ok=failed == 0, found=str(failed), bar="0"),
        CheckPart(
            name="attainment in S",
            ok=bool(static) and min(static) >= 0.9,
            found=", ".join(f"{value:.3f}" for value in static),
            bar="≥ 0.90",
        ),
        CheckPart(
            name="rounds",
            ok=len(rounds) >= 2 and promoted >= 1,
            found=f"{len(rounds)}, {promoted} promoted",
            bar="≥ 2, ≥ 1 promoted",
        ),
        CheckPart(name="goodput C/S", ok=at_least(ratios.goodput, 1.05), found=shown(ratios.goodput), bar="≥ 1.05"),
        CheckPart(
            name="attainment C/S",
            ok=at_least(ratios.attainment, 0.97),
            found=shown(ratios.attainment),
            bar="≥ 0.97",
        ),
        CheckPart(name="pooled CE", ok=ce.end < ce.start, found=f"{ce.start:.4f} → {ce.end:.4f}", bar="falls"),
        CheckPart(name="clients with worse CE", ok=not worse, found=", ".join(worse) or "none", bar="none"),
        CheckPart(
            name="tokens trained while decoding",
            ok=bool(beside) and min(beside) > 0,
            found=", ".join(str(value) for value in beside),
            bar="> 0 in every C",
        ),
    ]


def at_least(value: float | None, bar: float) -> bool:
    """Return whether a known value reaches a bar."""
    return value is not None and value >= bar


def shown(value: float | None, digits: int = 3) -> str:
    """Return a figure for people."""
    return "–" if value is None else f"{value:.{digits}f}"
