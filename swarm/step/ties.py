"""Prove that as many replicas of a part hold one result as another, so that a copy of the part may take over. Pure.

On a tie nobody knows which result is right. Replicas sign what they answer, so a tie of which the leader tells can be
checked by all: no honest pair signs two results of one attempt, made from the same. After the first tie all compute
anew from the last record; after a second one the part counts as lost, and who keeps a copy of it takes it over
(:mod:`.member.rescue`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, StringConstraints

from swarm.consensus.roster import Roster
from swarm.errors import Violation
from swarm.ids import ENDS, PartName, PeerId
from swarm.network.protocols import Rpc
from swarm.schema import Count, DigestField, Empty, Message, PartField, PeerIdField, SignatureField
from swarm.security.signing import Verify
from swarm.step.decisions import Disagreement, alike
from swarm.step.results import Asked, ResultSigning, What

_RESULT = r"^[0-9a-f]{16,64}(/0x[01]\.[0-9a-f]{1,13}p(\+[0-9]{1,3}|-[0-9]{1,4}))?$"


class Statement(Message):
    """What one replica signed as its result of one attempt at its part. ``asked`` is the hash of what it computed it
    from, as far as the leader said it (:meth:`Asked.inputs`). ``digest`` is followed by the norm for a gradient."""

    peer: PeerIdField
    attempt: Count
    what: What
    asked: DigestField
    digest: Annotated[str, StringConstraints(pattern=_RESULT)]
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


def check_tied(body: Tied, signing: ResultSigning, roster: Roster, gone: Collection[str], verify: Verify) -> None:
    """Raises Violation unless the part's replicas that are not ``gone`` were tied in two attempts."""
    part, replicas = PartName(body.part), roster.replicas(PartName(body.part))
    if part == ENDS:
        raise Violation(f"nobody takes {part} over from a copy")
    attempts = [{(one.attempt, one.what, one.asked) for one in said} for said in (body.first, body.second)]
    if any(len(each) != 1 for each in attempts) or body.first[0].attempt == body.second[0].attempt:
        raise Violation(f"two ties of {part} are of one attempt each, and not of the same")
    for said in (body.first, body.second):
        digests = {PeerId(one.peer): one.digest for one in said}
        if len(digests) != len(said) or not set(digests) <= set(replicas) <= {*digests, *gone}:
            raise Violation(f"a tie of {part} is between all its replicas that are there")
        if Disagreement("", part, digests).dissenters or all(alike(said[0].digest, one.digest) for one in said):
            raise Violation(f"the replicas of {part} were not tied")
        for one in said:
            signed = signing.data(part, one.attempt, one.what, one.asked, one.digest)
            if not verify(PeerId(one.peer), signed, one.signature):
                raise Violation(f"the result of {one.peer} is forged")


@dataclass(slots=True)
class TieEvidence:
    """What the leader of one term was answered in ties, part by part."""

    signing: ResultSigning
    verify: Verify
    _seen: dict[PartName, tuple[Statement, ...]] = field(default_factory=dict)

    def unsigned(self, found: Disagreement, asked: Asked, signed: Mapping[PeerId, bytes]) -> list[PeerId]:
        """Return those of a tie that did not sign what they answered: of them nothing can be proven."""
        said = {peer: (digest, signed.get(peer, b"")) for peer, digest in found.digests.items()}
        return asked.unsigned(self.signing, found.what, found.part, said, self.verify)

    def second(self, term: int, found: Disagreement, asked: Asked, signed: Mapping[PeerId, bytes]) -> Tied | None:
        """Keep a tie in which all have signed; returns what proves the second one of the part, None after the first."""
        attempt, inputs = asked.attempts[found.part], asked.inputs(found.what)
        said = tuple(
            Statement(peer=peer, attempt=attempt, what=found.what, asked=inputs, digest=digest, signature=signed[peer])
            for peer, digest in sorted(found.digests.items())
        )
        before = self._seen.get(found.part)
        if before is None or before[0].attempt == attempt:
            self._seen[found.part] = said
            return None
        return Tied(step=self.signing.step, term=term, part=found.part, first=before, second=said)
