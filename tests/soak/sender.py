"""Sends one request and says how it ended; keeps what is needed to reproduce its answer."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from serving.load.sender import events
from tests.soak.traffic import Ask

ANSWER_S = 180.0
"""An answer that takes longer counts as lost, unless the machine is found to be slower than that."""

End = Literal["answered", "overloaded", "refused", "left", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An answer, and what must give it again."""

    content: bytes
    """The request's body."""
    uid: str
    """Of the version that answered; empty for the backbone alone."""
    label: str
    adapter: str
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended."""

    ask: Ask
    end: End
    sent_s: float
    ended_s: float
    status: int | None = None
    note: str = ""
    """wrong: what is."""
    kept: Kept | None = None


class Caller:
    """Sends requests to one replica."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port = host, port
        self._token = token
        self.answer_s = ANSWER_S
        self._http = httpx.AsyncClient(
            base_url=f"http://{host}:{port}",
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=5.0),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, ask: Ask, now_s: Callable[[], float]) -> Outcome:
        """Send one request and wait for its end; whatever is not as it must be is ``wrong``."""
        sent_s = now_s()
        status, kept, note = None, None, ""
        end: End = "wrong"
        try:
            async with asyncio.timeout(self.answer_s):
                if ask.kind == "half":
                    end = await self._half(ask)
                else:
                    end, status, note, kept = await self._whole(ask) if not ask.streams else await self._streamed(ask)
        except TimeoutError:
            note = f"no end within {self.answer_s:g} s"
        except (httpx.HTTPError, OSError) as error:
            note = f"{type(error).__name__}: {error}".rstrip(": ")
        return Outcome(ask=ask, end=end, sent_s=sent_s, ended_s=now_s(), status=status, note=note, kept=kept)

    async def _half(self, ask: Ask) -> End:
        """Announce a body and go before it is whole."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        head = f"POST /generate HTTP/1.1\r\nhost: soak\r\nauthorization: Bearer {self._token}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(ask.content)}\r\n\r\n"
        writer.write(head.encode() + ask.content[: len(ask.content) // 2])
        await writer.drain()
        await asyncio.sleep(ask.leave_after)
        writer.close()
        return "left"

    async def _whole(self, ask: Ask) -> tuple[End, int | None, str, Kept | None]:
        try:
            async with asyncio.timeout(ask.leave_after if ask.kind == "impatient" else None):
                answer = await self._http.post("/generate", content=ask.content, headers=ask.headers)
        except TimeoutError:
            return "left", None, "", None
        if answer.status_code != 200:
            end, note = refusal(ask, answer)
            return end, answer.status_code, note, None
        body = answer.json()
        ids = tuple(token["id"] for token in body["details"]["tokens"])
        return whole(ask, answer.headers, ids, body["details"], body["generated_text"])

    async def _streamed(self, ask: Ask) -> tuple[End, int | None, str, Kept | None]:
        async with self._http.stream("POST", "/generate_stream", content=ask.content, headers=ask.headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                end, note = refusal(ask, answer)
                return end, answer.status_code, note, None
            ids: list[int] = []
            async for event in events(answer.aiter_lines()):
                if not isinstance(event, dict) or "error" in event:
                    return "wrong", 200, f"in the stream: {event}", None
                if event["index"] != len(ids) + 1:
                    return "wrong", 200, f"token {event['index']} after {len(ids)}", None
                ids.append(event["token"]["id"])
                if event["generated_text"] is not None:
                    return whole(ask, answer.headers, tuple(ids), event["details"], event["generated_text"])
                if ask.kind == "impatient" and len(ids) >= ask.leave_after:
                    return "left", 200, "", None
        return "wrong", 200, "the stream ended before the answer did", None


def whole(
    ask: Ask, headers: httpx.Headers, ids: tuple[int, ...], details: Any, text: str
) -> tuple[End, int, str, Kept | None]:
    """Return a whole answer, if it is one."""
    if ask.expect is not None:
        return "wrong", 200, f"answered, instead of {ask.expect}: {ask.content[:200]!r}", None
    if details["generated_tokens"] != len(ids) or not ids:
        return "wrong", 200, f"{len(ids)} tokens came, {details['generated_tokens']} were generated", None
    kept = Kept(
        content=ask.content,
        uid=headers["x-adapter-uid"],
        label=headers["x-adapter-version"],
        adapter=headers["x-adapter-id"],
        ids=ids,
        text=text,
    )
    return "answered", 200, "", kept


def refusal(ask: Ask, answer: httpx.Response) -> tuple[End, str]:
    """Return whether a refusal is as it must be, and what is wrong with it."""
    try:
        body = answer.json()
        found = (answer.status_code, str(body["error_type"]))
    except (ValueError, KeyError, TypeError):
        return "wrong", f"{answer.status_code} without an error_type: {answer.text[:200]}"
    if found == (429, "overloaded"):
        if not answer.headers.get("retry-after", "").isdigit():
            return "wrong", "429 without Retry-After"
        return "overloaded", ""
    if found == ask.expect:
        return "refused", ""
    return "wrong", f"{found} instead of {ask.expect or 'an answer'}: {body.get('error')}"


async def open_loop(caller: Caller, asks: Iterable[Ask], on_end: Callable[[Outcome], None]) -> None:
    """Send every request at its time, whatever became of those before; return when all have ended."""
    start = time.monotonic()

    def now_s() -> float:
        return time.monotonic() - start

    async def one(ask: Ask) -> None:
        on_end(await caller.send(ask, now_s))

    async with asyncio.TaskGroup() as group:
        for ask in asks:
            await asyncio.sleep(max(0.0, ask.at_s - now_s()))
            group.create_task(one(ask))


def describe(ask: Ask) -> str:
    """Return a request in a line."""
    shown = json.dumps(ask.content[:80].decode(errors="replace"))
    return f"#{ask.index} {ask.kind}{' stream' if ask.streams else ''} {shown}"
