"""Text that comes token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.replica.fake_engine import EOS, FakeTokenizer
from serving.replica.text import MAX_PENDING, TextStream

TOKENIZER = FakeTokenizer()


def pushed(text: str, stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str]]:
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for token in text.encode():
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return stream, [*pieces, stream.flush()]


@given(st.text(max_size=40))
def test_the_pieces_are_the_text(text: str) -> None:
    stream, pieces = pushed(text)
    assert "".join(pieces) == stream.text == text


def test_no_half_character_is_shown() -> None:
    stream = TextStream(TOKENIZER)
    assert [stream.push(b) for b in "ß😀".encode()] == ["", "ß", "", "", "", "😀"]


def test_bytes_that_never_become_a_character_are_let_through() -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(0x80) for _ in range(MAX_PENDING)]
    assert pieces[:-1] == [""] * (MAX_PENDING - 1)
    assert pieces[-1]


def test_what_is_incomplete_at_the_end_is_shown_then() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push("ß".encode()[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_no_text() -> None:
    stream = TextStream(TOKENIZER)
    assert [stream.push(t) for t in (97, EOS, 98)] == ["a", "", "b"]


class Pairs:
    """Every token stands for two letters, so that stop strings begin and end inside tokens."""

    def encode(self, text: str) -> tuple[int, ...]:
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) + chr(98 + i) for i in ids)

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def is_special(self, token: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("stop", "text"),
    [(("b",), "ab"), (("bbc",), "abbc"), (("c", "bb"), "abb"), (("abb", "abbc"), "abb"), (("x",), "abbccd")],
)
def test_a_stop_string_ends_the_text_wherever_tokens_end(stop: tuple[str, ...], text: str) -> None:
    stream = TextStream(Pairs(), stop)  # type: ignore[arg-type]
    shown = ""
    for token in (0, 1, 2):
        if not stream.stopped:
            shown += stream.push(token)
    assert shown == stream.text == text
    assert stream.stopped == (stop != ("x",))


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_with_the_stop_string_that_ends_first(text: str, stop: list[str]) -> None:
    stream, pieces = pushed(text, tuple(stop))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stream.text == text[: min(ends, default=len(text))] == "".join(pieces)
    assert stream.stopped == bool(ends)
