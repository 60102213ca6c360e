"""Prove that as many replicas of a part hold one result as another, so that a copy of the part may take over. Pure.

On a tie nobody knows which result is right. Replicas sign what they answer, so a tie of which the leader tells can be
checked by all: no honest pair signs two results of one attempt. After the first tie all compute anew from the last
record; after a second one the part counts as lost, and who keeps a copy of it takes it over (:mod:`.member.rescue`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from swarm.consensus.roster import Roster
from swarm.errors import Violation
from swarm.ids import PartName, PeerId, RunId
from swarm.network.protocols import Rpc
from swarm.schema import Count, Empty, Message, PartField, PeerIdField, SignatureField
from swarm.step.decisions import Disagreement

What = Literal["gradient", "weights"]
Verify = Callable[[PeerId, bytes, bytes], bool]


class Statement(Message):
    """What one replica signed as its result of one attempt at its part."""

    peer: PeerIdField
    attempt: Count
    what: What
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]
    signature: SignatureField


Statements = Annotated[tuple[Statement, ...], Field(min_length=2, max_length=1024)]


class Tied(Message):
    """All replicas of a part that are there were asked twice, and their results were tied both times."""

    step: Count
    term: Count
    part: PartField
    first: Statements
    second: Statements


TIED = Rpc("step/1/tied", Tied, Empty)


@dataclass(frozen=True, slots=True)
class ResultSigning:
    """What is signed under a result of the step after the record whose hash is ``previous``."""

    run: RunId
    step: int
    previous: str

    def data(self, part: str, attempt: int, what: What, digest: str) -> bytes:
        """Return the bytes that a replica signs."""
        return f"result|{self.run}|{self.step}|{self.previous}|{part}|{attempt}|{what}|{digest}".encode()

    def check(self, body: Tied, roster: Roster, gone: Collection[str], verify: Verify) -> None:
        """Raises Violation unless the part's replicas that are not ``gone`` were tied in two attempts."""
        part, replicas = PartName(body.part), roster.replicas(PartName(body.part))
        attempts = [{(one.attempt, one.what) for one in said} for said in (body.first, body.second)]
        if any(len(each) != 1 for each in attempts) or attempts[0] == attempts[1]:
            raise Violation(f"two ties of {part} are of one attempt each, and not of the same")
        for said in (body.first, body.second):
            digests = {PeerId(one.peer): one.digest for one in said}
            if not set(digests) <= set(replicas) or not set(replicas) <= {*digests, *gone}:
                raise Violation(f"a tie of {part} is between all its replicas that are there")
            if len(set(digests.values())) < 2 or Disagreement("", part, digests).dissenters:
                raise Violation(f"the replicas of {part} were not tied")
            for one in said:
                if not verify(PeerId(one.peer), self.data(part, one.attempt, one.what, one.digest), one.signature):
                    raise Violation(f"the result of {one.peer} is forged")


@dataclass(slots=True)
class TieEvidence:
    """What the leader of one term was answered in ties, part by part."""

    signing: ResultSigning
    verify: Verify
    _seen: dict[PartName, tuple[Statement, ...]] = field(default_factory=dict)

    def unsigned(self, found: Disagreement, attempt: int, signed: Mapping[PeerId, bytes]) -> list[PeerId]:
        """Return those of a tie that did not sign what they answered: of them nothing can be proven."""
        return [
            peer
            for peer, digest in found.digests.items()
            if not self.verify(peer, self.signing.data(found.part, attempt, found.what, digest), signed.get(peer, b""))
        ]

    def second(self, term: int, found: Disagreement, attempt: int, signed: Mapping[PeerId, bytes]) -> Tied | None:
        """Keep a tie in which all have signed; returns what proves the second one of the part, None after the first."""
        said = tuple(
            Statement(peer=peer, attempt=attempt, what=found.what, digest=digest, signature=signed[peer])
            for peer, digest in sorted(found.digests.items())
        )
        before = self._seen.get(found.part)
        if before is None or before[0].attempt == attempt:
            self._seen[found.part] = said
            return None
        return Tied(step=self.signing.step, term=term, part=found.part, first=before, second=said)
