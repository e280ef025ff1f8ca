"""The queries on a real Postgres: what is idempotent, what is fenced, what is heard."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from db import adapters, control, replicas, rounds
from db.records import (
    ADAPTERS_CHANNEL,
    DECISIONS_CHANNEL,
    AdapterName,
    AdapterRecord,
    Arrivals,
    ClientId,
    Epoch,
    Factor,
    Heartbeat,
    LoraSpec,
    Publishing,
    QualityRecord,
    ReplicaId,
    ReplicaRecord,
    RoundId,
    RoundPlan,
    RoundRecord,
    RoundState,
    Split,
    UpdateRecord,
    VersionRecord,
    VersionState,
    VersionUid,
)
from db.session import Database, Notification, OperationalError
from infra.errors import RoundError, UnknownAdapter, UnknownVersion, VersionConflict

CODE = AdapterName("code")


def _uid(number: int) -> VersionUid:
    return VersionUid(f"uid-{number}")


def _version(number: int, *, parent: int | None = None) -> VersionRecord:
    return VersionRecord(
        uid=_uid(number),
        adapter=CODE,
        number=number,
        parent_uid=None if parent is None else _uid(parent),
        round_id=None,
        state=VersionState.PROMOTED if number == 1 else VersionState.CANDIDATE,
        store_key=f"versions/{number}",
        mlflow_model_id=None,
        created_s=float(number),
    )


ADAPTER = AdapterRecord(
    name=CODE,
    backbone="b" * 64,
    spec=LoraSpec(rank=8, alpha=16.0, targets=("down_proj", "q_proj")),
    initial_uid=_uid(1),
    desired_uid=_uid(1),
    previous_uid=None,
    epoch=Epoch(0),
    training=True,
    publishing=Publishing.GUARDED,
)
ROUND = RoundRecord(
    id=RoundId("code-1"),
    adapter=CODE,
    number=1,
    state=RoundState.PLANNED,
    base_uid=_uid(1),
    base_epoch=Epoch(0),
    plan=RoundPlan(
        factor=Factor.B,
        tokens=2048,
        rows_per_step=4,
        lr=2e-3,
        swap_every=8,
        deadline_s=60.0,
        min_clients=1,
        seed=7,
    ),
    clients=(ClientId("replica-0"), ClientId("replica-1")),
    candidate_uid=None,
    aggregation_error=None,
    ce_before=None,
    ce_after=None,
    reason="",
    started_s=1.0,
    decided_s=None,
    served_s=None,
    flow_run_id=None,
)
UPDATE = UpdateRecord(
    round_id=ROUND.id,
    client_id=ClientId("replica-0"),
    base_uid=_uid(1),
    factor=Factor.B,
    sha256="1" * 64,
    store_key="updates/1",
    tokens=2050,
    steps=9,
    loss_first=1.2,
    loss_last=1.0,
    seconds=12.5,
    accepted=None,
)
BEAT = Heartbeat(
    replica_id=ReplicaId("replica-0"),
    at_s=100.0,
    ready=True,
    queued=1,
    running=2,
    queue_age_s=0.25,
    ttft_p95_s=0.5,
    tpot_p95_s=0.1,
    finished=5,
    violations=1,
    requests_total=17,
    tokens_per_s=90.5,
    train_tokens_total=4_000_000_000,
    train_tokens_decoding_total=1000,
    train_share=0.25,
    round_id=None,
    active={"code": "1+8"},
    active_uids={"code": "x"},
    resident=("code:1", "code:1+8"),
    swaps_total=3,
    kv_used=0.125,
)


@pytest.fixture
def code(database: Database) -> Database:
    """A database with the adapter ``code`` at version 1 and two candidates made from it."""
    with database.transaction() as s:
        adapters.create(s, ADAPTER, _version(1))
        adapters.add_version(s, _version(2, parent=1))
        adapters.add_version(s, _version(3, parent=2))
    return database


def _promote(s: Session, number: int, epoch: int) -> AdapterRecord:
    return adapters.promote(
        s, CODE, _uid(number), expected_epoch=Epoch(epoch), actor="gate", reason="better", now_s=9.0
    )


def _roll_back(s: Session, epoch: int) -> AdapterRecord:
    return adapters.roll_back(s, CODE, expected_epoch=Epoch(epoch), actor="ops", reason="worse", now_s=9.0)


def _fail_after_promoting(database: Database, number: int) -> None:
    with database.transaction() as s:
        _promote(s, number, epoch=0)
        raise ZeroDivisionError


def _pending(database: Database) -> list[tuple[str, int | None]]:
    with database.transaction() as s:
        return [(row.alias, row.number) for row in adapters.pending_outbox(s, 100)]


def _race(calls: list[Callable[[], object]]) -> list[object]:
    """Run all at once; a conflict counts as a result."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait()
        try:
            return call()
        except VersionConflict as e:
            return e

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


# Adapters


def test_create_is_idempotent_and_names_what_differs(code: Database) -> None:
    with code.transaction() as s:
        adapters.create(s, ADAPTER, _version(1))
        assert adapters.get(s, CODE) == ADAPTER
        assert adapters.every(s) == [ADAPTER]
        assert [v.number for v in adapters.versions(s, CODE)] == [1, 2, 3]
        with pytest.raises(VersionConflict):
            adapters.create(s, replace(ADAPTER, spec=replace(ADAPTER.spec, rank=4)), _version(1))
        with pytest.raises(UnknownAdapter):
            adapters.get(s, AdapterName("other"))
        with pytest.raises(UnknownVersion):
            adapters.version(s, _uid(99))


def test_add_version_twice_changes_nothing_but_a_clash_is_refused(code: Database) -> None:
    before = _pending(code)
    with code.transaction() as s:
        adapters.add_version(s, _version(2, parent=1))
        with pytest.raises(VersionConflict):
            adapters.add_version(s, replace(_version(2, parent=1), uid=_uid(22)))
    assert _pending(code) == before == [("active", 1), ("shadow", 2), ("shadow", 3)]


def test_promote_moves_the_version_in_force_and_asks_for_the_aliases(code: Database) -> None:
    with code.transaction() as s:
        promoted = _promote(s, 2, epoch=0)
        assert (promoted.desired_uid, promoted.previous_uid, promoted.epoch) == (_uid(2), _uid(1), 1)
    with code.transaction() as s:
        assert adapters.get(s, CODE) == promoted
        assert adapters.version(s, _uid(2)).state is VersionState.PROMOTED
        latest = adapters.audit(s, 1)[0]
        assert (latest.actor, latest.action, latest.detail["from"]) == ("gate", "promote", _uid(1))
        row = adapters.pending_outbox(s, 100)[4]
        assert (row.tagged, row.tags["decision"]) == (2, "promoted")
    assert _pending(code)[3:] == [("previous", 1), ("active", 2), ("shadow", None)]


def test_promote_again_is_harmless_and_a_stale_one_changes_nothing(code: Database) -> None:
    with code.transaction() as s:
        first = _promote(s, 2, epoch=0)
    pending = _pending(code)
    with code.transaction() as s:
        assert _promote(s, 2, epoch=0) == first
    with pytest.raises(VersionConflict), code.transaction() as s:
        _promote(s, 3, epoch=0)
    assert _pending(code) == pending
    with code.transaction() as s:
        assert adapters.get(s, CODE) == first
        assert adapters.version(s, _uid(3)).state is VersionState.CANDIDATE


def test_of_concurrent_promotions_exactly_one_wins(code: Database) -> None:
    def attempt(number: int) -> AdapterRecord:
        with code.transaction() as s:
            return _promote(s, number, epoch=0)

    results = _race([lambda: attempt(2), lambda: attempt(3)])
    winners = [r for r in results if isinstance(r, AdapterRecord)]
    assert len(winners) == 1
    with code.transaction() as s:
        assert adapters.get(s, CODE) == winners[0]
        assert winners[0].epoch == 1


def test_nothing_of_a_promotion_stays_if_its_transaction_fails(code: Database) -> None:
    pending = _pending(code)
    with pytest.raises(ZeroDivisionError):
        _fail_after_promoting(code, 2)
    with code.transaction() as s:
        assert adapters.get(s, CODE) == ADAPTER
    assert _pending(code) == pending


def test_roll_back_returns_step_by_step(code: Database) -> None:
    with code.transaction() as s:
        _promote(s, 2, epoch=0)
        _promote(s, 3, epoch=1)
    with code.transaction() as s:
        back = _roll_back(s, epoch=2)
        assert (back.desired_uid, back.previous_uid, back.epoch) == (_uid(2), _uid(1), 3)
        assert adapters.version(s, _uid(3)).state is VersionState.REJECTED
        with pytest.raises(VersionConflict):
            _roll_back(s, epoch=2)
        assert _roll_back(s, epoch=3).desired_uid == _uid(1)
        with pytest.raises(UnknownVersion):
            _roll_back(s, epoch=4)
    assert _pending(code)[-4:] == [("active", 2), ("previous", 1), ("active", 1), ("previous", None)]


def test_reject_drops_the_shadow_and_only_of_a_candidate(code: Database) -> None:
    with code.transaction() as s:
        adapters.reject(s, _uid(2), reason="worse", actor="gate", now_s=5.0)
        adapters.reject(s, _uid(2), reason="worse", actor="gate", now_s=6.0)
        assert adapters.version(s, _uid(2)).state is VersionState.REJECTED
        with pytest.raises(VersionConflict):
            adapters.reject(s, _uid(1), reason="worse", actor="gate", now_s=5.0)
        row = adapters.pending_outbox(s, 100)[-1]
        assert (row.tagged, row.tags["decision"]) == (2, "rejected")
    assert _pending(code)[3:] == [("shadow", None)]


def test_projection_is_in_order_and_remembers_the_last(code: Database) -> None:
    with code.transaction() as s:
        assert adapters.last_projected(s, CODE, adapters.SHADOW) is None
        _promote(s, 2, epoch=0)
    seen = []
    while True:
        with code.transaction() as s:
            batch = adapters.pending_outbox(s, 2)
            for row in batch:
                adapters.outbox_done(s, row.id)
        if not batch:
            break
        seen += [(row.alias, row.number) for row in batch]
    assert seen == [("active", 1), ("shadow", 2), ("shadow", 3), ("previous", 1), ("active", 2), ("shadow", None)]
    with code.transaction() as s:
        assert adapters.last_projected(s, CODE, adapters.ACTIVE) == 2
        assert adapters.last_projected(s, CODE, adapters.PREVIOUS) == 1
        assert adapters.last_projected(s, CODE, adapters.SHADOW) is None


def test_set_mode_keeps_the_epoch(code: Database) -> None:
    with code.transaction() as s:
        adapters.set_mode(s, CODE, training=False, publishing=Publishing.OFF, actor="demo", now_s=3.0)
    with code.transaction() as s:
        assert adapters.get(s, CODE) == replace(ADAPTER, training=False, publishing=Publishing.OFF)


def test_the_time_that_training_was_paused(code: Database) -> None:
    def paused(s: Session, from_s: float, to_s: float) -> float:
        return adapters.paused_s(s, CODE, from_s=from_s, to_s=to_s)

    with code.transaction() as s:
        assert paused(s, 0, 100) == 0
        for now_s, training in ((10.0, False), (20.0, False), (30.0, True), (90.0, False)):
            adapters.set_mode(s, CODE, training=training, publishing=Publishing.OFF, actor="me", now_s=now_s)
        assert paused(s, 0, 50) == 20
        assert paused(s, 25, 100) == 15
        assert paused(s, 40, 80) == 0


def test_a_rejected_version_is_not_promoted(code: Database) -> None:
    with code.transaction() as s:
        adapters.reject(s, _uid(2), reason="worse", actor="gate", now_s=5.0)
        with pytest.raises(VersionConflict, match=r"version 2 .* was rejected"):
            _promote(s, 2, epoch=0)


def test_only_what_no_way_leads_back_to_may_leave_the_store(code: Database) -> None:
    with code.transaction() as s:
        adapters.reject(s, _uid(2), reason="worse", actor="gate", now_s=5.0)
        assert adapters.rejected_keys(s, before_s=2.0) == set()
        assert adapters.rejected_keys(s, before_s=2.5) == {"versions/2"}
        _promote(s, 3, epoch=0)
        _roll_back(s, epoch=1)
        assert adapters.rejected_keys(s, before_s=9.0) == {"versions/2", "versions/3"}
        adapters.add_version(s, replace(_version(4), store_key="versions/2"))
        assert adapters.rejected_keys(s, before_s=9.0) == {"versions/3"}


def test_the_outbox_forgets_all_but_each_alias_s_last(code: Database) -> None:
    with code.transaction() as s:
        _promote(s, 2, epoch=0)
        for row in adapters.pending_outbox(s, 100)[:-1]:
            adapters.outbox_done(s, row.id)
    with code.transaction() as s:
        assert adapters.trim_outbox(s, before_s=2.5) == 2  # active 1, shadow 2
        assert adapters.trim_outbox(s, before_s=100.0) == 0
        assert adapters.last_projected(s, CODE, adapters.ACTIVE) == 2
        assert adapters.last_projected(s, CODE, adapters.SHADOW) == 3
    assert _pending(code) == [("shadow", None)]


# Rounds


def test_decided_rounds_are_counted_from_the_one_that_left_the_initial_version(code: Database) -> None:
    states = [
        RoundState.REJECTED,
        RoundState.ABORTED,
        RoundState.PROMOTED,
        RoundState.REJECTED,
        RoundState.ABORTED,
        RoundState.PROMOTED,
    ]
    seen = []
    base = _uid(1)
    for number, state in enumerate(states, start=1):
        opened = replace(ROUND, id=RoundId(f"code-{number}"), number=number, base_uid=base, state=state)
        with code.transaction() as s:
            rounds.open_round(s, opened)
            seen.append(rounds.decided_since_left(s, CODE, _uid(1)))
        if state is RoundState.PROMOTED:
            base = _uid(2)
    assert seen == [1, 1, 1, 2, 2, 3]
    with code.transaction() as s:
        assert [r.number for r in rounds.of_adapter(s, CODE, latest=2)] == [5, 6]
        assert [v.number for v in adapters.versions(s, CODE, latest=2)] == [2, 3]


def test_a_round_opens_once_and_alone(code: Database) -> None:
    with code.transaction() as s:
        assert rounds.latest(s, CODE) is None
        assert rounds.open_round(s, ROUND) == ROUND
    with code.transaction() as s:
        assert rounds.advance(s, ROUND.id, expected=RoundState.PLANNED, to=RoundState.TRAINING)
    with code.transaction() as s:
        assert rounds.open_round(s, ROUND).state is RoundState.TRAINING
        with pytest.raises(VersionConflict):
            rounds.open_round(s, replace(ROUND, id=RoundId("code-2"), number=2))
        assert rounds.advance(s, ROUND.id, expected=RoundState.TRAINING, to=RoundState.ABORTED, reason="late")
        second = rounds.open_round(s, replace(ROUND, id=RoundId("code-2"), number=2))
        assert rounds.latest(s, CODE) == second
        assert [r.number for r in rounds.of_adapter(s, CODE)] == [1, 2]
        with pytest.raises(RoundError):
            rounds.get(s, RoundId("code-3"))


def test_of_concurrent_rounds_exactly_one_opens(code: Database) -> None:
    def attempt(number: int) -> RoundRecord:
        with code.transaction() as s:
            return rounds.open_round(s, replace(ROUND, id=RoundId(f"code-{number}"), number=number))

    results = _race([lambda: attempt(1), lambda: attempt(2), lambda: attempt(3)])
    assert sum(isinstance(r, RoundRecord) for r in results) == 1


def test_advance_is_guarded_by_the_state(code: Database) -> None:
    with code.transaction() as s:
        rounds.open_round(s, ROUND)
        assert not rounds.advance(s, ROUND.id, expected=RoundState.TRAINING, to=RoundState.AGGREGATING)
        assert rounds.advance(
            s, ROUND.id, expected=RoundState.PLANNED, to=RoundState.PLANNED, candidate_uid=_uid(2), ce_before=1.5
        )
        assert rounds.get(s, ROUND.id) == replace(ROUND, candidate_uid=_uid(2), ce_before=1.5)


def test_an_update_counts_once(code: Database) -> None:
    other = replace(UPDATE, client_id=ClientId("a-first"))
    with code.transaction() as s:
        rounds.open_round(s, ROUND)
        rounds.add_update(s, UPDATE)
        rounds.add_update(s, UPDATE)
        rounds.add_update(s, other)
        with pytest.raises(VersionConflict):
            rounds.add_update(s, replace(UPDATE, sha256="2" * 64))
        rounds.judge_update(s, ROUND.id, UPDATE.client_id, False, "not finite")
        judged = replace(UPDATE, accepted=False, reason="not finite")
        assert rounds.updates(s, ROUND.id) == [other, judged]


def test_quality_is_kept_by_version_and_rows(code: Database) -> None:
    record = QualityRecord(
        uid=_uid(1),
        client_id=ClientId("replica-0"),
        split=Split.GATE,
        set_sha256="s" * 64,
        nll_by_row=(1.5, 0.1 + 0.2),
        tokens_by_row=(3, 4),
        at_s=5.0,
    )
    with code.transaction() as s:
        rounds.add_quality(s, record)
        rounds.add_quality(s, replace(record, at_s=6.0))
        assert rounds.quality(s, _uid(1), record.client_id, Split.GATE, "s" * 64) == record
        assert rounds.quality(s, _uid(1), record.client_id, Split.REPORT, "s" * 64) is None
        assert rounds.qualities(s, _uid(1)) == [record]


# Replicas and control


def test_a_replica_lives_by_its_heartbeat(database: Database) -> None:
    replica = ReplicaRecord(id=BEAT.replica_id, url="http://x", backbone="b", has_shard=True, started_s=1.0)
    silent = replace(replica, id=ReplicaId("replica-1"))
    with database.transaction() as s:
        replicas.announce(s, replica)
        replicas.announce(s, silent)
        replicas.announce(s, replace(replica, url="http://y"))
        replicas.heartbeat(s, replace(BEAT, queued=9))
        replicas.heartbeat(s, BEAT)
    moved = replace(replica, url="http://y")
    with database.transaction() as s:
        assert replicas.live(s, now_s=104.0, dead_after_s=5.0) == [(moved, BEAT)]
        assert replicas.live(s, now_s=106.0, dead_after_s=5.0) == []
        assert replicas.every(s) == [(moved, BEAT), (silent, None)]
        replicas.retire(s, silent.id)
        replicas.retire(s, replica.id, started_s=0.5)
        assert replicas.every(s) == [(moved, BEAT)]
        replicas.retire(s, replica.id, started_s=1.0)
        assert replicas.every(s) == []


def test_an_earlier_leader_is_fenced_off(database: Database) -> None:
    def decide(s: Session, epoch: int) -> object:
        weights = {ReplicaId("replica-0"): 0.25, ReplicaId("replica-1"): 0.75}
        return control.write_decision(
            s, leader_epoch=epoch, at_s=2.0, weights=weights, train_shares=weights, reason="steady"
        )

    with database.transaction() as s:
        assert control.latest_decision(s) is None
        assert decide(s, 1) is None
        first = control.take_leadership(s, "a")
        decision = decide(s, first)
        assert decision is not None
    with database.transaction() as s:
        assert control.take_leadership(s, "b") == first + 1
        assert decide(s, first) is None
        assert control.latest_decision(s) == decision


def test_arrivals_add_up_by_slot(database: Database) -> None:
    one = Arrivals(slot_s=5.0, gateway_id="g", replica_id=None, adapter=CODE, requests=2, failures=1)
    two = replace(one, slot_s=6.0, replica_id=ReplicaId("replica-0"), failures=0)
    with database.transaction() as s:
        control.add_arrivals(s, [])
        control.add_arrivals(s, [two, one])
        control.add_arrivals(s, [one, one])
        total = replace(one, requests=6, failures=3)
        assert control.arrivals_since(s, 5.0) == [total, two]
        assert control.arrivals_since(s, 5.5) == [two]
        assert control.forget(s, before_s=6.0) == 1
        assert control.arrivals_since(s, 0.0) == [two]


def test_the_decision_in_force_is_never_forgotten(database: Database) -> None:
    with database.transaction() as s:
        epoch = control.take_leadership(s, "a")
        for at_s in (1.0, 2.0):
            control.write_decision(s, leader_epoch=epoch, at_s=at_s, weights={}, train_shares={}, reason="")
        assert control.forget(s, before_s=9.0) == 1
        decision = control.latest_decision(s)
        assert decision is not None
        assert decision.at_s == 2.0


# Listening


@pytest.fixture
def heard(code: Database) -> Iterator[Iterator[Notification | None]]:
    """Notifications of both channels, from the moment LISTEN is in force."""
    stop = threading.Event()
    notifications = code.listen(ADAPTERS_CHANNEL, DECISIONS_CHANNEL, stop=stop, poll_s=5.0)
    assert next(notifications) is None
    yield notifications
    stop.set()


def test_a_change_is_heard_when_it_commits(code: Database, heard: Iterator[Notification | None]) -> None:
    with pytest.raises(ZeroDivisionError):
        _fail_after_promoting(code, 3)
    with code.transaction() as s:
        _promote(s, 2, epoch=0)
    assert next(heard) == Notification(channel=ADAPTERS_CHANNEL, payload="code")
    with code.transaction() as s:
        assert adapters.get(s, CODE).desired_uid == _uid(2)
        decision = control.write_decision(
            s, leader_epoch=control.take_leadership(s, "a"), at_s=1.0, weights={}, train_shares={}, reason=""
        )
        assert decision is not None
    assert next(heard) == Notification(channel=DECISIONS_CHANNEL, payload=str(decision.id))


def test_silence_is_reported_and_a_stop_ends_it(database: Database) -> None:
    stop = threading.Event()
    heard = database.listen(ADAPTERS_CHANNEL, stop=stop, poll_s=0.01)
    assert [next(heard), next(heard)] == [None, None]
    stop.set()
    assert list(heard) == []


def test_a_lost_server_is_one_exception(code: Database, heard: Iterator[Notification | None]) -> None:
    with code.transaction() as s:
        s.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"))
    with pytest.raises(OperationalError):
        next(heard)
    with code.transaction() as s:
        assert adapters.get(s, CODE) == ADAPTER
    gone = Database("postgresql+psycopg://postgres@127.0.0.1:1/collm", timeout_s=2.0)
    with pytest.raises(OperationalError), gone.transaction() as s:
        adapters.every(s)
    with pytest.raises(OperationalError):
        next(gone.listen(ADAPTERS_CHANNEL, stop=threading.Event(), poll_s=1.0))


def test_a_slow_statement_and_a_full_pool_are_that_exception_too(database_url: str) -> None:
    small = Database(database_url, pool_size=1, timeout_s=0.2)
    try:
        with pytest.raises(OperationalError), small.transaction() as s:
            s.execute(text("SELECT pg_sleep(5)"))
        with small.transaction() as holder:
            holder.execute(text("SELECT 1"))
            with pytest.raises(OperationalError), small.transaction() as s:
                s.execute(text("SELECT 1"))
    finally:
        small.close()
