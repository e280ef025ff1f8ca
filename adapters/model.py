"""An adapter's weights and versions in memory. Pure; numpy, never torch (flows import this)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from db.records import AdapterName, ClientId, Factor, LoraSpec, RoundId, VersionUid

Array = NDArray[np.float32]
Manifest = Mapping[str, tuple[int, ...]]
"""Tensor name → shape that an adapter's file must have, exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """The factors of one version, fp32.

    ``tensors`` maps PEFT's names without their ``base_model.model.`` prefix, for example
    ``model.layers.0.self_attn.q_proj.lora_A.weight`` [r, d_in] and ``….lora_B.weight`` [d_out, r].
    The scale is not folded in: y += spec.scale · B (A x).
    """

    spec: LoraSpec
    tensors: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientUpdate:
    """A client's factors after a round: those of the round's trainable factor only."""

    round_id: RoundId
    client_id: ClientId
    base_uid: VersionUid
    factor: Factor
    tokens: int
    """Supervised tokens trained; the weight in the mean."""
    tensors: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """An immutable state of an adapter, as replicas speak of it."""

    adapter: AdapterName
    uid: VersionUid
    number: int
    """Number of the federated version it is or descends from."""
    local_steps: int = 0
    """Optimizer steps beyond the federated version; 0 for the federated version itself."""

    @property
    def label(self) -> str:
        """For people: ``12``, or ``12+40``."""
        return f"{self.number}+{self.local_steps}" if self.local_steps else str(self.number)
