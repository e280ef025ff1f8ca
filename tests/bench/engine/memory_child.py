"""The processes whose memory is measured; each says when it has come to a point: ``ROLE THREADS [COUNT]``."""

import gc
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog

from adapters.model import LoraWeights, Version
from db.records import Epoch, RoundId, Split, VersionUid
from infra.models import model_dir
from infra.settings import load_settings
from serving.model import RequestId, Slo
from serving.replica.loop import Replica
from tests.bench.engine.memory import pss_bytes
from tests.bench.engine.options import CODE, PROMPT, SEED
from tests.bench.engine.ours import bench_settings
from tests.bench.engine.site import ANSWER_S, Site, running
from tests.bench.engine.training import ROWS_PER_STEP, train_rows

STEPS = 6
"""Optimizer steps: the largest rows are among their micro-batches, and the moments exist."""
ANSWERS, NEW_TOKENS = 16, 24
SHORT_PROMPT, SHORT_ANSWER = 6, 2
AT_ONCE = 16
WARM = 0.1
"""Part of the count that comes before the first measurement."""
SLO = Slo(ttft_s=2.0, tpot_s=0.5)


def say(word: str, value: object = "") -> None:
    """Tell the parent."""
    print(word, value, flush=True)


def serve_and_train(threads: int) -> None:
    """Serve; when the parent says so, train beside serving."""
    rows = train_rows()
    with running(bench_settings(threads), {Split.TRAIN: rows, Split.GATE: rows[:8]}) as site:
        answer(site, ANSWERS)
        answer(site, ANSWERS)
        time.sleep(1.0)
        say("served")
        sys.stdin.readline()
        site.start_round(rows_per_step=ROWS_PER_STEP, lr=1e-3, swap_every=2, seed=SEED)
        while site.call(lambda replica: replica.background.round_status("bench").steps) < STEPS:
            answer(site, 2)
        say("trained")


def train_with_peft(threads: int) -> None:
    """Load and train the same rows."""
    import torch

    from adapters.weights import initial, linear_shapes, save_peft, targets
    from db.records import LoraSpec
    from serving.replica.backbone import choose_dtype
    from serving.replica.packing import RowEncoder
    from serving.replica.tokenizer import HubTokenizer
    from tests.bench.engine.options import RANK
    from tests.bench.engine.peft_peer import PeftPeer
    from tests.bench.engine.training import batches

    torch.set_num_threads(threads)
    settings = load_settings()
    folder = model_dir(settings)
    shapes = linear_shapes(folder)
    fresh = initial(shapes, LoraSpec(rank=RANK, alpha=2 * RANK, targets=targets(shapes)), seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        save_peft(Path(scratch), fresh, base_model=str(folder))
        peer = PeftPeer(folder, choose_dtype(settings.model), Path(scratch))
    eos = peer.model.config.eos_token_id
    encoder = RowEncoder(HubTokenizer(folder), eos_id=eos, row_tokens=settings.replica.row_tokens)
    for _ in peer.train(batches(encoder, train_rows(), STEPS)):
        pass
    say("trained")


def swap_and_answer(threads: int, count: int) -> None:
    """Swap and answer ``count`` times each; tell the PSS at the beginning and at the end."""
    with running(bench_settings(threads, prefix_cache=False), {}) as site:
        done = 0
        for until in (round(count * WARM), round(count * WARM) + count):
            while done < until:
                ids = [ask(site, SHORT_PROMPT, SHORT_ANSWER) for _ in range(AT_ONCE)]
                for number in range(done, done + AT_ONCE):
                    swap(site, number)
                forget(site, ids)
                done += AT_ONCE
            gc.collect()
            say("pss", pss_bytes(os.getpid()))


def swap(site: Site, number: int) -> None:
    """Put a new version in force, a federated one and a local one in turn, and wait until it serves."""
    weights = LoraWeights(
        spec=site.weights.spec,
        tensors={name: array + np.float32(1e-6 * (number + 1)) for name, array in site.weights.tensors.items()},
    )
    uid = VersionUid(f"version {number}")
    if number % 2 == 0:

        def federated(replica: Replica) -> None:
            epoch = Epoch(replica.residency.pair(CODE).epoch + 1)
            replica.stage(Version(adapter=CODE, uid=uid, number=number + 2), weights)
            replica.activate(CODE, uid, epoch)

        site.call(federated)
    else:

        def local(replica: Replica) -> None:
            pair = replica.residency.pair(CODE)
            pair = replica.residency.start_round(CODE, RoundId(f"round {number}"), pair.base.uid, pair.epoch)
            version = Version(adapter=CODE, uid=uid, number=pair.base.number, local_steps=1)
            replica.residency.publish(version, weights, pair.lineage, ready_s=time.monotonic())

        site.call(local)
    until_s = time.monotonic() + ANSWER_S
    while site.replica.residency.pair(CODE).active.uid != uid:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{uid} does not come into force")
        time.sleep(0.001)


def ask(site: Site, prompt: int, new: int) -> RequestId:
    """Send a request whose prompt no other one has."""
    chance = np.random.default_rng(len(site.answers) + time.monotonic_ns())
    tokens = [int(t) for t in chance.integers(100, site.vocab, prompt)]
    return site.ask(tokens, new, SLO, scheduled_s=time.monotonic())


def answer(site: Site, count: int) -> None:
    """Send requests and wait for their answers."""
    forget(site, [ask(site, PROMPT, NEW_TOKENS) for _ in range(count)])


def forget(site: Site, ids: list[RequestId]) -> None:
    """Wait for answers, and keep none."""
    site.wait_for(ids)
    for request_id in ids:
        assert not site.answers.pop(request_id).failed
    site.meter.steps.clear()


ROLES: dict[str, Callable[..., None]] = {
    "replica": serve_and_train,
    "peft": train_with_peft,
    "leak": swap_and_answer,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    ROLES[sys.argv[1]](*map(int, sys.argv[2:]))
