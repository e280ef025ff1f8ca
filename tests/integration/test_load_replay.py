"""The load generator against a real TCP server that misbehaves in every way a gateway can."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.errors import NoReplica
from serving.load.capacity import Sweep, measure
from serving.load.model import Call, Outcome
from serving.load.open_loop import replay
from serving.load.replay import main
from serving.load.sender import Target
from serving.model import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.25)
HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-adapter-id: code\r\nx-adapter-version: 12+8\r\n"
HEAD += "x-adapter-uid: u12\r\nx-replica-id: replica-1\r\nconnection: close\r\n\r\n"


@dataclass
class Stub:
    """A server that does what the prompt's first word says."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.headers.append(head)
            self.seen.append(body)
            self.running += 1
            self.most = max(self.most, self.running)
            await self.answer(body, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.running = max(0, self.running - 1)
            writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        how, tokens = body["inputs"].split()[0], body["parameters"]["max_new_tokens"]
        if how == "refuse":
            text = json.dumps({"error": "queue is full", "error_type": "overloaded"})
            writer.write(f"HTTP/1.1 429 Too Many\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            return
        if how == "plain":
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops")
            return
        if how == "hangup":
            return
        writer.write(HEAD.encode())
        if how == "silent":
            await writer.drain()
            await asyncio.sleep(5)
            return
        if how == "late":
            await asyncio.sleep(0.4)
        last = tokens - 3 if how in ("short", "cut", "event") else tokens
        for i in range(1, last + 1):
            if how == "drip":
                await asyncio.sleep(0.2)
            end = i == last and how not in ("cut", "event")
            event = {"index": i, "token": {"id": 5, "text": "x"}, "generated_text": "x" * i if end else None}
            writer.write(f"data:{json.dumps(event)}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(0.002)
        if how == "event":
            writer.write(b'data:{"error":"engine died","error_type":"incomplete_generation"}\n\n')
        if how == "garbage":
            writer.write(b"data:{nonsense\n\n")


@asynccontextmanager
async def stub() -> AsyncIterator[Stub]:
    found = Stub()
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


def call(index: int, inputs: str, *, at: float = 0.0, tokens: int = 8) -> Call:
    return Call(index=index, offset_s=at, inputs=inputs, prompt_tokens=3, new_tokens=tokens, adapter="code")


async def outcome_of(inputs: str, **target: Any) -> Outcome:
    async with stub() as server:
        (found,) = await replay(Target(url=server.url, **target), [call(0, inputs)])
    return found


async def test_a_whole_answer_is_recorded_token_by_token() -> None:
    async with stub() as server:
        (found,) = await replay(Target(url=server.url, slo=SLO, token="secret"), [call(0, "ok", at=0.05)])
    assert found.failure is None
    assert found.tokens == len(found.token_s) == 8
    assert (found.uid, found.label, found.adapter, found.replica) == ("u12", "12+8", "code", "replica-1")
    assert found.scheduled_s == 0.05
    assert found.timing is not None
    assert found.first_s is not None
    assert found.scheduled_s <= found.sent_s <= found.first_s <= found.token_s[-1]
    asked = server.seen[0]
    assert asked["parameters"]["ignore_eos"] is True
    assert asked["parameters"]["adapter_id"] == "code"
    assert asked["parameters"]["do_sample"] is False
    assert "x-slo-ttft-ms: 1000" in server.headers[0].lower()
    assert "authorization: bearer secret" in server.headers[0].lower()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuse", "429 overloaded: queue is full"),
        ("plain", "502: oops"),
        ("hangup", "RemoteProtocolError"),
        ("cut", "the stream ended before the answer did"),
        ("event", "incomplete_generation: engine died"),
        ("short", "5 tokens instead of 8"),
    ],
)
async def test_whatever_is_not_a_complete_answer_is_failed(how: str, said: str) -> None:
    found = await outcome_of(how)
    assert found.failure is not None
    assert said in found.failure
    assert found.timing is None


async def test_a_server_that_ends_answers_by_itself_is_taken_as_it_is() -> None:
    found = await outcome_of("short", force_length=False)
    assert found.failure is None
    assert found.tokens == 5


async def test_silence_and_endless_answers_are_given_up() -> None:
    silent = await outcome_of("silent", silence_timeout_s=0.3)
    assert silent.failure is not None
    assert "ReadTimeout" in silent.failure
    endless = await outcome_of("drip", total_timeout_s=0.5)
    assert endless.failure == "no end within 0.5 s"
    assert endless.tokens > 0


async def test_no_server_at_all_is_a_failure_of_each_request_not_of_the_replay() -> None:
    async with stub() as server:
        url = server.url
    found = await replay(Target(url=url), [call(0, "ok"), call(1, "ok")])
    assert [o.status for o in found] == [None, None]
    assert all("ConnectError" in (o.failure or "") for o in found)


async def test_the_loop_is_open_requests_leave_on_time_however_slow_the_answers() -> None:
    async with stub() as server:
        calls = [call(i, "late", at=0.05 * i) for i in range(8)]
        found = await replay(Target(url=server.url), calls)
        assert server.most >= 6
    assert [o.index for o in found] == list(range(8))
    assert all(o.failure is None for o in found)
    # Generous: the machine may be busy.
    assert max(o.sent_s - o.scheduled_s for o in found) < 0.3


async def test_each_arrival_is_reported_once_as_it_ends() -> None:
    seen: list[int] = []
    async with stub() as server:
        calls = [call(0, "late"), call(1, "ok"), call(2, "refuse")]
        await replay(Target(url=server.url), calls, progress=lambda o: seen.append(o.index))
    assert sorted(seen) == [0, 1, 2]
    assert seen[-1] == 0


async def test_capacity_is_measured_in_closed_loop() -> None:
    async with stub() as server:
        sweep = Sweep(concurrencies=(1, 3), settle_s=0.1, measure_s=0.4)
        found = await measure(Target(url=server.url), [call(0, "ok")], SLO, sweep)
        assert server.most <= 3
    assert found.rate > 1
    assert found.levels[0].concurrency == 1
    assert found.levels[0].attainment == 1


async def test_a_fleet_that_answers_nothing_has_no_capacity() -> None:
    async with stub() as server:
        sweep = Sweep(concurrencies=(1,), settle_s=0.0, measure_s=0.2)
        with pytest.raises(NoReplica, match="kept the SLO at no load"):
            await measure(Target(url=server.url), [call(0, "refuse")], SLO, sweep)


@pytest.fixture
def served() -> Iterator[Stub]:
    """A stub in a thread of its own: ``collm replay`` runs its own loop."""
    ready, done = threading.Event(), threading.Event()
    box: list[Stub] = []

    def run() -> None:
        async def serve() -> None:
            async with stub() as found:
                box.append(found)
                ready.set()
                await asyncio.to_thread(done.wait)

        asyncio.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(5)
    yield box[0]
    done.set()
    thread.join()


def test_the_command_reports_and_says_by_its_exit_code_whether_all_was_answered(
    served: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLLM_STATE_DIR", str(tmp_path))
    out = tmp_path / "replay.json"
    code = main(["--url", served.url, "--rate", "10", "--seconds", "1", "--out", str(out), "--adapter", "code"])
    # The stub refuses no prompt that begins with "###".
    assert code == 0
    report = json.loads(out.read_text())
    assert report["load"]["arrivals"] == 10
    assert report["load"]["failed"] == 0
    assert report["load"]["answers_by_version"] == {"12+8": 10}
    assert report["offered_rps"] == pytest.approx(10)
    assert "SLO attainment" in capsys.readouterr().out
    assert all(asked["inputs"].endswith("### Response:\n") for asked in served.seen)


@pytest.mark.parametrize("flag", ["--seconds", "--rate", "--time-scale", "--context-scale", "--ttft-s", "--tpot-s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast"])
def test_what_must_be_above_0_is_refused_by_name(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([f"{flag}={value}"])
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err


def test_a_failed_request_makes_the_command_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLLM_STATE_DIR", str(tmp_path))
    code = main(["--url", "http://127.0.0.1:9", "--rate", "4", "--seconds", "0.5"])
    assert code == 1
    assert "ConnectError" in capsys.readouterr().out
