"""Training alone, beside PEFT's, and between decode steps."""

import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from adapters.weights import save_peft
from db.records import Factor, Split
from infra.models import pull
from infra.settings import load_settings
from serving.datasets import sample_shards
from serving.ports import TrainTask, WorkState
from serving.replica.packing import RowEncoder, TokenRow
from serving.replica.tokenizer import HubTokenizer
from serving.replica.trainer import endless_order, eos_id
from serving.rows import Row
from serving.shard import load_shard
from tests.bench.engine.figures import Figure, Report
from tests.bench.engine.options import PROMPT, SEED, Options, pairs
from tests.bench.engine.ours import Ours, our_flags, random_versions
from tests.bench.engine.peft_peer import LR, PeftPeer

ROWS_PER_STEP = 4
STEPS_PER_RUN = 2
BESIDE = 8
"""Rows that decode, and steps of a run, beside training."""


def train_rows() -> tuple[Row, ...]:
    """Return the rows that are trained everywhere in this bench."""
    settings = load_settings().replica
    return load_shard(sample_shards()[0], gate=settings.gate_rows, report=settings.report_rows)[Split.TRAIN]


def batches(encoder: RowEncoder, rows: Sequence[Row], steps: int) -> list[list[TokenRow]]:
    """Return the rows of the first optimizer steps as our trainer takes them."""
    order = endless_order(len(rows), SEED)
    return [[encoder.encode(rows[i]) for i in islice(order, ROWS_PER_STEP)] for _ in range(steps)]


def tokens_of(batch: Sequence[TokenRow]) -> int:
    """Return the tokens of a step's rows; padding is none."""
    return sum(len(row.ids) for row in batch)


def measure(report: Report, options: Options) -> None:
    """All of it."""
    folder = pull(load_settings())
    ours = Ours.load(options.threads)
    base = random_versions(ours.backbone, 1)[0]
    ours.engine.write(0, base)
    for row in range(BESIDE):
        ours.prefill(row, 0, PROMPT)
    report.flag("ours", our_flags(ours.backbone, options.threads))
    rows = train_rows()
    row_tokens = load_settings().replica.row_tokens
    encoder = RowEncoder(HubTokenizer(folder), eos_id=eos_id(ours.backbone), row_tokens=row_tokens)
    steps = batches(encoder, rows, STEPS_PER_RUN * (2 * options.repeats + 4))
    work = ours.engine.trainer().train(
        TrainTask(factor=Factor.BOTH, tokens=10**9, rows_per_step=ROWS_PER_STEP, lr=LR, seed=SEED), base, rows
    )
    slices: list[float] = []

    def slice_once() -> None:
        report = work.slice()
        assert report.state is WorkState.RUNNING, report.reason
        slices.append(report.seconds)

    def our_run() -> float:
        begun, first = time.perf_counter(), work.steps
        while work.steps < first + STEPS_PER_RUN:
            slice_once()
        return (time.perf_counter() - begun) / sum(map(tokens_of, steps[first : work.steps]))

    with tempfile.TemporaryDirectory() as scratch:
        save_peft(Path(scratch), base, base_model=str(folder))
        peer = PeftPeer(folder, ours.backbone.dtype, Path(scratch))
        report.flag("peft", peer.flags())
        seconds = peer.train(steps)
        taken = iter(steps)

        def peer_run() -> float:
            ran = list(islice(seconds, STEPS_PER_RUN))
            return sum(ran) / sum(map(tokens_of, islice(taken, STEPS_PER_RUN)))

        report.add(Figure.of("train_idle", pairs(options.repeats, our_run, peer_run)))

    alone = range(PROMPT, PROMPT + BESIDE)

    def beside() -> float:
        step_s = 0.0
        for position in alone:
            slice_once()
            step_s += ours.step([0] * BESIDE, position)
        return step_s / len(alone)

    found = pairs(options.repeats, lambda: ours.decode([0] * BESIDE, alone), beside)
    report.add(Figure.of("step_beside", found))
    parts = np.array_split(np.array(slices), options.repeats)
    p99 = float(np.percentile(slices, 99))
    report.add(
        Figure.of(
            "slice_p99_ms",
            [1000 * float(np.percentile(part, 99)) for part in parts],
            value=1000 * p99,
            runs=len(slices),
        )
    )
    work.close()
