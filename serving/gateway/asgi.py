"""The gateway's two ends on the wire: reading a caller's request, writing to it, reading a replica's answer."""

import uuid
from collections.abc import Iterable

import httpx
from starlette.types import Message, Receive, Scope, Send

from infra.errors import CollmError, InvalidRequest, PayloadTooLarge
from serving.client import retry_after_s
from serving.wire import sse, tgi
from serving.wire.tgi import CallerGone

PASSED_HEADERS = frozenset({b"retry-after", b"content-type", b"cache-control"})
"""Go back to the caller, beside every ``x-`` header."""

RawHeaders = list[tuple[bytes, bytes]]


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the request's body. Raises ``PayloadTooLarge`` before it is all read, and ``CallerGone``."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise PayloadTooLarge(f"the body must be at most {max_bytes} bytes")
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise PayloadTooLarge(f"the body must be at most {max_bytes} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def caller_gone(receive: Receive) -> None:
    """Return when the caller has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def passed(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the request headers that replicas understand, and an id where the caller gave none.

    None of them means anything in other characters than printable ASCII; such values are left out.
    """
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    given = {name: value for name, value in given.items() if value.isascii() and value.isprintable()}
    out = {name: given[name] for name in tgi.REQUEST_HEADERS if name in given}
    out.setdefault("x-request-id", uuid.uuid4().hex)
    return out


def passed_back(headers: httpx.Headers) -> RawHeaders:
    """Return the answer headers that go on to the caller."""
    lower = [(name.lower(), value) for name, value in headers.raw]
    return [(name, value) for name, value in lower if name.startswith(b"x-") or name in PASSED_HEADERS]


def error_of(response: httpx.Response) -> CollmError:
    """Return what a whole answer that is no 200 means."""
    try:
        body: object = response.json()
    except ValueError:
        body = None
    error = tgi.restore_error(response.status_code, body, retry_after_s=retry_after_s(response.headers))
    if type(error) is CollmError and 400 <= response.status_code < 500:
        return InvalidRequest(error.message)
    return error


async def send_whole(send: Send, status: int, headers: RawHeaders, body: bytes) -> None:
    """Send an answer in one piece."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: CollmError) -> None:
    """Send an error that the gateway itself found."""
    headers = [(name.encode(), value.encode()) for name, value in tgi.error_headers(error).items()]
    headers.append((b"content-type", b"application/json"))
    await send_whole(send, error.status, headers, sse.dumps(tgi.error_body(error)))
