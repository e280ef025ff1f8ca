"""A replica whose memory runs out fails what asked for it, and goes on."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from adapters import weights as codec
from adapters.memory import MemoryUpdateStore
from adapters.model import Version
from db.records import AdapterName, Epoch, LoraSpec, Split, VersionUid
from infra.clock import ManualClock
from infra.errors import StepFailed
from infra.settings import Settings
from serving.model import Emitted, Event, Failed, Finished, Request, RequestId, Slo
from serving.ports import ScoreResult
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.loader import Loader
from serving.replica.loop import MAX_BROKEN_STEPS, Replica
from serving.replica.lora import FrozenProduct
from serving.replica.optimizer import FlatAdamW
from serving.replica.segments import Segments
from serving.replica.trainer import TorchTrainer
from serving.rows import Row
from serving.wire.control import RoundBody
from tests.small_models import build, prompt_of

CODE = AdapterName("code")
ROWS = tuple(Row(f"say {i}", f"{i} {i}") for i in range(12))
TOO_MUCH = 2**60
"""Bytes; more than a process can address."""


def by_torch(*_: object, **__: object) -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def by_numpy(*_: object, **__: object) -> None:
    np.zeros(TOO_MUCH, np.uint8)


def by_python(*_: object, **__: object) -> None:
    bytearray(TOO_MUCH)


EXHAUST = (by_torch, by_numpy, by_python)


def spoil_steps(patched: pytest.MonkeyPatch, exhaust: Callable[..., None]) -> None:
    """Have each of the engine's steps run out of memory in its midst, at its fifth product."""
    product, calls = FrozenProduct.__call__, itertools.count(1)

    def call(self: FrozenProduct, *args: torch.Tensor) -> torch.Tensor:
        if next(calls) % 5 == 0:
            exhaust()
        return product(self, *args)

    patched.setattr(FrozenProduct, "__call__", call)


class Site:
    """A replica on a small random Llama, with two rows, that the test turns."""

    def __init__(self) -> None:
        self.backbone = Backbone(build(vocab_size=270, eos_token_id=256), sha256="5" * 64, packed=True)
        shapes = {name: linear.shape for name, linear in self.backbone.linears.items()}
        self.engine = TorchEngine(
            self.backbone,
            rows=2,
            max_total_tokens=96,
            places=2,
            max_rank=2,
            make_trainer=lambda backbone: TorchTrainer(backbone, FakeTokenizer(), 32),
        )
        self.clock = ManualClock()
        self.events: dict[RequestId, list[Event]] = {}
        self.rounds = 0
        self.loader = Loader(MemoryUpdateStore(), shapes=shapes, backbone="5" * 64)
        self.replica = Replica(
            self.engine,
            FakeTokenizer(),
            self.loader,
            Settings.model_validate({"replica": {"checkpoint_s": 1e-9, "versions_per_adapter": 2}}),
            self.clock,
            splits={Split.TRAIN: ROWS[:8], Split.GATE: ROWS[8:]},
            deliver=self.deliver,
        )
        version = Version(adapter=CODE, uid=VersionUid("one"), number=1)
        self.weights = codec.initial(shapes, LoraSpec(rank=2, alpha=4, targets=codec.targets(shapes)), 0)
        self.replica.stage(version, self.weights)
        self.replica.activate(CODE, version.uid, Epoch(1))
        self.replica.turn()

    def deliver(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    def ask(self, seed: int, new: int = 6, adapter: AdapterName | None = CODE) -> RequestId:
        request_id = RequestId(f"r{len(self.events)}")
        self.events[request_id] = []
        request = Request(
            id=request_id,
            adapter=adapter,
            input_ids=prompt_of(seed, 9),
            max_new_tokens=new,
            ignore_eos=True,
            slo=Slo(ttft_s=60, tpot_s=60),
            arrival_s=self.clock.monotonic(),
        )
        self.replica.submit(request)
        return request_id

    def until(self, true: Callable[[], bool]) -> None:
        for _ in range(5000):
            if true():
                return
            self.replica.turn(0.001)
            self.clock.advance(0.001)
        raise AssertionError("it does not come true")

    def answer(self, request_id: RequestId) -> list[int]:
        """Wait for an answer's tokens."""
        self.until(lambda: any(isinstance(e, Finished | Failed) for e in self.events[request_id]))
        assert isinstance(self.events[request_id][-1], Finished), self.events[request_id][-1]
        return [e.token.id for e in self.events[request_id] if isinstance(e, Emitted)]

    def failure(self, request_id: RequestId) -> Exception:
        """Wait for what a request fails with."""
        self.until(lambda: any(isinstance(e, Finished | Failed) for e in self.events[request_id]))
        failed = self.events[request_id][-1]
        assert isinstance(failed, Failed)
        return failed.error

    def train(self) -> str:
        """Begin a round and return its name."""
        self.rounds += 1
        body = {"round_id": f"round-{self.rounds}", "adapter": CODE, "base_uid": "one", "epoch": 1, "factor": "both"}
        body |= {"tokens": 40, "rows_per_step": 2, "lr": 1e-3, "swap_every": 1, "seed": 1, "deadline_s": 1e9}
        return self.replica.background.start_round(RoundBody.model_validate(body)).round_id

    def trained(self, round_id: str) -> tuple[str, str]:
        """Wait for a round's end; return how it ended, and why."""
        self.until(lambda: self.replica.background.round_status(round_id).state != "running")
        status = self.replica.background.round_status(round_id)
        return status.state, status.reason


@pytest.fixture
def site() -> Iterator[Site]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Site()
    yield made
    made.loader.close()
    torch.set_num_threads(before)


def is_of_memory(reason: object) -> bool:
    return "memory" in str(reason).lower()


@pytest.mark.parametrize("exhaust", EXHAUST)
def test_a_step_that_runs_out_of_memory_fails_its_own_requests_only(
    site: Site, monkeypatch: pytest.MonkeyPatch, exhaust: Callable[..., None]
) -> None:
    want = {seed: site.answer(site.ask(seed)) for seed in (1, 2, 3)}
    assert len({tuple(tokens) for tokens in want.values()}) == 3, "they must differ to show anything"
    stream, beside = site.ask(1), site.ask(2)
    waiting = site.ask(3)
    site.until(lambda: site.replica.scheduler.decoding == 2)
    with monkeypatch.context() as patched:
        spoil_steps(patched, exhaust)
        site.replica.turn()
    for lost in (stream, beside):
        assert isinstance(site.failure(lost), StepFailed)
        assert is_of_memory(site.failure(lost))
    assert site.answer(waiting) == want[3], "it had no part in that step"
    assert {seed: site.answer(site.ask(seed)) for seed in (1, 2)} == {seed: want[seed] for seed in (1, 2)}


def test_however_many_steps_run_out_of_memory_the_engine_lives(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    want = site.answer(site.ask(1))
    with monkeypatch.context() as patched:
        spoil_steps(patched, by_torch)
        for _ in range(2 * MAX_BROKEN_STEPS):
            assert isinstance(site.failure(site.ask(1)), StepFailed)
    assert site.answer(site.ask(1)) == want
    assert site.replica.scheduler.kv_used == 0
    assert site.replica.residency.places.pins() == {}


@pytest.mark.parametrize("exhaust", EXHAUST)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Segments, "dry_pass"),
        (Segments, "run"),
        (torch.autograd, "grad"),
        (torch.autograd, "backward"),
        (FlatAdamW, "__init__"),
        (FlatAdamW, "step"),
        (FlatAdamW, "snapshot"),
        (FlatAdamW, "moments"),
        (TorchTrainer, "score"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_training_that_runs_out_of_memory_fails_its_round_only(
    site: Site, monkeypatch: pytest.MonkeyPatch, exhaust: Callable[..., None], owner: object, name: str
) -> None:
    want = site.answer(site.ask(1, 40, None))
    stream = site.ask(1, 40, None)
    site.until(lambda: site.replica.scheduler.decoding == 1)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, exhaust)
        state, reason = site.trained(site.train())
    assert state == "failed"
    assert is_of_memory(reason)
    assert site.replica.scheduler.decoding == 1, "the stream goes on"
    assert site.answer(stream) == want
    assert site.trained(site.train()) == ("done", "")


@pytest.mark.parametrize("exhaust", EXHAUST)
def test_scoring_that_runs_out_of_memory_is_told_to_who_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch, exhaust: Callable[..., None]
) -> None:
    def score() -> Future[ScoreResult]:
        done = site.replica.background.score(ROWS[:2], site.weights).done
        site.until(done.done)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(Segments, "nll", exhaust)
        failed = score().exception()
    assert isinstance(failed, StepFailed)
    assert is_of_memory(failed)
    assert len(score().result().nll_by_row) == 2


def test_an_update_or_a_checkpoint_that_finds_no_memory_fails_no_more_than_itself(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are made in another thread."""
    with monkeypatch.context() as patched:
        patched.setattr(site.loader, "keep_round", by_python)
        patched.setattr(site.loader, "archive", by_python)
        assert site.trained(site.train()) == ("done", "")
        patched.setattr(site.loader, "put_update", by_python)
        state, reason = site.trained(site.train())
    assert state == "failed"
    assert is_of_memory(reason)
    assert site.trained(site.train()) == ("done", "")
