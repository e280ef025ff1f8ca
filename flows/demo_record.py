"""What a run of the demo leaves behind, for its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from db.records import AdapterRecord, RoundRecord, UpdateRecord, VersionRecord
from flows.demo_load import Client
from flows.demo_quality import Measured, Served
from infra.settings import Settings
from serving.load.capacity import Capacity
from serving.load.model import Call, Outcome
from serving.load.schema import Kind, Sample
from serving.load.traces import Lengths, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One window as it was."""

    name: str
    kind: Kind
    begun_s: float
    """Wall clock."""
    seconds: float
    outcomes: Sequence[Outcome]
    train_tokens: int
    train_tokens_while_decoding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSwap:
    """One change of a replica's active version; wall clock."""

    at_s: float
    replica: str
    uid: str
    label: str
    kind: str
    pause_ms: float
    delay_ms: float
    by_demo: bool


@dataclass(slots=True, kw_only=True)
class Record:
    """Everything that a run leaves behind."""

    settings: Settings
    model_dir: Path
    backbone: str
    """sha256 of the frozen weights."""
    dtype: str
    clients: Mapping[str, Client]
    capacity: Capacity
    window: Window
    lengths: Lengths
    calls: Sequence[Call]
    adapter: AdapterRecord
    played: list[Played] = field(default_factory=list)
    quality: Mapping[str, Measured] = field(default_factory=dict)
    """By uid."""
    served: Mapping[str, Served] = field(default_factory=dict)
    """By uid: what each version is called."""
    versions: Sequence[VersionRecord] = ()
    newest: VersionRecord | None = None
    """The newest promoted version."""
    rounds: Sequence[tuple[RoundRecord, Sequence[UpdateRecord]]] = ()
    swaps: Sequence[LocalSwap] = ()
    samples: Sequence[Sample] = ()
    """In wall-clock seconds."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    command: str = "collm demo"
    seconds: float = 0.0
