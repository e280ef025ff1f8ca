"""``collm bootstrap``: the adapter and its first version, wherever there is none yet.

Store, registry, records, in that order: each step is idempotent and the record comes last, so that a run after a
crash finishes what is missing and what is recorded is always there.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from adapters.ports import AdapterStore, UpdateStore
from adapters.updates import VERSIONS, FsUpdateStore
from adapters.weights import initial, linear_shapes, targets, to_bytes, version_uid
from db import adapters
from db.records import (
    AdapterName,
    AdapterRecord,
    Epoch,
    LoraSpec,
    Publishing,
    RoundId,
    VersionRecord,
    VersionState,
)
from db.session import Database, OperationalError
from flows.outbox import project
from flows.plan import round_seed
from flows.site import open_registry
from infra import log as logging
from infra.clock import Clock, SystemClock
from infra.errors import ConfigError, UnknownAdapter
from infra.models import backbone_sha256, model_dir
from infra.settings import Settings, load_settings
from serving.replica.fake_engine import FAKE_BACKBONE, FAKE_MODEL_ID, FAKE_SHAPES

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """What a first version depends on."""

    name: str
    sha256: str
    shapes: Mapping[str, tuple[int, int]]
    """Decoder linear → [out, in]."""


def backbone_of(settings: Settings) -> Backbone:
    """Return the backbone that the settings name; only its headers are read."""
    if settings.replica.fake_engine:
        return Backbone(name=FAKE_MODEL_ID, sha256=FAKE_BACKBONE, shapes=FAKE_SHAPES)
    folder = model_dir(settings)
    return Backbone(name=settings.model.name, sha256=backbone_sha256(folder), shapes=linear_shapes(folder))


def bootstrap(
    settings: Settings,
    backbone: Backbone,
    *,
    database: Database,
    store: UpdateStore,
    registry: Callable[[], AdapterStore],
    clock: Clock,
) -> AdapterRecord:
    """Return the adapter, created if need be: rank and alpha of the settings, every decoder linear, B zero, A seeded.

    Raises ``ConfigError`` if it exists for another backbone or with another rank or alpha.
    """
    name = AdapterName(settings.rounds.adapter)
    spec = LoraSpec(rank=settings.rounds.rank, alpha=settings.rounds.alpha, targets=targets(backbone.shapes))
    with database.transaction() as s:
        try:
            existing = adapters.get(s, name)
        except UnknownAdapter:
            existing = None
    if existing is not None:
        _check(existing, spec, backbone)

    weights = initial(backbone.shapes, spec, round_seed(RoundId(f"initial/{name}")))
    uid = version_uid(backbone.sha256, weights)
    key = store.put(VERSIONS, to_bytes(weights))
    if existing is None:
        tags = {"backbone": backbone.sha256, "decision": "initial"}
        registered = registry().register(name, uid, weights, base_model=backbone.name, tags=tags, metrics={})
        first = VersionRecord(
            uid=uid,
            adapter=name,
            number=registered.number,
            parent_uid=None,
            round_id=None,
            state=VersionState.PROMOTED,
            store_key=key,
            mlflow_model_id=registered.model_id,
            created_s=clock.wall(),
        )
        created = AdapterRecord(
            name=name,
            backbone=backbone.sha256,
            spec=spec,
            initial_uid=uid,
            desired_uid=uid,
            previous_uid=None,
            epoch=Epoch(1),
            training=True,
            publishing=Publishing.GUARDED,
        )
        with database.transaction() as s:
            adapters.create(s, created, first)
        log.info("adapter_created", adapter=name, version=first.number, uid=uid)
    project(database, registry)
    with database.transaction() as s:
        return adapters.get(s, name)


def _check(existing: AdapterRecord, spec: LoraSpec, backbone: Backbone) -> None:
    if existing.backbone != backbone.sha256:
        raise ConfigError(
            f"COLLM_MODEL__NAME: adapter {existing.name!r} belongs to backbone {existing.backbone[:12]}, "
            f"{backbone.name} is {backbone.sha256[:12]}"
        )
    if existing.spec != spec:
        raise ConfigError(
            f"COLLM_ROUNDS__RANK, COLLM_ROUNDS__ALPHA: adapter {existing.name!r} has rank {existing.spec.rank} and "
            f"alpha {existing.spec.alpha:g} for life"
        )


def main(argv: list[str]) -> int:
    """``collm bootstrap``."""
    argparse.ArgumentParser(
        prog="collm bootstrap", description="Create the adapter and its first version where there is none."
    ).parse_args(argv)
    settings = load_settings()
    logging.configure(settings)
    database = Database(settings.required_database_url(), pool_size=1)
    try:
        record = bootstrap(
            settings,
            backbone_of(settings),
            database=database,
            store=FsUpdateStore(settings.resolved_store_url()),
            registry=lambda: open_registry(settings),
            clock=SystemClock(),
        )
    except OperationalError as e:
        print(f"the database does not answer: {str(e).splitlines()[0]}", file=sys.stderr)
        return 1
    finally:
        database.close()
    print(f"adapter {record.name}: epoch {record.epoch}, version {record.desired_uid[:12]} in force")
    return 0
