"""An adapter's weights as names, shapes and bytes: ours (safetensors, for the update store) and PEFT's files.

Nothing that comes from outside is trusted: what is read is measured, parsed as safetensors (never unpickled), and must
have exactly the expected tensors. numpy only: flows read weights without loading torch.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np
import safetensors
import safetensors.numpy

from adapters.model import Array, LoraWeights, Manifest
from db.records import Factor, LoraSpec, VersionUid
from infra.errors import AdapterError, CollmError, IncompatibleAdapter, UpdateRejected

PEFT_PREFIX = "base_model.model."
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
SPEC_KEY = "lora"
"""Metadata of our files: the shape they were made for. One key only: safetensors does not keep their order."""

_DECODER_LINEAR = re.compile(r"(?:.+\.)?(?:layers|h)\.\d+\..+\.weight")
_HEADER_BYTES_PER_TENSOR = 512
_PICKLES = (b"PK\x03\x04", b"\x80")
"""How torch.save's files begin: zip, or a bare pickle."""
_PEFT_NEUTRAL: tuple[tuple[str, object], ...] = (
    ("use_dora", False),
    ("use_rslora", False),
    ("lora_bias", False),
    ("fan_in_fan_out", False),
    ("bias", "none"),
    ("rank_pattern", {}),
    ("alpha_pattern", {}),
    ("modules_to_save", None),
    ("layer_replication", None),
    ("trainable_token_indices", None),
    ("target_parameters", None),
)
"""Fields of PEFT's configuration that change the formula, with the value that leaves it as it is."""


class _Entry(TypedDict):
    """A tensor as ``safetensors.deserialize`` gives it."""

    dtype: str
    shape: list[int]
    data: bytearray


def linear_shapes(model_dir: Path) -> dict[str, tuple[int, int]]:
    """Return module name → (out, in) of the decoder layers' linears, from the checkpoint's headers.

    Raises ``AdapterError`` if there is no readable checkpoint.
    """
    index = model_dir / "model.safetensors.index.json"
    try:
        files = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.exists()
            else ["model.safetensors"]
        )
        headers = [_file_header(model_dir / name) for name in files]
    except (OSError, ValueError, KeyError) as e:
        raise AdapterError(f"no readable checkpoint in {model_dir}: {e}") from e
    shapes = {
        name.removesuffix(".weight"): (int(entry["shape"][0]), int(entry["shape"][1]))
        for header in headers
        for name, entry in header.items()
        if _DECODER_LINEAR.fullmatch(name) and len(entry["shape"]) == 2
    }
    return dict(sorted(shapes.items()))


def targets(shapes: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """Return the last parts of all names: the targets of an adapter on every linear."""
    return tuple(sorted({name.rpartition(".")[2] for name in shapes}))


def manifest(shapes: Mapping[str, tuple[int, int]], spec: LoraSpec) -> Manifest:
    """Return the tensors that an adapter of that shape has, sorted. Raises ``IncompatibleAdapter`` for a target that
    this backbone lacks."""
    missing = set(spec.targets) - set(targets(shapes))
    if missing:
        raise IncompatibleAdapter(f"this backbone has no linear named {', '.join(sorted(missing))}")
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in shapes.items():
        if name.rpartition(".")[2] in spec.targets:
            tensors[name + A_SUFFIX] = (spec.rank, columns)
            tensors[name + B_SUFFIX] = (rows, spec.rank)
    return dict(sorted(tensors.items()))


def initial(shapes: Mapping[str, tuple[int, int]], spec: LoraSpec, seed: int) -> LoraWeights:
    """Return fresh factors as PEFT draws them: A uniform within ±1/√d_in (Kaiming, a = √5), B zero."""
    random = np.random.default_rng(seed)
    tensors = {
        name: (random.random(shape, dtype=np.float32) * 2 - 1) / np.float32(shape[1] ** 0.5)
        if name.endswith(A_SUFFIX)
        else np.zeros(shape, np.float32)
        for name, shape in manifest(shapes, spec).items()
    }
    return LoraWeights(spec=spec, tensors=tensors)


def of_factor(names: Iterable[str], factor: Factor) -> list[str]:
    """Return the names that belong to a factor, sorted."""
    suffixes = {Factor.A: (A_SUFFIX,), Factor.B: (B_SUFFIX,), Factor.BOTH: (A_SUFFIX, B_SUFFIX)}[factor]
    return sorted(name for name in names if name.endswith(suffixes))


def version_uid(backbone: str, weights: LoraWeights) -> VersionUid:
    """Return the content hash that names a version: of the backbone's sha256, the shape and every factor's bits."""
    digest = hashlib.sha256(json.dumps([backbone, _spec_json(weights.spec)]).encode())
    for name in sorted(weights.tensors):
        tensor = weights.tensors[name]
        digest.update(json.dumps([name, list(tensor.shape)]).encode())
        digest.update(np.ascontiguousarray(tensor, "<f4").data)
    return VersionUid(digest.hexdigest())


def to_bytes(weights: LoraWeights) -> bytes:
    """Return the file of a version: the same weights give the same bytes."""
    return _save(weights.tensors, {SPEC_KEY: json.dumps(_spec_json(weights.spec))})


def from_bytes(data: bytes, spec: LoraSpec, manifest: Manifest) -> LoraWeights:
    """Read ``to_bytes``. Raises ``IncompatibleAdapter`` with what does not fit."""
    tensors, metadata = _parse(data, manifest, IncompatibleAdapter)
    if metadata.get(SPEC_KEY) != json.dumps(_spec_json(spec)):
        raise IncompatibleAdapter(f"the file was made for {metadata.get(SPEC_KEY)}, not {json.dumps(_spec_json(spec))}")
    return LoraWeights(spec=spec, tensors=tensors)


def update_bytes(tensors: Mapping[str, Array]) -> bytes:
    """Return the file of a client's update: the same tensors give the same bytes."""
    return _save(tensors, None)


def read_update(data: bytes, *, base: LoraWeights, factor: Factor, max_norm: float) -> Mapping[str, Array]:
    """Read an update made from ``base``, if it holds exactly the factor's tensors, fp32, finite, near enough.

    ``max_norm`` bounds the Frobenius norm, over all tensors, of the change. Raises ``UpdateRejected`` with the reason.
    That the update was *made* from ``base`` is for the caller to check, by its uid.
    """
    expected = {name: base.tensors[name].shape for name in of_factor(base.tensors, factor)}
    tensors, _ = _parse(data, expected, UpdateRejected)
    square = sum(float(np.sum(np.subtract(t, base.tensors[n], dtype=np.float64) ** 2)) for n, t in tensors.items())
    norm = square**0.5
    if not norm <= max_norm:
        raise UpdateRejected(f"the update's norm {norm:.3g} exceeds {max_norm:.3g}")
    return tensors


def max_bytes(expected: Manifest) -> int:
    """Return the most that a file with these tensors, fp32, may have."""
    return 4096 + sum(_HEADER_BYTES_PER_TENSOR + 4 * int(np.prod(shape)) for shape in expected.values())


def save_peft(folder: Path, weights: LoraWeights, base_model: str) -> None:
    """Write the two files that ``peft.PeftModel.from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": weights.spec.rank,
        "lora_alpha": weights.spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(weights.spec.targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {PEFT_PREFIX + name: tensor for name, tensor in weights.tensors.items()}
    (folder / PEFT_WEIGHTS).write_bytes(_save(tensors, {"format": "pt"}))


def load_peft(folder: Path, manifest: Manifest) -> LoraWeights:
    """Read PEFT's files; fp32, bf16 or fp16. Raises ``IncompatibleAdapter``, also for a LoRA of another formula."""
    try:
        config = json.loads((folder / PEFT_CONFIG).read_text())
        data = (folder / PEFT_WEIGHTS).read_bytes()
    except (OSError, ValueError) as e:
        raise IncompatibleAdapter(f"{folder} holds no PEFT adapter: {e}") from e
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise IncompatibleAdapter(f"{PEFT_CONFIG} does not describe a LoRA")
    for key, neutral in _PEFT_NEUTRAL:
        if config.get(key) not in (neutral, None):
            raise IncompatibleAdapter(f"{PEFT_CONFIG}: {key} = {config[key]!r} is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise IncompatibleAdapter(f"{PEFT_CONFIG} names no r or no lora_alpha")
    expected = {PEFT_PREFIX + name: shape for name, shape in manifest.items()}
    tensors, _ = _parse(data, expected, IncompatibleAdapter, half=True)
    modules = {name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX): (0, 0) for name in manifest}
    spec = LoraSpec(rank=rank, alpha=float(alpha), targets=targets(modules))
    if any(shape[0] != rank for name, shape in manifest.items() if name.endswith(A_SUFFIX)):
        raise IncompatibleAdapter(f"{PEFT_CONFIG} says r = {rank}, which is not this adapter's rank")
    return LoraWeights(spec=spec, tensors={name.removeprefix(PEFT_PREFIX): t for name, t in tensors.items()})


def _save(tensors: Mapping[str, Array], metadata: dict[str, str] | None) -> bytes:
    ordered = {name: np.ascontiguousarray(tensors[name], np.float32) for name in sorted(tensors)}
    return safetensors.numpy.save(ordered, metadata)


def _parse(
    data: bytes, expected: Manifest, error: type[CollmError], *, half: bool = False
) -> tuple[dict[str, Array], dict[str, str]]:
    """Check in the order of what a check costs; return the tensors, fp32 and sorted, and the metadata.

    ``half``: bf16 and fp16 are read too. Raises ``error``.
    """
    if len(data) > max_bytes(expected):
        raise error(f"{len(data)} bytes, at most {max_bytes(expected)} are expected")
    try:
        entries: dict[str, _Entry] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
        metadata = _header(data).get("__metadata__") or {}
    except (safetensors.SafetensorError, ValueError) as e:
        # Only now: a header of some lengths begins like a pickle.
        what = "a pickle, not a safetensors file" if data.startswith(_PICKLES) else "not a safetensors file"
        raise error(f"{what}: {e}") from e
    if entries.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - entries.keys()), sorted(entries.keys() - expected.keys())
        raise error(f"tensors missing: {_some(missing)}; not expected: {_some(extra)}")
    dtypes = {"F32", "BF16", "F16"} if half else {"F32"}
    tensors: dict[str, Array] = {}
    for name, shape in sorted(expected.items()):
        entry = entries[name]
        if entry["dtype"] not in dtypes:
            raise error(f"{name} is {entry['dtype']}, not {' or '.join(sorted(dtypes))}")
        if tuple(entry["shape"]) != tuple(shape):
            raise error(f"{name} has shape {tuple(entry['shape'])}, not {tuple(shape)}")
        tensor = _floats(entry["data"], entry["dtype"]).reshape(shape)
        if not np.isfinite(tensor).all():
            raise error(f"{name} is not finite")
        tensors[name] = tensor
    return tensors, metadata


def _floats(data: bytearray, dtype: str) -> Array:
    """Return writable fp32 of little-endian bytes."""
    if dtype == "F32":
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)  # bf16: the upper half of an fp32


def _header(data: bytes) -> dict[str, dict[str, str]]:
    """Return the header of what ``safetensors`` has accepted."""
    header: dict[str, dict[str, str]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def _file_header(path: Path) -> dict[str, dict[str, list[int]]]:
    """Return a checkpoint's header without its tensors. Raises ``OSError`` or ``ValueError``."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path.name} is not a safetensors file")
        header: dict[str, dict[str, list[int]]] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header


def _spec_json(spec: LoraSpec) -> list[object]:
    return [spec.rank, float(spec.alpha), list(spec.targets)]


def _some(names: list[str]) -> str:
    """Name a few; a file may lack hundreds."""
    return (", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")) or "none"
