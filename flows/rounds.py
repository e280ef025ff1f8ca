"""The federated round: plan, train, aggregate, evaluate, promote or reject.

The round's row in Postgres is the truth, and each state's work can be repeated: a run that finds an unfinished
round goes on with it, whatever became of the run before. One process at a time works on an adapter's rounds.
"""

from dataclasses import dataclass
from typing import Annotated, assert_never

import structlog
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from db import adapters
from db.records import AdapterName, AdapterRecord, RoundId, RoundRecord, RoundState
from flows import stages
from flows.decision import GateDecision
from flows.journal import Journal, PrefectJournal
from flows.moves import abort, begin, move, release
from flows.pace import Paused, watched
from flows.plan import Sizer, fixed_size, size_of
from flows.round_state import is_final
from flows.site import Site, open_site
from infra import log as logging
from infra.errors import CollmError, NotEnoughClients, RoundTaken, VersionConflict
from infra.settings import load_settings

log = structlog.get_logger()
Tokens = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run did."""

    round: RoundRecord | None
    """As it now stands; None: there was nothing to do."""
    note: str


@flow(name="federated-round", flow_run_name="{adapter}")
async def federated_round(
    adapter: str, round_id: str | None = None, tokens: Tokens | None = None
) -> State[dict[str, str]]:
    """Carry out the adapter's next round, or go on with the unfinished one; ``round_id`` names a certain one.

    ``tokens``: that each client trains, where it is not to be ``COLLM_ROUNDS__TOKENS``.
    """
    settings = load_settings()
    logging.configure(settings)
    name = AdapterName(adapter)
    async with open_site(settings) as site:
        journal = PrefectJournal(name, mlflow_url=settings.mlflow_public_url or settings.mlflow_url)
        sizer = fixed_size if tokens is None else size_of(tokens)
        wanted = None if round_id is None else RoundId(round_id)
        return final_state(await run_round(site, journal, name, wanted, sizer=sizer))


def final_state(outcome: Outcome) -> State[dict[str, str]]:
    """Return how Prefect shows a run: an aborted round is a failed run, one with nothing to do a completed one."""
    current = outcome.round
    if current is None:
        return Completed(name="Skipped", message=outcome.note, data={"note": outcome.note})
    if current.state is RoundState.ABORTED:
        return Failed(name="Aborted", message=outcome.note)
    told = {"round": current.id, "state": current.state.value, "note": outcome.note}
    return Completed(name=current.state.value.capitalize(), message=outcome.note, data=told)


async def run_round(
    site: Site, journal: Journal, adapter: AdapterName, round_id: RoundId | None = None, *, sizer: Sizer = fixed_size
) -> Outcome:
    """Do what ``federated_round`` says. Any error that it raises leaves the round to a later run."""
    async with site.exclusive(adapter) as mine:
        if not mine:
            return Outcome(round=None, note="another run works on this adapter's rounds")
        record = await site.transact(lambda s: adapters.get(s, adapter))
        if not record.training:
            return Outcome(round=None, note="paused: training of this adapter is switched off")
        try:
            current = await begin(site, record, round_id, sizer, flow_run_id=flow_run.id)
        except (NotEnoughClients, VersionConflict, RoundTaken) as e:
            return Outcome(round=None, note=e.message)
        with structlog.contextvars.bound_contextvars(round_id=current.id, adapter=adapter):
            try:
                current, decision = await carry_on(site, journal, record, current)
            except RoundTaken as e:
                return Outcome(round=None, note=e.message)
            except Paused:
                return Outcome(round=None, note=f"paused: round {current.id} is kept for a later run")
            return await finish(site, journal, record, current, decision)


async def carry_on(
    site: Site, journal: Journal, record: AdapterRecord, current: RoundRecord
) -> tuple[RoundRecord, GateDecision | None]:
    """Take the round from the state it is in to its decision; what makes that impossible aborts it."""
    decision: GateDecision | None = None
    try:
        async with watched(site, current) as pace:
            while not is_final(current.state):
                await pace.running()
                match current.state:
                    case RoundState.PLANNED:
                        current = await move(site, current, RoundState.TRAINING)
                    case RoundState.TRAINING:
                        current = await stages.collect(site, journal, pace, current)
                    case RoundState.AGGREGATING:
                        current = await stages.aggregate(site, journal, record, current)
                    case RoundState.EVALUATING:
                        current, decision = await stages.judge(site, journal, pace, record, current)
                    case RoundState.PROMOTED | RoundState.REJECTED | RoundState.ABORTED:
                        raise AssertionError("a final state ends the loop")
                    case _:
                        assert_never(current.state)
    except RoundTaken:  # a live round of another run's
        raise
    except CollmError as e:
        if e.retryable:  # MLflow is away, for example: not the round's fault, so a later run goes on with it
            raise
        current = await abort(site, current, e.message)
    return current, decision


async def finish(
    site: Site, journal: Journal, record: AdapterRecord, current: RoundRecord, decision: GateDecision | None
) -> Outcome:
    """Release the clients of a round that changed nothing, or wait for the fleet to serve; tell people."""
    if current.state is not RoundState.PROMOTED:
        await release(site, current)
    await journal.progress(100, f"Round {current.number}: {current.state.value}")
    await stages.show_clients(site, journal, current, decision)
    await journal.decided(current, decision)
    if current.state is RoundState.PROMOTED:
        current = await stages.see_served(site, record, current)
    return Outcome(round=current, note=current.reason)
