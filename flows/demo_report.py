"""From what the demo's run recorded to its report."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from db.records import RoundRecord, RoundState, Split, UpdateRecord
from flows.demo_record import Played, Record
from serving.datasets import trace_path
from serving.load.figures import percentile, window_figures
from serving.load.report import checks, ratio_part, request_row, serve_part, swap_part, window_part
from serving.load.schema import (
    AdapterPart,
    CePart,
    ClientCe,
    Decision,
    EvalClient,
    EvalPart,
    LevelPart,
    ModelPart,
    Report,
    RequestRow,
    RoundPart,
    ScalePart,
    SloPart,
    SwapRow,
    TimelinePart,
    UpdatePart,
    VersionCe,
    VersionPart,
    WindowPart,
)
from serving.model import Slo
from serving.rows import render_prompt, set_sha256
from serving.slo import within


def make_report(record: Record) -> Report:
    """Return the report of a run; times count from the first window's start."""
    begun_s = record.played[0].begun_s
    slo = Slo(ttft_s=record.settings.slo.ttft_s, tpot_s=record.settings.slo.tpot_s)
    windows = [window(record, played, slo, begun_s) for played in record.played]
    ratios, ce = ratio_part(windows), ce_part(record)
    rounds = [round_part(record, one, updates, begun_s) for one, updates in record.rounds]
    rows = swap_rows(record, begun_s)
    return Report(
        windows=windows,
        ratio=ratios,
        ce=ce,
        rounds=rounds,
        versions=version_parts(record),
        swaps=swap_part(rows, set_up=sum(swap.by_demo for swap in record.swaps)),
        update_to_serve_ms=serve_part(rows),
        slo=SloPart(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
        scale=scale_part(record),
        model=model_part(record),
        adapter=AdapterPart(
            name=record.adapter.name,
            mlflow_model=f"collm.{record.adapter.name}",
            rank=record.adapter.spec.rank,
            alpha=record.adapter.spec.alpha,
            targets=list(record.adapter.spec.targets),
        ),
        eval_set=eval_part(record),
        timeline=TimelinePart(
            samples=[
                sample.model_copy(update={"at_s": round(sample.at_s - begun_s, 2)})
                for sample in record.samples
                if sample.at_s >= begun_s - 1
            ],
            requests=[row for played in record.played for row in request_rows(record, played, slo, begun_s)],
        ),
        checks=checks(windows, ratios, ce, rounds),
        addresses=dict(record.addresses),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(record.seconds, 1),
        command=record.command,
        machine=f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )


def window(record: Record, played: Played, slo: Slo, begun_s: float) -> WindowPart:
    """Return one window's part."""
    ce = {uid: measured.pooled for uid, measured in record.quality.items()}
    return window_part(
        window_figures(played.outcomes, seconds=played.seconds, slo=slo, ce_by_uid=ce),
        name=played.name,
        kind=played.kind,
        start_s=round(played.begun_s - begun_s, 2),
        train_tokens=played.train_tokens,
        train_tokens_while_decoding=played.train_tokens_while_decoding,
        label_of={uid: version.label for uid, version in record.served.items()},
    )


def request_rows(record: Record, played: Played, slo: Slo, begun_s: float) -> list[RequestRow]:
    """Return a window's arrivals for the timeline."""
    rows: list[RequestRow] = []
    for outcome in played.outcomes:
        timing = outcome.timing
        measured = record.quality.get(outcome.uid or "")
        row = request_row(
            outcome,
            window=played.name,
            start_s=played.begun_s - begun_s,
            good=timing is not None and within(timing, slo),
            label=outcome.label,
            ce=None if measured is None else round(measured.pooled, 5),
        )
        rows.append(row)
    return rows


def ce_part(record: Record) -> CePart:
    """Return cross-entropy at both ends and of every federated version that was measured."""
    assert record.newest is not None
    start, end = record.quality[record.adapter.initial_uid], record.quality[record.newest.uid]
    at_start, at_end = start.ce, end.ce
    return CePart(
        start=start.pooled,
        end=end.pooled,
        by_client={client: ClientCe(start=at_start[client], end=at_end[client]) for client in sorted(at_start)},
        start_uid=record.adapter.initial_uid,
        end_uid=record.newest.uid,
        end_number=record.newest.number,
        tokens_by_client=dict(sorted(start.tokens.items())),
        federated=[
            VersionCe(number=version.number, uid=version.uid, pooled=measured.pooled, by_client=dict(measured.ce))
            for version in record.versions
            if (measured := record.quality.get(version.uid)) is not None
        ],
    )


def round_part(record: Record, one: RoundRecord, updates: Sequence[UpdateRecord], begun_s: float) -> RoundPart:
    """Return a round's part; one that did not end within the run counts as aborted."""
    numbers = {str(version.uid): str(version.number) for version in record.versions}
    decision, reason = decided(one)
    end_s = one.decided_s if one.decided_s is not None else begun_s + record.seconds
    served = one.served_s is not None and one.decided_s is not None
    return RoundPart(
        id=one.id,
        number=one.number,
        factor=one.plan.factor.value,
        decision=decision,
        reason=reason,
        seconds=round(end_s - one.started_s, 2),
        clients=list(one.clients),
        aggregation_error=one.aggregation_error,
        ce_before=one.ce_before,
        ce_after=one.ce_after,
        base=numbers.get(one.base_uid, one.base_uid[:12]),
        candidate=None if one.candidate_uid is None else numbers.get(one.candidate_uid, one.candidate_uid[:12]),
        start_s=round(one.started_s - begun_s, 2),
        decided_s=None if one.decided_s is None else round(one.decided_s - begun_s, 2),
        served_s=None if one.served_s is None else round(one.served_s - begun_s, 2),
        serve_delay_ms=round(1e3 * ((one.served_s or 0) - (one.decided_s or 0)), 1) if served else None,
        updates=[
            UpdatePart(
                client=update.client_id,
                tokens=update.tokens,
                steps=update.steps,
                loss_first=update.loss_first,
                loss_last=update.loss_last,
                seconds=round(update.seconds, 2),
                accepted=update.accepted,
                reason=update.reason,
            )
            for update in updates
        ],
    )


def decided(one: RoundRecord) -> tuple[Decision, str]:
    """Return a round's decision and its reason."""
    if one.state is RoundState.PROMOTED:
        return "promoted", one.reason
    if one.state is RoundState.REJECTED:
        return "rejected", one.reason
    if one.state is RoundState.ABORTED:
        return "aborted", one.reason
    return "aborted", f"still {one.state.value} when the run ended"


def version_parts(record: Record) -> list[VersionPart]:
    """Return every federated version, and every local one that answered."""
    answers: dict[str, int] = {}
    made_at: dict[str, str] = {swap.uid: swap.replica for swap in record.swaps if swap.kind == "local"}
    for played in record.played:
        for outcome in played.outcomes:
            if outcome.timing is not None and outcome.uid:
                answers[outcome.uid] = answers.get(outcome.uid, 0) + 1
    numbers = {str(version.uid): str(version.number) for version in record.versions}
    parts = [
        version_part(
            record,
            uid=version.uid,
            label=str(version.number),
            state=version.state.value,
            parent=numbers.get(version.parent_uid or ""),
            replica=None,
            answers=answers.get(version.uid, 0),
        )
        for version in record.versions
    ]
    for uid, served in record.served.items():
        if uid in answers and not served.federated:
            head, _, _ = served.label.rpartition(":")[2].partition("+")
            parts.append(
                version_part(
                    record,
                    uid=uid,
                    label=served.label.rpartition(":")[2],
                    state="local",
                    parent=head,
                    replica=made_at.get(uid, "?"),
                    answers=answers[uid],
                )
            )
    return parts


def version_part(
    record: Record, *, uid: str, label: str, state: str, parent: str | None, replica: str | None, answers: int
) -> VersionPart:
    """Return one version's part."""
    measured = record.quality.get(uid)
    return VersionPart(
        label=label,
        uid=uid,
        kind="federated" if replica is None else "local",
        state=state,
        parent=parent,
        replica=replica,
        answers=answers,
        ce=None if measured is None else measured.pooled,
        q=None if measured is None else 1 / measured.pooled,
        ce_by_client={} if measured is None else dict(measured.ce),
        ce_rows=0 if measured is None else measured.rows,
    )


def swap_rows(record: Record, begun_s: float) -> list[SwapRow]:
    """Return the swaps that the demo did not ask for itself."""
    kinds = {"local": "local", "federated": "federated"}
    return [
        SwapRow.model_validate(
            {
                "at_s": round(swap.at_s - begun_s, 2),
                "replica": swap.replica,
                "label": swap.label,
                "kind": kinds.get(swap.kind, "rollback"),
                "pause_ms": swap.pause_ms,
                "delay_ms": swap.delay_ms,
            }
        )
        for swap in sorted(record.swaps, key=lambda swap: swap.at_s)
        if not swap.by_demo and swap.at_s >= begun_s
    ]


def scale_part(record: Record) -> ScalePart:
    """Return every factor between the trace and the load."""
    cut, capacity = record.window, record.capacity
    prompts = sorted(float(call.prompt_tokens) for call in record.calls)
    new_tokens = [call.new_tokens for call in record.calls]
    return ScalePart(
        trace=trace_path().name,
        trace_start_s=cut.start_s,
        trace_seconds=cut.trace_seconds,
        window_s=cut.seconds,
        time_scale=cut.time_scale,
        context_scale=record.lengths.context,
        generated_scale=record.lengths.generated,
        max_context_tokens=record.lengths.max_context_tokens,
        min_new_tokens=record.lengths.min_new_tokens,
        max_new_tokens=record.lengths.max_new_tokens,
        arrivals=len(cut.arrivals),
        offered_rps=cut.rate,
        capacity_rps=capacity.rate,
        load=cut.rate / capacity.rate,
        dispersion=cut.dispersion,
        prompt_tokens_mean=sum(prompts) / len(prompts),
        prompt_tokens_p95=percentile(prompts, 0.95) or 0.0,
        new_tokens_mean=sum(new_tokens) / len(new_tokens),
        levels=[
            LevelPart(in_flight=level.concurrency, rps=level.rate, attainment=level.attainment)
            for level in capacity.levels
        ],
    )


def model_part(record: Record) -> ModelPart:
    """Return the backbone's part."""
    model = record.settings.model
    return ModelPart(
        name=model.name,
        path=str(record.model_dir),
        sha256=record.backbone,
        dtype=record.dtype,
        threads=model.threads,
        replicas=record.settings.replicas,
    )


def eval_part(record: Record) -> EvalPart:
    """Return the rows that cross-entropy is measured on."""
    ordered = [row for _, client in sorted(record.clients.items()) for row in client.splits[Split.REPORT]]
    return EvalPart(
        name="report rows of " + " and ".join(client.shard.name for _, client in sorted(record.clients.items())),
        sha256=set_sha256(ordered),
        rows=len(ordered),
        by_client={
            name: EvalClient(
                shard=str(client.shard),
                shard_rows=client.rows,
                sha256=client.sha256(Split.REPORT),
                rows=len(client.splits[Split.REPORT]),
                gate_rows=len(client.splits[Split.GATE]),
            )
            for name, client in sorted(record.clients.items())
        },
        prompt=render_prompt("{prompt}"),
        row_tokens=record.settings.replica.row_tokens,
    )
