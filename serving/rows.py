"""Rows of a client's shard: their text form, and their split by distinct prompt. Pure."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from db.records import Split


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and the completion that is wanted."""

    prompt: str
    completion: str


def render_prompt(prompt: str) -> str:
    """Return the text that a request and a training row put before the completion."""
    return f"### Instruction:\n{prompt.strip()}\n\n### Response:\n"


def prompt_key(prompt: str) -> str:
    """Return what makes two prompts the same: their letters and digits, lower-cased."""
    return hashlib.sha256(re.sub(r"\W+", " ", prompt.lower()).strip().encode()).hexdigest()


def split_rows(rows: Iterable[Row], *, gate: int, report: int) -> dict[Split, tuple[Row, ...]]:
    """Split by distinct prompt: ``gate`` and ``report`` rows with the smallest prompt keys, the rest to train.

    One row per prompt goes to gate and report; further rows of those prompts are left out. The train rows keep
    their order. The choice depends on the prompts alone, so every process makes the same one.
    """
    rows = list(rows)
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(prompt_key(row.prompt), row)
    held = sorted(first)[: gate + report]
    gate_keys, report_keys = held[:gate], held[gate:]
    taken = set(held)
    return {
        Split.GATE: tuple(first[k] for k in gate_keys),
        Split.REPORT: tuple(first[k] for k in report_keys),
        Split.TRAIN: tuple(row for row in rows if prompt_key(row.prompt) not in taken),
    }


def set_sha256(rows: Sequence[Row]) -> str:
    """Return the name of an ordered set of rows: figures over different sets are never compared."""
    digest = hashlib.sha256()
    for row in rows:
        for text in (row.prompt, row.completion):
            digest.update(len(text.encode()).to_bytes(8, "big"))
            digest.update(text.encode())
    return digest.hexdigest()
