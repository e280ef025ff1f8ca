"""TGI's routes of a replica."""

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import structlog

from adapters.memory import MemoryUpdateStore
from infra.clock import ManualClock
from infra.errors import EngineDead, StepFailed
from infra.settings import Settings
from serving.replica.api import HANG_S, make_app
from serving.replica.desk import Desk
from serving.replica.fake_engine import (
    FAKE_BACKBONE,
    FAKE_SHAPES,
    VOCAB,
    FakeEngine,
    FakeTokenizer,
    expected_tokens,
)
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.wire import tgi

if TYPE_CHECKING:
    from tests.integration.replica.conftest import Site

TOKENIZER = FakeTokenizer()


def payload(**parameters: object) -> dict[str, object]:
    return {"inputs": "hello", "parameters": {"max_new_tokens": 8, "ignore_eos": True, **parameters}}


async def events(http: httpx.AsyncClient, body: dict[str, object]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    async with http.stream("POST", "/generate_stream", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    return answer, [json.loads(line.removeprefix("data:")) for line in lines]


async def test_a_whole_answer_names_what_gave_it(site: "Site", http: httpx.AsyncClient) -> None:
    answer = await http.post("/generate", json=payload(details=True, ignore_eos=False))
    body = answer.json()
    uid = answer.headers["x-adapter-uid"]
    want = expected_tokens(b"hello", site.weights[uid], 8)
    assert answer.status_code == 200
    assert [t["id"] for t in body["details"]["tokens"]] == want
    assert body["generated_text"] == TOKENIZER.decode(want)
    assert body["details"]["prefill"] == []
    assert answer.headers["x-adapter-id"] == "code"
    assert answer.headers["x-adapter-version"] == "1"
    assert answer.headers["x-replica-id"] == "r-7"
    assert answer.headers["x-prompt-tokens"] == "5"
    await site.idle()


async def test_a_stream_is_the_same_answer_token_by_token(http: httpx.AsyncClient) -> None:
    whole = (await http.post("/generate", json=payload())).json()["generated_text"]
    answer, stream = await events(http, payload(details=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-adapter-id"] == "code"
    assert [e["index"] for e in stream] == list(range(1, 9))
    assert "".join(e["token"]["text"] for e in stream if not e["token"]["special"]) == whole
    assert [e["generated_text"] for e in stream] == [None] * 7 + [whole]
    assert stream[-1]["details"]["generated_tokens"] == 8
    assert stream[-1]["details"]["input_length"] == 5


async def test_the_root_route_answers_with_a_list_and_the_prompt(http: httpx.AsyncClient) -> None:
    alone = (await http.post("/generate", json=payload())).json()["generated_text"]
    assert (await http.post("/", json=payload())).json() == [{"generated_text": "hello" + alone}]
    streamed = await http.post("/", json={**payload(return_full_text=False), "stream": True})
    last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data:"))
    assert last["generated_text"] == alone
    assert (await http.get("/")).status_code == 200


async def test_prompt_logprobs_and_top_tokens(http: httpx.AsyncClient) -> None:
    body = (await http.post("/generate", json=payload(decoder_input_details=True, top_n_tokens=3))).json()
    prefill = body["details"]["prefill"]
    assert [t["text"] for t in prefill] == list("hello")
    assert prefill[0]["logprob"] is None
    assert all(t["logprob"] <= 0 for t in prefill[1:])
    assert [len(top) for top in body["details"]["top_tokens"]] == [3] * 8


async def test_a_seed_repeats_an_answer_and_no_seed_varies_it(http: httpx.AsyncClient) -> None:
    async def text(**parameters: object) -> str:
        return str((await http.post("/generate", json=payload(**parameters))).json()["generated_text"])

    assert await text(do_sample=True, seed=3) == await text(do_sample=True, seed=3)
    assert len({await text(do_sample=True) for _ in range(4)}) > 1
    assert await text() == await text()


async def test_the_model_id_is_the_backbone_alone(site: "Site", http: httpx.AsyncClient) -> None:
    answer = await http.post("/generate", json=payload(adapter_id="collm/fake", details=True, ignore_eos=False))
    assert [t["id"] for t in answer.json()["details"]["tokens"]] == expected_tokens(b"hello", None, 8)
    assert (answer.headers["x-adapter-id"], answer.headers["x-adapter-uid"]) == ("collm/fake", "")


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        (b"{not json", 422, "validation", "JSON"),
        (b'{"inputs": ""}', 422, "validation", "empty"),
        (b'{"inputs": "x", "parameters": {"temperature": 0}}', 422, "validation", "temperature"),
        (b'{"inputs": "x", "parameters": {"max_new_tokens": 1000}}', 422, "validation", "128"),
        (json.dumps({"inputs": "x" * 200}).encode(), 422, "validation", "127"),
        (b'{"inputs": "x", "parameters": {"adapter_id": "nope"}}', 404, "unknown_adapter", "nope"),
        (b'{"inputs": "' + b"x" * 2_000_000 + b'"}', 413, "validation", "bytes"),
    ],
)
async def test_bad_input_has_its_real_status_on_every_route(
    site: "Site", http: httpx.AsyncClient, route: str, body: bytes, status: int, kind: str, text: str
) -> None:
    answer = await http.post(route, content=body)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert text in answer.json()["error"]
    assert (await http.post("/generate", json=payload())).status_code == 200, "nothing else is harmed"
    await site.idle()


class WideTokenizer(FakeTokenizer):
    """Knows a token for which the backbone has no embedding."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(VOCAB if letter == "?" else ord(letter) for letter in text)


async def test_a_token_beyond_the_vocabulary_is_refused_before_it_harms_others(
    make_site: Callable[..., "Site"], fake: FakeEngine
) -> None:
    site, fake.step_s = make_site(tokenizer=WideTokenizer()), 0.01
    async with site.http() as http:
        running = asyncio.create_task(http.post("/generate", json=payload(max_new_tokens=20)))
        await site.decodes()
        answer = await http.post("/generate", json={"inputs": "hello?"})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        assert (await running).status_code == 200


async def test_a_full_queue_is_429_with_retry_after(make_site: Callable[..., "Site"], fake: FakeEngine) -> None:
    site, fake.step_s = make_site(max_queue=1), 0.05
    async with site.http() as http:
        answers = await asyncio.gather(*(http.post("/generate_stream", json=payload()) for _ in range(12)))
    codes = [a.status_code for a in answers]
    assert set(codes) == {200, 429}
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.json()["error_type"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    await site.idle()
    window = await site.desk.call(lambda r: r.stats.window(r.clock.monotonic()))
    assert (window.finished, window.violations >= codes.count(429)) == (12, True), "those refused at once count too"


def scope(route: str) -> dict[str, Any]:
    """A request with the cluster token, as the server gives it to the application."""
    headers = [(b"authorization", b"Bearer secret")]
    found = {"type": "http", "method": "POST", "path": route, "query_string": b"", "headers": headers, "root_path": ""}
    return found | {"http_version": "1.1", "scheme": "http", "server": ("r", 80), "client": ("c", 1), "raw_path": b""}


@pytest.mark.parametrize("route", ["/generate", "/control/score"])
async def test_a_caller_who_leaves_while_sending_is_no_error_of_ours(site: "Site", route: str) -> None:
    messages: list[Any] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    with structlog.testing.capture_logs() as logs:
        await site.app(scope(route), receive, send)
    assert logs == []
    dropped = b'tgi_request_failure{err="dropped"} 1.0' in site.replica.metrics.render()
    assert dropped == (route == "/generate")


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_a_caller_who_leaves_stops_the_generation(site: "Site", fake: FakeEngine, route: str) -> None:
    fake.step_s = 0.02
    body = json.dumps(payload(max_new_tokens=100)).encode()
    started, leave = asyncio.Event(), asyncio.Event()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, object]:
        message = next(messages, None)
        if message is not None:
            return message
        await leave.wait()
        return {"type": "http.disconnect"}

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)
        started.set()

    call = asyncio.create_task(site.app(scope(route), receive, send))
    if route == "/generate_stream":
        await asyncio.wait_for(started.wait(), 10)
    else:
        await site.decodes()
    leave.set()
    await asyncio.wait_for(call, 10)
    await site.idle()
    assert sum(len(m.get("body", b"")) for m in sent) < 8000, "it did not run to its end"
    assert b'tgi_request_failure{err="dropped"} 1.0' in site.replica.metrics.render()


async def test_a_failure_after_the_first_token_is_an_event(site: "Site", fake: FakeEngine) -> None:
    fake.step_s = 0.02
    async with site.http() as http:
        running = asyncio.create_task(events(http, payload(max_new_tokens=60)))
        await site.decodes()
        fake.fail_next = StepFailed("planted")
        answer, stream = await running
        assert answer.status_code == 200
        assert stream[-1] == {"error": "planted", "error_type": "generation"}
        assert (await http.post("/generate", json=payload())).status_code == 200
    await site.idle()


async def test_a_failure_before_the_first_token_has_its_status(http: httpx.AsyncClient, fake: FakeEngine) -> None:
    fake.fail_next = StepFailed("planted")
    answer = await http.post("/generate_stream", json=payload())
    assert (answer.status_code, answer.json()["error_type"]) == (424, "generation")


async def test_steps_that_fail_for_unknown_reasons_kill_the_engine_only_when_they_repeat(
    site: "Site", http: httpx.AsyncClient, fake: FakeEngine
) -> None:
    codes = []
    for _ in range(3):
        fake.fail_next = RuntimeError("out of luck")
        codes.append((await http.post("/generate", json=payload())).status_code)
    assert codes == [424, 424, 503]
    assert len(site.ended()) == 1


async def test_a_dead_engine_leaves_nobody_waiting(site: "Site", http: httpx.AsyncClient, fake: FakeEngine) -> None:
    fake.fail_next = EngineDead("planted")
    answers = await asyncio.gather(*(http.post("/generate", json=payload()) for _ in range(3)))
    assert {a.status_code for a in answers} == {503}
    assert (await http.post("/generate", json=payload())).status_code == 503
    assert [str(e) for e in site.ended()] == ["planted"]


async def test_stopping_lets_running_answers_end_and_refuses_new_ones(site: "Site", fake: FakeEngine) -> None:
    fake.step_s = 0.02
    async with site.http() as http:
        running = asyncio.create_task(http.post("/generate", json=payload(max_new_tokens=20)))
        await site.decodes()
        site.replica.stop(10.0)
        refused = await http.post("/generate", json=payload())
        assert (refused.status_code, refused.json()["error_type"]) == (503, "stopping")
        assert (await http.get("/health")).status_code == 503
        assert (await running).status_code == 200


async def test_answers_that_take_too_long_to_end_are_failed_when_stopping(site: "Site", fake: FakeEngine) -> None:
    fake.step_s = 0.05
    async with site.http() as http:
        running = asyncio.create_task(events(http, payload(max_new_tokens=100)))
        await site.decodes()
        site.replica.stop(0.1)
        _, stream = await running
        assert stream[-1]["error_type"] == "stopping"


async def test_health_info_and_metrics(site: "Site", http: httpx.AsyncClient) -> None:
    await http.post("/generate", json=payload())
    assert (await http.get("/health")).status_code == 200
    info = (await http.get("/info")).json()
    assert (info["model_id"], info["max_total_tokens"], info["adapters"]) == ("collm/fake", 128, ["code"])
    metrics = (await http.get("/metrics")).text
    assert "tgi_request_success 1.0" in metrics
    assert 'collm_swaps_total{adapter="code",kind="federated"} 1.0' in metrics
    assert (await http.get("/nothing")).json()["error_type"] == "not_found"
    site.desk.replica = None
    assert (await http.get("/health")).status_code == 503
    assert (await http.post("/generate", json=payload())).status_code == 503
    site.desk.replica = site.replica


async def test_metrics_show_what_prompts_share(http: httpx.AsyncClient) -> None:
    for _ in range(2):
        await http.post("/generate", json={**payload(), "inputs": "x" * 40})
    metrics = (await http.get("/metrics")).text
    assert 'collm_prefix_looked_up_tokens_total{adapter="code"} 80.0' in metrics
    assert 'collm_prefix_hit_tokens_total{adapter="code"} 39.0' in metrics


class BrokenTokenizer(FakeTokenizer):
    """Has a bug."""

    def encode(self, text: str) -> tuple[int, ...]:
        raise RuntimeError("a bug")


async def test_failures_are_counted_under_tgis_names(make_site: Callable[..., "Site"]) -> None:
    site = make_site(tokenizer=BrokenTokenizer())
    async with site.http() as http:
        with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
            answer = await http.post("/generate", json=payload(), headers={"x-request-id": "mine"})
        assert answer.status_code == 500
        assert [(line["event"], line["request_id"]) for line in logs] == [("internal_error", "mine")]
        assert (await http.post("/generate", json={"inputs": ""})).status_code == 422
        site.replica.stop(0.0)
        site.ended()
        assert (await http.post("/generate", content=b"{")).status_code == 422
        metrics = (await http.get("/metrics")).text
    assert 'tgi_request_failure{err="generation"} 1.0' in metrics
    assert 'tgi_request_failure{err="validation"} 2.0' in metrics


async def test_an_engine_thread_that_hangs_is_not_healthy() -> None:
    clock, desk, settings = ManualClock(), Desk(), Settings.model_validate({"cluster_token": "secret"})
    loader = Loader(MemoryUpdateStore(), shapes=FAKE_SHAPES, backbone=FAKE_BACKBONE)
    desk.replica = replica = Replica(
        FakeEngine(clock), TOKENIZER, loader, settings, clock, splits={}, deliver=desk.deliver
    )
    app = make_app(desk, loader, TOKENIZER, settings, clock, replica.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as http:
        replica.turn()
        clock.advance(HANG_S - 1)
        assert (await http.get("/health")).status_code == 200, "a long turn"
        clock.advance(2)
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()["error_type"]) == (503, tgi.HANGS)
        replica.turn()
        assert (await http.get("/health")).status_code == 200
    loader.close()


async def test_slo_and_priority_headers_are_read(http: httpx.AsyncClient) -> None:
    good = {"x-slo-ttft-ms": "5000", "x-slo-tpot-ms": "100", "x-priority": "batch"}
    assert (await http.post("/generate", json=payload(), headers=good)).status_code == 200
    bad = await http.post("/generate", json=payload(), headers={"x-priority": "vip"})
    assert bad.status_code == 422
