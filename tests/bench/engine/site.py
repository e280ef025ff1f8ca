"""A replica in this process: the real loop and engine in a thread of their own, without HTTP, metered."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from adapters.model import LoraWeights, Version
from adapters.updates import key_of
from adapters.weights import initial, linear_shapes, targets
from db.records import AdapterName, Epoch, LoraSpec, Publishing, Split, VersionUid
from infra.clock import SystemClock
from infra.errors import UnknownVersion
from infra.models import model_dir
from infra.settings import Settings
from serving.model import Emitted, EngineShape, Event, Failed, Finished, Request, RequestId, Slo, StepPlan, StepResult
from serving.ports import Engine, ScoreWork, SliceReport, Trainer, TrainState, TrainTask, TrainWork
from serving.replica.background import Directives, Mode
from serving.replica.build import load_engine
from serving.replica.checkpoints import Checkpoints
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.replica.main import step_back
from serving.replica.packing import RowEncoder
from serving.replica.tokenizer import HubTokenizer
from serving.replica.trainer import endless_order, eos_id
from serving.rows import Row
from serving.wire.control import RoundBody
from tests.bench.engine.options import CODE, RANK

T = TypeVar("T")
FIRST = VersionUid("first")
ANSWER_S = 60.0
"""Nothing takes longer to end."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that the engine's thread did; monotonic seconds."""

    begin_s: float
    end_s: float

    def within(self, begin_s: float, end_s: float) -> float:
        """Return how many of its seconds lie in there."""
        return max(0.0, min(self.end_s, end_s) - max(self.begin_s, begin_s))


@dataclass(frozen=True, slots=True)
class Slice(Span):
    """A slice of training, with its part of its optimizer step."""

    step: int
    cost_s: float
    """Predicted, from measured ones of its kind: what a step's tokens are divided by."""


@dataclass(slots=True)
class Meter:
    """What the engine's thread has done. Appended to there, read when it rests."""

    steps: list[Span] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    """Of the rows of each optimizer step that has been begun; padding is none."""
    work: TrainWork | None = None
    """The latest training."""

    def serving_s(self, begin_s: float, end_s: float) -> float:
        """Return the seconds of engine steps in there."""
        return sum(step.within(begin_s, end_s) for step in self.steps)

    def trained(self, begin_s: float, end_s: float) -> float:
        """Return the tokens trained in there: of each optimizer step by the part of its slices.

        The slices of a step that is still under way are compared with a whole step's cost per token.
        """
        cost: dict[int, float] = {}
        inside: dict[int, float] = {}
        for piece in self.slices:
            whole = piece.end_s - piece.begin_s
            cost[piece.step] = cost.get(piece.step, 0.0) + piece.cost_s
            part = piece.within(begin_s, end_s) / whole if whole > 0 else 0.0
            inside[piece.step] = inside.get(piece.step, 0.0) + piece.cost_s * part
        if not cost:
            return 0.0
        ended = [step for step in cost if step < max(cost)]
        per_token = sum(cost[s] for s in ended) / max(1, sum(self.step_tokens[s] for s in ended))
        tokens = 0.0
        for step, part in inside.items():
            whole = cost[step] if step in ended else max(cost[step], per_token * self.step_tokens[step])
            tokens += self.step_tokens[step] * part / whole if whole > 0 else 0.0
        return tokens


class MeteredEngine:
    """The engine, with a note of every step and slice; implements ``serving.ports.Engine``."""

    def __init__(self, engine: Engine, meter: Meter, encoder: RowEncoder) -> None:
        self._engine = engine
        self._meter = meter
        self._encoder = encoder

    @property
    def shape(self) -> EngineShape:
        """See ``Engine``."""
        return self._engine.shape

    def step(self, plan: StepPlan) -> StepResult:
        """See ``Engine``."""
        begin_s = time.monotonic()
        result = self._engine.step(plan)
        self._meter.steps.append(Span(begin_s, time.monotonic()))
        return result

    def write(self, place: int, weights: LoraWeights) -> None:
        """See ``Engine``."""
        self._engine.write(place, weights)

    def check(self, weights: LoraWeights) -> None:
        """See ``Engine``."""
        self._engine.check(weights)

    def trainer(self) -> Trainer:
        """See ``Engine``."""
        return MeteredTrainer(self._engine.trainer(), self._meter, self._encoder)


class MeteredTrainer:
    """Implements ``serving.ports.Trainer``."""

    def __init__(self, trainer: Trainer, meter: Meter, encoder: RowEncoder) -> None:
        self._trainer = trainer
        self._meter = meter
        self._encoder = encoder

    def train(
        self, task: TrainTask, base: LoraWeights, rows: Sequence[Row], state: TrainState | None = None
    ) -> TrainWork:
        """See ``Trainer``."""
        lengths = [len(self._encoder.encode(row).ids) for row in rows]
        order = endless_order(len(rows), task.seed)
        tokens = (sum(lengths[i] for i in islice(order, task.rows_per_step)) for _ in iter(int, 1))
        self._meter.work = work = MeteredWork(self._trainer.train(task, base, rows, state), self._meter, tokens)
        return work

    def score(self, rows: Sequence[Row], weights: LoraWeights | None) -> ScoreWork:
        """See ``Trainer``."""
        return self._trainer.score(rows, weights)


class MeteredWork:
    """Implements ``serving.ports.TrainWork``."""

    def __init__(self, work: TrainWork, meter: Meter, step_tokens: Iterator[int]) -> None:
        self.steps, self.tokens = work.steps, work.tokens
        self._work = work
        self._meter = meter
        self._step_tokens = step_tokens
        self._meter.step_tokens.append(next(step_tokens))

    def next_slice_s(self) -> float:
        """See ``Work``."""
        return self._work.next_slice_s()

    def slice(self) -> SliceReport:
        """See ``Work``."""
        cost_s, begin_s, meter = self._work.next_slice_s(), time.monotonic(), self._meter
        report = self._work.slice()
        meter.slices.append(Slice(begin_s, time.monotonic(), len(meter.step_tokens) - 1, cost_s))
        self.steps, self.tokens = self._work.steps, self._work.tokens
        if report.step_ended:
            meter.step_tokens.append(next(self._step_tokens))
        return report

    def close(self) -> None:
        """See ``Work``."""
        self._work.close()

    def shadow(self) -> LoraWeights:
        """See ``TrainWork``."""
        return self._work.shadow()

    def state(self) -> TrainState:
        """See ``TrainWork``."""
        return self._work.state()


class ForgetfulStore:
    """An update store that keeps nothing: a bench publishes more versions than anybody would keep."""

    def put(self, prefix: str, data: bytes) -> str:
        """See ``UpdateStore``."""
        return key_of(prefix, data)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See ``UpdateStore``."""
        raise UnknownVersion(f"{key} was not kept")

    def sweep(self, prefix: str, *, older_than_s: float, only: object = None) -> int:
        """See ``UpdateStore``."""
        return 0


@dataclass(slots=True)
class Answer:
    """What became of a request."""

    scheduled_s: float
    token_s: list[float] = field(default_factory=list)
    """When each token came; monotonic."""
    finished: Finished | None = None
    failed: bool = False


class Site:
    """One running replica."""

    def __init__(self, settings: Settings, splits: Mapping[Split, Sequence[Row]], copier: ThreadPoolExecutor) -> None:
        folder = model_dir(settings)
        tokenizer = HubTokenizer(folder)
        engine = load_engine(settings)
        encoder = RowEncoder(tokenizer, eos_id=eos_id(engine.backbone), row_tokens=settings.replica.row_tokens)
        self.meter = Meter()
        self.dtype = engine.shape.dtype
        self.vocab = engine.shape.vocab
        self.answers: dict[RequestId, Answer] = {}
        self.on_end: Callable[[RequestId], None] = lambda request_id: None
        """Called in the engine's thread."""
        shapes = linear_shapes(folder)
        self.weights = initial(shapes, LoraSpec(rank=RANK, alpha=2 * RANK, targets=targets(shapes)), seed=0)
        self.replica = Replica(
            MeteredEngine(engine, self.meter, encoder),
            tokenizer,
            Loader(
                ForgetfulStore(),
                shapes=shapes,
                backbone=engine.shape.backbone,
                checkpoints=Checkpoints.of(settings.state_dir, settings.replica.id),
            ),
            settings,
            SystemClock(),
            splits=splits,
            deliver=self._deliver,
            copier=copier,
        )
        self.replica.residency.stage(Version(adapter=CODE, uid=FIRST, number=1), self.weights)
        self.replica.activate(CODE, FIRST, Epoch(1))
        self._numbers = iter(range(10**9))

    def call(self, function: Callable[[Replica], T]) -> T:
        """Have the engine's thread run ``function``, and wait for it."""
        return self.replica.inbox.call(lambda: function(self.replica)).result(ANSWER_S)

    def train(self, *, on: bool, publish: bool) -> None:
        """Allow training and the publishing of local versions, or not."""
        mode = Mode(training=on, publishing=Publishing.GUARDED if publish else Publishing.OFF)
        self.call(lambda replica: replica.direct(Directives(modes={CODE: mode})))

    def start_round(self, *, rows_per_step: int, lr: float, swap_every: int, seed: int) -> None:
        """Begin a round that does not end."""
        body = RoundBody(
            round_id="bench",
            adapter=CODE,
            base_uid=FIRST,
            epoch=1,
            factor="both",
            tokens=10**9,
            rows_per_step=rows_per_step,
            lr=lr,
            swap_every=swap_every,
            seed=seed,
            deadline_s=1e6,
        )
        self.call(lambda replica: replica.background.start_round(body))

    def ask(
        self, tokens: Sequence[int], new: int, slo: Slo, *, scheduled_s: float, adapter: AdapterName | None = CODE
    ) -> RequestId:
        """Queue a request that came at ``scheduled_s``."""
        request = Request(
            id=RequestId(str(next(self._numbers))),
            adapter=adapter,
            input_ids=tuple(tokens),
            max_new_tokens=new,
            ignore_eos=True,
            slo=slo,
            arrival_s=scheduled_s,
        )
        self.answers[request.id] = Answer(scheduled_s)
        self.replica.inbox.post(lambda: self.replica.submit(request))
        return request.id

    def cancel(self, ids: Sequence[RequestId]) -> None:
        """Have the engine forget requests."""

        def cancel(replica: Replica) -> None:
            for request_id in ids:
                replica.cancel(request_id)

        self.call(cancel)

    def ended(self, ids: Sequence[RequestId]) -> bool:
        """Whether all these have been answered or refused."""
        return all(self.answers[i].finished is not None or self.answers[i].failed for i in ids)

    def wait_for(self, ids: Sequence[RequestId]) -> None:
        """Wait until all of them have ended. Raises ``TimeoutError``."""
        until_s = time.monotonic() + ANSWER_S
        while not self.ended(ids):
            if time.monotonic() > until_s:
                raise TimeoutError("a request does not end")
            time.sleep(0.01)

    def _deliver(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        now_s = time.monotonic()
        for request_id, event in events:
            answer = self.answers[request_id]
            if isinstance(event, Emitted):
                answer.token_s.append(now_s)
            elif isinstance(event, Finished | Failed):
                answer.failed = isinstance(event, Failed)
                answer.finished = event if isinstance(event, Finished) else None
                self.on_end(request_id)


@contextmanager
def running(settings: Settings, splits: Mapping[Split, Sequence[Row]]) -> Iterator[Site]:
    """Start a replica, and stop it at the end."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(max_workers=1, initializer=step_back) as copier,
    ):
        site = Site(settings.model_copy(update={"state_dir": Path(scratch)}), splits, copier)
        died: list[BaseException] = []

        def run() -> None:
            try:
                site.replica.run()
            except BaseException as error:
                died.append(error)
                raise

        thread = threading.Thread(target=run, name="engine")
        thread.start()
        try:
            deadline_s = time.monotonic() + ANSWER_S
            while not site.call(lambda replica: CODE in replica.residency.pairs):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            yield site
        finally:
            site.replica.stop(0.0)
            thread.join()
            site.replica.background.close(InterruptedError())
        if died:
            raise died[0]
