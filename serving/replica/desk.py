"""The HTTP side of requests: hands them to the engine's thread and gets their events back."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from starlette.types import Receive

from infra.errors import NoReplica, Stopping
from serving.model import Event, Failed, Finished, Request, RequestId
from serving.replica.loop import Replica
from serving.wire.tgi import CallerGone

T = TypeVar("T")


class Answer:
    """The events of one request. Leaving the ``async with`` before the end stops its generation."""

    def __init__(self, desk: "Desk", request: Request, receive: Receive) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self.ended = False
        self._desk = desk
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    async def next(self) -> Event:
        """Wait for the next event. Raises ``CallerGone``, or the error by which the request failed."""
        return self._seen(await self.queue.get())

    def ready(self) -> Event | None:
        """Return the next event if it is here already: those of one step come together. Raises as ``next``."""
        return None if self.queue.empty() else self._seen(self.queue.get_nowait())

    def _seen(self, event: Event) -> Event:
        if isinstance(event, Failed):
            self.ended = not isinstance(event.error, CallerGone)
            raise event.error
        self.ended = isinstance(event, Finished)
        return event

    async def __aenter__(self) -> Self:
        self._desk.open(self)
        self._watch = asyncio.create_task(self._watch_caller())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._desk.close(self)

    async def _watch_caller(self) -> None:
        await gone(self._receive)
        self.queue.put_nowait(Failed(error=CallerGone()))


async def gone(receive: Receive) -> None:
    """Wait until the caller disconnects; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Desk:
    """Every open request of a replica. ``deliver`` is called by the engine's thread, the rest by event loops."""

    def __init__(self) -> None:
        self.replica: Replica | None = None
        """None while the engine is loading."""
        self._open: dict[RequestId, Answer] = {}

    def staffed(self) -> Replica:
        """Return the replica. Raises ``NoReplica`` while the engine is loading."""
        if self.replica is None:
            raise NoReplica("the replica is loading its model")
        return self.replica

    async def call(self, function: Callable[[Replica], T]) -> T:
        """Have the engine's thread run ``function``."""
        replica = self.staffed()
        return await asyncio.wrap_future(replica.inbox.call(lambda: function(replica)))

    def open(self, answer: Answer) -> None:
        """Hand a request over."""
        replica, request = self.staffed(), answer.request
        self._open[request.id] = answer
        if not replica.inbox.post(lambda: replica.submit(request)):
            del self._open[request.id]
            raise Stopping

    def close(self, answer: Answer) -> None:
        """Forget a request; if it is not answered yet its generation stops."""
        replica, request_id = self.staffed(), answer.request.id
        del self._open[request_id]
        if not answer.ended:
            replica.inbox.post(lambda: replica.cancel(request_id))

    def deliver(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        """Pass events on, all of one step at once for each event loop."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Answer, Event]]] = defaultdict(list)
        for request_id, event in events:
            answer = self._open.get(request_id)
            if answer is not None:
                by_loop[answer.loop].append((answer, event))
        for loop, batch in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put, batch)


def _put(batch: list[tuple[Answer, Event]]) -> None:
    for answer, event in batch:
        answer.queue.put_nowait(event)
