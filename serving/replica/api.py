"""The replica over HTTP: TGI's routes for the gateway and the control API for flows, both behind the cluster token."""

import asyncio
import hmac
import secrets
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version as distribution_version

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adapters.model import Version
from db.records import AdapterName
from infra import metrics
from infra.clock import Clock
from infra.errors import CollmError, InvalidRequest, NoReplica, Overloaded, Unauthorized
from infra.settings import Settings
from serving.model import Emitted, Finished, Request, RequestId, Slo, Started
from serving.replica.control_api import control_routes
from serving.replica.desk import Answer, Desk
from serving.replica.loader import Loader
from serving.replica.text import Tokenizer
from serving.replica.upload import read_body
from serving.wire import sse, tgi
from serving.wire.tgi import CallerGone

log = structlog.get_logger()

LONG_PROMPT = 20_000
"""Characters from which a prompt is tokenised beside the event loop."""
HANG_S = 15.0
"""A turn of the engine's thread that takes longer will not end: steps and slices are cut far shorter, and what is slow
(a model, a version's file) is loaded before the first turn or in another thread."""

Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def make_app(
    desk: Desk, loader: Loader, tokenizer: Tokenizer, settings: Settings, clock: Clock, exposed: metrics.ReplicaMetrics
) -> Starlette:
    """Return the ASGI application of one replica."""
    api, token = Api(desk, tokenizer, settings, clock, exposed), settings.required_token()
    generation: tuple[tuple[str, bool | None], ...] = (("/", None), ("/generate", False), ("/generate_stream", True))
    routes = [
        *(
            Route(path, rendered(guarded(api.generate(stream=stream), token)), methods=["POST"])
            for path, stream in generation
        ),
        *(Route(path, api.health, methods=["GET"]) for path in ("/", "/health", "/ping")),
        Route("/info", rendered(api.info), methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        *(
            Route(path, rendered(guarded(endpoint, token)), methods=[method])
            for method, path, endpoint in control_routes(desk, loader)
        ),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: no_route})


def rendered(endpoint: Endpoint) -> Endpoint:
    """Answer with the error that the endpoint raises."""

    async def answer(http: HttpRequest) -> Response:
        with structlog.contextvars.bound_contextvars(**request_context(http)):
            return await attempted(http)

    async def attempted(http: HttpRequest) -> Response:
        try:
            return await endpoint(http)
        except CallerGone:
            return Response(status_code=499)  # nobody reads it
        except CollmError as error:
            return error_response(error)
        except Exception:
            number = uuid.uuid4().hex[:8]
            log.exception("internal_error", number=number, path=http.url.path)
            return error_response(CollmError(f"internal error {number}"))

    return answer


def request_context(http: HttpRequest) -> dict[str, str]:
    """Return what the log lines of a request are found by: the id that the gateway's lines have too."""
    given = http.headers.get("x-request-id")
    return {} if given is None else {"request_id": given}


def guarded(endpoint: Endpoint, token: str) -> Endpoint:
    """Ask for the cluster token first. Raises ``Unauthorized``."""
    wanted = token.encode()

    async def answer(http: HttpRequest) -> Response:
        kind, _, given = http.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.encode(), wanted):
            raise Unauthorized
        return await endpoint(http)

    return answer


def error_response(error: CollmError) -> Response:
    """Return an error with its status."""
    return JSONResponse(tgi.error_body(error), status_code=error.status, headers=tgi.error_headers(error))


def no_route(_: HttpRequest, error: Exception) -> Response:
    """Render Starlette's 404 and 405 as all other errors."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail, "error_type": "not_found"}, status_code=error.status_code)


@dataclass(slots=True, kw_only=True)
class Call:
    """A checked request and what its answer needs."""

    body: tgi.GenerateBody
    request: Request
    compat: bool
    validation_s: float
    version: Version | None = None
    tokens: list[Emitted] = field(default_factory=list)


class Api:
    """Endpoints of TGI's routes."""

    def __init__(
        self, desk: Desk, tokenizer: Tokenizer, settings: Settings, clock: Clock, exposed: metrics.ReplicaMetrics
    ) -> None:
        self._desk = desk
        self._tokenizer = tokenizer
        self._settings = settings
        self._clock = clock
        self._metrics = exposed

    async def health(self, _: HttpRequest) -> Response:
        """200 once it has a model and the versions in force, and while its engine's thread turns."""
        replica = self._desk.replica
        if replica is not None and self._clock.monotonic() - replica.turned_s > HANG_S:
            return JSONResponse(tgi.unhealthy_body("the engine's thread hangs", hangs=True), status_code=503)
        if replica is not None and replica.ready:
            return Response()
        return JSONResponse(tgi.unhealthy_body("not ready"), status_code=503)

    async def info(self, _: HttpRequest) -> Response:
        """TGI's ``/info``."""
        replica = self._desk.staffed()
        shape = replica.engine.shape
        info = tgi.Info(
            model_id=shape.model_id,
            model_sha=shape.backbone,
            max_concurrent_requests=self._settings.replica.max_queue + shape.rows,
            max_input_tokens=shape.max_total_tokens - 1,
            max_total_tokens=shape.max_total_tokens,
            version=distribution_version("collm"),
            router="collm-replica",
            adapters=tuple(sorted(replica.residency.pairs)),
        )
        return JSONResponse(info.body())

    async def metrics(self, _: HttpRequest) -> Response:
        """Prometheus text."""
        return Response(self._metrics.render(), media_type=metrics.CONTENT_TYPE)

    def generate(self, *, stream: bool | None) -> Endpoint:
        """Return the endpoint of a generation route; ``stream`` None: the body says."""

        async def endpoint(http: HttpRequest) -> Response:
            self._metrics.request_count.inc()
            try:
                call = await self._check(http, stream)
                answer = Answer(self._desk, call.request, http.receive)
                if call.body.stream:
                    return await EventStream.begin(self, answer, call)
                return await self._whole(answer, call)
            except Exception as error:
                self.count_failure(error)
                raise

        return endpoint

    async def _check(self, http: HttpRequest, stream: bool | None) -> Call:
        arrival_s, replica = self._clock.monotonic(), self._desk.staffed()
        if not replica.ready and not replica.stopping:
            raise NoReplica("the replica is loading the versions in force")
        body = tgi.parse(await read_body(http, tgi.MAX_BODY_BYTES), stream=stream)
        shape, parameters = replica.engine.shape, body.parameters
        if len(body.inputs) > LONG_PROMPT:
            ids = await asyncio.to_thread(self._tokenizer.encode, body.inputs)
        else:
            ids = self._tokenizer.encode(body.inputs)
        limit = shape.max_total_tokens - 1
        ids = tgi.truncated(ids, parameters, max_input_tokens=limit)
        if not ids:
            raise InvalidRequest("`inputs` has no tokens")
        if max(ids) >= shape.vocab:
            # A tokenizer may know more than the backbone has embeddings for; a step with such a token fails whole.
            raise InvalidRequest(
                f"`inputs` has token {max(ids)}, and this model's vocabulary ends at {shape.vocab - 1}"
            )
        # The queue's own check is the one that counts; this one answers at once while a step runs.
        if replica.scheduler.queued >= self._settings.replica.max_queue:
            replica.inbox.post(lambda: replica.stats.failed(replica.clock.monotonic()))
            raise Overloaded(retry_after_s=replica.scheduler.retry_after_s())
        slo = Slo(ttft_s=self._settings.slo.ttft_s, tpot_s=self._settings.slo.tpot_s)
        request = Request(
            id=RequestId(uuid.uuid4().hex),
            adapter=tgi.resolve_adapter(
                parameters.adapter_id, default=AdapterName(self._settings.rounds.adapter), model_id=shape.model_id
            ),
            input_ids=ids,
            max_new_tokens=tgi.new_tokens(
                parameters, input_tokens=len(ids), max_input_tokens=limit, max_total_tokens=shape.max_total_tokens
            ),
            stop=parameters.stop,
            ignore_eos=parameters.ignore_eos,
            sampling=tgi.sampling(parameters, seed=secrets.randbits(63)),
            prompt_logprobs=parameters.decoder_input_details,
            slo=tgi.slo(http.headers, default=slo),
            priority=tgi.priority(http.headers),
            arrival_s=arrival_s,
        )
        return Call(
            body=body,
            request=request,
            compat=http.url.path == "/",
            validation_s=self._clock.monotonic() - arrival_s,
        )

    async def _whole(self, answer: Answer, call: Call) -> Response:
        async with answer:
            while True:
                event = await answer.next()
                if isinstance(event, Started):
                    call.version = event.version
                elif isinstance(event, Emitted):
                    call.tokens.append(event)
                elif isinstance(event, Finished):
                    break
        self.count_success(call, event)
        headers = tgi.timing_headers(
            compute_type=self._settings.model.device,
            inputs=call.body.inputs,
            total_s=event.total_s,
            validation_s=call.validation_s,
            queue_s=event.queue_s,
            inference_s=event.total_s - event.queue_s,
            prompt_tokens=len(call.request.input_ids),
            generated_tokens=event.tokens,
        )
        body = tgi.answer_body(call.body, self.answer(call, event), compat=call.compat)
        return Response(sse.dumps(body), media_type="application/json", headers=headers | self.version_headers(call))

    # How events become TGI's answers.

    def answer(self, call: Call, end: Finished) -> tgi.Answer:
        """Return the whole answer."""
        return tgi.Answer(
            text=end.text,
            finish_reason=end.reason,
            generated_tokens=end.tokens,
            input_tokens=len(call.request.input_ids),
            seed=tgi.shown_seed(call.request.sampling),
            prefill=self._prefill(call, end),
            tokens=tuple(self.token(t) for t in call.tokens),
            top_tokens=tuple(self.top(t) for t in call.tokens) if call.request.sampling.top_n_tokens else (),
        )

    def token(self, event: Emitted) -> tgi.WireToken:
        """Return a token with the text that it adds; special ones, which add none, with their own."""
        text = self._tokenizer.token_text(event.token.id) if event.special else event.text
        return tgi.WireToken(event.token.id, text, event.token.logprob, event.special)

    def top(self, event: Emitted) -> tuple[tgi.WireToken, ...]:
        """Return the likeliest tokens in its place."""
        name, special = self._tokenizer.token_text, self._tokenizer.is_special
        return tuple(tgi.WireToken(i, name(i), logprob, special(i)) for i, logprob in event.token.top)

    def _prefill(self, call: Call, end: Finished) -> tuple[tgi.WireToken, ...]:
        if not call.request.prompt_logprobs:
            return ()
        logprobs = (None, *end.prompt_logprobs)
        return tuple(
            tgi.WireToken(token, self._tokenizer.token_text(token), logprob)
            for token, logprob in zip(call.request.input_ids, logprobs, strict=True)
        )

    def version_headers(self, call: Call) -> dict[str, str]:
        """Return what names the replica and the version that answers."""
        named = tgi.version_headers(
            call.request.adapter,
            call.version,
            model_id=self._desk.staffed().engine.shape.model_id,
            replica_id=self._settings.replica.id,
        )
        return {name: str(value) for name, value in named.items()}

    def stream_headers(self, call: Call) -> dict[str, str]:
        """Return the headers of a stream."""
        known = tgi.stream_headers(compute_type=self._settings.model.device, inputs=call.body.inputs)
        return known | self.version_headers(call)

    def count_success(self, call: Call, end: Finished) -> None:
        """Count a whole answer."""
        m = self._metrics
        m.request_success.inc()
        m.request_duration.observe(end.total_s)
        m.request_queue_duration.observe(end.queue_s)
        m.request_inference_duration.observe(end.total_s - end.queue_s)
        m.request_mean_time_per_token_duration.observe(end.tpot_s)
        m.request_generated_tokens.observe(end.tokens)
        m.request_input_length.observe(len(call.request.input_ids))
        m.request_max_new_tokens.observe(call.request.max_new_tokens)

    def count_failure(self, error: Exception) -> None:
        """Count an answer that was not given whole."""
        self._metrics.request_failure.labels(tgi.failure_label(error)).inc()


class EventStream(Response):
    """Server-sent events of one answer, token by token as they come."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, api: Api, answer: Answer, call: Call, first: Emitted) -> None:
        super().__init__(None, headers=api.stream_headers(call), media_type=sse.MEDIA_TYPE)
        del self.headers["content-length"]
        self._api = api
        self._answer = answer
        self._call = call
        self._first = first

    @classmethod
    async def begin(cls, api: Api, answer: Answer, call: Call) -> "EventStream":
        """Wait for the first token: what fails before has a status of its own."""
        await answer.__aenter__()
        try:
            while True:
                event = await answer.next()
                if isinstance(event, Started):
                    call.version = event.version
                elif isinstance(event, Emitted):
                    return cls(api, answer, call, event)
        except BaseException as error:
            await answer.__aexit__(type(error), error, None)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head and events; the caller's going away, or an error here, stops the generation."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._events()) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except Exception as error:
            self._api.count_failure(error)
            if not isinstance(error, CallerGone):
                raise
        finally:
            await self._answer.__aexit__(None, None, None)

    async def _events(self) -> AsyncGenerator[bytes]:
        api, call, index = self._api, self._call, 0
        event: Emitted = self._first
        try:
            while True:
                index += 1
                following = self._answer.ready()
                token = api.token(event)
                top = api.top(event)
                if isinstance(following, Finished):
                    api.count_success(call, following)
                    whole = api.answer(call, following)
                    yield sse.event(tgi.last_event(call.body, index, token, whole, compat=call.compat, top=top))
                    return
                yield sse.event(tgi.token_event(index, token, top))
                event = following if isinstance(following, Emitted) else await self._token()
        except CollmError as error:
            api.count_failure(error)
            yield sse.event(tgi.error_body(error))

    async def _token(self) -> Emitted:
        """A token is followed by another, or in the same step by the end."""
        event = await self._answer.next()
        assert isinstance(event, Emitted)
        return event
