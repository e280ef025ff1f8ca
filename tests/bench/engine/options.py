"""What can be chosen, and what all parts share."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from db.records import AdapterName

CODE = AdapterName("code")
PROMPT = 40
"""Tokens of a prompt where nothing else is said."""
RANK = 8
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much to measure."""

    repeats: int = 7
    threads: int = 2
    vllm: str = ".venv-vllm/bin/python"
    """Python of the venv in which vLLM is."""
    window_s: float = 12.0
    """Of arrivals under load."""
    loads: str = "30,60,90"
    """Percent of the measured capacity."""
    swaps: int = 1000
    leak: int = 2000
    """Swaps, and requests, over which memory must not grow."""

    @classmethod
    def add_to(cls, parser: ArgumentParser) -> None:
        """Add an argument for each."""
        for field in fields(cls):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)

    @classmethod
    def of(cls, arguments: Namespace) -> "Options":
        """Read them back."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})

    def argv(self) -> list[str]:
        """Return the arguments that give another process these options."""
        given = [(field.name.replace("_", "-"), getattr(self, field.name)) for field in fields(self)]
        return [text for name, value in given for text in (f"--{name}", str(value))]

    def vllm_python(self) -> Path:
        """Return it as a path that does not depend on where a child runs; not resolved, it may be a link."""
        return Path(self.vllm).absolute()


def pairs(repeats: int, ours: Callable[[], float], theirs: Callable[[], float], *, warm: bool = True) -> list[float]:
    """Return theirs / ours of runs in turn, each first every other time; ``warm``: after one of each."""
    if warm:
        ours(), theirs()
    found = []
    for i in range(repeats):
        if i % 2:
            mine, other = ours(), theirs()
        else:
            other, mine = theirs(), ours()
        found.append(other / mine)
    return found
