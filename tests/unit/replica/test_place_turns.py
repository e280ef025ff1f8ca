"""More adapters than places and answers that take long: each adapter has its turn, also one whose request is late."""

from collections import deque

import numpy as np

from adapters.model import LoraWeights, Version
from adapters.places import Places
from db.records import AdapterName, Epoch, LoraSpec, VersionUid
from infra.clock import ManualClock
from serving.model import Request, RequestId, Slo, Started
from serving.replica.copying import Done
from serving.replica.fake_engine import FakeEngine, FakeTokenizer
from serving.replica.history import History
from serving.replica.line import HOLD_S
from serving.replica.residency import Residency
from serving.replica.scheduler import Scheduler

BUSY = (AdapterName("a"), AdapterName("b"))
RARE = AdapterName("rare")
WEIGHTS = LoraWeights(spec=LoraSpec(rank=1, alpha=1, targets=("q",)), tensors={"q": np.zeros(1, np.float32)})
STEP_S = 0.1
NEW = 100


def test_long_answers_in_every_row_keep_no_adapter_from_its_turn() -> None:
    clock = ManualClock()
    engine = FakeEngine(clock, rows=2, places=2, step_s=STEP_S)
    copies: deque[Done] = deque()
    copy = lambda place, weights, done: copies.append(done)  # noqa: E731
    residency = Residency(copy, Places(2, per_adapter=2), clock, history=History())

    def settle() -> None:
        residency.settle()
        while copies:
            copies.popleft()(None)
            residency.settle()

    for adapter in (*BUSY, RARE):
        uid = VersionUid(f"{adapter}1")
        residency.stage(Version(adapter=adapter, uid=uid, number=1), WEIGHTS)
        settle()
        residency.activate(adapter, uid, Epoch(1))
        settle()
    scheduler = Scheduler(engine.shape, residency, FakeTokenizer(), token_budget=64, max_queue=99)
    assert NEW * STEP_S > HOLD_S, "rows become free less often than a place is held"
    count, begun = 0, set[str]()

    def ask(adapter: AdapterName, ttft_s: float) -> None:
        nonlocal count
        count += 1
        request = Request(
            id=RequestId(f"{adapter}-{count}"),
            adapter=adapter,
            input_ids=(1, 2, 3),
            max_new_tokens=NEW,
            ignore_eos=True,
            slo=Slo(ttft_s=ttft_s, tpot_s=1.0),
            arrival_s=clock.monotonic(),
        )
        scheduler.submit(request)

    for turn in range(1000):
        if scheduler.queued < 8:
            for adapter in BUSY:
                ask(adapter, 900.0)
        if turn == 60:
            ask(RARE, 0.5)  # late before long: it gets every eighth turn
        plan = scheduler.plan(clock.monotonic())
        if plan.tokens:
            scheduler.apply(plan, engine.step(plan), clock.monotonic())
        else:
            clock.advance(0.01)
        settle()
        begun |= {e.version.adapter for _, e in scheduler.take_events() if isinstance(e, Started) and e.version}
        if RARE in begun:
            break
    assert begun == {*BUSY, RARE}
