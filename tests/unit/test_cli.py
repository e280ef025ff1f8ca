"""The command's table of contents."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra import cli
from infra.errors import ConfigError, NoReplica


def refuse(argv: list[str]) -> int:
    raise ConfigError("COLLM_GATEWAY__PORT: not a port")


def fail(argv: list[str]) -> int:
    raise NoReplica


def interrupt(argv: list[str]) -> int:
    raise KeyboardInterrupt


def count(argv: list[str]) -> int:
    return len(argv)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {f.__name__: cli.Command(f"{__name__}:{f.__name__}", "") for f in (refuse, fail, interrupt, count)}
    monkeypatch.setattr(cli, "COMMANDS", table)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["refuse"], 2, "collm refuse: COLLM_GATEWAY__PORT: not a port\n"),
        (["fail"], 1, "collm fail: No replica is ready to answer.\n"),
        (["interrupt"], 130, ""),
        (["count", "a", "b"], 2, ""),
        (["fly"], 2, "collm: no command 'fly'; `collm --help` lists them\n"),
    ],
)
def test_exit_code_and_one_line(argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(argv) == code
    assert capsys.readouterr().err == said


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from infra import cli; cli.run(['--help']);"
        "print([m for m in ('torch','prefect','mlflow','sqlalchemy','pydantic','httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_is_there(name: str) -> None:
    module, _, function = cli.COMMANDS[name].target.partition(":")
    source = Path(cli.__file__).parents[1] / f"{module.replace('.', '/')}.py"
    assert f"def {function}(" in source.read_text()


def test_a_reader_that_goes_away_is_no_error() -> None:
    collm = Path(sys.executable).with_name("collm")
    done = subprocess.run(
        f"{collm} --help | head -c 1", shell=True, executable="/bin/bash", capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
