"""The batch-invariant mode: neighbours, chunks, rows, places and shared beginnings change no bit of an answer."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from serving.model import BASE, CopyPrefix, Request, RequestId, SamplingParams, Slo, StepPlan, Token
from serving.replica import invariant
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.invariant import PREFILL_TILE
from serving.replica.run import Run
from serving.replica.text import TextStream
from tests.small_models import VOCAB, Answer, build, prompt_of, run, weights_for

NEW = 8
ALL = SamplingParams(do_sample=True, temperature=2.0, seed=5, top_n_tokens=VOCAB)
PROMPT = prompt_of(1, PREFILL_TILE + 19)
PLACES = (0, 3)
"""Both hold the version of the request that is looked at."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_for(family: str, dtype: torch.dtype, *, packed: bool, batch_invariant: bool = True) -> TorchEngine:
    size = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "max_position_embeddings": 256}
    model = build(family, **(size if family != "gpt2" else {"n_embd": 96, "n_positions": 256}))
    engine = TorchEngine(
        Backbone(model.to(dtype), sha256="0" * 64, packed=packed),
        rows=8,
        max_total_tokens=PREFILL_TILE + 60,  # no multiple
        places=4,
        max_rank=6,
        batch_invariant=batch_invariant,
    )
    shapes = {name: linear.shape for name, linear in engine.backbone.linears.items()}
    for place, seed in enumerate((1, 2, 3, 1)):
        engine.write(place, weights_for(shapes, seed, rank=4 + 2 * (place % 2 and place < 3), size=0.15))
    return engine


def answered(
    engine: TorchEngine,
    *,
    row: int = 0,
    place: int = 0,
    chunks: Sequence[int] = (),
    neighbours: Sequence[Answer] = (),
    late: int = 0,
) -> list[Token]:
    """The request's tokens with every logprob; neighbours are computed beside it, and begin ``late`` steps sooner."""
    mine = Answer(row, place, PROMPT, ALL)
    answers, sizes = [mine, *neighbours], list(chunks)
    step = 0
    while len(mine.drawn) < NEW:
        begun = [a for a in answers if a is not mine or step >= late]
        decodes = tuple(a.decode() for a in begun if not a.prefilling and len(a.drawn) < 3 * NEW)
        prefills = []
        for a in begun:
            if a.prefilling:
                count = (sizes.pop(0) if sizes else None) if a is mine else 7
                prefills.append(a.prefill(count))
        run(engine, answers, StepPlan(prefills=tuple(prefills), decodes=decodes))
        step += 1
    return mine.drawn


def crowd(count: int, seed: int, row: int) -> list[Answer]:
    chance = random.Random(seed)
    rows = [r for r in range(8) if r != row]
    return [
        Answer(r, chance.choice([BASE, 0, 1, 2]), prompt_of(seed + r, chance.randrange(1, 40)))
        for r in chance.sample(rows, count)
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "packed"),
    [
        ("llama", torch.float32, True),
        ("llama", torch.bfloat16, True),
        ("llama", torch.bfloat16, False),
        ("gemma3_text", torch.bfloat16, True),
        ("gemma3_text", torch.float32, False),
        ("gpt2", torch.bfloat16, True),
    ],
)
def test_nothing_else_in_the_batch_changes_a_bit(family: str, dtype: torch.dtype, packed: bool) -> None:
    engine = engine_for(family, dtype, packed=packed)
    assert engine.decode_tile == invariant.DECODE_TILE
    want = answered(engine)
    assert len({token.id for token in want}) > 1
    for i, count in enumerate((0, 1, 4, 7)):
        row = (5 * i) % 8
        got = answered(
            engine,
            row=row,
            place=PLACES[i % 2],
            chunks=((100,), (64,), (11, 30, 42), ())[i],
            neighbours=crowd(count, 100 * i, row),
            late=i % 3,
        )
        assert got == want


def test_a_shared_beginning_changes_no_bit() -> None:
    """Whatever its length, and whoever computed it in which chunks."""
    engine = engine_for("llama", torch.bfloat16, packed=True)
    want = answered(engine)
    for shared in (PREFILL_TILE + 5, PREFILL_TILE, 23):
        donor = Answer(2, 0, (*PROMPT[:shared], *prompt_of(9, 11)))
        run(engine, [donor], StepPlan(prefills=(donor.prefill(17),)))
        run(engine, [donor], StepPlan(prefills=(donor.prefill(),)))
        mine = Answer(6, 0, PROMPT, ALL)
        mine.done = shared
        copy = CopyPrefix(source=2, target=6, tokens=shared)
        run(engine, [mine], StepPlan(copies=(copy,), prefills=(mine.prefill(),)))
        while len(mine.drawn) < NEW:
            run(engine, [mine], StepPlan(decodes=(mine.decode(),)))
        assert mine.drawn == want


def test_prompt_logprobs_have_the_same_bits_in_any_chunks() -> None:
    engine = engine_for("llama", torch.bfloat16, packed=True)
    found = set()
    for sizes in ((83,), (64, 19), (1, 62, 1, 1, 18), (40, 43)):
        mine, logprobs = Answer(1, 0, PROMPT), list[float]()
        for size in sizes:
            (row,) = engine.step(StepPlan(prefills=(replace(mine.prefill(size), logprobs=True),))).rows
            logprobs += row.prompt_logprobs
        assert len(logprobs) == len(PROMPT) - 1
        found.add(tuple(logprobs))
    assert len(found) == 1


def test_a_row_that_is_not_finite_fails_alone() -> None:
    engine = engine_for("llama", torch.float32, packed=True)
    want = answered(engine)
    shapes = {name: linear.shape for name, linear in engine.backbone.linears.items()}
    engine.write(2, weights_for(shapes, 4, size=1e18))
    spoilt = Answer(3, 2, prompt_of(4, PREFILL_TILE + 9))
    beside = Answer(4, BASE, prompt_of(5, 9))
    assert answered(engine, neighbours=[spoilt, beside]) == want
    assert spoilt.failed
    assert not beside.failed


def test_where_neighbours_matter_rows_stand_alone() -> None:
    def by_rows(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def by_all(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    def by_place(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(len(x))[:, None]

    x = torch.randn(5, 3)
    assert [invariant.rows_are_alone(f, x) for f in (by_rows, by_all, by_place)] == [True, False, False]


def test_chunks_end_where_tiles_do_and_answers_do_not_stand_for_prompts() -> None:
    request = Request(
        id=RequestId("r"),
        adapter=None,
        input_ids=PROMPT * 3,
        max_new_tokens=9,
        slo=Slo(ttft_s=1, tpot_s=1),
        arrival_s=0,
    )
    run = Run(
        request=request,
        row=0,
        version=None,
        place=BASE,
        text=TextStream(FakeTokenizer()),
        started_s=0,
        context=[*request.input_ids, 1, 2, 3],
        generated=3,
        chunk_multiple=PREFILL_TILE,
    )
    sizes = []
    for budget in (112, 40, 112, 500):
        sizes.append(len(run.chunk(budget).tokens))
        run.prefilled += sizes[-1]
    assert sizes == [64, 40, 88, 57]
    assert len(run.held.tokens) == len(request.input_ids)


def test_without_the_mode_neighbours_do_change_bits() -> None:
    """So the test above can fail."""
    engine = engine_for("llama", torch.float32, packed=True, batch_invariant=False)
    want = answered(engine)
    assert any(answered(engine, neighbours=crowd(n, n, 0)) != want for n in range(1, 8))
    assert any(answered(engine, chunks=(size,)) != want for size in (1, 11, 30, 64))
