"""The control API's client: paths and bodies as ``wire.control`` says, errors as the replica raised them."""

import json
import math
from collections.abc import Callable

import httpx
import pytest

from infra.errors import (
    CapacityError,
    CollmError,
    IncompatibleAdapter,
    NoPlace,
    NoReplica,
    StepFailed,
    Unauthorized,
    VersionConflict,
)
from serving.client import HttpReplicaClient
from serving.wire import tgi
from serving.wire.control import ActivateBody, RollbackBody, RoundBody, ScoreBody, ScoreReply, StageBody

VERSION = {"adapter": "code", "uid": "u", "number": 2, "label": "2", "state": "staged"}
ROUND = {
    "round_id": "a/b",
    "state": "running",
    "tokens": 5,
    "steps": 1,
    "loss_first": 1.0,
    "loss_last": None,
    "seconds": 0.5,
    "store_key": None,
    "base_uid": "u",
    "sha256": None,
}
BODY = RoundBody(
    round_id="a/b",
    adapter="code",
    base_uid="u",
    epoch=1,
    factor="B",
    tokens=10,
    rows_per_step=2,
    lr=1e-3,
    swap_every=0,
    seed=1,
    deadline_s=5,
)


def client(handle: Callable[[httpx.Request], httpx.Response]) -> HttpReplicaClient:
    return HttpReplicaClient("http://replica:1/", "secret", transport=httpx.MockTransport(handle))


async def test_routes_bodies_and_token() -> None:
    seen: list[tuple[str, str, object]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        body = json.loads(request.content) if request.content else None
        seen.append((request.method, request.url.raw_path.decode(), body))
        path = request.url.path
        reply: dict[str, object] = ROUND if "rounds" in path else VERSION
        if path.endswith("score"):
            assert request.extensions["timeout"]["read"] == 99.0
            assert request.extensions["timeout"]["connect"] == 2.0
            reply = {"set_sha256": "s", "nll_by_row": [1.5], "tokens_by_row": [3]}
        return httpx.Response(200, json=reply)

    async with client(handle) as it:
        await it.stage(StageBody(adapter="code", uid="u", number=2, store_key="k"))
        await it.activate(ActivateBody(adapter="code", uid="u", epoch=3))
        await it.roll_back(RollbackBody(adapter="code"))
        assert (await it.start_round(BODY)).tokens == 5
        await it.round("a/b")
        await it.stop_round("a/b")
        scored = await it.score(ScoreBody(adapter="code", uid=None, split="gate"), timeout_s=99)
    assert scored.nll_by_row == (1.5,)
    assert [call[:2] for call in seen] == [
        ("POST", "/control/stage"),
        ("POST", "/control/activate"),
        ("POST", "/control/rollback"),
        ("POST", "/control/rounds"),
        ("GET", "/control/rounds/a%2Fb"),
        ("DELETE", "/control/rounds/a%2Fb"),
        ("POST", "/control/score"),
    ]
    assert seen[1][2] == {"adapter": "code", "uid": "u", "epoch": 3}


@pytest.mark.parametrize("kind", [VersionConflict, IncompatibleAdapter, NoPlace, Unauthorized, StepFailed])
async def test_errors_come_back_as_they_were_raised(kind: type[CollmError]) -> None:
    error = kind("because")
    answer = httpx.Response(error.status, json=tgi.error_body(error))
    async with client(lambda _: answer) as it:
        with pytest.raises(kind, match="because"):
            await it.status()


async def test_a_score_that_is_not_finite_arrives() -> None:
    reply = ScoreReply(set_sha256="s", nll_by_row=(float("nan"), float("inf"), 1.5), tokens_by_row=(3, 3, 3))
    answer = httpx.Response(200, content=reply.model_dump_json())
    async with client(lambda _: answer) as it:
        scored = await it.score(ScoreBody(adapter="code", uid=None, split="gate"), timeout_s=9)
    assert math.isnan(scored.nll_by_row[0])
    assert scored.nll_by_row[1:] == (math.inf, 1.5)


async def test_retry_after_is_kept() -> None:
    error = CapacityError()
    answer = httpx.Response(429, json=tgi.error_body(error), headers={"retry-after": "4"})
    async with client(lambda _: answer) as it:
        with pytest.raises(CapacityError) as caught:
            await it.status()
    assert caught.value.retry_after_s == 4


async def test_a_replica_that_is_not_there() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client(refuse) as it:
        with pytest.raises(NoReplica, match="replica"):
            await it.status()


@pytest.mark.parametrize("answer", [httpx.Response(200, json={"x": 1}), httpx.Response(502, text="<html>")])
async def test_an_answer_that_makes_no_sense(answer: httpx.Response) -> None:
    async with client(lambda _: answer) as it:
        with pytest.raises(CollmError):
            await it.status()
