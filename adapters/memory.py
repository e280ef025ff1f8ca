"""Registry and update store in memory, for tests and for trying things without servers."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from adapters.model import LoraWeights
from adapters.ports import Registered
from adapters.updates import check, key_of, sha256_of
from adapters.weights import save_peft
from db.records import AdapterName, VersionUid
from infra.clock import Clock, SystemClock
from infra.errors import UnknownVersion, UpdateRejected


@dataclass(slots=True)
class MemoryVersion:
    """What the registry knows of one version."""

    uid: VersionUid
    weights: LoraWeights
    base_model: str
    tags: dict[str, str]
    metrics: dict[str, float]


@dataclass(slots=True)
class MemoryStore:
    """An ``AdapterStore``; what it holds may be looked at."""

    versions: dict[AdapterName, list[MemoryVersion]] = field(default_factory=dict)
    """Number 1 first."""
    aliases: dict[tuple[AdapterName, str], int] = field(default_factory=dict)

    def register(
        self,
        adapter: AdapterName,
        uid: VersionUid,
        weights: LoraWeights,
        *,
        base_model: str,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> Registered:
        """See ``AdapterStore``."""
        versions = self.versions.setdefault(adapter, [])
        for number, version in enumerate(versions, start=1):
            if version.uid == uid:
                return Registered(number=number, model_id=None)
        versions.append(
            MemoryVersion(uid=uid, weights=weights, base_model=base_model, tags=dict(tags), metrics=dict(metrics))
        )
        return Registered(number=len(versions), model_id=None)

    def set_alias(self, adapter: AdapterName, alias: str, number: int | None) -> None:
        """See ``AdapterStore``."""
        if number is None:
            self.aliases.pop((adapter, alias), None)
        else:
            self._version(adapter, number)
            self.aliases[adapter, alias] = number

    def alias(self, adapter: AdapterName, alias: str) -> int | None:
        """See ``AdapterStore``."""
        return self.aliases.get((adapter, alias))

    def tag(self, adapter: AdapterName, number: int, tags: Mapping[str, str]) -> None:
        """See ``AdapterStore``."""
        self._version(adapter, number).tags.update(tags)

    def download(self, adapter: AdapterName, number: int, target: Path) -> Path:
        """See ``AdapterStore``."""
        version = self._version(adapter, number)
        save_peft(target, version.weights, version.base_model)
        return target

    def _version(self, adapter: AdapterName, number: int) -> MemoryVersion:
        versions = self.versions.get(adapter, [])
        if not 1 <= number <= len(versions):
            raise UnknownVersion(f"adapter {adapter!r} has no version {number}")
        return versions[number - 1]


class MemoryUpdateStore:
    """An ``UpdateStore``."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._held: dict[str, tuple[float, bytes]] = {}

    def put(self, prefix: str, data: bytes) -> str:
        """See ``UpdateStore``."""
        key = key_of(prefix, data)
        self._held[key] = (self._clock.wall(), data)
        return key

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See ``UpdateStore``."""
        sha256_of(key)
        if key not in self._held:
            raise UnknownVersion(f"{key} is not in the update store")
        _, data = self._held[key]
        if len(data) > max_bytes:
            raise UpdateRejected(f"{key} has more than {max_bytes} bytes")
        return check(key, data)

    def sweep(self, prefix: str, *, older_than_s: float, only: Set[str] | None = None) -> int:
        """See ``UpdateStore``."""
        key_of(prefix, b"")
        limit = self._clock.wall() - older_than_s
        old = [key for key, (at_s, _) in self._held.items() if key.startswith(f"{prefix}/") and at_s < limit]
        if only is not None:
            old = [key for key in old if key in only]
        for key in old:
            del self._held[key]
        return len(old)
