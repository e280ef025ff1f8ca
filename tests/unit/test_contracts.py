"""The import contracts of pyproject.toml: each breaks on a violation, and the pure modules are those that say so."""

import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("infra", "db", "adapters", "serving", "flows")
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = {contract["name"]: contract for contract in CONFIG["contracts"]}

VIOLATIONS = [
    ("dataflow is one-way", "infra/clock.py", "import db.records"),
    ("dataflow is one-way", "adapters/pair.py", "import serving.rows"),
    ("serving: ", "serving/wire/sse.py", "import serving.client"),
    ("serving: ", "serving/gateway/fleet.py", "import serving.replica.kv"),
    ("serving: ", "serving/undeclared.py", ""),
    ("pure modules: ", "serving/slo.py", "import time"),
    ("pure modules: ", "serving/replica/scheduler.py", "import infra.process"),
    ("pure modules: ", "adapters/aggregate.py", "import random"),
    ("torch only ", "db/session.py", "import torch"),
    ("torch only ", "flows/site.py", "import serving.replica.engine"),
    ("neither Prefect nor MLflow ", "serving/client.py", "import prefect"),
    ("neither Prefect nor MLflow ", "db/session.py", "import mlflow"),
    ("rows of the database ", "flows/status.py", "import db.tables"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages to spoil."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__", "data", "docker"))
    return copy


@pytest.fixture
def planted(tree: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The copy with one more line in one file."""
    file, line = request.param
    path = tree / file
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    yield tree
    if before is None:
        path.unlink()
    else:
        path.write_text(before)


def broken(tree: Path) -> set[str]:
    """Return the contracts that do not hold in a copy of the tree."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--cache-dir", tree.with_name("cache")],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join(done.stdout.split())  # names are wrapped
    found = {name for name in CONTRACTS if f"{name} BROKEN" in said}
    assert done.returncode == (1 if found else 0), done.stdout
    assert len(found) + sum(f"{name} KEPT" in said for name in CONTRACTS) == len(CONTRACTS), done.stdout
    return found


@pytest.mark.parametrize(
    ("name", "planted"),
    [pytest.param(name, (file, line), id=f"{file}: {line}") for name, file, line in VIOLATIONS],
    indirect=["planted"],
)
def test_a_violation_breaks_its_contract(name: str, planted: Path) -> None:
    assert any(found.startswith(name) for found in broken(planted))


def test_all_hold(tree: Path) -> None:
    assert broken(tree) == set()


def test_each_contract_is_shown_to_break() -> None:
    assert all(any(name.startswith(start) for start, _, _ in VIOLATIONS) for name in CONTRACTS)


def test_the_pure_modules_are_those_that_say_so() -> None:
    listed = next(c["source_modules"] for name, c in CONTRACTS.items() if name.startswith("pure modules"))
    say_so = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "migrations" in path.parts:
                continue
            doc = ast.get_docstring(ast.parse(path.read_text())) or ""
            if "Pure" in doc.split("\n\n")[0]:
                module = path.relative_to(ROOT).with_suffix("")
                say_so.add(".".join(module.parts))
    assert {m for m in say_so if not m.startswith("serving.wire")} - TENSORS == set(listed) - UNSAID


UNSAID = {"infra.errors", "serving.wire"}
"""Pure without the word: errors import nothing, and the package's docstring speaks for ``serving.wire``."""
TENSORS = {"serving.replica.sampling"}
"""Pure, but for torch, which is all that they are about."""
