"""The process of a replica: engine in the main thread, HTTP, database and loading in threads of their own."""

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType

import structlog
import uvicorn
from starlette.applications import Starlette

from adapters import weights as codec
from adapters.model import Version
from adapters.updates import FsUpdateStore
from db.records import AdapterName, Epoch, LoraSpec, Split
from db.session import Database
from infra.clock import Clock, SystemClock
from infra.errors import ConfigError, EngineDead
from infra.log import configure
from infra.metrics import ReplicaMetrics
from infra.models import backbone_sha256, model_dir
from infra.settings import Settings, load_settings
from serving.ports import Engine
from serving.replica.api import make_app
from serving.replica.checkpoints import Checkpoints
from serving.replica.desk import Desk
from serving.replica.directives import Governor
from serving.replica.fake_engine import FAKE_BACKBONE, FAKE_SHAPES, FakeEngine, FakeTokenizer
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.replica.text import Tokenizer
from serving.replica.tokenizer import HubTokenizer
from serving.rows import Row
from serving.shard import load_shard

log = structlog.get_logger()

COPIER_NICE = 10
"""Priority of the thread that copies versions into their places: below the engine's."""
STOP_S = 3.0
"""Each part of the process gets about this long to end after the loop has."""
KEEPALIVE_S = 30
"""Longer than gateways keep idle connections, so that none is reused while it closes."""


def main(argv: list[str]) -> int:
    """Run a replica until SIGTERM or SIGINT. 0: stopped in good order; 1: the engine died; 2: a setting is wrong."""
    argparse.ArgumentParser(
        prog="collm replica", description="Serve and fine-tune one backbone. Settings: COLLM_* variables."
    ).parse_args(argv)
    settings = load_settings()
    configure(settings)
    return serve(settings)


def serve(settings: Settings) -> int:
    """Run a replica with these settings, in the process's main thread."""
    settings.required_token()
    listener = _listen(settings)
    splits = _splits(settings)
    backbone = Backbone.of(settings)
    loader = Loader(
        FsUpdateStore(settings.resolved_store_url()),
        shapes=backbone.shapes,
        backbone=backbone.sha256,
        checkpoints=Checkpoints.of(settings.state_dir.expanduser().resolve(), settings.replica.id),
    )
    clock, desk, exposed = SystemClock(), Desk(), ReplicaMetrics()
    http = Http(make_app(desk, loader, backbone.tokenizer, settings, clock, exposed), listener)
    copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copier", initializer=step_back)
    stop = StopSignal()
    governor: Governor | None = None
    http.start()
    try:
        replica = Replica(
            backbone.engine(settings, clock),
            backbone.tokenizer,
            loader,
            settings,
            clock,
            splits=splits,
            deliver=desk.deliver,
            metrics=exposed,
            copier=copier,
            governed=settings.database_url is not None,
        )
        stop.watch(replica)
        if settings.database_url is None:
            start_alone(replica, loader)
        desk.replica = replica
        if settings.database_url is not None:
            governor = Governor(
                replica,
                loader,
                Database(settings.database_url, pool_size=2),
                url=public_url(settings),
                has_shard=bool(splits),
            )
            governor.start()
        log.info("replica_started", replica_id=settings.replica.id, port=settings.replica.port)
        replica.run()
    except EngineDead as error:
        log.error("engine_dead", error=error.message)
        return 1
    finally:
        if governor is not None:
            governor.stop(STOP_S)
        http.stop()
        copier.shutdown(cancel_futures=True)
        loader.close()
    log.info("replica_stopped", replica_id=settings.replica.id)
    return 0


def step_back() -> None:
    """Let the calling thread take what the engine's leaves; on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPIER_NICE)


def public_url(settings: Settings) -> str:
    """Return the address by which others reach this replica."""
    host = settings.replica.host
    bracketed = f"[{host}]" if ":" in host else host
    return settings.replica.public_url or f"http://{bracketed}:{settings.replica.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """What the settings name: a model folder, or the fake engine."""

    sha256: str
    shapes: Mapping[str, tuple[int, int]]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, settings: Settings) -> "Backbone":
        """Read headers only."""
        if settings.replica.fake_engine:
            return cls(sha256=FAKE_BACKBONE, shapes=FAKE_SHAPES, tokenizer=FakeTokenizer())
        folder = model_dir(settings)
        return cls(sha256=backbone_sha256(folder), shapes=codec.linear_shapes(folder), tokenizer=HubTokenizer(folder))

    def engine(self, settings: Settings, clock: Clock) -> Engine:
        """Load the model."""
        replica = settings.replica
        if replica.fake_engine:
            return FakeEngine(
                clock,
                rows=replica.rows,
                max_total_tokens=replica.max_total_tokens,
                places=replica.places,
                step_s=replica.fake_step_s,
                slice_s=replica.fake_slice_s,
            )
        # Here, not above: torch and transformers take seconds, and a fake replica needs neither.
        from serving.replica.build import load_engine

        return load_engine(settings)


def start_alone(replica: Replica, loader: Loader) -> None:
    """Without a database: serve a fresh version of the default adapter until the control API brings another."""
    rounds = replica.settings.rounds
    adapter = AdapterName(rounds.adapter)
    spec = LoraSpec(rank=rounds.rank, alpha=rounds.alpha, targets=codec.targets(loader.shapes))
    loader.know(adapter, spec)
    weights = codec.initial(loader.shapes, spec, seed=0)
    uid = codec.version_uid(replica.engine.shape.backbone, weights)
    replica.residency.stage(Version(adapter=adapter, uid=uid, number=1), weights)
    replica.activate(adapter, uid, Epoch(1))


class Http(threading.Thread):
    """The HTTP server, in a thread with an event loop of its own."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        super().__init__(name="http", daemon=True)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEPALIVE_S,
            timeout_graceful_shutdown=round(STOP_S),
        )
        self._server = uvicorn.Server(config)
        self._listener = listener

    def run(self) -> None:
        """Serve until stopped."""
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """Let answers that have ended reach their callers, then end."""
        self._server.should_exit = True
        self.join(2 * STOP_S)
        self._listener.close()


class StopSignal:
    """SIGTERM and SIGINT: at once while the model is loading, in good order afterwards."""

    def __init__(self) -> None:
        self._replica: Replica | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)

    def watch(self, replica: Replica) -> None:
        """From now on there is something to stop."""
        self._replica = replica

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._replica is None:
            raise SystemExit(0)
        self._replica.stop()


def _listen(settings: Settings) -> socket.socket:
    """Take the port before anything slow begins. Raises ``ConfigError`` if it is taken."""
    host, port = settings.replica.host, settings.replica.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"COLLM_REPLICA__PORT: port {port} on {host}: {error.strerror}") from None
    return listener


def _splits(settings: Settings) -> Mapping[Split, tuple[Row, ...]]:
    replica = settings.replica
    if replica.shard is None:
        return {}
    return load_shard(replica.shard, gate=replica.gate_rows, report=replica.report_rows)
