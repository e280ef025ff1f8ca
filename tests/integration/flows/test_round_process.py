"""Rounds in processes of their own, with a real MLflow: killed, resumed, run by the worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from adapters.registry import MlflowRegistry
from adapters.weights import load_peft, version_uid
from db import adapters, rounds
from db.records import AdapterRecord, RoundRecord, RoundState
from flows.outbox import moved_aliases, project
from infra.process import Child

if TYPE_CHECKING:
    from tests.integration.flows.conftest import World

FLOW = "import asyncio, sys; from flows.rounds import federated_round; asyncio.run(federated_round(sys.argv[1]))"
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def start_flow(world: "World") -> "subprocess.Popen[bytes]":
    """A flow run as the worker's runner would start it, in a process of its own."""
    argv = [sys.executable, "-P", "-c", FLOW, world.adapter.name]
    return subprocess.Popen(argv, env=world.environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def until(reached: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[0].decode())
        assert time.monotonic() < deadline
        time.sleep(0.05)


def latest(world: "World") -> RoundRecord | None:
    with world.database.transaction() as s:
        return rounds.latest(s, world.adapter.name)


def adapter_of(world: "World") -> AdapterRecord:
    with world.database.transaction() as s:
        return adapters.get(s, world.adapter.name)


def test_a_rerun_after_a_kill_repeats_only_what_was_not_finished(mlflow_world: "World", tmp_path: Path) -> None:
    world = mlflow_world
    done, slow = world.clients["replica-0"], world.clients["replica-1"]
    slow.hang = True
    killed = start_flow(world)
    cached = tmp_path / "prefect" / "storage" / "collm-round"
    until(lambda: len(slow.asked) == 1 and any(cached.rglob("replica-0")), killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)

    first = latest(world)
    assert first is not None
    assert first.state is RoundState.TRAINING
    calls = done.calls
    slow.hang = False
    rerun = start_flow(world)
    output = rerun.communicate(timeout=60)[0].decode()
    assert rerun.returncode == 0, output

    second = latest(world)
    assert second is not None
    assert second.id == first.id, "the round was resumed, not doubled"
    assert second.state is RoundState.PROMOTED, second.reason
    assert second.flow_run_id != first.flow_run_id
    assert done.calls == calls, "a client that had finished is not asked again"
    assert len(slow.asked) == 1

    # What MLflow holds is what the fleet serves.
    registry = world.registry
    assert isinstance(registry, MlflowRegistry)
    project(world.database, lambda: registry)
    assert registry.alias(world.adapter.name, "active") == 2
    assert registry.alias(world.adapter.name, "previous") == 1
    assert registry.alias(world.adapter.name, "shadow") is None
    base = done.weights_of(world.adapter.initial_uid)
    shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
    downloaded = load_peft(registry.download(world.adapter.name, 2, tmp_path / "peft"), shapes)
    assert version_uid(world.adapter.backbone, downloaded) == second.candidate_uid

    # A person moves an alias: it is noticed, and what is in force stays.
    assert moved_aliases(world.database, registry) == {}
    registry.set_alias(world.adapter.name, "active", 1)
    assert moved_aliases(world.database, registry) == {(world.adapter.name, "active"): 1}
    assert adapter_of(world).desired_uid == second.candidate_uid


def test_flow_processes_do_not_import_torch() -> None:
    script = (
        "import sys, flows.rounds, flows.worker, flows.bootstrap; print(sorted({'torch', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_worker_runs_rounds_on_schedule_resumes_after_a_kill_and_stops_soon(
    mlflow_world: "World", tmp_path: Path
) -> None:
    world = mlflow_world
    world.settings = world.settings.model_copy(
        update={"rounds": world.settings.rounds.model_copy(update={"interval_s": 2.0})}
    )
    slow = world.clients["replica-1"]
    slow.hang = True

    def start_worker(number: int) -> Child:
        collm = Path(sys.executable).with_name("collm")
        child = Child(name="worker", argv=[collm, "worker"], log=tmp_path / f"{number}.log", environ=world.environ())
        child.start()
        return child

    one = start_worker(1)
    try:
        until(lambda: len(slow.asked) == 1)
        begun = latest(world)
        assert one.pid is not None
        os.killpg(one.pid, signal.SIGKILL)  # the worker, and the round that it runs
        one.stop()
    finally:
        one.stop()
    slow.hang = False
    two = start_worker(2)
    try:
        until(lambda: adapter_of(world).epoch == 2)
        promoted = latest(world)
        assert begun is not None
        assert promoted is not None
        with world.database.transaction() as s:
            assert rounds.of_adapter(s, world.adapter.name)[0].id == begun.id
            assert rounds.get(s, begun.id).state is RoundState.PROMOTED
        registry = world.registry
        until(lambda: registry.alias(world.adapter.name, "active") == 2)
        began_s = time.monotonic()
        two.stop()
        assert time.monotonic() - began_s < 12
        assert two.exit_code == 0, two.last_lines(20)
    finally:
        two.stop()
