"""Arrivals, calls and outcomes: what the parts of the load generator say to each other. Pure."""

from dataclasses import dataclass

from serving.slo import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a scaled window, before it has a text."""

    offset_s: float
    """From the window's start."""
    context_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to send."""

    index: int
    offset_s: float
    """When to send it, from the window's start."""
    inputs: str
    prompt_tokens: int
    """As counted by the load generator."""
    new_tokens: int
    adapter: str | None = None
    """None leaves the choice to the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one arrival; times in seconds from the window's start."""

    index: int
    scheduled_s: float
    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    """Received, whether or not the answer is complete."""
    wanted_tokens: int
    prompt_tokens: int
    status: int | None = None
    """HTTP status; None if there was no answer at all."""
    failure: str | None = None
    """Why it is not a complete answer; None if it is one."""
    uid: str | None = None
    """Version that served it, as the server said."""
    label: str | None = None
    adapter: str | None = None
    replica: str | None = None
    token_s: tuple[float, ...] = ()
    """When each token came."""

    @property
    def timing(self) -> Timing | None:
        """Times of a complete answer; None otherwise."""
        if self.failure is not None or self.first_s is None or self.last_s is None:
            return None
        return Timing(scheduled_s=self.scheduled_s, first_s=self.first_s, last_s=self.last_s, tokens=self.tokens)
