"""A run with constant swaps: every answer comes from the version that its request was pinned to, and no other."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.model import LoraWeights
from db.records import VersionUid
from infra.clock import SystemClock
from serving.model import BASE, Decode, Draw, Prefill, SamplingParams, StepPlan
from serving.ports import Engine
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FAKE_SHAPES, FakeEngine, FakeTokenizer
from serving.replica.history import Wrote, violations
from serving.replica.trainer import TorchTrainer
from serving.wire.control import ActivateBody, RoundBody, StageBody

if TYPE_CHECKING:
    from tests.integration.replica.conftest import Site

REQUESTS = 60
NEW = 12
PLACES = 4


Shapes = dict[str, tuple[int, int]]


def fake_engine() -> tuple[Engine, Shapes]:
    engine = FakeEngine(SystemClock(), rows=4, max_total_tokens=128, places=PLACES, step_s=0.002, slice_s=0.001)
    return engine, dict(FAKE_SHAPES)


def torch_engine() -> tuple[Engine, Shapes]:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=257, max_position_embeddings=128, eos_token_id=256, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    backbone = Backbone(model, sha256="5" * 64, packed=True, name="tiny")
    engine = TorchEngine(
        backbone,
        rows=4,
        max_total_tokens=128,
        places=PLACES,
        max_rank=4,
        make_trainer=lambda shared: TorchTrainer(shared, FakeTokenizer(), 64),
    )
    return engine, {name: linear.shape for name, linear in backbone.linears.items()}


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone(engine: Engine, weights: LoraWeights | None, prompt: bytes, count: int) -> list[int]:
    """Return the greedy answer of one version on an engine that does nothing else."""
    place = BASE
    if weights is not None:
        place = 0
        engine.write(0, weights)
    prefill = Prefill(row=0, place=place, tokens=tuple(prompt), start=0, draw=Draw(params=SamplingParams(), index=0))
    tokens: list[int] = []
    plan = StepPlan(prefills=(prefill,))
    while len(tokens) < count:
        token = engine.step(plan).rows[0].token
        assert token is not None
        tokens.append(token.id)
        position, draw = len(prompt) + len(tokens) - 1, Draw(params=SamplingParams(), index=len(tokens))
        plan = StepPlan(decodes=(Decode(row=0, place=place, token=token.id, position=position, draw=draw),))
    return tokens


def scrambled(site: "Site", seed: int) -> LoraWeights:
    """A version whose B is not zero, so that versions differ."""
    fresh, draw = site.fresh(seed), np.random.default_rng(seed)
    tensors = {n: draw.normal(0, 0.4, t.shape).astype(np.float32) for n, t in fresh.tensors.items()}
    return LoraWeights(spec=fresh.spec, tensors=tensors)


@pytest.mark.parametrize("make_engine", [fake_engine, torch_engine], ids=["fake", "torch"])
@pytest.mark.usefixtures("one_thread")
async def test_no_version_answers_a_request_it_is_not_pinned_to(
    make_engine: Callable[[], tuple[Engine, Shapes]], make_site: Callable[..., "Site"]
) -> None:
    engine, shapes = make_engine()
    site = make_site(engine, shapes, max_queue=64)
    order, ended = random.Random(7), asyncio.Event()

    async def swap(epoch: int) -> None:
        """Promotions, rounds with local versions, and roll backs, one after the other."""
        async with site.control() as control:
            while not ended.is_set():
                epoch += 1
                uid = site.keep(scrambled(site, epoch))
                body = StageBody(adapter="code", uid=uid, number=epoch, store_key=site.key(uid))
                await control.stage(body)
                await control.activate(ActivateBody(adapter="code", uid=uid, epoch=epoch))
                plan = {"factor": "B", "tokens": 40, "rows_per_step": 2, "lr": 1e-3, "swap_every": 1, "seed": epoch}
                base = {"round_id": f"r{epoch}", "adapter": "code", "base_uid": uid, "epoch": epoch}
                await control.start_round(RoundBody.model_validate({**base, **plan, "deadline_s": 30}))
                await asyncio.sleep(order.uniform(0, 0.08))

    async def ask(number: int) -> tuple[bytes, str, list[int]]:
        await asyncio.sleep(order.uniform(0, 1.0))
        prompt = f"prompt {number} ".encode() * order.randint(1, 4)
        adapter = "code" if order.random() < 0.9 else site.engine.shape.model_id
        parameters = {"max_new_tokens": NEW, "ignore_eos": True, "details": True, "adapter_id": adapter}
        async with site.http() as http:
            answer = await http.post("/generate", json={"inputs": prompt.decode(), "parameters": parameters})
        assert answer.status_code == 200, answer.text
        tokens = [t["id"] for t in answer.json()["details"]["tokens"]]
        return prompt, answer.headers["x-adapter-uid"], tokens

    swapping = asyncio.create_task(swap(1))
    answers = await asyncio.gather(*(ask(n) for n in range(REQUESTS)))
    ended.set()
    await swapping
    await site.idle()
    assert violations(site.entries) == []
    written = [e.uid for e in site.entries if isinstance(e, Wrote)]
    assert len(set(written)) > PLACES, "places were taken over again and again"
    assert len({uid for _, uid, _ in answers}) > 3
    (reference, _), local = make_engine(), site.written()
    for prompt, uid, tokens in answers:
        assert alone(reference, local[VersionUid(uid)] if uid else None, prompt, NEW) == tokens
