"""One budget in bytes for everything that a replica holds; what is admitted follows from it. Pure.

The budget covers the process itself, the frozen weights and their packed copy, adapter versions in the engine's places
and in host memory, KV rows, the largest step, and training: factors, moments, activations. Weights count whole, though
replicas on one host share their pages: the plan must hold also where they cannot.
"""

from dataclasses import dataclass

from infra.errors import ConfigError

MIB = 2**20
PROCESS_BYTES = 700 * MIB
"""Interpreter, torch, transformers and the server, with what allocators keep (measured: 450 to 600 MiB)."""
SPARE_VERSIONS = 4
"""Versions in host memory beyond those in places: staged, or about to take over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes of each part."""

    weights: int
    """Frozen, as loaded."""
    packed: int
    """Their second copy in oneDNN's layout; 0 where it is not wanted or not possible."""
    place: int
    """One resident version."""
    version: int
    """One version in host memory."""
    row: int
    """One KV row."""
    step: int
    """What the largest engine step makes and frees."""
    training: int
    """Factors, moments and the activations of the largest micro-batch; 0 for a replica that does not train."""
    training_checkpointed: int
    """The same if a layer's activations are computed again when they are needed."""
    process: int = PROCESS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What fits."""

    budget: int
    packed: bool
    checkpointed: bool
    rows: int
    """KV rows: requests that run at once."""
    versions: int
    """Most versions in host memory."""
    used: int
    """Bytes if all of it is taken."""


def plan_memory(budget: int, costs: Costs, *, rows: int, places: int) -> MemoryPlan:
    """Return the best that fits: ``rows`` KV rows if possible, fast weights and training before slow ones.

    Recomputing activations costs training a third of its speed and frees most of its memory; doing without packed
    weights slows every request; fewer rows than asked for comes last. Raises ``ConfigError`` if not even one row fits.
    """
    assert rows > 0
    least_versions = places + SPARE_VERSIONS
    kept = costs.process + costs.weights + places * costs.place + least_versions * costs.version + costs.step
    checkpointing = (False, True) if costs.training_checkpointed < costs.training else (False,)
    choices = [(packed, again) for packed in ((True, False) if costs.packed else (False,)) for again in checkpointing]
    best: MemoryPlan | None = None
    for packed, again in choices:
        fixed = kept + packed * costs.packed + (costs.training_checkpointed if again else costs.training)
        fits = min(rows, (budget - fixed) // costs.row)
        if fits < 1 or (best is not None and fits <= best.rows):
            continue
        used = fixed + fits * costs.row
        more = (budget - used) // costs.version
        best = MemoryPlan(
            budget=budget,
            packed=packed,
            checkpointed=again,
            rows=fits,
            versions=least_versions + more,
            used=used + more * costs.version,
        )
        if fits == rows:
            break
    if best is None:
        least = kept + min(costs.training, costs.training_checkpointed) + costs.row
        raise ConfigError(
            f"COLLM_REPLICA__MEMORY_BYTES: {budget // MIB} MiB are not enough: this model with {places} places, "
            f"rows of that length and training takes at least {-(-least // MIB)} MiB"
        )
    return best
