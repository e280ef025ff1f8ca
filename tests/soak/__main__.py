"""``make soak``: a replica under more load than it can carry, with everything else going on; writes soak.json.

One ``collm replica``, directed by an embedded Postgres, gets requests at 1.5 times its measured capacity for some
minutes: whole and streamed, greedy and sampled, several adapters, callers who leave, bad requests. Meanwhile versions
are staged, promoted, rolled back and refused, and rounds train and publish local versions. At the end nothing may be
left over, memory must be flat, and a fresh engine with nothing but its version must give every kept answer again,
token by token. Exits with 1 and a list if anything is not so.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx

from adapters.model import LoraWeights
from db.records import AdapterName, Split
from infra.errors import NoReplica
from serving.client import HttpReplicaClient
from serving.datasets import sample_shards
from serving.shard import load_shard
from serving.wire.control import Status, Swap
from tests.soak.control import Operator
from tests.soak.replay import Replayed, Replayer, read, reproduce
from tests.soak.sender import ANSWER_S, Caller, Kept, Outcome, open_loop
from tests.soak.site import QUEUE, ROWS, Site, running
from tests.soak.traffic import OVERLOAD, Mix
from tests.soak.verdict import Check, Seen, checks, memory_growth
from tests.soak.vitals import Vitals, errors_logged, samples, vitals

CONTROL_S = 60.0
"""A control action that takes longer is an error; a busy machine may take some seconds for what takes milliseconds."""
MEASURING = -1
"""Index of requests from before the load."""
SAMPLE_S = 2.0
MEASURE_S = 120.0
"""The capacity's measurement takes no longer than this and the last answers."""
QUIET_S = 60.0
"""A replica that nobody asks anything must be quiet by then."""


def main() -> int:
    """Run. 0: all is well; 1: something is not, and is listed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default: 10)")
    parser.add_argument("--adapters", type=int, default=6, help="more than places (default: 6)")
    parser.add_argument("--places", type=int, default=4, help="for versions in the engine (default: 4)")
    parser.add_argument("--replay", type=int, default=400, help="answers to give again at most (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fake", action="store_true", help="the engine without weights, to test the soak itself")
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    args = parser.parse_args()
    names = [AdapterName(name) for name in ("code", *(f"extra-{n}" for n in range(1, args.adapters)))]
    with scratch() as folder:
        with running(folder, names, places=args.places, fake=args.fake) as site:
            soak = Soak(site, names, seed=args.seed)
            asyncio.run(soak.run(args.minutes))
            site.replica.stop()
            exit_code = site.replica.exit_code
        errors = errors_logged(site.log.read_text().splitlines())
        replayed = soak.replay(args.replay)
    seen = soak.seen(args.minutes, errors=errors, exit_code=exit_code, replayed=replayed)
    found = checks(seen)
    args.out.write_text(json.dumps(report(soak, seen, found), indent=1) + "\n")
    for check in found:
        say(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.found}")
    return 0 if all(check.ok for check in found) else 1


class Soak:
    """One run, and what it saw."""

    def __init__(self, site: Site, names: list[AdapterName], *, seed: int) -> None:
        self.site = site
        self.outcomes: list[Outcome] = []
        self.timeline: list[Vitals] = []
        self.swaps: dict[tuple[str, float], Swap] = {}
        self.capacity = 0.0
        rows = load_shard(sample_shards()[1], gate=48, report=100)[Split.TRAIN]
        shape = site.settings.replica.max_total_tokens
        model_id = httpx.get(f"{site.url}/info", trust_env=False).json()["model_id"]
        self._mix = Mix(seed, [row.prompt for row in rows], names, model_id=model_id, max_total_tokens=shape)
        self._random = random.Random(seed)
        self._client = HttpReplicaClient(site.url, site.token, timeout_s=CONTROL_S)
        self.operator = Operator(site, self._client, names, seed)
        self._start_s = time.monotonic()
        self._began_wall_s = 0.0

    async def run(self, minutes: float) -> None:
        """Measure, load, wait for quiet."""
        settings = self.site.settings.replica
        caller = Caller(settings.host, settings.port, self.site.token)
        try:
            self.capacity = await self._measure(caller, seconds=min(15.0, 10 * minutes))
            caller.answer_s = max(ANSWER_S, 4 * (ROWS + QUEUE) / self.capacity)
            say(f"capacity {self.capacity:.2f} requests/s; {minutes:g} minutes at {OVERLOAD} times that")
            await self._quiet()
            self.before = self._vitals()
            await self._load(caller, 60 * minutes)
        finally:
            await caller.aclose()
        say("the load has ended: waiting for quiet")
        self.metrics, self.status = await self._quiet()
        await self.operator.watch()
        await self.operator.know()
        self.after = self._vitals()
        await self._client.aclose()

    async def _measure(self, caller: Caller, seconds: float) -> float:
        """Return the requests per second that are answered while no row is ever free. Raises ``NoReplica``."""
        start, callers = time.monotonic(), ROWS + 2
        ended_s: list[float] = []

        def goes_on(now_s: float) -> bool:
            # A busy machine may not answer one request in the time that should give many.
            return now_s < seconds or (len(ended_s) < 3 * callers and now_s < MEASURE_S)

        async def one_after_another() -> None:
            while goes_on(now_s := time.monotonic() - start):
                outcome = await caller.send(self._mix.good(MEASURING, now_s), lambda: time.monotonic() - start)
                self.outcomes.append(outcome)
                if outcome.end == "answered":
                    ended_s.append(outcome.ended_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(one_after_another())
        # Those that began last ran with ever fewer beside them.
        counted = ended_s[: max(1, len(ended_s) - callers)]
        if not counted:
            raise NoReplica("the replica answered nothing while its capacity was measured")
        return len(counted) / counted[-1]

    async def _load(self, caller: Caller, seconds: float) -> None:
        stopping = asyncio.Event()
        self._began_wall_s = time.time()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(stopping))
            group.create_task(self.operator.run(stopping, pause_s=min(2.5, seconds / 40)))
            await open_loop(caller, self._mix.load(self.capacity, seconds), self._ended)
            stopping.set()

    def _ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if len(self.outcomes) % 200 == 0:
            ends = Counter(o.end for o in self.outcomes)
            say(f"{outcome.ended_s:.0f} s: {dict(ends)}, swaps {len(self.swaps)}")

    async def _watch(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            self.timeline.append(await asyncio.to_thread(self._vitals))
            self._note(await self._client.status())
            await self.operator.watch()
            try:
                async with asyncio.timeout(SAMPLE_S):
                    await stopping.wait()
            except TimeoutError:
                continue

    async def _quiet(self) -> tuple[dict[str, dict[str, float]], Status]:
        """Wait until nothing is under way; what is still there after ``QUIET_S`` is for the verdict."""
        deadline = time.monotonic() + QUIET_S
        async with httpx.AsyncClient(base_url=self.site.url, trust_env=False) as http:
            while True:
                await asyncio.sleep(1.5)  # gauges are set twice a second
                metrics = samples((await http.get("/metrics")).text)
                status = await self._client.status()
                self._note(status)
                trains = status.round is not None and status.round.state == "running"
                busy = status.queued or status.running or status.pins
                if time.monotonic() > deadline or not (busy or trains):
                    return metrics, status
                if trains and status.round is not None and not busy:
                    await self._client.stop_round(status.round.round_id)

    def _note(self, status: Status) -> None:
        self.swaps |= {(swap.uid, swap.at_s): swap for swap in status.swaps}

    def _vitals(self) -> Vitals:
        pid = self.site.replica.pid
        assert pid is not None
        return vitals(pid, self._start_s)

    # After the end.

    def crossing(self, outcome: Outcome) -> bool:
        """Return whether the adapter's version changed while the answer was given."""
        assert outcome.kept is not None
        if outcome.ask.index == MEASURING:  # before the swaps began
            return False
        begin, end = (self._began_wall_s + at_s for at_s in (outcome.sent_s, outcome.ended_s))
        return any(s.adapter == outcome.kept.adapter and begin < s.at_s < end for s in self.swaps.values())

    def chosen(self, most: int) -> list[Kept]:
        """Return the answers to give again: half of them, if there are as many, saw a swap."""
        answered = [o for o in self.outcomes if o.kept is not None]
        self._random.shuffle(answered)
        self.across = [o for o in answered if self.crossing(o)]
        first = self.across[: most // 2]
        rest = [o for o in answered if o not in first][: most - len(first)]
        return [o.kept for o in (*first, *rest) if o.kept is not None]

    def replay(self, most: int) -> Replayed:
        """Give answers again."""
        site = self.site

        def weights(uid: str) -> LoraWeights:
            return read(site.store.get, site.backbone, site.spec, self.operator.keys[uid])

        return reproduce(Replayer(site.settings), self.chosen(most), weights, progress=say)

    def seen(self, minutes: float, *, errors: Counter[str], exit_code: int | None, replayed: Replayed) -> Seen:
        """Return what the verdict needs."""
        return Seen(
            minutes=minutes,
            outcomes=self.outcomes,
            operator=self.operator,
            metrics=self.metrics,
            status=self.status,
            timeline=self.timeline,
            before=self.before,
            after=self.after,
            errors=errors,
            exit_code=exit_code,
            swaps=Counter(swap.kind for swap in self.swaps.values()),
            across=len(self.across),
            replayed=replayed,
        )


def report(soak: Soak, seen: Seen, found: Sequence[Check]) -> dict[str, object]:
    """Return what soak.json holds."""
    answers = [o for o in seen.outcomes if o.end == "answered"]
    pauses = sorted(swap.pause_ms for swap in soak.swaps.values())
    replayed = seen.replayed
    return {
        "ok": all(check.ok for check in found),
        "checks": [asdict(check) for check in found],
        "minutes": seen.minutes,
        "capacity_per_s": soak.capacity,
        "dtype": seen.status.dtype,
        "requests": Counter(o.end for o in seen.outcomes),
        "requests_by_kind": Counter(f"{o.ask.kind}: {o.end}" for o in seen.outcomes),
        "answer_s_median": statistics.median(o.ended_s - o.sent_s for o in answers) if answers else None,
        "control": dict(sorted(seen.operator.done.items())),
        "swaps": dict(seen.swaps),
        "swap_pause_ms_median": statistics.median(pauses) if pauses else None,
        "swap_pause_ms_max": pauses[-1] if pauses else None,
        "train_tokens": seen.status.train_tokens_total,
        "train_tokens_while_decoding": seen.status.train_tokens_decoding_total,
        "prefix_tokens": {
            "looked_up": sum(seen.metrics.get("collm_prefix_looked_up_tokens_total", {}).values()),
            "hit": sum(seen.metrics.get("collm_prefix_hit_tokens_total", {}).values()),
        },
        "place_waits": sum(seen.metrics.get("collm_place_waits_total", {}).values()),
        "memory_growth": memory_growth(seen.timeline),
        "pss_mb": [round(v.pss_bytes / 1e6, 1) for v in seen.timeline],
        "threads": [seen.before.threads, seen.after.threads],
        "descriptors": [seen.before.fds, seen.after.fds],
        "replayed": {
            "answers": replayed.answers,
            "tokens": replayed.tokens,
            "versions": replayed.versions,
            "across_a_swap": seen.across,
            "mismatches": [m.told() for m in replayed.mismatches],
            "controls": replayed.controls,
            "controls_alike": replayed.controls_alike,
        },
    }


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for this run alone."""
    with tempfile.TemporaryDirectory(prefix="collm-soak-") as name:
        yield Path(name)


def say(line: str) -> None:
    """Tell whoever waits."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
