"""Requests, plans and results: what the parts of serving say to each other. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from adapters.model import Version
from db.records import AdapterName

RequestId = NewType("RequestId", str)
BASE = -1
"""The place of rows that wear no adapter."""


class Priority(StrEnum):
    """Class of a request in the queue."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class FinishReason(StrEnum):
    """Why an answer ended; TGI's names."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets of one request."""

    ttft_s: float
    """Arrival to first token."""
    tpot_s: float
    """Mean gap between later tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Neutral values switch a rule off."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """With the token's index it keys every draw: neighbours in the batch change nothing."""
    top_n_tokens: int = 0

    @property
    def needs_context(self) -> bool:
        """Whether the rules read the tokens so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to answer, checked and tokenised."""

    id: RequestId
    adapter: AdapterName | None
    """None: the backbone alone."""
    input_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Generate exactly ``max_new_tokens`` tokens."""
    sampling: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    slo: Slo
    priority: Priority = Priority.INTERACTIVE
    arrival_s: float
    """Monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A generated token."""

    id: int
    logprob: float
    """Natural log under the model's distribution, before sampling rules."""
    top: tuple[tuple[int, float], ...] = ()
    """The ``top_n_tokens`` likeliest (id, logprob)."""


# Plan → step → apply: the scheduler decides, the engine only carries out.


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Draw a token from a row's last position."""

    params: SamplingParams
    index: int
    """0 for a request's first generated token."""
    context: Sequence[int] = ()
    """Prompt and generated tokens; filled only if ``params.needs_context``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A chunk of one prompt into one KV row."""

    row: int
    place: int
    """Where the row's adapter version lives, or ``BASE``."""
    tokens: tuple[int, ...]
    start: int
    """Position of the first of ``tokens``; earlier positions are in the row's KV already."""
    draw: Draw | None
    """None unless the chunk ends the prompt."""
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """One token of one row."""

    row: int
    place: int
    token: int
    position: int
    """Where ``token`` is written: the count of tokens before it."""
    draw: Draw


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPrefix:
    """KV positions 0 to ``tokens`` (exclusive) of one row, to be copied into another."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One engine iteration."""

    copies: tuple[CopyPrefix, ...] = ()
    """Carried out first, in this order: a later one may read what an earlier one wrote, or overwrite what it read."""
    prefills: tuple[Prefill, ...] = ()
    decodes: tuple[Decode, ...] = ()

    @property
    def tokens(self) -> int:
        """How many positions the step computes."""
        return len(self.decodes) + sum(len(p.tokens) for p in self.prefills)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What the step gave one row."""

    row: int
    token: Token | None
    """None for a chunk that does not end its prompt, or if ``failed``."""
    prompt_logprobs: tuple[float, ...] = ()
    """For a prefill with ``logprobs``: of each of its tokens but the prompt's first."""
    failed: str = ""
    """Why this row alone failed (non-finite logits); empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an engine iteration gave."""

    rows: tuple[RowResult, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What the scheduler needs to know of an engine; constant."""

    model_id: str
    backbone: str
    """sha256 of the frozen weights."""
    dtype: str
    """Of weights and activations, as torch names it: ``float32``."""
    rows: int
    """KV rows: the most requests that run at once."""
    max_total_tokens: int
    """Prompt and answer of one request."""
    places: int
    versions: int
    """Most versions in host memory, those in places included."""
    eos_ids: frozenset[int]
    vocab: int
    chunk_multiple: int = 1
    """Chunks of a prompt are cheapest if they end at multiples of this. Above 1: the engine is batch-invariant, and
    what decoding has computed must not stand for what a prompt would."""


# Answers, as the replica's HTTP side sees them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first prefill is scheduled: the version is resolved and pinned from here on."""

    version: Version | None
    """None: the backbone alone."""
    queue_s: float
    prompt_tokens: int
    reused_tokens: int
    """Of them, how many need not be computed: their KV was there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """One more token."""

    token: Token
    text: str
    """What it adds; empty while a character is incomplete."""
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer is whole."""

    reason: FinishReason
    text: str
    tokens: int
    prompt_logprobs: tuple[float, ...]
    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The answer broke off; ``error`` is a ``CollmError``."""

    error: Exception


Event = Started | Emitted | Finished | Failed
