"""The frozen backbone that the engine serves from and the trainer trains on: one copy, any decoder family.

It is a transformers model with our attention function and with each decoder linear replaced by an
``AdaptedLinear``. Nothing here knows an architecture; a family for which that does not compute what transformers
alone computes is refused at load, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from infra.errors import ConfigError
from infra.models import backbone_sha256
from serving.replica import attention
from serving.replica.lean import LeanDecoder
from serving.replica.lora import AdaptedLinear, FrozenProduct, LinearGroup
from serving.replica.modes import Chunk, Mode, PackedMode, ServingMode, Switch, TraceMode

if TYPE_CHECKING:  # engines run where there is no pydantic, see tests/gpu
    from infra.settings import ModelSettings

CHECK_TOKENS = (16, 24)
"""Lengths of the two sequences that are packed for the exactness check at load."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
BF16_CAPABILITIES = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""Names of CPU capabilities, of x86 and ARM, with which bfloat16 products are fast."""
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest relative distance ‖ours − theirs‖ / ‖theirs‖ of the logits; rounding alone stays well below."""


class Backbone:
    """One frozen model, shared by engine and trainer, used by one thread."""

    def __init__(self, model: PreTrainedModel, *, sha256: str, packed: bool, name: str = "") -> None:
        """Take over ``model``. Raises ``ConfigError`` that names a family that cannot be served exactly."""
        self.model = model.eval().requires_grad_(False)
        self.config: PreTrainedConfig = model.config.get_text_config()
        self.sha256 = sha256
        self.name = name
        self.switch = Switch()
        family = str(model.config.model_type)
        ids = torch.arange(sum(CHECK_TOKENS), device=model.device) * 7919 % (self.config.vocab_size - 1)
        with torch.no_grad():
            want = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(CHECK_TOKENS)]
        self.decoder: nn.Module = model.get_decoder()
        self.layers: list[nn.Module] = self._find_layers(family)
        self.linears: dict[str, AdaptedLinear] = {}
        self._adapt()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(f"model family {family!r}: no linear output head")
        self._head = head
        self._packed_head: FrozenProduct | None = None
        self._lean: LeanDecoder | None = None
        try:
            trace = self._trace(ids)
            distance = self._distance(ids, torch.cat(want))
        except (NotImplementedError, TypeError, ValueError, RuntimeError) as e:
            raise ConfigError(f"model family {family!r} cannot be served: {e}") from e
        if sorted(trace.kv_sizes) != list(range(len(self.layers))):
            raise ConfigError(f"model family {family!r}: not every layer attends through transformers' interface")
        if not distance <= CHECK_TOLERANCE[self.dtype]:
            raise ConfigError(f"model family {family!r} is not served exactly here: logits differ by {distance:.2g}")
        self.groups = [LinearGroup(members) for members in self._group(trace.inputs, family)]
        self.kv_sizes = tuple(trace.kv_sizes[i] for i in range(len(self.layers)))
        """By layer index: (kv heads, head dim)."""
        lean = LeanDecoder.of(self, trace.attention)
        if lean is not None and self._agrees(lean, ids):
            self._lean = lean
        if packed:
            self.pack()

    @classmethod
    def load(cls, path: Path, settings: ModelSettings) -> Backbone:
        """Load from a folder with config.json and safetensors; the weights stay memory-mapped where they can.

        Processes on one host then share their pages. Raises ``ConfigError``.
        """
        dtype = choose_dtype(settings)
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="eager", use_safetensors=True, local_files_only=True
            )
        except (OSError, ValueError) as e:
            raise ConfigError(f"model folder {path}: {e}") from e
        if settings.device == "cpu":
            map_weights(model, path)
        else:
            try:
                model.to(settings.device)
            except (AssertionError, RuntimeError) as e:  # torch asserts that it was built for the device
                raise ConfigError(f"COLLM_MODEL__DEVICE: {settings.device!r} cannot be used: {e}") from e
        return cls(model, sha256=backbone_sha256(path), packed=settings.packed, name=settings.name)

    def pack(self) -> None:
        """Lay the frozen weights out for oneDNN a second time, for serving; nothing where that is not possible."""
        if self._packed_head is not None or not can_pack(self._head.weight):
            return
        self._packed_head = FrozenProduct(self._head.weight, self._head.bias, packed=True)
        for group in self.groups:
            group.pack()

    @property
    def packable_bytes(self) -> int:
        """What ``pack`` would take; 0 where it is not possible."""
        if not can_pack(self._head.weight):
            return 0
        return sum(w.numel() * w.itemsize for w in (self._head.weight, *(m.weight for m in self.linears.values())))

    @property
    def weight_bytes(self) -> int:
        """Of the frozen weights; those that two modules share count once."""
        return sum(p.numel() * p.itemsize for p in self.model.parameters())

    @property
    def mode(self) -> Mode:
        """What the model computes now; see ``modes``."""
        return self.switch.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.switch.mode = mode

    @contextmanager
    def mode_set(self, mode: Mode) -> Iterator[None]:
        """Set the mode for the body of a ``with``, which must not contain a generator's yield."""
        with self.switch.set(mode):
            yield

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self._head.weight.dtype

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        generation = self.model.generation_config
        found: set[int] = set()
        for value in (self.config.eos_token_id, generation.eos_token_id if generation else None):
            found.update([value] if isinstance(value, int) else value or [])
        return frozenset(found)

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the decoder in the mode that is set: ids and positions [T] → final hidden states [T, d]."""
        mode = self.mode
        if self._lean is not None and isinstance(mode, ServingMode):
            return self._lean(ids, positions, mode)
        out = self.decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @property
    def lean(self) -> bool:
        """Whether serving steps are computed by ``LeanDecoder``."""
        return self._lean is not None

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] in the model's type of final hidden states [..., d] (final norm applied)."""
        if self._packed_head is not None and isinstance(self.mode, ServingMode):
            logits = self._packed_head(hidden)
        else:
            logits = F.linear(hidden, self._head.weight, self._head.bias)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        scaling = getattr(self.config, "logits_scaling", None)
        if scaling:
            logits = logits / scaling
        return logits

    def forget(self) -> None:
        """Drop what an interrupted call may have left."""
        for group in self.groups:
            group.forget()

    def _find_layers(self, family: str) -> list[nn.Module]:
        count = self.config.num_hidden_layers
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
        raise ConfigError(f"model family {family!r}: no list of {count} decoder layers")

    def _adapt(self) -> None:
        attention.register()
        self.model.set_attn_implementation(attention.NAME)
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        replace_norms(self.model)
        for name, module in list(self.model.named_modules()):
            if id(module) not in inside:
                continue
            if isinstance(getattr(module, "layer_idx", None), int):
                module.switch = self.switch
            if isinstance(module, nn.Linear | Conv1D):
                parent, _, child = name.rpartition(".")
                adapted = AdaptedLinear(name, module, self.switch)
                setattr(self.model.get_submodule(parent), child, adapted)
                self.linears[name] = adapted

    def _distance(self, ids: Tensor, want: Tensor) -> float:
        """Return how far the logits of packed sequences are from those that transformers computes one by one."""
        positions = torch.cat([torch.arange(n, device=ids.device) for n in CHECK_TOKENS])
        with torch.no_grad(), self.mode_set(PackedMode(lengths=CHECK_TOKENS)):
            got = self.head(self.hidden(ids, positions))
        return float((got.float() - want.float()).norm() / want.float().norm())

    def _agrees(self, lean: LeanDecoder, ids: Tensor) -> bool:
        """Whether a prompt's hidden states are what transformers makes of them."""
        count, start = len(ids), 3
        positions = torch.arange(start, start + count, device=ids.device)

        def mode() -> ServingMode:
            sizes = [(1, heads, start + count, dim) for heads, dim in self.kv_sizes]
            return ServingMode(
                keys=tuple(torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes),
                values=tuple(torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes),
                rows=positions[:0],
                positions=positions[:0],
                span=0,
                width=0,
                dense=True,
                one_by_one=(),
                chunks=(Chunk(row=0, start=start, begin=0, end=count),),
                worn=None,
            )

        with torch.no_grad():
            with self.mode_set(mode()):
                want = self.hidden(ids, positions).float()
            try:
                got = lean(ids, positions, mode()).float()
            except RuntimeError:
                return False
        return float((got - want).norm() / want.norm()) <= CHECK_TOLERANCE[self.dtype]

    def _trace(self, ids: Tensor) -> TraceMode:
        trace = TraceMode()
        with torch.no_grad(), self.mode_set(trace):
            self.hidden(ids, torch.arange(len(ids), device=ids.device))
        return trace

    def _group(self, inputs: list[tuple[str, Tensor]], family: str) -> list[tuple[AdaptedLinear, ...]]:
        """Return the linears by common input."""
        if sorted(name for name, _ in inputs) != sorted(self.linears):
            raise ConfigError(f"model family {family!r}: its linears are not each called once")
        groups: list[list[AdaptedLinear]] = []
        before: Tensor | None = None
        for name, x in inputs:
            if x is before:
                groups[-1].append(self.linears[name])
            else:
                groups.append([self.linears[name]])
            before = x
        return [tuple(members) for members in groups]


class RmsNorm(nn.Module):
    """x / rms(x) · weight in one call instead of transformers' eight."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] → [..., d]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def replace_norms(model: nn.Module) -> None:
    """Replace the modules that compute a plain RMS norm, found by trying."""
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or weight is None:
            continue
        fast = RmsNorm(weight, eps)
        x = torch.linspace(-3, 5, 4 * weight.numel(), dtype=weight.dtype, device=weight.device).view(4, -1)
        with torch.no_grad():
            want, got = module(x).float(), fast(x).float()
        if torch.allclose(got, want, rtol=1e-5 if weight.dtype == torch.float32 else 2e-2, atol=1e-6):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, fast)


def choose_dtype(settings: ModelSettings) -> torch.dtype:
    """Return the type of weights and activations.

    A CPU without bfloat16 instructions computes in it by conversion, many times slower than in float32.
    """
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    if settings.device != "cpu":
        return torch.bfloat16
    found = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(found.get(name) for name in BF16_CAPABILITIES) else torch.float32


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack weights like this one here."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def map_weights(model: PreTrainedModel, path: Path) -> None:
    """Replace the model's parameters by memory-mapped ones where the files hold the same bits."""
    parameters = dict(model.named_parameters())
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                parameter = parameters.get(name)
                if parameter is None:
                    continue
                mapped = tensors.get_tensor(name)
                if mapped.dtype == parameter.dtype and torch.equal(mapped, parameter):
                    parameter.data = mapped
