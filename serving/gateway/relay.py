"""One request's way through the gateway: parse, admit, choose, relay, account.

Until the caller has had a byte, a replica that fails, dies, hangs or has no room costs nothing but time: the
request goes to another one. After that the stream ends with an error event.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

import httpx
import structlog
from starlette.types import Receive, Scope, Send

from db.records import AdapterName, ReplicaId
from infra.clock import Clock
from infra.errors import (
    BodyTooSlow,
    CollmError,
    Incomplete,
    NoReplica,
    Overloaded,
    RequestError,
    UnknownAdapter,
)
from infra.metrics import GatewayMetrics
from infra.settings import Settings
from serving.gateway.arrivals import ArrivalCounts
from serving.gateway.asgi import (
    RawHeaders,
    caller_gone,
    error_of,
    passed,
    passed_back,
    read_body,
    send_error,
    send_whole,
)
from serving.gateway.fleet import Attempt, Fleet, Member
from serving.wire import sse, tgi
from serving.wire.tgi import CallerGone, failure_label

log = structlog.get_logger()

RETRIED = frozenset({424, 429, 500, 502, 503, 504})
"""Answers after which another replica may do better: no room, stopping, dead, or a step that failed for a
neighbour's sake."""
BODY_TIMEOUT_S = 30.0
"""For a request's body to come; it has a place among those in flight meanwhile."""
UNREACHABLE = (httpx.TransportError, httpx.InvalidURL)
"""A replica writes its address itself, and may be set up with a wrong one."""
MAX_FAILURES = 3
"""A request that fails this often may be the cause of it; it is not sent round the whole fleet."""


@dataclass(slots=True, kw_only=True)
class Call:
    """A request on its way."""

    path: str
    data: bytes
    headers: dict[str, str]
    """Those that the replica is to see."""
    streaming: bool
    adapter: AdapterName
    send: Send
    arrived_s: float
    """Monotonic."""
    arrived_wall_s: float
    replica: ReplicaId | None = None
    """Who answered, or was asked last."""
    begun: bool = False
    """The caller has had a byte."""
    first_s: float | None = None
    """Monotonic: when the first event went out."""
    events: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """The caller has a whole answer, or a refusal that is the caller's own fault."""

    error: CollmError | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica refused; nothing has been sent to the caller."""

    status: int
    headers: RawHeaders
    body: bytes
    error: CollmError


@dataclass(frozen=True, slots=True)
class Broken:
    """The replica cannot be reached, hangs, or died before the first byte."""

    reason: str


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """It died, or failed, in the middle of a stream; the caller has had an error event."""

    error: CollmError


Outcome = Answered | Refused | Broken | BrokenOff


class Found(Enum):
    """What a probe finds."""

    READY = auto()
    NOT_READY = auto()
    """It is loading, or stopping: no more requests, but it answers those that it has."""
    SLOW = auto()
    """It did not answer in time: hung, or just busy."""
    DEAD = auto()
    """It cannot be reached, or says itself that it hangs."""


@dataclass(slots=True)
class Tried:
    """What has been tried for one request."""

    attempts: int = 0
    failures: int = 0
    """Attempts that ended otherwise than for want of room or of the adapter."""
    exclude: set[ReplicaId] = field(default_factory=set)
    again: set[ReplicaId] = field(default_factory=set)
    """They dropped the request but answer probes: perhaps they only closed an idle connection. Asked once more,
    when everybody else has been."""
    refused: Refused | None = None
    """What to answer if nobody does better: "no room" rather than a failure, since it says to try again, and that
    there is no such adapter only if nobody said anything else."""

    def refuse(self, refused: Refused) -> None:
        """Note a refusal."""
        if self.refused is None or (self.refused.status != 429 and refused.status != 404):
            self.refused = refused

    def answer(self) -> Refused | None:
        """Return the refusal to pass on; None if what went wrong is not the refusals' to say."""
        if self.refused is not None and self.refused.status == 404 and self.failures:
            return None
        return self.refused


class Relay:
    """Relays TGI's three routes. One per gateway process; used in its event loop."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        http: httpx.AsyncClient,
        arrivals: ArrivalCounts,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._http = http
        self._arrivals = arrivals
        self._metrics = metrics
        self._clock = clock
        self._body_timeout_s = body_timeout_s
        self._inflight = 0
        self._default = AdapterName(settings.rounds.adapter)
        token = settings.cluster_token
        self._authorization = {} if token is None else {"authorization": f"Bearer {token.get_secret_value()}"}

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, stream: bool | None) -> None:
        """Answer one request; ``stream`` as in ``tgi.parse``. Returns when the answer is out or the caller gone."""
        self._metrics.request_count.inc()
        # Before the body is read: bodies that have come and wait take memory, and those that never come stay.
        if self._inflight >= self._settings.gateway.max_inflight:
            full = Overloaded("too many requests at this gateway")
            self._arrivals.add(self._clock.wall(), None, AdapterName(""), failed=True)
            self._metrics.request_failure.labels(err=failure_label(full)).inc()
            await send_error(send, full)
            return
        self._inflight += 1
        self._metrics.inflight.set(self._inflight)
        try:
            await self._admitted(scope, receive, send, stream=stream)
        finally:
            self._inflight -= 1
            self._metrics.inflight.set(self._inflight)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send, *, stream: bool | None) -> None:
        """Read, relay, account."""
        arrived_s, arrived_wall_s = self._clock.monotonic(), self._clock.wall()
        try:
            data = await self._body(scope, receive)
            body = tgi.parse(data, stream=stream)
        except CallerGone:
            self._metrics.request_failure.labels(err="dropped").inc()
            return
        except RequestError as e:
            self._metrics.request_failure.labels(err="validation").inc()
            await send_error(send, e)
            return
        model_id = self._settings.model.name
        adapter = tgi.resolve_adapter(body.parameters.adapter_id, default=self._default, model_id=model_id)
        call = Call(
            path=scope["path"],
            data=data,
            headers={"content-type": "application/json", **self._authorization, **passed(scope["headers"])},
            streaming=body.stream,
            adapter=AdapterName(model_id) if adapter is None else adapter,
            send=send,
            arrived_s=arrived_s,
            arrived_wall_s=arrived_wall_s,
        )
        with structlog.contextvars.bound_contextvars(request_id=call.headers["x-request-id"]):
            await self._until_caller_gone(call, receive)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await read_body(scope, receive, self._settings.gateway.max_body_bytes)
        except TimeoutError:
            raise BodyTooSlow(f"the body did not come within {self._body_timeout_s:g} s") from None

    async def _until_caller_gone(self, call: Call, receive: Receive) -> None:
        """Relay, and stop at once, upstream too, when the caller hangs up."""
        work = asyncio.create_task(self._accounted(call))
        gone = asyncio.create_task(caller_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                self._account(call, CallerGone())
                return
            with contextlib.suppress(CallerGone):  # it has stopped reading
                await work
        finally:
            for task in (work, gone):
                task.cancel()

    async def _accounted(self, call: Call) -> None:
        """Relay and account."""
        try:
            error = await self._relayed(call)
        except Exception as e:
            self._account(call, e)
            raise
        self._account(call, error)

    async def _relayed(self, call: Call) -> CollmError | None:
        """Try replicas until one answers; return what went wrong, if anything did."""
        tried = Tried()
        while (member := self._choose(tried)) is not None:
            tried.attempts += 1
            call.replica = member.id
            if tried.attempts > 1:
                self._metrics.retried.labels(replica=member.id).inc()
            outcome = await self._attempt(call, member)
            match outcome:
                case Answered(error) | BrokenOff(error):
                    return error
                case Refused():
                    tried.exclude.add(member.id)
                    tried.refuse(outcome)
                    tried.failures += outcome.status not in (404, 429)
                    if outcome.status == 503:
                        self._fleet.suspend(member, outcome.error.message)
                case Broken(reason):
                    tried.failures += 1
                    tried.exclude.add(member.id)
                    if self._fleet.health(member).up:
                        await self._ask_after(member, reason, tried)
                case _:
                    assert_never(outcome)
        if (refused := tried.answer()) is not None:
            headers = refused.headers
            if refused.status == 429 and all(name != b"retry-after" for name, _ in headers):
                headers = [*headers, (b"retry-after", b"1")]
            await send_whole(call.send, refused.status, headers, refused.body)
            return refused.error
        error = NoReplica()
        await send_error(call.send, error)
        return error

    def _choose(self, tried: Tried) -> Member | None:
        if tried.failures >= MAX_FAILURES:
            return None
        member = self._fleet.choose(exclude=tried.exclude)
        if member is None and tried.again:
            member = self._fleet.choose(exclude=tried.exclude - tried.again)
            tried.again.clear()
        return member

    async def _ask_after(self, member: Member, reason: str, tried: Tried) -> None:
        """Find out what became of a replica that dropped a request."""
        found = await self.probe(member)
        match found:
            case Found.READY:
                tried.again.add(member.id)
            case Found.NOT_READY:
                self._fleet.suspend(member, reason)
            case Found.SLOW | Found.DEAD:
                self._fleet.eject(member, reason)
            case _:
                assert_never(found)

    async def probe(self, member: Member) -> Found:
        """Ask a replica whether it is ready."""
        try:
            answer = await self._http.get(f"{member.url}/health", timeout=self._settings.gateway.connect_timeout_s)
        except httpx.TimeoutException:
            return Found.SLOW
        except UNREACHABLE:
            return Found.DEAD
        if answer.status_code == 200:
            return Found.READY
        return Found.DEAD if tgi.HANGS in answer.text else Found.NOT_READY

    async def _attempt(self, call: Call, member: Member) -> Outcome:
        """Send the request to one replica and its answer to the caller."""
        self._metrics.relayed.labels(replica=member.id).inc()
        attempt: Attempt | None = None
        try:
            # No deadline before the first byte: how long a queue may be is the replica's business, and one that
            # hangs fails its probes, which ends the wait through the guard.
            async with asyncio.timeout(None) as guard:
                attempt = Attempt(guard)
                with self._fleet.sent(member, attempt):
                    request = self._http.build_request(
                        "POST", f"{member.url}{call.path}", content=call.data, headers=call.headers
                    )
                    response = await self._http.send(request, stream=True)
                    try:
                        return await self._pass_on(call, response, attempt)
                    finally:
                        await response.aclose()
        except UNREACHABLE as e:
            reason = repr(e)
        except TimeoutError:
            if attempt is not None and attempt.sending:
                raise CallerGone from None
            reason = "it does not answer any more"
        if not call.begun:
            return Broken(reason)
        self._fleet.eject(member, reason)
        return await self._break_off(call, Incomplete())

    async def _pass_on(self, call: Call, response: httpx.Response, attempt: Attempt) -> Outcome:
        """Send an answer on: a stream event by event, anything else when it is whole."""
        status, headers = response.status_code, passed_back(response.headers)
        if status == 200 and call.streaming:
            return await self._pass_on_stream(call, response, headers, attempt)
        body = await response.aread()
        error = None if status == 200 else error_of(response)
        # An adapter that this replica has not loaded may be served by others.
        if error is not None and (status in RETRIED or isinstance(error, UnknownAdapter)):
            return Refused(status, headers, body, error)
        attempt.begun = call.begun = True
        await send_whole(call.send, status, headers, body)
        return Answered(error)

    async def _pass_on_stream(
        self, call: Call, response: httpx.Response, headers: RawHeaders, attempt: Attempt
    ) -> Outcome:
        """Only whole events go on, so that an error event can follow at any time."""
        splitter, last = sse.Splitter(), b""
        now, idle_s = asyncio.get_running_loop().time, self._settings.gateway.idle_timeout_s
        async for chunk in response.aiter_raw():
            events = splitter.feed(chunk)
            if not events:
                continue
            attempt.sending = True
            attempt.guard.reschedule(now() + idle_s)
            if not call.begun:
                attempt.begun = call.begun = True
                call.first_s = self._clock.monotonic()
                await call.send({"type": "http.response.start", "status": 200, "headers": headers})
            last = events[-1]
            call.events += len(events)
            await call.send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            attempt.sending = False
            attempt.guard.reschedule(now() + idle_s)
        if not call.begun:
            return Broken("it ended the stream before its first event")
        if not sse.is_last(last):
            return await self._break_off(call, Incomplete())
        await call.send({"type": "http.response.body", "body": b""})
        error = sse.error_in(last)
        return Answered() if error is None else BrokenOff(tgi.restore_error(500, error))

    async def _break_off(self, call: Call, error: CollmError) -> BrokenOff:
        await call.send({"type": "http.response.body", "body": sse.event(tgi.error_body(error))})
        return BrokenOff(error)

    def _account(self, call: Call, error: Exception | None) -> None:
        metrics, now = self._metrics, self._clock.monotonic()
        # The name of an adapter that does not exist is the caller's invention: no label, no row of its own.
        adapter = AdapterName("") if isinstance(error, RequestError) else call.adapter
        failed = error is not None and not isinstance(error, RequestError | CallerGone)
        self._arrivals.add(call.arrived_wall_s, call.replica, adapter, failed=failed)
        if error is not None:
            metrics.request_failure.labels(err=failure_label(error)).inc()
            return
        metrics.request_success.inc()
        metrics.request_duration.observe(now - call.arrived_s)
        if call.first_s is not None:
            metrics.request_generated_tokens.observe(call.events)
            if call.events > 1:
                gap_s = (now - call.first_s) / (call.events - 1)
                metrics.request_mean_time_per_token_duration.observe(gap_s)
