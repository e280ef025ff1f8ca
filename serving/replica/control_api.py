"""Endpoints of the control API, see ``wire.control``; each does its slow work in the loader's thread."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from adapters.model import LoraWeights, Version
from db.records import AdapterName, Epoch, Split, VersionUid
from infra.errors import InvalidRequest, NoPlace
from serving.replica import view
from serving.replica.background import Scoring
from serving.replica.desk import Desk, gone
from serving.replica.loader import Loader
from serving.replica.upload import read_body
from serving.rows import Row, set_sha256
from serving.wire.control import (
    ActivateBody,
    Body,
    RollbackBody,
    RoundBody,
    ScoreBody,
    ScoreReply,
    StageBody,
    VersionBody,
)
from serving.wire.tgi import CallerGone

MAX_BODY_BYTES = 16_000_000
SWAP_TIMEOUT_S = 8.0
"""For a place to become free; clients wait a little longer."""

B = TypeVar("B", bound=Body)
Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def control_routes(desk: Desk, loader: Loader) -> Iterator[tuple[str, str, Endpoint]]:
    """Yield (method, path, endpoint)."""
    control = Control(desk, loader)
    yield "GET", "/control/status", control.status
    yield "POST", "/control/stage", control.stage
    yield "POST", "/control/activate", control.activate
    yield "POST", "/control/rollback", control.roll_back
    yield "POST", "/control/rounds", control.start_round
    yield "GET", "/control/rounds/{round_id}", control.round
    yield "DELETE", "/control/rounds/{round_id}", control.stop_round
    yield "POST", "/control/score", control.score


class Control:
    """The endpoints."""

    def __init__(self, desk: Desk, loader: Loader) -> None:
        self._desk = desk
        self._loader = loader

    async def status(self, _: HttpRequest) -> Response:
        """Where the replica stands."""
        return _json(await self._desk.call(view.status))

    async def stage(self, http: HttpRequest) -> Response:
        """Load and check a version; it serves nothing yet."""
        body = await self._body(http, StageBody)
        version = Version(adapter=AdapterName(body.adapter), uid=VersionUid(body.uid), number=body.number)
        weights = await self._load(lambda: self._loader.version(version.adapter, version.uid, body.store_key))
        return _json(await _served(await self._desk.call(lambda r: r.stage(version, weights))))

    async def activate(self, http: HttpRequest) -> Response:
        """Flip, and answer when it serves."""
        body = await self._body(http, ActivateBody)
        swap = await self._desk.call(
            lambda r: r.activate(AdapterName(body.adapter), VersionUid(body.uid), Epoch(body.epoch))
        )
        return _json(await _served(swap))

    async def roll_back(self, http: HttpRequest) -> Response:
        """Return to the previous version, and answer when it serves."""
        body = await self._body(http, RollbackBody)
        return _json(await _served(await self._desk.call(lambda r: r.roll_back(AdapterName(body.adapter)))))

    async def start_round(self, http: HttpRequest) -> Response:
        """Begin this client's part of a round, or go on with what a process before this one saved of it."""
        body = await self._body(http, RoundBody)
        saved = await asyncio.wrap_future(self._loader.submit(lambda: self._loader.kept_round(body.round_id)))
        return _json(await self._desk.call(lambda r: r.background.start_round(body, saved)))

    async def round(self, http: HttpRequest) -> Response:
        """Where a round stands."""
        round_id = http.path_params["round_id"]
        return _json(await self._desk.call(lambda r: r.background.round_status(round_id)))

    async def stop_round(self, http: HttpRequest) -> Response:
        """Drop a round's shadow."""
        round_id = http.path_params["round_id"]
        return _json(await self._desk.call(lambda r: r.background.stop_round(round_id)))

    async def score(self, http: HttpRequest) -> Response:
        """Score rows under one version; a caller who goes away stops it."""
        body = await self._body(http, ScoreBody)
        rows, weights = self._rows(body), await self._weights(body)
        scoring = await self._desk.call(lambda r: r.background.score(rows, weights))
        done = asyncio.wrap_future(scoring.done)
        watch = asyncio.create_task(gone(http.receive))
        watch.add_done_callback(lambda _: done.cancel())
        try:
            result = await done
        except asyncio.CancelledError:
            if watch.done():
                raise CallerGone from None
            raise
        finally:
            watch.cancel()
            self._drop(scoring)
        return _json(
            ScoreReply(set_sha256=set_sha256(rows), nll_by_row=result.nll_by_row, tokens_by_row=result.tokens_by_row)
        )

    def _rows(self, body: ScoreBody) -> tuple[Row, ...]:
        if (body.split is None) == (not body.rows):
            raise InvalidRequest("`rows` or `split` must be given, not both")
        if body.split is None:
            return tuple(Row(row.prompt, row.completion) for row in body.rows)
        rows = tuple(self._desk.staffed().background.splits.get(Split(body.split), ()))
        if not rows:
            raise InvalidRequest(f"this replica has no {body.split} rows")
        return rows

    async def _weights(self, body: ScoreBody) -> LoraWeights | None:
        if body.uid is None:
            return None
        uid, key = VersionUid(body.uid), body.store_key
        if key is None:
            return await self._desk.call(lambda r: r.residency.weights(uid))
        return await self._load(lambda: self._loader.weights(AdapterName(body.adapter), key))

    def _drop(self, scoring: Scoring) -> None:
        replica = self._desk.staffed()
        replica.inbox.post(lambda: replica.background.drop_score(scoring))

    async def _load(self, call: Callable[[], LoraWeights]) -> LoraWeights:
        return await asyncio.wrap_future(self._loader.submit(call))

    async def _body(self, http: HttpRequest, kind: type[B]) -> B:
        data = await read_body(http, MAX_BODY_BYTES)
        try:
            return kind.model_validate_json(data)
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequest(f"{where}: {first['msg']}" if where else first["msg"]) from None


async def _served(swap: "Future[VersionBody]") -> VersionBody:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(swap), SWAP_TIMEOUT_S)
    except TimeoutError:
        raise NoPlace from None


def _json(body: Body) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")
