"""What every engine must do, as the scheduler relies on it: the torch engine and the fake one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.model import LoraWeights
from db.records import LoraSpec
from infra.clock import ManualClock
from infra.errors import IncompatibleAdapter
from serving.model import BASE, CopyPrefix, Decode, Draw, Prefill, SamplingParams, StepPlan, Token
from serving.ports import Engine
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FAKE_SHAPES, FakeEngine

NEW = 6
SPEC = LoraSpec(rank=2, alpha=4, targets=("down_proj", "q_proj"))
Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """An engine and the shapes of its adapters."""

    engine: Engine
    shapes: Shapes

    def weights(self, seed: int) -> LoraWeights:
        draw = np.random.default_rng(seed)
        tensors = {}
        for name, (d_out, d_in) in self.shapes.items():
            tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.5, (SPEC.rank, d_in)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = draw.normal(0, 0.5, (d_out, SPEC.rank)).astype(np.float32)
        return LoraWeights(spec=SPEC, tensors=tensors)


def torch_case() -> Case:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=120, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    backbone = Backbone(model, sha256="0" * 64, packed=True, name="tiny")
    engine = TorchEngine(backbone, rows=4, max_total_tokens=64, places=4, max_rank=4)
    shapes = {n: linear.shape for n, linear in backbone.linears.items() if n.rsplit(".", 1)[-1] in SPEC.targets}
    return Case(engine, shapes)


def fake_case() -> Case:
    return Case(FakeEngine(ManualClock(), rows=4, max_total_tokens=64, places=4), FAKE_SHAPES)


@pytest.fixture(params=[torch_case, fake_case], ids=["torch", "fake"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    make: Callable[[], Case] = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make()
    torch.set_num_threads(threads)


PROMPT = (7, 45, 99, 12, 80, 33, 64, 21, 5)


def draw(index: int, params: SamplingParams = SamplingParams()) -> Draw:  # noqa: B008
    return Draw(params=params, index=index)


def prefill(row: int, place: int, prompt: tuple[int, ...] = PROMPT, **changes: object) -> Prefill:
    made = Prefill(row=row, place=place, tokens=prompt, start=0, draw=draw(0))
    return replace(made, **changes)  # type: ignore[arg-type]


def answers(engine: Engine, rows: Mapping[int, int], params: SamplingParams = SamplingParams()) -> dict[int, list[int]]:  # noqa: B008
    """Prefill and decode ``rows`` (row → place) together; their tokens."""
    first = engine.step(StepPlan(prefills=tuple(prefill(r, p, draw=draw(0, params)) for r, p in rows.items())))
    tokens = {r.row: [taken(r.token).id] for r in first.rows}
    for i in range(1, NEW):
        plan = tuple(
            Decode(row=r, place=p, token=tokens[r][-1], position=len(PROMPT) + i - 1, draw=draw(i, params))
            for r, p in rows.items()
        )
        for result in engine.step(StepPlan(decodes=plan)).rows:
            tokens[result.row].append(taken(result.token).id)
    return tokens


def taken(token: Token | None) -> Token:
    assert token is not None
    return token


def test_the_shape_is_what_it_was_built_with(case: Case) -> None:
    shape = case.engine.shape
    assert (shape.rows, shape.max_total_tokens, shape.places) == (4, 64, 4)
    assert shape.vocab > 0
    assert len(shape.backbone) == 64
    assert shape.model_id


def test_mixed_versions_answer_as_each_alone(case: Case) -> None:
    engine = case.engine
    for place in (0, 2):
        engine.write(place, case.weights(place))
    alone = {place: answers(engine, {1: place})[1] for place in (BASE, 0, 2)}
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    mixed = answers(engine, {3: 0, 0: BASE, 2: 2, 1: 0})
    assert mixed == {3: alone[0], 0: alone[BASE], 2: alone[2], 1: alone[0]}


def test_writing_a_place_touches_no_other(case: Case) -> None:
    engine = case.engine
    engine.write(0, case.weights(0))
    before = answers(engine, {0: 0, 1: BASE})
    engine.write(1, case.weights(1))
    assert answers(engine, {0: 0, 1: BASE}) == before
    engine.write(1, case.weights(0))
    assert answers(engine, {2: 1})[2] == before[0], "a place gives what was written last"


def test_a_prompt_may_come_in_chunks_beside_other_rows(case: Case) -> None:
    engine = case.engine
    engine.write(0, case.weights(0))
    want = answers(engine, {0: 0})[0]
    other = taken(engine.step(StepPlan(prefills=(prefill(3, BASE),))).rows[0].token)
    for i, (start, stop) in enumerate(((0, 4), (4, 5), (5, len(PROMPT)))):
        plan = StepPlan(
            prefills=(
                prefill(1, 0, PROMPT[start:stop], start=start, draw=draw(0) if stop == len(PROMPT) else None),
                prefill(2, BASE, (3, 4)),
            ),
            decodes=(Decode(row=3, place=BASE, token=other.id, position=len(PROMPT) + i, draw=draw(i + 1)),),
        )
        results = {r.row: r for r in engine.step(plan).rows}
        assert set(results) == {1, 2, 3}
        assert not any(r.failed for r in results.values())
        if stop < len(PROMPT):
            assert results[1].token is None
    assert taken(results[1].token).id == want[0]


def test_a_row_is_used_again_from_position_zero(case: Case) -> None:
    engine = case.engine
    want = answers(engine, {0: BASE})[0]
    engine.step(StepPlan(prefills=(prefill(2, BASE, (9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7, 6, 5, 4)),)))
    assert answers(engine, {2: BASE})[2] == want


def test_a_copied_beginning_is_as_good_as_a_computed_one(case: Case) -> None:
    engine = case.engine
    engine.write(0, case.weights(0))
    want, other = answers(engine, {3: 0})[3], (*PROMPT[:4], 70, 71)
    engine.step(StepPlan(prefills=(prefill(0, 0, other), prefill(1, 0, (3, 4)), prefill(2, 0, (8, 8, 8, 8, 8, 8)))))
    plan = StepPlan(
        # Row 2 gets what row 0 holds, then row 0 is used for another prompt, and row 1 gets it from row 2.
        copies=(CopyPrefix(source=0, target=2, tokens=4), CopyPrefix(source=2, target=1, tokens=3)),
        prefills=(prefill(0, 0, (9, 9, 9, 9, 9)), *(prefill(r, 0, PROMPT[n:], start=n) for r, n in ((1, 3), (2, 4)))),
    )
    results = {r.row: taken(r.token).id for r in engine.step(plan).rows}
    assert results[1] == results[2] == want[0]


def test_the_seed_decides_a_sampled_answer(case: Case) -> None:
    params = [SamplingParams(do_sample=True, temperature=2.0, seed=seed) for seed in range(4)]
    first = [answers(case.engine, {0: BASE, 1: BASE}, p) for p in params]
    assert [answers(case.engine, {3: BASE}, p)[3] for p in params] == [a[0] for a in first]
    assert all(a[0] == a[1] for a in first)
    assert len({tuple(a[0]) for a in first}) > 1


def test_logprobs_and_tops(case: Case) -> None:
    params = SamplingParams(top_n_tokens=3)
    plan = StepPlan(prefills=(prefill(0, BASE, draw=draw(0, params), logprobs=True), prefill(1, BASE)))
    first, second = case.engine.step(plan).rows
    assert len(first.prompt_logprobs) == len(PROMPT) - 1
    assert all(p <= 0 for p in first.prompt_logprobs)
    assert second.prompt_logprobs == ()
    token = taken(first.token)
    assert token.logprob <= 0
    assert len(token.top) == 3
    assert token.top[0][0] == token.id, "greedy takes the likeliest"
    assert [p for _, p in token.top] == sorted((p for _, p in token.top), reverse=True)
    assert taken(second.token).top == ()


def test_chunked_prompt_logprobs_leave_out_only_the_first(case: Case) -> None:
    whole = case.engine.step(StepPlan(prefills=(prefill(0, BASE, logprobs=True),))).rows[0].prompt_logprobs
    got: list[float] = []
    for start, stop in ((0, 4), (4, 5), (5, len(PROMPT))):
        last = draw(0) if stop == len(PROMPT) else None
        part = prefill(1, BASE, PROMPT[start:stop], start=start, draw=last, logprobs=True)
        got += case.engine.step(StepPlan(prefills=(part,))).rows[0].prompt_logprobs
    assert got == pytest.approx(whole, abs=1e-4)


def test_weights_of_another_shape_are_refused(case: Case) -> None:
    good = case.weights(1)
    case.engine.write(0, good)
    before = answers(case.engine, {0: 0})
    name = min(good.tensors)
    for tensors in (
        {**good.tensors, name: good.tensors[name][:, :-1]},
        {**good.tensors, "model.layers.77.q_proj.lora_A.weight": good.tensors[name]},
        {n: t for n, t in good.tensors.items() if n != name},
    ):
        with pytest.raises(IncompatibleAdapter):
            case.engine.check(LoraWeights(spec=SPEC, tensors=tensors))
        with pytest.raises(IncompatibleAdapter):
            case.engine.write(0, LoraWeights(spec=SPEC, tensors=tensors))
    case.engine.check(case.weights(2))
    assert answers(case.engine, {0: 0}) == before, "what is refused or only checked changes nothing"


def test_an_empty_plan_is_allowed(case: Case) -> None:
    result = case.engine.step(StepPlan())
    assert result.rows == ()
    assert result.seconds >= 0
