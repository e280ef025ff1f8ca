"""One adapter on one replica: the version served, the base of its shadow, and who may replace them. Pure.

A ``Pair`` is a value; each transition returns the next one or raises ``VersionConflict`` and changes nothing.

    promote      a federated version becomes base and active; the old active is kept as previous
    publish      a child of the shadow becomes active, if its lineage is still the current one
    roll_back    the previous active is active again; no child is published until the next round
    start_round  the shadow begins anew at the base
    end_round    an aborted or rejected round: the base is active again

Every transition that re-bases the shadow takes a new ``generation``, so that a step in flight can never publish a
child of what came before it, even where base and epoch stay the same.
"""

from dataclasses import dataclass, replace

from adapters.model import Version
from db.records import Epoch, RoundId, VersionUid
from infra.errors import UnknownVersion, VersionConflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What a shadow descends from; a publish compares it with the pair's."""

    base_uid: VersionUid
    epoch: Epoch
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Active and shadow of one adapter."""

    base: Version
    """The federated version in force here."""
    active: Version
    """What new requests get: the base, or a local version of it."""
    previous: Version | None = None
    """What was active before; a roll back returns to it."""
    epoch: Epoch
    generation: int = 0
    round_id: RoundId | None = None
    """The round that the shadow trains for, or trained for last."""
    may_publish: bool = False
    """Whether a round has started since the last promotion or roll back."""

    @property
    def lineage(self) -> Lineage:
        """What a shadow that starts now descends from."""
        return Lineage(base_uid=self.base.uid, epoch=self.epoch, generation=self.generation)

    @property
    def kept(self) -> frozenset[VersionUid]:
        """Versions that must not be forgotten."""
        return frozenset(v.uid for v in (self.base, self.active, self.previous) if v is not None)

    def promote(self, version: Version, epoch: Epoch) -> "Pair":
        """Make a federated version base and active. The same one at the same epoch again changes nothing."""
        if epoch == self.epoch and version.uid == self.base.uid:
            return self
        if epoch <= self.epoch:
            raise VersionConflict(
                f"adapter {version.adapter} is at epoch {self.epoch}; {version.label} comes with epoch {epoch}"
            )
        return replace(
            self._activate(version), base=version, epoch=epoch, generation=self.generation + 1, may_publish=False
        )

    def publish(self, version: Version, lineage: Lineage) -> "Pair":
        """Make a local version active, if it descends from what the shadow descends from now."""
        if lineage != self.lineage or not self.may_publish:
            raise VersionConflict(f"{version.adapter} {version.label} descends from a base that is no longer in force")
        return self._activate(version)

    def roll_back(self) -> "Pair":
        """Return to the previous active version; what was rolled back is not kept to return to."""
        if self.previous is None:
            raise UnknownVersion(f"adapter {self.active.adapter} has no previous version here")
        return replace(self, active=self.previous, previous=None, generation=self.generation + 1, may_publish=False)

    def start_round(self, round_id: RoundId, base_uid: VersionUid, epoch: Epoch) -> "Pair":
        """Begin the shadow anew at the base."""
        if (base_uid, epoch) != (self.base.uid, self.epoch):
            raise VersionConflict(
                f"round {round_id} starts from {base_uid} at epoch {epoch}; "
                f"in force are {self.base.uid} and {self.epoch}"
            )
        return replace(self, generation=self.generation + 1, round_id=round_id, may_publish=True)

    def end_round(self) -> "Pair":
        """Drop the shadow; a local version gives way to the base."""
        ended = replace(self, generation=self.generation + 1, may_publish=False)
        if not self.active.local_steps:
            return ended
        return replace(ended, active=self.base, previous=None)

    def _activate(self, version: Version) -> "Pair":
        if version.uid == self.active.uid:
            return self
        return replace(self, active=version, previous=self.active)
