"""Tokens to text as they come: no half characters, stop strings across token borders. Pure."""

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""
MAX_PENDING = 12
"""Tokens after which bytes that never became a character are let through."""


class Tokenizer(Protocol):
    """Text ↔ tokens. Implementations: ``HubTokenizer`` (tokenizer.json) and the fake engine's bytes."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return a prompt's tokens, with the tokens that the model wants around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        ...

    def token_text(self, token: int) -> str:
        """Return what one token reads like on its own, special ones included."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether the token is no part of the text."""
        ...


class TextStream:
    """The growing text of one answer.

    A token's piece is what the text grew by: decoding a few tokens back gives the decoder the context that it needs
    for spaces. While the last character is incomplete nothing is emitted.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._window: list[int] = []
        self._shown = ""
        """Text of the tokens in the window that has been emitted."""
        self._pending = 0
        self.text = ""
        self.stopped = False
        """A stop string has been seen; ``text`` ends with it."""

    def push(self, token: int) -> str:
        """Add a token and return the text it adds."""
        if self._tokenizer.is_special(token):
            return ""
        self._window.append(token)
        self._pending += 1
        decoded = self._tokenizer.decode(self._window)
        if decoded.endswith(INCOMPLETE) and self._pending < MAX_PENDING:
            return ""
        return self._emit(decoded)

    def flush(self) -> str:
        """Return what was held back; at the end of an answer."""
        if not self._pending or self.stopped:
            return ""
        return self._emit(self._tokenizer.decode(self._window))

    def _emit(self, decoded: str) -> str:
        piece = decoded[len(self._shown) :]
        self._window = self._window[-self._pending :]
        self._shown = self._tokenizer.decode(self._window)
        self._pending = 0
        return self._cut(piece)

    def _cut(self, piece: str) -> str:
        before = len(self.text)
        self.text += piece
        if not self._stop:
            return piece
        start = max(0, before - self._longest + 1)
        ends = [at + len(s) for s in self._stop if (at := self.text.find(s, start)) >= 0]
        if not ends:
            return piece
        self.stopped = True
        self.text = self.text[: min(ends)]
        return self.text[before:]
