"""``report.html``: the report as one page that needs nothing else. Pure.

No script, no font, no picture from outside: it opens from a mail attachment. Colours follow the reader's light or
dark preference.
"""

from collections.abc import Sequence
from html import escape

from serving.load.cells import Markup, ms, percent, section, spread, table, times
from serving.load.page_style import STYLE
from serving.load.report import shown
from serving.load.schema import Report, UpdatePart, WindowPart
from serving.load.timeline import REPLICA_CSS, replicas, timeline
from serving.load.words import Metric, goodness, mean_of, metrics

LOCAL_NOTE = (
    "written federated+steps: a local one. Where fewer rows were scored, cross-entropy is an ancestor's on all rows "
    "plus the difference on those"
)


def page(report: Report) -> str:
    """Return the page."""
    body = "".join(
        [
            header(report),
            tiles(report),
            section(
                "Side by side", "the same window, replayed in alternation; means over windows", side_by_side(report)
            ),
            section("Over time", "hover for values; time between windows is squeezed", plot(report)),
            section("Window by window", "C over the S window before it", windows(report)),
            section("What the model learned", ce_note(report), cross_entropy(report)),
            section("Federated rounds", "cross-entropy before and after is on gate rows, which decide", rounds(report)),
            section("Versions that served", LOCAL_NOTE, versions(report)),
            section("Swaps", "a swap exchanges a pointer between two engine steps", swaps(report)),
            section("Load", "every factor between the trace and the requests", load(report)),
            section("Measure it again", "what an independent check needs", provenance(report)),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>CoLLM report</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def header(report: Report) -> str:
    """Return title, subject and the checks."""
    subject = (
        f"{report.model.name} · {report.model.replicas} replicas × {report.model.threads} thread"
        f"{'s' if report.model.threads > 1 else ''} · adapter {report.adapter.name} (rank {report.adapter.rank}) · "
        f"{report.created} · {report.seconds / 60:.1f} min"
    )
    marks = "".join(
        f'<li class="{"ok" if check.ok else "no"}"><b>{escape(check.name)}</b> {escape(check.found)} '
        f"<i>{escape(check.bar)}</i></li>"
        for check in report.checks
    )
    return (
        "<header><h1>Serving and fine-tuning at once</h1>"
        f'<p class="sub">{escape(subject)}</p>'
        "<p><b>S</b>: static, the initial adapter, no training. <b>C</b>: CoLLM, the same fleet fine-tunes itself in "
        f'federated rounds while it answers.</p><ul class="checks">{marks}</ul></header>'
    )


def tiles(report: Report) -> str:
    """Return the four figures that matter."""
    static, collm = of_kind(report, "static"), of_kind(report, "collm")
    found = [
        ("goodput, C over S", times(report.ratio.goodput), "good requests/s × 1/CE"),
        ("cross-entropy", f"{report.ce.start:.3f} → {report.ce.end:.3f}", "held-out report rows, start → end"),
        (
            "SLO attainment",
            f"{percent(mean_of(static, 'attainment'))} → {percent(mean_of(collm, 'attainment'))}",
            f"S → C; first token ≤ {report.slo.ttft_s:g} s, then ≤ {report.slo.tpot_s:g} s",
        ),
        (
            "trained while decoding",
            f"{sum(w.train_tokens_while_decoding for w in collm):,}",
            f"of {sum(w.train_tokens for w in collm):,} tokens in C windows",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><span>{escape(name)}</span><strong>{escape(value)}</strong><em>{escape(note)}</em></div>'
        for name, value, note in found
    )
    return f'<div class="tiles">{cells}</div>'


def side_by_side(report: Report) -> str:
    """Return S and C in one table."""
    static, collm = of_kind(report, "static"), of_kind(report, "collm")
    rows = [[m.name, m.text(m.mean(static)), m.text(m.mean(collm)), ratio_cell(m, static, collm)] for m in metrics()]
    return table(["", f"S ({len(static)})", f"C ({len(collm)})", "C/S"], rows)


def ratio_cell(metric: Metric, static: Sequence[WindowPart], collm: Sequence[WindowPart]) -> str:
    """Return a ratio, coloured by whether it is for the better; ``goodness`` says which way that is."""
    below, above = metric.mean(static), metric.mean(collm)
    if above is None or not below:
        return "–"
    value = above / below
    css = goodness(value, metric.better)
    return Markup(f'<span class="{css}">×{value:.3f}</span>')


def plot(report: Report) -> str:
    """Return the plot over time with its key."""
    names = replicas(report.timeline.samples)
    key = [
        '<span class="k"><i class="sw good"></i>answered within SLO</span>',
        '<span class="k"><i class="sw late"></i>late</span>',
        '<span class="k"><i class="sw failed"></i>failed</span>',
        *(f'<span class="k"><i class="ln {REPLICA_CSS[n % 4]}b"></i>{escape(r)}</span>' for n, r in enumerate(names)),
        '<span class="k"><i class="ln startb"></i>cross-entropy at the start</span>',
        '<span class="k"><i class="ln markb"></i>round promoted</span>',
    ]
    return f'<div class="key">{"".join(key)}</div><div class="scroll">{timeline(report)}</div>'


def windows(report: Report) -> str:
    """Return a row per window."""
    by_name = {row.window: row for row in report.ratio.by_window}
    rows: list[list[str]] = []
    for window in report.windows:
        row = by_name.get(window.name)
        rows.append(
            [
                Markup(f'<b class="{window.kind}">{window.name}</b>'),
                str(window.arrivals),
                str(window.failed),
                f"{window.good_rps:.3f}",
                percent(window.attainment),
                spread(window.ttft_ms),
                spread(window.tpot_ms),
                spread(window.e2e_ms),
                shown(window.q, 4),
                shown(window.goodput),
                "–" if row is None else times(row.goodput),
                f"{window.train_tokens:,}",
                f"{window.train_tokens_while_decoding:,}",
            ]
        )
    head = ["", "arrivals", "failed", "good/s", "attained", "TTFT", "TPOT", "end to end", "Q", "goodput", "C/S"]
    note = "Latencies in ms: p50 / p95 / p99, from the scheduled arrival. Tokens: trained, and of those while decoding."
    return table([*head, "trained", "beside"], rows) + f'<p class="note">{note}</p>'


def ce_note(report: Report) -> str:
    """Return what the cross-entropy table is measured on."""
    return f"nats per completion token on {report.eval_set.rows} report rows, never used for a decision"


def cross_entropy(report: Report) -> str:
    """Return start, every federated version and end, by client and pooled."""
    clients = sorted(report.ce.by_client)
    rows: list[list[str]] = []
    for version in report.ce.federated:
        cells = [shown(version.by_client.get(client), 4) for client in clients]
        note = "start" if version.uid == report.ce.start_uid else "end" if version.uid == report.ce.end_uid else ""
        rows.append([f"version {version.number}", *cells, f"{version.pooled:.4f}", f"{1 / version.pooled:.4f}", note])
    change = [
        Markup(f'<span class="{goodness(both.end / both.start, "lower")}">{both.end / both.start - 1:+.1%}</span>')
        for both in (report.ce.by_client[client] for client in clients)
    ]
    pooled = f"{report.ce.end / report.ce.start - 1:+.1%}"
    rows.append([Markup("<b>change</b>"), *change, pooled, "", ""])
    return table(["", *clients, "pooled", "Q", ""], rows)


def rounds(report: Report) -> str:
    """Return a row per round."""
    rows = [
        [
            str(part.number),
            Markup(
                f'<span class="{"up" if part.decision == "promoted" else "down"}">{part.decision}</span>'
                f'<span class="why">{escape(part.reason)}</span>'
            ),
            f"{part.base} → {part.candidate or '–'}",
            part.factor,
            f"{part.seconds:.1f} s",
            Markup("<br>".join(escape(update_text(update)) for update in part.updates) or "–"),
            "–" if part.aggregation_error is None else f"{part.aggregation_error:.2g}",
            f"{shown(part.ce_before, 4)} → {shown(part.ce_after, 4)}",
            "–" if part.serve_delay_ms is None else f"{part.serve_delay_ms:.0f} ms",
        ]
        for part in report.rounds
    ]
    head = ["", "decision", "version", "factor", "took", "clients", "aggr. error", "gate CE", "served after"]
    return table(head, rows, css="wide")


def update_text(update: UpdatePart) -> str:
    """Return a client's part in a round."""
    refused = "" if update.accepted is not False else f", refused: {update.reason}"
    loss = f"loss {update.loss_first:.2f} → {update.loss_last:.2f}"
    return f"{update.client}: {update.tokens:,} tokens in {update.seconds:.0f} s, {loss}{refused}"


def versions(report: Report) -> str:
    """Return a row per version."""
    rows = [
        [
            part.label,
            part.kind if part.replica is None else f"{part.kind}, {part.replica}",
            part.state,
            part.parent or "–",
            str(part.answers),
            shown(part.ce, 4),
            " · ".join(f"{client} {value:.4f}" for client, value in sorted(part.ce_by_client.items())) or "–",
            str(part.ce_rows or "–"),
            shown(part.q, 4),
            part.uid[:12],
        ]
        for part in report.versions
    ]
    return table(["version", "kind", "state", "parent", "answers", "CE", "CE by client", "rows", "Q", "uid"], rows)


def swaps(report: Report) -> str:
    """Return pauses and delays."""
    found, delay = report.swaps, report.update_to_serve_ms
    rows = [
        [
            "serving paused by a swap",
            spread(found.pause_ms),
            "–" if found.max_pause_ms is None else ms(found.max_pause_ms),
        ],
        ["ready to serve → serving, local versions", spread(delay.local), ""],
        ["the same, federated versions", spread(delay.federated), ""],
    ]
    note = (
        f"{found.count} swaps: {found.local} local, {found.federated} federated; "
        f"{found.set_up} more by which the demo set up its windows are not counted."
    )
    return table(["ms", "p50 / p95 / p99", "max"], rows) + f'<p class="note">{note}</p>'


def load(report: Report) -> str:
    """Return the scale factors."""
    s = report.scale
    rows = [
        ["trace", f"{s.trace}, {s.trace_seconds:.2f} s from {s.trace_start_s:g} s on"],
        ["time", f"× {s.time_scale:.3f} → {s.window_s:g} s, {s.arrivals} arrivals, dispersion {s.dispersion:.2f}"],
        ["capacity, measured", f"{s.capacity_rps:.3f} requests/s within the SLO"],
        ["offered", f"{s.offered_rps:.3f} requests/s = {percent(s.load)} of it"],
        [
            "prompts",
            f"ContextTokens × {s.context_scale:.4f}, at most {s.max_context_tokens}: "
            f"{s.prompt_tokens_mean:.0f} tokens in the mean, "
            f"{s.prompt_tokens_p95:.0f} at p95",
        ],
        [
            "answers",
            f"GeneratedTokens × {s.generated_scale:g}, {s.min_new_tokens} to {s.max_new_tokens}, forced: "
            f"{s.new_tokens_mean:.1f} in the mean",
        ],
        [
            "calibration",
            " · ".join(f"{x.in_flight} in flight: {x.rps:.2f}/s, {percent(x.attainment)}" for x in s.levels),
        ],
    ]
    return table(["", ""], rows, css="facts")


def provenance(report: Report) -> str:
    """Return what is needed to measure cross-entropy elsewhere."""
    rows = [
        ["backbone", f"{report.model.name}, {report.model.dtype}, sha256 {report.model.sha256}"],
        ["its files", report.model.path],
        ["adapter", f"MLflow {report.adapter.mlflow_model} version {report.ce.end_number}, uid {report.ce.end_uid}"],
        ["rows", f"{report.eval_set.name}, sha256 {report.eval_set.sha256}"],
        *(
            [f"rows of {client}", f"{part.rows} of {part.shard_rows} in {part.shard}, sha256 {part.sha256}"]
            for client, part in sorted(report.eval_set.by_client.items())
        ),
        ["prompt", report.eval_set.prompt],
        ["row length", f"at most {report.eval_set.row_tokens} tokens; loss on the completion and its end token"],
        *([f"address: {name}", url] for name, url in report.addresses.items()),
        ["machine", report.machine],
        ["command", report.command],
    ]
    return table(["", ""], rows, css="facts")


def of_kind(report: Report, kind: str) -> list[WindowPart]:
    """Return the windows of one kind."""
    return [window for window in report.windows if window.kind == kind]
