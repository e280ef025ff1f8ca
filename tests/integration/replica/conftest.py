"""A replica with its own engine thread, reached over its ASGI application."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import httpx
import pytest

from adapters import weights as codec
from adapters.memory import MemoryUpdateStore
from adapters.model import LoraWeights, Version
from db.records import AdapterName, Epoch, LoraSpec, Split, VersionUid
from infra.clock import SystemClock
from infra.errors import EngineDead
from infra.metrics import ReplicaMetrics
from infra.settings import Settings
from serving.client import HttpReplicaClient
from serving.ports import Engine
from serving.replica.api import make_app
from serving.replica.checkpoints import Checkpoints
from serving.replica.desk import Desk
from serving.replica.fake_engine import FAKE_SHAPES, FakeEngine, FakeTokenizer
from serving.replica.history import Entry, History, Wrote
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.replica.text import Tokenizer
from serving.rows import Row

CODE = AdapterName("code")
TOKEN = "secret"
ROWS = tuple(Row(f"prompt {i}", f"completion {i}") for i in range(20))


class Site:
    """One running replica and the ways to it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        shapes: dict[str, tuple[int, int]],
        *,
        governed: bool = False,
        checkpoints: Checkpoints | None = None,
        **replica: object,
    ) -> None:
        self.settings = Settings.model_validate(
            {"cluster_token": TOKEN, "replica": {"id": "r-7", "max_queue": 4, "token_budget": 16, **replica}}
        )
        self.spec = LoraSpec(rank=2, alpha=4, targets=codec.targets(shapes))
        self.shapes = shapes
        self.engine = engine
        self.tokenizer = tokenizer
        self.store = MemoryUpdateStore()
        self.entries: list[Entry] = []
        self.weights: dict[str, LoraWeights] = {}
        self.died: list[EngineDead] = []
        backbone = engine.shape.backbone
        self.loader = Loader(self.store, shapes=shapes, backbone=backbone, checkpoints=checkpoints)
        self.loader.know(CODE, self.spec)
        self.desk, clock, metrics = Desk(), SystemClock(), ReplicaMetrics()
        self._written: dict[VersionUid, LoraWeights] = {}
        self.replica = Replica(
            engine,
            tokenizer,
            self.loader,
            self.settings,
            clock,
            splits={Split.TRAIN: ROWS[:12], Split.GATE: ROWS[12:16], Split.REPORT: ROWS[16:]},
            deliver=self.desk.deliver,
            metrics=metrics,
            history=History(sink=self._record),
            governed=governed,
        )
        self.desk.replica = self.replica
        self.app = make_app(self.desk, self.loader, tokenizer, self.settings, clock, metrics)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.replica.run()
        except EngineDead as error:
            self.died.append(error)

    def _record(self, entry: Entry) -> None:
        self.entries.append(entry)
        if isinstance(entry, Wrote):
            self._written[entry.uid] = self.replica.residency.weights(entry.uid)

    def written(self) -> dict[VersionUid, LoraWeights]:
        """Return every version that was ever copied into a place, local ones too."""
        return dict(self._written)

    def start(self) -> None:
        self._thread.start()

    def begin(self) -> None:
        """Make version 1 active; before the start."""
        first = self.keep(self.fresh(0))
        self.replica.residency.stage(Version(adapter=CODE, uid=first, number=1), self.weights[first])
        self.replica.activate(CODE, first, Epoch(1))

    def ended(self) -> list[EngineDead]:
        """Wait for the engine's thread and return what it died of."""
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.died

    def stop(self) -> None:
        self.replica.stop(0.0)
        self.ended()
        self.loader.close()

    def fresh(self, seed: int) -> LoraWeights:
        return codec.initial(self.shapes, self.spec, seed)

    def keep(self, weights: LoraWeights) -> VersionUid:
        """Put a version into the store and return its uid."""
        uid = codec.version_uid(self.engine.shape.backbone, weights)
        self.weights[uid] = weights
        return uid

    def key(self, uid: str) -> str:
        return self.store.put("versions", codec.to_bytes(self.weights[uid]))

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://replica",
            timeout=20,
            headers={"authorization": f"Bearer {TOKEN}"},
        )

    def control(self) -> HttpReplicaClient:
        return HttpReplicaClient("http://replica", TOKEN, transport=httpx.ASGITransport(self.app))

    async def decodes(self, count: int = 1) -> None:
        """Wait until that many requests are decoding."""
        for _ in range(2000):
            if await self.desk.call(lambda r: r.scheduler.decoding) >= count:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("nothing decodes")

    async def idle(self) -> None:
        """Wait until nothing is left of any request."""
        for _ in range(500):
            state = await self.desk.call(
                lambda r: (r.scheduler.queued, r.scheduler.running, r.scheduler.kv_used, r.residency.places.pins())
            )
            if state == (0, 0, 0.0, {}):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"something is left: {state}")


@pytest.fixture
def fake() -> FakeEngine:
    """The engine of ``site``."""
    return FakeEngine(SystemClock(), rows=4, max_total_tokens=128, places=4, step_s=0.002, slice_s=0.001)


@pytest.fixture
def make_site(fake: FakeEngine) -> Iterator[Callable[..., Site]]:
    """Make a site, by default on the fake engine with version 1 active; stopped at the end."""
    made: list[Site] = []

    def make(
        engine: Engine = fake,
        shapes: Mapping[str, tuple[int, int]] = FAKE_SHAPES,
        *,
        governed: bool = False,
        bare: bool = False,
        tokenizer: Tokenizer | None = None,
        checkpoints: Checkpoints | None = None,
        **replica: object,
    ) -> Site:
        site = Site(
            engine, tokenizer or FakeTokenizer(), dict(shapes), governed=governed, checkpoints=checkpoints, **replica
        )
        if not bare:
            site.begin()
        site.start()
        made.append(site)
        return site

    yield make
    for site in made:
        site.stop()


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    """A replica that serves version 1 of the adapter ``code``."""
    return make_site()


@pytest.fixture
async def http(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    """A caller."""
    async with site.http() as client:
        yield client


@pytest.fixture
async def control(site: Site) -> AsyncIterator[HttpReplicaClient]:
    """A flow."""
    async with site.control() as client:
        yield client
