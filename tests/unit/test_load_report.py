"""The report: its fields, its ratios, and a page that stands alone."""

import io
import json
import random
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from serving.load.figures import window_figures
from serving.load.html import page
from serving.load.model import Outcome
from serving.load.report import checks, ratio_part, request_row, serve_part, swap_part, window_part
from serving.load.schema import (
    AdapterPart,
    CePart,
    ClientCe,
    EvalClient,
    EvalPart,
    Kind,
    LevelPart,
    ModelPart,
    Report,
    RequestRow,
    RoundPart,
    Sample,
    ScalePart,
    SloPart,
    SwapRow,
    TimelinePart,
    UpdatePart,
    VersionCe,
    VersionPart,
    WindowPart,
)
from serving.load.terminal import print_report
from serving.model import Slo
from serving.slo import within

SLO = Slo(ttft_s=1.0, tpot_s=0.25)
CE = {"u1": 1.25, "u2": 1.02, "u3": 0.98, "u2+8": 1.0}
LABELS = {"u1": "1", "u2": "2", "u3": "3", "u2+8": "2+8"}
SERVED = ["u1", "u2", "u2+8", "u1", "u2+8", "u3"]
KINDS: list[Kind] = ["static", "collm", "collm", "static", "collm", "collm"]


def outcomes(draw: random.Random, uid: str) -> list[Outcome]:
    """A window of 75 arrivals; a few miss the SLO."""
    found = []
    for i in range(75):
        at = i * 0.6
        first = at + draw.lognormvariate(-1.2, 0.5)
        gap = draw.uniform(0.05, 0.12)
        found.append(
            Outcome(
                index=i,
                scheduled_s=at,
                sent_s=at + 0.001,
                first_s=first,
                last_s=first + 19 * gap,
                tokens=20,
                wanted_tokens=20,
                prompt_tokens=70,
                status=200,
                uid=uid if i > 20 or uid != "u3" else "u2+8",
                label=LABELS[uid],
                replica=f"replica-{i % 2}",
            )
        )
    return found


def made_windows() -> tuple[list[WindowPart], list[RequestRow]]:
    draw = random.Random(7)
    parts: list[WindowPart] = []
    rows: list[RequestRow] = []
    for i, (kind, uid) in enumerate(zip(KINDS, SERVED, strict=True)):
        start_s = i * 70.0
        name = f"{'S' if kind == 'static' else 'C'}{KINDS[: i + 1].count(kind)}"
        found = outcomes(draw, uid)
        figures = window_figures(found, seconds=45, slo=SLO, ce_by_uid=CE)
        tokens = 0 if kind == "static" else 2400 + 100 * i
        parts.append(
            window_part(
                figures,
                name=name,
                kind=kind,
                start_s=start_s,
                train_tokens=tokens,
                train_tokens_while_decoding=tokens // 2,
                label_of=LABELS,
            )
        )
        for o in found:
            good = o.timing is not None and within(o.timing, SLO)
            rows.append(
                request_row(o, window=name, start_s=start_s, good=good, label=LABELS[o.uid or ""], ce=CE[o.uid or ""])
            )
    return parts, rows


def made_report() -> Report:
    """Return a whole report with plausible figures."""
    parts, rows = made_windows()
    draw = random.Random(3)
    ce = CePart(
        start=1.25,
        end=0.98,
        by_client={"replica-0": ClientCe(start=0.9, end=0.8), "replica-1": ClientCe(start=1.9, end=1.3)},
        start_uid="u1",
        end_uid="u3",
        end_number=3,
        tokens_by_client={"replica-0": 6000, "replica-1": 3200},
        federated=[
            VersionCe(number=1, uid="u1", pooled=1.25, by_client={"replica-0": 0.9, "replica-1": 1.9}),
            VersionCe(number=2, uid="u2", pooled=1.02, by_client={"replica-0": 0.84, "replica-1": 1.4}),
            VersionCe(number=3, uid="u3", pooled=0.98, by_client={"replica-0": 0.8, "replica-1": 1.3}),
        ],
    )
    rounds = [
        RoundPart(
            id=f"round-{n}",
            number=n,
            factor="B" if n % 2 else "A",
            decision="promoted" if n < 3 else "rejected",
            reason="pooled gate CE fell by 0.2301, at least 0.1904 with 95% confidence" if n < 3 else "no sure gain",
            seconds=38.2 + n,
            clients=["replica-0", "replica-1"],
            aggregation_error=0.0,
            ce_before=1.31,
            ce_after=1.08,
            base=str(n),
            candidate=str(n + 1),
            start_s=70.0 * n + 2,
            decided_s=70.0 * n + 41,
            served_s=70.0 * n + 41.4,
            serve_delay_ms=412.0,
            updates=[
                UpdatePart(
                    client=f"replica-{c}",
                    tokens=2070,
                    steps=8,
                    loss_first=1.4,
                    loss_last=1.0,
                    seconds=30,
                    accepted=True,
                    reason="",
                )
                for c in range(2)
            ],
        )
        for n in (1, 2, 4)
    ]
    swap_rows = [
        SwapRow(
            at_s=80.0 + 9 * i, replica=f"replica-{i % 2}", label="2+8", kind=kind, pause_ms=0.3 + i / 10, delay_ms=20
        )
        for i, kind in enumerate(["local", "federated", "local", "federated"] * 3)
    ]
    samples = []
    for i, window in enumerate(parts):
        for second in range(0, 46):
            share = 0.0 if window.kind == "static" else 0.35
            samples.append(
                Sample(
                    at_s=window.start_s + second,
                    train_share={f"replica-{c}": share * draw.uniform(0.6, 1.4) for c in range(2)},
                    running={f"replica-{c}": 2 for c in range(2)},
                    queued={f"replica-{c}": 0 for c in range(2)},
                    active={f"replica-{c}": LABELS[SERVED[i]] if second > 20 else LABELS["u2"] for c in range(2)}
                    if window.kind == "collm"
                    else {f"replica-{c}": "1" for c in range(2)},
                )
            )
    ratios = ratio_part(parts)
    return Report(
        windows=parts,
        ratio=ratios,
        ce=ce,
        rounds=rounds,
        versions=[
            VersionPart(
                label=LABELS[uid],
                uid=uid * 20,
                kind="local" if "+" in uid else "federated",
                state="promoted",
                parent=None if uid == "u1" else "1",
                replica="replica-1" if "+" in uid else None,
                answers=75,
                ce=CE[uid],
                q=1 / CE[uid],
                ce_by_client={"replica-0": 0.9, "replica-1": 1.4},
                ce_rows=200,
            )
            for uid in CE
        ],
        swaps=swap_part(swap_rows, set_up=6),
        update_to_serve_ms=serve_part(swap_rows),
        slo=SloPart(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s),
        scale=ScalePart(
            trace="azure-code.csv",
            trace_start_s=421,
            trace_seconds=6.11,
            window_s=45,
            time_scale=7.364,
            context_scale=1 / 24,
            max_context_tokens=400,
            generated_scale=1,
            min_new_tokens=16,
            max_new_tokens=64,
            arrivals=75,
            offered_rps=1.667,
            capacity_rps=3.03,
            load=0.55,
            dispersion=1.15,
            prompt_tokens_mean=68,
            prompt_tokens_p95=300,
            new_tokens_mean=24.1,
            levels=[LevelPart(in_flight=3, rps=1.8, attainment=1.0), LevelPart(in_flight=6, rps=3.03, attainment=0.97)],
        ),
        model=ModelPart(
            name="HuggingFaceTB/SmolLM2-135M-Instruct",
            path="/models/smollm2",
            sha256="a" * 64,
            dtype="bfloat16",
            threads=1,
            replicas=2,
        ),
        adapter=AdapterPart(name="code", mlflow_model="collm.code", rank=8, alpha=16, targets=["q_proj", "v_proj"]),
        eval_set=EvalPart(
            name="report rows of 2 shards",
            sha256="b" * 64,
            rows=200,
            by_client={
                f"replica-{c}": EvalClient(
                    shard=f"replica-{c}.jsonl", shard_rows=1200, sha256="c" * 64, rows=100, gate_rows=48
                )
                for c in range(2)
            },
            prompt="### Instruction:\n{prompt}\n\n### Response:\n",
            row_tokens=256,
        ),
        timeline=TimelinePart(samples=samples, requests=rows),
        checks=checks(parts, ratios, ce, rounds),
        addresses={"gateway": "http://127.0.0.1:8080"},
        created="2026-01-01T00:00:00+00:00",
        seconds=540,
        command="collm demo",
        machine="2 CPUs",
    )


def test_the_report_has_the_agreed_fields() -> None:
    report = json.loads(made_report().model_dump_json())
    window = report["windows"][0]
    assert window["kind"] == "static"
    assert {"arrivals", "failed", "good_rps", "attainment", "q", "goodput", "train_tokens"} <= window.keys()
    assert "train_tokens_while_decoding" in window
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert window[name].keys() == {"p50", "p95", "p99"}
    assert {"goodput", "good_rps", "q", "attainment"} <= report["ratio"].keys()
    assert {"start", "end", "by_client"} <= report["ce"].keys()
    assert {"decision", "seconds", "clients", "aggregation_error", "ce_before", "ce_after"} <= report["rounds"][
        0
    ].keys()
    assert {round_["decision"] for round_ in report["rounds"]} <= {"promoted", "rejected", "aborted"}
    assert {"count", "pause_ms"} <= report["swaps"].keys()
    assert {"p50", "p95", "p99"} <= report["update_to_serve_ms"].keys()
    assert {"name", "sha256", "rows"} <= report["eval_set"].keys()
    assert report.keys() >= {"versions", "slo", "scale", "model"}


def test_a_report_read_back_is_the_same() -> None:
    report = made_report()
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_ratios_compare_means_and_each_window_with_the_static_one_before() -> None:
    def window(name: str, kind: Kind, goodput: float) -> WindowPart:
        base = made_windows()[0][0]
        return base.model_copy(update={"name": name, "kind": kind, "goodput": goodput, "attainment": 0.9})

    found = ratio_part(
        [
            window("S1", "static", 1.0),
            window("C1", "collm", 1.2),
            window("C2", "collm", 1.5),
            window("S2", "static", 2.0),
            window("C3", "collm", 3.0),
        ]
    )
    assert found.goodput == pytest.approx(1.9 / 1.5)
    assert found.attainment == pytest.approx(1.0)
    assert [(row.window, row.against) for row in found.by_window] == [("C1", "S1"), ("C2", "S1"), ("C3", "S2")]
    assert [row.goodput for row in found.by_window] == pytest.approx([1.2, 1.5, 1.5])


def test_a_ratio_without_a_figure_is_null_not_a_guess() -> None:
    windows = [w.model_copy(update={"goodput": None, "q": None}) for w in made_windows()[0]]
    found = ratio_part(windows)
    assert found.goodput is None
    assert found.good_rps is not None


def test_checks_name_what_a_run_failed_to_show() -> None:
    report = made_report()
    assert all(check.ok for check in report.checks)
    worse = report.ce.model_copy(update={"by_client": {"replica-1": ClientCe(start=1.0, end=1.1)}})
    found = {c.name: c for c in checks(report.windows, report.ratio, worse, report.rounds[:1])}
    assert not found["clients with worse CE"].ok
    assert found["clients with worse CE"].found == "replica-1"
    assert not found["rounds"].ok


class Links(HTMLParser):
    """Collects whatever a page would load, and the tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "iframe", "img"):
            self.loads.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_well_formed() -> None:
    text = page(made_report())
    links = Links()
    links.feed(text)
    assert links.loads == []
    assert links.open == []
    assert "url(" not in text
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", text)


def test_the_page_escapes_what_it_shows() -> None:
    report = made_report()
    bad = report.rounds[0].model_copy(update={"reason": "<script>alert(1)</script>"})
    text = page(report.model_copy(update={"rounds": [bad]}))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_a_run_with_nothing_to_show_still_makes_a_page() -> None:
    report = made_report()
    empty = report.model_copy(
        update={
            "windows": report.windows[:1],
            "rounds": [],
            "versions": [],
            "ratio": ratio_part(report.windows[:1]),
            "swaps": swap_part([], set_up=0),
            "update_to_serve_ms": serve_part([]),
            "timeline": TimelinePart(samples=[], requests=[]),
        }
    )
    assert "<svg" in page(empty)


def test_the_terminal_shows_both_kinds_and_the_checks() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(made_report(), console)
    text = console.export_text()
    for word in ("goodput", "replica-1", "promoted", "✓ failed requests", "S1", "C4"):
        assert word in text
