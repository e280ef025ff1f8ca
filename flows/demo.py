"""``collm demo``: the main job. Starts a cluster, replays a trace with and without fine-tuning, reports."""

import argparse
import asyncio
import contextlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flows.demo_record import Record
from flows.demo_report import make_report
from flows.demo_run import KINDS, Options, run_demo
from flows.demo_screen import Screen
from infra import log as logging
from infra.cluster import LocalCluster, require_no_shard
from infra.errors import ConfigError
from infra.models import pull
from infra.settings import Settings, load_settings
from infra.state import DEMO
from serving.datasets import full_rows, sample_shards, write_rows
from serving.load.capacity import MEASURE_S, Sweep
from serving.load.html import page
from serving.load.schema import Report
from serving.load.terminal import print_report

PLAIN_WIDTH = 150
"""Of tables that go to a file."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="collm demo",
        description="Start a cluster, replay the same window of a request trace with (C) and without (S) federated "
        "fine-tuning, write report.json and report.html, stop everything. Takes about ten minutes on two cores.",
    )
    found.add_argument("--keep", action="store_true", help="leave the cluster running after the report, until Ctrl-C")
    found.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="fine-tune on the full published sets in DIR (its files: see infra/data/README.md)",
    )
    found.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the reports go (default: here)")
    found.add_argument("--windows", default="SCCSCC", metavar="ORDER", help="S and C in order (default: SCCSCC)")
    found.add_argument("--window-s", type=float, default=45.0, metavar="SECONDS", help="length of a window")
    found.add_argument(
        "--measure-s", type=float, default=MEASURE_S, metavar="SECONDS", help="for each step of the calibration"
    )
    found.add_argument("--load", type=float, default=0.53, help="offered load as a share of the measured capacity")
    return found


def main(argv: list[str]) -> int:
    """``collm demo``."""
    arguments = parser().parse_args(argv)
    options = Options(
        order=check_order(arguments.windows),
        window_s=arguments.window_s,
        load=arguments.load,
        sweep=Sweep(measure_s=arguments.measure_s),
    )
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    settings = demo_settings(load_settings())
    require_no_shard(settings)
    logging.configure(settings.model_copy(update={"log_level": "warning"}))
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    with Screen(console) as screen:
        screen.say(f"model {settings.model.name}")
        model_dir = pull(settings)
        shards = full_shards(settings, arguments.data) if arguments.data else sample_shards()
        with LocalCluster(settings, shards=shards, report=screen.say, fresh=True) as cluster:
            record = asyncio.run(
                run_demo(
                    cluster.settings,
                    gateway=cluster.addresses.gateway,
                    shards=shards,
                    model_dir=model_dir,
                    options=options,
                    screen=screen,
                )
            )
            record.command = shlex.join(["collm", "demo", *argv])
            record.seconds = screen.elapsed_s
            if arguments.keep:
                where = cluster.addresses
                record.addresses = {"gateway": where.gateway, "Prefect": where.prefect, "MLflow": where.mlflow}
            report = finish(record, out, screen)
            if arguments.keep:
                keep(cluster, screen)
            screen.say("stopping the cluster")
    console.print(f"{out / 'report.json'}\n{out / 'report.html'}", highlight=False)
    return 0 if report.windows else 1


def finish(record: Record, out: Path, screen: Screen) -> Report:
    """Write both reports and print the terminal's."""
    report = make_report(record)
    (out / "report.json").write_text(report.model_dump_json(indent=1), encoding="utf-8")
    (out / "report.html").write_text(page(report), encoding="utf-8")
    print_report(report, screen.console)
    return report


def keep(cluster: LocalCluster, screen: Screen) -> None:
    """Leave everything running until Ctrl-C."""
    screen.say("the cluster stays up, with its rounds paused; `collm round resume` goes on, Ctrl-C stops it")
    screen.console.print(cluster.addresses.lines(), highlight=False)
    screen.now("running; Ctrl-C stops it")
    with contextlib.suppress(KeyboardInterrupt):
        cluster.wait()


def check_order(order: str) -> str:
    """Return the windows' kinds. Raises ``ConfigError``."""
    order = order.upper()
    if not order or set(order) - set(KINDS):
        raise ConfigError("--windows: S and C in the order in which they are played, for example SCCSCC")
    return order


def demo_settings(settings: Settings) -> Settings:
    """Return settings of a cluster of the demo's own: its state is thrown away when the next one starts."""
    return settings.model_copy(update={"state_dir": settings.state_dir / DEMO})


def full_shards(settings: Settings, folder: Path) -> Sequence[Path]:
    """Write the full sets as shards, one per replica, beside the demo's state."""
    target = settings.state_dir.expanduser().resolve().parent / "demo-shards"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shards = [target / shard.name for shard in sample_shards()]
    for client, shard in enumerate(shards):
        write_rows(shard, full_rows(folder, client))
    return shards
