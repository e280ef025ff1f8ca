"""More adapters than places: whatever happens, each request gets its version in the end, and keeps it."""

from collections import deque

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapters.model import LoraWeights, Version
from adapters.places import Places
from db.records import AdapterName, Epoch, LoraSpec, RoundId, VersionUid
from infra.clock import ManualClock
from infra.errors import AdapterError, IncompatibleAdapter, NotLoaded, UnknownVersion
from serving.model import RequestId
from serving.replica.copying import Done
from serving.replica.history import Entry, History, violations
from serving.replica.residency import Residency

ADAPTERS = tuple(AdapterName(name) for name in "abcde")
HOT = ADAPTERS[:3]
PLACES = 3
ROWS = 6
WEIGHTS = LoraWeights(spec=LoraSpec(rank=1, alpha=1, targets=("q",)), tensors={"q": np.zeros(1, np.float32)})


class ResidencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.copies: deque[Done] = deque()
        self.entries: list[Entry] = []
        self.residency = Residency(
            lambda place, weights, done: self.copies.append(done),
            Places(PLACES, per_adapter=2),
            self.clock,
            history=History(sink=self.entries.append),
            check=lambda weights, done: self.copies.append(done),
        )
        self.waiting: dict[RequestId, AdapterName] = {}
        self.running: dict[RequestId, tuple[VersionUid, int]] = {}
        self.failed: set[RequestId] = set()
        self.count = 0
        self.epochs = dict.fromkeys(ADAPTERS, 0)

    @initialize()
    def first_versions(self) -> None:
        for adapter in ADAPTERS:
            self.promote(adapter)
            self.all_copied()
        assert self.residency.pairs.keys() == set(ADAPTERS)

    # Requests, as the scheduler treats them.

    @rule(adapter=st.sampled_from(ADAPTERS))
    def arrive(self, adapter: AdapterName) -> None:
        self.count += 1
        self.waiting[RequestId(f"r{self.count}")] = adapter

    @rule()
    def plan(self) -> None:
        for request, adapter in list(self.waiting.items()):
            if len(self.running) == ROWS:
                break
            try:
                pinned = self.residency.pin(adapter, request)
            except NotLoaded:
                del self.waiting[request]
                self.failed.add(request)
                continue
            if pinned is not None:
                del self.waiting[request]
                version, place = pinned
                assert version == self.residency.pair(adapter).active
                self.running[request] = version.uid, place
        self.residency.settle()

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def cancel(self, data: st.DataObject) -> None:
        del self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.residency.settle()

    # Copies and versions.

    @rule(refused=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.copies)
    def copied(self, refused: bool) -> None:
        self.copies.popleft()(IncompatibleAdapter("planted") if refused else None)
        self.residency.settle()

    @rule(adapter=st.sampled_from(ADAPTERS))
    def promote(self, adapter: AdapterName) -> None:
        self.epochs[adapter] += 1
        version = self.version(adapter, number=self.epochs[adapter], steps=0)
        self.residency.stage(version, WEIGHTS)
        try:
            self.residency.activate(adapter, version.uid, Epoch(self.epochs[adapter]))
        except UnknownVersion:
            assert version.uid not in self.residency._host

    @rule(adapter=st.sampled_from(ADAPTERS))
    def publish(self, adapter: AdapterName) -> None:
        pair = self.residency.pair(adapter)
        pair = self.residency.start_round(adapter, RoundId("r"), pair.base.uid, pair.epoch)
        try:
            self.residency.publish(
                self.version(adapter, number=1, steps=self.count), WEIGHTS, pair.lineage, ready_s=self.clock.monotonic()
            )
        except AdapterError:
            assert self.residency.waiting_for(adapter) is not None

    @rule(adapter=st.sampled_from(ADAPTERS))
    def roll_back(self, adapter: AdapterName) -> None:
        try:
            self.residency.roll_back(adapter)
        except UnknownVersion:
            assert self.residency.pair(adapter).previous is None

    # Laws.

    @invariant()
    def a_running_request_keeps_its_version(self) -> None:
        for uid, place in self.running.values():
            assert self.residency.places.uid_at(place) == uid

    @invariant()
    def every_version_in_force_is_in_host_memory(self) -> None:
        for pair in self.residency.pairs.values():
            for uid in pair.kept:
                self.residency.weights(uid)

    def teardown(self) -> None:
        """Also while three adapters are asked for all the time, so that every place is in use at every moment."""
        for adapter in ADAPTERS:
            self.arrive(adapter)
        old, self.waiting = self.waiting, {}
        for request in list(self.running):
            self.end(request)
        self.go_on(30)
        assert {adapter for adapter in HOT if self.residency.pair(adapter).active.uid in dict(self.running.values())}
        self.waiting = {**old, **self.waiting}
        self.go_on(400, until=set(old))
        assert not old.keys() & self.waiting.keys(), f"these wait for ever: {self.residency.awaited()}"
        for request in list(self.running):
            self.end(request)
        assert self.residency.places.pins() == {}
        assert violations(self.entries) == []

    # Helpers.

    def go_on(self, turns: int, *, until: "set[RequestId] | None" = None) -> None:
        """Answer one request every few turns, while more and more ask for the three."""
        for turn in range(turns):
            if until is not None and not until & self.waiting.keys():
                return
            for adapter in HOT:
                if list(self.waiting.values()).count(adapter) < 2:
                    self.arrive(adapter)
            self.all_copied()
            self.plan()
            self.clock.advance(0.1)
            if turn % 3 == 0 and self.running:
                self.end(next(iter(self.running)))

    def version(self, adapter: AdapterName, *, number: int, steps: int) -> Version:
        self.count += 1
        return Version(adapter=adapter, uid=VersionUid(f"{adapter}{self.count}"), number=number, local_steps=steps)

    def all_copied(self) -> None:
        for _ in range(50):
            if not self.copies:
                return
            self.copied(refused=False)
        raise AssertionError("versions push each other out without end")

    def end(self, request: RequestId) -> None:
        del self.running[request]
        self.residency.release(request)
        self.residency.settle()


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)
