"""One streamed request to a TGI server, recorded token by token."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from serving.load.model import Call, Outcome
from serving.model import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and how long to wait for them."""

    url: str
    """Base URL; requests go to its ``/generate_stream``."""
    token: str | None = None
    """Bearer token."""
    force_length: bool = True
    """Ask for exactly the tokens wanted (``ignore_eos``); an answer of another length is then incomplete."""
    slo: Slo | None = None
    """Sent along, for servers that schedule by it."""
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 60.0
    """Longest wait for the first or the next byte."""
    total_timeout_s: float = 120.0

    def client(self) -> httpx.AsyncClient:
        """Return a client whose connections do not queue for one another."""
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        if self.slo is not None:
            headers["x-slo-ttft-ms"] = f"{1_000 * self.slo.ttft_s:g}"
            headers["x-slo-tpot-ms"] = f"{1_000 * self.slo.tpot_s:g}"
        return httpx.AsyncClient(
            base_url=self.url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(self.silence_timeout_s, connect=self.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )


@dataclass(slots=True, kw_only=True)
class Recording:
    """What one answer has given so far."""

    token_s: list[float] = field(default_factory=list)
    status: int | None = None
    failure: str | None = "no answer"
    headers: Mapping[str, str] = field(default_factory=dict)


async def send(
    client: httpx.AsyncClient, target: Target, call: Call, *, scheduled_s: float, now_s: Callable[[], float]
) -> Outcome:
    """Send one call and record what comes; never raises but when cancelled.

    Whatever is not a complete answer has a ``failure``: a refusal, an error event, a broken or silent stream, and,
    where lengths are forced, an answer of another length.
    """
    sent_s = now_s()
    recording = Recording()
    try:
        async with asyncio.timeout(target.total_timeout_s):
            await receive(client, target, call, recording, now_s)
    except TimeoutError:
        recording.failure = f"no end within {target.total_timeout_s:g} s"
    except httpx.HTTPError as e:
        recording.failure = f"{type(e).__name__}: {e}".rstrip(": ")
    times = recording.token_s
    return Outcome(
        index=call.index,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        first_s=times[0] if times else None,
        last_s=times[-1] if times else None,
        tokens=len(times),
        wanted_tokens=call.new_tokens,
        prompt_tokens=call.prompt_tokens,
        status=recording.status,
        failure=recording.failure,
        uid=recording.headers.get("x-adapter-uid"),
        label=recording.headers.get("x-adapter-version"),
        adapter=recording.headers.get("x-adapter-id"),
        replica=recording.headers.get("x-replica-id"),
        token_s=tuple(times),
    )


async def receive(
    client: httpx.AsyncClient, target: Target, call: Call, recording: Recording, now_s: Callable[[], float]
) -> None:
    """Read the stream into ``recording``."""
    async with client.stream("POST", "/generate_stream", json=body(call, target)) as answer:
        recording.status = answer.status_code
        recording.headers = answer.headers
        if answer.status_code != 200:
            recording.failure = refusal(answer.status_code, await answer.aread())
            return
        recording.failure = "the stream ended before the answer did"
        async for event in events(answer.aiter_lines()):
            if not isinstance(event, dict):
                recording.failure = "an event that is no object"
                return
            if "error" in event:
                recording.failure = f"{event.get('error_type', 'error')}: {event['error']}"
                return
            if event.get("token") is not None:
                recording.token_s.append(now_s())
            if event.get("generated_text") is not None:
                recording.failure = shortfall(call, target, len(recording.token_s))
                return


def body(call: Call, target: Target) -> dict[str, Any]:
    """Return the request's JSON; greedy, so that every window asks the same work of the server."""
    parameters: dict[str, Any] = {"max_new_tokens": call.new_tokens, "do_sample": False, "details": True}
    if target.force_length:
        parameters["ignore_eos"] = True
    if call.adapter is not None:
        parameters["adapter_id"] = call.adapter
    return {"inputs": call.inputs, "parameters": parameters}


def shortfall(call: Call, target: Target, tokens: int) -> str | None:
    """Return what a finished answer lacks; None if nothing."""
    if tokens == 0:
        return "an answer without tokens"
    if target.force_length and tokens != call.new_tokens:
        return f"{tokens} tokens instead of {call.new_tokens}"
    return None


def refusal(status: int, data: bytes) -> str:
    """Return a refusal in one line."""
    text = data.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        return f"{status}: {text[:200]}".strip()
    if isinstance(found, dict) and "error" in found:
        return f"{status} {found.get('error_type', '')}: {found['error']}"
    return f"{status}: {text[:200]}".strip()


async def events(lines: AsyncIterator[str]) -> AsyncIterator[Any]:
    """Yield the JSON of each ``data:`` line; comments and other fields are skipped, ``[DONE]`` ends."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError:
            yield None
