"""The report at the terminal."""

from rich.console import Console
from rich.table import Table

from serving.load.cells import ms, percent, spread, times
from serving.load.report import shown
from serving.load.schema import ReplayReport, Report
from serving.load.words import metrics


def print_report(report: Report, console: Console) -> None:
    """Print what matters; the page has the rest."""
    static = [window for window in report.windows if window.kind == "static"]
    collm = [window for window in report.windows if window.kind == "collm"]
    console.print(
        grid(
            "S: static    C: CoLLM",
            ["", f"S ({len(static)})", f"C ({len(collm)})", "C/S"],
            [
                [
                    m.name,
                    m.text(a := m.mean(static)),
                    m.text(b := m.mean(collm)),
                    times(b / a) if a and b is not None else "–",
                ]
                for m in metrics()
            ],
        )
    )
    by_name = {row.window: row for row in report.ratio.by_window}
    console.print(
        grid(
            "Windows",
            ["", "arrivals", "failed", "good/s", "attained", "TTFT ms", "TPOT ms", "Q", "goodput", "C/S", "beside"],
            [
                [
                    w.name,
                    str(w.arrivals),
                    str(w.failed),
                    f"{w.good_rps:.3f}",
                    percent(w.attainment),
                    spread(w.ttft_ms),
                    spread(w.tpot_ms),
                    shown(w.q, 4),
                    shown(w.goodput),
                    times(by_name[w.name].goodput) if w.name in by_name else "–",
                    f"{w.train_tokens_while_decoding:,}",
                ]
                for w in report.windows
            ],
        )
    )
    clients = sorted(report.ce.by_client)
    console.print(
        grid(
            "Cross-entropy on report rows, nats per token",
            ["version", *clients, "pooled", "Q"],
            [
                [
                    str(v.number),
                    *(shown(v.by_client.get(c), 4) for c in clients),
                    f"{v.pooled:.4f}",
                    f"{1 / v.pooled:.4f}",
                ]
                for v in report.ce.federated
            ],
        )
    )
    console.print(
        grid(
            "Rounds",
            ["#", "decision", "version", "took", "clients", "aggr. error", "gate CE", "why"],
            [
                [
                    str(r.number),
                    r.decision,
                    f"{r.base} → {r.candidate or '–'}",
                    f"{r.seconds:.1f} s",
                    str(len(r.clients)),
                    "–" if r.aggregation_error is None else f"{r.aggregation_error:.2g}",
                    f"{shown(r.ce_before, 4)} → {shown(r.ce_after, 4)}",
                    r.reason,
                ]
                for r in report.rounds
            ],
        )
    )
    found = report.swaps
    console.print(
        f"Swaps: {found.count} ({found.local} local, {found.federated} federated); pause {spread(found.pause_ms)} ms, "
        f"at most {ms(found.max_pause_ms)} ms; update to serve {spread(report.update_to_serve_ms)} ms"
    )
    for check in report.checks:
        mark = "[green]✓[/green]" if check.ok else "[red]✗[/red]"
        console.print(f"{mark} {check.name}: {check.found} (wanted {check.bar})", highlight=False)


def print_replay(report: ReplayReport, console: Console) -> None:
    """Print one replay."""
    load = report.load
    rows = [
        ["arrivals", f"{load.arrivals} in {load.seconds:g} s ({report.offered_rps:.2f}/s)"],
        ["failed", str(load.failed)],
        ["good requests/s", f"{load.good_rps:.3f}"],
        ["SLO attainment", f"{percent(load.attainment)} (TTFT {report.ttft_slo_s:g} s, TPOT {report.tpot_slo_s:g} s)"],
        ["TTFT ms", spread(load.ttft_ms)],
        ["TPOT ms", spread(load.tpot_ms)],
        ["end to end ms", spread(load.e2e_ms)],
        ["output tokens", str(load.output_tokens)],
        ["versions", ", ".join(f"{label}: {n}" for label, n in load.answers_by_version.items()) or "none"],
        *([f"failed: {reason}", str(count)] for reason, count in load.failures.items()),
    ]
    console.print(grid("p50 / p95 / p99 from the scheduled arrival", ["", ""], rows))


def grid(title: str, head: list[str], rows: list[list[str]]) -> Table:
    """Return a table; the first column left, figures right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 or name == "why" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
