"""The demo's run on real Postgres, with a fleet, a gateway and a Prefect that are played by this test."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from adapters.memory import MemoryStore, MemoryUpdateStore
from db import adapters, replicas, rounds
from db.records import (
    AdapterName,
    AdapterRecord,
    ClientId,
    Epoch,
    Factor,
    Heartbeat,
    LoraSpec,
    Publishing,
    ReplicaId,
    ReplicaRecord,
    RoundId,
    RoundPlan,
    RoundRecord,
    RoundState,
    VersionRecord,
    VersionState,
    VersionUid,
)
from db.session import Database
from flows.demo_fleet import DemoFleet
from flows.demo_quality import Quality, Served
from flows.demo_report import make_report
from flows.demo_run import Options, Run, round_tokens
from flows.demo_schedule import RoundSchedule, ScheduleFailed
from flows.demo_screen import Screen
from flows.site import Site
from infra.clock import SystemClock
from infra.errors import NoReplica
from infra.settings import Settings
from serving.datasets import sample_shards
from serving.load.capacity import Sweep
from serving.load.html import page
from serving.rows import Row
from serving.wire.control import (
    ActivateBody,
    RollbackBody,
    RoundBody,
    RoundStatus,
    ScoreBody,
    ScoreReply,
    StageBody,
    Status,
    Swap,
    VersionBody,
)

CODE = AdapterName("code")
CE = {"uid-1": 1.2, "uid-2": 0.9, "uid-3": 0.8}
CLOCK = SystemClock()
NOT_BY_HAND = "the demo changes versions and rounds by the records only, never at a replica"


class FakeReplica:
    """The part of a replica's control API that the demo uses."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.active, self.label = "uid-1", "1"
        self.swaps: list[Swap] = []
        self.trained = 0
        self.scored: list[str] = []
        self.stopped: list[str] = []

    def swap(self, uid: str, label: str, kind: str, store_key: str | None) -> None:
        self.active, self.label = uid, label
        told = {"at_s": CLOCK.wall(), "adapter": "code", "uid": uid, "label": label, "kind": kind}
        self.swaps.append(Swap.model_validate({**told, "pause_ms": 0.4, "delay_ms": 12.0, "store_key": store_key}))

    async def status(self) -> Status:
        return Status(
            replica_id=self.name,
            ready=True,
            model_id="tiny",
            backbone="b" * 64,
            dtype="float32",
            row_tokens=256,
            queued=0,
            running=0,
            active=(),
            resident=(),
            pins={},
            round=None,
            train_tokens_total=self.trained,
            train_tokens_decoding_total=self.trained // 2,
            train_share=0.3,
            training=True,
            publishing="guarded",
            swaps_total=len(self.swaps),
            swaps=tuple(self.swaps),
            splits={},
            set_sha256={},
        )

    async def score(self, body: ScoreBody, *, timeout_s: float) -> ScoreReply:
        assert body.uid is not None
        assert body.store_key is not None
        assert (body.split == "report") is not bool(body.rows)
        self.scored.append(body.uid)
        numbers = [4 * i for i in range(len(body.rows))] if body.rows else list(range(100))
        ce = CE.get(body.uid, 1.0) + (0.1 if self.name == "replica-1" else 0.0)
        # Rows differ in difficulty, every fourth is easy; versions differ by the same on all rows.
        nll = tuple(10 * (ce + (i % 4 - 1.5) / 10) for i in numbers)
        return ScoreReply(set_sha256="s", nll_by_row=nll, tokens_by_row=(10,) * len(numbers))

    async def stage(self, body: StageBody) -> VersionBody:
        raise AssertionError(NOT_BY_HAND)

    async def activate(self, body: ActivateBody) -> VersionBody:
        raise AssertionError(NOT_BY_HAND)

    async def roll_back(self, body: RollbackBody) -> VersionBody:
        raise AssertionError(NOT_BY_HAND)

    async def start_round(self, body: RoundBody) -> RoundStatus:
        raise AssertionError(NOT_BY_HAND)

    async def round(self, round_id: str) -> RoundStatus:
        raise AssertionError(NOT_BY_HAND)

    async def stop_round(self, round_id: str) -> RoundStatus:
        self.stopped.append(round_id)
        self.swap("uid-1", "1", "rollback", None)
        return RoundStatus(
            round_id=round_id,
            state="stopped",
            tokens=0,
            steps=0,
            loss_first=None,
            loss_last=None,
            seconds=0.0,
            store_key=None,
            base_uid="uid-1",
            sha256=None,
        )


class World:
    """A fleet that follows the records, a Prefect that runs rounds, a gateway that answers."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.replicas = [FakeReplica("replica-0"), FakeReplica("replica-1")]
        self.paused = False
        self.calls: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.turn = 0
        self.port = 0

    def connect(self, record: ReplicaRecord) -> FakeReplica:
        return next(replica for replica in self.replicas if replica.name == record.id)

    # The fleet.

    async def follow(self) -> None:
        """Write heartbeats; make what is desired active."""
        while True:
            await asyncio.to_thread(self.slot)
            await asyncio.sleep(0.05)

    def slot(self) -> None:
        with self.database.transaction() as s:
            record = adapters.get(s, CODE)
            for replica in self.replicas:
                federated = "local" not in replica.active
                if record.desired_uid != replica.active and (federated or record.publishing is Publishing.OFF):
                    replica.swap(record.desired_uid, record.desired_uid.removeprefix("uid-"), "federated", "k")
                replicas.heartbeat(s, beat(replica))

    # Prefect.

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.rpartition("/")[2]
        self.calls.append(path)
        if path == "filter":
            return httpx.Response(200, json=[{"id": "d1"}])
        if path == "pause_deployment":
            self.paused = True
        if path == "resume_deployment":
            self.paused = False
        if path == "create_flow_run":
            task = asyncio.get_running_loop().create_task(self.round())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return httpx.Response(200, json={})

    async def round(self) -> None:
        """Open a round, publish a local version on replica 1, promote a new version."""
        opened = await asyncio.to_thread(self.open_round)
        await asyncio.sleep(0.3)
        for replica in self.replicas:
            replica.trained += 400
        number = opened.number + 1
        self.replicas[1].swap(f"local-{number}", f"{number - 1}+8", "local", "local/k")
        await asyncio.sleep(0.4)
        await asyncio.to_thread(self.promote, opened, number)

    def open_round(self) -> RoundRecord:
        with self.database.transaction() as s:
            record, number = adapters.get(s, CODE), len(rounds.of_adapter(s, CODE)) + 1
            plan = RoundPlan(
                factor=Factor.B,
                tokens=400,
                rows_per_step=4,
                lr=1e-3,
                swap_every=8,
                deadline_s=60,
                min_clients=1,
                seed=1,
            )
            return rounds.open_round(
                s,
                RoundRecord(
                    id=RoundId(f"code-{number}"),
                    adapter=CODE,
                    number=number,
                    state=RoundState.PLANNED,
                    base_uid=record.desired_uid,
                    base_epoch=record.epoch,
                    plan=plan,
                    clients=(ClientId("replica-0"), ClientId("replica-1")),
                    candidate_uid=None,
                    aggregation_error=None,
                    ce_before=None,
                    ce_after=None,
                    reason="",
                    started_s=CLOCK.wall(),
                    decided_s=None,
                    served_s=None,
                    flow_run_id=None,
                ),
            )

    def promote(self, opened: RoundRecord, number: int) -> None:
        uid = VersionUid(f"uid-{number}")
        with self.database.transaction() as s:
            adapters.add_version(s, version(number, VersionState.CANDIDATE))
            moves = [RoundState.PLANNED, RoundState.TRAINING, RoundState.AGGREGATING, RoundState.EVALUATING]
            for one, to in zip(moves, [*moves[1:], RoundState.PROMOTED], strict=True):
                rounds.advance(s, opened.id, expected=one, to=to)
            adapters.promote(
                s,
                CODE,
                uid,
                expected_epoch=opened.base_epoch,
                actor="federated_round",
                reason="better",
                now_s=CLOCK.wall(),
            )
            rounds.advance(
                s,
                opened.id,
                expected=RoundState.PROMOTED,
                to=RoundState.PROMOTED,
                candidate_uid=uid,
                ce_before=1.2,
                ce_after=0.9,
                aggregation_error=0.0,
                reason="better",
                decided_s=CLOCK.wall(),
                served_s=CLOCK.wall() + 0.1,
            )
        self.replicas[1].swap(uid, str(number), "federated", "k")

    # The gateway.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            body = json.loads(await reader.readexactly(int(head.lower().split("content-length:")[1].split("\r\n")[0])))
            self.turn += 1
            replica = self.replicas[self.turn % 2]
            writer.write(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\nx-adapter-id: code\r\n"
                f"x-adapter-uid: {replica.active}\r\nx-adapter-version: {replica.label}\r\n"
                f"x-replica-id: {replica.name}\r\n\r\n".encode()
            )
            wanted = body["parameters"]["max_new_tokens"]
            for i in range(1, wanted + 1):
                event = {"index": i, "token": {"id": 1, "text": "x"}, "generated_text": "x" if i == wanted else None}
                writer.write(f"data:{json.dumps(event)}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(0.02)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def beat(replica: FakeReplica) -> Heartbeat:
    return Heartbeat(
        replica_id=ReplicaId(replica.name),
        at_s=CLOCK.wall(),
        ready=True,
        queued=0,
        running=1,
        queue_age_s=0.0,
        ttft_p95_s=0.1,
        tpot_p95_s=0.1,
        finished=1,
        violations=0,
        requests_total=1,
        tokens_per_s=1.0,
        train_tokens_total=replica.trained,
        train_tokens_decoding_total=replica.trained // 2,
        train_share=0.3,
        round_id=None,
        active={"code": replica.label},
        active_uids={"code": replica.active},
        resident=(),
        swaps_total=len(replica.swaps),
        kv_used=0.0,
    )


def version(number: int, state: VersionState) -> VersionRecord:
    return VersionRecord(
        uid=VersionUid(f"uid-{number}"),
        adapter=CODE,
        number=number,
        parent_uid=None if number == 1 else VersionUid(f"uid-{number - 1}"),
        round_id=None,
        state=state,
        store_key="k",
        mlflow_model_id=None,
        created_s=CLOCK.wall(),
    )


@asynccontextmanager
async def world(database: Database) -> AsyncIterator[World]:
    found = World(database)
    first = AdapterRecord(
        name=CODE,
        backbone="b" * 64,
        spec=LoraSpec(rank=8, alpha=16, targets=("q_proj",)),
        initial_uid=VersionUid("uid-1"),
        desired_uid=VersionUid("uid-1"),
        previous_uid=None,
        epoch=Epoch(0),
        training=True,
        publishing=Publishing.GUARDED,
    )
    with database.transaction() as s:
        adapters.create(s, first, version(1, VersionState.PROMOTED))
        for replica in found.replicas:
            url = "http://127.0.0.1:1"
            replicas.announce(
                s, ReplicaRecord(id=ReplicaId(replica.name), url=url, backbone="b", has_shard=True, started_s=0)
            )
    following = asyncio.create_task(found.follow())
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield found
        finally:
            following.cancel()
            await asyncio.gather(following, *found.tasks, return_exceptions=True)


def make_site(world: World, settings: Settings) -> Site:
    return Site(
        settings=settings,
        database=world.database,
        store=MemoryUpdateStore(),
        registry=MemoryStore,
        connect=world.connect,
        clock=CLOCK,
    )


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def options() -> Options:
    return Options(
        order="SCC",
        window_s=1.2,
        load=0.05,
        settle_s=5.0,
        quiet_s=0.3,
        sweep=Sweep(concurrencies=(2,), settle_s=0.1, measure_s=0.3),
    )


async def test_a_run_pairs_windows_and_reports(database: Database, model_folder: Path) -> None:
    out = io.StringIO()
    async with world(database) as fleet:
        site = make_site(fleet, Settings())
        async with RoundSchedule("http://prefect/api", transport=httpx.MockTransport(fleet.answer)) as schedule:
            run = Run(
                site,
                schedule,
                gateway=f"http://127.0.0.1:{fleet.port}",
                options=options(),
                screen=Screen(Console(file=out, width=160)),
            )
            record = await run.run(sample_shards(), model_folder)
        assert fleet.paused
        assert fleet.calls.count("create_flow_run") == 2
    report = make_report(replace(record, seconds=10.0))
    static, first, second = report.windows
    assert [w.kind for w in report.windows] == ["static", "collm", "collm"]
    assert {w.failed for w in report.windows} == {0}
    assert {w.arrivals for w in report.windows} == {static.arrivals}
    # What a window offers is what was asked for, and S answers with the initial version alone.
    assert report.scale.arrivals == static.arrivals
    assert set(static.answers_by_version) == {"1"}
    assert static.train_tokens == 0
    assert first.train_tokens_while_decoding > 0
    assert set(second.answers_by_version) <= {"2", "replica-1:2+8", "3"}
    # Token-weighted over both clients: 1.2 and 1.3, the same tokens each.
    assert report.ce.start == pytest.approx(1.25, abs=0.002)
    assert report.ce.end == pytest.approx(0.85, abs=0.002)
    assert report.ce.end_number == 3
    assert report.ce.by_client["replica-1"].start == pytest.approx(1.3, abs=0.002)
    assert static.q == pytest.approx(1 / report.ce.start)
    assert report.ratio.goodput is not None
    assert report.ratio.goodput > 1
    assert [(r.decision, r.base, r.candidate) for r in report.rounds] == [
        ("promoted", "1", "2"),
        ("promoted", "2", "3"),
    ]
    assert report.rounds[0].serve_delay_ms is not None
    assert report.swaps.count > 0
    assert report.swaps.set_up == 0
    assert report.eval_set.rows == 200
    assert page(report)
    assert "capacity" in out.getvalue()
    assert "cross-entropy at the end" in out.getvalue()


async def test_a_static_window_after_an_adapted_one_goes_back_and_forth(database: Database, model_folder: Path) -> None:
    async with world(database) as fleet:
        site = make_site(fleet, Settings())
        async with RoundSchedule("http://prefect/api", transport=httpx.MockTransport(fleet.answer)) as schedule:
            run = Run(
                site,
                schedule,
                gateway=f"http://127.0.0.1:{fleet.port}",
                options=replace(options(), order="CSC"),
                screen=Screen(Console(file=io.StringIO())),
            )
            record = await run.run(sample_shards(), model_folder)
    report = make_report(replace(record, seconds=10.0))
    assert set(report.windows[1].answers_by_version) == {"1"}
    assert report.windows[1].train_tokens == 0
    # The swaps back to 1 and forth to 2 are the demo's own: two replicas, twice.
    assert report.swaps.set_up == 4
    assert report.adapter.name == "code"
    assert [r.decision for r in report.rounds] == ["promoted", "promoted"]
    assert report.rounds[1].base == "2"


async def test_a_round_that_does_not_finish_is_aborted_and_its_local_versions_go(database: Database) -> None:
    async with world(database) as fleet:
        site = make_site(fleet, Settings())
        async with RoundSchedule("http://prefect/api", transport=httpx.MockTransport(fleet.answer)) as schedule:
            opened = await asyncio.to_thread(fleet.open_round)
            fleet.replicas[1].swap("local-2", "1+8", "local", "local/k")
            demo = DemoFleet(site, schedule, CODE, quiet_s=0.1)
            async with asyncio.timeout(20):
                await demo.static(settle_s=0.2)
        latest = await site.transact(lambda s: rounds.latest(s, CODE))
    assert latest is not None
    assert latest.state is RoundState.ABORTED
    assert {replica.name: replica.stopped for replica in fleet.replicas} == {c: [opened.id] for c in opened.clients}
    assert fleet.replicas[1].active == "uid-1"


async def test_the_schedule_gets_the_tokens_of_its_rounds_beside_what_it_has() -> None:
    asked: list[tuple[str, str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, json.loads(request.content)))
        if request.url.path.endswith("filter"):
            return httpx.Response(200, json=[{"id": "d", "parameters": {"adapter": "code"}}])
        return httpx.Response(204)

    async with RoundSchedule("http://prefect/api", transport=httpx.MockTransport(answer)) as schedule:
        await schedule.set_tokens(900)
    assert asked[-1] == ("PATCH", "/api/deployments/d", {"parameters": {"adapter": "code", "tokens": 900}})


def test_a_faster_fleet_trains_more_in_a_round() -> None:
    assert [round_tokens(512, rps, "float32") for rps in (0.1, 3.2, 6.4)] == [512, 512, 1024]
    assert [round_tokens(512, rps, "bfloat16") for rps in (0.1, 4.4, 1e6)] == [1536, 1536, 4 * 1536]


async def test_prefect_is_asked_again_while_busy_and_its_refusal_is_told() -> None:
    answers = [httpx.Response(503, text="busy"), httpx.Response(200, json=[{"id": "d"}]), httpx.Response(204)]
    busy = httpx.MockTransport(lambda request: answers.pop(0))
    async with RoundSchedule("http://prefect/api", transport=busy, retry_s=0.0) as schedule:
        await schedule.pause()
    assert answers == []
    refusing = httpx.MockTransport(lambda request: httpx.Response(422, text="no such field"))
    async with RoundSchedule("http://prefect/api", transport=refusing, retry_s=0.0) as schedule:
        with pytest.raises(ScheduleFailed, match="no such field"):
            await schedule.pause()
    empty: Mapping[str, str] = {}
    none = httpx.MockTransport(lambda request: httpx.Response(200, json=list(empty)))
    async with RoundSchedule("http://prefect/api", transport=none, retry_s=0.0) as schedule:
        with pytest.raises(ScheduleFailed, match="no deployment"):
            await schedule.pause()
        with pytest.raises(ScheduleFailed, match="no deployment"):
            await schedule.wait_ready(0.0)


REPORTS = {name: tuple(Row(str(i), "x") for i in range(100)) for name in ("replica-0", "replica-1")}
FEDERATED = Served("uid-1", "1", "k", None, federated=True)
LOCAL = Served("local-2", "replica-1:1+8", "local/k", "uid-1")


async def test_a_local_version_is_measured_on_some_rows_and_comes_out_as_if_on_all(database: Database) -> None:
    async with world(database) as fleet:
        quality = Quality(make_site(fleet, Settings()), CODE, REPORTS)
        versions = {"uid-1": FEDERATED, "local-2": LOCAL}
        await quality.measure(FEDERATED)
        left = await quality.catch_up({"uid-1": 1, "local-2": 3}, versions, budget_s=10)
        again = await quality.estimate(LOCAL, versions)
    assert left == 0
    # Both only once.
    assert fleet.replicas[0].scored == ["uid-1", "local-2"]
    assert quality.known["uid-1"].rows == 200
    assert again.rows == 50
    # The easy rows alone would give 0.9 and 1.0.
    assert again.ce == pytest.approx({"replica-0": 1.0, "replica-1": 1.1}, abs=0.002)
    assert again.pooled == pytest.approx(1.05, abs=0.002)


async def test_measuring_stops_when_the_time_is_up_and_goes_on_later(database: Database) -> None:
    async with world(database) as fleet:
        quality = Quality(make_site(fleet, Settings()), CODE, REPORTS)
        versions = {"uid-1": FEDERATED, "local-2": LOCAL}
        quality.full_s = quality.part_s = 5.0
        assert await quality.catch_up({"uid-1": 1, "local-2": 3}, versions, budget_s=4.0) == 2
        assert await quality.catch_up({"uid-1": 1, "local-2": 3}, versions, budget_s=60.0) == 0
    assert set(quality.known) == {"uid-1", "local-2"}


async def test_a_federated_version_is_estimated_beside_its_ancestor_when_time_is_short(database: Database) -> None:
    async with world(database) as fleet:
        quality = Quality(make_site(fleet, Settings()), CODE, REPORTS)
        second = Served("local-2", "2", "k", "uid-1", federated=True)
        versions = {"uid-1": FEDERATED, "local-2": second}
        await quality.measure(FEDERATED)
        quality.full_s = 20.0
        assert await quality.catch_up({"local-2": 3}, versions, budget_s=10) == 0
        estimated = quality.known["local-2"]
        exact = await quality.measure(second)
    assert (estimated.rows, exact.rows) == (50, 200)
    assert estimated.ce == pytest.approx(exact.ce, abs=0.002)


async def test_a_version_that_cannot_be_scored_is_left_out_not_fatal(database: Database) -> None:
    class Lost(FakeReplica):
        async def score(self, body: ScoreBody, *, timeout_s: float) -> ScoreReply:
            raise NoReplica("away")

    async with world(database) as fleet:
        fleet.replicas[1] = Lost("replica-1")
        quality = Quality(make_site(fleet, Settings()), CODE, REPORTS)
        left = await quality.catch_up({"uid-1": 3}, {"uid-1": FEDERATED}, budget_s=10)
    assert left == 0
    assert quality.known == {}
