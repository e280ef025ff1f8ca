"""A round's moves in the records: opening, advancing, settling, aborting. Each is one transaction, safe to repeat."""

import asyncio
import math
import uuid
from typing import Unpack

import structlog
from sqlalchemy.orm import Session

from adapters.aggregate import STRATEGIES
from db import adapters, rounds
from db.records import AdapterRecord, RoundId, RoundRecord, RoundState, VersionRecord
from db.rounds import RoundFields
from flows import clients
from flows.decision import GateDecision
from flows.plan import Sizer, factor_turn, plan_round, select_clients
from flows.round_state import check_move, is_final
from flows.site import Site
from infra.errors import RoundTaken, VersionConflict

ACTOR = "federated_round"
EXPIRE_DEADLINES = 5
"""An unfinished round older than this many of its deadlines is not worth going on with."""
log = structlog.get_logger()


async def begin(
    site: Site, record: AdapterRecord, round_id: RoundId | None, sizer: Sizer, *, flow_run_id: str | None
) -> RoundRecord:
    """Return the round to work on: the unfinished one, or a new one.

    Raises ``NotEnoughClients``, or ``VersionConflict`` if ``round_id`` names a round that cannot be worked on now.
    """
    latest = await site.transact(lambda s: rounds.latest(s, record.name))
    if latest is not None and not is_final(latest.state):
        age_s = await age(site, latest)
        if age_s > EXPIRE_DEADLINES * latest.plan.deadline_s:
            latest = await abort(site, latest, f"given up: left unfinished for {age_s:.0f} s")
        elif round_id in (None, latest.id):
            log.info("round_resumed", round_id=latest.id, state=latest.state.value)
            return await move(site, latest, latest.state, flow_run_id=flow_run_id)
        else:
            raise VersionConflict(f"round {latest.id} is unfinished")
    if latest is not None and latest.state is not RoundState.PROMOTED:
        # Whoever ended it may have died before its clients heard: their local versions would stay in force.
        await release(site, latest)
    if round_id is not None and await site.transact(lambda s: rounds.find(s, round_id)) is not None:
        raise VersionConflict(f"round {round_id} is over")

    settings, fleet = site.settings.rounds, await site.fleet()
    number = 1 if latest is None else latest.number + 1
    # The random part: a number alone would also name the cached results of a database that is gone.
    new_id = round_id or RoundId(f"{record.name}-{number}-{uuid.uuid4().hex[:6]}")
    decided = await site.transact(lambda s: rounds.decided_since_left(s, record.name, record.initial_uid))
    turn = factor_turn(decided, initial_uid=record.initial_uid, base_uid=record.desired_uid)
    planned = RoundRecord(
        id=new_id,
        adapter=record.name,
        number=number,
        state=RoundState.PLANNED,
        base_uid=record.desired_uid,
        base_epoch=record.epoch,
        plan=plan_round(
            settings, round_id=new_id, factor=STRATEGIES[settings.strategy].factor(turn), size=sizer(settings, fleet)
        ),
        clients=select_clients(fleet, backbone=record.backbone, min_clients=settings.min_clients),
        candidate_uid=None,
        aggregation_error=None,
        ce_before=None,
        ce_after=None,
        reason="",
        started_s=site.clock.wall(),
        decided_s=None,
        served_s=None,
        flow_run_id=flow_run_id,
    )
    opened = await site.transact(lambda s: rounds.open_round(s, planned))
    log.info("round_opened", round_id=opened.id, clients=opened.clients, factor=opened.plan.factor.value)
    return opened


async def age(site: Site, current: RoundRecord) -> float:
    """Return for how many seconds the round could have gone on: a pause of training does not count."""
    now_s = site.clock.wall()
    paused_s = await site.transact(
        lambda s: adapters.paused_s(s, current.adapter, from_s=current.started_s, to_s=now_s)
    )
    return now_s - current.started_s - paused_s


async def release(site: Site, current: RoundRecord) -> None:
    """Have the clients of a round that changed nothing return to the version in force; safe to repeat."""
    await asyncio.gather(*(clients.stop(site, current, client) for client in current.clients))


async def move(site: Site, current: RoundRecord, to: RoundState, **fields: Unpack[RoundFields]) -> RoundRecord:
    """Move the round on, in a transaction of its own. Raises as ``advance``."""
    return await site.transact(lambda s: advance(s, current, to, **fields))


def advance(s: Session, current: RoundRecord, to: RoundState, **fields: Unpack[RoundFields]) -> RoundRecord:
    """Move the round on and return it as it now stands; a move that was made already is no error.

    Raises ``RoundTaken`` if another process has taken the round elsewhere, ``RoundError`` if the move is illegal.
    """
    if to != current.state:
        check_move(current.state, to)
    moved = rounds.advance(s, current.id, expected=current.state, to=to, **fields)
    there = rounds.get(s, current.id)
    if not moved and there.state != to:
        raise RoundTaken(f"round {current.id} is {there.state.value}, not {current.state.value}: another run has it")
    return there


async def settle(site: Site, current: RoundRecord, candidate: VersionRecord, decision: GateDecision) -> RoundRecord:
    """Make the gate's decision true of version and round together.

    Raises ``VersionConflict`` if another version came into force meanwhile.
    """
    now_s = site.clock.wall()
    finite = math.isfinite(decision.ce_before) and math.isfinite(decision.ce_after)
    tags = {"ce_before": f"{decision.ce_before:.6f}", "ce_after": f"{decision.ce_after:.6f}"} if finite else {}

    def write(s: Session) -> RoundRecord:
        if decision.promote:
            adapters.promote(
                s,
                current.adapter,
                candidate.uid,
                expected_epoch=current.base_epoch,
                actor=ACTOR,
                reason=decision.reason,
                now_s=now_s,
                tags=tags,
            )
        else:
            adapters.reject(s, candidate.uid, reason=decision.reason, actor=ACTOR, now_s=now_s, tags=tags)
        return advance(
            s,
            current,
            RoundState.PROMOTED if decision.promote else RoundState.REJECTED,
            reason=decision.reason,
            ce_before=decision.ce_before if finite else None,
            ce_after=decision.ce_after if finite else None,
            decided_s=now_s,
        )

    return await site.transact(write)


async def abort(site: Site, current: RoundRecord, reason: str) -> RoundRecord:
    """End a round without a decision and reject its candidate, if it has one; a round that is over stays as it is."""
    now_s = site.clock.wall()

    def write(s: Session) -> RoundRecord:
        there = rounds.get(s, current.id)
        if is_final(there.state):
            return there
        for version in adapters.versions(s, there.adapter):
            if version.round_id == there.id:
                adapters.reject(s, version.uid, reason=f"round aborted: {reason}", actor=ACTOR, now_s=now_s)
        return advance(s, there, RoundState.ABORTED, reason=reason, decided_s=now_s)

    ended = await site.transact(write)
    log.warning("round_aborted", round_id=current.id, reason=reason)
    return ended
