"""Training that has ended: closed beside the engine's thread, before any other takes memory."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from adapters import weights as codec
from adapters.memory import MemoryUpdateStore
from adapters.model import Version
from db.records import AdapterName, Epoch, LoraSpec, Split, VersionUid
from infra.clock import ManualClock
from infra.settings import Settings
from serving.ports import SliceReport, WorkState
from serving.replica.closing import Closer
from serving.replica.fake_engine import FAKE_BACKBONE, FAKE_SHAPES, FakeEngine, FakeTokenizer
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.rows import Row
from serving.wire.control import RoundBody

CODE = AdapterName("code")
SPEC = LoraSpec(rank=2, alpha=4, targets=codec.targets(FAKE_SHAPES))
ROWS = tuple(Row(f"p{i}", "xyz") for i in range(8))


class Noted:
    """Work that notes in which thread it is closed."""

    closed_in: int | None = None

    def next_slice_s(self) -> float:
        return 0.0

    def slice(self) -> SliceReport:
        return SliceReport(seconds=0.0, state=WorkState.RUNNING)

    def close(self) -> None:
        self.closed_in = threading.get_ident()


class Later(Executor):
    """Runs its calls when told to."""

    def __init__(self) -> None:
        self.calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.calls.append((future, fn, args))
        return future

    def run_all(self) -> None:
        while self.calls:
            future, fn, args = self.calls.popleft()
            future.set_result(fn(*args))


def test_work_is_closed_in_the_thread_that_there_is() -> None:
    work = Noted()
    Closer().close(work)
    assert work.closed_in == threading.get_ident()
    with ThreadPoolExecutor(max_workers=1) as thread:
        closer = Closer(thread)
        closer.close(work)
    assert work.closed_in not in (None, threading.get_ident())
    assert closer.idle


def test_a_round_trains_only_when_what_the_one_before_held_is_free() -> None:
    copier, clock = Later(), ManualClock()
    loader = Loader(MemoryUpdateStore(), shapes=FAKE_SHAPES, backbone=FAKE_BACKBONE, thread=Later())
    replica = Replica(
        FakeEngine(clock),
        FakeTokenizer(),
        loader,
        Settings(),
        clock,
        splits={Split.TRAIN: ROWS[:4], Split.GATE: ROWS[4:]},
        deliver=lambda events: None,
        copier=copier,
    )
    replica.stage(Version(adapter=CODE, uid=VersionUid("one"), number=1), codec.initial(FAKE_SHAPES, SPEC, 0))
    replica.activate(CODE, VersionUid("one"), Epoch(1))
    copier.run_all()
    replica.turn()

    def begin(round_id: str) -> None:
        body = {"round_id": round_id, "adapter": CODE, "base_uid": "one", "epoch": 1, "factor": "B", "tokens": 10**9}
        body |= {"rows_per_step": 1, "lr": 1e-3, "swap_every": 0, "seed": 1, "deadline_s": 1e9}
        replica.background.start_round(RoundBody.model_validate(body))

    begin("first")
    assert replica.background.next_work() is not None
    replica.background.stop_round("first")
    begin("second")
    assert len(copier.calls) == 1
    assert replica.background.next_work() is None
    copier.run_all()
    assert replica.background.next_work() is not None
