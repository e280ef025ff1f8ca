"""A round's training on disk, so that a replica that is killed goes on with it: one safetensors file per replica.

Written beside the engine's thread, without holding the interpreter's lock for long: hashing and writing release it, and
nothing is copied. A new file replaces the old one in one step; one that is not whole is never taken for good.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import structlog
from safetensors import SafetensorError, safe_open

from adapters.model import Array
from serving.ports import TrainState
from serving.wire.control import Body, RoundBody

FOLDER = "training"
ROUND, DIGEST = "round", "sha256"
"""Keys of the file's metadata."""
log = structlog.get_logger()


class RoundNote(Body):
    """All of a shadow but its arrays. Which rows come next follows from ``steps`` and the round's seed."""

    body: RoundBody
    rows_sha256: str
    """Name of the rows that it is trained on."""
    steps: int
    tokens: int
    candidate_steps: int
    """Steps of the latest candidate."""
    loss_first: float | None
    loss_last: float | None
    best_ce: float | None
    """Of what was probed so far."""
    started_s: float
    """Wall clock."""

    @property
    def untried(self) -> bool:
        """Whether this very state is a candidate: its probe comes before the next step, so it was still to come."""
        return 0 < self.steps == self.candidate_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRound:
    """A shadow after an optimizer step."""

    note: RoundNote
    arrays: Mapping[str, Array]

    @property
    def state(self) -> TrainState:
        """What the trainer goes on from."""
        return TrainState(steps=self.note.steps, tokens=self.note.tokens, arrays=self.arrays)


class Checkpoints:
    """The file. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, state_dir: Path, replica_id: str) -> "Checkpoints":
        """Return a replica's own."""
        return cls(state_dir / FOLDER / f"{quote(replica_id, safe='')}.safetensors")

    def write(self, saved: SavedRound) -> None:
        """Replace the file. Raises ``OSError``."""
        arrays = {name: np.ascontiguousarray(array, "<f4") for name, array in sorted(saved.arrays.items())}
        header: dict[str, object] = {
            "__metadata__": {ROUND: saved.note.model_dump_json(), DIGEST: digest(saved.note, arrays)}
        }
        begin = 0
        for name, array in arrays.items():
            span = [begin, begin + array.nbytes]
            header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": span}
            begin += array.nbytes
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for array in arrays.values():
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)

    def read(self, round_id: str) -> SavedRound | None:
        """Return what was saved of that round; a file that is broken is deleted with a warning."""
        try:
            with safe_open(self._path, framework="np") as file:
                metadata = file.metadata() or {}
                note = RoundNote.model_validate_json(metadata[ROUND])
                if note.body.round_id != round_id:
                    return None
                arrays: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata[DIGEST] != digest(note, arrays):
                raise ValueError("its content is not what was written")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            log.warning("checkpoint_broken", path=str(self._path), error=str(error).partition("\n")[0])
            self.clear()
            return None
        return SavedRound(note=note, arrays=arrays)

    def clear(self) -> None:
        """Delete the file; there may be none."""
        self._path.unlink(missing_ok=True)


def digest(note: RoundNote, arrays: Mapping[str, Array]) -> str:
    """Return the sha256 of all that is saved."""
    found = hashlib.sha256(note.model_dump_json().encode())
    for name in sorted(arrays):
        found.update(json.dumps([name, str(arrays[name].dtype), list(arrays[name].shape)]).encode())
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.hexdigest()
