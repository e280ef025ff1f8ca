"""All settings, read once in a process's ``main`` from ``COLLM_*`` variables; frozen.

``COLLM_GATEWAY__PORT=9000`` sets ``settings.gateway.port``. An unknown ``COLLM_`` variable is an error: a
misspelt setting that is silently ignored costs an evening.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from infra.errors import ConfigError

PREFIX = "COLLM_"
_WORD = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
"""A name that is safe as a file's and in a query."""


class Section(BaseModel):
    """Base of the nested groups."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Section):
    """The frozen backbone."""

    name: str = Field("HuggingFaceTB/SmolLM2-135M-Instruct", pattern=f"^{_WORD}(/{_WORD})?$")
    """Hub name; ``collm model pull`` puts it into ``cache_dir``."""
    path: Path | None = None
    """A folder with config.json, tokenizer and safetensors, instead of the cache."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """auto: bfloat16 where the device computes in it, else float32 (a CPU without such instructions)."""
    device: str = "cpu"
    threads: int = Field(1, ge=1)
    """Torch threads of one replica."""
    packed: bool = True
    """CPU: pack frozen weights for oneDNN; faster decode for a second copy of the weights in memory."""


class ReplicaSettings(Section):
    """One replica."""

    id: str = "replica-0"
    host: str = "127.0.0.1"
    port: int = Field(8081, ge=1, le=65535)
    public_url: str | None = None
    """Where the gateway and flows reach it; by default http://host:port."""
    shard: Path | None = None
    """JSONL of {"prompt", "completion"}; without one the replica is no client of rounds."""
    memory_bytes: ByteSize | None = Field(None, gt=0)
    """Budget for everything that the replica holds, such as ``6GB``; rows and training are cut to fit it. By default
    four fifths of the machine's or container's memory, divided among a local cluster's replicas; on a GPU, of its
    memory."""
    rows: int = Field(16, ge=1)
    """KV rows: requests that run at once, if the memory allows."""
    max_total_tokens: int = Field(1024, ge=16)
    max_queue: int = Field(64, ge=1)
    """Waiting requests beyond which new ones get 429."""
    token_budget: int = Field(128, ge=2)
    """Positions that one engine step computes at most."""
    prefix_cache: bool = True
    """Keep what free KV rows hold, for prompts of the same version that begin alike."""
    prefix_min_tokens: int = Field(16, ge=1)
    """Shorter beginnings are computed anew."""
    batch_invariant: bool = False
    """No bit of an answer's tokens and logprobs depends on what else is in the batch; steps take longer."""
    places: int = Field(8, ge=2)
    """Resident adapter versions, all adapters together; others come in when a request asks for them."""
    versions_per_adapter: int = Field(4, ge=2)
    """Places of one adapter at most."""
    adapters: int = Field(64, ge=1)
    """Adapters at most; those that have no place wait in host memory, with up to eight versions each."""
    max_rank: int | None = Field(None, ge=1)
    """Largest rank of a version; by default that of ``rounds``. Every place has room for it."""
    row_tokens: int = Field(256, ge=16)
    """Training and scoring rows are cut to this."""
    checkpoint_s: float = Field(10.0, gt=0)
    """A round's training is saved this often in ``state_dir``; a replica that is killed loses no more of it."""
    gate_rows: int = Field(48, ge=1)
    report_rows: int = Field(100, ge=1)
    fake_engine: bool = False
    """A deterministic stand-in without weights, for tests of everything around it."""
    fake_step_s: float = Field(0.0, ge=0)
    """How long its engine steps take."""
    fake_slice_s: float = Field(0.0, ge=0)
    """How long its training slices take."""


class GatewaySettings(Section):
    """The gateway."""

    id: str = "gateway-0"
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=1, le=65535)
    connect_timeout_s: float = Field(2.0, gt=0)
    idle_timeout_s: float = Field(60.0, gt=0)
    """Longest silence of a replica in the middle of an answer."""
    max_body_bytes: int = Field(2_000_000, ge=1)
    max_inflight: int = Field(512, ge=1)


class ControllerSettings(Section):
    """The fast controller."""

    slot_s: float = Field(1.0, gt=0)
    dead_after_s: float = Field(5.0, gt=0)
    """A replica without a heartbeat for this long gets no requests."""


class RoundSettings(Section):
    """Federated rounds."""

    adapter: str = Field("code", pattern=f"^{_WORD}$")
    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    interval_s: float = Field(30.0, gt=0)
    """A round is due this often; one at a time."""
    tokens: int = Field(512, ge=1)
    """Supervised tokens that each client trains in a round."""
    rows_per_step: int = Field(2, ge=1)
    lr: float = Field(2e-3, gt=0)
    """Of A; of B it is ``lr_ratio`` times as much."""
    lr_ratio: float = Field(1.0, gt=0)
    """LoRA+ (arXiv 2402.12354) finds B's best rate to be well above A's, about 16 times where both are trained."""
    warmup_steps: int = Field(4, ge=0)
    """Optimizer steps over which a round's rates grow to their full size."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A step's gradients are scaled down to this norm."""
    swap_every: int = Field(8, ge=0)
    deadline_s: float = Field(180.0, gt=0)
    min_clients: int = Field(1, ge=1)
    strategy: Literal["alternate", "fedavg"] = "alternate"
    max_norm: float = Field(1e3, gt=0)
    """Updates with a larger Frobenius norm are rejected."""
    gate_confidence: float = Field(0.95, gt=0.5, lt=1)
    """Of the one-sided bound that must show a candidate's pooled gate CE to be lower."""
    gate_tolerance: float = Field(0.01, ge=0)
    """Nats per token by which one client's gate CE may rise in a promotion."""
    poll_s: float = Field(0.5, gt=0)
    """How often a round asks each client for its progress."""
    lost_after_s: float = Field(20.0, gt=0)
    """A client that cannot be reached, or refuses, for this long is dropped from the round."""
    score_timeout_s: float = Field(180.0, gt=0)
    """For one version on one client's gate rows."""
    serve_wait_s: float = Field(30.0, gt=0)
    """A round waits this long for the fleet to serve what it promoted."""
    retain_s: float = Field(86_400.0, gt=0)
    """Client updates and local versions are deleted from the store after this."""


class SloSettings(Section):
    """Latency targets where a request names none."""

    ttft_s: float = Field(1.0, gt=0)
    tpot_s: float = Field(0.25, gt=0)


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid")

    database_url: str | None = None
    """``postgresql+psycopg://…/collm``; without it ``collm up`` starts an embedded Postgres."""
    postgres_port: int = Field(5442, ge=1, le=65535)
    """Of the embedded Postgres."""
    state_dir: Path = Path(".collm")
    """Database files, artifacts, logs and update store of a local cluster."""
    cache_dir: Path = Path("~/.cache/collm")
    """Models."""
    store_url: str | None = None
    """fsspec URL of the update store; by default a folder in ``state_dir``."""
    cluster_token: SecretStr | None = None
    """Guards the control API; ``collm up`` makes one for the cluster that it starts."""
    prefect_api_url: str = "http://127.0.0.1:4200/api"
    mlflow_url: str = "http://127.0.0.1:5000"
    mlflow_public_url: str | None = None
    """Where people's browsers reach it, for links; by default ``mlflow_url``."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False
    replicas: int = Field(2, ge=1)
    """Of a local cluster."""
    model: ModelSettings = ModelSettings()
    replica: ReplicaSettings = ReplicaSettings()
    gateway: GatewaySettings = GatewaySettings()
    controller: ControllerSettings = ControllerSettings()
    rounds: RoundSettings = RoundSettings()
    slo: SloSettings = SloSettings()

    @property
    def max_rank(self) -> int:
        """Largest rank of a version that a replica serves. Raises ``ConfigError`` if rounds make larger ones."""
        if self.replica.max_rank is None:
            return self.rounds.rank
        if self.replica.max_rank < self.rounds.rank:
            raise ConfigError(f"COLLM_REPLICA__MAX_RANK: below COLLM_ROUNDS__RANK, {self.rounds.rank}")
        return self.replica.max_rank

    def required_database_url(self) -> str:
        """Return the database URL of a process that cannot run without one."""
        if self.database_url is None:
            raise ConfigError("COLLM_DATABASE_URL is not set")
        return self.database_url

    def required_token(self) -> str:
        """Return the cluster token of a process that cannot run without one."""
        if self.cluster_token is None or not self.cluster_token.get_secret_value():
            raise ConfigError("COLLM_CLUSTER_TOKEN is not set")
        return self.cluster_token.get_secret_value()

    def resolved_store_url(self) -> str:
        """Return where client updates and version weights are exchanged."""
        return self.store_url or (self.state_dir.expanduser().resolve() / "store").as_uri()


def to_environ(settings: Settings) -> dict[str, str]:
    """Return the variables from which another process reads these very settings."""
    values: dict[str, str] = {}

    def add(prefix: str, section: BaseModel) -> None:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                add(f"{prefix}{name.upper()}__", value)
            elif value is not None:
                text = value.get_secret_value() if isinstance(value, SecretStr) else value
                values[prefix + name.upper()] = str(text)

    add(PREFIX, settings)
    return values


def load_settings() -> Settings:
    """Read the environment. Raises ``ConfigError`` that names the variable."""
    for name in os.environ:
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).split("__")[0].lower()
        if field not in Settings.model_fields:
            raise ConfigError(f"{name} is not a setting")
    try:
        return Settings()
    except ValidationError as e:
        first = e.errors()[0]
        where = PREFIX + "__".join(str(part) for part in first["loc"]).upper()
        raise ConfigError(f"{where}: {first['msg']}") from None
