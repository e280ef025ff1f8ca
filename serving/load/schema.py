"""What ``report.json`` holds, field by field. Pure.

Units are in the names; times in ``timeline`` and ``at_s`` count from the start of the first window. A version's
cross-entropy (``ce``) is in nats per completion token over report rows, which no decision ever reads.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from serving.load.figures import Percentiles

Kind = Literal["static", "collm"]
Decision = Literal["promoted", "rejected", "aborted"]


class Part(BaseModel):
    """Base of the report's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(Part):
    """Percentiles; None where nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, found: Percentiles) -> "Spread":
        """Return it as a part of the report."""
        return cls(p50=found.p50, p95=found.p95, p99=found.p99)


class LoadPart(Part):
    """What one replay of a window gave."""

    seconds: float
    arrivals: int
    failed: int
    good_rps: float
    attainment: float
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    q: float | None
    goodput: float | None
    good: int
    answers_by_version: dict[str, int]
    """Complete answers by label, ``replica:label`` for a local version."""
    unscored: int
    """Complete answers of versions whose cross-entropy was not measured; they have no weight in ``q``."""
    failures: dict[str, int]
    output_tokens: int
    late_ms: float
    """How late the load generator itself was at worst."""


class WindowPart(LoadPart):
    """One window of the demo."""

    name: str
    """``S1``, ``C1``, …: kind and place among its kind."""
    kind: Kind
    start_s: float
    train_tokens: int
    train_tokens_while_decoding: int


class ReplayReport(Part):
    """What ``collm replay`` writes."""

    url: str
    trace: str
    trace_start_s: float
    trace_seconds: float
    time_scale: float
    context_scale: float
    generated_scale: float
    dispersion: float
    offered_rps: float
    ttft_slo_s: float
    tpot_slo_s: float
    load: LoadPart


class RatioRow(Part):
    """A C window over the S window before it."""

    window: str
    against: str
    goodput: float | None
    good_rps: float | None
    q: float | None
    attainment: float | None


class RatioPart(Part):
    """Mean over the C windows over mean over the S windows."""

    goodput: float | None
    good_rps: float | None
    q: float | None
    attainment: float | None
    by_window: list[RatioRow]


class ClientCe(Part):
    """One client's cross-entropy at both ends of the run."""

    start: float
    end: float


class VersionCe(Part):
    """A federated version's cross-entropy."""

    number: int
    uid: str
    pooled: float
    by_client: dict[str, float]


class CePart(Part):
    """Cross-entropy on the report rows; ``start`` and ``end`` are pooled over clients, weighted by tokens."""

    start: float
    end: float
    by_client: dict[str, ClientCe]
    start_uid: str
    end_uid: str
    end_number: int
    """MLflow's number of the newest promoted version, which ``end`` is measured under."""
    tokens_by_client: dict[str, int]
    federated: list[VersionCe]


class UpdatePart(Part):
    """What one client returned in a round."""

    client: str
    tokens: int
    steps: int
    loss_first: float
    loss_last: float
    seconds: float
    accepted: bool | None
    reason: str


class RoundPart(Part):
    """One federated round; ``ce_before`` and ``ce_after`` are on gate rows."""

    id: str
    number: int
    factor: str
    decision: Decision
    reason: str
    seconds: float
    clients: list[str]
    aggregation_error: float | None
    ce_before: float | None
    ce_after: float | None
    base: str
    candidate: str | None
    """Labels of versions."""
    start_s: float
    decided_s: float | None
    served_s: float | None
    serve_delay_ms: float | None
    """From the promotion to when every replica served it."""
    updates: list[UpdatePart]


class VersionPart(Part):
    """A version that served, or a federated one that was made."""

    label: str
    uid: str
    kind: Literal["federated", "local"]
    state: str
    parent: str | None
    replica: str | None
    """Of a local version: where it was made."""
    answers: int
    ce: float | None
    q: float | None
    ce_by_client: dict[str, float]
    ce_rows: int
    """Report rows that it was scored on; where not all of them, ``ce`` is an ancestor's on all rows plus the difference
    of the two on those."""


class SwapRow(Part):
    """One change of a replica's active version."""

    at_s: float
    replica: str
    label: str
    kind: Literal["local", "federated", "rollback"]
    pause_ms: float
    delay_ms: float


class SwapPart(Part):
    """Swaps of the run, less those by which the demo itself set up its windows."""

    count: int
    pause_ms: Spread
    max_pause_ms: float | None
    local: int
    federated: int
    set_up: int
    """Swaps that the demo itself asked for, to set a window's version."""
    rows: list[SwapRow]


class ServePart(Spread):
    """From when a version was ready to when it served."""

    local: Spread
    federated: Spread


class SloPart(Part):
    """Absolute targets."""

    ttft_s: float
    tpot_s: float


class LevelPart(Part):
    """One level of the calibration."""

    in_flight: int
    rps: float
    attainment: float


class ScalePart(Part):
    """Every factor between the trace and the load."""

    trace: str
    trace_start_s: float
    trace_seconds: float
    window_s: float
    time_scale: float
    """Replay seconds per trace second."""
    context_scale: float
    generated_scale: float
    max_context_tokens: int
    min_new_tokens: int
    max_new_tokens: int
    arrivals: int
    offered_rps: float
    capacity_rps: float
    """Measured at the start of the run."""
    load: float
    """Offered over capacity."""
    dispersion: float
    """Variance over mean of arrivals in 1-second bins."""
    prompt_tokens_mean: float
    prompt_tokens_p95: float
    new_tokens_mean: float
    levels: list[LevelPart]


class ModelPart(Part):
    """The frozen backbone."""

    name: str
    path: str
    sha256: str
    dtype: str
    threads: int
    """Torch threads of one replica."""
    replicas: int


class AdapterPart(Part):
    """The adapter."""

    name: str
    mlflow_model: str
    rank: int
    alpha: float
    targets: list[str]


class EvalClient(Part):
    """One client's report rows."""

    shard: str
    shard_rows: int
    sha256: str
    """``serving.rows.set_sha256`` of the rows."""
    rows: int
    gate_rows: int


class EvalPart(Part):
    """The rows that ``ce`` is measured on, and how to measure again."""

    name: str
    sha256: str
    """Of the clients' rows, one client after the other in the order of their names."""
    rows: int
    by_client: dict[str, EvalClient]
    prompt: str
    """Template of a row's prompt; the completion and the end-of-text token follow, the loss counts those."""
    row_tokens: int
    """Rows are cut to this many tokens."""


class Sample(Part):
    """What the fleet said of itself at one moment, by replica."""

    at_s: float
    train_share: dict[str, float]
    running: dict[str, int]
    queued: dict[str, int]
    active: dict[str, str]


class RequestRow(Part):
    """One arrival."""

    at_s: float
    window: str
    ttft_ms: float | None
    tpot_ms: float | None
    good: bool
    failed: bool
    version: str | None
    replica: str | None
    ce: float | None


class TimelinePart(Part):
    """For the plot over time."""

    samples: list[Sample]
    requests: list[RequestRow]


class CheckPart(Part):
    """One thing that the run was to show."""

    name: str
    ok: bool
    found: str
    bar: str


class Report(Part):
    """The whole."""

    windows: list[WindowPart]
    ratio: RatioPart
    ce: CePart
    rounds: list[RoundPart]
    versions: list[VersionPart]
    swaps: SwapPart
    update_to_serve_ms: ServePart
    slo: SloPart
    scale: ScalePart
    model: ModelPart
    adapter: AdapterPart
    eval_set: EvalPart
    timeline: TimelinePart
    checks: list[CheckPart]
    addresses: dict[str, str]
    created: str
    """ISO 8601."""
    seconds: float
    """Of the whole run."""
    command: str
    machine: str
