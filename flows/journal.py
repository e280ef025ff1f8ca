"""What a round shows people while it goes on: artifacts and log lines in Prefect's UI."""

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol, TypeVar
from uuid import UUID

import structlog
from prefect.artifacts import (
    acreate_link_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from db.records import AdapterName, RoundRecord, VersionRecord
from flows.decision import GateDecision

T = TypeVar("T")
TableRow = Mapping[str, str | float | int | None]
STEP = 3.0
"""Least change of the progress, in points, that is shown."""
SHOW_S = 5.0
"""For one artifact: a server that hangs must not hold up a round."""
log = structlog.get_logger()


class Journal(Protocol):
    """Where a round tells of itself. Nothing here may make a round fail."""

    async def progress(self, percent: float, text: str) -> None:
        """How far it is."""
        ...

    async def clients(self, rows: Sequence[TableRow]) -> None:
        """What each client did."""
        ...

    async def decided(self, current: RoundRecord, decision: GateDecision | None) -> None:
        """How it ended; without a gate's decision it was aborted."""
        ...

    async def registered(self, version: VersionRecord) -> None:
        """Its candidate has a number."""
        ...


class PrefectJournal:
    """Artifacts of the flow run, under keys that start with the adapter's name."""

    def __init__(self, adapter: AdapterName, *, mlflow_url: str) -> None:
        self._adapter = adapter
        self._key = re.sub(r"[^a-z0-9]+", "-", adapter.lower()).strip("-") or "adapter"
        self._mlflow_url = mlflow_url.rstrip("/")
        self._progress: UUID | None = None
        self._shown = -1.0

    async def progress(self, percent: float, text: str) -> None:
        """See ``Journal``; small changes are not sent: each costs Prefect's server 10 ms."""
        if abs(percent - self._shown) < STEP:
            return
        self._shown = percent
        if self._progress is None:
            self._progress = await quietly(
                acreate_progress_artifact(progress=percent, key=f"{self._key}-round-progress", description=text)
            )
        else:
            await quietly(aupdate_progress_artifact(self._progress, progress=percent, description=text))

    async def clients(self, rows: Sequence[TableRow]) -> None:
        """See ``Journal``."""
        table = [dict(row) for row in rows]
        await quietly(
            acreate_table_artifact(table=table, key=f"{self._key}-round-clients", description="Clients of the round")
        )

    async def decided(self, current: RoundRecord, decision: GateDecision | None) -> None:
        """See ``Journal``."""
        await quietly(
            acreate_markdown_artifact(
                markdown=decision_markdown(current, decision),
                key=f"{self._key}-round-decision",
                description=f"Round {current.number}: {current.state}",
            )
        )

    async def registered(self, version: VersionRecord) -> None:
        """See ``Journal``."""
        await quietly(
            acreate_link_artifact(
                link=f"{self._mlflow_url}/#/models/collm.{self._adapter}/versions/{version.number}",
                link_text=f"collm.{self._adapter} version {version.number}",
                key=f"{self._key}-round-version",
                description="The candidate in MLflow",
            )
        )


class SilentJournal:
    """Shows nothing."""

    async def progress(self, percent: float, text: str) -> None:
        """See ``Journal``."""

    async def clients(self, rows: Sequence[TableRow]) -> None:
        """See ``Journal``."""

    async def decided(self, current: RoundRecord, decision: GateDecision | None) -> None:
        """See ``Journal``."""

    async def registered(self, version: VersionRecord) -> None:
        """See ``Journal``."""


def decision_markdown(current: RoundRecord, decision: GateDecision | None) -> str:
    """Return how a round ended, for people."""
    lines = [f"## Round {current.number} of `{current.adapter}`: {current.state}", "", current.reason, ""]
    if decision is not None and decision.by_client:
        lines += [
            "| gate rows of | rows | CE before | CE after | change |",
            "|---|--:|--:|--:|--:|",
            *(
                f"| {client} | {pair.rows} | {pair.before:.4f} | {pair.after:.4f} | {pair.change:+.4f} |"
                for client, pair in decision.by_client.items()
            ),
            f"| **pooled** | {sum(p.rows for p in decision.by_client.values())} | {decision.ce_before:.4f} "
            f"| {decision.ce_after:.4f} | {decision.ce_after - decision.ce_before:+.4f} |",
            "",
        ]
    error = "–" if current.aggregation_error is None else f"{current.aggregation_error:.2e}"
    lines.append(
        f"Base `{current.base_uid[:12]}`, candidate `{(current.candidate_uid or '–')[:12]}`, "
        f"factor {current.plan.factor}, aggregation error {error}."
    )
    return "\n".join(lines)


async def quietly(shown: Awaitable[T], *, within_s: float = SHOW_S) -> T | None:
    """Wait for an artifact, but not long; a round goes on without it."""
    try:
        async with asyncio.timeout(within_s):
            return await shown
    except Exception as e:
        log.warning("artifact_failed", error=str(e) or type(e).__name__)
        return None
