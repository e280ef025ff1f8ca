"""Prompts of wanted lengths, made of held-out instructions and worked examples."""

from serving.load.model import Arrival
from serving.load.prompts import PromptMaker, Source
from serving.rows import Row, render_prompt


def words(text: str) -> int:
    return len(text.split())


def source(tag: str) -> Source:
    return Source(
        questions=tuple(Row(f"{tag} question {i} " + "word " * (3 * i), f"SECRET{i}") for i in range(6)),
        examples=tuple(Row(f"{tag} example {i}", f"{tag} answer {i} " + "token " * (2 * i)) for i in range(30)),
    )


def maker(*sources: Source) -> PromptMaker:
    return PromptMaker(sources=sources or (source("a"), source("b")), count=words)


def arrivals(*lengths: int) -> list[Arrival]:
    return [Arrival(offset_s=float(i), context_tokens=n, new_tokens=16 + i) for i, n in enumerate(lengths)]


def test_prompts_fill_the_context_but_never_exceed_it() -> None:
    calls = maker().calls(arrivals(60, 80, 120, 200, 300, 64), adapter="code")
    for call, wanted in zip(calls, (60, 80, 120, 200, 300, 64), strict=True):
        assert call.prompt_tokens == words(call.inputs)
        assert wanted - 40 <= call.prompt_tokens <= wanted


def test_the_last_instruction_is_a_held_out_one_and_no_completion_of_those_is_sent() -> None:
    made = maker()
    for i, call in enumerate(made.calls(arrivals(*[150] * 12), adapter=None)):
        asked = made.sources[i % 2].questions[(i // 2) % 6]
        assert call.inputs.endswith(render_prompt(asked.prompt))
        assert "SECRET" not in call.inputs
        assert call.adapter is None


def test_examples_and_question_come_from_the_same_client() -> None:
    for i, call in enumerate(maker().calls(arrivals(*[200] * 6), adapter=None)):
        mine, other = ("a", "b") if i % 2 == 0 else ("b", "a")
        assert f"{mine} example" in call.inputs
        assert f"{other} example" not in call.inputs


def test_a_question_that_does_not_fit_gives_way_to_one_that_does() -> None:
    made = maker(source("a"))
    shortest = words(render_prompt(made.sources[0].questions[0].prompt))
    texts = [made.fill(made.sources[0], turn, shortest) for turn in range(6)]
    assert set(texts) == {render_prompt(made.sources[0].questions[0].prompt)}


def test_where_nothing_fits_the_shortest_question_is_asked_alone() -> None:
    made = maker(source("a"))
    assert made.fill(made.sources[0], 4, 1) == render_prompt(made.sources[0].questions[0].prompt)


def test_the_same_arrivals_give_the_same_texts() -> None:
    wanted = arrivals(50, 90, 130, 400, 50, 90)
    assert maker().calls(wanted, adapter="code") == maker().calls(wanted, adapter="code")


def test_more_arrivals_leave_the_first_ones_texts_alone() -> None:
    short = [call.inputs for call in maker().calls(arrivals(50, 90, 130), adapter=None)]
    long = [call.inputs for call in maker().calls(arrivals(50, 90, 130, 70, 60), adapter=None)]
    assert long[:3] == short


def test_a_joined_text_that_counts_more_than_its_parts_still_fits() -> None:
    # Two tokens more for each join than the parts have together.
    joins = PromptMaker(
        sources=[source("a")], count=lambda text: words(text) + 2 * max(0, text.count("### Instruction") - 1)
    )
    for turn in range(6):
        text = joins.fill(joins.sources[0], turn, 120)
        assert joins.tokens(text) <= 120
