"""The gateway: TGI's contract in front of the fleet."""

import argparse
import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import assert_never

import httpx
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from db.session import Database
from infra import metrics
from infra.clock import Clock, SystemClock
from infra.errors import CollmError, NoReplica
from infra.log import configure
from infra.process import require_free_port
from infra.settings import Settings, load_settings
from serving.gateway.arrivals import ArrivalCounts
from serving.gateway.asgi import error_of
from serving.gateway.fleet import Fleet, Member
from serving.gateway.relay import UNREACHABLE, Found, Relay
from serving.gateway.watch import Watch
from serving.wire import tgi

log = structlog.get_logger()

PROBE_S = 0.25
"""Between two probes of a replica that is down."""
PROBE_UP_EVERY = 4
"""One that is up is probed every so many times only."""
SLOW_PROBES = 3
"""Probes in a row without an answer after which a replica counts as hung; one is often just a busy machine."""
KEEPALIVE_S = 4.0
"""Less than replicas keep idle connections: one that is reused while it closes costs a retry."""
SHUTDOWN_S = 10


class Gateway:
    """One gateway process."""

    def __init__(self, settings: Settings, fleet: Fleet, arrivals: ArrivalCounts, clock: Clock) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics.GatewayMetrics()
        self._http = httpx.AsyncClient(
            headers={"accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=settings.gateway.connect_timeout_s, write=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
        )
        self._relay = Relay(settings, fleet, self._http, arrivals, self._metrics, clock)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/", Generate(self._relay, stream=None), methods=["POST"]),
            Route("/generate", Generate(self._relay, stream=False), methods=["POST"]),
            Route("/generate_stream", Generate(self._relay, stream=True), methods=["POST"]),
            *(Route(path, self.health, methods=["GET"]) for path in ("/", "/health", "/ping")),
            Route("/info", self.info, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]
        handlers: dict[type[Exception], Callable[[Request, Exception], Response]] = {
            HTTPException: no_route,
            Exception: internal_error,
        }
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    async def health(self, _: Request) -> Response:
        """200 if at least one replica answers."""
        if self._fleet.up():
            return Response()
        return JSONResponse(tgi.unhealthy_body("no replica is ready"), status_code=503)

    async def info(self, _: Request) -> Response:
        """What the replicas serve, as one of them says it."""
        for member in self._fleet.up().values():
            with contextlib.suppress(*UNREACHABLE):
                answer = await self._http.get(f"{member.url}/info", timeout=self._settings.gateway.connect_timeout_s)
                if answer.status_code == 200:
                    limits = {"max_concurrent_requests": self._settings.gateway.max_inflight, "router": "collm-gateway"}
                    return JSONResponse({**answer.json(), **limits})
                log.warning("info_refused", replica_id=member.id, reason=error_of(answer).message)
        error = NoReplica()
        return JSONResponse(tgi.error_body(error), status_code=error.status, headers=tgi.error_headers(error))

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        up = self._fleet.up()
        self._metrics.replicas_live.set(len(up))
        for member in self._fleet.members.values():
            self._metrics.weight.labels(replica=member.id).set(member.weight if member.id in up else 0.0)
        return Response(self._metrics.render(), media_type=metrics.CONTENT_TYPE)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: ASGIApp) -> AsyncIterator[None]:
        probing = asyncio.create_task(self._probe_all())
        try:
            yield
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
            await self._http.aclose()

    async def _probe_all(self) -> None:
        """Ask each replica whether it is ready, for as long as the gateway runs."""
        probing: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            for tick in itertools.count():
                for member in self._fleet.members.values():
                    running = member.id in probing and not probing[member.id].done()
                    if not running and (tick % PROBE_UP_EVERY == 0 or not self._fleet.health(member).up):
                        probing[member.id] = group.create_task(self._probe(member))
                for gone in self._fleet.forget_absent():
                    probing.pop(gone, None)
                await asyncio.sleep(PROBE_S)

    async def _probe(self, member: Member) -> None:
        health = self._fleet.health(member)
        try:
            found = await self._relay.probe(member)
        except Exception:
            # Whatever is wrong with this one, the others must be probed on.
            log.exception("probe_failed", replica_id=member.id)
            found = Found.DEAD
        match found:
            case Found.READY:
                self._fleet.readmit(member)
            case Found.NOT_READY:
                self._fleet.suspend(member, "not ready")
            case Found.SLOW:
                health.slow_probes += 1
                if health.slow_probes >= SLOW_PROBES:
                    self._fleet.eject(member, "it hangs")
            case Found.DEAD:
                self._fleet.eject(member, "it cannot be reached, or says that it hangs")
            case _:
                assert_never(found)


def no_route(_: Request, error: Exception) -> Response:
    """Render Starlette's own errors, 404 and 405, as all others."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    body = {"error": str(getattr(error, "detail", error)), "error_type": "not_found"}
    return JSONResponse(body, status_code=status)


def internal_error(_: Request, error: Exception) -> Response:
    """Render our own bugs without their text; the traceback is in the log."""
    return JSONResponse(tgi.error_body(CollmError("internal error")), status_code=CollmError.status)


class Generate:
    """A generation route as a plain ASGI application: the relay writes to the caller itself."""

    def __init__(self, relay: Relay, *, stream: bool | None) -> None:
        self._answer = partial(relay.answer, stream=stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def main(argv: list[str]) -> int:
    """``collm gateway``: serve until told to stop."""
    parser = argparse.ArgumentParser(prog="collm gateway", description=__doc__)
    parser.parse_args(argv)
    settings = load_settings()
    configure(settings)
    host, port = settings.gateway.host, settings.gateway.port
    settings.required_token()  # without it every replica would refuse every request
    require_free_port(host, port, "COLLM_GATEWAY__PORT")
    database = Database(settings.required_database_url(), pool_size=2)
    fleet, slot_s = Fleet(), settings.controller.slot_s
    arrivals = ArrivalCounts(settings.gateway.id, slot_s)
    watch = Watch(database, fleet, arrivals, poll_s=slot_s)
    app = Gateway(settings, fleet, arrivals, SystemClock()).app()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    # uvicorn stops in good order on SIGTERM and then raises the signal again, which would end us before the cleanup.
    signal.signal(signal.SIGTERM, lambda *_: None)
    watch.start()
    log.info("gateway_started", gateway_id=settings.gateway.id, url=f"http://{host}:{port}")
    try:
        uvicorn.Server(config).run()
    finally:
        watch.stop()
        database.close()
    return 0
