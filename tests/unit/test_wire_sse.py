"""Server-sent events: any cut of the bytes gives the same events, and the end is recognised."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.wire import sse

BODIES = st.lists(st.dictionaries(st.text(), st.text() | st.none()), max_size=6)


@given(BODIES, st.lists(st.integers(1, 40)))
def test_any_cut_gives_the_same_events(bodies: list[dict[str, str | None]], cuts: list[int]) -> None:
    events = [sse.event(b) for b in bodies]
    data, splitter, got = b"".join(events), sse.Splitter(), []
    for size in [*cuts, len(data)]:
        got += splitter.feed(data[:size])
        data = data[size:]
    got += splitter.feed(data)
    assert got == events
    assert splitter.rest == b""


@given(st.text() | st.sampled_from(["a\u2028b", "a\u2029b", "a\x85b", "a\x0b\x0c\x1cb", "é€😀"]))
def test_an_event_is_one_line_to_httpx(text: str) -> None:
    stream = httpx.Response(200, content=sse.event({"text": text}) * 2)
    lines = [line for line in stream.iter_lines() if line]
    assert [json.loads(line.removeprefix("data:")) for line in lines] == [{"text": text}] * 2


def test_part_of_an_event_is_held_back() -> None:
    splitter = sse.Splitter()
    assert splitter.feed(b'data:{"a":') == []
    assert splitter.rest == b'data:{"a":'


@pytest.mark.parametrize(
    ("block", "last"),
    [
        (b'data:{"generated_text":null}\n\n', False),
        (b'data: {"generated_text": null}\n\n', False),
        (b'data:{"token":{"text":"\\"generated_text\\":1"},"generated_text":null}\n\n', False),
        (b'data:{"generated_text":""}\n\n', True),
        (b'data:{"error":"x","error_type":"generation"}\n\n', True),
        (b": ping\n\n", False),
        (b"data:[DONE]\n\n", False),
    ],
)
def test_last_event(block: bytes, last: bool) -> None:
    assert sse.is_last(block) is last


def test_payload_joins_lines_and_skips_comments() -> None:
    assert sse.payload(b": c\ndata: a\r\nevent: x\ndata:b\n\n") == b"a\nb"
