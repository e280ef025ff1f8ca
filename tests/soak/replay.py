"""Gives kept answers again, one at a time, on a fresh engine that holds the one version that gave them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from adapters import weights as codec
from adapters.model import LoraWeights
from db.records import LoraSpec
from infra.clock import SystemClock
from infra.errors import CollmError
from infra.settings import Settings
from serving.model import BASE, Decode, Draw, Prefill, StepPlan, Token
from serving.ports import Engine
from serving.replica.main import Backbone
from serving.wire import tgi
from tests.soak.sender import Kept

CONTROLS = 24
"""Answers that are given again by another version too: if those agree as well, the comparison shows nothing."""

Weights = Callable[[str], LoraWeights]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """An answer that its version does not give again."""

    kept: Kept
    index: int
    """Of the first token that differs."""
    token: int
    """What came instead."""
    margin: float | None
    """Greedy: nats between the two likeliest tokens there. An answer is as sure as this of its token."""

    def told(self) -> str:
        """Return it in a line."""
        margin = "" if self.margin is None else f", margin {self.margin:.2g} nats"
        return (
            f"{self.kept.adapter} {self.kept.label} ({self.kept.uid[:12]}): token {self.index} of "
            f"{len(self.kept.ids)} is {self.token}, not {self.kept.ids[self.index]}{margin}; "
            f"{self.kept.content[:120].decode(errors='replace')}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay found."""

    answers: int
    tokens: int
    versions: int
    mismatches: Sequence[Mismatch]
    unknown: Sequence[str]
    """Versions whose weights are nowhere to be had."""
    controls: int
    controls_alike: int
    """Of those, how many another version answers alike."""


class Replayer:
    """One engine and the requests that it is given."""

    def __init__(self, settings: Settings) -> None:
        quiet = settings.replica.model_copy(update={"rows": 1, "places": 2, "fake_step_s": 0.0, "fake_slice_s": 0.0})
        backbone = Backbone.of(settings)
        self._engine: Engine = backbone.engine(settings.model_copy(update={"replica": quiet}), SystemClock())
        self._tokenizer = backbone.tokenizer

    def wear(self, weights: LoraWeights | None) -> None:
        """Answer with this version from now on; None: with the backbone alone."""
        self._place = BASE
        if weights is not None:
            self._engine.write(0, weights)
            self._place = 0

    def answer(self, kept: Kept) -> Mismatch | None:
        """Return where the version goes another way than the answer; None if nowhere."""
        shape = self._engine.shape
        body = tgi.parse(kept.content)
        ids = tgi.truncated(
            self._tokenizer.encode(body.inputs), body.parameters, max_input_tokens=shape.max_total_tokens - 1
        )
        params = replace(tgi.sampling(body.parameters, seed=0), top_n_tokens=2)
        context = list(ids)
        for index, want in enumerate(kept.ids):
            draw = Draw(params=params, index=index, context=tuple(context) if params.needs_context else ())
            if index == 0:
                plan = StepPlan(prefills=(Prefill(row=0, place=self._place, tokens=ids, start=0, draw=draw),))
            else:
                last = Decode(row=0, place=self._place, token=context[-1], position=len(context) - 1, draw=draw)
                plan = StepPlan(decodes=(last,))
            (row,) = self._engine.step(plan).rows
            if row.token is None:
                raise CollmError(f"the replay of {kept.uid[:12]} failed: {row.failed}")
            if row.token.id != want:
                margin = None if params.do_sample else _margin(row.token)
                return Mismatch(kept=kept, index=index, token=row.token.id, margin=margin)
            context.append(row.token.id)
        return None


def _margin(token: Token) -> float:
    first, second = token.top
    return abs(first[1] - second[1])


def reproduce(
    replayer: Replayer, answers: Iterable[Kept], weights: Weights, *, progress: Callable[[str], None]
) -> Replayed:
    """Give the answers again, version by version, and some by another version of the same adapter."""
    by_uid: dict[str, list[Kept]] = {}
    for kept in answers:
        by_uid.setdefault(kept.uid, []).append(kept)
    found: dict[str, LoraWeights | None] = {}
    unknown: list[str] = []
    for uid, group in by_uid.items():
        try:
            found[uid] = weights(uid) if uid else None
        except (CollmError, KeyError) as error:
            unknown.append(f"{group[0].adapter} {group[0].label} ({uid[:12]}), {len(group)} answers: {error!r}")
    mismatches: list[Mismatch] = []
    controls = alike = done = tokens = 0
    for number, (uid, worn) in enumerate(found.items()):
        replayer.wear(worn)
        for kept in by_uid[uid]:
            missed = replayer.answer(kept)
            done, tokens = done + 1, tokens + len(kept.ids)
            if missed is not None:
                mismatches.append(missed)
                progress(missed.told())
        other = _another(by_uid, found, uid)
        if other is not None and controls < CONTROLS:
            replayer.wear(other)
            longest = max(by_uid[uid], key=lambda kept: len(kept.ids))
            controls, alike = controls + 1, alike + (replayer.answer(longest) is None)
        progress(f"replayed {done} answers of {number + 1} of {len(found)} versions")
    return Replayed(
        answers=done,
        tokens=tokens,
        versions=len(found),
        mismatches=mismatches,
        unknown=unknown,
        controls=controls,
        controls_alike=alike,
    )


def _another(
    by_uid: Mapping[str, Sequence[Kept]], found: Mapping[str, LoraWeights | None], uid: str
) -> LoraWeights | None:
    """Return another version of the same adapter."""
    name = by_uid[uid][0].adapter
    return next((w for other, w in found.items() if other != uid and by_uid[other][0].adapter == name), None)


def read(store_get: Callable[..., bytes], backbone: Backbone, spec: LoraSpec, key: str) -> LoraWeights:
    """Return the weights under a key, checked."""
    manifest = codec.manifest(backbone.shapes, spec)
    return codec.from_bytes(store_get(key, max_bytes=codec.max_bytes(manifest)), spec, manifest)
