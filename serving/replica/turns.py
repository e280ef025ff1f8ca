"""In which order prompts are computed. Pure.

Those that can still have their first token in time come first, by the time when it is due; the others, which nothing
can help any more, get what is left. So that they get their answers too, every ``LATE_EVERY``-th request to begin is one
of them, whatever waits beside it.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain

from serving.model import Priority, Request, RequestId

BATCH_DELAY_S = 10.0
"""A batch request queues as if it had come this much later: interactive ones pass it, but not for ever."""
LATE_EVERY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request without its first token."""

    request: Request
    left: int
    """Tokens of its prompt that are still to be computed."""
    begun: bool
    """Whether it has a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Prompts in the order of their turns."""

    timely: list[Prompt]
    """Among them, and first, a late one whose turn it is."""
    late: list[Prompt]

    def __iter__(self) -> Iterator[Prompt]:
        return chain(self.timely, self.late)


class Turns:
    """Keeps count of who was passed over."""

    def __init__(self) -> None:
        self._late: set[RequestId] = set()
        """Late ones that could have begun when order was last made."""
        self._passed = 0
        """Timely ones that have begun since a late one did, while one waited."""

    def order(
        self, prompts: Iterable[Prompt], *, needs_s: Callable[[int], float], held_up: Set[RequestId], now_s: float
    ) -> Order:
        """Sort. ``needs_s`` predicts the seconds that so many prompt tokens take; who is ``held_up`` can't begin."""
        timely: list[Prompt] = []
        late: list[Prompt] = []
        for prompt in prompts:
            due_s = prompt.request.arrival_s + prompt.request.slo.ttft_s
            (late if now_s + needs_s(prompt.left) > due_s else timely).append(prompt)
        timely.sort(key=lambda p: _since_s(p.request) + p.request.slo.ttft_s)
        # Of the late ones, those that have begun keep a row from others as long as they last.
        late.sort(key=lambda p: (not p.begun, _since_s(p.request)))
        able = [p for p in late if not p.begun and p.request.id not in held_up]
        self._late = {p.request.id for p in able}
        if able and self._passed >= LATE_EVERY - 1:
            late.remove(able[0])
            timely.insert(0, able[0])
        return Order(timely=timely, late=late)

    def began(self, request_id: RequestId) -> None:
        """A request has got its row."""
        if request_id in self._late or len(self._late) == 0:
            self._passed = 0
        else:
            self._passed += 1
        self._late.discard(request_id)


def _since_s(request: Request) -> float:
    return request.arrival_s + (BATCH_DELAY_S if request.priority is Priority.BATCH else 0.0)
