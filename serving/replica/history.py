"""What was pinned, written and computed, so that an audit can tell who was answered by which version. Pure."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from db.records import VersionUid
from serving.model import RequestId


@dataclass(frozen=True, slots=True)
class Wrote:
    """A version's factors were copied into a place."""

    place: int
    uid: VersionUid


@dataclass(frozen=True, slots=True)
class Pinned:
    """A request got its version."""

    request: RequestId
    uid: VersionUid
    place: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """An engine step: the places that its rows were computed with."""

    rows: tuple[tuple[RequestId, int], ...]
    """(request, place); rows that wear no adapter are left out."""


@dataclass(frozen=True, slots=True)
class Released:
    """A request let go of its version."""

    request: RequestId


Entry = Wrote | Pinned | Stepped | Released


class History:
    """The latest entries; all of them go to ``sink``."""

    def __init__(self, *, keep: int = 4096, sink: Callable[[Entry], None] | None = None) -> None:
        self.latest: deque[Entry] = deque(maxlen=keep)
        self._sink = sink

    def add(self, entry: Entry) -> None:
        """Record."""
        self.latest.append(entry)
        if self._sink is not None:
            self._sink(entry)


def violations(entries: Iterable[Entry]) -> list[str]:
    """Return what is wrong with a history that is complete from the start; empty if nothing is.

    Knows only what was recorded, not how versions are chosen: it replays the places and compares.
    """
    content: dict[int, VersionUid] = {}
    pins: dict[RequestId, Pinned] = {}
    ever: set[RequestId] = set()
    wrong: list[str] = []
    for number, entry in enumerate(entries):
        match entry:
            case Wrote(place=place, uid=uid):
                wrong += [
                    f"{number}: place {place} rewritten under {p.request}" for p in pins.values() if p.place == place
                ]
                content[place] = uid
            case Pinned(request=request, uid=uid, place=place):
                if request in ever:
                    wrong.append(f"{number}: {request} pinned again")
                if content.get(place) != uid:
                    wrong.append(f"{number}: {request} pinned to {uid}, but place {place} holds {content.get(place)}")
                ever.add(request)
                pins[request] = entry
            case Stepped(rows=rows):
                for request, place in rows:
                    pin = pins.get(request)
                    if pin is None:
                        wrong.append(f"{number}: {request} computed without a pin")
                    elif pin.place != place or content.get(place) != pin.uid:
                        wrong.append(f"{number}: {request} is pinned to {pin.uid}, got {content.get(place)}")
            case Released(request=request):
                if pins.pop(request, None) is None:
                    wrong.append(f"{number}: {request} released without a pin")
    return wrong + [f"end: {request} still pinned" for request in pins]
