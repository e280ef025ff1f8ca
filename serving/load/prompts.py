"""Prompts of wanted lengths: a held-out instruction, preceded by worked examples. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serving.load.model import Arrival, Call
from serving.rows import Row, render_prompt

Count = Callable[[str], int]
"""Text → tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one client's prompts come from; the two never share a prompt."""

    questions: tuple[Row, ...]
    """Report rows: their prompts are asked, their completions never sent."""
    examples: tuple[Row, ...]
    """Train rows, sent whole as few-shot examples."""


@dataclass(slots=True)
class PromptMaker:
    """Fills prompts; the same arrivals and sources give the same texts on every machine."""

    sources: Sequence[Source]
    count: Count
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of texts counted so far."""

    def calls(self, arrivals: Sequence[Arrival], *, adapter: str | None) -> list[Call]:
        """Return one call per arrival; sources take turns."""
        calls: list[Call] = []
        for i, arrival in enumerate(arrivals):
            source = self.sources[i % len(self.sources)]
            text = self.fill(source, i // len(self.sources), arrival.context_tokens)
            call = Call(
                index=i,
                offset_s=arrival.offset_s,
                inputs=text,
                prompt_tokens=self.tokens(text),
                new_tokens=arrival.new_tokens,
                adapter=adapter,
            )
            calls.append(call)
        return calls

    def fill(self, source: Source, turn: int, tokens: int) -> str:
        """Return the ``turn``-th question with as many examples as fit into ``tokens``.

        A question longer than ``tokens`` gives way to the next that fits; where none does, the shortest is asked.
        Token counts of joined texts differ by a token or two from the sum of the parts, so the whole is counted too.
        """
        question = self.question(source, turn, tokens)
        shots: list[str] = []
        left = tokens - self.tokens(question)
        for step in range(len(source.examples)):
            shot = example(source.examples[(turn * 7 + step) % len(source.examples)])
            if self.tokens(shot) > left:
                if left < MIN_SHOT_TOKENS or step >= MAX_TRIES:
                    break
                continue
            shots.append(shot)
            left -= self.tokens(shot)
        while shots and self.tokens("".join([*shots, question])) > tokens:
            shots.pop()
        return "".join([*shots, question])

    def question(self, source: Source, turn: int, tokens: int) -> str:
        """Return the first question from the ``turn``-th on that fits, else the shortest."""
        n = len(source.questions)
        rendered = [render_prompt(source.questions[(turn + step) % n].prompt) for step in range(n)]
        fitting = (text for text in rendered if self.tokens(text) <= tokens)
        return next(fitting, None) or min(rendered, key=self.tokens)

    def tokens(self, text: str) -> int:
        """Return the token count, from memory where it was counted before."""
        if text not in self.lengths:
            self.lengths[text] = self.count(text)
        return self.lengths[text]


MIN_SHOT_TOKENS = 24
"""No example is shorter: do not look for one."""
MAX_TRIES = 40


def example(row: Row) -> str:
    """Return a worked example as it stands before the next instruction."""
    return f"{render_prompt(row.prompt)}{row.completion.strip()}\n\n"
