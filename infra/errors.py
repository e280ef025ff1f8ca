"""Every error that CoLLM raises on purpose, named for whom it concerns.

    CollmError
    ├── RequestError      the caller's request is at fault; nothing else is harmed
    │   ├── InvalidRequest   422    ├── PromptTooLong   422    ├── PayloadTooLarge 413
    │   ├── UnknownAdapter   404    ├── Unauthorized    401    └── BodyTooSlow     408
    ├── CapacityError     try again
    │   ├── Overloaded       429    ├── NoReplica       503    └── Stopping        503
    ├── EngineError
    │   ├── StepFailed       424    this request only
    │   ├── Incomplete       500    the answer broke off (its replica died)
    │   └── EngineDead       503    the replica's process exits
    ├── AdapterError
    │   ├── IncompatibleAdapter 422 ├── VersionConflict 409    ├── UnknownVersion  404
    │   ├── NoPlace          409    ├── NoRoom          409    ├── NotLoaded       500
    │   └── RegistryUnavailable 503
    ├── RoundError
    │   ├── NotEnoughClients        ├── StaleUpdate             ├── UpdateRejected
    │   ├── Unscorable              └── RoundTaken
    └── ConfigError       the command exits 2 and names the setting

``serving.wire`` renders them, once for each protocol.
"""

from typing import ClassVar


class CollmError(Exception):
    """Something went wrong."""

    status: ClassVar[int] = 500
    """HTTP status when it is answered before the first token."""
    code: ClassVar[str] = "internal"
    """Stable name: TGI's ``error_type`` where TGI has one."""
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().splitlines()[0])

    @property
    def message(self) -> str:
        """What to show the caller."""
        return str(self.args[0])


class RequestError(CollmError):
    """The request is not valid."""

    status, code = 422, "validation"


class InvalidRequest(RequestError):
    """The request is not valid."""


class PromptTooLong(RequestError):
    """The prompt and the tokens asked for exceed the context."""


class PayloadTooLarge(RequestError):
    """The request body is too large."""

    status = 413


class BodyTooSlow(RequestError):
    """The request body did not come in time."""

    status = 408


class UnknownAdapter(RequestError):
    """No adapter of that name is registered."""

    status, code = 404, "unknown_adapter"


class Unauthorized(RequestError):
    """The token is missing or wrong."""

    status, code = 401, "unauthorized"


class CapacityError(CollmError):
    """There is no capacity just now; try again."""

    status, code, retryable = 429, "overloaded", True

    def __init__(self, message: str | None = None, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(CapacityError):
    """Model is overloaded: the queue is full."""


class NoReplica(CapacityError):
    """No replica is ready to answer."""

    status, code = 503, "no_replica"


class Stopping(CapacityError):
    """This process is stopping."""

    status, code = 503, "stopping"


class EngineError(CollmError):
    """The engine failed."""

    code = "generation"


class StepFailed(EngineError):
    """Request failed during generation."""

    status = 424


class Incomplete(EngineError):
    """The answer broke off before its end."""

    status, code = 500, "incomplete_generation"


class EngineDead(EngineError):
    """The engine is dead; the process exits."""

    status, retryable = 503, True


class AdapterError(CollmError):
    """The adapter operation failed."""

    status, code = 422, "adapter"


class IncompatibleAdapter(AdapterError):
    """The adapter's weights do not fit this backbone and configuration."""

    code = "incompatible_adapter"


class VersionConflict(AdapterError):
    """The version is stale: the adapter's base or epoch has moved on."""

    status, code = 409, "version_conflict"


class UnknownVersion(AdapterError):
    """No such adapter version."""

    status, code = 404, "unknown_version"


class NoPlace(AdapterError):
    """Every place for a version is pinned by requests; try later."""

    status, code, retryable = 409, "no_place", True


class NoRoom(AdapterError):
    """This replica holds as many adapters as it may."""

    status, code = 409, "no_room"


class NotLoaded(AdapterError):
    """The adapter's version could not be brought into a place."""

    # Not 503: that says that the whole replica cannot answer, and other adapters are served.
    status, code, retryable = 500, "not_loaded", True


class RegistryUnavailable(AdapterError):
    """The adapter registry cannot be reached."""

    status, code, retryable = 503, "registry_unavailable", True


class RoundError(CollmError):
    """The round failed."""

    code = "round"


class NotEnoughClients(RoundError):
    """Fewer clients than the round needs are ready."""


class StaleUpdate(RoundError):
    """The update was made for another base, factor or round."""


class UpdateRejected(RoundError):
    """The update did not pass its checks."""


class RoundTaken(RoundError):
    """Another process works on the round."""


class Unscorable(RoundError):
    """A client has answered that the version cannot be scored; one that is away says nothing."""


class ConfigError(CollmError):
    """A setting is wrong."""

    code = "config"
