"""Push-sum over a network that loses, repeats and reorders, between nodes that die: mass is conserved to the bit, and a
death takes only what the dead one had."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.averaging.gossip.mass import Message, Parcel, ParcelTaken, PushSumNode, PushSumState
from swarm.ids import PeerId

PEERS = [PeerId(name) for name in "abcd"]
MAX_PUSHES = 40
"""Values are whole numbers below 16 and every push adds a binary digit, so float64 is exact throughout."""
which = st.integers(0, 10**6)
Key = tuple[PeerId, PeerId, int]


class MassMachine(RuleBasedStateMachine):
    """Anything may happen in any order. The model knows all masses, who owns each parcel, and what deaths took."""

    @initialize(values=st.lists(st.integers(-15, 15), min_size=4, max_size=4))
    def begin(self, values: list[int]) -> None:
        self.nodes = {
            peer: PushSumNode(PushSumState(torch.tensor([value, 1], dtype=torch.float64), 1.0), most_weight=4.0)
            for peer, value in zip(PEERS, values, strict=True)
        }
        self.live = set(PEERS)
        self.network: list[tuple[PeerId, PeerId, Message]] = []
        self.parcels: dict[Key, PushSumState] = {}
        self.there = self.owned()
        self.lost = torch.zeros(3, dtype=torch.float64)

    # --- the account ----------------------------------------------------------------------------------------------

    def under_way(self) -> tuple[set[Key], set[Key]]:
        """Parcels that live senders have not heard to be taken, and those that live receivers have put aside."""
        sent, aside = set[Key](), set[Key]()
        for peer in self.live:
            sent |= {(peer, other, parcel.number) for other, parcel in self.nodes[peer]._sent.items()}
            aside |= {(other, peer, parcel.number) for other, parcel in self.nodes[peer]._aside.items()}
        return sent, aside

    def owned(self) -> torch.Tensor:
        """Σ (sum, weight) of live nodes and of parcels that a live one owns, each counted once."""
        sent, aside = self.under_way()
        masses = [self.nodes[peer].held for peer in self.live] + [self.parcels[key] for key in sent | aside]
        return sum((row(mass) for mass in masses), torch.zeros(3, dtype=torch.float64))

    @invariant()
    def mass_is_conserved(self) -> None:
        assert torch.equal(self.owned() + self.lost, self.there)
        assert all(self.nodes[peer].held.weight > 0 for peer in self.live)

    # --- what nodes do --------------------------------------------------------------------------------------------

    def node(self, pick: int) -> PeerId:
        return sorted(self.live)[pick % len(self.live)]

    @precondition(lambda self: len(self.parcels) < MAX_PUSHES)
    @rule(pick=which, to=st.sampled_from(PEERS))
    def push(self, pick: int, to: PeerId) -> None:
        sender = self.node(pick)
        parcel = self.nodes[sender].push(to) if to != sender else None
        if parcel is not None:
            self.parcels[sender, to, parcel.number] = parcel.mass
            self.network.append((sender, to, parcel))

    @rule(pick=which)
    def send_again(self, pick: int) -> None:
        sender = self.node(pick)
        self.network += self.unanswered(sender)

    def unanswered(self, peer: PeerId) -> list[tuple[PeerId, PeerId, Message]]:
        """What a node says again: parcels without an answer, and that it took what it has put aside."""
        node = self.nodes[peer]
        again: list[tuple[PeerId, PeerId, Message]] = [(peer, to, parcel) for to, parcel in node._sent.items()]
        return again + [(peer, to, ParcelTaken(parcel.number)) for to, parcel in node._aside.items()]

    # --- what the network does ------------------------------------------------------------------------------------

    @precondition(lambda self: self.network)
    @rule(pick=which, repeat=st.booleans())
    def deliver(self, pick: int, repeat: bool) -> None:
        at = pick % len(self.network)
        self.arrive(*(self.network[at] if repeat else self.network.pop(at)))

    @precondition(lambda self: self.network)
    @rule(pick=which)
    def lose(self, pick: int) -> None:
        self.network.pop(pick % len(self.network))

    def arrive(self, source: PeerId, target: PeerId, message: Message) -> None:
        if target not in self.live:
            return
        node, sent_and_aside = self.nodes[target], self.under_way()
        if isinstance(message, Parcel):
            answer: Message | None = node.take(source, message)
        elif isinstance(message, ParcelTaken):
            answer = node.taken(source, message)
        else:
            answer = node.yielded(source, message)
        if answer is not None:
            self.network.append((target, source, answer))
        if source not in self.live:
            self.account_for_the_dead(source, target, message, sent_and_aside)

    def account_for_the_dead(
        self, dead: PeerId, live: PeerId, message: Message, before: tuple[set[Key], set[Key]]
    ) -> None:
        """What still comes from the dead may save a parcel of it, or leave it one that it had put aside."""
        sent, aside = self.under_way()
        for key in aside - before[1]:
            assert key == (dead, live, message.number)
            self.lost -= row(self.parcels[key])
        for key in before[0] - sent:
            assert key == (live, dead, message.number)
            self.lost += row(self.parcels[key])

    # --- deaths ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) > 1)
    @rule(pick=which)
    def die(self, pick: int) -> None:
        dead = self.node(pick)
        sent, aside = self.under_way()
        own = [key for key in sent if key[0] == dead and key not in aside]
        yielded_to_it = [key for key in aside if key[1] == dead and key not in sent]
        gone = [self.nodes[dead].held, *(self.parcels[key] for key in own + yielded_to_it)]
        self.live.discard(dead)
        self.lost += sum((row(mass) for mass in gone), torch.zeros(3, dtype=torch.float64))

    # --- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once the network carries everything, nothing is under way any more between those who live."""
        if not hasattr(self, "nodes"):
            return
        self.network = [message for message in self.network if {message[0], message[1]} <= self.live]
        self.mass_is_conserved()
        for peer in sorted(self.live):
            self.network += self.unanswered(peer)
        while self.network:
            self.arrive(*self.network.pop(0))
        assert not [key for keys in self.under_way() for key in keys if {key[0], key[1]} <= self.live]
        self.mass_is_conserved()


def row(mass: PushSumState) -> torch.Tensor:
    """(sum, weight) as one vector."""
    return torch.cat((mass.sum, torch.tensor([mass.weight], dtype=torch.float64)))


TestMass = MassMachine.TestCase
TestMass.settings = settings(max_examples=80, stateful_step_count=60, deadline=None, derandomize=True)
