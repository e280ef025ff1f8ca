"""The torch engine on small random models in fp32: its tokens are those of transformers and of PEFT."""

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from adapters.model import LoraWeights
from db.records import LoraSpec
from infra.errors import ConfigError, IncompatibleAdapter, StepFailed
from serving.model import BASE, Decode, Draw, Prefill, SamplingParams, StepPlan
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.modes import PackedMode

SPEC = LoraSpec(rank=4, alpha=8, targets=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"))
SIZE: Mapping[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 130,
}
GREEDY = SamplingParams()
PLACES = 4
ROWS = 6
NEW = 12


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(family: str = "llama", **extra: object) -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**SIZE, "attn_implementation": "eager", **extra})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than at initialisation, so that the greedy choices are clear
            torch.nn.init.normal_(parameter, std=0.15)
    return model.float().eval()


def engine_of(model: PreTrainedModel, *, packed: bool = True, max_total_tokens: int = 96) -> TorchEngine:
    backbone = Backbone(model, sha256="0" * 64, packed=packed)
    return TorchEngine(backbone, rows=ROWS, max_total_tokens=max_total_tokens, places=PLACES, max_rank=6)


def weights_for(shapes: Mapping[str, tuple[int, int]], seed: int, spec: LoraSpec = SPEC) -> LoraWeights:
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, (d_out, d_in) in shapes.items():
        if name.rsplit(".", 1)[-1] in spec.targets:
            tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.3, (spec.rank, d_in)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = draw.normal(0, 0.3, (d_out, spec.rank)).astype(np.float32)
    return LoraWeights(spec=spec, tensors=tensors)


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    return {
        name: (m.out_features, m.in_features)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and ".layers." in name
    }


def generated(model: PreTrainedModel, prompt: Sequence[int], count: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(t) for t in out[0, len(prompt) :]]


def peft_generated(weights: LoraWeights | None, prompt: Sequence[int], count: int = NEW) -> list[int]:
    model = build()
    if weights is None:
        return generated(model, prompt, count)
    config = peft.LoraConfig(r=weights.spec.rank, lora_alpha=int(weights.spec.alpha), target_modules=set(SPEC.targets))
    wrapped = peft.get_peft_model(model, config)
    state = {f"base_model.model.{name}": torch.tensor(t) for name, t in weights.tensors.items()}
    result = peft.set_peft_model_state_dict(wrapped, state)
    assert not result.unexpected_keys
    return generated(wrapped.eval(), prompt, count)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, 130) for _ in range(length))


class Answer:
    """One request, driven by hand."""

    def __init__(self, row: int, place: int, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> None:
        self.row, self.place, self.prompt, self.params = row, place, prompt, params
        self.done = 0
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.failed = ""

    @property
    def prefilling(self) -> bool:
        return self.done < len(self.prompt)

    def draw(self) -> Draw:
        return Draw(params=self.params, index=len(self.tokens), context=(*self.prompt, *self.tokens))

    def prefill(self, count: int | None = None, *, logprobs: bool = False) -> Prefill:
        part = self.prompt[self.done :][:count]
        ends = self.done + len(part) == len(self.prompt)
        made = Prefill(
            row=self.row,
            place=self.place,
            tokens=part,
            start=self.done,
            draw=self.draw() if ends else None,
            logprobs=logprobs,
        )
        self.done += len(part)
        return made

    def decode(self) -> Decode:
        position = len(self.prompt) + len(self.tokens) - 1
        return Decode(row=self.row, place=self.place, token=self.tokens[-1], position=position, draw=self.draw())


def run(engine: TorchEngine, answers: Sequence[Answer], plan: StepPlan) -> None:
    by_row = {a.row: a for a in answers}
    result = engine.step(plan)
    assert [r.row for r in result.rows] == [*(p.row for p in plan.prefills), *(d.row for d in plan.decodes)]
    for row in result.rows:
        answer = by_row[row.row]
        answer.failed = answer.failed or row.failed
        answer.logprobs += row.prompt_logprobs
        if row.token is not None:
            answer.tokens.append(row.token.id)


def finish(engine: TorchEngine, answers: Sequence[Answer], count: int = NEW) -> None:
    """Prefill whole, then decode all together."""
    run(engine, answers, StepPlan(prefills=tuple(a.prefill() for a in answers)))
    while going := [a for a in answers if len(a.tokens) < count and not a.failed]:
        run(engine, answers, StepPlan(decodes=tuple(a.decode() for a in going)))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it
@pytest.mark.parametrize("packed", [False, True])
def test_tokens_equal_transformers_and_peft_alone_and_mixed(packed: bool) -> None:
    model = build()
    shapes = shapes_of(model)
    versions: dict[int, LoraWeights | None] = {BASE: None, 0: weights_for(shapes, 1), 2: weights_for(shapes, 2)}
    prompts = [prompt_of(i, 5 + 6 * i) for i in range(ROWS)]
    want = {(p, i): peft_generated(w, prompt) for p, w in versions.items() for i, prompt in enumerate(prompts[:3])}
    assert len({tuple(w) for w in want.values()}) == len(want), "versions and prompts must differ to show anything"
    engine = engine_of(model, packed=packed)
    for place, weights in versions.items():
        if weights is not None:
            engine.write(place, weights)
    for place in versions:
        alone = [Answer(row, place, prompts[row]) for row in range(3)]
        finish(engine, alone)
        assert [a.tokens for a in alone] == [want[place, i] for i in range(3)]
    mixed = [Answer(row, place, prompts[row % 3]) for row, place in enumerate([2, BASE, 0, 0, 2, BASE])]
    finish(engine, mixed)
    assert [a.tokens for a in mixed] == [want[a.place, a.row % 3] for a in mixed]


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_the_same_tokens(seed: int) -> None:
    """Chunks of any size, several prefills and decodes in one step, rows in any order, come and go."""
    chance = random.Random(seed)
    model = build()
    shapes = shapes_of(model)
    weights = {place: weights_for(shapes, place) for place in range(PLACES)}
    engine = engine_of(model)
    for place, given in weights.items():
        engine.write(place, given)
    waiting = [(chance.choice([BASE, 0, 1, 3]), prompt_of(100 + i, chance.randrange(1, 40))) for i in range(10)]
    want: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, prompt in waiting:
        alone = [Answer(0, place, prompt)]
        finish(engine, alone)
        want[place, prompt] = alone[0].tokens
    running: list[Answer] = []
    free = list(range(ROWS))
    chance.shuffle(free)
    ended = 0
    while waiting or running:
        while waiting and free and chance.random() < 0.6:
            place, prompt = waiting.pop()
            running.append(Answer(free.pop(), place, prompt))
        chance.shuffle(running)
        chosen = [a for a in running if chance.random() < 0.8]
        prefills = tuple(a.prefill(chance.randrange(1, 12)) for a in chosen if a.prefilling)
        started = {p.row for p in prefills}
        decodes = tuple(a.decode() for a in chosen if a.row not in started and not a.prefilling)
        run(engine, running, StepPlan(prefills=prefills, decodes=decodes))
        for a in [a for a in running if len(a.tokens) == NEW]:
            assert a.tokens == want[a.place, a.prompt]
            running.remove(a)
            free.append(a.row)
            ended += 1
    assert ended == 10


def test_a_smaller_rank_and_fewer_targets_fit_a_used_place() -> None:
    model = build()
    shapes = shapes_of(model)
    spec = LoraSpec(rank=2, alpha=2, targets=("q_proj", "up_proj"))
    small, prompt = weights_for(shapes, 9, spec), prompt_of(1, 11)
    fresh = engine_of(build())
    fresh.write(0, small)
    want = [Answer(0, 0, prompt)]
    finish(fresh, want)
    engine = engine_of(model)
    engine.write(0, weights_for(shapes, 1, LoraSpec(rank=6, alpha=6, targets=SPEC.targets)))
    engine.write(0, small)
    got = [Answer(0, 0, prompt)]
    finish(engine, got)
    assert got[0].tokens == want[0].tokens


def test_what_is_not_finite_stays_in_its_row_and_leaves_nothing_behind() -> None:
    model = build()
    shapes = shapes_of(model)
    engine = engine_of(model)
    engine.write(0, weights_for(shapes, 1))
    overflowing = weights_for(shapes, 2)
    name = "model.layers.1.self_attn.v_proj.lora_A.weight"
    engine.write(1, LoraWeights(spec=SPEC, tensors={**overflowing.tensors, name: np.full((4, 32), 3e38, np.float32)}))
    places = [0, 1, BASE, 1, 0]
    want = [Answer(row, place, prompt_of(row, 9)) for row, place in enumerate(places) if place != 1]
    finish(engine, want)
    got = [Answer(row, place, prompt_of(row, 9)) for row, place in enumerate(places)]
    finish(engine, got)
    assert [bool(a.failed) for a in got] == [place == 1 for place in places]
    assert [a.tokens for a in got if a.place != 1] == [a.tokens for a in want]
    # Also where the chunk that spoils the row draws nothing, and for whoever gets the row next.
    spoilt = Answer(1, 1, prompt_of(1, 9))
    run(engine, [spoilt], StepPlan(prefills=(spoilt.prefill(5),)))
    assert spoilt.failed
    rows = [Answer(row, 0, prompt_of(row % 2, 3)) for row in range(4)]
    finish(engine, rows)
    assert [a.failed for a in rows] == [""] * 4
    assert rows[1].tokens == rows[3].tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_B.weight": np.full((32, 4), np.nan, np.float32)}, "not finite"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": np.full((4, 32), np.inf, np.float32)}, "not finite"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 31), np.float32)}, "do not fit"),
        ({"model.layers.9.self_attn.q_proj.lora_A.weight": np.zeros((4, 32), np.float32)}, "no such linear"),
        ({"lm_head.lora_A.weight": np.zeros((4, 32), np.float32)}, "no such linear"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_whole(change: dict[str, np.ndarray], message: str) -> None:
    model = build()
    good = weights_for(shapes_of(model), 1)
    engine = engine_of(model)
    engine.write(0, good)
    before = [Answer(0, 0, prompt_of(1, 9))]
    finish(engine, before)
    other = weights_for(shapes_of(build()), 2)
    with pytest.raises(IncompatibleAdapter, match=message):
        engine.write(0, LoraWeights(spec=SPEC, tensors={**other.tensors, **change}))
    with pytest.raises(IncompatibleAdapter, match="rank 9"):
        engine.write(0, LoraWeights(spec=LoraSpec(rank=9, alpha=1, targets=()), tensors={}))
    after = [Answer(0, 0, prompt_of(1, 9))]
    finish(engine, after)
    assert after[0].tokens == before[0].tokens


def test_prompt_logprobs_do_not_depend_on_the_chunks() -> None:
    model = build()
    prompt = prompt_of(5, 23)
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    want = [float(logs[i, t]) for i, t in enumerate(prompt[1:])]
    engine = engine_of(model)
    for size in (23, 7, 1):
        answer = Answer(2, BASE, prompt)
        while answer.prefilling:
            run(engine, [answer], StepPlan(prefills=(answer.prefill(size, logprobs=True),)))
        assert answer.logprobs == pytest.approx(want, abs=1e-4)


def test_a_plan_outside_the_engine_fails_and_harms_nothing() -> None:
    engine = engine_of(build())
    good = [Answer(0, BASE, prompt_of(1, 9))]
    for bad in (
        Prefill(row=ROWS, place=BASE, tokens=(1,), start=0, draw=None),
        Prefill(row=1, place=PLACES, tokens=(1,), start=0, draw=None),
        Prefill(row=1, place=BASE, tokens=(1, 2), start=95, draw=None),
        Prefill(row=1, place=BASE, tokens=(), start=0, draw=None),
        Prefill(row=1, place=BASE, tokens=(131,), start=0, draw=None),
    ):
        with pytest.raises(StepFailed):
            engine.step(StepPlan(prefills=(bad,)))
    twice = Answer(1, BASE, (1, 2))
    with pytest.raises(StepFailed, match="twice"):
        engine.step(StepPlan(prefills=(twice.prefill(1), twice.prefill(1))))
    assert engine.step(StepPlan()).rows == ()
    finish(engine, good)
    assert good[0].tokens == generated(build(), good[0].prompt)


def test_a_draw_depends_on_its_request_alone() -> None:
    engine = engine_of(build())
    engine.write(0, weights_for(shapes_of(build()), 1))
    params = SamplingParams(do_sample=True, temperature=1.3, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=11)
    alone = Answer(3, 0, prompt_of(1, 9), params)
    finish(engine, [alone])
    other = SamplingParams(do_sample=True, temperature=0.7, typical_p=0.8, frequency_penalty=0.5, seed=12)
    beside = [
        Answer(0, BASE, prompt_of(2, 30), other),
        Answer(1, 0, prompt_of(1, 9), params),
        Answer(2, 0, prompt_of(3, 4)),
        Answer(4, 0, prompt_of(1, 9), SamplingParams(do_sample=True, seed=13)),
    ]
    finish(engine, beside)
    assert beside[1].tokens == alone.tokens
    assert beside[3].tokens != alone.tokens


def test_training_can_use_what_serving_has_touched() -> None:
    """Nothing made under inference mode is left in the model."""
    model = build()
    engine = engine_of(model)
    backbone = engine.backbone
    engine.write(0, weights_for(shapes_of(build()), 1))
    finish(engine, [Answer(0, 0, prompt_of(1, 9))])
    factors = {
        name: (torch.randn(4, shape[1]).requires_grad_(), torch.randn(shape[0], 4).requires_grad_())
        for name, shape in ((n, linear.shape) for n, linear in backbone.linears.items())
    }
    with backbone.mode_set(PackedMode(lengths=(5, 4), factors=factors, scale=2.0)):
        hidden = backbone.hidden(torch.tensor(prompt_of(1, 9)), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]))
        torch.autograd.backward(backbone.head(hidden).logsumexp(-1).sum())
    assert all(f.grad is not None and bool(f.grad.abs().sum() > 0) for pair in factors.values() for f in pair)
    assert backbone.mode is None


def test_a_context_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="MAX_TOTAL_TOKENS"):
        engine_of(build(), max_total_tokens=129)


def test_a_context_in_which_rows_would_change_each_others_positions_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(ConfigError, match="64"):
        engine_of(build(rope_parameters=rope), max_total_tokens=65)
    assert engine_of(build(rope_parameters=rope), max_total_tokens=64).shape.max_total_tokens == 64
