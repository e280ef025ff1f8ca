"""Training in the replica's loop gets what the SLO leaves, and nothing that would make a request late."""

import random
from collections.abc import Sequence

import pytest

from adapters import weights as codec
from adapters.memory import MemoryUpdateStore
from adapters.model import Version
from db.records import AdapterName, Epoch, LoraSpec, Split, VersionUid
from infra.clock import ManualClock
from infra.settings import Settings
from serving.model import Event, Failed, Finished, Request, RequestId, Slo, StepPlan, StepResult
from serving.replica.fake_engine import (
    FAKE_BACKBONE,
    FAKE_SHAPES,
    SLICES_PER_STEP,
    FakeEngine,
    FakeTokenizer,
)
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.rows import Row
from serving.wire.control import RoundBody

CODE = AdapterName("code")
SPEC = LoraSpec(rank=2, alpha=4, targets=codec.targets(FAKE_SHAPES))
ROWS = tuple(Row(f"p{i}", "xyz") for i in range(8))
STEP_S, SLICE_S = 0.05, 0.004


def left(tpot_s: float) -> float:
    """Return what part of the time streams leave that keep to seven tenths of their target."""
    return 1 - STEP_S / (0.7 * tpot_s)


class Counted(FakeEngine):
    """Counts its steps."""

    steps = 0

    def step(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        return super().step(plan)


class Site:
    """A replica in training without end, that the test turns. Time passes in steps and slices only."""

    def __init__(self, slo: Slo, *, rows: int = 8, slice_s: float = SLICE_S) -> None:
        self.clock = ManualClock()
        self.slo = slo
        self.slice_s = slice_s
        self.ended: dict[RequestId, Event] = {}
        self.asked = 0
        self.engine = Counted(self.clock, rows=rows, step_s=STEP_S, slice_s=slice_s)
        loader = Loader(MemoryUpdateStore(), shapes=FAKE_SHAPES, backbone=FAKE_BACKBONE)
        self.replica = Replica(
            self.engine,
            FakeTokenizer(),
            loader,
            Settings.model_validate({"replica": {"max_queue": 1000, "checkpoint_s": 1e9}}),
            self.clock,
            splits={Split.TRAIN: ROWS[:4], Split.GATE: ROWS[4:]},
            deliver=self.deliver,
        )
        loader.close()
        version = Version(adapter=CODE, uid=VersionUid("one"), number=1)
        self.replica.stage(version, codec.initial(FAKE_SHAPES, SPEC, 0))
        self.replica.activate(CODE, version.uid, Epoch(1))
        body = {"round_id": "r", "adapter": CODE, "base_uid": "one", "epoch": 1, "factor": "B", "tokens": 10**9}
        body |= {"rows_per_step": 1, "lr": 1e-3, "swap_every": 0, "seed": 1, "deadline_s": 1e9}
        self.replica.background.start_round(RoundBody.model_validate(body))

    def deliver(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        self.ended.update((request_id, event) for request_id, event in events if isinstance(event, Finished | Failed))

    def ask(self, new: int, *, prompt: str = "hello", arrival_s: float | None = None) -> None:
        self.asked += 1
        request = Request(
            id=RequestId(f"r{self.asked}"),
            adapter=CODE,
            input_ids=tuple(prompt.encode()),
            max_new_tokens=new,
            ignore_eos=True,
            slo=self.slo,
            arrival_s=self.clock.monotonic() if arrival_s is None else arrival_s,
        )
        self.replica.submit(request)

    @property
    def trained_s(self) -> float:
        """Seconds of the optimizer steps that have ended."""
        return self.replica.background.round_status("r").steps * SLICES_PER_STEP * self.slice_s

    def late(self) -> list[str]:
        """Return who has missed the SLO, and by what; everybody must have been answered."""
        assert len(self.ended) == self.asked
        missed = []
        for request_id, event in self.ended.items():
            assert isinstance(event, Finished)
            if event.ttft_s > self.slo.ttft_s or event.tpot_s > self.slo.tpot_s:
                missed.append(f"{request_id}: {event.ttft_s:.3f}, {event.tpot_s:.3f}")
        return missed


def keep(site: Site, streams: int, seconds: float, new: int = 30) -> None:
    """Turn for so long with so many requests under way at any time."""
    until_s = site.clock.monotonic() + seconds
    while site.clock.monotonic() < until_s:
        while site.asked - len(site.ended) < streams:
            site.ask(new + site.asked % 5)  # so that they don't all end together
        site.replica.turn()


def end(site: Site) -> None:
    for _ in range(10_000):
        if len(site.ended) == site.asked:
            return
        site.replica.turn()
    raise AssertionError("not everybody is answered")


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("tpot_s", [0.4, 0.2, 0.1])
def test_beside_streams_training_gets_what_their_slo_leaves(streams: int, tpot_s: float) -> None:
    site = Site(Slo(ttft_s=1.0, tpot_s=tpot_s))
    keep(site, streams, 5.0)
    before_s = site.trained_s
    keep(site, streams, 60.0)
    share = (site.trained_s - before_s) / 60
    end(site)
    assert site.late() == []
    assert share > left(tpot_s) - 0.02


@pytest.mark.parametrize("per_s", [0.3, 0.9])
def test_between_arrivals_at_random_training_gets_at_least_as_much(per_s: float) -> None:
    site, chance = Site(Slo(ttft_s=1.0, tpot_s=0.2), rows=16), random.Random(3)
    begin_s = due_s = site.clock.monotonic()
    while site.clock.monotonic() < begin_s + 120:
        while due_s <= site.clock.monotonic():
            site.ask(20, arrival_s=due_s)
            due_s += chance.expovariate(per_s)
        site.replica.turn()
    share = site.trained_s / 120
    end(site)
    assert len(site.ended) > 80 * per_s
    assert site.late() == []
    assert share > left(0.2)


def test_streams_that_leave_nothing_are_served_alone() -> None:
    """One slice for each token would be too much."""
    site = Site(Slo(ttft_s=1.0, tpot_s=STEP_S + SLICE_S / 2))
    for _ in range(20):
        site.replica.turn()
    idle_s = site.trained_s
    assert idle_s > 0
    begin_s, steps = site.clock.monotonic(), site.engine.steps
    keep(site, 3, 30.0)
    assert site.clock.monotonic() - begin_s == pytest.approx(STEP_S * (site.engine.steps - steps)), "no slice has run"
    end(site)
    assert site.late() == []
    for _ in range(20):
        site.replica.turn()
    assert site.trained_s > idle_s, "it goes on when they have gone"


def test_while_somebody_waits_for_a_row_those_who_have_one_are_not_held_up() -> None:
    """Their own targets would leave six sevenths of the time, and whoever waits would wait seven times as long."""
    site = Site(Slo(ttft_s=1.0, tpot_s=0.5), rows=2)
    keep(site, 3, 60.0, new=8)
    end(site)
    assert site.late() == []


def test_prompts_in_a_burst_come_before_training() -> None:
    """The last one's first token takes five steps of the six for which there is time."""
    site = Site(Slo(ttft_s=6 * STEP_S, tpot_s=0.4), slice_s=STEP_S)
    for burst in range(20):
        for i in range(6):
            site.ask(5, prompt=f"{burst}{i}".ljust(100, "x"))
        end(site)
    assert site.late() == []
    assert site.trained_s > 0, "streams have left some time"
