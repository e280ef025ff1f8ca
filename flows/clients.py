"""One client's part of a round, from asking it to train to its update in the records."""

import asyncio
from collections.abc import Callable

import structlog

from db import rounds
from db.records import ClientId, ReplicaId, RoundRecord, UpdateRecord, VersionUid
from flows.pace import Pace
from flows.site import Site
from infra.errors import CollmError, RoundError, StaleUpdate, VersionConflict
from serving.wire.control import RoundBody, RoundStatus

log = structlog.get_logger()

OnProgress = Callable[[ClientId, RoundStatus], None]


def round_body(current: RoundRecord) -> RoundBody:
    """Return what a client is asked for."""
    plan = current.plan
    return RoundBody(
        round_id=current.id,
        adapter=current.adapter,
        base_uid=current.base_uid,
        epoch=current.base_epoch,
        factor=plan.factor.value,
        tokens=plan.tokens,
        rows_per_step=plan.rows_per_step,
        lr=plan.lr,
        lr_ratio=plan.lr_ratio,
        warmup_steps=plan.warmup_steps,
        max_grad_norm=plan.max_grad_norm,
        swap_every=plan.swap_every,
        seed=plan.seed,
        deadline_s=plan.deadline_s,
    )


async def train(site: Site, pace: Pace, current: RoundRecord, client: ClientId, seen: OnProgress) -> UpdateRecord:
    """Ask, follow, record; idempotent. Raises ``RoundError`` if the client has to be left out, or what ``pace`` raises.

    A client that is away, or not yet at the round's base, is asked again for ``lost_after_s``; one that came back
    without knowing the round is asked to start anew.
    """
    recorded = await site.transact(lambda s: rounds.update_of(s, current.id, client))
    if recorded is not None:
        return recorded
    try:
        status = await _follow(site, pace, current, client, seen)
    except (RoundError, StaleUpdate) as e:
        await stop(site, current, client)
        raise e if isinstance(e, StaleUpdate) else RoundError(f"{client}: {e.message}") from e
    if status.store_key is None or status.sha256 is None:
        raise RoundError(f"{client}: says it is done but names no update")
    update = UpdateRecord(
        round_id=current.id,
        client_id=client,
        base_uid=VersionUid(status.base_uid),
        factor=current.plan.factor,
        sha256=status.sha256,
        store_key=status.store_key,
        tokens=status.tokens,
        steps=status.steps,
        loss_first=status.loss_first or 0.0,
        loss_last=status.loss_last or 0.0,
        seconds=status.seconds,
        accepted=None,
    )
    try:
        await site.transact(lambda s: rounds.add_update(s, update))
    except VersionConflict:  # a restarted client trained anew: what came first counts
        return await site.transact(lambda s: rounds.update_of(s, current.id, client)) or update
    log.info("client_trained", client=client, tokens=status.tokens, steps=status.steps, loss=status.loss_last)
    return update


async def _follow(site: Site, pace: Pace, current: RoundRecord, client: ClientId, seen: OnProgress) -> RoundStatus:
    body = round_body(current)
    started, trouble_since_s = False, None
    replica = None
    while True:
        pace.check()
        try:
            if replica is None:
                replica = await site.replica(ReplicaId(client))
            status = await (replica.round(current.id) if started else replica.start_round(body))
        except CollmError as e:
            now_s = site.clock.monotonic()
            trouble_since_s = now_s if trouble_since_s is None else trouble_since_s
            if now_s - trouble_since_s > site.settings.rounds.lost_after_s:
                raise RoundError(e.message) from e
            # It may have restarted, at another address and without the round.
            started, replica = False, None
        else:
            started, trouble_since_s = True, None
            seen(client, status)
            if status.state == "done":
                return status
            if status.state != "running":
                raise RoundError(status.reason or f"training {status.state}")
        await asyncio.sleep(site.settings.rounds.poll_s)


async def stop(site: Site, current: RoundRecord, client: ClientId) -> None:
    """Tell a client to drop its shadow and return to the version in force; it may be gone."""
    try:
        replica = await site.replica(ReplicaId(client))
        await replica.stop_round(current.id)
    except CollmError as e:
        log.info("client_not_stopped", client=client, error=e.message)
