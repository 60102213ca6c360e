"""The directory of a run that once trained, with checkpoints whose records are really signed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.checkpoints.proof import Proof
from peers.checkpoints.writer import keep_run
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest, parse_manifest
from swarm.consensus.records import CloseRecord, Contribution, Decision, acceptance_bytes
from swarm.consensus.roster import Member, Roster
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId, stage_part
from swarm.membership.founding_record import genesis
from swarm.models.registry import family_of
from swarm.security.signing import PrivateIdentity
from swarm.state.checkpoints.parts import write_manifest, write_part
from swarm.state.snapshot import Snapshot, digest

PARTS = (ENDS, stage_part(0), stage_part(1))
TEXT = "Some words, and some more words that make a tokenizer. " * 30


@dataclass(slots=True)
class KeptRun:
    """A run of 100 steps, its peers' keys, and what was decided so far."""

    manifest: Manifest
    tokenizer: bytes
    keys: Sequence[PrivateIdentity]
    decisions: list[Decision] = field(default_factory=list)

    @property
    def roster(self) -> Roster:
        """Who takes part: two stage hosts and a trainer."""
        parts = dict(zip(self.keys, (stage_part(0), stage_part(1), ENDS), strict=True))
        return Roster(
            Member(
                peer=key.peer, role="trainer" if part == ENDS else "stage", name=f"peer-{part}", part=part, addresses=()
            )
            for key, part in parts.items()
        )

    def states(self, step: int, seed: int = 0) -> dict[PartName, Snapshot]:
        """Every part after a step: some numbers."""
        model, found = self.manifest.model, {}
        weights = family_of(model).initial_weights(seed=seed or step)
        for spec in family_of(model).parts(self.manifest.split):
            layout = family_of(model).layout(family_of(model).build(spec))
            params = layout.flatten(weights)
            found[spec.name] = Snapshot(
                part=spec.name, step=step, layout=layout, params=params, exp_avg=params * 0.5, exp_avg_sq=params * 0.25
            )
        return found

    def decide(self, step: int, *, term: int = 0, seed: int = 0, ended: bool = False) -> Decision:
        """A step that follows the newest decision, accepted by everybody; step 0 is the genesis."""
        digests = {part: digest(state) for part, state in self.states(step, seed).items()}
        record = genesis(self.manifest.run_id, self.roster, digests)
        if step:
            trainer = self.keys[2].peer
            microbatch = MicrobatchId(PeerId(trainer), "0" * 16, 0, step)
            route = (self.keys[0].peer, self.keys[1].peer)
            changes = {
                "step": step,
                "committed": (Contribution(microbatch=microbatch, tokens=8, loss_sum=1.25, route=route),),
                "tokens": 8,
                "loss_sum": 1.25,
                "cursors": {trainer: (0, step + 1)},
                "previous": self.decisions[-1].record.hash(),
                "ended": ended,
            }
            record = record.model_copy(update=changes)
        self.decisions.append(self.signed(record, term))
        return self.decisions[-1]

    def signed(self, record: CloseRecord, term: int = 0) -> Decision:
        """A record with everybody's acceptance."""
        data = acceptance_bytes(record, term)
        return Decision(record, {key.peer: key.sign(data) for key in self.keys}, term=term)

    def keep(self, root: Path, step: int, parts: Collection[PartName] = PARTS, *, seed: int = 0) -> RunDirectory:
        """Write these parts of a step, with its record and what proves it, below ``root``."""
        directory = RunDirectory(root)
        keep_run(directory, self.manifest, self.tokenizer)
        if not self.decisions:
            self.decide(0)
        known = next((one for one in self.decisions if one.record.step == step), None)
        if known is None or seed:
            if step > self.decisions[-1].record.step + 1:
                self.decide(step - 1)
            known = self.decide(step, seed=seed)
        before = next((one.record for one in self.decisions if one.record.hash() == known.record.previous), None)
        write_manifest(directory.checkpoints, Proof.of(known, before).manifest())
        for part, state in self.states(step, seed).items():
            if part in parts:
                write_part(directory.checkpoints, state, {"run": self.manifest.run_id})
        return directory


def kept_run(*, name: str = "kept", nonce: str = "00000000deadbeef") -> KeptRun:
    """A run of which nothing is kept yet."""
    tokenizer = train_tokenizer([TEXT], 300)
    manifest = parse_manifest(
        {
            "run": {"name": name, "nonce": nonce, "steps": 100, "start_when": {"stage_hosts": 2, "trainers": 1}},
            "model": {"vocab_size": 300, "dim": 32, "layers": 2, "heads": 2, "context": 16},
            "split": {"stages": 2},
            "tokenizer": {"digest": tokenizer_digest(tokenizer)},
            "batch": {"microbatch_size": 2, "microbatches_per_step": 6},
        },
        "the test",
    )
    keys = [PrivateIdentity(bytes([number]) * 32) for number in (1, 2, 3)]
    return KeptRun(manifest, tokenizer, keys)
