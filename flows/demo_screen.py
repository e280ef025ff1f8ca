"""Live progress: lines that stay, and one that changes where there is a terminal."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status

from db.records import Heartbeat
from serving.load.model import Outcome
from serving.model import Slo
from serving.slo import within

PLAIN_EVERY_S = 15.0
"""Without a terminal the changing line is printed this often."""


class Screen:
    """Where the demo says what it does."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.begun_s = time.monotonic()
        self._live: Status | None = None
        self._printed_s = self.begun_s

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._live = self.console.status("starting", refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self.begun_s

    def say(self, text: str) -> None:
        """Print a line that stays."""
        at = int(self.elapsed_s)
        self.console.print(f"[{at // 60}:{at % 60:02d}] {text}", markup=False, highlight=False)

    def now(self, text: str) -> None:
        """Change the line that says what is under way."""
        if self._live is not None:
            self._live.update(text)
        elif time.monotonic() - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = time.monotonic()
            self.say(text)


class WindowProgress:
    """The changing line of one window."""

    def __init__(self, screen: Screen, *, name: str, arrivals: int, seconds: float, slo: Slo, adapter: str) -> None:
        self.screen = screen
        self.name = name
        self.arrivals = arrivals
        self.seconds = seconds
        self.slo = slo
        self.adapter = adapter
        self.begun_s = time.monotonic()
        self.answered = self.good = self.failed = 0
        self.fleet = ""

    def outcome(self, outcome: Outcome) -> None:
        """Count an arrival's end."""
        timing = outcome.timing
        self.answered += timing is not None
        self.failed += timing is None
        self.good += timing is not None and within(timing, self.slo)
        self.show()

    def beats(self, beats: Sequence[Heartbeat]) -> None:
        """Show the fleet."""
        self.fleet = "  ".join(
            f"{beat.replica_id}: v{beat.active.get(self.adapter, '?')}, {beat.running} running, "
            f"training {beat.train_share:.0%}"
            for beat in beats
        )
        self.show()

    def show(self) -> None:
        """Draw the line."""
        at = min(self.seconds, time.monotonic() - self.begun_s)
        bar = "█" * int(16 * at / self.seconds)
        self.screen.now(
            f"{self.name} {bar:░<16} {at:.0f}/{self.seconds:.0f} s  {self.answered}/{self.arrivals} answered, "
            f"{self.good} within SLO, {self.failed} failed  {self.fleet}"
        )
