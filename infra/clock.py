"""Time as a dependency: real processes take ``SystemClock``, tests take ``ManualClock``."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a component takes the time from."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """See ``Clock``."""
        return time.monotonic()

    def wall(self) -> float:
        """See ``Clock``."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """See ``Clock``."""
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told; sleeping moves it."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self.now_s = start_s

    def monotonic(self) -> float:
        """See ``Clock``."""
        return self.now_s

    def wall(self) -> float:
        """See ``Clock``."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """See ``Clock``."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds``."""
        self.now_s += seconds
