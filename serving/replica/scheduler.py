"""Who is served next: a bounded queue, rows, and a plan per step within a token budget. Pure.

Decoding rows come first, then prompts in chunks (in which order: ``turns``). A request's version is resolved and pinned
when its first chunk is planned, and let go exactly once: at its end, failure or cancellation.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from adapters.model import Version
from db.records import AdapterName
from infra.errors import AdapterError, Overloaded, RequestError, StepFailed
from serving.model import (
    BASE,
    CopyPrefix,
    Emitted,
    EngineShape,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefill,
    Priority,
    Request,
    RequestId,
    RowResult,
    Started,
    StepPlan,
    StepResult,
)
from serving.replica.kv import KvRows, Taken
from serving.replica.prefix import Held
from serving.replica.run import Run
from serving.replica.slack import Awaited, Demand, StepCosts, allowance_s, slack_s
from serving.replica.text import TextStream, Tokenizer
from serving.replica.turns import Order, Prompt, Turns

PROMPT_PART = 4
"""One of so many positions of a step is for prompts, if they need it, however many rows decode."""
LATE_PART = 8
"""One of so many is for late prompts that have rows: they must not keep them for ever."""


class Versions(Protocol):
    """Who knows which version is active; ``residency`` in a replica."""

    def pin(self, adapter: AdapterName, owner: RequestId) -> tuple[Version, int] | None:
        """Hold the active version for a request; return it and its place, None while it is on the way into one.

        Raises ``UnknownAdapter``.
        """
        ...

    def waits(self, adapter: AdapterName) -> bool:
        """Whether a request that ``pin`` gave None has still to wait; asked often, which keeps its turn and its place.

        False also where nothing is on the way any more: ``pin`` then says why, or asks anew.
        """
        ...

    def release(self, owner: RequestId) -> None:
        """Let go."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """The prompts' part of a plan in the making."""

    copies: list[CopyPrefix] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Positions so far."""
        return sum(len(p.tokens) for p in self.prefills)


class Scheduler:
    """Queue and rows of one engine. Times are monotonic and passed in."""

    def __init__(
        self,
        shape: EngineShape,
        versions: Versions,
        tokenizer: Tokenizer,
        *,
        token_budget: int,
        max_queue: int,
        least_prefix: int | None = None,
    ) -> None:
        """``token_budget``: at least 2. ``least_prefix``: see ``KvRows``; None: every prompt is computed whole."""
        assert token_budget >= 2, "neither prompts nor streams may starve"
        self.shape = shape
        self.costs = StepCosts()
        self._versions = versions
        self._tokenizer = tokenizer
        self._budget = token_budget
        self._max_queue = max_queue
        self._rows = KvRows(shape.rows, shape.max_total_tokens, least_prefix=least_prefix)
        self._turns = Turns()
        self._waiting: dict[RequestId, Request] = {}
        self._running: dict[RequestId, Run] = {}
        self._asked: set[RequestId] = set()
        """Waiting requests whose version was still on the way when they had their turn."""
        self._held_up: set[RequestId] = set()
        """Those of them for which it still is."""
        self._events: list[tuple[RequestId, Event]] = []
        self._service_s = 1.0
        """Smoothed seconds of a request from first prefill to last token."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ``PromptTooLong`` or ``Overloaded``."""
        assert request.id not in self._waiting, f"{request.id} is queued already"
        assert request.id not in self._running, f"{request.id} runs already"
        self._rows.check(len(request.input_ids) + request.max_new_tokens)
        if len(self._waiting) >= self._max_queue:
            raise Overloaded(retry_after_s=self.retry_after_s())
        self._waiting[request.id] = request

    def plan(self, now_s: float) -> StepPlan:
        """Return the next step; empty if there is nothing to compute."""
        decoding = sorted((r for r in self._running.values() if r.decoding), key=lambda r: r.last_s)
        self._look_again()
        order = self._order(now_s)
        draft, room = Draft(), self._room(len(decoding))
        spared = max(1, self._budget // LATE_PART)
        begun_late = any(p.begun for p in order.late)
        self._fill(draft, order.timely, now_s, upto=room - spared if begun_late else room)
        # Late prompts, whose own targets are lost, must not cost streams theirs.
        allowed_s = allowance_s([r.stream for r in decoding], self.costs, now_s)
        allowed = self.costs.prefill_tokens(allowed_s, decodes=len(decoding))
        self._fill(draft, order.late, now_s, upto=min(room, max(allowed, draft.tokens + spared)))
        decodes = sorted(decoding[: self._budget - draft.tokens], key=lambda r: r.row)
        return StepPlan(
            copies=tuple(draft.copies),
            prefills=tuple(draft.prefills),
            decodes=tuple(r.decode() for r in decodes),
        )

    def apply(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Take in what a step gave."""
        prefilled = {p.row: p for p in plan.prefills}
        self.costs.observe(
            decodes=len(plan.decodes), prefill_tokens=plan.tokens - len(plan.decodes), seconds=result.seconds
        )
        runs = {run.row: run for run in self._running.values()}
        assert {r.row for r in result.rows} == prefilled.keys() | {d.row for d in plan.decodes}, "rows got lost"
        for row in result.rows:
            run = runs[row.row]
            if row.failed:
                self._fail(run, StepFailed(f"Request failed during generation: {row.failed}"))
                continue
            if (chunk := prefilled.get(row.row)) is not None:
                run.prefilled += len(chunk.tokens)
                run.prompt_logprobs.extend(row.prompt_logprobs)
            if row.token is not None:
                self._grow(run, row, now_s)

    def fail(self, plan: StepPlan, error: Exception) -> None:
        """The step broke: the requests in it are lost, the others are not."""
        rows = {p.row for p in plan.prefills} | {d.row for d in plan.decodes}
        for run in [r for r in self._running.values() if r.row in rows]:
            self._fail(run, error)

    def fail_all(self, error: Exception) -> None:
        """Give up on every request."""
        for request_id in list(self._waiting):
            del self._waiting[request_id]
            self._events.append((request_id, Failed(error=error)))
        for run in list(self._running.values()):
            self._fail(run, error)

    def fail_waiting(self, error: Exception) -> None:
        """Give up on every request that has not begun."""
        for request_id in list(self._waiting):
            del self._waiting[request_id]
            self._events.append((request_id, Failed(error=error)))

    def cancel(self, request_id: RequestId) -> bool:
        """Forget a request and free what it holds; whether there was one. No event follows."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        run = self._running.get(request_id)
        if run is None:
            return False
        self._free(run)
        return True

    def take_events(self) -> list[tuple[RequestId, Event]]:
        """Return what has happened to requests since the last call, in order."""
        events, self._events = self._events, []
        return events

    def slack_s(self, now_s: float) -> float:
        """Return how long background work may hold the engine; infinite when idle."""
        # Who waits for a version waits for its copy, not for the engine.
        awaited = [p for p in self._order(now_s) if p.request.id not in self._held_up]
        demand = Demand(
            streams=[r.stream for r in self._running.values() if r.decoding],
            awaited=[Awaited(due_s=p.request.arrival_s, ttft_s=p.request.slo.ttft_s, tokens=p.left) for p in awaited],
            blocked=self._rows.free == 0 and any(not p.begun for p in awaited),
            free_rows=1 - self._rows.used,
            budget=self._budget,
        )
        return slack_s(demand, self.costs, now_s)

    def retry_after_s(self) -> float:
        """Return when a refused request may try again: when the queue should have moved by some places."""
        return min(30.0, max(1.0, self._service_s * len(self._waiting) / self.shape.rows / 4))

    def queue_age_s(self, now_s: float, priority: Priority | None = None) -> float:
        """Return the age of the oldest waiting request; 0 if none waits."""
        arrivals = [r.arrival_s for r in self._waiting.values() if priority in (None, r.priority)]
        return max(0.0, now_s - min(arrivals)) if arrivals else 0.0

    def waiting(self, priority: Priority) -> int:
        """Return how many of a class wait."""
        return sum(r.priority is priority for r in self._waiting.values())

    @property
    def queued(self) -> int:
        """Requests that wait for their first prefill."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def decoding(self) -> int:
        """Requests that have their first token."""
        return sum(r.decoding for r in self._running.values())

    @property
    def kv_used(self) -> float:
        """Share of KV rows in use."""
        return self._rows.used

    def kv_tokens(self) -> Counter[Version | None]:
        """Return how many KV positions running requests hold, by version; None: the backbone alone."""
        held: Counter[Version | None] = Counter()
        for run in self._running.values():
            held[run.version] += run.prefilled + max(0, run.generated - 1)
        return held

    @property
    def kept_tokens(self) -> int:
        """KV positions that free rows hold for prompts that begin alike."""
        return self._rows.kept_tokens

    def owner(self, row: int) -> RequestId:
        """Return who holds a row."""
        return self._rows.owner(row)

    def run_of(self, request_id: RequestId) -> Run | None:
        """Return a running request."""
        return self._running.get(request_id)

    def _look_again(self) -> None:
        """See whose version has come in; who has no row yet keeps it, who still waits its turn."""
        self._asked &= self._waiting.keys()
        adapters = {i: self._waiting[i].adapter for i in self._asked}
        waits = {a: self._versions.waits(a) for a in set(adapters.values()) if a is not None}
        self._held_up = {i for i, a in adapters.items() if a is not None and waits[a]}

    def _order(self, now_s: float) -> Order:
        decodes = self.decoding
        budget = decodes + self._room(decodes)
        begun = [r for r in self._running.values() if not r.decoding]
        prompts = [Prompt(request=r.request, left=len(r.request.input_ids) - r.prefilled, begun=True) for r in begun]
        prompts += [Prompt(request=r, left=len(r.input_ids), begun=False) for r in self._waiting.values()]
        return self._turns.order(
            prompts,
            needs_s=lambda tokens: self.costs.prefill_s(tokens, decodes=decodes, budget=budget),
            held_up=self._held_up,
            now_s=now_s,
        )

    def _room(self, decodes: int) -> int:
        """Return how many positions of a step prompts may take."""
        return max(self._budget - decodes, self._budget // PROMPT_PART, 1)

    def _fill(self, draft: Draft, prompts: Iterable[Prompt], now_s: float, *, upto: int) -> None:
        for prompt in prompts:
            if draft.tokens >= upto:
                return
            request = prompt.request
            run = self._running[request.id] if prompt.begun else self._begin(request, draft, now_s)
            if run is not None:
                draft.prefills.append(run.chunk(upto - draft.tokens))

    def _begin(self, request: Request, draft: Draft, now_s: float) -> Run | None:
        """Pin the request's version and give it a row; None if it can't begin."""
        if self._rows.free == 0:
            return None
        version, place = None, BASE
        if request.adapter is not None:
            try:
                pinned = self._versions.pin(request.adapter, request.id)
            except (RequestError, AdapterError) as error:
                del self._waiting[request.id]
                self._events.append((request.id, Failed(error=error)))
                return None
            if pinned is None:
                self._asked.add(request.id)
                self._held_up.add(request.id)  # others go on while its version comes in
                return None
            version, place = pinned
        del self._waiting[request.id]
        self._turns.began(request.id)
        taken = self._take_row(request, version)
        if taken.copy is not None:
            draft.copies.append(taken.copy)
        run = self._running[request.id] = Run(
            request=request,
            row=taken.row,
            version=version,
            place=place,
            text=TextStream(self._tokenizer, request.stop),
            started_s=now_s,
            prefilled=taken.start,
            context=list(request.input_ids),
            chunk_multiple=self.shape.chunk_multiple,
        )
        started = Started(
            version=version,
            queue_s=now_s - request.arrival_s,
            prompt_tokens=len(request.input_ids),
            reused_tokens=taken.start,
        )
        self._events.append((request.id, started))
        return run

    def _take_row(self, request: Request, version: Version | None) -> Taken:
        # Prompt logprobs are computed from the hidden states of every position.
        wanted = None if request.prompt_logprobs else Held(None if version is None else version.uid, request.input_ids)
        alike = (r for r in self._running.values() if r.version == version)
        taken = self._rows.take(request.id, wanted, ((r.row, r.held) for r in alike))
        assert taken is not None
        return taken

    def _grow(self, run: Run, row: RowResult, now_s: float) -> None:
        token, request = row.token, run.request
        assert token is not None
        run.context.append(token.id)
        run.generated += 1
        run.last_s = now_s
        if run.generated == 1:
            run.first_s = now_s
        piece = run.text.push(token.id)
        reason: FinishReason | None = None
        if token.id in self.shape.eos_ids and not request.ignore_eos:
            reason = FinishReason.EOS
        elif run.text.stopped:
            reason = FinishReason.STOP
        elif run.generated == request.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            piece += run.text.flush()
        special = self._tokenizer.is_special(token.id)
        self._events.append((request.id, Emitted(token=token, text=piece, special=special)))
        if reason is not None:
            self._finish(run, reason)

    def _finish(self, run: Run, reason: FinishReason) -> None:
        request, gaps = run.request, run.generated - 1
        self._service_s += 0.1 * (run.last_s - run.started_s - self._service_s)
        self._free(run)
        finished = Finished(
            reason=reason,
            text=run.text.text,
            tokens=run.generated,
            prompt_logprobs=tuple(run.prompt_logprobs),
            queue_s=run.started_s - request.arrival_s,
            ttft_s=run.first_s - request.arrival_s,
            tpot_s=(run.last_s - run.first_s) / gaps if gaps else 0.0,
            total_s=run.last_s - request.arrival_s,
        )
        self._events.append((request.id, finished))

    def _fail(self, run: Run, error: Exception) -> None:
        self._free(run, keep=False)
        self._events.append((run.request.id, Failed(error=error)))

    def _free(self, run: Run, *, keep: bool = True) -> None:
        """The one way out: row and pin are given back together. ``keep``: what the row holds is valid."""
        del self._running[run.request.id]
        self._rows.give_back(run.row, run.held if keep else None)
        if run.version is not None:
            self._versions.release(run.request.id)
