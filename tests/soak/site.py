"""The replica under test: ``collm replica`` as a process, with an embedded Postgres that directs it."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psycopg
from pydantic import SecretStr

from adapters import weights as codec
from adapters.model import LoraWeights
from adapters.updates import VERSIONS, FsUpdateStore
from db import adapters
from db.migrate import upgrade
from db.records import (
    AdapterName,
    AdapterRecord,
    Epoch,
    LoraSpec,
    Publishing,
    VersionRecord,
    VersionState,
    VersionUid,
)
from db.session import Database
from infra.errors import CollmError
from infra.postgres import Postgres
from infra.process import Child
from infra.services import HUGE_PAGES
from infra.settings import Settings, load_settings, to_environ
from serving.datasets import sample_shards
from serving.replica.main import Backbone

ROWS, QUEUE = 8, 16
RANK, ALPHA = 4, 8.0
NOISE = 0.03
"""Of the versions' second factors: enough to change most answers, too little to make them babble."""
READY_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Everything that a soak needs to reach."""

    settings: Settings
    database: Database
    store: FsUpdateStore
    spec: LoraSpec
    backbone: Backbone
    replica: Child
    log: Path

    @property
    def token(self) -> str:
        """Of the control API."""
        return self.settings.required_token()

    @property
    def url(self) -> str:
        """Of the replica."""
        return f"http://{self.settings.replica.host}:{self.settings.replica.port}"


def soak_settings(folder: Path, database_url: str, *, places: int, fake: bool) -> Settings:
    """Return the replica's settings: the environment's model, small queue and few places.

    Answers are compared token by token: float32 unless the environment says otherwise, and then batch-invariant.
    """
    base = load_settings()
    dtype = "float32" if base.model.dtype == "auto" else base.model.dtype
    replica = base.replica.model_copy(
        update={
            "id": "soak",
            "port": free_port(),
            "rows": ROWS,
            "max_queue": QUEUE,
            "places": places,
            "shard": sample_shards()[0],
            "gate_rows": 16,
            "report_rows": 16,
            "batch_invariant": dtype != "float32",
            "fake_engine": fake,
            "fake_step_s": 0.01 if fake else 0.0,
            "fake_slice_s": 0.002 if fake else 0.0,
        }
    )
    return base.model_copy(
        update={
            "model": base.model.model_copy(update={"dtype": dtype}),
            "replica": replica,
            "rounds": base.rounds.model_copy(update={"rank": RANK, "alpha": ALPHA}),
            "state_dir": folder,
            "store_url": (folder / "store").as_uri(),
            "database_url": database_url,
            "cluster_token": SecretStr("soak"),
            "log_json": True,
        }
    )


@contextmanager
def running(folder: Path, names: list[AdapterName], *, places: int, fake: bool) -> Iterator[Site]:
    """Start everything, with a first version of each adapter in force; stop it at the end."""
    folder.chmod(0o711)  # as root, Postgres runs as another account, which must get at its data
    with Postgres(folder / "postgres", port=free_port(), options={"fsync": "off"}) as server:
        with psycopg.connect(server.url("postgres").replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("CREATE DATABASE collm")
        upgrade(server.url())
        settings = soak_settings(folder, server.url(), places=places, fake=fake)
        backbone = Backbone.of(settings)
        spec = LoraSpec(rank=RANK, alpha=ALPHA, targets=codec.targets(backbone.shapes))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("COLLM_")}
        log = folder / "replica.log"
        site = Site(
            settings=settings,
            database=Database(server.url()),
            store=FsUpdateStore(settings.resolved_store_url()),
            spec=spec,
            backbone=backbone,
            replica=Child(
                name="replica",
                argv=[Path(sys.executable).with_name("collm"), "replica"],
                log=log,
                environ={"GLIBC_TUNABLES": HUGE_PAGES} | environ | to_environ(settings),
            ),
            log=log,
        )
        try:
            for number, name in enumerate(names):
                _create(site, name, seed=number)
            site.replica.start()
            _wait_ready(site)
            yield site
        finally:
            site.replica.stop()
            site.database.close()


def new_version(site: Site, *, seed: int) -> tuple[VersionUid, str]:
    """Put weights that nobody else makes into the store; return their uid and key."""
    random = np.random.default_rng([7, seed])
    fresh = codec.initial(site.backbone.shapes, site.spec, seed)
    tensors = {
        name: (NOISE * random.standard_normal(tensor.shape)).astype(np.float32)
        if name.endswith(codec.B_SUFFIX)
        else tensor
        for name, tensor in fresh.tensors.items()
    }
    made = LoraWeights(spec=site.spec, tensors=tensors)
    return codec.version_uid(site.backbone.sha256, made), site.store.put(VERSIONS, codec.to_bytes(made))


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _create(site: Site, name: AdapterName, *, seed: int) -> None:
    uid, key = new_version(site, seed=seed)
    first = VersionRecord(
        uid=uid,
        adapter=name,
        number=1,
        parent_uid=None,
        round_id=None,
        state=VersionState.PROMOTED,
        store_key=key,
        mlflow_model_id=None,
        created_s=time.time(),
    )
    record = AdapterRecord(
        name=name,
        backbone=site.backbone.sha256,
        spec=site.spec,
        initial_uid=uid,
        desired_uid=uid,
        previous_uid=None,
        epoch=Epoch(1),
        training=True,
        publishing=Publishing.GUARDED,
    )
    with site.database.transaction() as s:
        adapters.create(s, record, first)


def _wait_ready(site: Site) -> None:
    deadline = time.monotonic() + READY_S
    while site.replica.running and time.monotonic() < deadline:
        try:
            if httpx.get(f"{site.url}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise CollmError(f"the replica did not get ready:\n{site.replica.last_lines(20)}")
