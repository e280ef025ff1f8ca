"""Slow work of a replica: weights from and to the update store, checked, in a thread of their own."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from adapters import weights as codec
from adapters.model import LoraWeights
from adapters.ports import UpdateStore
from adapters.updates import LOCAL, UPDATES
from db.records import AdapterName, Factor, LoraSpec, VersionUid
from infra.errors import IncompatibleAdapter, UnknownAdapter
from serving.replica.checkpoints import Checkpoints, SavedRound

T = TypeVar("T")


class Loader:
    """Reads versions, writes updates and local versions. ``submit`` runs a call in the thread."""

    def __init__(
        self,
        store: UpdateStore,
        *,
        shapes: Mapping[str, tuple[int, int]],
        backbone: str,
        checkpoints: Checkpoints | None = None,
        thread: Executor | None = None,
    ) -> None:
        """``checkpoints``: where rounds under way are kept; without it a restart begins them anew."""
        self.shapes = shapes
        self._checkpoints = checkpoints
        self._store = store
        self._backbone = backbone
        self._specs: dict[AdapterName, LoraSpec] = {}
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Run in the loader's thread."""
        return self._thread.submit(call)

    def know(self, adapter: AdapterName, spec: LoraSpec) -> None:
        """Say what shape an adapter's versions have."""
        self._specs[adapter] = spec

    def version(self, adapter: AdapterName, uid: VersionUid, key: str) -> LoraWeights:
        """Read a federated version. Raises ``IncompatibleAdapter`` unless it is whole, fits, and has that uid."""
        loaded = self.weights(adapter, key)
        found = codec.version_uid(self._backbone, loaded)
        if found != uid:
            raise IncompatibleAdapter(f"{key} holds version {found} on this backbone, not {uid}")
        return loaded

    def weights(self, adapter: AdapterName, key: str) -> LoraWeights:
        """Read weights that their key alone names. Raises ``IncompatibleAdapter``, ``UnknownVersion``."""
        spec = self._specs.get(adapter)
        if spec is None:
            raise UnknownAdapter(f"no adapter named {adapter!r} is registered")
        manifest = codec.manifest(self.shapes, spec)
        return codec.from_bytes(self._store.get(key, max_bytes=codec.max_bytes(manifest)), spec, manifest)

    def put_update(self, weights: LoraWeights, factor: Factor) -> str:
        """Store the trained factor of a shadow and return its key."""
        names = codec.of_factor(weights.tensors, factor)
        return self._store.put(UPDATES, codec.update_bytes({name: weights.tensors[name] for name in names}))

    def archive(self, weights: LoraWeights) -> str:
        """Keep a local version for a while, so that it can be scored later; return its key."""
        return self._store.put(LOCAL, codec.to_bytes(weights))

    def keep_round(self, saved: SavedRound) -> None:
        """Save a round under way. Raises ``OSError``."""
        if self._checkpoints is not None:
            self._checkpoints.write(saved)

    def kept_round(self, round_id: str) -> SavedRound | None:
        """Return what was saved of a round, if anything was and it is whole."""
        return None if self._checkpoints is None else self._checkpoints.read(round_id)

    def forget_round(self) -> None:
        """Nobody will go on with what was saved."""
        if self._checkpoints is not None:
            self._checkpoints.clear()

    def close(self) -> None:
        """Finish what is under way, drop the rest."""
        self._thread.shutdown(cancel_futures=True)
