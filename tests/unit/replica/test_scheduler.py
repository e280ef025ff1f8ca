"""Who is served next, and that everything is given back."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from adapters import weights as codec
from adapters.model import LoraWeights, Version
from db.records import AdapterName, LoraSpec, VersionUid
from infra.clock import ManualClock
from infra.errors import Overloaded, PromptTooLong, StepFailed, UnknownAdapter
from serving.model import (
    BASE,
    Emitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Priority,
    Request,
    RequestId,
    RowResult,
    SamplingParams,
    Slo,
    Started,
    StepPlan,
    StepResult,
    Token,
)
from serving.replica.fake_engine import EOS, FAKE_SHAPES, FakeEngine, FakeTokenizer, expected_tokens
from serving.replica.scheduler import Scheduler

CODE = AdapterName("code")


class OneVersion:
    """Knows one adapter; counts pins."""

    def __init__(self) -> None:
        self.version = Version(adapter=CODE, uid=VersionUid("one"), number=1)
        self.place = 0
        self.absent = False
        """Its version is still on the way."""
        self.pinned: list[RequestId] = []

    def pin(self, adapter: AdapterName, owner: RequestId) -> tuple[Version, int] | None:
        if adapter != CODE:
            raise UnknownAdapter
        if self.absent:
            return None
        self.pinned.append(owner)
        return self.version, self.place

    def waits(self, adapter: AdapterName) -> bool:
        return self.absent

    def release(self, owner: RequestId) -> None:
        self.pinned.remove(owner)


def request(name: str, prompt: str = "abcd", new: int = 4, **changes: object) -> Request:
    made = Request(
        id=RequestId(name),
        adapter=None,
        input_ids=tuple(prompt.encode()),
        max_new_tokens=new,
        ignore_eos=True,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        arrival_s=1000.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def weights(seed: int) -> LoraWeights:
    spec = LoraSpec(rank=2, alpha=4, targets=("down_proj", "q_proj"))
    draw = np.random.default_rng(seed)
    shapes = codec.manifest(FAKE_SHAPES, spec)
    return LoraWeights(spec=spec, tensors={n: draw.normal(size=s).astype(np.float32) for n, s in shapes.items()})


class Bench:
    """A scheduler on the fake engine."""

    worn: LoraWeights | None = None

    def __init__(
        self, *, rows: int = 2, budget: int = 8, queue: int = 3, total: int = 64, least_prefix: int | None = None
    ) -> None:
        self.clock = ManualClock()
        self.engine = FakeEngine(self.clock, rows=rows, max_total_tokens=total, step_s=0.01)
        self.versions = OneVersion()
        self.scheduler = Scheduler(
            self.engine.shape,
            self.versions,
            FakeTokenizer(),
            token_budget=budget,
            max_queue=queue,
            least_prefix=least_prefix,
        )
        self.events: dict[RequestId, list[Event]] = {}

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.clock.monotonic())
        if plan.tokens:
            self.scheduler.apply(plan, self.engine.step(plan), self.clock.monotonic())
        self.take()
        return plan

    def take(self) -> None:
        for name, event in self.scheduler.take_events():
            self.events.setdefault(name, []).append(event)

    def run(self) -> list[StepPlan]:
        plans = []
        while (plan := self.step()).tokens:
            plans.append(plan)
        return plans

    def answer(self, made: Request) -> list[StepPlan]:
        """Answer one request alone, and check it."""
        self.scheduler.submit(made)
        plans = self.run()
        worn = self.worn if made.adapter is not None else None
        want = expected_tokens(made.input_ids, worn, made.max_new_tokens)
        assert self.tokens(made.id)[: len(want)] == want
        return plans

    def wear(self, seed: int, *, place: int = 0) -> None:
        """Make another version active."""
        self.worn, self.versions.place = weights(seed), place
        self.versions.version = Version(adapter=CODE, uid=VersionUid(f"v{seed}"), number=seed)
        self.engine.write(place, self.worn)

    def reused(self, name: str) -> int:
        started = self.events[RequestId(name)][0]
        assert isinstance(started, Started)
        return started.reused_tokens

    def last(self, name: str) -> Event:
        return self.events[RequestId(name)][-1]

    def finished(self, name: str) -> Finished:
        event = self.last(name)
        assert isinstance(event, Finished)
        return event

    def failed(self, name: str) -> Exception:
        event = self.last(name)
        assert isinstance(event, Failed)
        return event.error

    def tokens(self, name: str) -> list[int]:
        return [e.token.id for e in self.events[RequestId(name)] if isinstance(e, Emitted)]

    def assert_empty(self) -> None:
        assert (self.scheduler.queued, self.scheduler.running, self.scheduler.kv_used) == (0, 0, 0.0)
        assert self.versions.pinned == []


def test_an_answer_is_what_the_engine_gives_alone() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", "hello there", new=6))
    bench.scheduler.submit(request("b", "x", new=9))
    bench.run()
    for name, prompt, new in (("a", "hello there", 6), ("b", "x", 9)):
        want = expected_tokens(prompt.encode(), None, new)
        assert bench.tokens(name)[: len(want)] == want
        assert bench.finished(name).tokens == new
        assert bench.finished(name).reason is FinishReason.LENGTH
    bench.assert_empty()


def test_decoding_rows_come_first_and_prompts_fill_the_budget_in_chunks() -> None:
    bench = Bench(rows=3, budget=8)
    bench.scheduler.submit(request("a", "ab", new=20))
    bench.step()
    bench.scheduler.submit(request("long", "x" * 20))
    plans = [bench.step() for _ in range(3)]
    assert [len(p.decodes) for p in plans] == [1, 1, 1]
    assert [len(p.prefills[0].tokens) for p in plans] == [7, 7, 6]
    assert [p.prefills[0].draw is None for p in plans] == [True, True, False]
    assert [p.tokens for p in plans] == [8, 8, 7]


def test_more_decoding_rows_than_budget_take_turns() -> None:
    bench = Bench(rows=3, budget=2)
    for name in "abc":
        bench.scheduler.submit(request(name, "x", new=6))
    bench.run()
    assert all(bench.finished(n).tokens == 6 for n in "abc")


def test_a_request_without_a_row_waits_and_is_not_pinned_early() -> None:
    bench = Bench(rows=1)
    for name in "ab":
        bench.scheduler.submit(request(name, adapter=CODE))
    bench.step()
    assert bench.versions.pinned == ["a"]
    assert bench.scheduler.queued == 1
    bench.run()
    started = bench.events[RequestId("b")][0]
    assert isinstance(started, Started)
    assert started.queue_s > 0
    assert started.version == bench.versions.version
    bench.assert_empty()


def test_the_budget_being_spent_no_request_is_pinned() -> None:
    bench = Bench(rows=2, budget=4)
    bench.scheduler.submit(request("a", "x" * 8, adapter=CODE))
    bench.scheduler.submit(request("b", adapter=CODE))
    bench.step()
    assert bench.versions.pinned == ["a"]


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    bench = Bench(queue=1)
    bench.scheduler.submit(request("a"))
    with pytest.raises(Overloaded) as refused:
        bench.scheduler.submit(request("b"))
    assert refused.value.retry_after_s >= 1


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(PromptTooLong):
        Bench(total=16).scheduler.submit(request("a", "x" * 10, new=7))


def test_interactive_requests_pass_batch_ones_but_not_for_ever() -> None:
    bench = Bench(rows=1, budget=64)
    bench.scheduler.submit(request("batch", priority=Priority.BATCH, slo=Slo(ttft_s=60, tpot_s=1)))
    bench.scheduler.submit(request("new", arrival_s=1005.0, slo=Slo(ttft_s=60, tpot_s=1)))
    bench.scheduler.submit(request("newer", arrival_s=1011.0, slo=Slo(ttft_s=60, tpot_s=1)))
    bench.clock.advance(12)
    bench.run()
    assert list(bench.events) == ["new", "batch", "newer"]


def test_one_that_cannot_make_its_target_lets_others_pass() -> None:
    bench = Bench(rows=1, budget=64)
    bench.scheduler.submit(request("hopeless"))
    bench.clock.advance(2)
    bench.scheduler.submit(request("fresh", arrival_s=bench.clock.monotonic()))
    bench.run()
    assert list(bench.events) == ["fresh", "hopeless"]
    assert isinstance(bench.last("hopeless"), Finished)


def test_eos_ends_an_answer_unless_it_is_to_be_ignored() -> None:
    bench = Bench(rows=4, total=512)
    prompt = next(p for p in map(str, range(1000)) if EOS in expected_tokens(p.encode(), None, 20))
    bench.scheduler.submit(request("stops", prompt, new=30, ignore_eos=False))
    bench.scheduler.submit(request("goes on", prompt, new=30))
    bench.run()
    assert bench.finished("stops").reason is FinishReason.EOS
    assert bench.tokens("stops")[-1] == EOS
    assert "</s>" not in bench.finished("stops").text
    assert bench.finished("goes on").tokens == 30


def test_a_stop_string_ends_an_answer_and_stays_in_it() -> None:
    bench = Bench(total=512)
    text = FakeTokenizer().decode(expected_tokens(b"q", None, 20))
    bench.scheduler.submit(request("a", "q", new=40, stop=(text[3:6],)))
    bench.run()
    end = bench.finished("a")
    assert end.reason is FinishReason.STOP
    assert end.text == text[: text.find(text[3:6]) + 3]


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_a_cancelled_request_frees_what_it_holds(when: str) -> None:
    bench = Bench(rows=1, budget=4)
    if when == "waiting":
        bench.scheduler.submit(request("other", "x", adapter=CODE))
        bench.step()
    bench.scheduler.submit(request("a", "x" * 6, adapter=CODE))
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3}[when]):
        bench.step()
    assert bench.scheduler.cancel(RequestId("a"))
    assert not bench.scheduler.cancel(RequestId("a"))
    before = len(bench.events.get(RequestId("a"), []))
    bench.run()
    assert len(bench.events.get(RequestId("a"), [])) == before, "nothing follows a cancellation"
    bench.assert_empty()


def test_a_failed_step_loses_its_rows_only() -> None:
    bench = Bench(rows=1)
    bench.scheduler.submit(request("a", adapter=CODE))
    bench.scheduler.submit(request("b", adapter=CODE))
    plan = bench.scheduler.plan(bench.clock.monotonic())
    bench.scheduler.fail(plan, StepFailed())
    bench.run()
    assert isinstance(bench.failed("a"), StepFailed)
    assert bench.finished("b").tokens == 4
    bench.assert_empty()


def test_a_row_that_failed_alone_leaves_the_others() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", adapter=CODE))
    bench.scheduler.submit(request("b"))
    plan = bench.scheduler.plan(bench.clock.monotonic())
    result = bench.engine.step(plan)
    rows = (RowResult(row=0, token=None, failed="non-finite logits"), result.rows[1])
    bench.scheduler.apply(plan, StepResult(rows=rows, seconds=0.01), bench.clock.monotonic())
    bench.run()
    assert isinstance(bench.failed("a"), StepFailed)
    assert bench.finished("b").tokens == 4
    bench.assert_empty()


def test_an_unknown_adapter_fails_its_request_only() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", adapter=AdapterName("gone")))
    bench.scheduler.submit(request("b"))
    bench.run()
    assert isinstance(bench.failed("a"), UnknownAdapter)
    assert bench.finished("b").tokens == 4
    bench.assert_empty()


def test_rules_that_read_the_context_get_it() -> None:
    bench = Bench()
    bench.scheduler.submit(request("a", "ab", sampling=SamplingParams(repetition_penalty=1.2)))
    first, second = bench.step(), bench.step()
    draw = first.prefills[0].draw
    assert draw is not None
    assert tuple(draw.context) == (97, 98)
    assert tuple(second.decodes[0].draw.context)[:2] == (97, 98)
    assert len(second.decodes[0].draw.context) == 3


def test_prompt_logprobs_are_those_of_all_tokens_but_the_first_whatever_the_chunks() -> None:
    whole, chunked = Bench(budget=64), Bench(budget=4)
    for bench in (whole, chunked):
        bench.scheduler.submit(request("a", "hello there", prompt_logprobs=True))
        bench.run()
    assert len(whole.finished("a").prompt_logprobs) == len("hello there") - 1
    assert whole.finished("a").prompt_logprobs == chunked.finished("a").prompt_logprobs


def test_times_are_measured_from_the_arrival() -> None:
    bench = Bench(rows=1, budget=64)
    bench.clock.advance(0.5)
    bench.scheduler.submit(request("a", new=5))
    bench.run()
    end = bench.finished("a")
    assert (end.queue_s, end.ttft_s) == pytest.approx((0.5, 0.51))
    assert (end.tpot_s, end.total_s) == pytest.approx((0.01, 0.55))


def test_a_token_without_text_is_still_an_event() -> None:
    bench = Bench(rows=1)
    bench.scheduler.submit(request("a", new=1))
    plan = bench.scheduler.plan(0.0)
    rows = (RowResult(row=0, token=Token(id=0xC3, logprob=-1.0)),)
    bench.scheduler.apply(plan, StepResult(rows=rows, seconds=0.0), 0.0)
    bench.take()
    emitted = [e for e in bench.events[RequestId("a")] if isinstance(e, Emitted)]
    assert [e.text for e in emitted] == ["\ufffd"], "the last one shows what was held back"
    assert plan.prefills[0].place == BASE


@pytest.mark.parametrize("end", ["fail_all", "fail_waiting"])
def test_giving_up_tells_everybody(end: str) -> None:
    bench = Bench(rows=1)
    bench.scheduler.submit(request("runs", adapter=CODE))
    bench.scheduler.submit(request("waits", adapter=CODE))
    bench.step()
    give_up: Callable[[Exception], None] = getattr(bench.scheduler, end)
    give_up(Overloaded())
    bench.run()
    assert isinstance(bench.failed("waits"), Overloaded)
    assert isinstance(bench.last("runs"), Failed if end == "fail_all" else Finished)
    bench.assert_empty()


# Prefixes that are there already.


def test_a_prompt_that_begins_like_an_answered_one_computes_the_rest_only() -> None:
    bench = Bench(budget=64, least_prefix=4)
    bench.answer(request("a", "system: one", new=6))
    (first, *_) = bench.answer(request("b", "system: two"))
    assert bench.reused("b") == len("system: ")
    assert [p.start for p in first.prefills] == [8]
    assert first.tokens == 3
    answered = (*b"system: one", *bench.tokens("a"))
    bench.answer(request("c", input_ids=(*answered, 63, 63)))
    assert bench.reused("c") == len(answered) - 1, "the last token of an answer was drawn, not computed"
    bench.assert_empty()


def test_the_same_prompt_again_still_computes_its_last_token() -> None:
    bench = Bench(budget=64, least_prefix=4)
    bench.answer(request("a", "system: one"))
    (first, *_) = bench.answer(request("b", "system: one"))
    assert first.tokens == 1
    assert bench.tokens("a") == bench.tokens("b")


def test_a_prompt_shares_what_a_running_one_has_computed_so_far() -> None:
    bench = Bench(rows=3, budget=8, least_prefix=4, total=128)
    bench.scheduler.submit(request("a", "system: a prompt of some length", new=30))
    bench.step()
    bench.scheduler.submit(request("b", "system: a prompt of other length"))
    plans = bench.run()
    assert [(c.source, c.target, c.tokens) for plan in plans for c in plan.copies] == [(0, 1, 20)]
    assert sum(plan.tokens - len(plan.decodes) for plan in plans) == (31 - 8) + (32 - 20)
    for name, prompt in (("a", b"system: a prompt of some length"), ("b", b"system: a prompt of other length")):
        want = expected_tokens(prompt, None, 4)
        assert bench.tokens(name)[: len(want)] == want


def test_versions_never_share_whatever_place_they_lie_in() -> None:
    bench = Bench(budget=64, least_prefix=4)
    bench.wear(1)
    bench.answer(request("one", "system: one", adapter=CODE))
    bench.answer(request("none", "system: one"))
    bench.wear(2)
    bench.answer(request("two", "system: one", adapter=CODE))
    assert [bench.reused(name) for name in ("one", "none", "two")] == [0, 0, 0]


def test_a_version_keeps_its_prefixes_in_another_place() -> None:
    bench = Bench(rows=4, budget=64, least_prefix=4)
    bench.wear(1)
    bench.answer(request("a", "system: one", adapter=CODE))
    bench.wear(2)
    bench.wear(1, place=3)
    bench.answer(request("b", "system: one", adapter=CODE))
    assert bench.reused("b") == len("system: one") - 1


@pytest.mark.parametrize("how", ["the step", "the row"])
def test_what_failed_is_shared_with_nobody(how: str) -> None:
    bench = Bench(rows=1, budget=8, least_prefix=4)
    bench.scheduler.submit(request("a", "system: one"))
    bench.step()
    plan = bench.scheduler.plan(bench.clock.monotonic())
    if how == "the step":
        bench.scheduler.fail(plan, StepFailed())
    else:
        failed = StepResult(rows=(RowResult(row=0, token=None, failed="non-finite logits"),), seconds=0.01)
        bench.scheduler.apply(plan, failed, bench.clock.monotonic())
    bench.answer(request("b", "system: one"))
    assert bench.reused("b") == 0


def test_what_a_cancelled_request_had_computed_is_kept() -> None:
    bench = Bench(rows=1, budget=8, least_prefix=4)
    bench.scheduler.submit(request("a", "system: a long one"))
    bench.step()
    bench.scheduler.cancel(RequestId("a"))
    bench.answer(request("b", "system: a long one"))
    assert bench.reused("b") == 8


def test_prompt_logprobs_are_computed_whole() -> None:
    bench = Bench(budget=64, least_prefix=4)
    bench.answer(request("a", "system: one"))
    bench.answer(request("b", "system: one", prompt_logprobs=True))
    assert bench.reused("b") == 0
    assert len(bench.finished("b").prompt_logprobs) == len("system: one") - 1


# Who must not wait for whom.


def test_a_long_prompt_never_costs_running_streams_more_than_the_budget() -> None:
    bench = Bench(rows=4, budget=128, total=4200)
    for name in "abc":
        bench.scheduler.submit(request(name, name, new=100))
    bench.step()
    bench.scheduler.submit(request("long", "x" * 4000, slo=Slo(ttft_s=60, tpot_s=1)))
    chunks = 0
    while not any(isinstance(e, Emitted) for e in bench.events.get(RequestId("long"), [])):
        plan = bench.step()
        assert [d.row for d in plan.decodes] == [0, 1, 2], "every stream gets its token in every step"
        assert plan.tokens <= 128
        chunks += 1
    assert chunks == 32


def test_more_streams_than_budget_leave_a_part_to_prompts() -> None:
    bench = Bench(rows=5, budget=4, queue=9)
    for name in "abcd":
        bench.scheduler.submit(request(name, name, new=40))
    while bench.scheduler.decoding < 4:
        bench.step()
    bench.scheduler.submit(request("new", "xy", new=1))
    plans = [bench.step(), bench.step()]
    assert [(len(p.decodes), p.tokens) for p in plans] == [(3, 4), (3, 4)]
    assert isinstance(bench.last("new"), Finished)
    bench.run()
    assert all(bench.finished(n).tokens == 40 for n in "abcd")


def measured(bench: Bench, *, decode_s: float, token_s: float) -> None:
    bench.scheduler.costs.observe(decodes=1, prefill_tokens=0, seconds=decode_s)
    bench.scheduler.costs.observe(decodes=0, prefill_tokens=100, seconds=100 * token_s)


def test_a_late_prompt_that_has_begun_lets_timely_ones_pass() -> None:
    bench = Bench(rows=4, budget=16, total=512)
    bench.scheduler.submit(request("late", "x" * 200))
    bench.step()
    bench.clock.advance(2)
    bench.scheduler.submit(request("timely", "y" * 28, arrival_s=bench.clock.monotonic()))
    plans = [bench.step(), bench.step()]
    assert [[len(p.tokens) for p in plan.prefills] for plan in plans] == [[14, 2], [14, 2]]
    assert bench.tokens("timely") != []
    bench.run()
    assert isinstance(bench.last("late"), Finished)


def test_a_late_prompt_is_computed_in_what_streams_can_spare() -> None:
    """Its own target is lost; theirs, 0.1 s a token, are not to be."""
    bench = Bench(rows=4, budget=64, total=512)
    bench.scheduler.submit(request("stream", "s", new=200))
    bench.step()
    measured(bench, decode_s=0.02, token_s=0.005)
    bench.scheduler.submit(request("late", "x" * 100, arrival_s=bench.clock.monotonic() - 2))
    plan = bench.step()
    (chunk,) = plan.prefills
    assert 8 <= len(chunk.tokens) <= (0.1 - 0.02) / 0.005
    bench.run()
    assert isinstance(bench.last("late"), Finished)


def test_one_request_in_eight_to_begin_is_a_late_one() -> None:
    bench = Bench(rows=1, budget=64, queue=40)
    bench.scheduler.submit(request("late", slo=Slo(ttft_s=0.001, tpot_s=1)))
    bench.clock.advance(1)
    for i in range(20):
        bench.scheduler.submit(request(f"timely {i}", arrival_s=bench.clock.monotonic(), slo=Slo(ttft_s=60, tpot_s=1)))
    bench.run()
    assert list(bench.events).index(RequestId("late")) == 7


def test_a_request_whose_version_is_on_the_way_takes_no_slack_and_holds_nobody_up() -> None:
    bench = Bench(rows=1, budget=64)
    bench.versions.absent = True
    bench.scheduler.submit(request("waits", adapter=CODE))
    bench.clock.advance(5)
    assert bench.step().tokens == 0
    assert bench.scheduler.slack_s(bench.clock.monotonic()) == math.inf
    bench.scheduler.submit(request("goes", arrival_s=bench.clock.monotonic()))
    bench.run()
    assert bench.finished("goes").tokens == 4
    bench.versions.absent = False
    assert bench.scheduler.queued == 1
    bench.run()
    assert bench.finished("waits").tokens == 4
    bench.assert_empty()
