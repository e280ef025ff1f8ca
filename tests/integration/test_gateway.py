"""The gateway in front of small replicas that speak TGI over real sockets and misbehave on demand."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psycopg
import pytest
import uvicorn
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import OverloadedError, UnknownError, ValidationError
from starlette.types import Message

from db import control, replicas
from db.records import FleetDecision, ReplicaId, ReplicaRecord
from db.session import Database
from infra.clock import SystemClock
from infra.metrics import GatewayMetrics
from infra.settings import GatewaySettings, Settings
from serving.gateway.arrivals import ArrivalCounts
from serving.gateway.fleet import Fleet, snapshot
from serving.gateway.main import Gateway
from serving.gateway.relay import Relay
from serving.model import FinishReason
from serving.wire import sse, tgi

WORDS = (" one", " two", " three")


@dataclass
class Stub:
    """A replica that answers three words. ``mode`` says how it fails."""

    id: str
    mode: str = "ok"
    gap_s: float = 0.0
    port: int = 0
    seen: list[dict[str, str]] = field(default_factory=list)
    hung_up: int = 0
    """Callers that closed while an answer was being made."""
    running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(5)

    async def _listen(self) -> None:
        self._connections: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """Die as a process does: every connection is cut, the port refuses."""
        asyncio.run_coroutine_threadsafe(self._kill(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _kill(self) -> None:
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                data = await reader.readexactly(int(headers.get("content-length", "0")))
                method, path, _ = first.split()
                if method == "GET":
                    await self._get(path, writer)
                elif not await self._post(path, headers, data, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if self.mode == "hang":
            await asyncio.sleep(3600)
        if path == "/info":
            info = tgi.Info(
                model_id="stub",
                model_sha=None,
                max_concurrent_requests=4,
                max_input_tokens=99,
                max_total_tokens=100,
                version="0",
                router="stub",
            )
            await self._whole(writer, 200, info.body())
        else:
            unhealthy = tgi.unhealthy_body(self.mode, hangs=self.mode == "engine_hangs")
            await self._whole(writer, 503 if self.mode in ("stopping", "engine_hangs") else 200, unhealthy)

    async def _post(
        self,
        path: str,
        headers: dict[str, str],
        data: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        self.seen.append(headers)
        if self.mode == "hang":
            await asyncio.sleep(3600)
        if self.mode == "drop":
            return False
        if self.mode in ("overloaded", "stopping", "failing"):
            status, code = {
                "overloaded": (429, "overloaded"),
                "stopping": (503, "stopping"),
                "failing": (424, "generation"),
            }[self.mode]
            await self._whole(writer, status, {"error": self.mode, "error_type": code}, "retry-after: 7\r\n")
            return True
        body = tgi.parse(data, stream={"/generate": False, "/generate_stream": True}.get(path))
        if body.parameters.adapter_id == "nobody" or self.mode == "bare":
            await self._whole(writer, 404, {"error": "no such adapter", "error_type": "unknown_adapter"})
            return True
        tokens = [tgi.WireToken(i, word, -0.1) for i, word in enumerate(WORDS)]
        answer = tgi.Answer(
            text="".join(WORDS),
            finish_reason=FinishReason.LENGTH,
            generated_tokens=3,
            input_tokens=1,
            seed=None,
            tokens=tuple(tokens),
        )
        watch = asyncio.ensure_future(reader.read(1))
        self.running += 1
        try:
            if not body.stream:
                await asyncio.wait({watch}, timeout=self.gap_s * 3)
                if watch.done():
                    self.hung_up += 1
                    return False
                await self._whole(writer, 200, tgi.answer_body(body, answer, compat=path == "/"))
                return True
            writer.write(self._head(200, "text/event-stream", "transfer-encoding: chunked\r\n"))
            for index, token in enumerate(tokens, start=1):
                await asyncio.wait({watch}, timeout=self.gap_s)
                if watch.done():
                    self.hung_up += 1
                    return False
                if self.mode == "die_early" or (self.mode == "die" and index == 3):
                    writer.write(b"ff\r\ndata:{half an event")
                    await writer.drain()
                    return False
                if self.mode == "stall" and index == 3:
                    await asyncio.sleep(3600)
                event = (
                    tgi.last_event(body, index, token, answer, compat=path == "/")
                    if index == 3
                    else tgi.token_event(index, token)
                )
                if self.mode == "short" and index == 3:
                    break
                block = sse.event(event)
                writer.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        finally:
            self.running -= 1
            watch.cancel()
            await asyncio.wait({watch})

    def _head(self, status: int, media_type: str, extra: str) -> bytes:
        return (
            f"HTTP/1.1 {status} X\r\ncontent-type: {media_type}\r\nx-replica-id: {self.id}\r\n"
            f"X-Adapter-Id: code\r\nx-adapter-version: 1\r\nx-adapter-uid: u\r\nserver: stub\r\n{extra}\r\n"
        ).encode()

    async def _whole(self, writer: asyncio.StreamWriter, status: int, body: object, extra: str = "") -> None:
        data = sse.dumps(body)
        writer.write(self._head(status, "application/json", f"content-length: {len(data)}\r\n{extra}") + data)
        await writer.drain()


@dataclass
class Running:
    """A gateway that serves, and what stands behind it."""

    url: str
    fleet: Fleet
    arrivals: ArrivalCounts
    a: Stub
    b: Stub

    def order(self, *first: Stub) -> None:
        """Give all weight to ``first``: the others are asked only if it fails."""
        self.weights({s.id: float(s in first) for s in (self.a, self.b)})

    def weights(self, weights: dict[str, float], *, url_a: str | None = None) -> None:
        records = [
            (ReplicaRecord(id=ReplicaId(s.id), url=url, backbone="x", has_shard=False, started_s=0), None)
            for s, url in ((self.a, url_a or self.a.url), (self.b, self.b.url))
        ]
        decision = FleetDecision(
            id=1,
            leader_epoch=1,
            at_s=0,
            weights={ReplicaId(r): w for r, w in weights.items()},
            train_shares={},
            reason="",
        )
        self.fleet.swap(snapshot(records, decision))

    def wait_up(self, count: int) -> None:
        wait_for(lambda: len(self.fleet.up()) == count)


def wait_for(what: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@contextmanager
def served(gateway: Gateway) -> Iterator[str]:
    """Run a gateway in a thread; yield its URL."""
    server = uvicorn.Server(
        uvicorn.Config(gateway.app(), port=0, log_config=None, access_log=False, server_header=False)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def running() -> Iterator[Running]:
    a, b = Stub("a"), Stub("b")
    a.start()
    b.start()
    settings = Settings(gateway=GatewaySettings(connect_timeout_s=0.5, idle_timeout_s=0.5, max_body_bytes=2000))
    fleet, arrivals = Fleet(), ArrivalCounts("g", 1.0)
    with served(Gateway(settings, fleet, arrivals, SystemClock())) as url:
        it = Running(url, fleet, arrivals, a, b)
        it.weights({"a": 0.5, "b": 0.5})
        it.wait_up(2)
        yield it
    for stub in (a, b):
        if not stub._loop.is_closed():
            stub.kill()


def ask(url: str, path: str = "/generate", **parameters: object) -> httpx.Response:
    return httpx.post(url + path, json={"inputs": "hi", "parameters": parameters}, timeout=20)


def events(answer: httpx.Response) -> list[dict[str, object]]:
    return [json.loads(sse.payload(block)) for block in answer.content.split(b"\n\n") if block]


def test_answers_pass_through_with_their_headers(running: Running) -> None:
    answer = ask(running.url)
    assert answer.status_code == 200
    assert answer.json() == {"generated_text": " one two three"}
    assert answer.headers["x-adapter-id"] == "code"
    assert answer.headers["x-adapter-version"] == "1"
    assert answer.headers["x-adapter-uid"] == "u"
    assert answer.headers["x-replica-id"] in {"a", "b"}
    assert "server" not in answer.headers
    root = ask(running.url, "/", return_full_text=False)
    assert root.json() == [{"generated_text": " one two three"}]
    stream = ask(running.url, "/generate_stream")
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert [e["index"] for e in events(stream)] == [1, 2, 3]
    assert events(stream)[-1]["generated_text"] == " one two three"


def test_slo_headers_reach_the_replica(running: Running) -> None:
    running.order(running.a)
    headers = {"x-slo-ttft-ms": "5", "x-priority": "batch", "cookie": "secret"}
    httpx.post(running.url + "/generate", json={"inputs": "x"}, headers=headers)
    seen = running.a.seen[-1]
    assert seen["x-slo-ttft-ms"] == "5"
    assert seen["x-priority"] == "batch"
    assert "x-request-id" in seen
    assert "cookie" not in seen


def test_requests_follow_the_weights(running: Running) -> None:
    running.weights({"a": 0.75, "b": 0.25})
    for _ in range(20):
        ask(running.url)
    assert (len(running.a.seen), len(running.b.seen)) == (15, 5)


@pytest.mark.parametrize("mode", ["overloaded", "stopping", "failing", "drop"])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_replica_that_refuses_or_drops_is_replaced(running: Running, mode: str, path: str) -> None:
    running.order(running.a)
    running.a.mode = mode
    answer = ask(running.url, path)
    assert answer.status_code == 200
    assert answer.headers["x-replica-id"] == "b"
    assert len(running.a.seen) >= 1


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_an_adapter_that_one_replica_lacks_is_asked_of_the_others(running: Running, path: str) -> None:
    running.order(running.a)
    running.a.mode = "bare"
    assert ask(running.url, path).headers["x-replica-id"] == "b"
    assert set(running.fleet.up()) == {"a", "b"}
    running.b.mode = "bare"
    answer = ask(running.url, path)
    assert (answer.status_code, answer.json()["error_type"]) == (404, "unknown_adapter")
    running.b.mode = "overloaded"
    assert ask(running.url, path).status_code == 429
    running.b.mode = "drop"
    assert ask(running.url, path).status_code == 503, "nobody knows whether it exists"


def test_a_replica_with_a_malformed_address_harms_no_other(running: Running) -> None:
    running.weights({"a": 1.0, "b": 0.0}, url_a="http://::1:8101")
    assert ask(running.url).headers["x-replica-id"] == "b"
    wait_for(lambda: set(running.fleet.up()) == {"b"})
    running.b.mode = "stopping"
    running.wait_up(0)
    running.b.mode = "ok"
    running.wait_up(1)


def test_headers_in_other_characters_are_left_out(running: Running) -> None:
    raw = [(b"x-request-id", "Ünïcode".encode()), (b"x-priority", b"batch")]
    answer = httpx.post(running.url + "/generate", json={"inputs": "x"}, headers=raw)
    assert answer.status_code == 200
    seen = next(iter(running.a.seen + running.b.seen))
    assert seen["x-request-id"].isalnum()
    assert seen["x-priority"] == "batch"


@pytest.mark.parametrize("mode", ["die_early"])
def test_a_stream_that_dies_before_its_first_event_is_done_again(running: Running, mode: str) -> None:
    running.order(running.a)
    running.a.mode = mode
    answer = ask(running.url, "/generate_stream")
    assert answer.headers["x-replica-id"] == "b"
    assert events(answer)[-1]["generated_text"] == " one two three"


@pytest.mark.parametrize("mode", ["die", "short", "stall"])
def test_a_stream_that_dies_later_ends_with_an_error_event(running: Running, mode: str) -> None:
    running.order(running.a)
    running.a.mode = mode
    got = events(ask(running.url, "/generate_stream"))
    assert [e.get("index") for e in got] == [1, 2, None]
    assert got[-1] == {"error": "The answer broke off before its end.", "error_type": "incomplete_generation"}


def test_a_killed_replica_gets_nothing_until_it_is_back(running: Running) -> None:
    running.order(running.a)
    port = running.a.port
    running.a.kill()
    started = time.monotonic()
    assert ask(running.url).headers["x-replica-id"] == "b"
    assert time.monotonic() - started < 1
    assert set(running.fleet.up()) == {"b"}
    running.a = Stub("a", port=port)
    running.a.start()
    running.wait_up(2)
    assert ask(running.url).headers["x-replica-id"] == "a"


def test_killed_in_the_middle_of_whole_answers_they_are_done_again(running: Running) -> None:
    running.order(running.a)
    running.a.gap_s = 5

    async def many() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=20) as http:
            return await asyncio.gather(
                *(http.post(running.url + "/generate", json={"inputs": "x"}) for _ in range(12))
            )

    kill = threading.Timer(0.5, running.a.kill)
    kill.start()
    got = asyncio.run(many())
    kill.join()
    assert [answer.status_code for answer in got] == [200] * 12
    assert {answer.headers["x-replica-id"] for answer in got} == {"b"}


def test_a_hung_replica_is_given_up_and_its_requests_go_elsewhere(running: Running) -> None:
    running.order(running.a)
    running.a.mode = "hang"
    assert ask(running.url).headers["x-replica-id"] == "b"
    assert set(running.fleet.up()) == {"b"}


@pytest.mark.parametrize(("mode", "by"), [("stopping", "a"), ("engine_hangs", "b")])
def test_a_replica_that_stops_answers_what_it_has_and_one_that_hangs_does_not(
    running: Running, mode: str, by: str
) -> None:
    running.order(running.a)
    running.a.gap_s = 0.8
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, running.url)
        wait_for(lambda: running.a.running == 1)
        running.a.mode = mode
        assert ask(running.url).headers["x-replica-id"] == "b"
        wait_for(lambda: set(running.fleet.up()) == {"b"})
        assert waiting.result().headers["x-replica-id"] == by


def test_no_room_anywhere_is_429_with_retry_after(running: Running) -> None:
    running.a.mode = running.b.mode = "overloaded"
    answer = ask(running.url, "/generate_stream")
    assert answer.status_code == 429
    assert answer.json()["error_type"] == "overloaded"
    assert answer.headers["retry-after"] == "7"
    assert set(running.fleet.up()) == {"a", "b"}


def test_no_replica_is_503(running: Running) -> None:
    assert httpx.get(running.url + "/health").status_code == 200
    running.a.kill()
    running.b.kill()
    running.wait_up(0)
    answer = ask(running.url)
    assert answer.status_code == 503
    assert answer.json()["error_type"] == "no_replica"
    assert "retry-after" in answer.headers
    health = httpx.get(running.url + "/health")
    assert health.status_code == 503
    assert health.json()["error_type"] == "healthcheck"
    assert httpx.get(running.url + "/info").status_code == 503


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 422, "validation"),
        (b'{"inputs": ""}', 422, "validation"),
        (b'{"inputs": "x", "parameters": {"top_p": 3}}', 422, "validation"),
        (b'{"inputs": "' + b"x" * 3000 + b'"}', 413, "validation"),
        (b'{"inputs": "x", "parameters": {"adapter_id": "nobody"}}', 404, "unknown_adapter"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_bad_requests_are_the_callers_fault(
    running: Running, content: bytes, status: int, code: str, path: str
) -> None:
    answer = httpx.post(running.url + path, content=content)
    assert answer.status_code == status
    assert answer.json()["error_type"] == code
    assert set(running.fleet.up()) == {"a", "b"}


def test_unknown_routes_and_methods_have_the_error_shape(running: Running) -> None:
    assert httpx.get(running.url + "/nowhere").json()["error_type"] == "not_found"
    assert httpx.get(running.url + "/generate").status_code == 405


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_caller_who_hangs_up_stops_the_replica_at_once(running: Running, path: str) -> None:
    running.order(running.a)
    running.a.gap_s = 2
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(running.url + path, json={"inputs": "x"}, timeout=0.3)
    wait_for(lambda: running.a.hung_up == 1, 1)
    assert running.a.running == 0
    assert running.fleet.inflight()[ReplicaId("a")] == 0
    metrics = httpx.get(running.url + "/metrics").text
    assert 'tgi_request_failure{err="dropped"} 1.0' in metrics


def test_a_burst_does_not_pile_up_on_a_slow_replica(running: Running) -> None:
    running.weights({"a": 0.9, "b": 0.1})
    running.a.gap_s = 0.5

    async def burst() -> list[str]:
        async with httpx.AsyncClient(timeout=20) as http:
            calls = [http.post(running.url + "/generate", json={"inputs": "x"}) for _ in range(20)]
            return [answer.headers["x-replica-id"] for answer in await asyncio.gather(*calls)]

    got = asyncio.run(burst())
    assert got.count("b") >= 2
    assert got.count("a") >= 10


def test_arrivals_are_counted_by_replica_and_adapter(running: Running) -> None:
    running.order(running.a)
    ask(running.url)
    ask(running.url, adapter_id="other")
    ask(running.url, adapter_id="nobody")
    running.a.mode = running.b.mode = "overloaded"
    ask(running.url)
    wait_for(lambda: httpx.get(running.url + "/metrics").text.count('{err="overloaded"} 1.0') == 1)
    by_key: dict[tuple[str, bool], int] = {}
    for a in running.arrivals.take():
        key = (a.adapter, a.failures > 0)
        by_key[key] = by_key.get(key, 0) + a.requests
    assert by_key == {("code", False): 1, ("other", False): 1, ("", False): 1, ("code", True): 1}


def test_info_and_metrics(running: Running) -> None:
    info = httpx.get(running.url + "/info").json()
    assert info["model_id"] == "stub"
    assert info["router"] == "collm-gateway"
    ask(running.url)
    text = httpx.get(running.url + "/metrics").text
    assert "tgi_request_success 1.0" in text
    assert 'collm_gateway_weight{replica="a"} 0.5' in text


async def test_bodies_that_do_not_come_are_counted_and_given_up() -> None:
    settings, arrivals = Settings(gateway=GatewaySettings(max_inflight=1)), ArrivalCounts("g", 1.0)
    async with httpx.AsyncClient() as http:
        relay = Relay(settings, Fleet(), http, arrivals, GatewayMetrics(), SystemClock(), body_timeout_s=0.2)

        async def never() -> Message:
            await asyncio.sleep(3600)
            raise AssertionError

        async def post() -> tuple[int, str]:
            messages = list[Message]()

            async def send(message: Message) -> None:
                messages.append(message)

            await relay.answer({"headers": [], "path": "/generate"}, never, send, stream=False)
            return messages[0]["status"], json.loads(messages[1]["body"])["error_type"]

        assert tuple(await asyncio.gather(post(), post())) == ((408, "validation"), (429, "overloaded"))
        assert await post() == (408, "validation"), "its place is free again"


def test_huggingface_client(running: Running) -> None:
    client = InferenceClient(model=running.url)
    assert client.text_generation("hi", return_full_text=False) == " one two three"
    assert list(client.text_generation("hi", stream=True)) == list(WORDS)
    whole = client.text_generation("hi", details=True, adapter_id="code", max_new_tokens=3)
    assert whole.details is not None
    assert whole.details.finish_reason == "length"
    assert [t.text for t in whole.details.tokens] == list(WORDS)
    streamed = list(client.text_generation("hi", details=True, stream=True))
    assert streamed[-1].details is not None
    assert streamed[-1].details.generated_tokens == 3
    endpoint = InferenceClient(model=running.url, provider="hf-inference")
    assert endpoint.get_endpoint_info()["model_id"] == "stub"
    assert endpoint.health_check()
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        client.text_generation("hi", temperature=-1.0)
    with pytest.raises(UnknownError, match="no such adapter"):
        client.text_generation("hi", adapter_id="nobody")
    with pytest.raises(UnknownError, match="no such adapter"):
        list(client.text_generation("hi", adapter_id="nobody", stream=True))
    running.a.mode = running.b.mode = "overloaded"
    with pytest.raises(OverloadedError):
        client.text_generation("hi")


async def test_huggingface_async_client(running: Running) -> None:
    async with AsyncInferenceClient(model=running.url) as client:
        assert await client.text_generation("hi", return_full_text=False) == " one two three"
        assert [t async for t in await client.text_generation("hi", stream=True)] == list(WORDS)
        whole = await client.text_generation("hi", details=True, adapter_id="code")
        assert whole.details is not None
        streamed = [e async for e in await client.text_generation("hi", details=True, stream=True)]
        assert streamed[-1].generated_text == "hi one two three"
        with pytest.raises(ValidationError):
            await client.text_generation("hi", top_p=2.0)


def announce(database: Database, *stubs: Stub) -> None:
    with database.transaction() as s:
        for stub in stubs:
            record = ReplicaRecord(
                id=ReplicaId(stub.id), url=stub.url, backbone="x", has_shard=False, started_s=time.time()
            )
            replicas.announce(s, record)


def decide(database: Database, weights: dict[str, float]) -> None:
    with database.transaction() as s:
        epoch = control.take_leadership(s, "test")
        of_replicas = {ReplicaId(r): w for r, w in weights.items()}
        control.write_decision(s, leader_epoch=epoch, at_s=time.time(), weights=of_replicas, train_shares={}, reason="")


@pytest.fixture
def stubs() -> Iterator[tuple[Stub, Stub]]:
    pair = (Stub("a"), Stub("b"))
    for stub in pair:
        stub.start()
    yield pair
    for stub in pair:
        if not stub._loop.is_closed():
            stub.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_command_takes_its_fleet_from_postgres_and_outlives_it(
    database: Database, database_url: str, stubs: tuple[Stub, Stub]
) -> None:
    a, b = stubs
    announce(database, a, b)
    decide(database, {"a": 1.0, "b": 0.0})
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {**os.environ, "COLLM_DATABASE_URL": database_url, "COLLM_GATEWAY__PORT": str(port)}
    environ["COLLM_CLUSTER_TOKEN"] = "secret"
    command = [sys.executable, "-m", "infra.cli", "gateway"]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(url), 30)
        assert ask(url).headers["x-replica-id"] == "a"
        decide(database, {"a": 0.0, "b": 1.0})
        wait_for(lambda: ask(url).headers["x-replica-id"] == "b", 2)
        wait_for(lambda: counted(database) >= 2, 5)
        taken = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
        assert taken.returncode == 2
        assert str(port) in taken.stderr
        assert "COLLM_GATEWAY__PORT" in taken.stderr
        # Postgres goes away: nobody may connect, and those who are connected are thrown out.
        name = database_url.rsplit("/", 1)[1]
        admin = database_url.replace("+psycopg", "").rsplit("/", 1)[0] + "/postgres"
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            connection.execute(cut, (name,))
            for _ in range(5):
                assert ask(url).headers["x-replica-id"] == "b"
            b.kill()
            assert ask(url).headers["x-replica-id"] == "a"
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        before = counted(database)
        wait_for(lambda: counted(database) > before, 5)
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


def counted(database: Database) -> int:
    with database.transaction() as s:
        return sum(a.requests for a in control.arrivals_since(s, 0))
