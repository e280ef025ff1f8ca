"""The shipped sample of training rows and load, and how it is cut from the published sets.

The sample lies in ``infra/data`` (sources, commits and licences: its README). ``full_rows`` reads the published
files themselves from a folder, under their own names or with ``.gz`` behind them.
"""

import csv
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import infra
from infra.errors import ConfigError
from serving.rows import Row, prompt_key

DATA_DIR = Path(infra.__file__).parent / "data"
CLIENTS = 2
"""Shards of the sample, and clients that ``full_rows`` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A published file, as it is unpacked."""

    suffix: str
    """Its name ends so, whatever a copy puts before it."""
    sha256: str


GPTEACHER = Source(
    suffix="codegen-instruct.json",
    sha256="8b0be81f22b86bccab30f573351b62efb3391da229d2ee817a65ce0abb08b29d",
)
NL2BASH_NL = Source(
    suffix="all.nl",
    sha256="1db0c529c350b463919624550b8f5882a97c42ad5051c7d49fbc496bc4e8b770",
)
NL2BASH_CM = Source(
    suffix="all.cm",
    sha256="3a72eaced7fa14a0938354cefc42b2dcafb2d47297102f1279086e18c3abe57e",
)
MBXP_PYTHON = Source(
    suffix="mbpp_release_v1.jsonl",
    sha256="2ea7949f20ed5ecaacf4c9970d29430ec3f13772f4dd379665b1234f14b0ec3e",
)
AZURE_CODE = Source(
    suffix="AzureLLMInferenceTrace_code.csv",
    sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which rows of one source the sample takes. Lengths in characters: no tokenizer is needed to repeat it."""

    rows: int
    most: int
    """Of prompt and completion together."""
    least_completion: int


GPTEACHER_CUT = Cut(rows=640, most=240, least_completion=24)
NL2BASH_CUT = Cut(rows=900, most=160, least_completion=32)
MBXP_CUT = Cut(rows=88, most=280, least_completion=24)
TRACE_CUT_S = (540.0, 960.0)
"""Part of the trace that is shipped, in seconds from its first arrival."""
TRACE_OFFSET_S = 359.4
"""Where a demonstration starts best, in seconds from the first arrival of the shipped part: a busy spell of some
ten seconds, even enough that, stretched to 45 s, two small replicas meet a TTFT of 1 s at 50 to 60 % load. Most
other windows alternate between seconds of silence and bursts that no open-loop server could meet it through."""


def sample_shards() -> tuple[Path, ...]:
    """Return the shipped shards, one for each client: JSONL of ``{"prompt", "completion"}``."""
    return tuple(DATA_DIR / "shards" / f"replica-{client}.jsonl" for client in range(CLIENTS))


def trace_path() -> Path:
    """Return the shipped part of the Azure code trace: CSV of TIMESTAMP, ContextTokens, GeneratedTokens."""
    return DATA_DIR / "traces" / "azure-code.csv"


def full_rows(folder: Path, client: int) -> list[Row]:
    """Return all rows of a client from the published files in ``folder``, in their order.

    Client 0: GPTeacher code instructions; client 1: nl2bash, then MBXP Python. Raises ``ConfigError`` if a file
    is missing or is not the published one.
    """
    if client == 0:
        return gpteacher_rows(folder)
    if client == 1:
        return nl2bash_rows(folder) + mbxp_rows(folder)
    raise ConfigError(f"the full sets make {CLIENTS} shards; there is none for client {client}")


def gpteacher_rows(folder: Path) -> list[Row]:
    """Prompt: instruction and, if any, input; completion: response."""
    rows = json.loads(read_source(folder, GPTEACHER))
    return [Row("\n\n".join(part for part in (r["instruction"], r["input"]) if part), r["response"]) for r in rows]


def nl2bash_rows(folder: Path) -> list[Row]:
    """Prompt: what is wanted, in English; completion: the shell command."""
    nl = read_source(folder, NL2BASH_NL).splitlines()
    cm = read_source(folder, NL2BASH_CM).splitlines()
    return [Row(prompt, command) for prompt, command in zip(nl, cm, strict=True)]


def mbxp_rows(folder: Path) -> list[Row]:
    """Prompt: signature and doc comment; completion: the body."""
    rows = [json.loads(line) for line in read_source(folder, MBXP_PYTHON).splitlines()]
    return [Row(r["prompt"], r["canonical_solution"]) for r in rows]


def read_source(folder: Path, source: Source) -> str:
    """Return the text of a published file, checked against its hash."""
    found = sorted([*folder.glob(f"*{source.suffix}"), *folder.glob(f"*{source.suffix}.gz")])
    if not found:
        raise ConfigError(f"{folder} has no file named *{source.suffix}, packed or not")
    data = found[0].read_bytes()
    if found[0].suffix == ".gz":
        data = gzip.decompress(data)
    if hashlib.sha256(data).hexdigest() != source.sha256:
        raise ConfigError(f"{found[0]} is not the published file: its sha256 is another")
    return data.decode()


def cut_rows(rows: Iterable[Row], cut: Cut) -> list[Row]:
    """Choose a source's rows for the sample: of fitting length, one per distinct prompt, the smallest hashes.

    A prompt's hash here is salted, so that the choice says nothing about the split, which goes by prompt key.
    """
    chosen: dict[str, Row] = {}
    for row in rows:
        if len(row.completion) >= cut.least_completion and len(row.prompt) + len(row.completion) <= cut.most:
            chosen.setdefault(sample_key(row), row)
    return [chosen[key] for key in sorted(chosen)[: cut.rows]]


def sample_rows(folder: Path, client: int) -> list[Row]:
    """Return what the shipped shard of ``client`` holds, made from the published files in ``folder``."""
    if client == 0:
        rows = cut_rows(gpteacher_rows(folder), GPTEACHER_CUT)
    else:
        rows = cut_rows(nl2bash_rows(folder), NL2BASH_CUT) + cut_rows(mbxp_rows(folder), MBXP_CUT)
    return sorted(rows, key=sample_key)


def sample_key(row: Row) -> str:
    """Where a row comes in the sample; the sources of a shard are mixed."""
    return hashlib.sha256(b"sample:" + prompt_key(row.prompt).encode()).hexdigest()


def cut_trace(text: str, start_s: float, end_s: float) -> str:
    """Return the rows of an Azure trace that arrive within a span from its first arrival, with LF line ends."""
    header, *rows = text.splitlines()
    first = arrival_s(rows[0])
    kept = [row for row in rows if start_s <= arrival_s(row) - first < end_s]
    return "\n".join([header, *kept]) + "\n"


def arrival_s(row: str) -> float:
    """Arrival of one line of an Azure trace; seconds, of use only in differences."""
    stamp = next(csv.reader([row]))[0]
    # The trace has seven fractional digits; datetime takes six.
    return datetime.fromisoformat(stamp[:26]).timestamp()


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a shard."""
    lines = (json.dumps({"prompt": r.prompt, "completion": r.completion}, ensure_ascii=False) for r in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_sample(texts: Path, traces: Path, target: Path = DATA_DIR) -> None:
    """Make the shipped sample again from folders with the published files."""
    for client, shipped in enumerate(sample_shards()):
        write_rows(target / "shards" / shipped.name, sample_rows(texts, client))
    cut = cut_trace(read_source(traces, AZURE_CODE), *TRACE_CUT_S)
    (target / "traces" / trace_path().name).write_text(cut, encoding="utf-8")
