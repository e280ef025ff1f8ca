"""What callers send: a mix of good, impatient and bad requests, and when they come. Deterministic given a seed."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["whole", "stream", "impatient", "half", "bad"]

OVERLOAD = 1.5
"""Mean arrivals over capacity."""
BURST, BURST_PART, LULL = 2.0, 0.7, 1 / 3
"""Arrivals over capacity in a burst, a burst's part of a cycle, and the rest's: together the mean above. In the lulls
the queue drains, training gets its slices and local versions come out while some requests still run."""
LONG_CHARS = 600
"""Prompts from here on are cut to a number of tokens, so that they always fit."""
PREAMBLE = (
    "You are a careful assistant for people who work at a terminal. Answer with a single shell command or a short "
    "piece of Python, without an explanation, and never delete anything that was not asked for.\n\n"
)
"""Many prompts begin alike, as those of an application do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request to send."""

    index: int
    at_s: float
    """From the start of the load."""
    kind: Kind
    content: bytes
    """The body."""
    headers: Mapping[str, str]
    streams: bool
    leave_after: float = 0.0
    """impatient: seconds (whole) or tokens (streams) after which the caller goes; half: seconds."""
    expect: tuple[int, str] | None = None
    """bad: status and ``error_type``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A way to ask wrongly."""

    content: bytes
    status: int = 422
    error_type: str = "validation"
    headers: Mapping[str, str] | None = None


class Mix:
    """Draws requests."""

    def __init__(
        self, seed: int, prompts: Sequence[str], adapters: Sequence[str], *, model_id: str, max_total_tokens: int
    ) -> None:
        self._random = random.Random(seed)
        self._prompts = prompts
        self._adapters = [*adapters, model_id]
        """The model's id asks for the backbone alone."""
        self._weights = [2.0, *([1.0] * (len(adapters) - 1)), 0.3]
        """The first adapter, which is trained, gets the most requests."""
        self._max_total_tokens = max_total_tokens
        self._bad = bad_bodies(max_total_tokens)

    def good(self, index: int, at_s: float, *, streams: bool | None = None) -> Ask:
        """Return a request that is answered whole."""
        if streams is None:
            streams = self._random.random() < 0.55
        return Ask(
            index=index,
            at_s=at_s,
            kind="stream" if streams else "whole",
            content=self._content(streams=streams),
            headers=self._headers(),
            streams=streams,
        )

    def any(self, index: int, at_s: float) -> Ask:
        """Return a request of any kind."""
        lot = self._random.random()
        if lot < 0.76:
            return self.good(index, at_s)
        if lot < 0.90:
            return self._impatient(index, at_s)
        if lot < 0.92:
            leave_s = self._random.uniform(0, 0.3)
            content = self._content(streams=False)
            return Ask(
                index=index, at_s=at_s, kind="half", content=content, headers={}, streams=False, leave_after=leave_s
            )
        bad = self._random.choice(self._bad)
        return Ask(
            index=index,
            at_s=at_s,
            kind="bad",
            content=bad.content,
            headers=bad.headers or {},
            streams=self._random.random() < 0.5,
            expect=(bad.status, bad.error_type),
        )

    def load(self, rate: float, seconds: float) -> Iterator[Ask]:
        """Yield the whole load in the order of arrival: Poisson, in bursts and lulls around ``OVERLOAD`` · ``rate``."""
        cycle_s = max(6.0, min(60.0, seconds / 4))
        at_s, index = 0.0, 0
        while True:
            at_s += self._random.expovariate(rate * BURST)
            if at_s >= seconds:
                return
            in_burst = at_s % cycle_s < BURST_PART * cycle_s
            if in_burst or self._random.random() < LULL / BURST:
                yield self.any(index, at_s)
                index += 1

    def _impatient(self, index: int, at_s: float) -> Ask:
        streams = self._random.random() < 0.7
        return Ask(
            index=index,
            at_s=at_s,
            kind="impatient",
            content=self._content(streams=streams),
            headers=self._headers(),
            streams=streams,
            # Some go while they still wait, some in the middle of the prompt or of the answer.
            leave_after=self._random.randint(1, 12) if streams else self._random.uniform(0.0, 3.0),
        )

    def _content(self, *, streams: bool) -> bytes:
        inputs = self._inputs()
        parameters = self._parameters()
        parameters["adapter_id"] = self._random.choices(self._adapters, self._weights)[0]
        if len(inputs) >= LONG_CHARS:
            parameters["truncate"] = self._random.randint(100, 2 * self._max_total_tokens // 3)
        if not streams and self._random.random() < 0.1:
            parameters["decoder_input_details"] = True
        return json.dumps({"inputs": inputs, "parameters": parameters}).encode()

    def _inputs(self) -> str:
        lot, prompt = self._random.random(), self._random.choice(self._prompts)
        if lot < 0.55:
            return prompt
        if lot < 0.85:
            return PREAMBLE + prompt
        examples = self._random.choices(self._prompts, k=self._random.randint(4, 14 if lot < 0.97 else 40))
        return "\n\n".join([*examples, prompt])

    def _parameters(self) -> dict[str, object]:
        r = self._random
        parameters: dict[str, object] = {
            "max_new_tokens": r.randint(4, 40) if r.random() < 0.93 else r.randint(60, 120),
            "details": True,
            "ignore_eos": r.random() < 0.4,
        }
        if r.random() < 0.45:
            parameters |= {"do_sample": True, "seed": r.randrange(2**32), "temperature": r.choice([0.6, 0.9, 1.3])}
            parameters |= r.choice(
                [{}, {"top_k": 20}, {"top_p": 0.9}, {"typical_p": 0.8}, {"top_k": 50, "top_p": 0.95}]
            )
        if r.random() < 0.15:
            parameters |= r.choice([{"repetition_penalty": 1.2}, {"frequency_penalty": 0.4}])
        if r.random() < 0.1:
            parameters["stop"] = r.choice([["\n\n"], [" the", ";"], ["zzz"]])
        if r.random() < 0.1:
            parameters["top_n_tokens"] = r.randint(1, 5)
        return parameters

    def _headers(self) -> dict[str, str]:
        headers = {}
        if self._random.random() < 0.2:
            headers["x-priority"] = "batch"
        if self._random.random() < 0.3:
            headers |= {"x-slo-ttft-ms": "5000", "x-slo-tpot-ms": "1000"}
        return headers


def bad_bodies(max_total_tokens: int) -> list[Bad]:
    """Return every way to ask wrongly, with what must come of it."""

    def asking(inputs: object = "x", **parameters: object) -> bytes:
        return json.dumps({"inputs": inputs, "parameters": parameters}).encode()

    huge = b'{"inputs": "' + b"x" * 2_000_001
    return [
        Bad(content=b'{"inputs": "unfinished'),
        Bad(content=b"\xff\xfe\x00"),
        Bad(content=b"[]"),
        Bad(content=asking("")),
        Bad(content=asking(7)),
        Bad(content=asking(temperature=-1.0)),
        Bad(content=asking(best_of=2)),
        Bad(content=asking(seed=-1)),
        Bad(content=asking(stop=[""])),
        Bad(content=asking(grammar={"type": "json"})),
        Bad(content=asking(max_new_tokens=max_total_tokens)),
        Bad(content=asking("word " * 8 * max_total_tokens, max_new_tokens=1)),
        Bad(content=asking(max_new_tokens=4), headers={"x-priority": "at once"}),
        Bad(content=asking(max_new_tokens=4), headers={"x-slo-ttft-ms": "soon"}),
        Bad(content=asking(adapter_id="nobody", max_new_tokens=4), status=404, error_type="unknown_adapter"),
        Bad(content=huge, status=413),
        Bad(
            content=asking(max_new_tokens=4),
            headers={"authorization": "Bearer wrong"},
            status=401,
            error_type="unauthorized",
        ),
    ]
