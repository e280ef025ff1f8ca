"""The demo's load: one stretch of the Azure code trace, scaled to a share of the capacity just measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from db.records import Split
from infra.settings import Settings
from serving.datasets import TRACE_OFFSET_S, trace_path
from serving.load.model import Call
from serving.load.prompts import Count, PromptMaker, Source
from serving.load.traces import Lengths, TraceRow, Window, read_azure, window_by_count
from serving.model import Slo
from serving.rows import Row, set_sha256
from serving.shard import load_shard

MIX = 96
"""Calls in rotation while capacity is measured: the window's own first ones."""
FASTEST = Lengths(context=1 / 24, generated=1.0, max_context_tokens=400, min_new_tokens=16, max_new_tokens=64)
"""Lengths on a machine that is fast enough for them."""
MEAN_TTFT_PART, MOST_TTFT_PART = 0.35, 0.8
"""Parts of the TTFT target that the mean and the longest prompt may take, alone on a replica, HTTP included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client's shard."""

    shard: Path
    splits: Mapping[Split, tuple[Row, ...]]

    @property
    def rows(self) -> int:
        """Rows of all splits."""
        return sum(map(len, self.splits.values()))

    def sha256(self, split: Split) -> str:
        """Name of a split's rows."""
        return set_sha256(self.splits[split])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Makes calls of the trace; the same lengths and capacity give the same calls."""

    rows: Sequence[TraceRow]
    maker: PromptMaker
    adapter: str
    seconds: float
    """How long a window lasts."""
    start_s: float
    lengths: Lengths = FASTEST

    def fitted(self, tokens_per_s: float, slo: Slo) -> "Load":
        """Return the load with prompts that this machine computes well within the SLO.

        ``tokens_per_s``: how fast a prompt is computed.
        """
        mix = [row for row in self.rows if row.at_s >= self.start_s][:MIX] or self.rows
        mean = max(1.0, sum(row.context_tokens for row in mix) / len(mix))
        lengths = replace(
            self.lengths,
            context=min(self.lengths.context, MEAN_TTFT_PART * slo.ttft_s * tokens_per_s / mean),
            max_context_tokens=min(
                self.lengths.max_context_tokens, max(1, int(MOST_TTFT_PART * slo.ttft_s * tokens_per_s))
            ),
        )
        return replace(self, lengths=lengths)

    def mix(self) -> list[Call]:
        """Return the calls that capacity is measured with."""
        return self.calls(self.window(MIX))

    def window(self, count: int) -> Window:
        """Return ``count`` arrivals in one window; from an earlier start if the trace ends too soon."""
        enough = sum(row.at_s >= self.start_s for row in self.rows) > count
        start_s = self.start_s if enough else 0.0
        return window_by_count(self.rows, start_s=start_s, seconds=self.seconds, count=count, lengths=self.lengths)

    def calls(self, window: Window) -> list[Call]:
        """Return the calls of a window."""
        return self.maker.calls(window.arrivals, adapter=self.adapter)

    def count(self, *, capacity_rps: float, share: float) -> int:
        """Return how many arrivals make ``share`` of the capacity, or as many as the trace has."""
        return min(len(self.rows) - 1, max(2, round(share * capacity_rps * self.seconds)))


def read_clients(settings: Settings, shards: Sequence[Path]) -> dict[str, Client]:
    """Return each client's shard, split as its replica splits it."""
    gate, report = settings.replica.gate_rows, settings.replica.report_rows
    return {
        f"replica-{i}": Client(shard=shard, splits=load_shard(shard, gate=gate, report=report))
        for i, shard in enumerate(shards)
    }


def make_load(settings: Settings, clients: Mapping[str, Client], model_dir: Path, *, seconds: float) -> Load:
    """Return the load over the clients' rows."""
    sources = [
        Source(questions=client.splits[Split.REPORT], examples=client.splits[Split.TRAIN])
        for _, client in sorted(clients.items())
    ]
    return Load(
        rows=read_azure(trace_path().read_text(encoding="utf-8").splitlines()),
        maker=PromptMaker(sources=sources, count=counter(settings, model_dir)),
        adapter=settings.rounds.adapter,
        seconds=seconds,
        start_s=TRACE_OFFSET_S,
    )


def counter(settings: Settings, model_dir: Path) -> Count:
    """Return how tokens are counted; those of the stand-in engine are bytes."""
    if settings.replica.fake_engine:
        return lambda text: len(text.encode())
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)
