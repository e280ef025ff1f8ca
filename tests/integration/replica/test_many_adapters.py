"""More adapters than places, of several ranks and targets: each answers as PEFT does, no stream waits for a copy."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.memory import MemoryUpdateStore
from adapters.model import LoraWeights, Version
from db.records import AdapterName, Epoch, LoraSpec, VersionUid
from infra.clock import ManualClock
from infra.errors import NotLoaded
from infra.settings import Settings
from serving.model import Emitted, Event, Failed, Finished, Request, RequestId, Slo, StepPlan, StepResult
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.history import Entry, History, violations
from serving.replica.line import FORGIVE_S
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.replica.trainer import TorchTrainer

NEW = 8
PLACES = 3
TARGETS = (
    ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    ("q_proj",),
    ("k_proj", "v_proj"),
    ("down_proj",),
    ("gate_proj", "o_proj"),
    ("q_proj", "up_proj"),
)
SPECS = {
    AdapterName(f"adapter-{rank}"): LoraSpec(rank=rank, alpha=2 * rank, targets=targets)
    for rank, targets in enumerate(TARGETS, start=1)
}

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=131, max_position_embeddings=128, pad_token_id=0, eos_token_id=130, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than at initialisation, so that the greedy choices are clear
            torch.nn.init.normal_(parameter, std=0.15)
    return model.float().eval()


class Watched(TorchEngine):
    """Notes which thread does what."""

    copied_in: set[int]
    stepped_in: set[int]
    refused = 0
    """So many copies fail from now on."""

    def write(self, place: int, weights: LoraWeights) -> None:
        self.copied_in.add(threading.get_ident())
        if self.refused:
            self.refused -= 1
            raise MemoryError("planted")
        super().write(place, weights)

    def step(self, plan: StepPlan) -> StepResult:
        self.stepped_in.add(threading.get_ident())
        return super().step(plan)


class Later(Executor):
    """A copier that runs a call when told to."""

    def __init__(self) -> None:
        self.calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.calls.append((future, fn, args))
        return future

    def run_all(self) -> None:
        while self.calls:
            future, fn, args = self.calls.popleft()
            try:
                future.set_result(fn(*args))
            except Exception as error:
                future.set_exception(error)


class Site:
    """A replica on a small random Llama that knows six adapters; the test turns it."""

    def __init__(self, copier: Executor, *, settle: Callable[[], None] = lambda: None) -> None:
        backbone = Backbone(build(), sha256="5" * 64, packed=True)
        shapes = {name: linear.shape for name, linear in backbone.linears.items()}
        self.engine = Watched(
            backbone,
            rows=6,
            max_total_tokens=64,
            places=PLACES,
            max_rank=len(SPECS),
            make_trainer=lambda shared: TorchTrainer(shared, FakeTokenizer(), 64),
        )
        self.engine.copied_in, self.engine.stepped_in = set(), set()
        self.clock = ManualClock()
        self.entries: list[Entry] = []
        self.events: dict[RequestId, list[Event]] = {}
        self.loader = Loader(MemoryUpdateStore(), shapes=shapes, backbone="5" * 64)
        self.replica = Replica(
            self.engine,
            FakeTokenizer(),
            self.loader,
            Settings.model_validate({"replica": {"token_budget": 32, "versions_per_adapter": 2}}),
            self.clock,
            splits={},
            deliver=self.deliver,
            copier=copier,
            history=History(sink=self.entries.append),
        )
        self.weights = {name: made(shapes, spec, seed) for seed, (name, spec) in enumerate(SPECS.items())}
        for name, weights in self.weights.items():
            uid = VersionUid(f"{name}-uid")
            self.replica.stage(Version(adapter=name, uid=uid, number=1), weights)
            self.replica.activate(name, uid, Epoch(1))
        self.until(lambda: self.replica.residency.pairs.keys() == SPECS.keys(), settle)

    def deliver(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    def ask(self, adapter: AdapterName, prompt: Sequence[int], new: int = NEW) -> RequestId:
        request_id = RequestId(f"r{len(self.events)}")
        self.events[request_id] = []
        self.replica.submit(
            Request(
                id=request_id,
                adapter=adapter,
                input_ids=tuple(prompt),
                max_new_tokens=new,
                ignore_eos=True,
                slo=Slo(ttft_s=60, tpot_s=60),
                arrival_s=self.replica.clock.monotonic(),
            )
        )
        return request_id

    def until(self, true: Callable[[], bool], settle: Callable[[], None] = lambda: None) -> None:
        for _ in range(5000):
            if true():
                return
            settle()
            self.replica.turn(0.001)
        raise AssertionError("it does not come true")

    def tokens(self, request_id: RequestId) -> list[int]:
        return [e.token.id for e in self.events[request_id] if isinstance(e, Emitted)]

    def ended(self, request_id: RequestId) -> bool:
        return any(isinstance(e, Finished | Failed) for e in self.events[request_id])

    def resident(self) -> set[AdapterName]:
        return {version.adapter for version in self.replica.residency.resident()}


def made(shapes: dict[str, tuple[int, int]], spec: LoraSpec, seed: int) -> LoraWeights:
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, (d_out, d_in) in shapes.items():
        if name.rsplit(".", 1)[-1] in spec.targets:
            tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.4, (spec.rank, d_in)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = draw.normal(0, 0.4, (d_out, spec.rank)).astype(np.float32)
    return LoraWeights(spec=spec, tensors=tensors)


def by_peft(weights: LoraWeights, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
    spec = weights.spec
    config = peft.LoraConfig(r=spec.rank, lora_alpha=int(spec.alpha), target_modules=set(spec.targets))
    model = peft.get_peft_model(build(), config).eval()
    state = {f"base_model.model.{name}": torch.tensor(t) for name, t in weights.tensors.items()}
    assert not peft.set_peft_model_state_dict(model, state).unexpected_keys
    model.generation_config.eos_token_id = None
    answers = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
            )
            answers.append([int(t) for t in out[0, len(prompt) :]])
    return answers


def prompt_of(seed: int) -> list[int]:
    draw = np.random.default_rng(100 + seed)
    return [int(t) for t in draw.integers(1, 130, 5 + 7 * seed)]


def test_six_adapters_on_three_places_answer_as_each_does_alone() -> None:
    prompts = [prompt_of(seed) for seed in range(3)]
    with ThreadPoolExecutor(max_workers=1) as copier:
        site = Site(copier)
        asked: dict[RequestId, tuple[AdapterName, int]] = {}
        for number in range(len(prompts)):
            for adapter in SPECS:
                asked[site.ask(adapter, prompts[number])] = adapter, number
                site.replica.turn()
        most = 0

        def all_answered() -> bool:
            nonlocal most
            most = max(most, len(site.replica.residency.places.pins()))
            return all(site.ended(request_id) for request_id in asked)

        site.until(all_answered)
        site.loader.close()
    want = {adapter: by_peft(weights, prompts) for adapter, weights in site.weights.items()}
    assert len({tuple(answers[0]) for answers in want.values()}) == len(SPECS), "they must differ to show anything"
    for request_id, (adapter, number) in asked.items():
        assert site.tokens(request_id) == want[adapter][number]
    assert most > 1, "versions of several ranks and targets were mixed in one batch"
    assert violations(site.entries) == []
    assert site.replica.residency.places.pins() == {}
    assert site.engine.copied_in.isdisjoint(site.engine.stepped_in)


def test_a_stream_goes_on_while_another_adapters_version_is_copied_or_cannot_be() -> None:
    copier = Later()
    site = Site(copier, settle=copier.run_all)
    here = min(site.resident())
    away, other = sorted(SPECS.keys() - site.resident())[:2]
    stream = site.ask(here, prompt_of(0), 40)
    site.until(lambda: len(site.tokens(stream)) == 2)
    wanted = site.ask(away, prompt_of(1))
    site.replica.turn()
    assert len(copier.calls) == 1
    for count in range(4, 12):
        site.replica.turn()
        assert len(site.tokens(stream)) == count, "a token per turn, though the copy does not end"
    assert site.events[wanted] == []
    assert site.replica.residency.awaited() == (away,)
    copier.run_all()
    site.until(lambda: site.ended(wanted))
    assert not site.ended(stream)
    assert site.tokens(wanted) == by_peft(site.weights[away], [prompt_of(1)])[0]

    site.engine.refused = 1
    lost = site.ask(other, prompt_of(1))
    site.until(lambda: site.ended(lost), copier.run_all)
    (failed,) = site.events[lost]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, NotLoaded)
    assert other in failed.error.message
    site.until(lambda: site.ended(stream), copier.run_all)
    assert site.tokens(stream) == by_peft(site.weights[here], [prompt_of(0)], 40)[0]
    site.clock.advance(2 * FORGIVE_S)
    again = site.ask(other, prompt_of(1))
    site.until(lambda: site.ended(again), copier.run_all)
    assert site.tokens(again) == by_peft(site.weights[other], [prompt_of(1)])[0]
    assert violations(site.entries) == []
    site.loader.close()
