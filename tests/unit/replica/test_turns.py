"""In which order prompts are computed."""

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from serving.model import Priority, Request, RequestId, Slo
from serving.replica.turns import BATCH_DELAY_S, LATE_EVERY, Prompt, Turns

NOW = 100.0


def prompt(
    name: str, *, came_s: float = NOW, ttft_s: float = 5.0, left: int = 10, begun: bool = False, batch: bool = False
) -> Prompt:
    request = Request(
        id=RequestId(name), adapter=None, input_ids=(1,) * left, max_new_tokens=1, slo=Slo(ttft_s=ttft_s, tpot_s=1),
        priority=Priority.BATCH if batch else Priority.INTERACTIVE, arrival_s=came_s,
    )  # fmt: skip
    return Prompt(request=request, left=left, begun=begun)


def order(turns: Turns, *prompts: Prompt, held_up: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Names of the timely and of the late, where a prompt token takes 10 ms."""
    made = turns.order(
        prompts, needs_s=lambda tokens: 0.01 * tokens, held_up={RequestId(name) for name in held_up}, now_s=NOW
    )
    return [p.request.id for p in made.timely], [p.request.id for p in made.late]


def test_whoever_is_due_first_comes_first() -> None:
    prompts = prompt("a", ttft_s=9), prompt("b", came_s=NOW - 3, ttft_s=9), prompt("c", ttft_s=2, begun=True)
    assert order(Turns(), *prompts) == (["c", "b", "a"], [])


def test_one_is_late_if_it_cannot_be_computed_in_time() -> None:
    assert order(Turns(), prompt("a", left=501), prompt("b", left=500)) == (["b"], ["a"])


def test_late_ones_that_have_begun_end_first_then_they_go_by_age() -> None:
    late = [prompt(n, came_s=NOW - age, begun=n == "c") for n, age in (("a", 7), ("b", 9), ("c", 6))]
    assert order(Turns(), *late) == ([], ["c", "b", "a"])


def test_interactive_prompts_pass_a_batch_one_until_it_has_waited() -> None:
    batch = prompt("batch", came_s=NOW - 4, ttft_s=60, batch=True)
    fresh = prompt("fresh", came_s=NOW, ttft_s=60)
    assert order(Turns(), batch, fresh)[0] == ["fresh", "batch"]
    aged = prompt("batch", came_s=NOW - BATCH_DELAY_S - 1, ttft_s=60, batch=True)
    assert order(Turns(), aged, fresh)[0] == ["batch", "fresh"]


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_late_one_is_never_passed_over_for_ever(timely_waits: list[bool]) -> None:
    """Whatever comes, a late one is among any eight that begin one after the other."""
    turns, passed = Turns(), 0
    for i, waits in enumerate(timely_waits):
        prompts = [prompt("late", came_s=0.0), *([prompt(f"timely {i}")] if waits else [])]
        timely, late = order(turns, *prompts)
        first = (*timely, *late)[0]
        turns.began(RequestId(first))
        passed = 0 if first == "late" else passed + 1
        assert passed < LATE_EVERY


def test_one_that_is_held_up_does_not_use_up_the_turn_of_another() -> None:
    turns = Turns()
    late = prompt("absent", came_s=0.0), prompt("late", came_s=1.0)
    for i in range(LATE_EVERY - 1):
        assert order(turns, *late, prompt(f"timely {i}"))[0] == [f"timely {i}"]
        turns.began(RequestId(f"timely {i}"))
    assert order(turns, *late, prompt("timely"), held_up=["absent"])[0] == ["late", "timely"]
    assert order(turns, *late[:1], prompt("timely"), held_up=["absent"])[0] == ["timely"]
