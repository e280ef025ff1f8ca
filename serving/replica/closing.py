"""Training that has ended is closed beside the engine's thread: freeing what it holds takes up to ten milliseconds.

Torch lets other threads run while it gives memory back. Host copies of versions are not handed over: numpy does not.
"""

from concurrent.futures import Executor, Future

from serving.ports import Work


class Closer:
    """Closes work that nothing uses any more. Engine thread only."""

    def __init__(self, thread: Executor | None = None) -> None:
        """``thread`` runs one call at a time, in order; without one work is closed at once."""
        self._thread = thread
        self._latest: Future[None] | None = None

    def close(self, work: Work) -> None:
        """Close it soon; what it held is freed there, whoever drops it last."""
        if self._thread is None:
            work.close()
        else:
            self._latest = self._thread.submit(work.close)

    @property
    def idle(self) -> bool:
        """Whether everything is closed: until then no other training may take memory, which is planned for one."""
        return self._latest is None or self._latest.done()
