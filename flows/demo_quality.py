"""Cross-entropy of the versions that served, on the clients' report rows.

Each replica scores rows of its own client, whichever replica made the version: weights travel, rows do not. What has
been measured once is remembered. Measuring takes the fleet's whole time, so it is done between windows, for no
longer than a gap may last: federated versions first, on all rows while there is time for it, then local ones on every
fourth row. Versions of one line differ little row by row, so an ancestor's cross-entropy on all rows plus the
difference of the two on those rows is as good an estimate as time allows.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from db import replicas, rounds
from db.records import AdapterName, ClientId, QualityRecord, ReplicaId, Split, VersionUid
from flows.site import Site
from infra.errors import CollmError
from serving.rows import Row
from serving.wire.control import RowBody, ScoreBody, ScoreReply

SCORE_TIMEOUT_S = 180.0
EVERY = 4
"""Of a client's report rows, each so-many-th is scored where all would take too long."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Served:
    """A version that answered, and where its weights lie."""

    uid: str
    label: str
    store_key: str
    base_uid: str | None
    """Federated version that it descends from."""
    federated: bool = False
    """Whether it has an MLflow number of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One version's cross-entropy by client."""

    ce: Mapping[str, float]
    """Nats per token."""
    tokens: Mapping[str, int]
    """Completion tokens of each client's report rows: its weight."""
    rows: int
    """Rows that were scored."""

    @property
    def pooled(self) -> float:
        """Nats per token over all clients' rows."""
        return sum(self.ce[c] * self.tokens[c] for c in self.ce) / max(1, sum(self.tokens.values()))


class Quality:
    """Measures versions and remembers them."""

    def __init__(self, site: Site, adapter: AdapterName, reports: Mapping[str, Sequence[Row]]) -> None:
        """``reports``: each client's report rows."""
        self.site = site
        self.adapter = adapter
        self.reports = reports
        self.known: dict[str, Measured] = {}
        """By uid."""
        self.rows: dict[str, Mapping[str, ScoreReply]] = {}
        """Of versions measured on all rows, by uid and client: row by row."""
        self.full_s = 0.0
        """What the last measurement on all rows took."""
        self.part_s = 0.0
        """The same on a part of them."""

    async def measure(self, version: Served) -> Measured:
        """Score a version on all report rows, for all clients at once. Raises what a replica answers."""
        if version.uid not in self.rows:
            begun = self.site.clock.monotonic()
            replies = await self._replies(version, every=1)
            self.rows[version.uid] = replies
            self.known[version.uid] = in_full(replies)
            self.full_s = self.site.clock.monotonic() - begun
            self.part_s = self.part_s or self.full_s / EVERY
        return self.known[version.uid]

    async def estimate(self, version: Served, versions: Mapping[str, Served]) -> Measured:
        """Score a version on some rows, beside the nearest ancestor among ``versions`` that was scored on all.

        The first version that was measured has to do where no ancestor was. Raises what a replica answers.
        """
        if not self.rows:
            return await self.measure(version)
        if version.uid not in self.known:
            begun = self.site.clock.monotonic()
            base = self._ancestor(version, versions)
            replies = await self._replies(version, every=EVERY)
            self.known[version.uid] = beside(self.known[base], self.rows[base], replies)
            self.part_s = self.site.clock.monotonic() - begun
        return self.known[version.uid]

    async def catch_up(self, served: Mapping[str, int], versions: Mapping[str, Served], *, budget_s: float) -> int:
        """Measure versions that answered, the busiest first, while the time lasts; return how many are left.

        ``served``: answers by uid. A version that cannot be scored is left out; its answers have no weight.
        """
        begun = self.site.clock.monotonic()
        waiting = [versions[uid] for uid in served if uid in versions and uid not in self.known]
        waiting.sort(key=lambda version: (not version.federated, -served[version.uid]))
        for done, version in enumerate(waiting):
            left = len(waiting) - done
            left_s = budget_s - (self.site.clock.monotonic() - begun)
            if self.part_s > left_s:
                return left
            full = version.federated and self.full_s + (left - 1) * self.part_s <= left_s
            try:
                await (self.measure(version) if full else self.estimate(version, versions))
            except CollmError as e:
                log.warning("version_not_scored", version=version.label, error=e.message)
        return 0

    def _ancestor(self, version: Served, versions: Mapping[str, Served]) -> str:
        uid = version.base_uid
        while uid is not None and uid not in self.rows:
            uid = versions[uid].base_uid if uid in versions else None
        return uid or next(iter(self.rows))

    async def _replies(self, version: Served, *, every: int) -> dict[str, ScoreReply]:
        clients = sorted(c.id for c, _ in await self.site.transact(replicas.every) if c.id in self.reports)
        replies = await asyncio.gather(*(self._score(client, version, every) for client in clients))
        return {str(client): reply for client, reply in zip(clients, replies, strict=True)}

    async def _score(self, client: ReplicaId, version: Served, every: int) -> ScoreReply:
        replica = await self.site.replica(client)
        body = ScoreBody(adapter=self.adapter, uid=version.uid, store_key=version.store_key)
        if every > 1:
            some = self.reports[client][::every]
            rows = tuple(RowBody(prompt=row.prompt, completion=row.completion) for row in some)
            return await replica.score(body.model_copy(update={"rows": rows}), timeout_s=SCORE_TIMEOUT_S)
        reply = await replica.score(body.model_copy(update={"split": "report"}), timeout_s=SCORE_TIMEOUT_S)
        record = QualityRecord(
            uid=VersionUid(version.uid),
            client_id=ClientId(client),
            split=Split.REPORT,
            set_sha256=reply.set_sha256,
            nll_by_row=reply.nll_by_row,
            tokens_by_row=reply.tokens_by_row,
            at_s=self.site.clock.wall(),
        )
        await self.site.transact(lambda s: rounds.add_quality(s, record))
        return reply


def in_full(replies: Mapping[str, ScoreReply]) -> Measured:
    """Return the measurement of a version that was scored on all rows."""
    return Measured(
        ce={c: sum(r.nll_by_row) / max(1, sum(r.tokens_by_row)) for c, r in replies.items()},
        tokens={c: sum(r.tokens_by_row) for c, r in replies.items()},
        rows=sum(len(r.nll_by_row) for r in replies.values()),
    )


def beside(base: Measured, all_rows: Mapping[str, ScoreReply], some: Mapping[str, ScoreReply]) -> Measured:
    """Return the estimate for a version scored on every ``EVERY``-th row, whose ``base`` was scored on all."""
    ce: dict[str, float] = {}
    for client, reply in some.items():
        before = sum(all_rows[client].nll_by_row[::EVERY])
        ce[client] = base.ce[client] + (sum(reply.nll_by_row) - before) / max(1, sum(reply.tokens_by_row))
    return Measured(ce=ce, tokens={c: base.tokens[c] for c in some}, rows=sum(len(r.nll_by_row) for r in some.values()))
