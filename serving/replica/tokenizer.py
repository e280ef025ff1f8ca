"""The tokenizer of a model folder."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Fast

from infra.errors import ConfigError


class HubTokenizer:
    """``tokenizer.json`` as the hub ships it; implements ``text.Tokenizer``."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {folder}")
        self._fast = Fast.from_file(str(path))
        self._fast.no_padding()
        self._fast.no_truncation()
        self._special = frozenset(i for i, t in self._fast.get_added_tokens_decoder().items() if t.special)

    def encode(self, text: str) -> tuple[int, ...]:
        """See ``text.Tokenizer``."""
        return tuple(self._fast.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``text.Tokenizer``."""
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """See ``text.Tokenizer``."""
        return self._fast.decode([token], skip_special_tokens=False)

    def is_special(self, token: int) -> bool:
        """See ``text.Tokenizer``."""
        return token in self._special
