"""What Prometheus sees of a replica's versions, by adapter and version: what is gone vanishes."""

import re
from collections.abc import Sequence

import numpy as np

from adapters import weights as codec
from adapters.memory import MemoryUpdateStore
from adapters.model import LoraWeights, Version
from db.records import AdapterName, Epoch, LoraSpec, Split, VersionUid
from infra.clock import ManualClock
from infra.settings import Settings
from serving.model import Event, Request, RequestId, Slo
from serving.replica.fake_engine import FAKE_BACKBONE, FAKE_SHAPES, FakeEngine, FakeTokenizer
from serving.replica.loader import Loader
from serving.replica.loop import GAUGE_EVERY_S, Replica
from serving.rows import Row
from serving.wire.control import RoundBody

SPEC = LoraSpec(rank=2, alpha=4, targets=codec.targets(FAKE_SHAPES))
CODE, CHAT = AdapterName("code"), AdapterName("chat")
ROWS = tuple(Row(f"p{i}", "xyz") for i in range(8))


class Site:
    """A replica with two places that the test turns."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        loader = Loader(MemoryUpdateStore(), shapes=FAKE_SHAPES, backbone=FAKE_BACKBONE)
        self.replica = Replica(
            FakeEngine(self.clock, places=2, step_s=0.01, slice_s=0.05),
            FakeTokenizer(),
            loader,
            Settings.model_validate({"replica": {"versions_per_adapter": 2}}),
            self.clock,
            splits={Split.TRAIN: ROWS[:4], Split.GATE: ROWS[4:]},
            deliver=self.deliver,
        )
        loader.close()

    def deliver(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        pass

    def promote(self, adapter: AdapterName, number: int) -> None:
        draw = np.random.default_rng(number)
        tensors = {n: draw.normal(size=s).astype(np.float32) for n, s in codec.manifest(FAKE_SHAPES, SPEC).items()}
        version = Version(adapter=adapter, uid=VersionUid(f"{adapter}{number}"), number=number)
        self.replica.stage(version, LoraWeights(spec=SPEC, tensors=tensors))
        self.replica.activate(adapter, version.uid, Epoch(number))

    def ask(self, adapter: AdapterName | None, prompt: str, new: int) -> None:
        request = Request(
            id=RequestId(f"{adapter} {prompt}"),
            adapter=adapter,
            input_ids=tuple(prompt.encode()),
            max_new_tokens=new,
            ignore_eos=True,
            slo=Slo(ttft_s=1.0, tpot_s=0.02),
            arrival_s=self.clock.monotonic(),
        )
        self.replica.submit(request)

    def shown(self, name: str) -> dict[str, float]:
        """Return the values of a metric by labels, after a turn."""
        self.clock.advance(GAUGE_EVERY_S)
        self.replica.turn()
        text = self.replica.metrics.render().decode()
        return {labels: float(value) for labels, value in re.findall(rf"^{name}\{{(.*)\}} (.*)$", text, re.MULTILINE)}


def test_versions_are_shown_while_they_are_here() -> None:
    site = Site()
    site.promote(CODE, 1)
    site.ask(CODE, "abc", 100)
    site.ask(None, "ab", 100)
    one, other = 'adapter="code",version="1"', 'adapter="chat",version="1"'
    assert site.shown("collm_pinned_requests") == {one: 1.0}
    site.promote(CHAT, 1)
    assert site.shown("collm_resident_versions") == {one: 1.0, other: 1.0}
    site.promote(CODE, 2)
    two = 'adapter="code",version="2"'
    assert site.shown("collm_resident_versions") == {one: 1.0, two: 1.0}, "chat's version gave way"
    assert site.shown("collm_active_versions") == {two: 1.0, other: 1.0}, "it comes in when it is asked for"
    assert site.shown("collm_pinned_requests") == {one: 1.0, two: 0.0}
    site.promote(CODE, 3)
    assert site.shown("collm_active_versions") == {two: 1.0, other: 1.0}, "no place is free yet"
    site.replica.cancel(RequestId("code abc"))
    site.replica.turn()
    assert site.shown("collm_resident_versions").keys() == {two, 'adapter="code",version="3"'}


def test_kv_is_shown_by_version() -> None:
    site = Site()
    site.promote(CODE, 1)
    site.ask(CODE, "abc", 50)
    site.ask(None, "ab", 50)
    site.replica.turn()
    for computed in (1, 2):
        assert site.shown("collm_kv_tokens") == {
            'adapter="code",version="1"': 3 + computed,
            'adapter="",version=""': 2 + computed,
        }
    for _ in range(60):
        site.replica.turn()
    assert site.shown("collm_kv_tokens") == {}


def test_waits_and_preemptions_are_counted_by_adapter() -> None:
    site = Site()
    site.promote(CODE, 1)
    site.promote(CHAT, 1)
    pair = site.replica.residency.pair(CHAT)
    site.replica.background.start_round(
        RoundBody(
            round_id="r",
            adapter=CHAT,
            base_uid=pair.base.uid,
            epoch=1,
            factor="B",
            tokens=10_000,
            rows_per_step=1,
            lr=1e-3,
            swap_every=0,
            seed=1,
            deadline_s=1e6,
        )
    )
    chat = 'adapter="chat"'
    for _ in range(9):
        site.replica.turn()
    assert site.shown("collm_train_preemptions_total") == {}
    assert site.shown("collm_train_tokens_total")[chat] > 0
    assert site.shown("collm_train_loss").keys() == {f'{chat},version="1"'}
    site.ask(CODE, "abc", 20)
    for _ in range(5):
        site.replica.turn()
    assert site.shown("collm_train_preemptions_total") == {chat: 1.0}
    assert site.shown("collm_slices_total").keys() == {f'{chat},work="train"'}
