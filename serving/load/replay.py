"""``collm replay``: send a trace to any TGI gateway, open loop, and report."""

import argparse
import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from tokenizers import Tokenizer

from db.records import Split
from infra.errors import ConfigError, InvalidRequest
from infra.models import model_dir
from infra.settings import Settings, load_settings
from infra.state import running
from serving.datasets import sample_shards, trace_path
from serving.load.figures import window_figures
from serving.load.model import Outcome
from serving.load.open_loop import replay
from serving.load.prompts import Count, PromptMaker, Source
from serving.load.report import load_fields
from serving.load.schema import LoadPart, ReplayReport
from serving.load.sender import Target
from serving.load.terminal import print_replay
from serving.load.traces import Lengths, Window, read_azure, window_by_count, window_by_scale
from serving.model import Slo
from serving.shard import load_shard

CHARACTERS_PER_TOKEN = 3.5
"""Of English and code, roughly; used where there is no tokenizer at hand."""


def main(argv: list[str]) -> int:
    """``collm replay``."""
    arguments = parser().parse_args(argv)
    settings = load_settings()
    slo = Slo(ttft_s=arguments.ttft_s or settings.slo.ttft_s, tpot_s=arguments.tpot_s or settings.slo.tpot_s)
    lengths = Lengths(context=arguments.context_scale, max_context_tokens=arguments.max_context_tokens)
    window = cut(arguments, lengths)
    maker = PromptMaker(sources=sources(arguments.shard or sample_shards(), settings), count=counter(settings))
    calls = maker.calls(window.arrivals, adapter=arguments.adapter)
    target = Target(
        url=arguments.url or default_url(settings), token=arguments.token, force_length=not arguments.free, slo=slo
    )
    console = Console(stderr=True)
    console.print(
        f"{len(calls)} requests in {window.seconds:g} s to {target.url}: {window.rate:.2f}/s, "
        f"trace time x {window.time_scale:.3f}",
        highlight=False,
    )
    try:
        outcomes = asyncio.run(replay(target, calls, progress=Meter(console, len(calls)).seen))
    except httpx.InvalidURL as e:
        raise ConfigError(f"--url: {e}") from None
    report = make_report(arguments, target, window, lengths, slo, outcomes)
    if arguments.out is not None:
        arguments.out.write_text(report.model_dump_json(indent=1), encoding="utf-8")
    print_replay(report, Console())
    return 0 if report.load.failed == 0 else 1


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="collm replay",
        description="Send a stretch of a request trace to a TGI gateway, open loop, and report latency, SLO attainment "
        "and good requests per second. Exit code 1 if a request failed.",
    )
    found.add_argument("--url", help="gateway (default: that of the cluster that runs here)")
    found.add_argument("--token", help="bearer token, if the gateway wants one")
    found.add_argument("--adapter", help="adapter_id of every request (default: the server's choice)")
    found.add_argument("--trace", type=Path, help="Azure LLM inference trace, CSV (default: the part that is shipped)")
    found.add_argument("--start-s", type=float, default=0.0, help="where in the trace to begin (default: 0)")
    found.add_argument("--seconds", type=positive, default=45.0, help="length of the replay (default: 45)")
    pace = found.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=positive, help="requests per second in the mean (default: 1)")
    pace.add_argument("--time-scale", type=positive, help="instead: replay seconds per trace second")
    found.add_argument("--context-scale", type=positive, default=1 / 24, help="factor on ContextTokens (default: 1/24)")
    found.add_argument("--max-context-tokens", type=int, default=400, help="longest prompt (default: 400)")
    found.add_argument("--shard", type=Path, action="append", help="JSONL of prompts and completions; may be repeated")
    found.add_argument("--free", action="store_true", help="let answers end by themselves (servers without ignore_eos)")
    found.add_argument("--ttft-s", type=positive, help="SLO (default: COLLM_SLO__TTFT_S)")
    found.add_argument("--tpot-s", type=positive, help="SLO (default: COLLM_SLO__TPOT_S)")
    found.add_argument("--out", type=Path, help="write the report there, as JSON")
    return found


def positive(text: str) -> float:
    """Return a number above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def cut(arguments: argparse.Namespace, lengths: Lengths) -> Window:
    """Return the window that the command line asks for."""
    path: Path = arguments.trace or trace_path()
    try:
        rows = read_azure(path.read_text(encoding="utf-8").splitlines())
        if arguments.time_scale is not None:
            window = window_by_scale(
                rows,
                start_s=arguments.start_s,
                seconds=arguments.seconds,
                time_scale=arguments.time_scale,
                lengths=lengths,
            )
        else:
            count = max(1, round((arguments.rate or 1.0) * arguments.seconds))
            window = window_by_count(
                rows, start_s=arguments.start_s, seconds=arguments.seconds, count=count, lengths=lengths
            )
    except OSError as e:
        raise ConfigError(f"--trace: {path}: {e.strerror}") from None
    except InvalidRequest as e:
        raise ConfigError(f"--trace: {path}: {e.message}") from None
    if not window.arrivals:
        raise ConfigError(f"--trace: {path}: nothing arrives in that stretch")
    return window


def sources(shards: Sequence[Path], settings: Settings) -> list[Source]:
    """Return where prompts come from: what replicas hold out is asked, what they train on is shown as examples."""
    gate, report = settings.replica.gate_rows, settings.replica.report_rows
    splits = [load_shard(shard, gate=gate, report=report) for shard in shards]
    return [Source(questions=split[Split.REPORT], examples=split[Split.TRAIN]) for split in splits]


def counter(settings: Settings) -> Count:
    """Return how tokens are counted: by the model's tokenizer, or by characters where it has not been pulled."""
    try:
        tokenizer = Tokenizer.from_file(str(model_dir(settings) / "tokenizer.json"))
    except ConfigError:
        return lambda text: max(1, round(len(text) / CHARACTERS_PER_TOKEN))
    return lambda text: len(tokenizer.encode(text).ids)


def default_url(settings: Settings) -> str:
    """Return the gateway of the cluster that runs here, else the one that settings name."""
    state = running(settings.state_dir)
    return f"http://127.0.0.1:{settings.gateway.port}" if state is None else state.addresses.gateway


class Meter:
    """Says now and then how far the replay is."""

    def __init__(self, console: Console, arrivals: int) -> None:
        self.console = console
        self.arrivals = arrivals
        self.ends: Counter[bool] = Counter()

    def seen(self, outcome: Outcome) -> None:
        """Count an arrival's end."""
        self.ends[outcome.failure is None] += 1
        done = self.ends.total()
        if done % max(1, self.arrivals // 5) == 0 or done == self.arrivals:
            self.console.print(f"{done} of {self.arrivals} ended, {self.ends[False]} failed", highlight=False)


def make_report(
    arguments: argparse.Namespace,
    target: Target,
    window: Window,
    lengths: Lengths,
    slo: Slo,
    outcomes: Sequence[Outcome],
) -> ReplayReport:
    """Return what was measured. Quality is unknown here: a server's answers do not say what they are worth."""
    labels = {o.uid: o.label or o.uid for o in outcomes if o.uid}
    figures = window_figures(outcomes, seconds=window.seconds, slo=slo, ce_by_uid={})
    return ReplayReport(
        url=target.url,
        trace=str(arguments.trace or trace_path().name),
        trace_start_s=window.start_s,
        trace_seconds=window.trace_seconds,
        time_scale=window.time_scale,
        context_scale=lengths.context,
        generated_scale=lengths.generated,
        dispersion=window.dispersion,
        offered_rps=window.rate,
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
        load=LoadPart(**load_fields(figures, labels)),
    )
