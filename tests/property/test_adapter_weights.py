"""Laws of weights as bytes: what is written is read back, what was tampered with is not taken for it."""

from collections.abc import Mapping

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adapters.model import LoraWeights
from adapters.weights import from_bytes, initial, manifest, read_update, to_bytes, update_bytes, version_uid
from db.records import Factor, LoraSpec
from infra.errors import IncompatibleAdapter, UpdateRejected

SHAPES = {"model.layers.0.self_attn.q_proj": (3, 2), "model.layers.1.mlp.down_proj": (2, 5)}
SPEC = LoraSpec(rank=2, alpha=3.5, targets=("down_proj", "q_proj"))
MANIFEST = manifest(SHAPES, SPEC)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def weights(draw: st.DrawFn) -> LoraWeights:
    """Any finite factors, -0.0 and subnormal numbers too."""
    return LoraWeights(
        spec=SPEC,
        tensors={name: draw(hnp.arrays(np.float32, shape, elements=FINITE)) for name, shape in MANIFEST.items()},
    )


def _same_bits(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


@given(weights())
def test_bytes_and_back(original: LoraWeights) -> None:
    data = to_bytes(original)
    back = from_bytes(data, SPEC, MANIFEST)
    assert back.spec == SPEC
    assert _same_bits(back.tensors, original.tensors)
    assert to_bytes(back) == data
    assert version_uid("b", back) == version_uid("b", original) != version_uid("c", original)
    reordered = LoraWeights(spec=SPEC, tensors=dict(sorted(original.tensors.items(), reverse=True)))
    assert to_bytes(reordered) == data
    assert version_uid("b", reordered) == version_uid("b", original)


@settings(max_examples=300)
@given(st.data())
def test_mutated_bytes_are_never_taken_for_the_version(data: st.DataObject) -> None:
    original = initial(SHAPES, SPEC, 1)
    good = bytearray(to_bytes(original))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    try:
        read = from_bytes(bytes(good), SPEC, MANIFEST)
    except IncompatibleAdapter:
        return
    # Only blanks in the header may change without changing what is read.
    header_end = 8 + int.from_bytes(good[:8], "little")
    assert (version_uid("b", read) == version_uid("b", original)) == (at < header_end)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(IncompatibleAdapter):
        from_bytes(noise, SPEC, MANIFEST)
    with pytest.raises(UpdateRejected):
        read_update(noise, base=initial(SHAPES, SPEC, 1), factor=Factor.B, max_norm=1.0)


@given(st.integers(0, 400))
def test_a_file_cut_short_is_refused(size: int) -> None:
    whole = to_bytes(initial(SHAPES, SPEC, 1))
    with pytest.raises(IncompatibleAdapter):
        from_bytes(whole[: min(size, len(whole) - 1)], SPEC, MANIFEST)


@given(weights(), st.sampled_from(Factor))
def test_an_update_is_read_within_its_norm(base: LoraWeights, factor: Factor) -> None:
    names = {Factor.A: "lora_A", Factor.B: "lora_B", Factor.BOTH: "lora_"}[factor]
    fresh = initial(SHAPES, SPEC, 5)
    chosen = {name: tensor for name, tensor in fresh.tensors.items() if names in name}
    change = sum(float(np.sum((t.astype(float) - base.tensors[n].astype(float)) ** 2)) for n, t in chosen.items())
    data = update_bytes(chosen)
    if change > 0:
        read = read_update(data, base=base, factor=factor, max_norm=change**0.5 * 1.01)
        assert _same_bits(read, chosen)
        with pytest.raises(UpdateRejected, match="norm"):
            read_update(data, base=base, factor=factor, max_norm=change**0.5 * 0.99)


def _refusal(tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> str:
    with pytest.raises(UpdateRejected) as refused:
        read_update(
            safetensors.numpy.save(dict(tensors), metadata),
            base=initial(SHAPES, SPEC, 1),
            factor=Factor.B,
            max_norm=1e3,
        )
    return refused.value.message


def test_an_update_says_why_it_is_refused() -> None:
    good = {name: np.zeros(shape, np.float32) for name, shape in MANIFEST.items() if "lora_B" in name}
    first = min(good)
    assert "missing" in _refusal({name: t for name, t in good.items() if name != first})
    assert "not expected" in _refusal({**good, "model.embed_tokens.weight": np.zeros(1, np.float32)})
    assert "not expected" in _refusal({**good, first.replace("lora_B", "lora_A"): np.zeros((2, 2), np.float32)})
    assert "shape" in _refusal({**good, first: good[first].T})
    assert "F64" in _refusal({**good, first: good[first].astype(np.float64)})
    assert "F16" in _refusal({**good, first: good[first].astype(np.float16)})
    for bad in (np.nan, np.inf, -np.inf):
        assert "not finite" in _refusal({**good, first: np.full_like(good[first], bad)})
    assert "norm" in _refusal({**good, first: np.full_like(good[first], 1e30)})
    assert "bytes" in _refusal(good, {"padding": "x" * 100_000})
