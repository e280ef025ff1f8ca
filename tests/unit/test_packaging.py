"""The packages have generic names: nothing installed may stand in for them, and the wheel carries what is needed."""

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("infra", "db", "adapters", "serving", "flows")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", PACKAGES)
def test_each_name_resolves_here_and_belongs_to_collm_alone(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin == str(ROOT / name / "__init__.py")
    assert set(importlib.metadata.packages_distributions().get(name, [])) <= {"collm"}
    assert (ROOT / name / "py.typed").exists()


def test_package_files_hold_a_docstring_only() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            body = ast.parse(path.read_text()).body
            assert len(body) <= 1, path
            assert not body or ast.get_docstring(ast.parse(path.read_text())), path
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_constraints_pin_each_dependency_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines)
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, wanted):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_every_installed_package_is_pinned() -> None:
    """What pip brought along too: without a pin it would differ from one day to the next."""
    text = (ROOT / "constraints.txt").read_text()
    pins = {canonicalize_name(line.partition("==")[0]) for line in text.splitlines() if not line.startswith("#")}
    wanted, seen = {("collm", frozenset({"dev"}))}, set()
    while wanted:
        name, extras = one = wanted.pop()
        seen.add(one)
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            marker = requirement.marker
            needed = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                continue
            if needed not in seen and needed[0] not in ("pip", "setuptools"):
                assert needed[0] in pins, f"{needed[0]}, needed by {name}"
                wanted.add(needed)


def test_the_wheel_has_code_data_and_migrations(tmp_path: Path) -> None:
    build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("collm-*.whl"))).namelist()
    assert {"infra/cli.py", "infra/child.py", "infra/data/shards/replica-0.jsonl", "db/migrations/env.py"} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "infra/docker/", "infra/grafana/")) or "__pycache__" in n]


def test_a_virtual_environment_that_is_there_is_not_emptied(tmp_path: Path) -> None:
    def recipe() -> str:
        argv = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", str(tmp_path / "venv" / "created")]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    assert "-m venv --clear" in recipe()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    assert "-m venv" in recipe()
    assert "--clear" not in recipe()
