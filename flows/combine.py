"""From the clients' updates to a registered candidate: check, aggregate, store, register."""

import asyncio
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from adapters.aggregate import STRATEGIES
from adapters.model import ClientUpdate, LoraWeights, Manifest
from adapters.ports import Aggregate, Aggregator
from adapters.updates import UPDATES, VERSIONS
from adapters.weights import from_bytes, max_bytes, read_update, to_bytes, version_uid
from db import adapters, rounds
from db.records import AdapterRecord, Factor, RoundRecord, UpdateRecord, VersionRecord, VersionState
from flows.site import Site
from infra.errors import AdapterError, NotEnoughClients, RoundError, UpdateRejected

MAX_VERSION_BYTES = 1 << 30
"""Cap on a version's file, which we wrote ourselves."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """A round's aggregate and where it lies."""

    aggregate: Aggregate
    accepted: int
    store_key: str


def strategy_of(name: str, factor: Factor) -> Aggregator:
    """Return the strategy ``name``; or, for a round that was planned under another one, one that trains its factor."""
    return next(s for s in (STRATEGIES[name], *STRATEGIES.values()) if factor in (s.factor(1), s.factor(2)))


async def combine(site: Site, adapter: AdapterRecord, current: RoundRecord) -> Combined:
    """Check every update, aggregate those that pass in the clients' order, and store the result; deterministic.

    Raises ``NotEnoughClients`` with every refusal's reason, ``RoundError`` if nothing was learnt.
    """
    base = await base_weights(site, adapter, current)
    good: list[ClientUpdate] = []
    refused: list[str] = []
    for record in await site.transact(lambda s: rounds.updates(s, current.id)):
        reason = ""
        try:
            good.append(await asyncio.to_thread(check_update, site, base, current, record))
        except (UpdateRejected, AdapterError) as e:
            reason = e.message
            refused.append(f"{record.client_id}: {reason}")
            log.warning("update_refused", client=record.client_id, reason=reason)
        await judge_update(site, record, reason)
    if len(good) < max(1, current.plan.min_clients):
        why = "; ".join(refused) or "none came in"
        raise NotEnoughClients(f"{len(good)} sound updates, {current.plan.min_clients} are needed ({why})")
    strategy = strategy_of(site.settings.rounds.strategy, current.plan.factor)
    result = await asyncio.to_thread(strategy.aggregate, base, good)
    key = await asyncio.to_thread(lambda: site.store.put(VERSIONS, to_bytes(result.weights)))
    return Combined(aggregate=result, accepted=len(good), store_key=key)


async def judge_update(site: Site, record: UpdateRecord, reason: str) -> None:
    """Write down why an update was refused; empty: it was accepted."""
    await site.transact(lambda s: rounds.judge_update(s, record.round_id, record.client_id, not reason, reason))


def check_update(site: Site, base: LoraWeights, current: RoundRecord, record: UpdateRecord) -> ClientUpdate:
    """Return an update's tensors. Raises ``UpdateRejected`` (or what the store raises) that says what is wrong."""
    if record.base_uid != current.base_uid:
        raise UpdateRejected(f"it descends from {record.base_uid[:12]}, the round's base is {current.base_uid[:12]}")
    if record.factor != current.plan.factor:
        raise UpdateRejected(f"it trained factor {record.factor}, the round's is {current.plan.factor}")
    if record.tokens <= 0:
        raise UpdateRejected("it trained no token")
    if record.store_key != f"{UPDATES}/{record.sha256}":
        raise UpdateRejected("its key does not name its hash")
    data = site.store.get(record.store_key, max_bytes=max_bytes({n: t.shape for n, t in base.tensors.items()}))
    tensors = read_update(data, base=base, factor=current.plan.factor, max_norm=site.settings.rounds.max_norm)
    return ClientUpdate(
        round_id=current.id,
        client_id=record.client_id,
        base_uid=record.base_uid,
        factor=record.factor,
        # A client that trained beyond what was asked counts no more for it.
        tokens=min(record.tokens, current.plan.tokens),
        tensors=tensors,
    )


async def base_weights(site: Site, adapter: AdapterRecord, current: RoundRecord) -> LoraWeights:
    """Return the factors that the round started from; we stored them ourselves, under their hash."""
    version = await site.transact(lambda s: adapters.version(s, current.base_uid))
    data = await asyncio.to_thread(lambda: site.store.get(version.store_key, max_bytes=MAX_VERSION_BYTES))
    return await asyncio.to_thread(lambda: from_bytes(data, adapter.spec, header_shapes(data)))


def header_shapes(data: bytes) -> Manifest:
    """Return the tensors' shapes that a safetensors file declares."""
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, dict[str, Sequence[int]]] = json.loads(data[8 : 8 + length])
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


async def register(site: Site, adapter: AdapterRecord, current: RoundRecord, combined: Combined) -> VersionRecord:
    """Register the candidate as the adapter's next version, alias shadow; idempotent by its uid."""
    weights = combined.aggregate.weights
    uid = version_uid(adapter.backbone, weights)
    if uid == current.base_uid:
        raise RoundError("the clients' updates leave the base as it was")
    error = combined.aggregate.error
    registered = await asyncio.to_thread(
        lambda: site.registry.register(
            adapter.name,
            uid,
            weights,
            base_model=site.settings.model.name,
            tags={
                "round": current.id,
                "parent": current.base_uid,
                "backbone": adapter.backbone,
                "factor": current.plan.factor.value,
                "clients": str(combined.accepted),
                "aggregation_error": f"{error:.6g}",
            },
            metrics={"aggregation_error": error} if math.isfinite(error) else {},
        )
    )
    version = VersionRecord(
        uid=uid,
        adapter=adapter.name,
        number=registered.number,
        parent_uid=current.base_uid,
        round_id=current.id,
        state=VersionState.CANDIDATE,
        store_key=combined.store_key,
        mlflow_model_id=registered.model_id,
        created_s=site.clock.wall(),
    )
    await site.transact(lambda s: adapters.add_version(s, version))
    log.info("candidate_registered", adapter=adapter.name, version=version.number, uid=uid)
    return version
