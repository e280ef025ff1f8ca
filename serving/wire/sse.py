"""Server-sent events: writing, and reading from bytes that arrive in any pieces. Pure."""

import json
from collections.abc import Mapping

MEDIA_TYPE = "text/event-stream"
END = b"\n\n"
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""JSON allows them in strings, but clients that read by lines (httpx's do) would cut an event there."""


def event(body: Mapping[str, object]) -> bytes:
    """Return one ``data:`` event."""
    return b"data:" + dumps(body) + END


def dumps(body: object) -> bytes:
    """Return compact JSON. Raises ``ValueError`` on NaN and infinity, which JSON has not."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode("utf-8", "replace")


def payload(block: bytes) -> bytes:
    """Return the data of one event (without its end); empty for comments and other fields."""
    lines = [line[5:].strip() for line in block.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Splitter:
    """Cuts a byte stream into whole events, so that a stream that breaks off never ends inside one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events (with their ends) that ``chunk`` completes."""
        self._rest += chunk
        if END not in self._rest:
            return []
        *whole, self._rest = self._rest.split(END)
        return [block + END for block in whole]

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not whole."""
        return self._rest


def is_last(block: bytes) -> bool:
    """Return whether an event ends its stream: it carries the whole text, or an error."""
    if b'"generated_text":null' in block:
        return False
    body = _object(block)
    return body.get("generated_text") is not None or "error" in body


def error_in(block: bytes) -> dict[str, object] | None:
    """Return the body of an event if it is an error."""
    if b'"error"' not in block:
        return None
    body = _object(block)
    return body if "error" in body else None


def _object(block: bytes) -> dict[str, object]:
    try:
        body = json.loads(payload(block))
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
