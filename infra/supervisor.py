"""Starts parts in order, watches them, starts those again that die, stops all in reverse order.

One thread owns every child from its start to its end, because the kernel ends a child when the thread that started
it ends. The caller's thread only waits for it and tells it to stop.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from infra.errors import CollmError

POLL_S = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Before a part that died is started again; doubled each time."""
MAX_RESTARTS = 8
"""Of one part, until it has run for ``STEADY_S``; then it is left dead."""
STEADY_S = 60.0
THREAD_START_S = 2.0
"""A thread that has no id by then was never started: nothing runs."""


class StartFailed(CollmError):
    """A part of the cluster did not start."""


class Part(Protocol):
    """Something that runs."""

    name: str
    start_timeout_s: float

    def start(self) -> None:
        """Start it; need not wait until it is ready."""
        ...

    def ready(self) -> bool:
        """Whether it does its work (or, if it is to run to its end, whether it has ended well)."""
        ...

    def ended(self) -> str:
        """Why it runs no more; empty while it runs, or if it has done what it was started for."""
        ...

    def ask_to_stop(self) -> None:
        """Send the signal."""
        ...

    def stop(self) -> None:
        """Ask, wait, insist; idempotent."""
        ...


class Supervisor:
    """Runs groups of parts: a group is started when the one before it is ready."""

    def __init__(
        self,
        groups: Sequence[Sequence[Part]],
        *,
        report: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.groups = groups
        self.report = report
        self.changed = changed
        """Called after each start, with the parts' process ids up to date."""
        self.restarts: dict[str, int] = {}
        self._asked = threading.Event()
        self._started = threading.Event()
        self._ended = threading.Event()
        """Waited for instead of ``Thread.join``: a join that a Ctrl-C interrupts takes the thread for ended."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Return when all are ready. Raises what went wrong, with everything stopped."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        try:
            self._thread.start()
            self._started.wait()
        except BaseException:  # Ctrl-C
            self.stop()
            raise
        if self._error is not None:
            self._ended.wait()
            raise self._error

    def stop(self) -> None:
        """Stop all; returns when the last has ended, whatever is pressed meanwhile. Idempotent."""
        self._asked.set()
        if self._thread is not None:
            with _signals_ignored():
                while not self._ended.wait(THREAD_START_S) and self._thread.ident is not None:
                    pass

    def wait(self) -> None:
        """Return when it has been stopped by another thread. Raises what ended it otherwise."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._ended.set)
            undo.callback(self._started.set)
            try:
                for group in self.groups:
                    undo.callback(_stop, group)
                    self._start_group(group)
                self._started.set()
                self._watch([part for group in self.groups for part in group])
            except BaseException as error:  # handed to the thread that waits
                self._error = error

    def _start_group(self, group: Sequence[Part]) -> None:
        begin = time.monotonic()
        waiting = []
        for part in group:
            if self._asked.is_set():
                raise StartFailed("stopped while starting")
            part.start()
            self.changed()
            waiting.append(part)
        while waiting:
            for part in list(waiting):
                if part.ready():
                    waiting.remove(part)
                    self.report(f"{part.name}: ready after {time.monotonic() - begin:.1f} s")
                elif reason := part.ended():
                    raise StartFailed(f"{part.name} did not start: {reason}")
                elif time.monotonic() - begin > part.start_timeout_s:
                    raise StartFailed(f"{part.name} did not become ready within {part.start_timeout_s:g} s")
            if waiting and self._asked.wait(POLL_S):
                raise StartFailed("stopped while starting")

    def _watch(self, parts: Sequence[Part]) -> None:
        due: dict[str, float] = {}
        """When to start a dead part again."""
        since = dict.fromkeys((part.name for part in parts), time.monotonic())
        given_up: set[str] = set()
        while not self._asked.wait(POLL_S):
            now = time.monotonic()
            for part in parts:
                if part.name in given_up:
                    continue
                if part.name in due:
                    if now >= due[part.name]:
                        del due[part.name]
                        since[part.name] = now
                        with contextlib.suppress(CollmError, OSError):  # then it has ended again, and counts as such
                            part.start()
                        self.changed()
                    continue
                reason = part.ended()
                if not reason:
                    continue
                part.stop()
                count = 0 if now - since[part.name] > STEADY_S else self.restarts.get(part.name, 0)
                if count >= MAX_RESTARTS:
                    given_up.add(part.name)
                    self.report(f"{part.name} ended ({reason}) {count} times in a row: it is not started again")
                    continue
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**count)
                self.restarts[part.name] = count + 1
                due[part.name] = now + pause_s
                self.report(f"{part.name} ended ({reason}); starting it again in {pause_s:g} s")


def _stop(group: Sequence[Part]) -> None:
    """Stop the parts of a group at the same time."""
    with contextlib.ExitStack() as each:
        for part in group:
            each.callback(part.stop)
            part.ask_to_stop()


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Within, this process cannot be asked to end: it is about to, within bounded time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
