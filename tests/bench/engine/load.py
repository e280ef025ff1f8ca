"""Serving within its SLO while training runs: open-loop Poisson arrivals on the replica's real loop.

For each load, windows without and with training take turns, on the same arrivals; before each pair comes a spell in
which nothing but training runs. With b and t the shares of the two windows in which the engine was busy with steps for
requests, the ceiling on training is

    idle rate × (1 − min(b, t))

Training makes requests wait a little and so share steps, whence t may be smaller than b: the smaller of the two is what
serving needs when it has the time that the SLO gives it.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from db.records import Split
from infra.settings import load_settings
from serving.datasets import sample_shards
from serving.model import Slo
from serving.shard import load_shard
from tests.bench.engine.figures import Figure, Report
from tests.bench.engine.options import PROMPT, SEED, Options
from tests.bench.engine.ours import bench_settings
from tests.bench.engine.peft_peer import LR
from tests.bench.engine.site import Answer, Site, running
from tests.bench.engine.training import ROWS_PER_STEP

SLO = Slo(ttft_s=0.8, tpot_s=0.2)
NEW_TOKENS = (16, 48)
"""Of an answer: evenly distributed, both ends included."""
KEEP = 0.95
"""Attainment that counts as within the SLO."""
SATURATED_S = 6.0
"""How long every row is kept busy, for a first idea of the capacity."""
PROBE_S = 15.0
"""Of arrivals at one rate, while the capacity is searched."""
PROBES = 5
IDLE_S = 4.0
"""Of training alone before each pair of windows."""
SWAP_EVERY = 8


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a window."""

    offset_s: float
    tokens: tuple[int, ...]
    new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one window gave."""

    arrivals: int
    good: int
    serving_share: float
    """Part of the window in which the engine ran steps for requests."""
    tokens_per_s: float
    """Trained; of whole rows, padding not counted."""
    ttft_p95_s: float
    tpot_p95_s: float

    @property
    def attainment(self) -> float:
        """Part of all arrivals that was answered within the SLO."""
        return self.good / self.arrivals if self.arrivals else 1.0


def arrivals(rate: float, window_s: float, *, seed: int, vocab: int) -> list[Arrival]:
    """Return a window of Poisson arrivals; the same seed gives the same ones. No two prompts begin alike."""
    chance = np.random.default_rng(seed)
    found, at_s = [], 0.0
    while (at_s := at_s + chance.exponential(1 / rate)) < window_s:
        tokens = tuple(int(t) for t in chance.integers(100, vocab, PROMPT))
        found.append(Arrival(at_s, tokens, int(chance.integers(NEW_TOKENS[0], NEW_TOKENS[1] + 1))))
    return found


def is_good(answer: Answer) -> bool:
    """Whether a request was answered within the SLO, counted from when it should have been sent."""
    finished = answer.finished
    return finished is not None and finished.ttft_s <= SLO.ttft_s and finished.tpot_s <= SLO.tpot_s


def play(site: Site, due: Sequence[Arrival], window_s: float) -> Window:
    """Send a window of arrivals, wait until all are answered, return the figures."""
    begin_s = time.monotonic()
    ids = []
    for arrival in due:
        time.sleep(max(0.0, begin_s + arrival.offset_s - time.monotonic()))
        ids.append(site.ask(arrival.tokens, arrival.new, SLO, scheduled_s=begin_s + arrival.offset_s))
    end_s = begin_s + window_s
    time.sleep(max(0.0, end_s - time.monotonic()))
    site.wait_for(ids)
    answers = [site.answers.pop(i) for i in ids]
    finished = [a.finished for a in answers if a.finished is not None]
    return Window(
        arrivals=len(due),
        good=sum(map(is_good, answers)),
        serving_share=site.meter.serving_s(begin_s, end_s) / window_s,
        tokens_per_s=site.meter.trained(begin_s, end_s) / window_s,
        ttft_p95_s=float(np.percentile([f.ttft_s for f in finished], 95)) if finished else 0.0,
        tpot_p95_s=float(np.percentile([f.tpot_s for f in finished], 95)) if finished else 0.0,
    )


def saturated(site: Site, rows: int) -> float:
    """Return answers per second with every row busy: more than can be served within the SLO."""
    due = arrivals(1.0, 10_000.0, seed=SEED, vocab=site.vocab)
    mean = sum(NEW_TOKENS) / 2
    begin_s = time.monotonic()
    ids = []
    for arrival in due[: 4 * rows]:
        ids.append(site.ask(arrival.tokens, arrival.new, SLO, scheduled_s=begin_s))
    time.sleep(SATURATED_S)
    end_s = time.monotonic()
    tokens = sum(begin_s <= at_s < end_s for i in ids for at_s in site.answers[i].token_s)
    site.cancel(ids)
    for request_id in ids:
        del site.answers[request_id]
    return tokens / mean / (end_s - begin_s)


def capacity(site: Site, report: Report, rows: int) -> float:
    """Return the highest rate of Poisson arrivals, per second, that is answered within the SLO without training."""
    site.train(on=False, publish=False)
    most = saturated(site, rows)
    low, high = 0.0, 1.2 * most
    tried = []
    for probe in range(PROBES):
        rate = (low + high) / 2
        window = play(site, arrivals(rate, PROBE_S, seed=1000 + probe, vocab=site.vocab), PROBE_S)
        tried.append({"rate_per_s": rate, "attainment": window.attainment, **asdict(window)})
        print(f"  {rate:.2f} requests/s: attainment {window.attainment:.3f}", flush=True)
        low, high = (rate, high) if window.attainment >= KEEP else (low, rate)
    report.note(
        "capacity",
        {
            "per_s": low,
            "meaning": f"highest rate of Poisson arrivals of which {KEEP:.0%} are answered within the SLO, untrained",
            "saturated_per_s": most,
            "tried": tried,
            "ttft_s": SLO.ttft_s,
            "tpot_s": SLO.tpot_s,
            "prompt_tokens": PROMPT,
            "new_tokens": list(NEW_TOKENS),
        },
    )
    return low


def idle_rate(site: Site) -> float:
    """Return tokens per second of training alone."""
    begin_s = time.monotonic()
    time.sleep(IDLE_S)
    end_s = time.monotonic()
    return site.call(lambda replica: site.meter.trained(begin_s, end_s)) / (end_s - begin_s)


def beside(site: Site, report: Report, options: Options, percent: int, rate: float) -> None:
    """One load: windows without and with training, in turn."""
    pairs: list[tuple[float, Window, Window]] = []
    for repeat in range(options.repeats):
        due = arrivals(rate, options.window_s, seed=100 * percent + repeat, vocab=site.vocab)
        site.train(on=True, publish=True)
        idle = idle_rate(site)
        found = {}
        for on in (False, True) if repeat % 2 else (True, False):
            site.train(on=on, publish=on)
            found[on] = play(site, due, options.window_s)
        pairs.append((idle, found[False], found[True]))
    site.train(on=False, publish=False)
    left = [1 - min(without.serving_share, trained.serving_share) for _, without, trained in pairs]
    good = sum(without.good for _, without, _ in pairs), sum(trained.good for _, _, trained in pairs)
    attained = [trained.attainment / max(without.attainment, 1e-9) for _, without, trained in pairs]
    report.note(
        f"load_{percent}",
        {
            "rate_per_s": rate,
            "window_s": options.window_s,
            "arrivals": sum(without.arrivals for _, without, _ in pairs),
            "attainment_without": good[0] / max(1, sum(without.arrivals for _, without, _ in pairs)),
            "attainment_with": good[1] / max(1, sum(trained.arrivals for _, _, trained in pairs)),
            "attain": "good answers of all windows with training over those without; the interval is of single windows",
            "ceiling": "idle_tokens_per_s × (1 − min(serving_share without, serving_share with)), window by window",
            "windows": [
                {"idle_tokens_per_s": idle, "left": part, "without": asdict(without), "with": asdict(trained)}
                for (idle, without, trained), part in zip(pairs, left, strict=True)
            ],
        },
    )
    report.add(Figure.of(f"attain_{percent}", attained, value=good[1] / max(1, good[0])))
    ratios = [t.tokens_per_s / (idle * part) for (idle, _, t), part in zip(pairs, left, strict=True)]
    report.add(Figure.of(f"train_{percent}", ratios))


def measure(report: Report, options: Options) -> None:
    """Capacity first, then each load."""
    settings = bench_settings(options.threads)
    shard = load_shard(sample_shards()[0], gate=settings.replica.gate_rows, report=settings.replica.report_rows)
    with running(settings, {split: shard[split] for split in (Split.TRAIN, Split.GATE)}) as site:
        rows = load_settings().replica.rows
        site.train(on=True, publish=True)
        site.start_round(rows_per_step=ROWS_PER_STEP, lr=LR, swap_every=SWAP_EVERY, seed=SEED)
        # Costs of steps and slices are learnt, buffers made.
        play(site, arrivals(2.0, 6.0, seed=SEED, vocab=site.vocab), 6.0)
        per_s = capacity(site, report, rows)
        for percent in map(int, options.loads.split(",")):
            beside(site, report, options, percent, per_s * percent / 100)
