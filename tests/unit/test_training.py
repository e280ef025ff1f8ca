"""Training and scoring in slices equal what they cut up, and leave the shared model alone."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from adapters.model import LoraWeights
from db.records import Factor, LoraSpec
from infra.clock import ManualClock
from serving.model import Decode, Draw, Prefill, SamplingParams, StepPlan
from serving.ports import ScoreResult, SliceReport, TrainState, TrainTask, Work, WorkState
from serving.replica.backbone import Backbone
from serving.replica.checkpoints import Checkpoints, RoundNote, SavedRound
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.modes import PackedMode
from serving.replica.optimizer import FlatAdamW
from serving.replica.packing import RowEncoder, TokenRow, pack
from serving.replica.score import pair_factors
from serving.replica.segments import Kind, Piece, Pieces, Segments
from serving.replica.trainer import TorchTrainer, endless_order
from serving.replica.work import FIRST_GUESS_S, LEAST_TOKENS, Slices, SliceTimes
from serving.rows import Row
from serving.wire.control import RoundBody

EOS = 256
ROWS = tuple(Row(f"say {word}", word * 3) for word in ("a", "be", "see", "dogs", "eagle", "f", "go", "hi"))
TASK = TrainTask(factor=Factor.B, tokens=60, rows_per_step=3, lr=0.01, warmup_steps=2, seed=7)
FAMILIES = ("llama", "gpt2")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
    config = AutoConfig.for_model(family, vocab_size=270, bos_token_id=1, eos_token_id=EOS, **sizes)
    model: nn.Module = AutoModelForCausalLM.from_config(config).float().eval()
    return model


def tiny(family: str = "llama") -> Backbone:
    return Backbone(tiny_model(family), sha256="0" * 64, packed=False)


def adapter(backbone: Backbone, seed: int = 0, b_std: float = 0.1) -> LoraWeights:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, linear in backbone.linears.items():
        d_out, d_in = linear.shape
        tensors[f"{name}.lora_A.weight"] = rng.normal(0, 0.2, (4, d_in)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(0, b_std, (d_out, 4)).astype(np.float32)
    targets = tuple(sorted({name.rsplit(".", 1)[-1] for name in backbone.linears}))
    return LoraWeights(spec=LoraSpec(rank=4, alpha=8.0, targets=targets), tensors=tensors)


def trainer(backbone: Backbone, *, micro_tokens: int = 80) -> TorchTrainer:
    return TorchTrainer(backbone, FakeTokenizer(), 128, micro_tokens=micro_tokens, loss_positions=5, score_tokens=90)


def token_rows() -> list[TokenRow]:
    encoder = RowEncoder(FakeTokenizer(), eos_id=EOS, row_tokens=128)
    return [encoder.encode(row) for row in ROWS]


def finish(work: Work) -> list[SliceReport]:
    """Run to the end; stops at 10,000 slices."""
    reports = []
    for _ in range(10_000):
        reports.append(work.slice())
        if reports[-1].state is not WorkState.RUNNING:
            return reports
    raise AssertionError("it never ends")


@pytest.mark.parametrize("factor", list(Factor))
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_an_ordinary_backward(family: str, factor: Factor) -> None:
    backbone, rows = tiny(family), token_rows()
    base = adapter(backbone)
    trained = [n for n in base.tensors if is_trained(n, factor)]

    def leaves() -> dict[str, torch.Tensor]:
        return {n: torch.tensor(t).requires_grad_(n in trained) for n, t in base.tensors.items()}

    batch, whole, cut = pack(rows[:3], backbone.device), leaves(), leaves()
    with backbone.mode_set(PackedMode(lengths=batch.lengths, factors=pair_factors(whole), scale=base.spec.scale)):
        hidden = backbone.hidden(batch.ids, batch.positions)[batch.predicts]
        loss = F.cross_entropy(backbone.head(hidden), batch.labels, reduction="sum")
        (loss / 11).backward()  # type: ignore[no-untyped-call]

    for chunk, exact in ((len(batch.labels), True), (5, False)):
        for leaf in cut.values():
            leaf.grad = None
        segments = Segments(backbone, loss_positions=chunk)
        mode = PackedMode(lengths=batch.lengths, factors=pair_factors(cut), scale=base.spec.scale)
        pieces = segments.gradients(batch, mode, 1 / 11)
        kinds = []
        try:
            while True:
                kinds.append(next(pieces).kind)
        except StopIteration as end:
            total = end.value
        assert total == pytest.approx(float(loss.detach()), rel=1e-6)
        assert kinds.count(Kind.FORWARD) == kinds.count(Kind.BACKWARD) == 3
        for name in trained:
            want, got = whole[name].grad, cut[name].grad
            assert want is not None
            assert got is not None
            # One chunk is the same arithmetic; several round the loss's gradient another way.
            assert torch.equal(got, want) if exact else torch.allclose(got, want, rtol=1e-4, atol=1e-7), name
        assert all(cut[name].grad is None for name in base.tensors if name not in trained)


def is_trained(name: str, factor: Factor) -> bool:
    return factor is Factor.BOTH or f".lora_{factor.value}." in name


class Kept:
    """A tensor that autograd keeps for a backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("factor", list(Factor))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_computed_again_gives_the_same_gradients_and_holds_less(family: str, factor: Factor) -> None:
    backbone = tiny(family)
    for group in backbone.groups:
        group.allot(places=1, rank=4)
    base, batch = adapter(backbone), pack(token_rows()[:3], backbone.device)
    gradients, peaks = [], []
    for checkpoint in (False, True):
        leaves = {n: torch.tensor(t).requires_grad_(is_trained(n, factor)) for n, t in base.tensors.items()}
        mode = PackedMode(lengths=batch.lengths, factors=pair_factors(leaves), scale=base.spec.scale)
        pieces = Segments(backbone, loss_positions=5, checkpoint=checkpoint).gradients(batch, mode, 1 / 11)
        fixed = {t.untyped_storage().data_ptr() for t in (*backbone.model.parameters(), *leaves.values())}
        kept: weakref.WeakSet[Kept] = weakref.WeakSet()

        def keep(tensor: torch.Tensor, kept: "weakref.WeakSet[Kept]" = kept) -> Kept:
            one = Kept(tensor.detach())  # the tensor itself would be a cycle
            kept.add(one)
            return one

        kinds, peak, piece = [], 0, next(pieces, None)
        while piece is not None:
            kinds.append(piece.kind)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one.tensor):
                piece = next(pieces, None)
            storages = {one.tensor.untyped_storage().data_ptr(): one.tensor.untyped_storage().nbytes() for one in kept}
            peak = max(peak, sum(size for at, size in storages.items() if at not in fixed))
        again = [Kind.RECOMPUTE, Kind.BACKWARD] * 3
        assert kinds[-len(again) :] == again if checkpoint else Kind.RECOMPUTE not in kinds
        gradients.append({n: leaf.grad for n, leaf in leaves.items()})
        bound = trainer(backbone).activation_bytes(len(batch.ids), checkpointed=checkpoint)
        assert peak <= bound
        assert factor is not Factor.BOTH or bound < 4 * peak
        peaks.append(peak)
    assert peaks[1] < peaks[0] / 2
    for name in base.tensors:
        whole, cut = (grads[name] for grads in gradients)
        assert (whole is not None) == (cut is not None) == is_trained(name, factor)
        assert whole is None or cut is None or torch.equal(whole, cut), name


# PEFT asks transformers for a name that is on its way out.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers_and_peft_row_by_row(family: str) -> None:
    backbone = tiny(family)
    weights = adapter(backbone)
    model = tiny_model(family)
    for version in (None, weights):
        if version is not None:
            config = peft.LoraConfig(
                r=4, lora_alpha=8, target_modules=list(version.spec.targets), fan_in_fan_out=family == "gpt2"
            )
            model = peft.get_peft_model(model, config).eval()
            state = {f"base_model.model.{n}": torch.tensor(t) for n, t in version.tensors.items()}
            peft.set_peft_model_state_dict(model, state)
        want = []
        with torch.no_grad():
            for row in token_rows():
                logits = model(input_ids=torch.tensor([row.ids])).logits[0, row.prompt - 1 : -1]
                want.append(float(F.cross_entropy(logits, torch.tensor(row.ids[row.prompt :]), reduction="sum")))
        work = trainer(backbone).score(ROWS, version)
        finish(work)
        result = work.result()
        assert result.nll_by_row == pytest.approx(want, rel=1e-4)
        assert result.tokens_by_row == tuple(row.supervised for row in token_rows())


def test_packed_rows_score_as_each_alone() -> None:
    backbone = tiny()
    weights, packs = adapter(backbone), trainer(backbone)
    together = packs.score(ROWS, weights)
    finish(together)
    for i, row in enumerate(ROWS):
        alone = packs.score([row], weights)
        finish(alone)
        assert alone.result().nll_by_row[0] == pytest.approx(together.result().nll_by_row[i], rel=1e-5)


def test_training_lowers_the_loss_and_moves_only_its_factor() -> None:
    backbone = tiny()
    base = adapter(backbone, b_std=0.0)
    work = trainer(backbone).train(replace(TASK, tokens=1_000, lr=0.05), base, ROWS)
    reports = finish(work)
    losses = [r.loss for r in reports if r.loss is not None]
    assert reports[-1].state is WorkState.DONE
    assert reports[-1].step_ended
    assert work.steps == len(losses) == sum(r.step_ended for r in reports)
    assert work.tokens == sum(r.tokens for r in reports) >= 1_000
    assert work.tokens - reports[-1].tokens < 1_000
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    shadow = work.shadow()
    assert shadow.spec == base.spec
    assert list(shadow.tensors) == list(base.tensors)
    for name, tensor in shadow.tensors.items():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, base.tensors[name]) == (".lora_A." in name)
    assert not any(tensor.any() for name, tensor in base.tensors.items() if ".lora_B." in name)


def test_training_is_a_function_of_task_base_and_rows() -> None:
    def shadow(task: TrainTask) -> LoraWeights:
        backbone = tiny()
        work = trainer(backbone).train(task, adapter(backbone), ROWS)
        finish(work)
        return work.shadow()

    def same(a: LoraWeights, b: LoraWeights) -> bool:
        return all(np.array_equal(a.tensors[n], b.tensors[n]) for n in a.tensors)

    task = replace(TASK, factor=Factor.BOTH)
    assert same(shadow(task), shadow(task))
    assert not same(shadow(task), shadow(replace(task, seed=8)))


def by_peft(task: TrainTask, base: LoraWeights, steps: int) -> dict[str, np.ndarray]:
    """Train as an ordinary loop over padded batches does; return the factors."""
    spec = base.spec
    config = peft.LoraConfig(r=spec.rank, lora_alpha=int(spec.alpha), target_modules=list(spec.targets))
    model = peft.get_peft_model(tiny_model("llama"), config)
    peft.set_peft_model_state_dict(model, {f"base_model.model.{n}": torch.tensor(t) for n, t in base.tensors.items()})
    parameters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    trained = {n: p.requires_grad_(is_trained(n, task.factor)) for n, p in parameters.items()}
    trained = {n: p for n, p in trained.items() if p.requires_grad}
    groups = [
        {"params": [p for n, p in trained.items() if "lora_A" in n], "lr": task.lr},
        {"params": [p for n, p in trained.items() if "lora_B" in n], "lr": task.lr * task.lr_ratio},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / task.warmup_steps))
    rows, order = token_rows(), endless_order(len(ROWS), task.seed)
    for _ in range(steps):
        batch = [rows[next(order)] for _ in range(task.rows_per_step)]
        longest = max(len(row.ids) for row in batch)
        ids, mask = torch.zeros(2, len(batch), longest, dtype=torch.long)
        labels = torch.full((len(batch), longest), -100)
        for i, row in enumerate(batch):
            ids[i, : len(row.ids)], mask[i, : len(row.ids)] = torch.tensor(row.ids), 1
            labels[i, row.prompt : len(row.ids)] = ids[i, row.prompt : len(row.ids)]
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained.values(), task.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    short = {n.removeprefix("base_model.model.").replace(".default.", "."): p for n, p in parameters.items()}
    return {n: p.detach().numpy() for n, p in short.items()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {"factor": Factor.BOTH},
        {"factor": Factor.BOTH, "lr_ratio": 16.0, "max_grad_norm": 0.1},
        {"factor": Factor.B, "lr_ratio": 4.0},
        {"factor": Factor.A, "lr_ratio": 4.0, "warmup_steps": 1},
    ],
)
def test_training_equals_an_ordinary_loop_of_peft_and_torch(changes: dict[str, object]) -> None:
    """Also with warm-up, clipping, a rate for each factor, and micro-batches that add up to a step."""
    backbone = tiny()
    base, task = adapter(backbone), replace(TASK, **{"tokens": 10**9, "warmup_steps": 3, **changes})  # type: ignore[arg-type]
    work = trainer(backbone, micro_tokens=1).train(task, base, ROWS)
    while work.steps < 5:
        work.slice()
    want = by_peft(task, base, 5)
    got = work.shadow().tensors
    work.close()
    assert want.keys() == got.keys()
    for name, tensor in got.items():
        # AdamW divides rounding in a small gradient by that gradient's size: what is left of it grows with the rate.
        atol = 2e-4 * (task.lr_ratio if ".lora_B." in name else 1)
        np.testing.assert_allclose(tensor, want[name], rtol=2e-3, atol=atol, err_msg=name)
        far = np.abs(want[name] - base.tensors[name]).max()
        assert (far > 20 * atol) == is_trained(name, task.factor), "the comparison sees the training"


def test_micro_batches_add_up_to_the_same_step() -> None:
    backbone = tiny()
    shadows = []
    for micro_tokens in (1, 1_000):
        work = trainer(backbone, micro_tokens=micro_tokens).train(replace(TASK, tokens=1), adapter(backbone), ROWS)
        finish(work)
        assert work.steps == 1
        shadows.append(work.shadow())
    for name, tensor in shadows[0].tensors.items():
        np.testing.assert_allclose(tensor, shadows[1].tensors[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_training_goes_on_from_a_saved_state_bit_for_bit(tmp_path: Path, checkpoint_layers: bool) -> None:
    """By way of the file; the rows are gone through more than once, and what else runs meanwhile is another matter."""
    backbone = tiny()
    base, task = adapter(backbone), replace(TASK, factor=Factor.BOTH, tokens=250)
    packs = TorchTrainer(
        backbone, FakeTokenizer(), 128, micro_tokens=80, loss_positions=5, checkpoint_layers=checkpoint_layers
    )
    whole = packs.train(task, base, ROWS)
    states: list[TrainState] = []
    shadows: dict[int, LoraWeights] = {}
    running = True
    while running:
        report = whole.slice()
        running = report.state is WorkState.RUNNING
        if report.step_ended and whole.steps in (1, 4):
            states.append(whole.state())
            shadows[whole.steps] = whole.shadow()
    states.append(whole.state())
    shadows[whole.steps] = whole.shadow()
    assert whole.steps * task.rows_per_step > 2 * len(ROWS)
    file = Checkpoints(tmp_path / "x.safetensors")
    for state in states:
        file.write(SavedRound(note=note(state), arrays=state.arrays))
        read = file.read("r")
        assert read is not None
        again = trainer(backbone).train(task, base, ROWS, read.state)
        assert (again.steps, again.tokens) == (state.steps, state.tokens)
        ended = again.slice().state is WorkState.DONE
        assert all(t.tobytes() == again.shadow().tensors[n].tobytes() for n, t in shadows[state.steps].tensors.items())
        if not ended:
            finish(again)
        assert (again.steps, again.tokens) == (whole.steps, whole.tokens)
        for name, tensor in whole.shadow().tensors.items():
            assert tensor.tobytes() == again.shadow().tensors[name].tobytes(), name
    with pytest.raises(ValueError, match="state"):
        packs.train(replace(task, factor=Factor.B), base, ROWS, states[0])


def note(state: TrainState) -> RoundNote:
    body = RoundBody(
        round_id="r", adapter="a", base_uid="u", epoch=1, factor="both", tokens=250, rows_per_step=3, lr=0.01,
        swap_every=0, seed=7, deadline_s=9,
    )  # fmt: skip
    return RoundNote(
        body=body, rows_sha256="", steps=state.steps, tokens=state.tokens, candidate_steps=0, loss_first=0.5,
        loss_last=0.25, best_ce=None, started_s=0.0,
    )  # fmt: skip


def test_a_shadow_taken_in_mid_training_does_not_change_later() -> None:
    backbone = tiny()
    work = trainer(backbone).train(replace(TASK, tokens=200), adapter(backbone), ROWS)
    while not work.slice().step_ended:
        pass
    early = work.shadow()
    copies = {name: tensor.copy() for name, tensor in early.tensors.items()}
    finish(work)
    assert all(np.array_equal(early.tensors[name], copies[name]) for name in copies)


GROUPS = {"x": (3, 5), "y": (7,), "z": (600, 500)}
"""The last is longer than what a step works on at a time."""


def drawn(seed: int, std: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, std, shape).astype(np.float32) for name, shape in GROUPS.items()}


def pull(leaves: Mapping[str, torch.Tensor], seed: int, std: float = 1.0) -> None:
    """Add some gradient."""
    for name, array in drawn(seed, std).items():
        (leaves[name] * leaves[name] * torch.tensor(array)).sum().backward()  # type: ignore[no-untyped-call]


def ours(seed: int = 0) -> FlatAdamW:
    initial = drawn(seed)
    return FlatAdamW([{"x": initial["x"], "y": initial["y"]}, {"z": initial["z"]}], torch.device("cpu"))


def test_optimizer_equals_torchs_adamw_with_a_rate_for_each_group() -> None:
    optimizer = ours()
    theirs = {name: torch.tensor(array).requires_grad_() for name, array in drawn(0).items()}
    groups = [{"params": [theirs["x"], theirs["y"]], "lr": 0.01}, {"params": [theirs["z"]], "lr": 0.16}]
    reference = torch.optim.AdamW(groups, weight_decay=0.0)
    for step in range(6):
        for leaves in (optimizer.leaves, theirs):
            pull(leaves, step, 10.0**step / 100)
        want = float(nn.utils.clip_grad_norm_(theirs.values(), 1.0))
        reference.step()
        reference.zero_grad()
        assert optimizer.step([0.01, 0.16], 1.0) == pytest.approx(want, rel=1e-5)
    for name, leaf in theirs.items():
        assert torch.allclose(optimizer.leaves[name], leaf, rtol=1e-5, atol=2e-4)


def test_what_was_taken_never_changes_and_taking_changes_nothing() -> None:
    """A swap and a checkpoint read what the optimizer made, in other threads, for as long as they like."""
    left_alone, taken = ours(), ours()
    kept: list[tuple[np.ndarray, bytes]] = []
    for step in range(9):
        for optimizer in (left_alone, taken):
            pull(optimizer.leaves, step)
            optimizer.step([0.01, 0.02], 1.0)
        arrays: list[np.ndarray] = []
        if step in (1, 2, 6):
            arrays += taken.snapshot().values()
        if step in (2, 4, 5):
            moments = taken.moments()
            arrays += (moments.values, moments.mean, moments.square)
        kept += [(array, array.tobytes()) for array in arrays]
        for name, array in taken.snapshot().items() if step == 7 else ():
            assert np.shares_memory(array, taken.leaves[name].detach().numpy()), "a copy would make swaps wait"
    assert all(array.tobytes() == before for array, before in kept)
    for name, leaf in left_alone.leaves.items():
        assert torch.equal(leaf, taken.leaves[name])


def test_a_buffer_is_written_again_only_when_nobody_reads_it() -> None:
    """Its pages need not be given back and fetched anew while a swap waits."""
    optimizer, places = ours(), set()
    for step in range(12):
        pull(optimizer.leaves, step)
        optimizer.step([0.01, 0.02], 1.0)
        part = optimizer.snapshot()["y"][2:]
        before = part.tobytes()
        places.add(optimizer.leaves["x"].data_ptr())
        pull(optimizer.leaves, step)
        optimizer.step([0.01, 0.02], 1.0)
        assert part.tobytes() == before, "a view of a part keeps all of it"
    assert len(places) <= 3


def test_an_optimizer_goes_on_from_its_moments_bit_for_bit() -> None:
    whole, first, second = ours(), ours(), ours(seed=5)
    for step in range(4):
        for optimizer in (whole, first):
            pull(optimizer.leaves, step)
            optimizer.step([0.01, 0.02], 1.0)
    second.restore(first.moments(), 4)
    for step in range(4, 7):
        for optimizer in (whole, second):
            pull(optimizer.leaves, step)
            optimizer.step([0.01, 0.02], 1.0)
    for name, leaf in whole.leaves.items():
        assert torch.equal(leaf, second.leaves[name])


def poisoned(backbone: Backbone) -> LoraWeights:
    weights = adapter(backbone)
    name = next(iter(weights.tensors))
    bad = np.full_like(weights.tensors[name], np.nan)
    return replace(weights, tensors={**weights.tensors, name: bad})


def test_a_non_finite_loss_fails_the_work_with_its_reason() -> None:
    backbone = tiny()
    before = state(backbone)
    work = trainer(backbone).train(TASK, poisoned(backbone), ROWS)
    last = finish(work)[-1]
    assert last.state is WorkState.FAILED
    assert "non-finite loss" in last.reason
    assert (work.steps, work.tokens) == (0, 0)
    assert work.slice().state is WorkState.FAILED
    assert state(backbone) == before


def test_work_without_rows_ends_at_once() -> None:
    packs = trainer(tiny())
    failed = packs.train(TASK, adapter(tiny()), []).slice()
    assert failed.state is WorkState.FAILED
    assert "no rows" in failed.reason
    nothing = packs.score([], None)
    assert nothing.slice().state is WorkState.DONE
    assert nothing.result() == ScoreResult(nll_by_row=(), tokens_by_row=())


def test_an_error_in_the_model_fails_the_work_and_restores_the_model() -> None:
    backbone = tiny()
    before = state(backbone)
    work = trainer(backbone).train(TASK, adapter(backbone), ROWS)

    def fail(*_: object) -> None:
        raise RuntimeError("out of something")

    hook = backbone.layers[1].register_forward_pre_hook(fail)
    last = finish(work)[-1]
    hook.remove()
    assert last.state is WorkState.FAILED
    assert "out of something" in last.reason
    assert state(backbone) == before


def state(backbone: Backbone) -> tuple[object, ...]:
    """What serving left the model as, and must find."""
    return (
        backbone.mode,
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        [sorted(layer.__dict__) for layer in backbone.layers],
        [m.training for m in backbone.model.modules()],
        [(p.requires_grad, p.grad) for p in backbone.model.parameters()],
    )


def test_a_decode_step_between_any_two_slices_gives_the_same_bits() -> None:
    """Also when the caller of a slice left inference mode on, and with scoring under way."""
    backbone = tiny()
    before = state(backbone)
    engine = TorchEngine(backbone, rows=2, max_total_tokens=64, places=2, max_rank=4)
    engine.write(1, adapter(backbone, seed=3))
    draw = Draw(params=SamplingParams(top_n_tokens=5), index=0)
    prompt = tuple(b"hello there")
    engine.step(StepPlan(prefills=tuple(Prefill(row=r, place=r, tokens=prompt, start=0, draw=draw) for r in range(2))))
    plan = StepPlan(
        decodes=tuple(Decode(row=r, place=r, token=65, position=len(prompt), draw=draw) for r in range(2)),
    )
    want = engine.step(plan).rows

    packs = trainer(backbone)
    undisturbed = packs.train(TASK, adapter(backbone), ROWS)
    finish(undisturbed)
    train = packs.train(TASK, adapter(backbone), ROWS)
    score = packs.score(ROWS, adapter(backbone, seed=1))
    slices = 0
    for work in (train, score):
        running = True
        while running:
            with torch.inference_mode(slices % 2 == 0):
                running = work.slice().state is WorkState.RUNNING
            slices += 1
            assert state(backbone) == before
            assert engine.step(plan).rows == want
    assert slices > 50
    # And the other way round: serving in between changes nothing for training.
    alone, beside = undisturbed.shadow().tensors, train.shadow().tensors
    assert all(np.array_equal(alone[name], beside[name]) for name in alone)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("slices", [0, 2, 5, 9, 14])
def test_closing_in_mid_step_frees_everything(slices: int) -> None:
    backbone = tiny()
    packs, base = trainer(backbone), adapter(backbone)
    for work in (packs.train(TASK, base, ROWS), packs.score(ROWS, base)):
        finish(work)
        work.close()
    del work
    before, tensors = state(backbone), live_tensors()
    for start in (lambda: packs.train(TASK, base, ROWS), lambda: packs.score(ROWS, base)):
        work = start()
        for _ in range(slices):
            work.slice()
        work.close()
        work.close()
        assert live_tensors() == tensors
        gone = weakref.ref(work)
        gc.disable()
        try:
            del work
            assert gone() is None, "a cycle keeps closed work alive until a collection"
        finally:
            gc.enable()
        assert state(backbone) == before


def test_a_slice_is_predicted_from_measured_ones_of_its_kind() -> None:
    clock, times = ManualClock(), SliceTimes()
    costs = {Kind.FORWARD: 0.001, Kind.BACKWARD: 0.002}

    def pieces() -> Pieces:
        for kind, tokens in ((Kind.FORWARD, 100), (Kind.BACKWARD, 200), (Kind.FORWARD, 200), (Kind.FORWARD, 3)):
            yield Piece(kind, tokens)
            clock.advance(costs[kind] * tokens)

    work = Slices(pieces(), times, clock)
    assert work.next_slice_s() == FIRST_GUESS_S
    assert work.slice().seconds == pytest.approx(0.1)
    assert work.next_slice_s() == FIRST_GUESS_S, "another kind"
    assert work.slice().seconds == pytest.approx(0.4)
    assert work.next_slice_s() == pytest.approx(0.2)
    work.slice()
    assert work.next_slice_s() == pytest.approx(0.001 * LEAST_TOKENS), "a small piece is not free"
    assert work.slice().state is WorkState.DONE
    assert work.next_slice_s() == 0
