"""What the rest of CoLLM needs of an adapter registry, of aggregation and of a store. Pure."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adapters.model import ClientUpdate, LoraWeights
from db.records import AdapterName, Factor, VersionUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """Where the registry keeps a version."""

    number: int
    model_id: str | None


class AdapterStore(Protocol):
    """The registry people look at. Implementations: ``registry`` (MLflow) and ``memory``."""

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
        """Add a version; the same uid again returns the first one's number."""
        ...

    def set_alias(self, adapter: AdapterName, alias: str, number: int | None) -> None:
        """Point an alias at a version, or remove it."""
        ...

    def alias(self, adapter: AdapterName, alias: str) -> int | None:
        """Return the version an alias names; None without one."""
        ...

    def tag(self, adapter: AdapterName, number: int, tags: Mapping[str, str]) -> None:
        """Add tags to a version."""
        ...

    def download(self, adapter: AdapterName, number: int, target: Path) -> Path:
        """Write the version's PEFT files (adapter_config.json, adapter_model.safetensors) into ``target``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """The fleet's new factors."""

    weights: LoraWeights
    error: float
    """‖mean of products − product of means‖ / ‖mean of products − base product‖, Frobenius over all layers;
    0 where one factor is common to all clients."""
    error_by_layer: Mapping[str, float]


class Aggregator(Protocol):
    """A federated strategy."""

    @property
    def name(self) -> str:
        """What settings call it."""
        ...

    def factor(self, round_number: int) -> Factor:
        """Which factor the adapter's ``round_number``-th round (from 1) trains."""
        ...

    def aggregate(self, base: LoraWeights, updates: Sequence[ClientUpdate]) -> Aggregate:
        """Combine; the order of ``updates`` does not change a bit of the result."""
        ...


class UpdateStore(Protocol):
    """Content-addressed bytes that replicas and flows exchange. Implementations: ``updates`` and ``memory``."""

    def put(self, prefix: str, data: bytes) -> str:
        """Store under ``prefix/<sha256>`` and return that key; the same bytes again change nothing."""
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the bytes, checked against the key's hash. Raises ``UnknownVersion`` or ``UpdateRejected``."""
        ...

    def sweep(self, prefix: str, *, older_than_s: float, only: Set[str] | None = None) -> int:
        """Delete what is older, of these keys if ``only`` is given; return how many."""
        ...
