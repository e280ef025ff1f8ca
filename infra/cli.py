"""The table of contents of the command ``collm``: subcommands by import path, loaded when called.

A subcommand is a function that takes the arguments after its name and returns an exit code. Nothing heavy is
imported here, so ``collm --help`` answers at once.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.errors import CollmError, ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand."""

    target: str
    """``module:function``."""
    summary: str

    def load(self) -> Callable[[list[str]], int]:
        """Import the function."""
        module, _, name = self.target.partition(":")
        function: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
        return function


COMMANDS = {
    "up": Command("infra.cluster:main", "start the whole cluster on this machine; Ctrl-C stops it"),
    "demo": Command("flows.demo:main", "start a cluster, replay a trace with and without fine-tuning, report"),
    "status": Command("flows.status:main", "print replicas, adapters, versions and rounds"),
    "round": Command("flows.control:main", "start a federated round now, pause or resume training, roll back"),
    "replay": Command("serving.load.replay:main", "send a trace to a gateway and report"),
    "model": Command("infra.models:main", "model pull: get the backbone into the cache"),
    "replica": Command("serving.replica.main:main", "serve and fine-tune one backbone"),
    "gateway": Command("serving.gateway.main:main", "answer TGI's contract in front of the replicas"),
    "controller": Command("serving.controller.main:main", "decide dispatch weights and train shares every time slot"),
    "worker": Command("flows.worker:main", "run federated rounds on their schedule"),
    "bootstrap": Command("flows.bootstrap:main", "create the adapter and its first version where there is none"),
    "migrate": Command("db.migrate:main", "bring the database's tables up to date"),
}


def usage() -> str:
    """Return the help text."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return f"""usage: collm COMMAND [ARGUMENT]...

{lines}

`collm COMMAND --help` says more. Settings are COLLM_* environment variables; README.md lists them.
"""


def run(argv: Sequence[str]) -> int:
    """Run one subcommand and return the exit code: 2 for a wrong call or setting, 130 after Ctrl-C."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if argv else 2
    command = COMMANDS.get(argv[0])
    if command is None:
        print(f"collm: no command {argv[0]!r}; `collm --help` lists them", file=sys.stderr)
        return 2
    try:
        return command.load()(list(argv[1:]))
    except ConfigError as error:
        print(f"collm {argv[0]}: {error.message}", file=sys.stderr)
        return 2
    except CollmError as error:
        print(f"collm {argv[0]}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def main() -> int:
    """Entry point of the console script."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone (``collm status | head``): nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
