"""Figures, their bars, and the file that holds them."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Value = float | int | str | bool | None
Inputs = Mapping[str, "Value | Sequence[Value] | Inputs | Sequence[Inputs]"]

AT_LEAST = {
    "decode_one_b1": 1.4,
    "decode_one_b8": 1.6,
    "decode_one_b32": 1.8,
    "decode_two_b8": 1.6,
    "decode_two_b32": 1.8,
    "decode_none_b1": 0.8,
    "decode_none_b8": 0.8,
    "decode_none_b32": 0.85,
    "decode_peft_b8": 1.8,
    "decode_peft_b32": 2.5,
    "prefill_vllm": 2.3,
    "prefill_peft": 1.15,
    "train_idle": 1.5,
    "attain_30": 0.99,
    "attain_60": 0.99,
    "attain_90": 0.99,
    "train_30": 0.7,
    "train_60": 0.7,
    "train_90": 0.5,
}
AT_MOST = {
    "decode_eight_b32": 1.15,
    "step_beside": 1.15,
    "slice_p99_ms": 30.0,
    "swap_pause_p99_ms": 1.0,
    "swap_gap": 1.1,
    "memory_train": 0.45,
    "leak": 0.01,
}
"""What the figures are measured against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the file."""

    name: str
    value: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, name: str, values: Sequence[float], *, value: float | None = None, runs: int | None = None) -> "Figure":
        """Return the range of repeats, and their median where no ``value`` over all of them is given."""
        return cls(
            name=name,
            value=statistics.median(values) if value is None else value,
            low=min(values),
            high=max(values),
            runs=len(values) if runs is None else runs,
        )

    def told(self) -> str:
        """Return it in words."""
        return f"{self.name:20} {self.value:9.3f}  [{self.low:.3f}, {self.high:.3f}] of {self.runs}{self._against()}"

    def _against(self) -> str:
        if (least := AT_LEAST.get(self.name)) is not None:
            return f"   bar ≥ {least:g}: {'met' if self.value >= least else 'MISSED'}"
        if (most := AT_MOST.get(self.name)) is not None:
            return f"   bar ≤ {most:g}: {'met' if self.value <= most else 'MISSED'}"
        return ""


class Report:
    """What has been measured so far, on disk after every figure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures: dict[str, Figure] = {}
        self.missing: dict[str, str] = {}
        """Name of a figure → why it could not be measured."""
        self.flags: dict[str, Inputs] = {}
        """How each peer ran."""
        self.inputs: dict[str, Inputs] = {}
        """Name of a figure, or of a group → what it was computed from, and how."""

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Return what a file holds, or an empty report."""
        report = cls(path)
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            report.figures = {f["name"]: Figure(**f) for f in content["figures"]}
            report.missing, report.flags, report.inputs = content["missing"], content["flags"], content["inputs"]
        return report

    def add(self, figure: Figure) -> None:
        """Take in a figure."""
        self.figures[figure.name] = figure
        self.missing.pop(figure.name, None)
        print(figure.told(), flush=True)
        self.write()

    def miss(self, names: Sequence[str], reason: str) -> None:
        """Say why figures are missing; an older value does not stand in for them."""
        for name in names:
            self.figures.pop(name, None)
            self.missing[name] = reason
        print(f"missing {', '.join(names)}: {reason}", flush=True)
        self.write()

    def note(self, name: str, inputs: Inputs) -> None:
        """Keep what a figure was computed from."""
        self.inputs[name] = inputs
        self.write()

    def flag(self, peer: str, flags: Inputs) -> None:
        """Keep how a peer ran."""
        self.flags[peer] = flags
        self.write()

    def write(self) -> None:
        """Replace the file."""
        content = {
            "figures": [asdict(f) for f in self.figures.values()],
            "missing": self.missing,
            "flags": self.flags,
            "inputs": self.inputs,
        }
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)
