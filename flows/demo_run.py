"""The demo's run: start state, calibration, windows, scores, end state. The cluster is up already."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from db import rounds
from db.records import AdapterName, Heartbeat, Publishing, RoundRecord, Split, UpdateRecord
from flows.demo_fleet import QUIET_S, DemoFleet
from flows.demo_load import Load, make_load, read_clients
from flows.demo_quality import Quality, Served
from flows.demo_record import LocalSwap, Played, Record
from flows.demo_schedule import RoundSchedule
from flows.demo_screen import Screen, WindowProgress
from flows.demo_watch import Watch
from flows.round_state import is_final
from flows.site import Site, open_site
from infra.settings import Settings
from serving.load.capacity import Capacity, Sweep, measure, prefill_rate
from serving.load.model import Call
from serving.load.open_loop import replay
from serving.load.schema import Kind
from serving.load.sender import Target
from serving.load.traces import Window
from serving.model import Slo

WORKER_S = 90.0
"""How long the worker may take to put its deployment into Prefect."""
SWITCH_S, END_S, MIN_GAP_S = 4.0, 50.0, 8.0
"""Allowed for bringing the fleet into a window's state, for the end of the run, for scores at least."""
LAST_S = 30.0
"""For measuring what is left at the end, however late it is."""
TRAINED = {"float32": (1.0, 3.2)}
TRAINED_SHORT = (3.0, 4.4)
"""How many times the settings' tokens a round asks for, and the fleet's capacity (requests per second) at which these
are trained in one to two windows beside the load, by type of the backbone: of a CPU without bfloat16, and of one with.
"""
MOST_FASTER = 4.0
KINDS: Mapping[str, Kind] = {"S": "static", "C": "collm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line chooses."""

    order: str = "SCCSCC"
    window_s: float = 45.0
    load: float = 0.53
    """Offered over measured capacity."""
    total_s: float = 580.0
    """For everything, the cluster's start included: what windows leave of it goes to scores."""
    settle_s: float = 60.0
    """For a round that runs when a static window is to begin."""
    last_settle_s: float = 75.0
    """For the round that runs when the last window ends."""
    quiet_s: float = QUIET_S
    sweep: Sweep = field(default_factory=Sweep)


class Run:
    """One run of the demo."""

    def __init__(self, site: Site, schedule: RoundSchedule, *, gateway: str, options: Options, screen: Screen) -> None:
        """``gateway``: its base URL."""
        self.site = site
        self.options = options
        self.screen = screen
        self.adapter = AdapterName(site.settings.rounds.adapter)
        self.fleet = DemoFleet(site, schedule, self.adapter, quiet_s=options.quiet_s)
        self.schedule = schedule
        self.quality = Quality(site, self.adapter, {})
        self.slo = Slo(ttft_s=site.settings.slo.ttft_s, tpot_s=site.settings.slo.tpot_s)
        self.target = Target(url=gateway, slo=self.slo)
        self.played: list[Played] = []
        self.told = 0
        """Rounds that the screen has been told of."""
        self.progress: WindowProgress | None = None
        self.watch = Watch(self.fleet, seen=self.show)

    async def run(self, shards: Sequence[Path], model_dir: Path) -> Record:
        """Do everything and return what was recorded."""
        # Before anything else: the worker is starting, and its first round belongs into the first C window.
        await self.fleet.set_mode(training=False, publishing=Publishing.OFF)
        clients = read_clients(self.site.settings, shards)
        self.quality.reports = {name: client.splits[Split.REPORT] for name, client in clients.items()}
        load = make_load(self.site.settings, clients, model_dir, seconds=self.options.window_s)
        await asyncio.gather(self.schedule.wait_ready(WORKER_S), self.measure_start())
        self.told = rounds_before = len(await self.fleet.rounds())
        await self.fleet.static(settle_s=self.options.settle_s)
        load = await self.fit(load)
        capacity = await self.calibrate(load)
        await self.size_rounds(capacity)
        window = self.scale(load, capacity)
        calls = load.calls(window)
        watching = asyncio.create_task(self.watch.run())
        try:
            for i, letter in enumerate(self.options.order):
                await self.play(letter, f"{letter}{self.options.order[: i + 1].count(letter)}", window, calls)
                await self.between(letter, self.options.order[i + 1 :])
        finally:
            watching.cancel()
        await self.wind_up()
        status = next(iter((await self.fleet.statuses()).values()))
        return Record(
            settings=self.site.settings,
            model_dir=model_dir,
            backbone=status.backbone,
            dtype=status.dtype,
            clients=clients,
            capacity=capacity,
            window=window,
            lengths=load.lengths,
            calls=calls,
            adapter=await self.fleet.record(),
            played=self.played,
            quality=self.quality.known,
            served=await self.served(),
            versions=await self.fleet.versions(),
            newest=(await self.fleet.promoted())[-1],
            rounds=[(one, await self.updates(one)) for one in (await self.fleet.rounds())[rounds_before:]],
            swaps=self.swaps(),
            samples=self.watch.samples,
        )

    async def measure_start(self) -> None:
        """Score the initial version."""
        uid = (await self.fleet.record()).initial_uid
        self.screen.now("measuring the initial version")
        measured = await self.quality.measure((await self.served())[uid])
        self.screen.say(f"cross-entropy at the start: {measured.pooled:.4f} ({by_client(measured.ce)})")

    async def fit(self, load: Load) -> Load:
        """Choose prompt lengths that this machine can serve within the SLO."""
        self.screen.now("measuring how fast prompts are computed")
        rate = await prefill_rate(
            self.target, load.mix(), callers=self.site.settings.replicas, seconds=self.options.sweep.measure_s
        )
        fitted = load.fitted(rate, self.slo)
        self.screen.say(
            f"prompts: {rate:.0f} tokens/s; trace lengths x {fitted.lengths.context:.4f}, "
            f"at most {fitted.lengths.max_context_tokens} tokens"
        )
        return fitted

    async def calibrate(self, load: Load) -> Capacity:
        """Measure what the fleet sustains within the SLO."""
        self.screen.now("measuring capacity")
        capacity = await measure(self.target, load.mix(), self.slo, self.options.sweep)
        levels = ", ".join(f"{x.concurrency}: {x.rate:.2f}/s ({x.attainment:.0%} in SLO)" for x in capacity.levels)
        self.screen.say(f"capacity {capacity.rate:.2f} requests/s within the SLO; in flight: {levels}")
        return capacity

    async def size_rounds(self, capacity: Capacity) -> None:
        """Choose the tokens of every round, so that training reaches into the second of two C windows."""
        least = self.site.settings.rounds.tokens
        status = next(iter((await self.fleet.statuses()).values()))
        tokens = round_tokens(least, capacity.rate, status.dtype)
        if tokens > least:
            await self.schedule.set_tokens(tokens)
        self.screen.say(f"each client trains {tokens} tokens in a round")

    def scale(self, load: Load, capacity: Capacity) -> Window:
        """Cut the window that offers the wanted share of the capacity, and say so."""
        window = load.window(load.count(capacity_rps=capacity.rate, share=self.options.load))
        self.screen.say(
            f"load: {len(window.arrivals)} arrivals in {window.seconds:g} s = {window.rate:.2f}/s, "
            f"{window.rate / capacity.rate:.0%} of capacity; trace time x {window.time_scale:.2f} from "
            f"{window.start_s:g} s on, dispersion {window.dispersion:.2f}"
        )
        return window

    async def play(self, letter: str, name: str, window: Window, calls: Sequence[Call]) -> None:
        """Bring the fleet into a window's state, replay, let a round finish, score what served."""
        kind = KINDS[letter]
        self.screen.now(f"{name}: bringing the fleet into its state")
        await (self.fleet.static(settle_s=self.options.settle_s) if kind == "static" else self.fleet.collm())
        self.progress = WindowProgress(
            self.screen, name=name, arrivals=len(calls), seconds=window.seconds, slo=self.slo, adapter=self.adapter
        )
        before, begun_s = await self.fleet.counters(), self.site.clock.wall()
        outcomes = await replay(self.target, calls, progress=self.progress.outcome)
        after = await self.fleet.counters()
        played = Played(
            name=name,
            kind=kind,
            begun_s=begun_s,
            seconds=window.seconds,
            outcomes=outcomes,
            train_tokens=after.train_tokens - before.train_tokens,
            train_tokens_while_decoding=after.train_tokens_while_decoding - before.train_tokens_while_decoding,
        )
        self.played.append(played)
        self.screen.say(
            f"{name}: {self.progress.good} of {len(calls)} within SLO, {self.progress.failed} failed, "
            f"{played.train_tokens} tokens trained ({played.train_tokens_while_decoding} while decoding)"
        )
        self.progress = None

    async def between(self, letter: str, left: str) -> None:
        """Before a static window: let the round finish, then score what served. ``left``: the windows to come.

        From one C window to the next everything goes on, the round included.
        """
        await self.fleet.statuses()
        await self.tell_rounds()
        if letter != "C" or not left.startswith("S"):
            return
        self.screen.now("letting the round finish")
        await self.fleet.settle(self.options.settle_s)
        await self.tell_rounds()
        await self.catch_up(self.spare_s(left) / (1 + left.count("CS")))

    def spare_s(self, left: str) -> float:
        """Return the seconds that the windows ``left`` and the rounds to wait for leave for scores."""
        settles = (left + "S").count("CS")
        needed = len(left) * (self.options.window_s + SWITCH_S) + settles * self.options.settle_s + END_S
        return max(MIN_GAP_S, self.options.total_s - self.screen.elapsed_s - needed)

    async def catch_up(self, budget_s: float) -> None:
        """Score the versions that answered so far, while the time lasts."""
        await self.fleet.statuses()
        answers = Counter(o.uid for played in self.played for o in played.outcomes if o.timing is not None and o.uid)
        self.screen.now("measuring the versions that served")
        left = await self.quality.catch_up(answers, await self.served(), budget_s=budget_s)
        if left:
            self.screen.say(f"{left} versions are left to be measured later")

    async def tell_rounds(self) -> None:
        """Say what has become of the rounds since this was last said."""
        for one in (await self.fleet.rounds())[self.told :]:
            if not is_final(one.state):
                self.screen.say(f"round {one.number} is {one.state.value}")
                return
            ce = "" if one.ce_before is None or one.ce_after is None else f", {one.ce_before:.4f} → {one.ce_after:.4f}"
            self.screen.say(f"round {one.number} {one.state.value}{ce}: {one.reason}")
            self.told += 1

    async def wind_up(self) -> None:
        """Leave the newest promoted version in force, rounds paused; score it, and what answered while time lasts."""
        await self.fleet.settle(self.options.last_settle_s)
        newest = (await self.fleet.promoted())[-1]
        if newest.uid != (await self.fleet.record()).desired_uid:
            await self.fleet.force(newest.uid, "end of the demo: newest promoted version")
        versions = await self.served()
        measured = await self.quality.measure(versions[newest.uid])
        await self.catch_up(max(LAST_S, self.options.total_s - self.screen.elapsed_s))
        self.screen.say(f"cross-entropy at the end: {measured.pooled:.4f} ({by_client(measured.ce)})")

    async def served(self) -> dict[str, Served]:
        """Return every version that may have answered, by uid."""
        federated = await self.fleet.versions()
        found = {str(v.uid): Served(v.uid, str(v.number), v.store_key, v.parent_uid, federated=True) for v in federated}
        uid_of = {str(v.number): str(v.uid) for v in federated}
        for (replica, _, uid), swap in self.fleet.swaps.items():
            base_uid = uid_of.get(swap.label.partition("+")[0])
            if uid not in found and swap.store_key is not None and base_uid is not None:
                found[uid] = Served(uid, f"{replica}:{swap.label}", swap.store_key, base_uid)
        return found

    async def updates(self, one: RoundRecord) -> list[UpdateRecord]:
        """Return what clients returned in a round."""
        return await self.site.transact(lambda s: rounds.updates(s, one.id))

    def swaps(self) -> list[LocalSwap]:
        """Return all swaps seen."""
        return [
            LocalSwap(
                at_s=swap.at_s,
                replica=replica,
                uid=swap.uid,
                label=swap.label,
                kind=swap.kind,
                pause_ms=swap.pause_ms,
                delay_ms=swap.delay_ms,
                by_demo=self.fleet.by_demo(swap.at_s),
            )
            for (replica, _, _), swap in self.fleet.swaps.items()
        ]

    def show(self, beats: Sequence[Heartbeat]) -> None:
        """Put the fleet on the screen while a window plays."""
        if self.progress is not None:
            self.progress.beats(beats)


def round_tokens(least: int, capacity_rps: float, dtype: str) -> int:
    """Return the tokens that a client is asked for, by the fleet's capacity and the type it computes in."""
    times, usual_rps = TRAINED.get(dtype, TRAINED_SHORT)
    return int(least * times * min(max(capacity_rps / usual_rps, 1.0), MOST_FASTER))


def by_client(ce: Mapping[str, float]) -> str:
    """Return cross-entropies for people."""
    return ", ".join(f"{client} {value:.4f}" for client, value in sorted(ce.items()))


async def run_demo(
    settings: Settings, *, gateway: str, shards: Sequence[Path], model_dir: Path, options: Options, screen: Screen
) -> Record:
    """Run the demo on a cluster that is up; ``settings`` name its database and token."""
    async with open_site(settings) as site, RoundSchedule(settings.prefect_api_url) as schedule:
        run = Run(site, schedule, gateway=gateway, options=options, screen=screen)
        return await run.run(shards, model_dir)
