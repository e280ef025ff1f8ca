"""What is shared from other rows changes no token: small random models in fp32, with the cache and without."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from adapters.model import LoraWeights, Version
from db.records import AdapterName, LoraSpec, VersionUid
from infra.errors import StepFailed
from serving.model import (
    BASE,
    CopyPrefix,
    Emitted,
    Finished,
    Prefill,
    Request,
    RequestId,
    SamplingParams,
    Slo,
    Started,
    StepPlan,
)
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.scheduler import Scheduler

CODE = AdapterName("code")
SPEC = LoraSpec(rank=4, alpha=8, targets=("k_proj", "q_proj", "v_proj"))
SYSTEM, OTHER = 20, 21
"""Seeds of prompts' beginnings."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Served:
    """What became of the requests, by name."""

    tokens: dict[str, list[int]]
    reused: dict[str, int]
    copies: int


class Replica:
    """A scheduler on the torch engine; the version of place 0 can change."""

    def __init__(self, family: str, *, least_prefix: int | None, budget: int, rows: int) -> None:
        torch.manual_seed(3)
        sliding = {"sliding_window": 9} if family == "mistral" else {}
        config = AutoConfig.for_model(
            family, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=131, max_position_embeddings=128, pad_token_id=0, eos_token_id=130,
            attn_implementation="eager", **sliding,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        self.engine = TorchEngine(
            Backbone(model, sha256="0" * 64, packed=True), rows=rows, max_total_tokens=128, places=2, max_rank=4
        )
        self.scheduler = Scheduler(
            self.engine.shape, self, FakeTokenizer(), token_budget=budget, max_queue=99, least_prefix=least_prefix
        )
        self.served = Served({}, {}, 0)
        self.publish(1)

    def publish(self, seed: int) -> None:
        """Write another version over the one in place 0."""
        draw = np.random.default_rng(seed)
        tensors = {}
        for name, linear in self.engine.backbone.linears.items():
            if name.rsplit(".", 1)[-1] in SPEC.targets:
                d_out, d_in = linear.shape
                tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.3, (SPEC.rank, d_in)).astype(np.float32)
                tensors[f"{name}.lora_B.weight"] = draw.normal(0, 0.3, (d_out, SPEC.rank)).astype(np.float32)
        self.engine.write(0, LoraWeights(spec=SPEC, tensors=tensors))
        self.version = Version(adapter=CODE, uid=VersionUid(f"v{seed}"), number=seed)

    def pin(self, adapter: AdapterName, owner: RequestId) -> tuple[Version, int]:
        return self.version, 0

    def waits(self, adapter: AdapterName) -> bool:
        return False

    def release(self, owner: RequestId) -> None:
        pass

    def submit(self, name: str, prompt: tuple[int, ...], *, adapter: AdapterName | None = CODE, new: int = 8) -> None:
        sampling = SamplingParams(do_sample=True, temperature=1.2, seed=7) if "sampled" in name else SamplingParams()
        request = Request(
            id=RequestId(name), adapter=adapter, input_ids=prompt, max_new_tokens=new, ignore_eos=True,
            sampling=sampling, slo=Slo(ttft_s=1000, tpot_s=10), arrival_s=0.0,
        )  # fmt: skip
        self.served.tokens[name] = []
        self.scheduler.submit(request)

    def turn(self) -> bool:
        plan = self.scheduler.plan(0.0)
        self.served.copies += len(plan.copies)
        if plan.tokens:
            self.scheduler.apply(plan, self.engine.step(plan), 0.0)
        for name, event in self.scheduler.take_events():
            if isinstance(event, Started):
                self.served.reused[name] = event.reused_tokens
            elif isinstance(event, Emitted):
                self.served.tokens[name].append(event.token.id)
            else:
                assert isinstance(event, Finished)
        return plan.tokens > 0

    def run(self) -> None:
        while self.turn():
            pass


def words(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, 130) for _ in range(count))


def serve(family: str, *, least_prefix: int | None, budget: int) -> Served:
    """Answer the same requests: a conversation, prompts of one beginning, another version."""
    replica = Replica(family, least_prefix=least_prefix, budget=budget, rows=4)
    tokens = replica.served.tokens
    replica.submit("first", words(SYSTEM, 40))
    replica.run()
    replica.submit("went on", (*words(SYSTEM, 40), *tokens["first"], *words(1, 9)))  # in place
    replica.run()
    replica.submit("sampled", (*words(SYSTEM, 33), *words(2, 5)))  # from a free row, which keeps what it holds
    replica.submit("backbone", words(SYSTEM, 40), adapter=None)
    replica.run()
    replica.submit("runs", words(OTHER, 45), new=30)
    while not replica.scheduler.decoding:
        replica.turn()
    replica.submit("beside", (*words(OTHER, 24), *words(3, 20)))  # up to the border of a chunk; from a running row
    replica.submit("same", words(OTHER, 45))
    replica.run()
    replica.publish(2)  # the same place, another version
    replica.submit("swapped", words(SYSTEM, 40))
    replica.run()
    replica.submit("swapped too", words(SYSTEM, 40))
    replica.run()
    return replica.served


@pytest.mark.parametrize(("family", "budget"), [("llama", 24), ("llama", 128), ("mistral", 24)])
def test_a_hit_gives_the_tokens_of_a_miss(family: str, budget: int) -> None:
    missed, hit = serve(family, least_prefix=None, budget=budget), serve(family, least_prefix=16, budget=budget)
    assert hit.tokens == missed.tokens
    assert set(missed.reused.values()) == {0}
    assert missed.copies == 0
    assert hit.reused == {
        "first": 0, "went on": 40 + 8 - 1, "sampled": 33, "backbone": 0,
        "runs": 0, "beside": 24, "same": 44, "swapped": 0, "swapped too": 39,
    }  # fmt: skip
    assert hit.copies == 3
    assert hit.tokens["swapped"] == hit.tokens["swapped too"] != hit.tokens["first"]


@pytest.mark.parametrize(
    "bad",
    [
        CopyPrefix(source=0, target=0, tokens=4),
        CopyPrefix(source=4, target=0, tokens=4),
        CopyPrefix(source=1, target=2, tokens=4),
        CopyPrefix(source=1, target=0, tokens=129),
        CopyPrefix(source=1, target=0, tokens=0),
    ],
)
def test_a_copy_outside_the_plan_or_the_engine_fails(bad: CopyPrefix) -> None:
    engine = Replica("llama", least_prefix=None, budget=8, rows=4).engine
    fill = Prefill(row=0, place=BASE, tokens=(1, 2), start=4, draw=None)
    with pytest.raises(StepFailed, match="cannot be copied"):
        engine.step(StepPlan(copies=(bad,), prefills=(fill,)))
