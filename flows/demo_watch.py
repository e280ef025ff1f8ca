"""What the fleet says of itself, once a second, beside the load."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from db.records import Heartbeat
from flows.demo_fleet import DemoFleet
from infra.errors import CollmError
from serving.load.schema import Sample

EVERY_S = 1.0
log = structlog.get_logger()


class Watch:
    """Samples heartbeats until it is cancelled; ``samples`` are in wall-clock seconds."""

    def __init__(self, fleet: DemoFleet, *, seen: Callable[[Sequence[Heartbeat]], None]) -> None:
        """``seen`` is told of each sample, for live progress."""
        self.fleet = fleet
        self.seen = seen
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Sample for ever; what cannot be read is left out."""
        while True:
            try:
                beats = await self.fleet.beats()
            except CollmError as e:
                log.warning("sample_lost", error=e.message)
            else:
                self.samples.append(sample(beats, self.fleet.adapter, self.fleet.site.clock.wall()))
                self.seen(beats)
            await asyncio.sleep(EVERY_S)


def sample(beats: Sequence[Heartbeat], adapter: str, at_s: float) -> Sample:
    """Return one moment's account of the fleet."""
    return Sample(
        at_s=at_s,
        train_share={beat.replica_id: round(beat.train_share, 4) for beat in beats},
        running={beat.replica_id: beat.running for beat in beats},
        queued={beat.replica_id: beat.queued for beat in beats},
        active={beat.replica_id: beat.active.get(adapter, "") for beat in beats},
    )
