"""A client's part of a round: what is probed, published, handed in."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from adapters import weights as codec
from adapters.model import LoraWeights, Version
from adapters.pair import Pair
from db.records import AdapterName, Epoch, Factor, LoraSpec, RoundId, VersionUid
from infra.clock import ManualClock
from serving.ports import ScoreResult, SliceReport, TrainState, TrainTask, TrainWork, Work, WorkState
from serving.replica.checkpoints import SavedRound
from serving.replica.fake_engine import FAKE_SHAPES, FakeScoreWork, FakeTrainer, FakeTrainWork
from serving.replica.shadow import Progress, Shadow, local_uid
from serving.rows import Row
from serving.wire.control import RoundBody

SPEC = LoraSpec(rank=2, alpha=4, targets=codec.targets(FAKE_SHAPES))
BASE = codec.initial(FAKE_SHAPES, SPEC, 0)
ROWS = tuple(Row(f"p{i}", "0123456789") for i in range(20))


class Scripted(FakeTrainer):
    """Trains as the fake one; its scores are written down beforehand."""

    def __init__(self, clock: ManualClock, ces: Sequence[float]) -> None:
        super().__init__(clock, slice_s=0.1, nan_loss_at=lambda: None)
        self.clock = clock
        self.ces = list(ces)
        self.scored: list[tuple[int, LoraWeights | None]] = []

    def score(self, rows: Sequence[Row], weights: LoraWeights | None) -> FakeScoreWork:
        self.scored.append((len(rows), weights))
        work, ce = super().score(rows, weights), self.ces.pop(0)
        tokens = tuple(1 for _ in rows)
        work.result = lambda: ScoreResult(nll_by_row=(ce,) * len(rows), tokens_by_row=tokens)  # type: ignore[method-assign]
        return work


def make(
    ces: Sequence[float], saved: SavedRound | None = None, clock: ManualClock | None = None, **changes: object
) -> tuple[Shadow, Scripted]:
    body = {"round_id": "r", "adapter": "code", "base_uid": "one", "epoch": 3, "factor": "B", "tokens": 88}
    body |= {"rows_per_step": 2, "lr": 1e-3, "swap_every": 2, "seed": 0, "deadline_s": 100}
    clock = clock or ManualClock()
    trainer = Scripted(clock, ces)
    one = Version(adapter=AdapterName("code"), uid=VersionUid("one"), number=7)
    pair = Pair(base=one, active=one, epoch=Epoch(3)).start_round(RoundId("r"), one.uid, Epoch(3))
    shadow = Shadow(
        RoundBody.model_validate({**body, **changes}),
        pair=pair,
        base=BASE,
        trainer=trainer,
        rows=ROWS,
        gate=ROWS,
        replica_id="r-1",
        clock=clock,
        checkpoint_s=0.5,
        saved=saved,
    )
    return shadow, trainer


def run(shadow: Shadow, *, publishing: bool = True, limit: int = 1000) -> list[Progress]:
    done: list[Progress] = []
    while len(done) < limit and (work := shadow.work(training=True, publishing=publishing)) is not None:
        done.append(shadow.slice(work, publishing=publishing))
    return done


def test_candidates_come_every_so_many_steps_and_at_the_end() -> None:
    shadow, trainer = make([1.0, 0.9, 0.8], swap_every=3)
    candidates = [p.candidate for p in run(shadow) if p.candidate is not None]
    assert [c.version.label for c in candidates] == ["7+3", "7+4"]
    assert [weights is BASE for _, weights in trainer.scored] == [True, False, False], "the base is the first bar"
    assert len({c.version.uid for c in candidates}) == 2
    assert candidates[0].lineage == shadow.lineage


def test_what_looks_worse_than_the_best_before_is_refused() -> None:
    shadow, _ = make([1.0, 0.5, 0.52, 0.56, float("nan")], swap_every=1)
    progress = run(shadow)
    assert [p.candidate.version.local_steps for p in progress if p.candidate is not None] == [1, 2]
    assert sum(p.refused for p in progress) == 2


def test_a_base_that_cannot_be_scored_stops_publishing_not_training() -> None:
    shadow, _ = make([float("nan")] * 9, swap_every=1)
    progress = run(shadow)
    assert not any(p.candidate for p in progress)
    assert progress[-1].result is not None or any(p.result for p in progress)


@pytest.mark.parametrize(("swap_every", "rows_per_step", "rows"), [(8, 4, 4), (1, 2, 1), (40, 4, 20)])
def test_a_probe_costs_at_most_its_part_of_the_training(swap_every: int, rows_per_step: int, rows: int) -> None:
    shadow, trainer = make([1.0, 1.0], swap_every=swap_every, rows_per_step=rows_per_step, tokens=10**6)
    run(shadow, limit=4 * swap_every + 1)
    assert trainer.scored[0][0] == rows
    assert rows == 1 or rows / 3 <= 0.05 * swap_every * rows_per_step


@pytest.mark.parametrize("changes", [{"swap_every": 0}, {}])
def test_without_publishing_nothing_is_probed(changes: dict[str, int]) -> None:
    shadow, trainer = make([], None, None, **changes)
    progress = run(shadow, publishing=not changes) if changes else run(shadow, publishing=False)
    assert trainer.scored == []
    assert progress[-1].result is not None


def test_the_result_is_handed_in_before_the_round_is_done() -> None:
    shadow, _ = make([1.0] * 9)
    results = [p.result for p in run(shadow) if p.result is not None]
    assert len(results) == 1
    assert shadow.status().state == "running"
    shadow.stored("updates/abc")
    status = shadow.status()
    assert (status.state, status.store_key, status.sha256) == ("done", "updates/abc", "abc")
    assert (status.tokens, status.steps, status.base_uid) == (88, 4, "one")


def test_a_shadow_is_overdue_only_while_it_trains() -> None:
    shadow, trainer = make([1.0] * 9)
    assert not shadow.overdue
    trainer.clock.advance(101)
    assert shadow.overdue
    run(shadow)
    assert not shadow.overdue


class Broken:
    """Training that fails with a slice."""

    steps = tokens = 0

    def __init__(self, report: SliceReport) -> None:
        self.report = report
        self.closed = False

    def next_slice_s(self) -> float:
        return 0.0

    def slice(self) -> SliceReport:
        return self.report

    def close(self) -> None:
        self.closed = True

    def shadow(self) -> LoraWeights:
        raise AssertionError("worthless")

    def state(self) -> TrainState:
        raise AssertionError("worthless")


@pytest.mark.parametrize(
    "report",
    [
        SliceReport(seconds=0.0, state=WorkState.FAILED, reason="planted"),
        SliceReport(seconds=0.0, state=WorkState.RUNNING, step_ended=True, tokens=1, loss=float("nan")),
        SliceReport(seconds=0.0, state=WorkState.RUNNING, step_ended=True, tokens=1, loss=None),
    ],
)
def test_training_that_goes_wrong_discards_the_shadow(report: SliceReport) -> None:
    broken = Broken(report)

    class Trains(Scripted):
        def train(  # type: ignore[override]
            self, task: TrainTask, base: LoraWeights, rows: Sequence[Row], state: TrainState | None = None
        ) -> TrainWork:
            return broken

    shadow, trainer = make([])
    body, pair_lineage = shadow.body, shadow.lineage
    one = shadow.base
    pair = Pair(base=one, active=one, epoch=Epoch(3)).start_round(RoundId("r"), one.uid, Epoch(3))
    assert pair.lineage == pair_lineage
    shadow = Shadow(
        body, pair=pair, base=BASE, trainer=Trains(trainer.clock, []), rows=ROWS, gate=ROWS, replica_id="r-1",
        clock=trainer.clock,
    )  # fmt: skip
    work = shadow.work(training=True, publishing=True)
    assert isinstance(work, Broken)
    shadow.slice(work, publishing=True)
    assert (shadow.state, broken.closed) == ("failed", True)
    assert shadow.work(training=True, publishing=True) is None
    shadow.stored("updates/late")
    assert shadow.status().store_key is None


def test_the_round_says_how_to_train() -> None:
    tasks: list[TrainTask] = []

    class Notes(Scripted):
        def train(
            self, task: TrainTask, base: LoraWeights, rows: Sequence[Row], state: TrainState | None = None
        ) -> FakeTrainWork:
            tasks.append(task)
            return super().train(task, base, rows, state)

    shadow, trainer = make([])
    changes = {"lr": 0.5, "lr_ratio": 8.0, "warmup_steps": 9, "max_grad_norm": 0.25, "factor": "both", "seed": 5}
    one = shadow.base
    pair = Pair(base=one, active=one, epoch=Epoch(3)).start_round(RoundId("r"), one.uid, Epoch(3))
    body = shadow.body.model_copy(update=changes)
    notes = Notes(trainer.clock, [])
    Shadow(body, pair=pair, base=BASE, trainer=notes, rows=ROWS, gate=ROWS, replica_id="r-1", clock=trainer.clock)
    assert tasks == [
        TrainTask(factor=Factor.BOTH, tokens=88, rows_per_step=2, lr=0.5, lr_ratio=8.0, warmup_steps=9,
                  max_grad_norm=0.25, seed=5)
    ]  # fmt: skip


def test_it_is_saved_at_an_interval_and_at_its_end() -> None:
    shadow, _ = make([1.0] * 99, tokens=330)
    progress = run(shadow)
    at_s = [i * 0.1 for i, p in enumerate(progress) if p.saved is not None]
    assert progress[-1].saved is not None or any(p.saved and p.result for p in progress)
    assert len(at_s) >= 3
    steps_s = 0.1 * max(b - a for a, b in pairwise(i for i, p in enumerate(progress) if p.report.step_ended))
    assert all(b - a <= 0.5 + steps_s + 1e-9 for a, b in pairwise([0.0, *at_s]))


def test_a_saved_shadow_goes_on_as_if_nothing_had_happened() -> None:
    """With its losses, its bar for what may be published, and its deadline."""
    ces = [1.0, 0.5, 0.52, 0.54, 0.54, 0.56, 0.36, 0.42, 0.3, 0.2, 0.1]
    whole, trainer = make(ces, swap_every=1, tokens=220)
    progress = run(whole)
    result = next(p.result for p in progress if p.result is not None)
    saved = [p.saved for p in progress if p.saved is not None][1]
    steps = saved.note.steps
    assert 2 <= steps <= 4
    clock = ManualClock()
    clock.advance(trainer.clock.wall() - clock.wall())  # the process was away until the other one had ended
    again, other = make(ces[steps:], saved, clock, swap_every=1, tokens=220)
    status = again.status()
    assert (status.steps, status.tokens, status.loss_first) == (steps, 22 * steps, whole.status().loss_first)
    rest = run(again)
    assert [w is BASE for _, w in other.scored] == [False] * len(other.scored), "its bar is known"

    def labels(progress: list[Progress]) -> list[str]:
        return [p.candidate.version.label for p in progress if p.candidate is not None]

    assert labels(rest) == [label for label in labels(progress) if int(label.partition("+")[2]) >= steps]
    ended = next(p.result for p in rest if p.result is not None)
    assert all(array.tobytes() == result.tensors[name].tobytes() for name, array in ended.tensors.items())
    told = {"steps", "tokens", "loss_first", "loss_last"}
    assert again.status().model_dump(include=told) == whole.status().model_dump(include=told)

    finished = next(p.saved for p in progress if p.saved is not None and p.result is not None)
    late, _ = make([], finished, clock, swap_every=1, tokens=220)
    assert run(late, publishing=False)[-1].result is not None, "only its update is left to hand in"
    clock.advance(100)
    overdue, _ = make([], saved, clock, swap_every=1, tokens=220)
    assert overdue.overdue, "the deadline is the round's, not the process's"


def published(progress: Sequence[Progress]) -> dict[int, tuple[VersionUid, dict[str, bytes]]]:
    """Return what passed its probe, by local steps; each uid at most once."""
    candidates = [p.candidate for p in progress if p.candidate is not None]
    assert len({c.version.uid for c in candidates}) == len(candidates), "a version was published twice"
    return {
        c.version.local_steps: (c.version.uid, {name: a.tobytes() for name, a in c.weights.tensors.items()})
        for c in candidates
    }


@pytest.mark.parametrize("first", [0.9, 1.2])
def test_a_candidate_whose_probe_a_kill_cut_short_is_probed_after_the_restart(first: float) -> None:
    """Whenever it is killed, what is published in the end is what would have been, bit for bit."""
    ces, taken = [1.0, first, 0.8, 0.9, 0.7, 0.6], (2, 4, 6, 8, 9)
    whole, _ = make(ces, tokens=198)
    progress = run(whole)
    want = published(progress)
    assert list(want) == [steps for steps in taken if steps != 6 and (steps != 2 or first < 1)]
    saves = {p.saved.note.steps: p.saved for p in progress if p.saved is not None}
    assert {2, 3, 9} <= saves.keys(), "with a candidate whose probe is still to come, without one, and at the end"
    for steps, saved in saves.items():
        known = saved.note.best_ce is not None
        again, trainer = make(ces[known + sum(at < steps for at in taken) :], saved, tokens=198)
        assert published(run(again)) == {at: version for at, version in want.items() if at >= steps}
        assert trainer.ces == [], "each candidate is probed once, the base only where no bar is known"


def test_a_candidate_from_before_a_restart_is_not_probed_where_nothing_may_be_published_now() -> None:
    whole, _ = make([1.0] * 9)
    saved = next(p.saved for p in run(whole) if p.saved is not None and p.saved.note.steps == 2)
    again, trainer = make([1.0] * 9, saved)
    run(again, publishing=False, limit=1)
    run(again)
    assert trainer.scored, "later ones are"
    again, trainer = make([], saved)
    assert run(again, publishing=False)[-1].result is not None
    assert trainer.scored == []


def test_a_local_uid_names_its_lineage() -> None:
    shadow, _ = make([])
    uids = {
        local_uid(replica, shadow.lineage, RoundId(round_id), steps)
        for replica in ("a", "b")
        for round_id in ("r", "s")
        for steps in (1, 2)
    }
    assert len(uids) == 8


def test_work_is_of_a_kind_the_loop_knows() -> None:
    shadow, _ = make([])
    work: Work | None = shadow.work(training=True, publishing=True)
    assert work is not None
    assert work.next_slice_s() == 0.1
    assert shadow.work(training=False, publishing=True) is None
