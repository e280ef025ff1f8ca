"""What a round does in each of its states."""

import asyncio
from collections.abc import Mapping

import structlog

from db import adapters, rounds
from db.records import (
    AdapterRecord,
    ClientId,
    QualityRecord,
    ReplicaId,
    RoundRecord,
    RoundState,
    UpdateRecord,
    VersionRecord,
)
from flows import evaluate, steps
from flows.decision import GateDecision, GateRule, decide, missing_scores, refuse
from flows.journal import Journal, TableRow
from flows.moves import move, settle
from flows.pace import Pace
from flows.plan import ready
from flows.site import Site
from infra.errors import CollmError, NotEnoughClients, RoundError, RoundTaken, StaleUpdate, Unscorable
from serving.wire.control import RoundStatus, StageBody

REPORT_EVERY_S = 5.0
COLUMNS = (
    "client",
    "update",
    "tokens",
    "steps",
    "loss first",
    "loss last",
    "seconds",
    "gate CE before",
    "gate CE after",
)
"""Of the table of clients."""
log = structlog.get_logger()

Scores = Mapping[ClientId, QualityRecord]


async def collect(site: Site, journal: Journal, pace: Pace, current: RoundRecord) -> RoundRecord:
    """Have every client train. Raises ``NotEnoughClients`` with each one's reason if too few return an update."""
    done: dict[ClientId, float] = dict.fromkeys(current.clients, 0.0)

    def seen(client: ClientId, status: RoundStatus) -> None:
        done[client] = min(1.0, status.tokens / current.plan.tokens)

    async def report() -> None:
        while True:
            share = sum(done.values()) / len(done)
            await journal.progress(5 + 65 * share, f"Round {current.number}: {len(done)} clients train")
            await asyncio.sleep(REPORT_EVERY_S)

    reporter = asyncio.create_task(report())
    try:
        results = await asyncio.gather(
            *(steps.train_client(site, pace, current, client, seen) for client in current.clients),
            return_exceptions=True,
        )
    finally:
        reporter.cancel()
    failures = [expected(result) for result in results if isinstance(result, BaseException)]
    came = len(results) - len(failures)
    if came < current.plan.min_clients:
        raise NotEnoughClients(
            f"{came} of {len(results)} clients returned an update, {current.plan.min_clients} are needed"
            f" ({'; '.join(failures)})"
        )
    for failure in failures:
        log.warning("client_dropped", reason=failure)
    return await move(site, current, RoundState.AGGREGATING, reason="; ".join(failures))


def expected(error: BaseException) -> str:
    """Return why one client has to do without; re-raise what ends the whole round or run."""
    if isinstance(error, RoundError) and not isinstance(error, StaleUpdate | RoundTaken):
        return error.message
    raise error


async def aggregate(site: Site, journal: Journal, record: AdapterRecord, current: RoundRecord) -> RoundRecord:
    """Make the candidate of the updates that came in."""
    await journal.progress(72, f"Round {current.number}: aggregating")
    version, error = await steps.register_candidate(site, record, current)
    await journal.registered(version)
    return await move(site, current, RoundState.EVALUATING, candidate_uid=version.uid, aggregation_error=error)


async def judge(
    site: Site, journal: Journal, pace: Pace, record: AdapterRecord, current: RoundRecord
) -> tuple[RoundRecord, GateDecision]:
    """Score base and candidate, decide, and make it so."""
    assert current.candidate_uid is not None
    uid = current.candidate_uid
    base = await site.transact(lambda s: adapters.version(s, current.base_uid))
    candidate = await site.transact(lambda s: adapters.version(s, uid))
    await journal.progress(78, f"Round {current.number}: evaluating version {candidate.number}")
    rule = GateRule(confidence=site.settings.rounds.gate_confidence, tolerance=site.settings.rounds.gate_tolerance)
    try:
        before, after = await score_pairs(site, pace, record, current, base, candidate)
    except Unscorable as e:
        decision = refuse(e.message)
    else:
        decision = decide(before, after, rule)
    log.info("gate_decided", promote=decision.promote, reason=decision.reason, version=candidate.number)
    if decision.promote:
        await stage_everywhere(site, candidate, backbone=record.backbone)
    return await settle(site, current, candidate, decision), decision


async def score_pairs(
    site: Site,
    pace: Pace,
    record: AdapterRecord,
    current: RoundRecord,
    base: VersionRecord,
    candidate: VersionRecord,
) -> tuple[Scores, Scores]:
    """Return both versions' scores of each client that gave both.

    Raises ``NotEnoughClients`` if too few did, ``Unscorable`` if one answered that a version cannot be scored: the
    others must not decide over its head.
    """
    clients = await evaluate.gate_clients(site, record.backbone)
    results = await asyncio.gather(
        *(steps.score_client(site, pace, client, base, candidate) for client in clients), return_exceptions=True
    )
    failures = [expected(result) for result in results if isinstance(result, BaseException)]
    for result in results:
        if isinstance(result, Unscorable):
            raise result
    pairs = {c: r for c, r in zip(clients, results, strict=True) if not isinstance(r, BaseException)}
    updates = await site.transact(lambda s: rounds.updates(s, current.id))
    lacking = missing_scores(
        pairs.keys(),
        asked={*clients, *current.clients},
        accepted={u.client_id for u in updates if u.accepted},
        min_clients=current.plan.min_clients,
    )
    if lacking:
        raise NotEnoughClients("; ".join([lacking, *failures]))
    for failure in failures:
        log.warning("client_not_scored", reason=failure)
    return {c: pair[0] for c, pair in pairs.items()}, {c: pair[1] for c, pair in pairs.items()}


async def stage_everywhere(site: Site, version: VersionRecord, *, backbone: str) -> None:
    """Have replicas load the version before it comes into force, so that only the flip is left.

    One that is away loads it later; one that refuses it raises: what does not fit must not be promoted.
    """
    body = StageBody(adapter=version.adapter, uid=version.uid, number=version.number, store_key=version.store_key)

    async def stage(replica_id: ReplicaId) -> None:
        try:
            await (await site.replica(replica_id)).stage(body)
        except CollmError as e:
            if not e.retryable:
                raise
            log.info("version_not_staged", replica_id=replica_id, error=e.message)

    await asyncio.gather(*(stage(replica.id) for replica in ready(await site.fleet(), backbone)))


async def see_served(site: Site, record: AdapterRecord, current: RoundRecord) -> RoundRecord:
    """Note when the whole fleet served what was promoted."""
    assert current.candidate_uid is not None
    uid = current.candidate_uid
    version = await site.transact(lambda s: adapters.version(s, uid))
    served_s = await evaluate.wait_served(site, version, current, backbone=record.backbone)
    return current if served_s is None else await move(site, current, current.state, served_s=served_s)


async def show_clients(site: Site, journal: Journal, current: RoundRecord, decision: GateDecision | None) -> None:
    """Put what each client did into a table."""
    updates = {u.client_id: u for u in await site.transact(lambda s: rounds.updates(s, current.id))}
    pairs = {} if decision is None else decision.by_client
    rows: list[TableRow] = []
    for client in sorted({*current.clients, *pairs}):
        done, pair = updates.get(client), pairs.get(client)
        row: dict[str, str | float | int | None] = dict.fromkeys(COLUMNS)
        row |= {"client": client, "update": verdict(done)}
        if done is not None:
            row |= {
                "tokens": done.tokens,
                "steps": done.steps,
                "loss first": round(done.loss_first, 4),
                "loss last": round(done.loss_last, 4),
                "seconds": round(done.seconds, 1),
            }
        if pair is not None:
            row |= {"gate CE before": round(pair.before, 4), "gate CE after": round(pair.after, 4)}
        rows.append(row)
    await journal.clients(rows)


def verdict(update: UpdateRecord | None) -> str:
    """Return what became of a client's update."""
    if update is None:
        return "none"
    if update.accepted is None:
        return "not checked"
    return "accepted" if update.accepted else f"refused: {update.reason}"
