"""Scores of versions on the clients' gate rows, through the replicas that hold them."""

import asyncio
import hashlib
import math

import structlog

from db import rounds
from db.records import ClientId, QualityRecord, ReplicaId, RoundRecord, Split, VersionRecord
from flows.pace import Pace
from flows.plan import ready
from flows.site import Site
from infra.errors import CollmError, IncompatibleAdapter, RoundError, StepFailed, Unscorable
from serving.wire.control import ScoreBody, Status

log = structlog.get_logger()


async def gate_clients(site: Site, backbone: str) -> list[ClientId]:
    """Return every live replica with gate rows, trained or not: nobody is made worse unasked."""
    return [ClientId(record.id) for record in ready(await site.fleet(), backbone) if record.has_shard]


async def score(site: Site, pace: Pace, client: ClientId, version: VersionRecord) -> QualityRecord:
    """Return a version's score on the client's gate rows, measured once per version and set of rows.

    Raises ``Unscorable`` if the client answers that the version is at fault, ``RoundError`` if it does not answer,
    and what ``pace`` raises. A pause of training is waited for.
    """
    limit_s = site.settings.rounds.score_timeout_s
    trouble_since_s = None
    while True:
        await pace.running()
        try:
            return await _score(site, client, version, limit_s)
        except (StepFailed, IncompatibleAdapter) as e:
            raise Unscorable(f"{client} cannot score version {version.number}: {e.message}") from e
        except CollmError as e:
            now_s = site.clock.monotonic()
            trouble_since_s = now_s if trouble_since_s is None else trouble_since_s
            if not e.retryable or now_s - trouble_since_s > site.settings.rounds.lost_after_s:
                raise RoundError(f"{client} could not score version {version.number}: {e.message}") from e
        except TimeoutError as e:
            if not pace.training:
                continue
            raise RoundError(f"{client} did not score version {version.number} within {limit_s:g} s") from e
        await asyncio.sleep(site.settings.rounds.poll_s)


async def _score(site: Site, client: ClientId, version: VersionRecord, limit_s: float) -> QualityRecord:
    replica = await site.replica(ReplicaId(client))
    status = await replica.status()
    rows = status.set_sha256.get(Split.GATE.value)
    if rows is None:
        raise RoundError("it has no gate rows")
    name = measurement(rows, status)
    known = await site.transact(lambda s: rounds.quality(s, version.uid, client, Split.GATE, name))
    if known is not None:
        return known
    body = ScoreBody(adapter=version.adapter, uid=version.uid, store_key=version.store_key, split="gate")
    # This limit, not the client's: a timeout of the client's looks like a replica that is away.
    async with asyncio.timeout(limit_s):
        reply = await replica.score(body, timeout_s=limit_s + 10)
    if reply.set_sha256 != rows:
        raise RoundError("its gate rows have changed meanwhile")
    record = QualityRecord(
        uid=version.uid,
        client_id=client,
        split=Split.GATE,
        set_sha256=name,
        nll_by_row=reply.nll_by_row,
        tokens_by_row=reply.tokens_by_row,
        at_s=site.clock.wall(),
    )
    if all(map(math.isfinite, record.nll_by_row)):  # what is not may be measured anew
        await site.transact(lambda s: rounds.add_quality(s, record))
    log.info("version_scored", client=client, version=version.number, ce=round(record.ce, 4))
    return record


def measurement(rows: str, status: Status) -> str:
    """Return the name under which scores of these rows are kept: those of another type or cut are others."""
    return hashlib.sha256(f"{rows} {status.dtype} {status.row_tokens}".encode()).hexdigest()


async def wait_served(site: Site, version: VersionRecord, current: RoundRecord, *, backbone: str) -> float | None:
    """Wait until every live replica of the backbone serves ``version``; return when the last one began to.

    In Unix seconds; None if some replica still does not when ``serve_wait_s`` is over.
    """
    clock, limit_s = site.clock, site.settings.rounds.serve_wait_s
    started_s = clock.monotonic()
    while True:
        live = await site.fleet()
        fleet = ready(live, backbone)
        served = {r.id: beat.active.get(version.adapter, "") for r, beat in live}
        # A local version that descends from it, such as 12+8, counts: the flip has been.
        behind = [r.id for r in fleet if served[r.id].split("+")[0] != str(version.number)]
        if fleet and not behind:
            times = await asyncio.gather(*(_flipped_s(site, r.id, version) for r in fleet))
            known = [at_s for at_s in times if at_s is not None and at_s >= current.started_s]
            return max(known) if len(known) == len(fleet) else clock.wall()
        if clock.monotonic() - started_s > limit_s:
            log.warning("version_not_served_everywhere", version=version.number, behind=behind)
            return None
        await asyncio.sleep(site.settings.rounds.poll_s)


async def _flipped_s(site: Site, replica_id: ReplicaId, version: VersionRecord) -> float | None:
    """Return when a replica made ``version`` its active one, by its own record."""
    try:
        status = await (await site.replica(replica_id)).status()
    except CollmError:
        return None
    return max((swap.at_s for swap in status.swaps if swap.uid == version.uid), default=None)
