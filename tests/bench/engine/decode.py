"""Serving without training: decode steps and prompts, ours beside vLLM's and PEFT's, in turn."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from adapters.weights import save_peft
from infra.models import pull
from infra.settings import load_settings
from serving.model import BASE
from tests.bench.engine.figures import Figure, Inputs, Report
from tests.bench.engine.options import PROMPT, Options, pairs
from tests.bench.engine.ours import Ours, our_flags, random_versions
from tests.bench.engine.peft_peer import PeftPeer
from tests.bench.engine.vllm_peer import VllmFailed, VllmPeer

LONG_PROMPT = 512
ROWS = 32
STEPS = 8
"""Decode steps of one run where no output lengths are compared."""
ADAPTERS = ("first", "second")
"""Names at vLLM; ours lie in places 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of a decode step."""

    name: str
    """Of the figure."""
    rows: int
    wear: tuple[int, ...]
    """Places, in turn."""
    lengths: tuple[int, int]
    """Output lengths whose difference is measured at vLLM; ours decodes the same positions."""

    @property
    def places(self) -> list[int]:
        """Of each row."""
        return list(islice(cycle(self.wear), self.rows))

    @property
    def adapters(self) -> list[str | None]:
        """The same for vLLM."""
        return [None if place == BASE else ADAPTERS[place] for place in self.places]

    @property
    def positions(self) -> range:
        """Where the tokens between the two lengths are written."""
        return range(PROMPT + self.lengths[0], PROMPT + self.lengths[1])


ADAPTED = (
    Batch(name="decode_one_b1", rows=1, wear=(0,), lengths=(4, 24)),
    Batch(name="decode_one_b8", rows=8, wear=(0,), lengths=(4, 20)),
    Batch(name="decode_one_b32", rows=32, wear=(0,), lengths=(4, 14)),
    Batch(name="decode_two_b8", rows=8, wear=(0, 1), lengths=(4, 20)),
    Batch(name="decode_two_b32", rows=32, wear=(0, 1), lengths=(4, 14)),
)
PLAIN = (
    Batch(name="decode_none_b1", rows=1, wear=(BASE,), lengths=(4, 24)),
    Batch(name="decode_none_b8", rows=8, wear=(BASE,), lengths=(4, 20)),
    Batch(name="decode_none_b32", rows=32, wear=(BASE,), lengths=(4, 14)),
)


def measure(report: Report, options: Options) -> None:
    """All of it; a vLLM that does not run costs its figures alone."""
    folder = pull(load_settings())
    ours = Ours.load(options.threads, rows=ROWS)
    twin = ours.batch_invariant()
    versions = random_versions(ours.backbone, 8)
    for place, weights in enumerate(versions):
        ours.engine.write(place, weights)
    for row in range(ROWS):
        ours.prefill(row, row % 8, PROMPT)
        twin.prefill(row, row % 8, PROMPT)
    report.flag("ours", our_flags(ours.backbone, options.threads))
    with tempfile.TemporaryDirectory() as scratch:
        saved = {name: Path(scratch, name) for name in ADAPTERS}
        for path, weights in zip(saved.values(), versions, strict=False):
            save_peft(path, weights, base_model=str(folder))
        beside_peft(report, options, ours, PeftPeer(folder, ours.backbone.dtype, saved[ADAPTERS[0]]))
        cost_of_invariance(report, options, ours, twin)
        for batches, adapters in ((PLAIN, {}), (ADAPTED, saved)):
            names = [batch.name for batch in batches] + ["prefill_vllm"] * bool(adapters)
            try:
                with best_vllm(report, options, ours, folder, adapters, batches, Path(scratch)) as best:
                    beside_vllm(report, options, ours, batches, best)
            except VllmFailed as error:
                report.miss([name for name in names if name not in report.figures], f"vLLM: {error}")


def beside_peft(report: Report, options: Options, ours: Ours, peer: PeftPeer) -> None:
    """One adapter; then eight versions beside one, all ours."""
    report.flag("peft", peer.flags())
    positions = range(PROMPT, PROMPT + STEPS)

    def decode(rows: int) -> list[float]:
        return pairs(options.repeats, lambda: ours.decode([0] * rows, positions), lambda: peer.decode(rows, STEPS))

    for rows in (8, 32):
        report.add(Figure.of(f"decode_peft_b{rows}", decode(rows)))
    mixed = [row % 8 for row in range(ROWS)]
    found = pairs(options.repeats, lambda: ours.decode([0] * ROWS, positions), lambda: ours.decode(mixed, positions))
    report.add(Figure.of("decode_eight_b32", found))
    found = pairs(options.repeats, lambda: ours.prefill(0, 0, LONG_PROMPT), lambda: peer.prefill(LONG_PROMPT))
    report.add(Figure.of("prefill_peft", found))


def cost_of_invariance(report: Report, options: Options, ours: Ours, twin: Ours) -> None:
    """How many times as long a step takes in the batch-invariant mode."""
    positions = range(PROMPT, PROMPT + STEPS)

    def decode(rows: int) -> list[float]:
        return pairs(
            options.repeats, lambda: ours.decode([0] * rows, positions), lambda: twin.decode([0] * rows, positions)
        )

    for rows in (1, 8, 32):
        report.add(Figure.of(f"invariant_decode_b{rows}", decode(rows)))
    found = pairs(options.repeats, lambda: ours.prefill(0, 0, LONG_PROMPT), lambda: twin.prefill(0, 0, LONG_PROMPT))
    report.add(Figure.of("invariant_prefill", found))


Asked = Callable[[VllmPeer], float]


def questions(batches: Sequence[Batch]) -> dict[str, Asked]:
    """Return what vLLM is asked for each figure."""

    def decode(batch: Batch) -> Asked:
        return lambda peer: peer.decode(batch.adapters, PROMPT, batch.lengths)

    asked = {batch.name: decode(batch) for batch in batches}
    if any(place != BASE for batch in batches for place in batch.wear):
        asked["prefill_vllm"] = lambda peer: peer.prefill(ADAPTERS[0], LONG_PROMPT)
    return asked


@contextmanager
def best_vllm(
    report: Report,
    options: Options,
    ours: Ours,
    folder: Path,
    adapters: Mapping[str, Path],
    batches: Sequence[Batch],
    scratch: Path,
) -> Iterator[dict[str, VllmPeer]]:
    """Start vLLM eager and compiled; yield the faster one for each figure. Raises ``VllmFailed`` if neither runs."""
    group = "vllm_lora" if adapters else "vllm_plain"
    with ExitStack() as stack:
        peers: list[VllmPeer] = []
        flags: dict[str, Inputs] = {}
        for mode in ("eager", "compiled"):
            peer = VllmPeer(
                python=options.vllm_python(),
                model=folder,
                dtype=str(ours.backbone.dtype).removeprefix("torch."),
                eager=mode == "eager",
                adapters=adapters,
                rows=ROWS,
                log=scratch / f"{group}.log",
            )
            try:
                stack.enter_context(peer)
            except VllmFailed as error:
                flags[mode] = {"failed": str(error)}
                continue
            flags[mode] = peer.flags()
            if peer.eager or peer.compiles:
                peers.append(peer)
            else:
                peer.close()
        report.flag(group, flags)
        if not peers:
            raise VllmFailed("; ".join(str(flag) for flag in flags.values()))
        yield choose(report, group, peers, batches)


def choose(report: Report, group: str, peers: Sequence[VllmPeer], batches: Sequence[Batch]) -> dict[str, VllmPeer]:
    """Return the vLLM that is fastest at each figure."""
    best: dict[str, VllmPeer] = {}
    notes: dict[str, Inputs] = {}
    for name, ask in questions(batches).items():
        tried = [[ask(peer) for _ in range(2)] for peer in peers]
        best[name] = min(zip(peers, tried, strict=True), key=lambda pair: min(pair[1]))[0]
        notes[name] = {f"{peer.mode}_ms": [1000 * s for s in runs] for peer, runs in zip(peers, tried, strict=True)}
    report.note(f"{group}_modes", notes)
    return best


def beside_vllm(
    report: Report, options: Options, ours: Ours, batches: Sequence[Batch], best: Mapping[str, VllmPeer]
) -> None:
    """Each figure with the vLLM that is best at it."""

    def decode(batch: Batch) -> Callable[[], float]:
        return lambda: ours.decode(batch.places, batch.positions)

    runs = {batch.name: decode(batch) for batch in batches} | {"prefill_vllm": lambda: ours.prefill(0, 0, LONG_PROMPT)}
    for name, ask in questions(batches).items():
        our_ms: list[float] = []
        their_ms: list[float] = []
        mine, theirs = noted(runs[name], our_ms), noted(partial(ask, best[name]), their_ms)
        report.add(Figure.of(name, pairs(options.repeats, mine, theirs)))
        report.note(name, {"ours_ms": our_ms, "vllm_ms": their_ms, "vllm": best[name].mode})


def noted(run: Callable[[], float], ms: list[float]) -> Callable[[], float]:
    """Return ``run`` that keeps what it measures, in milliseconds."""

    def measured() -> float:
        seconds = run()
        ms.append(1000 * seconds)
        return seconds

    return measured
