"""``collm replica`` as a process, on the fake engine."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from serving.datasets import sample_shards
from serving.wire.control import RoundBody, RoundStatus
from tests.small_models import build

pytestmark = pytest.mark.e2e

COLLM = Path(sys.executable).with_name("collm")


class Process:
    """One replica and its address."""

    def __init__(self, folder: Path, **settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("COLLM_")}
        environ |= {"COLLM_STATE_DIR": str(folder), "COLLM_CLUSTER_TOKEN": "secret"}
        environ |= {"COLLM_REPLICA__FAKE_ENGINE": "true", "COLLM_REPLICA__FAKE_STEP_S": "0.01"}
        environ |= {"COLLM_REPLICA__PORT": str(self.port), **settings}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([COLLM, "replica"], env=environ, stdout=log, stderr=log)

    def ready(self) -> None:
        for _ in range(300):
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    try:
        made.ready()
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def test_the_hub_client_gets_its_answers(replica: Process) -> None:
    client = InferenceClient(replica.url, token="secret")
    plain = client.text_generation("hello", max_new_tokens=8)
    details = client.text_generation("hello", max_new_tokens=8, details=True, adapter_id="code")
    streamed = "".join(client.text_generation("hello", max_new_tokens=8, stream=True))
    assert plain == details.generated_text
    assert details.details is not None
    assert details.details.generated_tokens <= 8
    assert plain == "hello" + streamed.removesuffix("</s>"), "the prompt comes first unless asked otherwise"


def test_a_stop_lets_a_stream_end_and_exits_in_good_order(replica: Process) -> None:
    body = {"inputs": "x", "parameters": {"max_new_tokens": 100, "ignore_eos": True}}
    token = {"authorization": "Bearer secret"}
    with httpx.stream("POST", f"{replica.url}/generate_stream", json=body, headers=token, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        replica.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert len(rest) == 99
    assert '"generated_text":"' in rest[-1]
    assert replica.process.wait(15) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{replica.url}/health")


def test_a_killed_replica_goes_on_with_its_round(tmp_path: Path) -> None:
    """As a flow has it do: whoever does not know the round is asked for it again."""
    settings = {
        "COLLM_REPLICA__SHARD": str(sample_shards()[0]),
        "COLLM_REPLICA__CHECKPOINT_S": "0.02",
        "COLLM_REPLICA__FAKE_SLICE_S": "0.005",
    }
    with httpx.Client(headers={"authorization": "Bearer secret"}, timeout=20) as flow:

        def ask(process: Process, round_id: str) -> RoundStatus:
            base = flow.get(f"{process.url}/control/status").json()["resident"][0]["uid"]
            body = RoundBody(
                round_id=round_id, adapter="code", base_uid=base, epoch=1, factor="B", tokens=6000, rows_per_step=2,
                lr=2e-3, swap_every=0, seed=1, deadline_s=60,
            )  # fmt: skip
            answer = flow.post(f"{process.url}/control/rounds", content=body.model_dump_json())
            return RoundStatus.model_validate_json(answer.raise_for_status().content)

        def after(process: Process, round_id: str, steps: int) -> RoundStatus:
            for _ in range(600):
                answer = flow.get(f"{process.url}/control/rounds/{round_id}").raise_for_status()
                status = RoundStatus.model_validate_json(answer.content)
                if status.steps >= steps or status.state != "running":
                    return status
                time.sleep(0.05)
            raise AssertionError(status)

        first = Process(tmp_path, **settings)
        first.ready()
        ask(first, "r1")
        killed = after(first, "r1", 8)
        assert killed.state == "running"
        first.process.kill()
        first.process.wait()
        second = Process(tmp_path, **settings)
        try:
            second.ready()
            assert flow.get(f"{second.url}/control/rounds/r1").status_code == 404
            resumed = ask(second, "r1")
            assert killed.steps / 2 < resumed.steps <= killed.steps + 8
            done = after(second, "r1", 10**6)
            ask(second, "r2")
            whole = after(second, "r2", 10**6)
        finally:
            second.process.kill()
            second.process.wait()
    assert (done.state, whole.state) == ("done", "done")
    assert done.sha256 == whole.sha256 is not None, "the same update as of a round that nobody disturbed"
    assert (done.steps, done.tokens, done.loss_first) == (whole.steps, whole.tokens, whole.loss_first)


def test_a_taken_port_is_named_in_one_line(replica: Process, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    second = Process(folder, COLLM_REPLICA__PORT=str(replica.port))
    assert second.process.wait(30) == 2
    (line,) = second.log.read_text().splitlines()
    assert str(replica.port) in line
    assert httpx.get(f"{replica.url}/health").status_code == 200


def test_a_budget_that_is_too_small_is_refused_with_what_it_would_take(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build().save_pretrained(model)
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(model / "tokenizer.json"))
    settings = {"COLLM_REPLICA__FAKE_ENGINE": "false", "COLLM_MODEL__PATH": str(model)}
    settings |= {"COLLM_REPLICA__MAX_TOTAL_TOKENS": "64", "COLLM_REPLICA__SHARD": str(sample_shards()[0])}
    small = Process(tmp_path, **settings, COLLM_REPLICA__MEMORY_BYTES="64MB")
    assert small.process.wait(60) == 2
    said = small.log.read_text()
    (line,) = (line for line in said.splitlines() if line.startswith("collm replica: "))
    least = re.search(r"COLLM_REPLICA__MEMORY_BYTES: 61 MiB are not enough: .* at least (\d+) MiB", line)
    assert least is not None, said
    assert "Traceback" not in said
    enough = Process(tmp_path, **settings, COLLM_REPLICA__MEMORY_BYTES=f"{least[1]}MiB")
    try:
        enough.ready()
        answer = httpx.post(
            f"{enough.url}/generate",
            json={"inputs": "?", "parameters": {"max_new_tokens": 4}},
            headers={"authorization": "Bearer secret"},
            timeout=20,
        )
        assert answer.status_code == 200
    finally:
        enough.process.kill()
        enough.process.wait()


def test_without_a_token_it_does_not_start(tmp_path: Path) -> None:
    process = Process(tmp_path, COLLM_CLUSTER_TOKEN="")
    assert process.process.wait(30) == 2
    assert "COLLM_CLUSTER_TOKEN" in process.log.read_text()
