"""A request that holds a row: how far it is, and its share of a step. Pure."""

from dataclasses import dataclass, field

from adapters.model import Version
from serving.model import Decode, Draw, Prefill, Request
from serving.replica.prefix import Held
from serving.replica.slack import Stream
from serving.replica.text import TextStream


@dataclass(slots=True, kw_only=True)
class Run:
    """A request that holds a row."""

    request: Request
    row: int
    version: Version | None
    place: int
    text: TextStream
    started_s: float
    prefilled: int = 0
    context: list[int]
    """Prompt and answer."""
    generated: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_logprobs: list[float] = field(default_factory=list)
    chunk_multiple: int = 1
    """See ``EngineShape``."""

    @property
    def decoding(self) -> bool:
        """Whether its prompt is done."""
        return self.prefilled == len(self.request.input_ids)

    @property
    def held(self) -> Held:
        """What its row's KV is valid for: the latest token is drawn, but not computed yet."""
        computed = self.prefilled + (max(0, self.generated - 1) if self.chunk_multiple == 1 else 0)
        return Held(None if self.version is None else self.version.uid, tuple(self.context[:computed]))

    @property
    def stream(self) -> Stream:
        """How it stands to its targets, once it is decoding."""
        return Stream(
            first_s=self.first_s,
            last_s=self.last_s,
            tokens=self.generated,
            tpot_s=self.request.slo.tpot_s,
            left=self.request.max_new_tokens - self.generated,
        )

    def chunk(self, budget: int) -> Prefill:
        """Return the next tokens of its prompt, ``budget`` at most."""
        request = self.request
        stop = self.prefilled + budget
        if self.prefilled < (even := stop - stop % self.chunk_multiple) and stop < len(request.input_ids):
            stop = even
        tokens = request.input_ids[self.prefilled : stop]
        ends = self.prefilled + len(tokens) == len(request.input_ids)
        return Prefill(
            row=self.row,
            place=self.place,
            tokens=tokens,
            start=self.prefilled,
            draw=self._draw() if ends else None,
            logprobs=request.prompt_logprobs,
        )

    def decode(self) -> Decode:
        """Return its next token's computation."""
        return Decode(
            row=self.row,
            place=self.place,
            token=self.context[-1],
            position=len(self.context) - 1,
            draw=self._draw(),
        )

    def _draw(self) -> Draw:
        params = self.request.sampling
        return Draw(params=params, index=self.generated, context=tuple(self.context) if params.needs_context else ())
