"""Background work as slices: one piece at a time, timed, and harmless to requests when it fails."""

import logging
import traceback

import torch

from infra.clock import Clock
from serving.ports import SliceReport, WorkState
from serving.replica.segments import Kind, Piece, Pieces

log = logging.getLogger(__name__)  # not structlog: a bare torch image lacks it, see tests/gpu

FIRST_GUESS_S = 0.03
"""Predicted slice before any of its kind was measured."""
LEAST_TOKENS = 64
"""A smaller piece costs about as much as this many tokens."""
SMOOTHING = 0.1


class WorkFailed(Exception):
    """The work cannot go on; the message says why."""


class SliceTimes:
    """Measured seconds of slices, by kind."""

    def __init__(self) -> None:
        self._per_token_s: dict[Kind, float] = {}

    def predict(self, piece: Piece) -> float:
        """Seconds that ``piece`` will take."""
        rate = self._per_token_s.get(piece.kind)
        return FIRST_GUESS_S if rate is None else rate * max(piece.tokens, LEAST_TOKENS)

    def record(self, piece: Piece, seconds: float) -> None:
        """Learn from a slice."""
        rate = seconds / max(piece.tokens, LEAST_TOKENS)
        known = self._per_token_s.get(piece.kind, rate)
        self._per_token_s[piece.kind] = known + SMOOTHING * (rate - known)


class Slices:
    """Runs a generator of pieces, one per slice."""

    def __init__(self, pieces: Pieces, times: SliceTimes, clock: Clock) -> None:
        self._pieces = pieces
        self._times = times
        self._clock = clock
        self._state = WorkState.RUNNING
        self._reason = ""
        self._next: Piece | None = None
        self._advance()

    @property
    def state(self) -> WorkState:
        """Where it stands."""
        return self._state

    def next_slice_s(self) -> float:
        """See ``ports.Work``."""
        return 0.0 if self._next is None else self._times.predict(self._next)

    def slice(self) -> SliceReport:
        """See ``ports.Work``."""
        start, piece = self._clock.monotonic(), self._next
        if piece is not None:
            self._advance()
        seconds = self._clock.monotonic() - start
        if piece is not None and self._state is not WorkState.FAILED:
            self._times.record(piece, seconds)
        return SliceReport(seconds=seconds, state=self._state, reason=self._reason)

    def close(self) -> None:
        """See ``ports.Work``."""
        self._next = None
        self._pieces.close()

    def _advance(self) -> None:
        """Do the piece that was announced and learn of the next."""
        # Whatever mode the caller is in, tensors made here can be saved for backward.
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._next = next(self._pieces, None)
            if self._next is None and self._state is WorkState.RUNNING:
                self._state = WorkState.DONE
        except WorkFailed as e:
            self._fail(str(e))
        except Exception as e:
            # Requests share this thread and must not suffer; rendering a traceback prettily takes seconds.
            log.error("background_work_failed: %s", traceback.format_exc())
            self._fail(f"{type(e).__name__}: {e}")

    def _fail(self, reason: str) -> None:
        self._next, self._state, self._reason = None, WorkState.FAILED, reason
