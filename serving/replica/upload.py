"""Reading the body of a request."""

from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request

from infra.errors import PayloadTooLarge
from serving.wire.tgi import CallerGone


async def read_body(http: Request, max_bytes: int) -> bytes:
    """Return the body. Raises ``PayloadTooLarge`` without reading more than that, and ``CallerGone``."""
    body = bytearray()
    try:
        async with aclosing(http.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    raise PayloadTooLarge(f"the body has more than {max_bytes} bytes")
    except ClientDisconnect:
        raise CallerGone from None
    return bytes(body)
