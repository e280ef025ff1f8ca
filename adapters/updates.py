"""The update store on any fsspec file system: content-addressed bytes that replicas and flows exchange.

``versions/`` holds federated versions, of which the rejected ones go after a while; ``local/`` published local versions
and ``updates/`` clients' updates, which are private data and swept after a while.
"""

import hashlib
import re
import uuid
from collections.abc import Set
from datetime import UTC, datetime

import fsspec

from infra.clock import Clock, SystemClock
from infra.errors import UnknownVersion, UpdateRejected

VERSIONS, LOCAL, UPDATES = "versions", "local", "updates"
"""Prefixes."""
_PREFIX = r"[a-z0-9][a-z0-9_-]*"
_KEY = re.compile(rf"({_PREFIX})/([0-9a-f]{{64}})")


def key_of(prefix: str, data: bytes) -> str:
    """Return the key under which ``data`` lies. Raises ``ValueError`` for a prefix that is no plain name."""
    if not re.fullmatch(_PREFIX, prefix):
        raise ValueError(f"{prefix!r} is no prefix")
    return f"{prefix}/{hashlib.sha256(data).hexdigest()}"


def sha256_of(key: str) -> str:
    """Return the hash in a key. Raises ``UnknownVersion`` for anything else: keys come from callers and name files."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise UnknownVersion(f"{key!r} is no key of the update store")
    return match[2]


def check(key: str, data: bytes) -> bytes:
    """Return ``data`` if they are what the key names. Raises ``UpdateRejected``."""
    if hashlib.sha256(data).hexdigest() != sha256_of(key):
        raise UpdateRejected(f"{key}: the bytes do not have that hash")
    return data


class FsUpdateStore:
    """An ``UpdateStore`` below a URL. Raises ``OSError`` if the file system fails."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._fs, root = fsspec.url_to_fs(url)
        self._root = root.rstrip("/")

    def put(self, prefix: str, data: bytes) -> str:
        """See ``UpdateStore``."""
        key = key_of(prefix, data)
        # Written beside and moved: a reader, or a crash, never finds half a file under the key. Written also if it is
        # there: that heals a damaged one, and a sweep must not take for old what has just been put.
        beside = f"{self._root}/{prefix}/.{uuid.uuid4().hex}"
        self._fs.makedirs(f"{self._root}/{prefix}", exist_ok=True)
        self._fs.pipe_file(beside, data)
        self._fs.mv(beside, f"{self._root}/{key}")
        return key

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See ``UpdateStore``."""
        sha256_of(key)
        try:
            with self._fs.open(f"{self._root}/{key}", "rb") as file:
                data: bytes = file.read(max_bytes + 1)
        except FileNotFoundError:
            raise UnknownVersion(f"{key} is not in the update store") from None
        if len(data) > max_bytes:
            raise UpdateRejected(f"{key} has more than {max_bytes} bytes")
        return check(key, data)

    def sweep(self, prefix: str, *, older_than_s: float, only: Set[str] | None = None) -> int:
        """See ``UpdateStore``. Includes what a crash left half-written."""
        key_of(prefix, b"")
        limit = datetime.fromtimestamp(self._clock.wall() - older_than_s, UTC)
        try:
            names = self._fs.ls(f"{self._root}/{prefix}", detail=False)
        except FileNotFoundError:
            return 0
        if only is not None:
            bases = {name: name.rpartition("/")[2] for name in names}
            names = [name for name, base in bases.items() if base.startswith(".") or f"{prefix}/{base}" in only]
        return sum(self._delete_older(name, limit) for name in names)

    def _delete_older(self, name: str, limit: datetime) -> bool:
        try:
            if self._fs.modified(name) >= limit:
                return False
            self._fs.rm_file(name)
        except FileNotFoundError:
            return False  # another sweep was first
        return True
