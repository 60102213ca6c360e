"""Go back to a checkpoint when the newest state of a part is lost: find one that is whole at the peers that are there,
tell whether it is the run's, and have this peer's part as it was then.

The leader proposes the record (:mod:`swarm.step.leader.rescue`), the members judge it
(:meth:`~swarm.step.member.acceptance.AcceptanceRules.check_back`), and with it every member begins a chain anew
(:mod:`swarm.membership.membership`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from swarm.consensus.majority import majority
from swarm.consensus.proof import Proof
from swarm.consensus.records import MAX_VOTERS, CloseRecord, Decision, check_confirmed, valid_acceptances
from swarm.consensus.roster import Roster
from swarm.errors import PeerError, Refused, StateError
from swarm.ids import PartName, PeerId
from swarm.membership.download import PartDownload
from swarm.membership.part_memory import check_memory
from swarm.membership.parts import build_empty
from swarm.membership.run import RunContext
from swarm.optim.part import TrainedPart
from swarm.security.signing import verify
from swarm.state.checkpoints.donors import DirectoryDonor, Donor, Offer, PeerDonor, lacking, plans
from swarm.state.checkpoints.files import decode_manifest, held, part_path, read_manifest, steps
from swarm.state.checkpoints.parts import load_part
from swarm.state.checkpoints.proof import proof_in
from swarm.state.snapshot import Snapshot
from swarm.step.observe_messages import BACK, BackRequest
from swarm.waiting import ExponentialBackoff, ended

ASK_S, LOOK_BACK_S = 10.0, 3.0
"""How long a peer may take to say which checkpoints it has, or to give a record; and whether the run went back."""
TRY_S = 60.0
"""How long others are asked for a part of the checkpoint: then it is not to be had, and the run may go back further."""

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run: on this machine's disk and at other peers."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._around = run, run.around

    # --- where to ------------------------------------------------------------------------------------------------

    async def newest(self, peers: Sequence[PeerId]) -> Proof | str:
        """Return the newest record of which these peers have every part, with its proof; else what they lack. Whether
        it is the run's, others judge. Cost: a list from each of them."""
        head, cuts = self._run.history.head, self._around.manifest.cuts
        last = head.step - 1 if head.repeats else head.step  # that one was not to be had after all
        donors = [donor for peer in peers if (donor := self._donor(peer)) is not None]
        offers = [offer for found in await asyncio.gather(*map(_offers, donors)) for offer in found]
        for plan in plans(offers, (), cuts, last_step=last, believed=donors):
            for donor in plan.attested:
                proof = await self._proof(donor, plan.step)
                if proof is not None and proof.record.digests == plan.digests:
                    return proof
        held = [offer for offer in offers if offer.step <= last and set(offer.digests) in map(set, cuts)]
        return _lack(lacking(held, (), cuts), head.members, peers)

    async def knows(self, step: int, record: str) -> bool:
        """Return whether the record of a step, by its hash, was decided here, or lies with a checkpoint here."""
        if self._run.seen.get(step) == record:
            return True
        root = self._run.keeper.root
        if root is None:
            return False
        try:
            manifest = await asyncio.to_thread(read_manifest, root, step)
            return proof_in(manifest, self._run.rules.run).record.hash() == record
        except (StateError, OSError):
            return False

    def _donor(self, peer: PeerId) -> Donor | None:
        if peer != self._around.endpoint.peer:
            return PeerDonor(self._around.endpoint, peer, timeout_s=ASK_S)
        return None if self._run.keeper.root is None else DirectoryDonor(self._run.keeper.root)

    async def _proof(self, donor: Donor, step: int) -> Proof | None:
        """Return what proves the record that the donor has of a step; None for what proves nothing."""
        try:
            manifest = decode_manifest(await donor.record(step), f"the record of step {step} from {donor}")
            proof = proof_in(manifest, self._run.rules.run)
            return proof if proof.standing() == "decided" else None
        except (PeerError, StateError) as error:
            logger.info("no checkpoint of step %d from %s: %s", step, donor, error)
            return None

    # --- with what -----------------------------------------------------------------------------------------------

    async def part(self, name: PartName, record: CloseRecord) -> TrainedPart | None:
        """Return the part with the state that the record goes back to: from this disk, else from any peer that has it.
        Waits, and says so, for TRY_S; None where nobody gives it. Raises ConfigError and StateError as the part is
        made."""
        await asyncio.to_thread(check_memory, self._around, name)
        part = await build_empty(self._around, name, record.members.peers)
        if (snapshot := await asyncio.to_thread(self._on_disk, name, record)) is not None:
            await self._around.device.run(part.install, snapshot)
            return part
        others = [peer for peer in record.members.peers if peer != self._around.endpoint.peer]
        download = PartDownload(self._around, record, part, partial(PeerDonor, self._around.endpoint, timeout_s=ASK_S))
        patience, clock = ExponentialBackoff(1.0), self._around.clock
        came, until = 0, clock.monotonic() + TRY_S
        while clock.monotonic() < until:
            try:
                await download.run(others)
                return part
            except (PeerError, StateError) as error:
                if download.verified_bytes > came:
                    came, until = download.verified_bytes, clock.monotonic() + TRY_S
                awaited = f"{name} of the checkpoint of step {record.step}, which nobody gives: {error}"
                self._run.situation.wait_for(awaited)
                await clock.sleep(patience.pause_s())
        return None

    def latest(self, name: PartName, step: int) -> Snapshot | None:
        """Return the newest state of a part that is whole on this disk, of a step up to this one. Blocking."""
        root = self._run.keeper.root
        for at in reversed(() if root is None else steps(root)):
            there = held(root, at) if root is not None and at <= step else None
            if root is None or there is None or there.record is None or name not in there.parts:
                continue
            try:
                return load_part(root, at, name, expected_digest=there.record.parts[name])
            except (StateError, OSError) as error:
                logger.warning("%s of step %d is of no use: %s", name, at, error)
        return None

    def _on_disk(self, name: PartName, record: CloseRecord) -> Snapshot | None:
        root = self._run.keeper.root
        if root is None or name not in held(root, record.step).parts:
            return None
        try:
            return load_part(root, record.step, name, expected_digest=record.digests[name])
        except (StateError, OSError) as error:
            logger.warning("%s of step %d is fetched from others: %s", name, record.step, error)
            with contextlib.suppress(OSError):  # nobody is told any more that it is here
                path = part_path(root, record.step, name)
                path.rename(path.with_suffix(".damaged"))
            return None


def _lack(known: Sequence[tuple[int, Sequence[PartName]]], roster: Roster, here: Sequence[PeerId]) -> str:
    """Return what these peers lack of the newest checkpoint that they know, in words, and who held it last. Pure."""
    if not known or not known[0][1]:
        return "the peers that are here lack a part of each checkpoint: start who held it"
    step, parts = known[0]
    gone = [peer for part in parts for peer in roster.replicas(part) if peer not in here]
    names = ", ".join(dict.fromkeys(roster[peer].name or peer for peer in gone))
    held = f"; {names} held it last" if names else ""
    return (
        f"the peers that are here lack {' and '.join(parts)} of the newest checkpoint they know, of step {step}{held}"
    )


async def _offers(donor: Donor) -> list[Offer[Donor]]:
    try:
        return await donor.offers()
    except PeerError as error:
        logger.info("%s does not say which checkpoints it has: %s", donor, error)
        return []


async def went_back(run: RunContext, known: CloseRecord, peers: Sequence[PeerId]) -> Decision | None:
    """Ask these peers whether the run went back to a checkpoint after ``known``, a record of our own chain; returns the
    decision with which it did, once it is proven by those who took part then; None where nobody shows one, and where
    the manifest says that it never does."""
    if run.rules.rewind == "never":
        return None
    body = BackRequest(previous=known.hash(), returns=known.returns)

    async def ask(peer: PeerId) -> Decision | None:
        try:
            said, _ = await run.around.endpoint.call(peer, BACK, body, timeout_s=LOOK_BACK_S)
        except PeerError as error:
            logger.debug("%s does not show that the run went back: %s", peer, error)
            return None
        return said.decision() if _follows(said.decision(), known) else None

    asking = [asyncio.create_task(ask(peer)) for peer in peers]
    try:
        for done in asyncio.as_completed(asking):
            if (found := await done) is not None:
                return found
    finally:
        await ended(asking)
    return None


def _follows(decision: Decision, known: CloseRecord) -> bool:
    """Return whether those that took part after ``known`` decided that the run goes back, from there or from a later
    step of which this peer did not hear. Pure."""
    record = decision.record
    if not record.repeats or not record.void or record.provisional or record.run != known.run:
        return False
    if record.returns <= known.returns:
        return False
    if record.previous == known.hash():
        try:
            check_confirmed(record, known.members, decision.acceptances, verify, decision.term)
        except Refused:
            return False
        return True
    electors = known.members.entitled
    signed = valid_acceptances(record, electors, decision.acceptances, verify, decision.term)
    return len(electors) <= MAX_VOTERS and len(signed) >= majority(len(electors))
