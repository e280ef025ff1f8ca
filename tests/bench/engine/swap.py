"""What a swap costs: the engine thread's own work for it, and what callers see.

The pause is measured while eight requests are decoding and a round trains: a snapshot of the shadow is published,
copied into its place and put in force, then the next one. It is ``Swap.pause_ms``, which counts the snapshot, the copy
(none where it is made beside the thread) and the flip. Training rows are short, so that new optimizer steps are many.

Gaps between tokens are measured without training: versions are published one after the other, each with a rest before
the next, while eight long answers are decoding. A gap counts as *across* if it overlaps the time from a version's
handing in to its flip.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np

from adapters.model import LoraWeights, Version
from db.records import Epoch, RoundId, Split, VersionUid
from serving.model import RequestId, Slo
from serving.replica.loop import Replica
from serving.rows import Row
from serving.wire.control import Swap
from tests.bench.engine.figures import Figure, Report
from tests.bench.engine.options import CODE, PROMPT, SEED, Options
from tests.bench.engine.ours import bench_settings
from tests.bench.engine.peft_peer import LR
from tests.bench.engine.site import FIRST, Site, running

CALLERS = 8
SLO = Slo(ttft_s=2.0, tpot_s=0.5)
"""Training gets the larger part of the time, and there are steps between its slices."""
NEW_TOKENS = 64
SHORT = tuple(Row(f"{i}", f"{i + 1}") for i in range(64))
GAPS_PER_SWAP = 8
"""Engine steps from one version's flip to the next one's handing in."""
LONG_ANSWER = 900


def measure(report: Report, options: Options) -> None:
    """Both figures, each with a replica of its own."""
    splits = {Split.TRAIN: SHORT, Split.GATE: SHORT[:8]}
    with running(bench_settings(options.threads), splits) as site:
        pause(site, report, options)
    with running(bench_settings(options.threads, prefix_cache=False), {}) as site:
        gap(site, report, options)


def pause(site: Site, report: Report, options: Options) -> None:
    """Publish one snapshot of a round's shadow after the other, under load."""
    found: list[Swap] = []
    steps = set()
    with callers(site):
        site.train(on=True, publish=True)
        site.start_round(rows_per_step=1, lr=LR, swap_every=0, seed=SEED)
        wait_until(lambda: site.meter.work is not None and site.meter.work.steps > 0)
        begun_s = time.monotonic()
        for number in range(options.swaps):
            uid = VersionUid(f"snapshot {number}")
            steps.add(site.call(partial(publish_shadow, site, uid, number)))
            wait_until(partial(serves, site, uid))
            found.append(site.replica.residency.swaps[-1])
        seconds = time.monotonic() - begun_s
        status = site.call(lambda replica: replica.background.round_status("bench"))
        assert status.state == "running", status.reason
        site.train(on=False, publish=False)
    pauses = [swap.pause_ms for swap in found]
    blocks = [float(np.percentile(block, 99)) for block in np.array_split(np.array(pauses), options.repeats)]
    report.add(Figure.of("swap_pause_p99_ms", blocks, value=float(np.percentile(pauses, 99)), runs=len(pauses)))
    report.note(
        "swap_pause_p99_ms",
        {
            "p50_ms": float(np.median(pauses)),
            "max_ms": max(pauses),
            "delay_p50_ms": float(np.median([swap.delay_ms for swap in found])),
            "decoding": CALLERS,
            "optimizer_steps": len(steps),
            "seconds": seconds,
            "value": "p99 of all; the interval is of the p99 of as many parts as there are repeats",
        },
    )


@contextmanager
def callers(site: Site) -> Iterator[None]:
    """Keep ``CALLERS`` requests decoding: each that ends is followed by another."""
    chance = np.random.default_rng(SEED)
    asked: set[RequestId] = set()

    def begin() -> None:
        tokens = [int(t) for t in chance.integers(100, site.vocab, PROMPT)]
        asked.add(site.ask(tokens, NEW_TOKENS, SLO, scheduled_s=time.monotonic()))

    def follow(request_id: RequestId) -> None:
        if request_id in asked:
            asked.remove(request_id)
            del site.answers[request_id]
            begin()

    site.on_end = follow

    def begin_all(replica: Replica) -> None:
        for _ in range(CALLERS):
            begin()

    site.call(begin_all)
    try:
        yield
    finally:
        site.on_end = lambda request_id: None
        site.call(lambda replica: None)  # whatever is under way may have begun another
        site.cancel(list(asked))


def gap(site: Site, report: Report, options: Options) -> None:
    """Publish versions beside long answers, and compare the gaps."""
    site.call(lambda replica: replica.residency.start_round(CODE, RoundId("bench"), FIRST, Epoch(1)))
    versions = [site.weights, renewed(site.weights)]
    blocks = []
    for block in range(options.repeats + 1):
        swaps = max(4, options.swaps // 5 // options.repeats)
        gaps = one_block(site, versions, first=block * swaps, swaps=swaps)
        if block:  # the first one is to warm up
            blocks.append(gaps)
    across, quiet = ([gap for pair in blocks for gap in pair[i]] for i in (0, 1))
    p99 = [[float(np.percentile(gaps, 99)) for gaps in pair] for pair in blocks]
    value = float(np.percentile(across, 99) / np.percentile(quiet, 99))
    report.add(Figure.of("swap_gap", [a / q for a, q in p99], value=value))
    report.note(
        "swap_gap",
        {
            "across_p50_ms": 1000 * float(np.median(across)),
            "quiet_p50_ms": 1000 * float(np.median(quiet)),
            "across_p99_ms": 1000 * float(np.percentile(across, 99)),
            "quiet_p99_ms": 1000 * float(np.percentile(quiet, 99)),
            "across": len(across),
            "quiet": len(quiet),
            "value": "ratio of the p99 of all gaps; the interval is of single blocks",
        },
    )


def one_block(
    site: Site, versions: Sequence[LoraWeights], *, first: int, swaps: int
) -> tuple[list[float], list[float]]:
    """Return the gaps across swaps and the others, in seconds, of a batch of long answers."""
    chance = np.random.default_rng(first)
    prompts = [[int(t) for t in chance.integers(100, site.vocab, PROMPT)] for _ in range(CALLERS)]
    ids = [site.ask(tokens, LONG_ANSWER, SLO, scheduled_s=time.monotonic()) for tokens in prompts]
    token_s = site.answers[ids[-1]].token_s

    def rest() -> None:
        until = len(token_s) + GAPS_PER_SWAP
        wait_until(lambda: len(token_s) >= until)

    spans: list[tuple[float, float]] = []
    for number in range(first, first + min(swaps, LONG_ANSWER // (3 * GAPS_PER_SWAP))):
        rest()
        uid = VersionUid(f"local {number}")
        handed_s = site.call(partial(hand_in, uid=uid, weights=versions[number % 2], number=number))
        wait_until(partial(serves, site, uid))
        spans.append((handed_s, time.monotonic()))
    rest()

    site.cancel(ids)
    across: list[float] = []
    quiet: list[float] = []
    for before_s, at_s in pairwise(token_s):
        overlaps = any(before_s < end_s and begin_s < at_s for begin_s, end_s in spans)
        (across if overlaps else quiet).append(at_s - before_s)
    return across, quiet


def publish_shadow(site: Site, uid: VersionUid, number: int, replica: Replica) -> int:
    """Publish the shadow as it is after its latest optimizer step, and return which one that is."""
    work, begin_s = site.meter.work, time.monotonic()
    assert work is not None
    weights = work.shadow()
    copied_s = time.monotonic() - begin_s
    version = Version(adapter=CODE, uid=uid, number=1, local_steps=number + 1)
    lineage = replica.residency.pair(CODE).lineage
    replica.residency.publish(version, weights, lineage, ready_s=begin_s, copied_s=copied_s)
    return work.steps


def serves(site: Site, uid: VersionUid) -> bool:
    """Whether a version is in force."""
    return site.replica.residency.pair(CODE).active.uid == uid


def hand_in(replica: Replica, *, uid: VersionUid, weights: LoraWeights, number: int) -> float:
    """Publish a version, as a round does; return when."""
    at_s = time.monotonic()
    version = Version(adapter=CODE, uid=uid, number=1, local_steps=number + 1)
    replica.residency.publish(version, weights, replica.residency.pair(CODE).lineage, ready_s=at_s)
    return at_s


def renewed(weights: LoraWeights) -> LoraWeights:
    """Return other factors of the same shapes."""
    tensors = {name: np.ascontiguousarray(array + np.float32(1e-4)) for name, array in weights.tensors.items()}
    return LoraWeights(spec=weights.spec, tensors=tensors)


def wait_until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait. Raises ``TimeoutError``."""
    until_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(0.005)
