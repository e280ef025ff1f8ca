"""Shapes from a checkpoint, fresh factors, and PEFT's files as PEFT itself reads and writes them."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.model import LoraWeights
from adapters.weights import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    from_bytes,
    initial,
    linear_shapes,
    load_peft,
    manifest,
    of_factor,
    save_peft,
    targets,
    to_bytes,
)
from db.records import Factor, LoraSpec
from infra.errors import AdapterError, IncompatibleAdapter

# PEFT 0.21 asks transformers for a name that it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


@pytest.fixture
def llama() -> Iterator[LlamaForCausalLM]:
    """A tiny model with random weights, and the caller's torch settings as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield LlamaForCausalLM(CONFIG).eval()
    torch.set_num_threads(threads)


@pytest.fixture
def checkpoint(llama: LlamaForCausalLM, tmp_path: Path) -> Path:
    """Its folder."""
    llama.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _random(checkpoint: Path, seed: int) -> LoraWeights:
    """Factors with B ≠ 0 on every linear."""
    shapes = linear_shapes(checkpoint)
    spec = LoraSpec(rank=4, alpha=6.0, targets=targets(shapes))
    random = np.random.default_rng(seed)
    return LoraWeights(
        spec=spec,
        tensors={
            name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in manifest(shapes, spec).items()
        },
    )


def test_shapes_are_those_of_the_decoder_linears(llama: LlamaForCausalLM, checkpoint: Path) -> None:
    shapes = linear_shapes(checkpoint)
    expected = {
        name: (module.out_features, module.in_features)
        for name, module in llama.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert shapes == expected
    assert len(shapes) == 14
    assert targets(shapes) == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def test_shapes_of_a_checkpoint_in_several_files(llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert linear_shapes(tmp_path / "sharded") == linear_shapes(checkpoint)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=str(tmp_path)):
        linear_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(AdapterError, match="checkpoint"):
        linear_shapes(tmp_path)


def test_fresh_factors_change_nothing_yet(checkpoint: Path) -> None:
    shapes = linear_shapes(checkpoint)
    spec = LoraSpec(rank=4, alpha=8.0, targets=("q_proj",))
    fresh, again = initial(shapes, spec, 3), initial(shapes, spec, 3)
    assert to_bytes(fresh) == to_bytes(again) != to_bytes(initial(shapes, spec, 4))
    assert len(fresh.tensors) == 4
    for name in of_factor(fresh.tensors, Factor.B):
        assert not fresh.tensors[name].any()
    for name in of_factor(fresh.tensors, Factor.A):
        assert np.abs(fresh.tensors[name]).max() <= 1 / 4
        assert fresh.tensors[name].std() == pytest.approx(1 / 4 / 3**0.5, rel=0.2)
    with pytest.raises(IncompatibleAdapter, match="c_attn"):
        manifest(shapes, replace(spec, targets=("c_attn", "q_proj")))


def test_another_shape_or_backbone_is_refused(checkpoint: Path) -> None:
    weights = _random(checkpoint, 1)
    expected = manifest(linear_shapes(checkpoint), weights.spec)
    for spec in (replace(weights.spec, alpha=7.0), replace(weights.spec, rank=2)):
        with pytest.raises(IncompatibleAdapter):
            from_bytes(to_bytes(weights), spec, expected)
    wider = {name: (a, b * 2) for name, (a, b) in expected.items()}
    with pytest.raises(IncompatibleAdapter, match="shape"):
        from_bytes(to_bytes(weights), weights.spec, wider)
    pickled = io.BytesIO()
    torch.save({name: torch.from_numpy(t) for name, t in weights.tensors.items()}, pickled)
    for data in (pickled.getvalue()[:200], b"\x80\x04."):
        with pytest.raises(IncompatibleAdapter, match="pickle"):
            from_bytes(data, weights.spec, expected)


def test_a_header_of_any_length_is_read(checkpoint: Path) -> None:
    weights = _random(checkpoint, 1)
    data = to_bytes(weights)
    size = int.from_bytes(data[:8], "little")
    padded = next(n for n in range(size, size + 257) if n % 256 == 0x80)
    file = padded.to_bytes(8, "little") + data[8 : 8 + size].ljust(padded) + data[8 + size :]
    assert file.startswith(b"\x80"), "as a pickle does"
    read = from_bytes(file, weights.spec, manifest(linear_shapes(checkpoint), weights.spec))
    assert all((read.tensors[name] == tensor).all() for name, tensor in weights.tensors.items())


def test_peft_computes_the_same_from_our_files(llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path) -> None:
    weights = _random(checkpoint, 1)
    save_peft(tmp_path / "adapter", weights, "some/model")
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        bare = llama(ids).logits
        merged = LlamaForCausalLM(CONFIG).eval()
        merged.load_state_dict(llama.state_dict())
        for name, module in merged.named_modules():
            if name + ".lora_A.weight" in weights.tensors:
                a = torch.from_numpy(weights.tensors[name + ".lora_A.weight"])
                b = torch.from_numpy(weights.tensors[name + ".lora_B.weight"])
                module.weight += weights.spec.scale * (b @ a)
        ours = merged(ids).logits
        theirs = PeftModel.from_pretrained(llama, tmp_path / "adapter")(ids).logits
    assert (theirs - bare).abs().max() > 0.1
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-4)


def test_we_read_what_peft_writes(llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(llama, config)
    model.save_pretrained(tmp_path / "peft")
    spec = LoraSpec(rank=4, alpha=12.0, targets=("down_proj", "q_proj"))
    expected = manifest(linear_shapes(checkpoint), spec)
    read = load_peft(tmp_path / "peft", expected)
    assert read.spec == spec
    for name, tensor in read.tensors.items():
        parameter = model.get_parameter("base_model.model." + name.replace(".weight", ".default.weight"))
        assert np.array_equal(tensor, parameter.detach().numpy())
    save_peft(tmp_path / "ours", read, "some/model")
    back = load_peft(tmp_path / "ours", expected)
    assert to_bytes(back) == to_bytes(read)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = load_peft(tmp_path / "half", expected)
    for name, tensor in half.tensors.items():
        np.testing.assert_allclose(tensor, read.tensors[name], rtol=2**-8)


def test_peft_files_that_we_cannot_compute_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    weights = _random(checkpoint, 1)
    expected = manifest(linear_shapes(checkpoint), weights.spec)
    save_peft(tmp_path, weights, "some/model")
    good = json.loads((tmp_path / PEFT_CONFIG).read_text())
    changes: list[tuple[str, object]] = [
        ("use_dora", True),
        ("use_rslora", True),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("peft_type", "IA3"),
        ("r", 2),
        ("r", None),
    ]
    for key, value in changes:
        (tmp_path / PEFT_CONFIG).write_text(json.dumps({**good, key: value}))
        with pytest.raises(IncompatibleAdapter):
            load_peft(tmp_path, expected)
    (tmp_path / PEFT_CONFIG).write_text("{")
    with pytest.raises(IncompatibleAdapter, match="no PEFT adapter"):
        load_peft(tmp_path, expected)
    (tmp_path / PEFT_CONFIG).write_text(json.dumps(good))
    (tmp_path / PEFT_WEIGHTS).write_bytes(b"\x80\x04.")
    with pytest.raises(IncompatibleAdapter, match="pickle"):
        load_peft(tmp_path, expected)
