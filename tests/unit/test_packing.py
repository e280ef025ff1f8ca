"""Rows become the tokens that a request's prompt has, and micro-batches lose none of them."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.replica.fake_engine import FakeTokenizer
from serving.replica.packing import RowEncoder, TokenRow, even_batches, micro_batches, pack
from serving.rows import Row, render_prompt

EOS = 256
CPU = torch.device("cpu")


class PrefixTokenizer(FakeTokenizer):
    """Puts a token before every text, as many models want."""

    def encode(self, text: str) -> tuple[int, ...]:
        return (1, *super().encode(text))


def token_rows() -> st.SearchStrategy[list[TokenRow]]:
    row = st.tuples(st.integers(1, 20), st.integers(1, 20)).map(lambda n: TokenRow(tuple(range(sum(n))), n[0]))
    return st.lists(row, min_size=1, max_size=12)


def test_row_is_the_requests_prompt_then_completion_then_eos() -> None:
    row = RowEncoder(PrefixTokenizer(), eos_id=EOS, row_tokens=256).encode(Row("Add.", "a + b"))
    assert row.ids == (1, *render_prompt("Add.").encode(), *b"a + b", EOS)
    assert row.supervised == len(b"a + b") + 1


@given(st.text(max_size=80), st.text(max_size=80), st.integers(2, 64))
def test_a_long_row_is_cut_but_keeps_both_parts(prompt: str, completion: str, row_tokens: int) -> None:
    row = RowEncoder(FakeTokenizer(), eos_id=EOS, row_tokens=row_tokens).encode(Row(prompt, completion))
    whole = completion.encode() + bytes(1)
    assert len(row.ids) <= row_tokens
    assert row.prompt >= 1
    assert row.supervised >= min(len(whole), row_tokens // 2)


@given(token_rows(), st.integers(1, 60))
def test_micro_batches_keep_order_and_bound(rows: list[TokenRow], most: int) -> None:
    runs = list(micro_batches(rows, most))
    assert [row for run in runs for row in run] == rows
    assert all(len(run) == 1 or sum(len(row.ids) for row in run) <= most for run in runs)


@given(token_rows(), st.integers(1, 60))
def test_even_batches_are_as_few_and_none_is_larger_than_must_be(rows: list[TokenRow], most: int) -> None:
    runs, greedy = even_batches(rows, most), list(micro_batches(rows, most))
    assert [row for run in runs for row in run] == rows
    assert len(runs) == len(greedy)
    largest = max((sum(len(row.ids) for row in run) for run in runs), default=0)
    assert largest <= max((sum(len(row.ids) for row in run) for run in greedy), default=0)
    if largest > max((len(row.ids) for row in rows), default=0):
        assert len(list(micro_batches(rows, largest - 1))) > len(runs), "a smaller bound would do"


@given(token_rows())
def test_pack_supervises_exactly_the_completions(rows: Sequence[TokenRow]) -> None:
    batch = pack(rows, CPU)
    assert batch.labels.tolist() == [token for row in rows for token in row.ids[row.prompt :]]
    assert batch.ids[batch.predicts + 1].tolist() == batch.labels.tolist()
    assert batch.positions.tolist() == [at for row in rows for at in range(len(row.ids))]
    assert batch.supervised == tuple(row.supervised for row in rows)
