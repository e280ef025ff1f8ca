"""``collm status``: replicas, adapters, versions and rounds, from Postgres."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from sqlalchemy.orm import Session

from db import adapters, replicas, rounds
from db.records import AdapterRecord, Heartbeat, ReplicaRecord, RoundRecord, VersionRecord, VersionUid
from db.session import Database, OperationalError
from infra.errors import ConfigError
from infra.settings import load_settings
from infra.state import with_local_cluster

LATEST = 10
"""Versions and rounds that are shown of each adapter."""
PLAIN_WIDTH = 150
"""Of tables that go to a file or a pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is shown, read in one transaction."""

    at_s: float
    replicas: Sequence[tuple[ReplicaRecord, Heartbeat | None]]
    adapters: Sequence[AdapterRecord]
    versions: Sequence[VersionRecord]
    rounds: Sequence[RoundRecord]


def read(s: Session, *, now_s: float, latest: int) -> Snapshot:
    """Return the state of everything."""
    names = [record.name for record in adapters.every(s)]
    return Snapshot(
        at_s=now_s,
        replicas=replicas.every(s),
        adapters=adapters.every(s),
        versions=[v for name in names for v in adapters.versions(s, name, latest=latest)],
        rounds=[r for name in names for r in rounds.of_adapter(s, name, latest=latest)],
    )


def tables(shown: Snapshot, *, dead_after_s: float) -> list[Table]:
    """Return what people see."""
    numbers = {v.uid: str(v.number) for v in shown.versions}

    def number(uid: VersionUid | None) -> str:
        return "–" if uid is None else numbers.get(uid, uid[:8])

    return [
        table(
            "replicas",
            ("replica", "state", "active", "running", "queued", "TTFT p95", "TPOT p95", "tokens/s", "trained", "round"),
            (replica_row(record, beat, shown.at_s, dead_after_s) for record, beat in shown.replicas),
        ),
        table(
            "adapters",
            ("adapter", "in force", "previous", "epoch", "training", "publishing", "backbone"),
            (
                (
                    a.name,
                    number(a.desired_uid),
                    number(a.previous_uid),
                    str(a.epoch),
                    "on" if a.training else "paused",
                    a.publishing.value,
                    a.backbone[:12],
                )
                for a in shown.adapters
            ),
        ),
        table(
            "versions",
            ("adapter", "version", "state", "parent", "round", "uid"),
            (
                (v.adapter, str(v.number), v.state.value, number(v.parent_uid), v.round_id or "–", v.uid[:12])
                for v in shown.versions
            ),
        ),
        table(
            "rounds",
            ("round", "state", "factor", "clients", "seconds", "gate CE", "reason"),
            (round_row(r, shown.at_s) for r in shown.rounds),
        ),
    ]


def replica_row(record: ReplicaRecord, beat: Heartbeat | None, now_s: float, dead_after_s: float) -> Sequence[str]:
    """Return a replica's line."""
    if beat is None or now_s - beat.at_s > dead_after_s:
        seen = "never" if beat is None else f"{now_s - beat.at_s:.0f} s ago"
        return (record.id, f"away (seen {seen})", *["–"] * 8)
    return (
        record.id,
        "ready" if beat.ready else "starting",
        ", ".join(f"{name} {label}" for name, label in sorted(beat.active.items())) or "–",
        str(beat.running),
        str(beat.queued),
        f"{beat.ttft_p95_s * 1e3:.0f} ms",
        f"{beat.tpot_p95_s * 1e3:.0f} ms",
        f"{beat.tokens_per_s:.0f}",
        f"{beat.train_tokens_total} ({beat.train_share:.0%})",
        beat.round_id or "–",
    )


def round_row(r: RoundRecord, now_s: float) -> Sequence[str]:
    """Return a round's line."""
    change = "–" if r.ce_before is None or r.ce_after is None else f"{r.ce_before:.4f} → {r.ce_after:.4f}"
    seconds = (now_s if r.decided_s is None else r.decided_s) - r.started_s
    return (r.id, r.state.value, r.plan.factor.value, ", ".join(r.clients), f"{seconds:.0f}", change, r.reason or "–")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table, also without rows."""
    made = Table(*columns, title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


def main(argv: list[str]) -> int:
    """``collm status``; exit code 1 if nothing runs."""
    parser = argparse.ArgumentParser(prog="collm status", description="Print replicas, adapters, versions and rounds.")
    parser.add_argument("--latest", type=int, default=LATEST, metavar="N", help="versions and rounds of each adapter")
    latest: int = parser.parse_args(argv).latest
    settings = with_local_cluster(load_settings())
    if settings.database_url is None:
        state_dir = settings.state_dir.expanduser().resolve()
        raise ConfigError(f"no cluster runs on {state_dir} (COLLM_STATE_DIR), and COLLM_DATABASE_URL is not set")
    database = Database(settings.database_url, pool_size=1)
    try:
        with database.transaction() as s:
            shown = read(s, now_s=time.time(), latest=latest)
    except OperationalError as e:
        print(f"the database does not answer: {str(e).splitlines()[0]}", file=sys.stderr)
        return 1
    finally:
        database.close()
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    for one in tables(shown, dead_after_s=settings.controller.dead_after_s):
        console.print(one)
        console.print()
    return 0
