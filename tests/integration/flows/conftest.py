"""A real Prefect server, real Postgres, and clients over HTTP that "train" towards or away from a goal."""

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psycopg
import pytest
import uvicorn
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.memory import MemoryStore
from adapters.model import LoraWeights
from adapters.registry import MlflowRegistry
from adapters.updates import FsUpdateStore
from adapters.weights import from_bytes, manifest, of_factor, update_bytes
from db import adapters, replicas
from db.records import AdapterRecord, Factor, Heartbeat, ReplicaId, ReplicaRecord
from db.session import Database
from flows.bootstrap import Backbone, bootstrap
from flows.site import Site, open_site
from infra.clock import SystemClock
from infra.errors import CollmError
from infra.process import Child
from infra.settings import ControllerSettings, RoundSettings, Settings, to_environ
from serving.wire import tgi
from serving.wire.control import RoundBody, RoundStatus, ScoreBody, ScoreReply, StageBody, Status, Swap, VersionBody

TOKEN = "token of the tests"
ROWS = 24
BACKBONE = Backbone(
    name="tiny",
    sha256="b" * 64,
    shapes={f"model.layers.{i}.self_attn.{p}_proj": (12, 16) for i in range(2) for p in "qv"},
)


@pytest.fixture(scope="session")
def prefect_api_url(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real Prefect server on Postgres."""
    with psycopg.connect(postgres_url.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE prefect")
    folder = tmp_path_factory.mktemp("prefect")
    port = free_port()
    server = Child(
        name="prefect",
        argv=[sys.executable, "-P", "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        log=folder / "log",
        environ={
            **os.environ,
            "PREFECT_HOME": str(folder),
            "PREFECT_API_DATABASE_CONNECTION_URL": postgres_url.replace("+psycopg", "+asyncpg") + "prefect",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        },
    )
    server.start()
    try:
        deadline = time.monotonic() + 90
        url = f"http://127.0.0.1:{port}/api"
        while not answers(f"{url}/health"):
            assert server.running, server.last_lines(20)
            assert time.monotonic() < deadline, server.last_lines(20)
            time.sleep(0.1)
        yield url
    finally:
        server.stop()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=2.0).status_code == 200
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class FakeClient:
    """A replica's control API. What it does in a round is set by the test."""

    id: str
    store: FsUpdateStore
    adapter: AdapterRecord
    steps: float = 0.3
    """How far its training goes towards the goal; below zero: away from it."""
    seconds: float = 0.0
    hang: bool = False
    """Trains for ever."""
    fails: str = ""
    """Its training ends with that reason."""
    spoil: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda tensors: tensors
    """Changes the update before it is stored."""
    dtype: str = "float32"
    unscorable: CollmError | None = None
    """What it answers when it is to score a candidate."""
    score_s: float = 0.0
    """How long it takes to score a candidate."""
    nll: float | None = None
    """A candidate's score of every row."""
    descends_from: str | None = None
    """What it says its shadow descends from, if not the round's base."""
    calls: int = 0
    """Requests about rounds, of any kind."""
    asked: list[RoundBody] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    staged: list[StageBody] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    begun_s: dict[str, float] = field(default_factory=dict)

    def start(self, body: RoundBody) -> RoundStatus:
        if body.round_id not in self.begun_s:
            self.asked.append(body)
            self.begun_s[body.round_id] = time.monotonic()
        return self.round(body.round_id)

    def round(self, round_id: str) -> RoundStatus:
        body = next(b for b in self.asked if b.round_id == round_id)
        ran_s = time.monotonic() - self.begun_s[round_id]
        told = {
            "round_id": round_id,
            "steps": 4,
            "loss_first": 1.0,
            "loss_last": 0.9,
            "seconds": ran_s,
            "base_uid": self.descends_from or body.base_uid,
        }
        running = RoundStatus(state="running", tokens=1, store_key=None, sha256=None, **told)
        if self.fails:
            return running.model_copy(update={"state": "failed", "reason": self.fails})
        if round_id in self.stopped:
            return running.model_copy(update={"state": "stopped"})
        if self.hang or ran_s < self.seconds:
            return running
        key = self.train(body)
        done = {"state": "done", "tokens": body.tokens, "store_key": key, "sha256": key.partition("/")[2]}
        return running.model_copy(update=done)

    def train(self, body: RoundBody) -> str:
        base = self.weights_of(body.base_uid)
        goal = goal_of(base)
        names = of_factor(base.tensors, Factor(body.factor))
        tensors = {n: base.tensors[n] + np.float32(self.steps) * (goal[n] - base.tensors[n]) for n in names}
        return self.store.put("updates", update_bytes(self.spoil(tensors)))

    def weights_of(self, uid: str) -> LoraWeights:
        return self.load(self.keys[uid])

    keys: dict[str, str] = field(default_factory=dict)

    def load(self, store_key: str) -> LoraWeights:
        data = self.store.get(store_key, max_bytes=1 << 24)
        return from_bytes(data, self.adapter.spec, manifest(BACKBONE.shapes, self.adapter.spec))

    def score(self, body: ScoreBody) -> ScoreReply:
        assert body.store_key is not None
        assert body.uid is not None
        self.scored.append(body.uid)
        self.keys[body.uid] = body.store_key
        candidate = body.uid != self.adapter.initial_uid
        if candidate:
            time.sleep(self.score_s)
        if candidate and self.unscorable is not None:
            raise self.unscorable
        weights = self.load(body.store_key)
        goal = goal_of(weights)
        far = float(np.mean([np.mean(np.abs(goal[n] - t)) for n, t in weights.tensors.items() if "lora_B" in n]))
        tokens = tuple(10 + 3 * i for i in range(ROWS))
        # Rows of different difficulty that gain differently.
        nll = tuple(t * (0.5 + 0.1 * i + far * (1 + 0.1 * (i % 5))) for i, t in enumerate(tokens))
        if candidate and self.nll is not None:
            nll = tuple(self.nll for _ in tokens)
        return ScoreReply(set_sha256=f"rows of {self.id}", nll_by_row=nll, tokens_by_row=tokens)

    def stage(self, body: StageBody) -> VersionBody:
        self.staged.append(body)
        self.keys[body.uid] = body.store_key
        self.swaps.append(
            Swap(
                at_s=time.time(),
                adapter=body.adapter,
                uid=body.uid,
                label=str(body.number),
                kind="federated",
                pause_ms=0.1,
                delay_ms=1.0,
                store_key=body.store_key,
            )
        )
        return VersionBody(
            adapter=body.adapter, uid=body.uid, number=body.number, label=str(body.number), state="staged"
        )

    def status(self) -> Status:
        return Status(
            replica_id=self.id,
            ready=True,
            model_id=BACKBONE.name,
            backbone=BACKBONE.sha256,
            dtype=self.dtype,
            row_tokens=256,
            queued=0,
            running=0,
            active=(),
            resident=(),
            pins={},
            round=None,
            train_tokens_total=0,
            train_tokens_decoding_total=0,
            train_share=0.0,
            training=True,
            publishing="off",
            swaps_total=len(self.swaps),
            swaps=tuple(self.swaps),
            splits={"gate": ROWS},
            set_sha256={"gate": f"rows of {self.id}"},
        )


def goal_of(weights: LoraWeights) -> Mapping[str, np.ndarray]:
    """What training goes towards; only B counts for the score, so that the goal does not depend on A."""
    return {name: np.full(t.shape, 0.5 if "lora_B" in name else 0.1, np.float32) for name, t in weights.tensors.items()}


def control_app(client: FakeClient, on_stage: Callable[[StageBody], None]) -> Starlette:
    """The control API's routes over a ``FakeClient``."""

    async def rounds(request: Request) -> Response:
        client.calls += 1
        return reply(client.start(RoundBody.model_validate_json(await request.body())))

    async def one(request: Request) -> Response:
        client.calls += 1
        round_id = request.path_params["id"]
        if round_id not in client.begun_s:
            return JSONResponse({"error": "no such round", "error_type": "round"}, 404)
        if request.method == "DELETE":
            client.stopped.append(round_id)
        return reply(client.round(round_id))

    async def score(request: Request) -> Response:
        body = ScoreBody.model_validate_json(await request.body())
        try:
            return reply(await asyncio.to_thread(client.score, body))
        except CollmError as e:
            return JSONResponse(tgi.error_body(e), e.status)

    async def stage(request: Request) -> Response:
        body = StageBody.model_validate_json(await request.body())
        answer = client.stage(body)
        await asyncio.to_thread(on_stage, body)
        return reply(answer)

    async def status(request: Request) -> Response:
        return reply(client.status())

    def reply(body: RoundStatus | ScoreReply | VersionBody | Status) -> Response:
        return Response(body.model_dump_json(), media_type="application/json")

    return Starlette(
        routes=[
            Route("/control/rounds", rounds, methods=["POST"]),
            Route("/control/rounds/{id}", one, methods=["GET", "DELETE"]),
            Route("/control/score", score, methods=["POST"]),
            Route("/control/stage", stage, methods=["POST"]),
            Route("/control/status", status),
        ]
    )


class Served:
    """A uvicorn server in a thread."""

    def __init__(self, app: Starlette) -> None:
        self.port = free_port()
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@dataclass
class World:
    """Two clients, a database, a store, settings; what a flow process needs to find them."""

    settings: Settings
    database: Database
    store: FsUpdateStore
    registry: MemoryStore | MlflowRegistry
    adapter: AdapterRecord
    clients: dict[str, FakeClient]
    servers: dict[str, Served] = field(default_factory=dict)

    @property
    def memory(self) -> MemoryStore:
        """The registry, to look at."""
        assert isinstance(self.registry, MemoryStore)
        return self.registry

    def site(self) -> AbstractAsyncContextManager[Site]:
        """In-process, with a registry in memory."""
        return open_site(self.settings, registry=lambda: self.registry)

    def environ(self) -> dict[str, str]:
        """For a process of its own."""
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(("COLLM_", "PREFECT_"))},
            **to_environ(self.settings),
            "PREFECT_API_URL": self.settings.prefect_api_url,
            "PREFECT_HOME": str(self.settings.state_dir / "prefect"),
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "DO_NOT_TRACK": "1",
        }

    def kill_client(self, name: str) -> None:
        """Its process is gone, its heartbeat goes stale."""
        self.servers.pop(name).stop()
        self.beat(name, at_s=time.time() - 100)

    def serve(self, name: str) -> None:
        """Start a client's API and announce it."""

        def staged(body: StageBody) -> None:
            self.beat(name, label=str(body.number))

        server = self.servers[name] = Served(control_app(self.clients[name], staged))
        record = ReplicaRecord(
            id=ReplicaId(name),
            url=f"http://127.0.0.1:{server.port}",
            backbone=BACKBONE.sha256,
            has_shard=True,
            started_s=time.time(),
        )
        with self.database.transaction() as s:
            replicas.announce(s, record)
        self.beat(name)

    def beat(self, name: str, *, label: str = "1", at_s: float | None = None) -> None:
        with self.database.transaction() as s:
            replicas.heartbeat(
                s, heartbeat(name, {self.adapter.name: label}, time.time() + 3600 if at_s is None else at_s)
            )


def heartbeat(name: str, active: Mapping[str, str], at_s: float) -> Heartbeat:
    return Heartbeat(
        replica_id=ReplicaId(name),
        at_s=at_s,
        ready=True,
        queued=0,
        running=0,
        queue_age_s=0,
        ttft_p95_s=0,
        tpot_p95_s=0,
        finished=0,
        violations=0,
        requests_total=0,
        tokens_per_s=0,
        train_tokens_total=0,
        train_tokens_decoding_total=0,
        train_share=0,
        round_id=None,
        active=active,
        active_uids={},
        resident=(),
        swaps_total=0,
        kv_used=0,
    )


@pytest.fixture
def world(database: Database, database_url: str, tmp_path: Path, prefect_api_url: str) -> Iterator[World]:
    """Everything up, the adapter ``code`` at version 1, a registry in memory."""
    settings = settings_of(database_url, tmp_path, prefect_api_url)
    with opened(settings, database, MemoryStore()) as made:
        yield made


@pytest.fixture
def mlflow_world(
    database: Database, database_url: str, tmp_path: Path, prefect_api_url: str, mlflow_url: str
) -> Iterator[World]:
    """The same with MLflow, and an adapter whose name no other test uses."""
    settings = settings_of(database_url, tmp_path, prefect_api_url)
    own = settings.rounds.model_copy(update={"adapter": f"code-{uuid.uuid4().hex[:6]}", "min_clients": 2})
    settings = settings.model_copy(update={"mlflow_url": mlflow_url, "rounds": own})
    with opened(settings, database, MlflowRegistry(mlflow_url)) as made:
        yield made


def settings_of(database_url: str, folder: Path, prefect_api_url: str) -> Settings:
    return Settings(
        database_url=database_url,
        state_dir=folder,
        cluster_token=SecretStr(TOKEN),
        prefect_api_url=prefect_api_url,
        controller=ControllerSettings(dead_after_s=30),
        rounds=RoundSettings(
            tokens=100,
            poll_s=0.05,
            lost_after_s=3.0,
            deadline_s=60,
            serve_wait_s=20,
            score_timeout_s=30,
            min_clients=1,
        ),
    )


@contextlib.contextmanager
def opened(settings: Settings, database: Database, registry: MemoryStore | MlflowRegistry) -> Iterator[World]:
    store = FsUpdateStore(settings.resolved_store_url())
    adapter = bootstrap(
        settings, BACKBONE, database=database, store=store, registry=lambda: registry, clock=SystemClock()
    )
    clients = {name: FakeClient(id=name, store=store, adapter=adapter) for name in ("replica-0", "replica-1")}
    made = World(settings, database, store, registry, adapter, clients)
    with database.transaction() as s:
        first = adapters.version(s, adapter.initial_uid)
    for name, client in clients.items():
        client.keys[first.uid] = first.store_key
        made.serve(name)
    try:
        yield made
    finally:
        for server in made.servers.values():
            server.stop()


@pytest.fixture(autouse=True)
def prefect_environment(prefect_api_url: str, tmp_path: Path) -> Iterator[None]:
    """Flows that run in this process use the real server, and their results lie in the test's folder."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )

    with temporary_settings(
        {PREFECT_API_URL: prefect_api_url, PREFECT_HOME: tmp_path / "prefect", PREFECT_LOGGING_TO_API_ENABLED: False}
    ):
        yield
    gc.collect()  # what Prefect leaves open is noticed here, not in somebody else's test
