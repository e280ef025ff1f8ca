"""What a replica says of itself: to flows (status) and to the controller (heartbeat). Engine thread only."""

from adapters.model import Version
from db.records import AdapterName, Heartbeat, ReplicaId
from serving.replica.loop import Replica
from serving.wire.control import Status


def status(replica: Replica) -> Status:
    """Return the answer of ``GET /control/status``."""
    background, residency = replica.background, replica.residency
    mode = background.directives.mode(AdapterName(replica.settings.rounds.adapter))
    held = {split: rows for split, rows in background.splits.items() if rows}
    return Status(
        replica_id=replica.settings.replica.id,
        ready=replica.ready,
        model_id=replica.engine.shape.model_id,
        backbone=replica.engine.shape.backbone,
        dtype=replica.engine.shape.dtype,
        row_tokens=replica.settings.replica.row_tokens,
        queued=replica.scheduler.queued,
        running=replica.scheduler.running,
        active=tuple(residency.body(v.uid) for v in residency.active()),
        resident=tuple(residency.body(v.uid) for v in residency.resident()),
        places=residency.places.count,
        waiting=residency.awaited(),
        pins=dict(residency.places.pins()),
        round=None if background.shadow is None else background.shadow.status(),
        train_tokens_total=background.train_tokens,
        train_tokens_decoding_total=background.train_tokens_decoding,
        train_share=replica.stats.window(replica.clock.monotonic()).train_share,
        training=mode.training,
        publishing=mode.publishing.value,
        swaps_total=residency.swaps_total,
        swaps=tuple(s.model_copy(update={"store_key": background.archived.get(s.uid)}) for s in residency.swaps),
        splits={split.value: len(rows) for split, rows in held.items()},
        set_sha256={split.value: name for split, name in background.set_names.items()},
    )


def heartbeat(replica: Replica) -> Heartbeat:
    """Return the slot's heartbeat."""
    now_s = replica.clock.monotonic()
    window, background = replica.stats.window(now_s), replica.background
    active, shadow = replica.residency.active(), replica.background.shadow
    return Heartbeat(
        replica_id=ReplicaId(replica.settings.replica.id),
        at_s=replica.clock.wall(),
        ready=replica.ready,
        queued=replica.scheduler.queued,
        running=replica.scheduler.running,
        queue_age_s=replica.scheduler.queue_age_s(now_s),
        ttft_p95_s=window.ttft_p95_s,
        tpot_p95_s=window.tpot_p95_s,
        finished=window.finished,
        violations=window.violations,
        requests_total=replica.stats.requests_total,
        tokens_per_s=window.tokens_per_s,
        train_tokens_total=background.train_tokens,
        train_tokens_decoding_total=background.train_tokens_decoding,
        train_share=window.train_share,
        round_id=shadow.round_id if shadow is not None and shadow.state == "running" else None,
        active={v.adapter: v.label for v in active},
        active_uids={v.adapter: v.uid for v in active},
        resident=tuple(_name(v) for v in replica.residency.resident()),
        swaps_total=replica.residency.swaps_total,
        kv_used=replica.scheduler.kv_used,
    )


def _name(version: Version) -> str:
    return f"{version.adapter}:{version.label}"
