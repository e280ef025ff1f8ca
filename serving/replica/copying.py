"""How versions get into the engine's places: beside its thread, and told of between two steps. Engine thread only."""

from collections.abc import Callable
from concurrent.futures import Future

from adapters.model import LoraWeights, Version
from adapters.places import Places
from db.records import VersionUid
from infra.errors import EngineDead
from serving.replica.history import History, Wrote
from serving.wire.control import VersionBody

Done = Callable[[Exception | None], None]
Copy = Callable[[int, LoraWeights, Done], None]
"""Writes weights into a place, now or beside the engine's thread, and calls back in that thread, with what failed."""
Check = Callable[[LoraWeights, Done], None]
"""Asks the engine whether it would take weights, in the same way."""
Waiting = list["Future[VersionBody]"]


def at_once(write: Callable[[int, LoraWeights], None]) -> Copy:
    """Return a copy that is done when it returns."""
    return lambda place, weights, done: _attempt(lambda: write(place, weights), done)


def checked_at_once(check: Callable[[LoraWeights], None]) -> Check:
    """Return a check that is done when it returns."""
    return lambda weights, done: _attempt(lambda: check(weights), done)


def _attempt(call: Callable[[], None], done: Done) -> None:
    try:
        call()
    except EngineDead:
        raise
    except Exception as error:
        done(error)
    else:
        done(None)


class Copies:
    """Versions on the way: into a place, or, where there is none, through the engine's check alone."""

    def __init__(
        self,
        copy: Copy,
        check: Check,
        places: Places,
        history: History,
        ended: Callable[[Version, Exception | None, Waiting], None],
    ) -> None:
        """``ended`` is told of each one's end: what failed, and who waits for it."""
        self._copy = copy
        self._check = check
        self._places = places
        self._history = history
        self._ended = ended
        self._under_way: dict[VersionUid, Waiting] = {}

    def __contains__(self, uid: VersionUid) -> bool:
        return uid in self._under_way

    def uids(self) -> frozenset[VersionUid]:
        """Return the versions on the way."""
        return frozenset(self._under_way)

    def lies(self, uid: VersionUid) -> bool:
        """Whether a version is in its place, whole."""
        return uid not in self._under_way and self._places.place_of(uid) is not None

    def begin(
        self,
        version: Version,
        weights: LoraWeights,
        place: int | None,
        waiting: "Future[VersionBody] | None" = None,
    ) -> None:
        """Copy a version into its place, or check it if it has none."""
        self._under_way[version.uid] = [] if waiting is None else [waiting]
        try:
            if place is None:
                self._check(weights, lambda error: self._end(version, None, error))
            else:
                self._copy(place, weights, lambda error: self._end(version, place, error))
        except BaseException:
            # Not even begun, or ended by what its end led to.
            if self._under_way.pop(version.uid, None) is not None and place is not None:
                self._places.drop(version.uid)
            raise

    def join(self, uid: VersionUid, waiting: "Future[VersionBody]") -> None:
        """Wait for a version that is on the way."""
        self._under_way[uid].append(waiting)

    def close(self) -> Waiting:
        """Forget all and return who waits."""
        waiting = [one for each in self._under_way.values() for one in each]
        self._under_way.clear()
        return waiting

    def _end(self, version: Version, place: int | None, error: Exception | None) -> None:
        """Between two steps: a version lies in its place, or the engine has refused it."""
        waiting = self._under_way.pop(version.uid, None)
        if waiting is None:
            return  # closed
        if isinstance(error, EngineDead):
            raise error
        if place is not None:
            if error is None:
                self._history.add(Wrote(place, version.uid))
            else:
                self._places.drop(version.uid)
        self._ended(version, error, waiting)
