"""Small random models of every family, random versions, and requests that are driven by hand."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adapters.model import LoraWeights
from db.records import LoraSpec
from serving.model import Decode, Draw, Prefill, SamplingParams, StepPlan, Token
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine

VOCAB = 131
GREEDY = SamplingParams()
SIZE: Mapping[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 130,
}
WINDOW = 9
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
}
"""Those that must be served."""


def build(family: str = "llama", **extra: object) -> PreTrainedModel:
    """Return a model in fp32, the same for the same arguments."""
    torch.manual_seed(3)
    given = {**SIZE, **FAMILIES.get(family, {}), "attn_implementation": "eager", **extra}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than at initialisation, so that the greedy choices are clear
            torch.nn.init.normal_(parameter, std=0.15)
    return model.float().eval()


def engine_of(
    model: PreTrainedModel, *, rows: int = 8, places: int = 4, rank: int = 6, packed: bool = True, tokens: int = 96
) -> TorchEngine:
    """Return an engine on ``model``, which it takes over."""
    backbone = Backbone(model, sha256="0" * 64, packed=packed)
    return TorchEngine(backbone, rows=rows, max_total_tokens=tokens, places=places, max_rank=rank)


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return (d_out, d_in) of every linear of the decoder layers, by name."""
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and any(part.isdigit() for part in name.split(".")):
            shapes[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            d_in, d_out = module.weight.shape
            shapes[name] = (d_out, d_in)
    return shapes


def weights_for(shapes: Mapping[str, tuple[int, int]], seed: int, *, rank: int = 4, size: float = 0.3) -> LoraWeights:
    """Return a random version of every linear."""
    chance = np.random.default_rng(seed)
    tensors = {}
    for name, (d_out, d_in) in shapes.items():
        tensors[f"{name}.lora_A.weight"] = chance.normal(0, size, (rank, d_in)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = chance.normal(0, size, (d_out, rank)).astype(np.float32)
    targets = tuple(sorted({name.rsplit(".", 1)[-1] for name in shapes}))
    return LoraWeights(spec=LoraSpec(rank=rank, alpha=2 * rank, targets=targets), tensors=tensors)


def worn(model: PreTrainedModel, weights: LoraWeights | None) -> PreTrainedModel:
    """Return ``model`` under PEFT with that version, or itself."""
    if weights is None:
        return model
    import peft  # the GPU check's CPU half does without

    spec = weights.spec
    config = peft.LoraConfig(r=spec.rank, lora_alpha=int(spec.alpha), target_modules=set(spec.targets))
    config.fan_in_fan_out = any(isinstance(m, Conv1D) for m in model.modules())
    wrapped: PreTrainedModel = peft.get_peft_model(model, config).eval()
    state = {f"base_model.model.{name}": torch.tensor(t) for name, t in weights.tensors.items()}
    assert not peft.set_peft_model_state_dict(wrapped, state).unexpected_keys
    return wrapped


def generated(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' greedy tokens."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return [int(t) for t in out[0, len(prompt) :]]


def prompt_of(seed: int, length: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """Return random tokens."""
    chance = random.Random(seed)
    return tuple(chance.randrange(1, vocab - 1) for _ in range(length))


class Answer:
    """One request."""

    def __init__(
        self,
        row: int,
        place: int,
        prompt: tuple[int, ...],
        params: SamplingParams = GREEDY,
        *,
        forced: tuple[int, ...] = (),
    ) -> None:
        self.row, self.place, self.prompt, self.params = row, place, prompt, params
        self.forced = forced
        """What follows the prompt whatever is drawn."""
        self.done = 0
        self.drawn: list[Token] = []
        self.failed = ""

    @property
    def tokens(self) -> list[int]:
        return [t.id for t in self.drawn]

    @property
    def prefilling(self) -> bool:
        return self.done < len(self.prompt)

    def draw(self) -> Draw:
        return Draw(params=self.params, index=len(self.drawn), context=(*self.prompt, *self.tokens))

    def prefill(self, count: int | None = None) -> Prefill:
        part = self.prompt[self.done :][:count]
        ends = self.done + len(part) == len(self.prompt)
        made = Prefill(row=self.row, place=self.place, tokens=part, start=self.done, draw=self.draw() if ends else None)
        self.done += len(part)
        return made

    def decode(self) -> Decode:
        count = len(self.drawn)
        token = self.forced[count - 1] if self.forced else self.drawn[-1].id
        position = len(self.prompt) + count - 1
        return Decode(row=self.row, place=self.place, token=token, position=position, draw=self.draw())


def run(engine: TorchEngine, answers: Sequence[Answer], plan: StepPlan) -> None:
    """Carry out one step and take in what it gave."""
    by_row = {a.row: a for a in answers}
    for row in engine.step(plan).rows:
        answer = by_row[row.row]
        answer.failed = answer.failed or row.failed
        if row.token is not None:
            answer.drawn.append(row.token)


def finish(
    engine: TorchEngine,
    answers: Sequence[Answer],
    count: int,
    *,
    chunk: int | None = None,
    between: Callable[[int], None] = lambda step: None,
) -> None:
    """Prefill side by side, then decode together; ``between`` is called before each decode step."""
    while any(a.prefilling for a in answers):
        run(engine, answers, StepPlan(prefills=tuple(a.prefill(chunk) for a in answers if a.prefilling)))
    for step in range(count):
        going = [a for a in answers if len(a.drawn) < count and not a.failed]
        if not going:
            return
        between(step)
        run(engine, answers, StepPlan(decodes=tuple(a.decode() for a in going)))


def forced_logprobs(engine: TorchEngine, asked: Sequence[tuple[int, tuple[int, ...]]], start: int) -> list[Tensor]:
    """Return for each (place, text) the logprobs [len(text) - start, vocab] of what follows its first tokens.

    All in one batch: the first row comes of a prefill in chunks, the others are decoded, whatever was drawn.
    """
    vocab = engine.shape.vocab
    params = SamplingParams(top_n_tokens=vocab)
    answers = [Answer(row, place, text[:start], params, forced=text[start:]) for row, (place, text) in enumerate(asked)]
    finish(engine, answers, max(len(text) - start for _, text in asked), chunk=3)
    assert not any(a.failed for a in answers)
    return [torch.stack([_row(token, vocab) for token in a.drawn]) for a in answers]


def plain_logprobs(model: PreTrainedModel, text: tuple[int, ...], start: int) -> Tensor:
    """Return the same as transformers computes it."""
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, start - 1 : -1].float()
    return torch.log_softmax(logits, -1)


def _row(token: Token, vocab: int) -> Tensor:
    ids, logprobs = zip(*token.top, strict=True)
    return torch.empty(vocab).index_copy_(0, torch.tensor(ids), torch.tensor(logprobs))
