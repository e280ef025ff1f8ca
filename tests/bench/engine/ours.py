"""Our engine as it stands, stepped by hand."""

import os
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from adapters.model import LoraWeights
from adapters.weights import initial, targets
from db.records import LoraSpec
from infra.settings import Settings, load_settings
from serving.model import Decode, Draw, Prefill, SamplingParams, StepPlan
from serving.replica.backbone import Backbone
from serving.replica.build import load_engine
from serving.replica.engine import TorchEngine
from tests.bench.engine.figures import Inputs
from tests.bench.engine.options import RANK

GREEDY = Draw(params=SamplingParams(), index=0)


def bench_settings(threads: int, **replica: object) -> Settings:
    """Return the product's settings with what the bench fixes; no ``COLLM_`` variable should be set."""
    settings = load_settings()
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"threads": threads}),
            "replica": settings.replica.model_copy(update=replica),
        }
    )


class Ours:
    """The engine, stepped by hand, with a prompt's KV in each of its rows."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    @classmethod
    def load(cls, threads: int, *, rows: int = 32) -> Self:
        """Load the product's engine with so many rows."""
        engine = load_engine(bench_settings(threads, rows=rows))
        assert engine.shape.rows == rows, "the machine's memory is too small"
        return cls(engine)

    def batch_invariant(self) -> Self:
        """Return one in the batch-invariant mode on the same backbone, whose places are empty then."""
        shape = self.engine.shape
        twin = TorchEngine(
            self.backbone,
            rows=shape.rows,
            max_total_tokens=shape.max_total_tokens,
            places=shape.places,
            max_rank=self.backbone.groups[0].rank,
            batch_invariant=True,
        )
        return type(self)(twin)

    @property
    def backbone(self) -> Backbone:
        """Shared with training."""
        return self.engine.backbone

    def prefill(self, row: int, place: int, tokens: int) -> float:
        """Return the seconds of one prompt."""
        ids = tuple(range(100, 100 + tokens))
        plan = StepPlan(prefills=(Prefill(row=row, place=place, tokens=ids, start=0, draw=GREEDY),))
        return self.engine.step(plan).seconds

    def decode(self, places: Sequence[int], positions: range) -> float:
        """Return the seconds of a decode step of rows that wear ``places``, in the mean over ``positions``."""
        return sum(self.step(places, position) for position in positions) / len(positions)

    def step(self, places: Sequence[int], position: int) -> float:
        """Return the seconds of one decode step."""
        rows = tuple(
            Decode(row=row, place=place, token=100 + row, position=position, draw=GREEDY)
            for row, place in enumerate(places)
        )
        return self.engine.step(StepPlan(decodes=rows)).seconds


def random_versions(backbone: Backbone, count: int) -> list[LoraWeights]:
    """Return versions that all answer differently."""
    shapes = {name: linear.shape for name, linear in backbone.linears.items()}
    spec = LoraSpec(rank=RANK, alpha=2 * RANK, targets=targets(shapes))
    versions = []
    for seed in range(count):
        chance = np.random.default_rng(seed)
        made = initial(shapes, spec, seed)
        tensors = {
            name: chance.normal(0, 0.01, array.shape).astype(np.float32) if ".lora_B." in name else array
            for name, array in made.tensors.items()
        }
        versions.append(LoraWeights(spec=spec, tensors=tensors))
    return versions


def our_flags(backbone: Backbone, threads: int) -> Inputs:
    """Return how we ran."""
    return {
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "threads": threads,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "packed": load_settings().model.packed,
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }
