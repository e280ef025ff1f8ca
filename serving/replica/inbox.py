"""How other threads reach the engine's thread: calls that it runs between two steps."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from infra.errors import EngineDead

T = TypeVar("T")


def promise() -> "Future[T]":
    """Return a future that its receiver cannot cancel: the work goes on whether or not anybody waits."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


class Inbox:
    """A queue of calls. ``post`` and ``call`` from any thread, ``drain`` from the engine's."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._some = threading.Condition()
        self._closed = False

    def post(self, call: Callable[[], None]) -> bool:
        """Have ``call`` run; it must not raise. False: after ``close`` nothing runs any more."""
        with self._some:
            if self._closed:
                return False
            self._calls.append(call)
            self._some.notify()
            return True

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Have ``function`` run and return its result, or its exception, as a future."""
        future: Future[T] = promise()

        def run() -> None:
            try:
                future.set_result(function())
            except EngineDead as error:
                future.set_exception(error)
                raise
            except Exception as error:
                future.set_exception(error)

        with self._some:
            if self._closed:
                future.set_exception(EngineDead("the engine has stopped"))
                return future
            self._calls.append(run)
            self._some.notify()
        return future

    def drain(self, wait_s: float) -> list[Callable[[], None]]:
        """Return what has come, waiting up to ``wait_s`` if nothing has."""
        with self._some:
            if not self._calls and wait_s > 0:
                self._some.wait(wait_s)
            return self._take()

    def close(self) -> list[Callable[[], None]]:
        """Refuse what comes from now on and return what is left."""
        with self._some:
            self._closed = True
            return self._take()

    def _take(self) -> list[Callable[[], None]]:
        # A signal handler may post between any two of these lines, in this very thread.
        calls = self._calls
        self._calls = deque()
        return list(calls)
