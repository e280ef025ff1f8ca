"""No sequence of requests, steps, swaps, rounds, failures and cancellations leaks anything or mixes versions up."""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapters import weights as codec
from adapters.memory import MemoryUpdateStore
from adapters.model import LoraWeights, Version
from adapters.pair import Lineage
from db.records import AdapterName, Epoch, LoraSpec, Split, VersionUid
from infra.clock import ManualClock
from infra.errors import AdapterError, CollmError, StepFailed, VersionConflict
from infra.settings import Settings
from serving.model import Event, Failed, Finished, Request, RequestId, Slo, Started, StepPlan, StepResult
from serving.replica.fake_engine import (
    FAKE_BACKBONE,
    FAKE_SHAPES,
    FakeEngine,
    FakeTokenizer,
    expected_tokens,
    fingerprint,
)
from serving.replica.history import Entry, History, Wrote, violations
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.replica.shadow import Shadow, local_uid
from serving.rows import Row
from serving.wire.control import RoundBody, Swap

ADAPTERS = (AdapterName("code"), AdapterName("chat"), AdapterName("shell"))
REPLICA_ID = "machine"
SPEC = LoraSpec(rank=2, alpha=4, targets=codec.targets(FAKE_SHAPES))
BUDGET = 6
ROWS = tuple(Row(f"p{i}", "xyz") for i in range(12))


class Inline(Executor):
    """Runs everything at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except CollmError as error:
            future.set_exception(error)
        return future


class Later(Executor):
    """Runs a call when told to."""

    def __init__(self) -> None:
        self.calls: deque[tuple[Future[Any], Any, tuple[Any, ...]]] = deque()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.calls.append((future, fn, args))
        return future

    def run_one(self) -> None:
        future, fn, args = self.calls.popleft()
        try:
            future.set_result(fn(*args))
        except CollmError as error:
            future.set_exception(error)


class Checked(FakeEngine):
    """Checks every plan."""

    last_written: LoraWeights

    def write(self, place: int, weights: LoraWeights) -> None:
        super().write(place, weights)
        self.last_written = weights

    def step(self, plan: StepPlan) -> StepResult:
        assert 0 < plan.tokens <= BUDGET
        rows = [p.row for p in plan.prefills] + [d.row for d in plan.decodes]
        assert len(rows) == len(set(rows))
        return super().step(plan)


class Watched(Replica):
    """Tells of each swap while it is made."""

    watch: Callable[[Swap], None]

    def _swapped(self, swap: Swap) -> None:
        self.watch(swap)
        super()._swapped(swap)


def make_weights(seed: int) -> LoraWeights:
    random = np.random.default_rng(seed)
    shapes = codec.manifest(FAKE_SHAPES, SPEC)
    return LoraWeights(spec=SPEC, tensors={n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()})


class ReplicaMachine(RuleBasedStateMachine):
    lineages = Bundle("lineages")
    places = 5

    def __init__(self, copier: Executor | None = None) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.engine = Checked(self.clock, rows=3, max_total_tokens=40, places=self.places, step_s=0.01, slice_s=0.002)
        self.entries: list[Entry] = []
        self.events: dict[RequestId, list[Event]] = {}
        self.requests: dict[RequestId, Request] = {}
        self.cancelled: set[RequestId] = set()
        self.weights: dict[VersionUid, LoraWeights] = {}
        self.prints: dict[VersionUid, int] = {}
        """What each version's bytes were when it was new."""
        self.born: dict[VersionUid, Lineage] = {}
        """What local versions of our own descend from."""
        self.activated: dict[tuple[AdapterName, int], VersionUid] = {}
        """(adapter, epoch) → what came with it."""
        self.served: set[VersionUid] = set()
        self.shadows: list[Shadow] = []
        self.flipped: set[tuple[AdapterName, int]] = set()
        self.epochs = dict.fromkeys(ADAPTERS, 0)
        self.seed = 0
        replica = {"id": REPLICA_ID, "token_budget": BUDGET, "max_queue": 4, "versions_per_adapter": 3}
        # Prompts of two letters: many begin alike, and go on from what another one has left in its row.
        settings = Settings.model_validate({"replica": {**replica, "prefix_min_tokens": 2}})
        loader = Loader(MemoryUpdateStore(self.clock), shapes=FAKE_SHAPES, backbone=FAKE_BACKBONE, thread=Inline())
        self.replica = Watched(
            self.engine,
            FakeTokenizer(),
            loader,
            settings,
            self.clock,
            splits={Split.TRAIN: ROWS[:8], Split.GATE: ROWS[8:]},
            deliver=self.deliver,
            copier=copier,
            history=History(sink=self.record),
        )
        self.replica.watch = self.swapped

    def record(self, entry: Entry) -> None:
        self.entries.append(entry)
        if isinstance(entry, Wrote):
            self.weights.setdefault(entry.uid, self.engine.last_written)
            written = fingerprint(self.engine.last_written)
            assert self.prints.setdefault(entry.uid, written) == written, "a version's weights changed"

    def swapped(self, swap: Swap) -> None:
        """A stale version never wins, whatever came between its making and its turn."""
        adapter = AdapterName(swap.adapter)
        pair, uid = self.replica.residency.pair(adapter), VersionUid(swap.uid)
        assert pair.active.uid == uid
        if swap.kind == "federated":
            assert self.activated[adapter, pair.epoch] == uid
            assert all(epoch <= pair.epoch for name, epoch in self.flipped if name == adapter)
            assert (adapter, pair.epoch) not in self.flipped
            self.flipped.add((adapter, pair.epoch))
        elif swap.kind == "local":
            assert pair.may_publish
            assert self.lineage_of(uid, pair.active.local_steps) == pair.lineage
        else:
            assert uid in self.served
        self.served.add(uid)

    def lineage_of(self, uid: VersionUid, steps: int) -> Lineage:
        if uid in self.born:
            return self.born[uid]
        made = {local_uid(REPLICA_ID, x.lineage, x.round_id, steps): x.lineage for x in self.shadows}
        return made[uid]

    def deliver(self, events: Any) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    @initialize()
    def first_versions(self) -> None:
        for adapter in ADAPTERS:
            self.promote(adapter, 1)

    # Requests.

    @rule(
        adapter=st.sampled_from([*ADAPTERS, None, AdapterName("unknown")]),
        prompt=st.text("ab", min_size=1, max_size=14),
        new=st.integers(1, 12),
    )
    def submit(self, adapter: AdapterName | None, prompt: str, new: int) -> None:
        request = Request(
            id=RequestId(f"r{len(self.requests)}"),
            adapter=adapter,
            input_ids=tuple(prompt.encode()),
            max_new_tokens=new,
            slo=Slo(ttft_s=1, tpot_s=0.1),
            arrival_s=self.clock.monotonic(),
        )
        self.requests[request.id] = request
        self.events[request.id] = []
        self.replica.submit(request)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if not self.ended(request_id):
            self.cancelled.add(request_id)
        self.replica.cancel(request_id)

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.replica.turn()

    @rule()
    def failing_step(self) -> None:
        self.engine.fail_next = StepFailed("planted")
        self.replica.turn()
        self.engine.fail_next = None

    # Versions.

    @rule(adapter=st.sampled_from(ADAPTERS), times=st.integers(1, 4))
    def promote(self, adapter: AdapterName, times: int) -> None:
        for _ in range(times):
            self.epochs[adapter] += 1
            version, made = self.new_version(adapter, number=self.epochs[adapter])
            self.activated[adapter, self.epochs[adapter]] = version.uid
            self.replica.residency.stage(version, made)
            self.replica.activate(adapter, version.uid, Epoch(self.epochs[adapter]))

    @rule(adapter=st.sampled_from(ADAPTERS), times=st.integers(2, 5), turns=st.integers(1, 3))
    def swap_under_a_request(self, adapter: AdapterName, times: int, turns: int) -> None:
        self.submit(adapter, "ab", 12)
        for _ in range(times):
            self.turn(turns)
            self.promote(adapter, 1)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def stage_only(self, adapter: AdapterName) -> None:
        self.replica.residency.stage(*self.new_version(adapter, number=99))

    @rule(adapter=st.sampled_from(ADAPTERS))
    def stale_promotion(self, adapter: AdapterName) -> None:
        version, made = self.new_version(adapter, number=98)
        self.replica.residency.stage(version, made)
        before = self.replica.residency.pair(adapter)
        try:
            self.replica.activate(adapter, version.uid, before.epoch)
        except VersionConflict:
            assert self.replica.residency.pair(adapter) == before
        else:
            raise AssertionError("a stale promotion was accepted")

    @rule(adapter=st.sampled_from(ADAPTERS))
    def broken_version(self, adapter: AdapterName) -> None:
        version, made = self.new_version(adapter, number=97)
        name = min(made.tensors)
        broken = LoraWeights(spec=SPEC, tensors={**made.tensors, name: made.tensors[name].T})
        before = self.replica.residency.pair(adapter)
        try:
            self.replica.residency.stage(version, broken)
            self.replica.activate(adapter, version.uid, Epoch(self.epochs[adapter] + 1))
        except AdapterError:
            pass
        self.replica.residency.settle()
        after = self.replica.residency.pair(adapter)
        assert after.active != version
        assert after.epoch >= before.epoch

    @rule(adapter=st.sampled_from(ADAPTERS))
    def roll_back(self, adapter: AdapterName) -> None:
        try:
            self.replica.roll_back(adapter)
        except AdapterError:
            assert self.replica.residency.pair(adapter).previous is None

    # Rounds and local versions.

    @rule(adapter=st.sampled_from(ADAPTERS), tokens=st.integers(4, 60), swap_every=st.integers(0, 2))
    def start_round(self, adapter: AdapterName, tokens: int, swap_every: int) -> None:
        pair = self.replica.residency.pair(adapter)
        self.seed += 1
        body = RoundBody(
            round_id=f"round-{self.seed}",
            adapter=adapter,
            base_uid=pair.base.uid,
            epoch=pair.epoch,
            factor="B",
            tokens=tokens,
            rows_per_step=1,
            lr=1e-3,
            swap_every=swap_every,
            seed=self.seed,
            deadline_s=60,
        )
        try:
            self.replica.background.start_round(body)
        except VersionConflict:
            assert self.replica.background.shadow is not None
        else:
            assert self.replica.background.shadow is not None
            self.shadows.append(self.replica.background.shadow)

    @rule()
    @precondition(lambda self: self.replica.background.shadow is not None)
    def stop_round(self) -> None:
        shadow = self.replica.background.shadow
        assert shadow is not None
        self.replica.background.stop_round(shadow.round_id)

    @rule(target=lineages, adapter=st.sampled_from(ADAPTERS))
    def remember(self, adapter: AdapterName) -> tuple[AdapterName, Lineage]:
        return adapter, self.replica.residency.pair(adapter).lineage

    @rule(remembered=lineages)
    def publish(self, remembered: tuple[AdapterName, Lineage]) -> None:
        adapter, lineage = remembered
        version, made = self.new_version(adapter, number=1, steps=self.seed + 1)
        self.born[version.uid] = lineage
        pair = self.replica.residency.pair(adapter)
        try:
            self.replica.residency.publish(version, made, lineage, ready_s=self.clock.monotonic())
        except VersionConflict:
            assert self.replica.residency.pair(adapter) == pair
        else:
            assert lineage == pair.lineage
            assert pair.may_publish

    # Laws.

    @invariant()
    def rows_and_pins_are_those_of_running_requests(self) -> None:
        scheduler, places = self.replica.scheduler, self.replica.residency.places
        runs = {r: run for r in self.requests if (run := scheduler.run_of(r)) is not None}
        assert scheduler.running == len(runs)
        assert scheduler.kv_used == len(runs) / self.engine.shape.rows
        assert {r: scheduler.owner(run.row) for r, run in runs.items()} == {r: r for r in runs}
        assert places.pins() == Counter(run.version.uid for run in runs.values() if run.version is not None)

    @invariant()
    def a_pinned_versions_bytes_never_change(self) -> None:
        """Neither where it is served from nor in host memory, whatever is copied, trained or promoted meanwhile."""
        for request_id in self.requests:
            run = self.replica.scheduler.run_of(request_id)
            if run is not None and run.version is not None:
                uid = run.version.uid
                assert self.replica.residency.places.uid_at(run.place) == uid
                assert self.engine._prints[run.place] == self.prints[uid]
                assert fingerprint(self.replica.residency.weights(uid)) == self.prints[uid]

    @invariant()
    def every_version_in_force_is_in_host_memory(self) -> None:
        """It has no place, perhaps: then it comes in when a request asks for it."""
        for pair in self.replica.residency.pairs.values():
            for uid in pair.kept:
                kept = fingerprint(self.replica.residency.weights(uid))
                assert self.prints.get(uid, kept) == kept

    @invariant()
    def host_copies_are_bounded(self) -> None:
        assert len(self.replica.residency._host) <= 5 + len(ADAPTERS) * (3 + 4 + 1)

    def teardown(self) -> None:
        for _ in range(2000):
            self.go_on()
            if not (self.replica.scheduler.running or self.replica.scheduler.queued):
                break
        self.rows_and_pins_are_those_of_running_requests()
        assert self.replica.scheduler.kv_used == 0
        assert self.replica.residency.places.pins() == {}
        assert violations(self.entries) == []
        for request_id in self.requests:
            self.check_answer(request_id)

    def go_on(self) -> None:
        self.replica.turn()

    def check_answer(self, request_id: RequestId) -> None:
        request, events = self.requests[request_id], self.events[request_id]
        ends = [e for e in events if isinstance(e, Finished | Failed)]
        if request_id in self.cancelled:
            assert ends == []
            return
        assert len(ends) == 1
        assert events[-1] is ends[0]
        if not isinstance(ends[0], Finished):
            return
        (started,) = [e for e in events if isinstance(e, Started)]
        worn = None if started.version is None else self.weights[started.version.uid]
        want = expected_tokens(request.input_ids, worn, request.max_new_tokens)
        assert [e.token.id for e in events if hasattr(e, "token")] == want

    # Helpers.

    def ended(self, request_id: RequestId) -> bool:
        return any(isinstance(e, Finished | Failed) for e in self.events[request_id])

    def new_version(self, adapter: AdapterName, *, number: int, steps: int = 0) -> tuple[Version, LoraWeights]:
        self.seed += 1
        made = make_weights(self.seed)
        uid = VersionUid(f"{adapter}-{self.seed}")
        self.weights[uid], self.prints[uid] = made, fingerprint(made)
        return Version(adapter=adapter, uid=uid, number=number, local_steps=steps), made


TestReplica = ReplicaMachine.TestCase
TestReplica.settings = hypothesis_settings(max_examples=80, stateful_step_count=30, deadline=None)


class BesideMachine(ReplicaMachine):
    """Versions are copied into their places by another thread, which may take its time."""

    def __init__(self) -> None:
        self.copier = Later()
        super().__init__(self.copier)

    @initialize()
    def first_versions(self) -> None:
        super().first_versions()
        while self.copier.calls:
            self.copied()

    @rule()
    @precondition(lambda self: self.copier.calls)
    def copied(self) -> None:
        self.copier.run_one()
        self.replica.turn()

    def go_on(self) -> None:
        while self.copier.calls:
            self.copied()
        super().go_on()


TestBeside = BesideMachine.TestCase
TestBeside.settings = hypothesis_settings(max_examples=80, stateful_step_count=30, deadline=None)


class CrowdedMachine(BesideMachine):
    """Fewer places than versions in force: requests wait for theirs, and places change hands all the time."""

    places = 2

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.replica.turn()


TestCrowded = CrowdedMachine.TestCase
TestCrowded.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
