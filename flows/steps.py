"""The round's work as Prefect tasks: what its UI shows, and what a rerun need not repeat. Thin."""

from collections.abc import Mapping

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext

from db.records import AdapterRecord, ClientId, QualityRecord, RoundRecord, VersionRecord
from flows import clients, combine, evaluate
from flows.pace import Pace
from flows.site import Site
from infra.errors import CollmError


def client_key(context: TaskRunContext, parameters: Mapping[str, object]) -> str:
    """Return what names a client's part of a round, whichever flow run works on it."""
    current, client = parameters["current"], parameters["client"]
    assert isinstance(current, RoundRecord)
    return f"collm-round/{current.id}/{client}"


@task(
    name="train-client",
    task_run_name="train {client}",
    cache_key_fn=client_key,
    persist_result=True,
    result_serializer="json",
)
async def train_client(
    site: Site, pace: Pace, current: RoundRecord, client: ClientId, seen: clients.OnProgress
) -> dict[str, str | int | float]:
    """Have one client train; its result is a reference, not tensors, and once made it is not asked for again."""
    update = await clients.train(site, pace, current, client, seen)
    return {"store_key": update.store_key, "sha256": update.sha256, "tokens": update.tokens, "seconds": update.seconds}


async def may_pass(task: object, run: object, state: State[object]) -> bool:
    """Whether trying again can help: MLflow or the store is away, rather than the updates being bad."""
    error = await state.aresult(raise_on_failure=False)
    return not isinstance(error, CollmError) or error.retryable


@task(
    name="register-candidate",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_condition_fn=may_pass,
)
async def register_candidate(site: Site, adapter: AdapterRecord, current: RoundRecord) -> tuple[VersionRecord, float]:
    """Check the updates, aggregate, store, register; return the candidate and its aggregation error."""
    combined = await combine.combine(site, adapter, current)
    return await combine.register(site, adapter, current, combined), combined.aggregate.error


@task(name="score-client", task_run_name="score version {candidate.number} on {client}", cache_policy=NO_CACHE)
async def score_client(
    site: Site, pace: Pace, client: ClientId, base: VersionRecord, candidate: VersionRecord
) -> tuple[QualityRecord, QualityRecord]:
    """Score base and candidate on one client's gate rows; the base has mostly been scored before."""
    before = await evaluate.score(site, pace, client, base)
    return before, await evaluate.score(site, pace, client, candidate)
