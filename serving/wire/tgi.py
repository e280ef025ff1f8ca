"""TGI's contract: request bodies and their rules, and how answers, streams, errors and /info look. Pure.

Where CoLLM differs from TGI on purpose: an error that comes before the first token has its real status on
streaming routes too, malformed JSON is answered in the same error shape as everything else, and an unknown
adapter is a 404. Fields that TGI does not know are ignored, as TGI does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from adapters.model import Version
from db.records import AdapterName
from infra.errors import CapacityError, CollmError, Incomplete, InvalidRequest, PromptTooLong, RequestError
from serving.model import FinishReason, Priority, SamplingParams, Slo

MAX_STOP_SEQUENCES = 4
MAX_TOP_N_TOKENS = 5
MAX_BODY_BYTES = 2_000_000
DEFAULT_NAMES = frozenset({"", "dummy", "tgi"})
"""Adapter names by which stock clients mean "whatever this server serves"."""
PREFIX = "Input validation error: "
REPLICA_HEADERS = ("x-adapter-id", "x-adapter-version", "x-adapter-uid", "x-replica-id")
"""Name what answered; every answer carries them."""
REQUEST_HEADERS = ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-priority", "x-request-id")
"""Request headers that mean something to a replica."""

HANGS = "engine_hangs"
"""``error_type`` of an unhealthy replica that will not answer what it has taken on either."""

Body = dict[str, object]
"""A JSON object."""


class Wire(BaseModel):
    """Base of request bodies: JSON types as given, no coercion, no NaN, unknown fields ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class Parameters(Wire):
    """``parameters`` of a request; every rule that needs no tokenizer is checked here."""

    best_of: int | None = Field(None, ge=0)
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    """None: what remains of the context."""
    return_full_text: bool | None = None
    """None: no on ``/generate`` and ``/generate_stream``, yes on ``/``."""
    stop: tuple[str, ...] = ()
    truncate: int | None = None
    """Keep only this many of the prompt's last tokens."""
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = Field(None, ge=0, lt=2**64)
    top_n_tokens: int | None = Field(None, ge=0)
    grammar: object | None = None
    adapter_id: str | None = None
    ignore_eos: bool = False
    """CoLLM's extension: generate exactly ``max_new_tokens`` tokens."""

    @field_validator("do_sample", "watermark", "details", "decoder_input_details", "ignore_eos", mode="before")
    @classmethod
    def null_is_false(cls, value: object) -> object:
        """Clients that send every field send null for what was not given."""
        return False if value is None else value

    @field_validator("stop", mode="before")
    @classmethod
    def stop_list(cls, value: object) -> object:
        """JSON has lists only; null is none."""
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def rules(self) -> "Parameters":
        """TGI's rules, one message each."""
        if self.best_of is not None and self.best_of > 1:
            raise ValueError("`best_of` > 1 is not supported")
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError("`temperature` must be strictly positive")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError("`repetition_penalty` must be strictly positive")
        if self.frequency_penalty is not None and not -2 <= self.frequency_penalty <= 2:
            raise ValueError("`frequency_penalty` must be between -2 and 2")
        if self.top_k is not None and not 0 < self.top_k < 2**31:
            raise ValueError("`top_k` must be strictly positive")
        if self.top_p is not None and not 0 < self.top_p < 1:
            raise ValueError("`top_p` must be > 0 and < 1")
        if self.typical_p is not None and not 0 < self.typical_p < 1:
            raise ValueError("`typical_p` must be > 0 and < 1")
        if self.max_new_tokens is not None and not 0 < self.max_new_tokens < 2**32:
            raise ValueError("`max_new_tokens` must be strictly positive")
        if len(self.stop) > MAX_STOP_SEQUENCES:
            raise ValueError(f"`stop` takes at most {MAX_STOP_SEQUENCES} sequences; {len(self.stop)} given")
        if any(not text for text in self.stop):
            raise ValueError("`stop` takes no empty sequence")
        if self.truncate is not None and self.truncate <= 0:
            raise ValueError("`truncate` must be strictly positive")
        if self.top_n_tokens is not None and self.top_n_tokens > MAX_TOP_N_TOKENS:
            raise ValueError(f"`top_n_tokens` must be <= {MAX_TOP_N_TOKENS}; {self.top_n_tokens} given")
        if self.watermark:
            raise ValueError("`watermark` is not supported")
        if self.grammar is not None:
            raise ValueError("`grammar` is not supported")
        return self

    @property
    def wants_details(self) -> bool:
        """``decoder_input_details`` implies ``details``."""
        return self.details or self.decoder_input_details


class GenerateBody(Wire):
    """Body of ``/``, ``/generate`` and ``/generate_stream``."""

    inputs: str
    parameters: Parameters = Parameters(do_sample=True)
    """Absent: sampling is on. Present without ``do_sample``: off."""
    stream: bool = False
    """Read by ``/`` only."""

    @field_validator("parameters", mode="before")
    @classmethod
    def null_parameters(cls, value: object) -> object:
        """Null is absent."""
        return Parameters(do_sample=True) if value is None else value

    @field_validator("stream", mode="before")
    @classmethod
    def null_stream(cls, value: object) -> object:
        """Null is absent."""
        return False if value is None else value

    @field_validator("inputs")
    @classmethod
    def inputs_given(cls, value: str) -> str:
        """There must be something to continue."""
        if not value:
            raise ValueError("`inputs` cannot be empty")
        return value


def parse(data: bytes, *, stream: bool | None = None) -> GenerateBody:
    """Return the checked body of a request.

    ``stream`` is the route's: True for ``/generate_stream``, False for ``/generate``, None for ``/``, where the
    body says. Raises ``InvalidRequest`` with what is wrong.
    """
    try:
        body = GenerateBody.model_validate_json(data)
    except ValidationError as e:
        raise InvalidRequest(PREFIX + _explain(e)) from None
    if stream is not None and stream != body.stream:
        body = body.model_copy(update={"stream": stream})
    if body.stream and body.parameters.decoder_input_details:
        raise InvalidRequest(PREFIX + "`decoder_input_details` is not supported when streaming tokens")
    return body


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    kind, where = first["type"], ".".join(str(part) for part in first["loc"])
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if kind == "json_invalid":
        return "the body is not valid JSON"
    if kind == "missing":
        return f"`{where}` is missing"
    return f"`{where}`: {first['msg']}" if where else first["msg"]


# What a checked body means.


def resolve_adapter(adapter_id: str | None, *, default: AdapterName, model_id: str) -> AdapterName | None:
    """Return the adapter that a request names; None for the backbone alone. Whether it exists is not checked."""
    if adapter_id is None or adapter_id in DEFAULT_NAMES:
        return default
    return None if adapter_id == model_id else AdapterName(adapter_id)


def truncated(input_ids: Sequence[int], parameters: Parameters, *, max_input_tokens: int) -> tuple[int, ...]:
    """Return the prompt's tokens after ``truncate``. Raises ``InvalidRequest`` if it asks for more than fits."""
    if parameters.truncate is None:
        return tuple(input_ids)
    if parameters.truncate > max_input_tokens:
        raise InvalidRequest(
            PREFIX + f"`truncate` must be strictly positive and at most {max_input_tokens}; {parameters.truncate} given"
        )
    return tuple(input_ids[-parameters.truncate :])


def new_tokens(parameters: Parameters, *, input_tokens: int, max_input_tokens: int, max_total_tokens: int) -> int:
    """Return how many tokens to generate at most: those asked for, or what remains of the context.

    Raises ``PromptTooLong``.
    """
    if input_tokens > max_input_tokens:
        raise PromptTooLong(PREFIX + f"`inputs` must have at most {max_input_tokens} tokens; it has {input_tokens}")
    asked = parameters.max_new_tokens
    if asked is None:
        return max_total_tokens - input_tokens
    if input_tokens + asked > max_total_tokens:
        raise PromptTooLong(
            PREFIX + f"`inputs` tokens + `max_new_tokens` must be <= {max_total_tokens}; "
            f"{input_tokens} `inputs` tokens and {asked} `max_new_tokens` given"
        )
    return asked


def sampling(parameters: Parameters, *, seed: int) -> SamplingParams:
    """Return how tokens are drawn. ``seed`` is used where the request has none.

    As in TGI any sampling rule that is not neutral switches sampling on, whatever ``do_sample`` says.
    """
    p = parameters
    warm = p.temperature is not None and p.temperature != 1
    return SamplingParams(
        do_sample=p.do_sample or warm or p.top_k is not None or p.top_p is not None or p.typical_p is not None,
        temperature=p.temperature or 1.0,
        top_k=p.top_k or 0,
        top_p=p.top_p or 1.0,
        typical_p=p.typical_p or 1.0,
        repetition_penalty=p.repetition_penalty or 1.0,
        frequency_penalty=p.frequency_penalty or 0.0,
        seed=seed if p.seed is None else p.seed,
        top_n_tokens=p.top_n_tokens or 0,
    )


def shown_seed(params: SamplingParams) -> int | None:
    """Return the seed to show in details: None for greedy answers."""
    return params.seed if params.do_sample else None


def full_text(parameters: Parameters, *, compat: bool) -> bool:
    """Return whether the prompt is put before the answer; ``compat``: the route is ``/``."""
    return compat if parameters.return_full_text is None else parameters.return_full_text


def slo(headers: Mapping[str, str], *, default: Slo) -> Slo:
    """Return the request's latency targets: ``x-slo-ttft-ms`` and ``x-slo-tpot-ms`` override the default."""
    return Slo(
        ttft_s=_positive_ms(headers, "x-slo-ttft-ms", default.ttft_s),
        tpot_s=_positive_ms(headers, "x-slo-tpot-ms", default.tpot_s),
    )


def _positive_ms(headers: Mapping[str, str], name: str, default_s: float) -> float:
    raw = headers.get(name)
    if raw is None:
        return default_s
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(PREFIX + f"header {name} must be a positive number of milliseconds")
    return value / 1000


def priority(headers: Mapping[str, str]) -> Priority:
    """Return the request's class: ``x-priority``, interactive unless it says batch."""
    raw = headers.get("x-priority", Priority.INTERACTIVE.value)
    try:
        return Priority(raw)
    except ValueError:
        raise InvalidRequest(PREFIX + "header x-priority must be interactive or batch") from None


# Answers.


@dataclass(frozen=True, slots=True)
class WireToken:
    """A token as clients see it."""

    id: int
    text: str
    logprob: float | None
    special: bool = False

    def body(self) -> Body:
        """As JSON; a logprob that JSON cannot carry is null."""
        return {"id": self.id, "text": self.text, "logprob": _finite(self.logprob), "special": self.special}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    text: str
    """What was generated, without the prompt."""
    finish_reason: FinishReason
    generated_tokens: int
    input_tokens: int
    seed: int | None
    """None for greedy answers."""
    prefill: tuple[WireToken, ...] = ()
    """The prompt's tokens if ``decoder_input_details``; the first has no logprob."""
    tokens: tuple[WireToken, ...] = ()
    top_tokens: tuple[tuple[WireToken, ...], ...] = ()
    """By generated token, if ``top_n_tokens``."""


def answer_body(body: GenerateBody, answer: Answer, *, compat: bool) -> Body | list[Body]:
    """Return a whole answer as JSON; on the route ``/`` (``compat``) it is a list of one."""
    prompt = body.inputs if full_text(body.parameters, compat=compat) else ""
    out: Body = {"generated_text": prompt + answer.text}
    if body.parameters.wants_details:
        details: Body = {
            "finish_reason": answer.finish_reason.value,
            "generated_tokens": answer.generated_tokens,
            "seed": answer.seed,
            "prefill": [{"id": t.id, "text": t.text, "logprob": _finite(t.logprob)} for t in answer.prefill],
            "tokens": [t.body() for t in answer.tokens],
        }
        if answer.top_tokens:
            details["top_tokens"] = [[t.body() for t in top] for top in answer.top_tokens]
        out["details"] = details
    return [out] if compat else out


def token_event(index: int, token: WireToken, top: Sequence[WireToken] = ()) -> Body:
    """Return the stream event of a token that is not the last; ``index`` counts from 1."""
    out: Body = {"index": index, "token": token.body()}
    if top:
        out["top_tokens"] = [t.body() for t in top]
    out["generated_text"] = None
    out["details"] = None
    return out


def last_event(
    body: GenerateBody, index: int, token: WireToken, answer: Answer, *, compat: bool, top: Sequence[WireToken] = ()
) -> Body:
    """Return the stream event of the last token: it carries the whole text and, if asked for, details."""
    out = token_event(index, token, top)
    out["generated_text"] = (body.inputs if full_text(body.parameters, compat=compat) else "") + answer.text
    if body.parameters.wants_details:
        out["details"] = {
            "finish_reason": answer.finish_reason.value,
            "generated_tokens": answer.generated_tokens,
            "seed": answer.seed,
            "input_length": answer.input_tokens,
        }
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """What ``/info`` says."""

    model_id: str
    model_sha: str | None
    max_concurrent_requests: int
    max_input_tokens: int
    max_total_tokens: int
    version: str
    router: str
    adapters: tuple[str, ...] = ()

    def body(self) -> Body:
        """TGI's fields and CoLLM's ``adapters``."""
        return {
            "model_id": self.model_id,
            "model_sha": self.model_sha,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": self.max_concurrent_requests,
            "max_best_of": 1,
            "max_stop_sequences": MAX_STOP_SEQUENCES,
            "max_input_tokens": self.max_input_tokens,
            "max_total_tokens": self.max_total_tokens,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": self.router,
            "version": self.version,
            "sha": None,
            "docker_label": None,
            "adapters": list(self.adapters),
        }


# Headers.


def version_headers(
    adapter: AdapterName | None, version: Version | None, *, model_id: str, replica_id: str
) -> dict[str, str]:
    """Return what names the answering replica and version; the backbone alone is named by its model id."""
    return {
        "x-adapter-id": model_id if adapter is None else adapter,
        "x-adapter-version": "" if version is None else version.label,
        "x-adapter-uid": "" if version is None else version.uid,
        "x-replica-id": replica_id,
    }


def timing_headers(
    *,
    compute_type: str,
    inputs: str,
    total_s: float,
    validation_s: float,
    queue_s: float,
    inference_s: float,
    prompt_tokens: int,
    generated_tokens: int,
) -> dict[str, str]:
    """Return TGI's headers of a whole answer; times in ms but for ``x-compute-time``, which is in seconds."""
    return {
        **stream_headers(compute_type=compute_type, inputs=inputs),
        "x-compute-time": f"{total_s:.6f}",
        "x-total-time": _ms(total_s),
        "x-validation-time": _ms(validation_s),
        "x-queue-time": _ms(queue_s),
        "x-inference-time": _ms(inference_s),
        "x-time-per-token": _ms(inference_s / max(1, generated_tokens)),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens),
    }


def stream_headers(*, compute_type: str, inputs: str) -> dict[str, str]:
    """Return TGI's headers of a stream, known before its first token."""
    return {
        "x-compute-type": compute_type,
        "x-compute-characters": str(len(inputs)),
        "x-accel-buffering": "no",
    }


def _ms(seconds: float) -> str:
    return str(max(0, round(seconds * 1000)))


# Errors.


class CallerGone(Exception):
    """The caller has closed the connection."""


def failure_label(error: Exception) -> str:
    """Return TGI's name for a failure in its metrics."""
    match error:
        case CallerGone():
            return "dropped"
        case RequestError():
            return "validation"
        case CapacityError():
            return "overloaded"
        case Incomplete():
            return "incomplete"
        case _:
            return "generation"


def error_body(error: CollmError) -> Body:
    """Return ``{error, error_type}``; the same in a plain answer and as a stream event."""
    message = error.message
    if error.code == "validation" and not message.startswith(PREFIX):
        message = PREFIX + message
    return {"error": message, "error_type": error.code}


def error_headers(error: CollmError) -> dict[str, str]:
    """Return ``Retry-After`` where trying again helps."""
    if isinstance(error, CapacityError):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {}


def unhealthy_body(reason: str, *, hangs: bool = False) -> Body:
    """Return the body of a 503 of ``/health``; ``hangs``: what waits for an answer had better stop waiting."""
    return {"error": f"unhealthy: {reason}", "error_type": HANGS if hangs else "healthcheck"}


def restore_error(status: int, body: object, *, retry_after_s: float | None = None) -> CollmError:
    """Return the error that an answer of ``status`` with ``body`` means; a plain ``CollmError`` if it names none."""
    if not isinstance(body, Mapping) or not isinstance(body.get("error"), str):
        return CollmError(f"unexpected answer with status {status}")
    message, code = str(body["error"]), str(body.get("error_type", ""))
    kind = _errors().get((code, status))
    if kind is None:
        return CollmError(message)
    if issubclass(kind, CapacityError):
        return kind(message, retry_after_s=retry_after_s or 1.0)
    return kind(message)


@cache
def _errors() -> dict[tuple[str, int], type[CollmError]]:
    """By (code, status): the deepest class, the first of its depth."""
    table: dict[tuple[str, int], type[CollmError]] = {}
    todo: list[type[CollmError]] = [CollmError]
    while todo:
        kind = todo.pop(0)
        children = kind.__subclasses__()
        for child in children:
            key = (child.code, child.status)
            if key not in table or issubclass(child, table[key]):
                table[key] = child
        todo.extend(children)
    return table
