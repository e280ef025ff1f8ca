"""TGI's contract: what is accepted, what is refused and with which words, and how answers look."""

import json
from typing import Any

import pytest

from adapters.model import Version
from db.records import AdapterName, VersionUid
from infra import errors
from infra.errors import CollmError, InvalidRequest, Overloaded, PromptTooLong
from serving.model import FinishReason, Priority, Slo
from serving.wire import sse, tgi

CODE = AdapterName("code")


def body(parameters: dict[str, Any] | None = None, **fields: Any) -> bytes:
    full: dict[str, Any] = {"inputs": "hi", **fields}
    if parameters is not None:
        full["parameters"] = parameters
    return json.dumps(full).encode()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"temperature": -1}, "`temperature`"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.1}, "`frequency_penalty` must be between -2 and 2"),
        ({"frequency_penalty": -2.1}, "`frequency_penalty`"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_k": 2**40}, "`top_k`"),
        ({"top_p": 0}, "`top_p` must be > 0 and < 1"),
        ({"top_p": 1}, "`top_p`"),
        ({"typical_p": 1.0}, "`typical_p` must be > 0 and < 1"),
        ({"typical_p": 0}, "`typical_p`"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"max_new_tokens": -3}, "`max_new_tokens`"),
        ({"stop": list("abcde")}, "`stop` takes at most 4 sequences; 5 given"),
        ({"stop": [""]}, "`stop` takes no empty sequence"),
        ({"stop": "x"}, "`parameters.stop`"),
        ({"truncate": 0}, "`truncate` must be strictly positive"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be <= 5; 6 given"),
        ({"best_of": 2}, "`best_of` > 1 is not supported"),
        ({"watermark": True}, "`watermark` is not supported"),
        ({"grammar": {"type": "json", "value": {}}}, "`grammar` is not supported"),
        ({"seed": -1}, "`parameters.seed`"),
        ({"max_new_tokens": "20"}, "`parameters.max_new_tokens`"),
        ({"max_new_tokens": 2.5}, "`parameters.max_new_tokens`"),
        ({"do_sample": "yes"}, "`parameters.do_sample`"),
        ({"adapter_id": 3}, "`parameters.adapter_id`"),
    ],
)
def test_bad_parameter_is_named(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tgi.parse(body(parameters))
    assert caught.value.message.startswith("Input validation error: ")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"inputs": "hi"', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "valid"),
        (b"{}", "`inputs` is missing"),
        (b'{"inputs": ""}', "`inputs` cannot be empty"),
        (b'{"inputs": 3}', "`inputs`"),
        (b'{"inputs": "x", "parameters": {"temperature": NaN}}', "temperature"),
        (b'{"inputs": "x", "parameters": {"temperature": Infinity}}', "temperature"),
        (b'{"inputs": "x", "parameters": []}', "`parameters`"),
    ],
)
def test_bad_body_is_explained(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        tgi.parse(data)


def test_sampling_default_depends_on_the_presence_of_parameters() -> None:
    assert tgi.parse(body()).parameters.do_sample
    assert tgi.parse(b'{"inputs": "x", "parameters": null}').parameters.do_sample
    assert not tgi.parse(body({})).parameters.do_sample
    assert not tgi.parse(body({"do_sample": None})).parameters.do_sample


@pytest.mark.parametrize("warm", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.5}])
def test_a_sampling_rule_switches_sampling_on(warm: dict[str, Any]) -> None:
    assert tgi.sampling(tgi.parse(body(warm)).parameters, seed=7).do_sample


def test_neutral_temperature_stays_greedy_and_hides_the_seed() -> None:
    params = tgi.sampling(tgi.parse(body({"temperature": 1.0, "seed": 0})).parameters, seed=7)
    assert not params.do_sample
    assert params.seed == 0
    assert tgi.shown_seed(params) is None
    assert tgi.shown_seed(tgi.sampling(tgi.parse(body()).parameters, seed=7)) == 7


def test_nulls_and_unknown_fields_are_ignored() -> None:
    parsed = tgi.parse(body(dict.fromkeys(tgi.Parameters.model_fields), nonsense=1, stream=None))
    assert parsed.parameters == tgi.Parameters()
    assert not parsed.stream


def test_the_route_decides_on_streaming_where_it_can() -> None:
    assert tgi.parse(body(), stream=True).stream
    assert not tgi.parse(body(stream=True), stream=False).stream
    assert tgi.parse(body(stream=True)).stream
    with pytest.raises(InvalidRequest, match="decoder_input_details"):
        tgi.parse(body({"decoder_input_details": True}), stream=True)
    assert tgi.parse(body({"decoder_input_details": True}), stream=False).parameters.wants_details


def test_new_tokens_fill_the_context_unless_given() -> None:
    limits = {"max_input_tokens": 99, "max_total_tokens": 100}
    assert tgi.new_tokens(tgi.Parameters(), input_tokens=40, **limits) == 60
    assert tgi.new_tokens(tgi.Parameters(max_new_tokens=60), input_tokens=40, **limits) == 60
    with pytest.raises(PromptTooLong, match="40 `inputs` tokens and 61"):
        tgi.new_tokens(tgi.Parameters(max_new_tokens=61), input_tokens=40, **limits)
    with pytest.raises(PromptTooLong, match="at most 99 tokens"):
        tgi.new_tokens(tgi.Parameters(), input_tokens=100, **limits)


def test_truncate_keeps_the_end() -> None:
    assert tgi.truncated([1, 2, 3], tgi.Parameters(truncate=2), max_input_tokens=10) == (2, 3)
    assert tgi.truncated([1], tgi.Parameters(truncate=2), max_input_tokens=10) == (1,)
    with pytest.raises(InvalidRequest, match="at most 10"):
        tgi.truncated([1], tgi.Parameters(truncate=11), max_input_tokens=10)


@pytest.mark.parametrize("name", [None, "", "dummy", "tgi"])
def test_stock_names_mean_the_default_adapter(name: str | None) -> None:
    assert tgi.resolve_adapter(name, default=CODE, model_id="m") == "code"


def test_the_model_id_means_the_backbone_alone() -> None:
    assert tgi.resolve_adapter("m", default=CODE, model_id="m") is None
    assert tgi.resolve_adapter("other", default=CODE, model_id="m") == "other"


def test_slo_headers_override_the_defaults() -> None:
    default = Slo(ttft_s=1, tpot_s=0.25)
    assert tgi.slo({"x-slo-ttft-ms": "500"}, default=default) == Slo(ttft_s=0.5, tpot_s=0.25)
    for bad in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(InvalidRequest, match="x-slo-tpot-ms"):
            tgi.slo({"x-slo-tpot-ms": bad}, default=default)
    assert tgi.priority({}) is Priority.INTERACTIVE
    assert tgi.priority({"x-priority": "batch"}) is Priority.BATCH
    with pytest.raises(InvalidRequest, match="x-priority"):
        tgi.priority({"x-priority": "urgent"})


TOKEN = tgi.WireToken(5, " you", -0.5)
ANSWER = tgi.Answer(
    text=" you",
    finish_reason=FinishReason.LENGTH,
    generated_tokens=1,
    input_tokens=1,
    seed=3,
    prefill=(tgi.WireToken(1, "hi", None),),
    tokens=(TOKEN,),
    top_tokens=((TOKEN,),),
)


def test_whole_answer() -> None:
    plain = tgi.parse(body())
    assert tgi.answer_body(plain, ANSWER, compat=False) == {"generated_text": " you"}
    assert tgi.answer_body(plain, ANSWER, compat=True) == [{"generated_text": "hi you"}]
    short = tgi.parse(body({"return_full_text": False, "details": True}))
    assert tgi.answer_body(short, ANSWER, compat=True) == [
        {
            "generated_text": " you",
            "details": {
                "finish_reason": "length",
                "generated_tokens": 1,
                "seed": 3,
                "prefill": [{"id": 1, "text": "hi", "logprob": None}],
                "tokens": [{"id": 5, "text": " you", "logprob": -0.5, "special": False}],
                "top_tokens": [[{"id": 5, "text": " you", "logprob": -0.5, "special": False}]],
            },
        }
    ]


def test_stream_events() -> None:
    parsed = tgi.parse(body({"details": True}), stream=True)
    first = tgi.token_event(1, TOKEN)
    last = tgi.last_event(parsed, 2, TOKEN, ANSWER, compat=False, top=(TOKEN,))
    assert first == {
        "index": 1,
        "token": {"id": 5, "text": " you", "logprob": -0.5, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert last["generated_text"] == " you"
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 1, "seed": 3, "input_length": 1}
    assert "top_tokens" in last
    assert not sse.is_last(sse.event(first))
    assert sse.is_last(sse.event(last))


def test_logprobs_that_json_cannot_carry_are_null() -> None:
    assert tgi.WireToken(1, "", float("-inf")).body()["logprob"] is None
    assert tgi.WireToken(1, "", float("nan")).body()["logprob"] is None


def test_headers_name_what_answered() -> None:
    version = Version(adapter=CODE, uid=VersionUid("u"), number=12, local_steps=40)
    headers = tgi.version_headers(CODE, version, model_id="m", replica_id="r")
    assert headers == {
        "x-adapter-id": "code",
        "x-adapter-version": "12+40",
        "x-adapter-uid": "u",
        "x-replica-id": "r",
    }
    assert tgi.version_headers(None, None, model_id="m", replica_id="r")["x-adapter-id"] == "m"


def leaves(kind: type[CollmError]) -> list[type[CollmError]]:
    children = kind.__subclasses__()
    return [kind] if not children else [leaf for child in children for leaf in leaves(child)]


@pytest.mark.parametrize("kind", leaves(CollmError), ids=lambda kind: kind.__name__)
def test_errors_survive_the_wire(kind: type[CollmError]) -> None:
    error = kind()
    back = tgi.restore_error(error.status, json.loads(sse.dumps(tgi.error_body(error))))
    assert (back.status, back.code, back.retryable) == (error.status, error.code, error.retryable)
    assert error.message in back.message


def test_error_bodies() -> None:
    assert tgi.error_body(InvalidRequest("x")) == {"error": "Input validation error: x", "error_type": "validation"}
    assert tgi.error_headers(Overloaded(retry_after_s=1.2)) == {"retry-after": "2"}
    assert tgi.error_headers(InvalidRequest("x")) == {}
    assert isinstance(tgi.restore_error(502, "<html>"), CollmError)
    restored = tgi.restore_error(429, tgi.error_body(Overloaded()), retry_after_s=3)
    assert isinstance(restored, errors.CapacityError)
    assert restored.retry_after_s == 3
