"""A replica's control API over HTTP, as flows and the demo use it."""

from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from infra.errors import CollmError, NoReplica
from serving.wire import tgi
from serving.wire.control import (
    ActivateBody,
    RollbackBody,
    RoundBody,
    RoundStatus,
    ScoreBody,
    ScoreReply,
    StageBody,
    Status,
    VersionBody,
)

B = TypeVar("B", bound=BaseModel)


class HttpReplicaClient:
    """See ``ports.ReplicaClient``. Use as an async context manager, or call ``aclose``."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 2.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``url``: the replica's, without a path; ``transport`` replaces the network in tests."""
        self._http = httpx.AsyncClient(
            base_url=f"{url.rstrip('/')}/control/",
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s),
            # Replicas close idle connections; one that is reused while it closes looks like a dead replica.
            limits=httpx.Limits(keepalive_expiry=2.0),
            transport=transport,
            trust_env=False,
        )

    async def status(self) -> Status:
        """See ``ports.ReplicaClient``."""
        return await self._call("GET", "status", Status)

    async def stage(self, body: StageBody) -> VersionBody:
        """See ``ports.ReplicaClient``."""
        return await self._call("POST", "stage", VersionBody, body)

    async def activate(self, body: ActivateBody) -> VersionBody:
        """See ``ports.ReplicaClient``."""
        return await self._call("POST", "activate", VersionBody, body)

    async def roll_back(self, body: RollbackBody) -> VersionBody:
        """See ``ports.ReplicaClient``."""
        return await self._call("POST", "rollback", VersionBody, body)

    async def start_round(self, body: RoundBody) -> RoundStatus:
        """See ``ports.ReplicaClient``."""
        return await self._call("POST", "rounds", RoundStatus, body)

    async def round(self, round_id: str) -> RoundStatus:
        """See ``ports.ReplicaClient``."""
        return await self._call("GET", f"rounds/{quote(round_id, safe='')}", RoundStatus)

    async def stop_round(self, round_id: str) -> RoundStatus:
        """See ``ports.ReplicaClient``."""
        return await self._call("DELETE", f"rounds/{quote(round_id, safe='')}", RoundStatus)

    async def score(self, body: ScoreBody, *, timeout_s: float) -> ScoreReply:
        """See ``ports.ReplicaClient``."""
        return await self._call("POST", "score", ScoreReply, body, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _call(
        self, method: str, path: str, reply: type[B], body: BaseModel | None = None, *, timeout_s: float | None = None
    ) -> B:
        request = self._http.build_request(
            method,
            path,
            content=None if body is None else body.model_dump_json(),
            headers={} if body is None else {"content-type": "application/json"},
            timeout=httpx.USE_CLIENT_DEFAULT
            if timeout_s is None
            else httpx.Timeout(timeout_s, connect=self._http.timeout.connect),
        )
        try:
            answer = await self._http.send(request)
        except httpx.TransportError as e:
            raise NoReplica(f"replica {self._http.base_url.host} does not answer: {e!r}") from e
        if answer.status_code != 200:
            raise _typed(answer)
        try:
            return reply.model_validate_json(answer.content)
        except ValidationError as e:
            raise CollmError(f"replica answered {method} {path} with another body than {reply.__name__}") from e


def _typed(answer: httpx.Response) -> CollmError:
    try:
        body: object = answer.json()
    except ValueError:
        body = None
    return tgi.restore_error(answer.status_code, body, retry_after_s=retry_after_s(answer.headers))


def retry_after_s(headers: httpx.Headers) -> float | None:
    """Return the seconds of ``Retry-After``; None if it is absent or a date."""
    raw = headers.get("retry-after", "")
    return float(raw) if raw.isdigit() else None
