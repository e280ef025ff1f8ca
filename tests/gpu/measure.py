"""How fast the engine is on a device, beside what its memory and its arithmetic allow: JSON lines. Run by ``check.sh``.

The model is Llama-like and random: nothing here looks at what it says.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from adapters.model import LoraWeights
from db.records import Factor
from serving.model import BASE, Decode, Draw, Prefill, SamplingParams, StepPlan
from serving.ports import TrainTask, TrainWork, WorkState
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.trainer import TorchTrainer
from serving.rows import Row
from tests.small_models import prompt_of, weights_for

SIZES: Mapping[str, Mapping[str, int]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
LIMITS: Mapping[str, tuple[float, float]] = {"H200": (4.8e12, 989e12)}
"""Bytes/s of memory and bf16 FLOP/s (dense), by what the device's name holds. NVIDIA's data sheet."""
RANK, PLACES, ROWS = 8, 8, 32
CONTEXT, PROMPT = 128, 512
DRAW = Draw(params=SamplingParams(), index=0)


@dataclass(frozen=True)
class Bench:
    """One engine, and how often to repeat."""

    engine: TorchEngine
    versions: list[LoraWeights]
    repeats: int

    def limits(self) -> tuple[float, float] | None:
        """Return (bytes/s, FLOP/s) of the device, if known."""
        device = self.engine.backbone.device
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device)
        return next((limit for part, limit in LIMITS.items() if part in name), None)

    def weight_count(self) -> int:
        """Return how many weights a token is multiplied with: without the embedding, which is looked up."""
        backbone = self.engine.backbone
        head = backbone.model.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        return head.weight.numel() + sum(linear.shape[0] * linear.shape[1] for linear in backbone.linears.values())

    def seconds(self, call: Callable[[], object]) -> list[float]:
        """Time a call, after one that warms up; a step ends with its tokens on the host."""
        call()
        took = []
        for _ in range(self.repeats):
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        return took


def main(argv: list[str]) -> int:
    """Print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)
    bench = make(args.device, args.size, args.repeats)
    say(
        "device", device=torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device, size=args.size
    )
    for rows in (1, 8, 32):
        decode(bench, rows, places=1)
    decode(bench, 32, places=8)
    decode(bench, 8, places=0)
    prefill(bench)
    swap_pause(bench)
    interference(bench)
    return 0


def make(device: str, size: str, repeats: int) -> Bench:
    """Build the model, the engine and a version for each place."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES[size], max_position_embeddings=2048, attn_implementation="eager")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    backbone = Backbone(model, sha256="0" * 64, packed=False)
    engine = TorchEngine(
        backbone,
        rows=ROWS,
        max_total_tokens=PROMPT + CONTEXT,
        places=PLACES,
        max_rank=RANK,
        make_trainer=lambda b: TorchTrainer(b, FakeTokenizer(), 256),
    )
    shapes = {name: linear.shape for name, linear in backbone.linears.items()}
    versions = [weights_for(shapes, seed, rank=RANK, size=0.01) for seed in range(PLACES)]
    for place, weights in enumerate(versions):
        engine.write(place, weights)
    return Bench(engine, versions, repeats)


def decode(bench: Bench, rows: int, *, places: int) -> None:
    """Time a decode step; the limit is reading weights, factors and KV once."""
    took = bench.seconds(lambda: bench.engine.step(decode_plan(rows, places)))
    engine = bench.engine
    width = engine.backbone.dtype.itemsize
    factors = places * sum(w.nbytes for w in bench.versions[0].tensors.values()) // 4 * width
    kv = rows * CONTEXT * sum(2 * heads * dim for heads, dim in engine.backbone.kv_sizes) * width
    limits = bench.limits()
    say(
        "decode",
        rows=rows,
        versions=places,
        ms=1e3 * statistics.median(took),
        over_bandwidth=limits and statistics.median(took) / ((bench.weight_count() * width + factors + kv) / limits[0]),
    )


def decode_plan(rows: int, places: int) -> StepPlan:
    """Return one token for each of the first rows."""
    return StepPlan(
        decodes=tuple(
            Decode(row=i, place=i % places if places else BASE, token=7 + i, position=CONTEXT - 1, draw=DRAW)
            for i in range(rows)
        )
    )


def prefill(bench: Bench) -> None:
    """Time a whole prompt; the limit is two FLOP per weight and token."""
    tokens = prompt_of(1, PROMPT, bench.engine.shape.vocab)
    plan = StepPlan(prefills=(Prefill(row=0, place=0, tokens=tokens, start=0, draw=DRAW),))
    took = statistics.median(bench.seconds(lambda: bench.engine.step(plan)))
    limits = bench.limits()
    flop = 2 * bench.weight_count() * PROMPT
    say("prefill", tokens_per_s=PROMPT / took, over_flops=limits and took / (flop / limits[1]))


def swap_pause(bench: Bench) -> None:
    """Time decode steps while versions are written to a place that none of them wears."""
    plan = decode_plan(8, 1)
    quiet = bench.seconds(lambda: bench.engine.step(plan))
    stopped, writes = threading.Event(), list[float]()

    def write() -> None:
        while not stopped.is_set():
            for weights in bench.versions:
                began = time.perf_counter()
                bench.engine.write(PLACES - 1, weights)
                writes.append(time.perf_counter() - began)

    copier = threading.Thread(target=write)
    copier.start()
    try:
        busy = bench.seconds(lambda: bench.engine.step(plan))
    finally:
        stopped.set()
        copier.join()
    say(
        "swap",
        pause_ms=1e3 * (statistics.median(busy) - statistics.median(quiet)),
        p99_over_quiet=high(busy) / high(quiet),
        write_ms=1e3 * statistics.median(writes),
        writes=len(writes),
    )


def interference(bench: Bench) -> None:
    """Time decode steps with a slice of training after each, and the slices."""
    plan = decode_plan(8, 1)
    alone = statistics.median(bench.seconds(lambda: bench.engine.step(plan)))
    steps, slices, tokens = list[float](), list[float](), 0
    work = train(bench)
    began = time.perf_counter()
    while len(slices) < 20 * bench.repeats or not tokens:
        start = time.perf_counter()
        bench.engine.step(plan)
        steps.append(time.perf_counter() - start)
        report = work.slice()
        synchronize(bench)  # a slice ends on the host before its kernels do
        slices.append(time.perf_counter() - start - steps[-1])
        assert report.state is WorkState.RUNNING, report.reason
        tokens += report.tokens
    seconds = time.perf_counter() - began
    work.close()
    say(
        "training",
        step_over_alone=statistics.median(steps) / alone,
        slice_ms=1e3 * statistics.median(slices),
        slice_p99_ms=1e3 * high(slices),
        supervised_tokens_per_s=tokens / seconds,
        share=sum(slices) / seconds,
    )


def train(bench: Bench) -> TrainWork:
    rows = [Row(prompt="say it again " * 4, completion="again and again " * 6) for _ in range(64)]
    task = TrainTask(factor=Factor.BOTH, tokens=10**9, rows_per_step=4, lr=1e-4, seed=0)
    return bench.engine.trainer().train(task, bench.versions[0], rows)


def synchronize(bench: Bench) -> None:
    if bench.engine.backbone.device.type == "cuda":
        torch.cuda.synchronize()


def high(values: list[float]) -> float:
    """Return the 99th percentile, or the largest of few."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def say(name: str, **figures: object) -> None:
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"name": name, **rounded}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
