"""Push-sum over a network that loses, repeats and reorders, between nodes that die: mass is conserved to the bit, and a
death takes only what the dead one had."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.averaging.mass import Mass, MassNode, Message, Parcel, Taken
from swarm.ids import PeerId

PEERS = [PeerId(name) for name in "abcd"]
MOST_PUSHES = 40
"""Values are whole numbers below 16 and every push adds a binary digit, so float64 is exact throughout."""
which = st.integers(0, 10**6)
Key = tuple[PeerId, PeerId, int]


class MassMachine(RuleBasedStateMachine):
    """Anything may happen in any order. The model knows all masses, who owns each parcel, and what deaths took."""

    @initialize(values=st.lists(st.integers(-15, 15), min_size=4, max_size=4))
    def begin(self, values: list[int]) -> None:
        self.nodes = {
            peer: MassNode(Mass(torch.tensor([value, 1], dtype=torch.float64), 1.0), most_weight=4.0)
            for peer, value in zip(PEERS, values, strict=True)
        }
        self.live = set(PEERS)
        self.told: set[tuple[PeerId, PeerId]] = set()
        self.network: list[tuple[PeerId, PeerId, Message]] = []
        self.parcels: dict[Key, Mass] = {}
        self.there = self.owned()
        self.lost = torch.zeros(3, dtype=torch.float64)

    # --- the account ----------------------------------------------------------------------------------------------

    def under_way(self) -> tuple[set[Key], set[Key]]:
        """Parcels that live senders have not heard to be taken, and those that live receivers have put aside."""
        sent, aside = set(), set()
        for peer in self.live:
            for other, message in self.nodes[peer].unanswered():
                if isinstance(message, Taken):
                    aside.add((other, peer, message.number))
                else:
                    sent.add((peer, other, message.number))
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

    @precondition(lambda self: len(self.parcels) < MOST_PUSHES)
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
        self.network += [(sender, other, message) for other, message in self.nodes[sender].unanswered()]

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
        elif isinstance(message, Taken):
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
        """Who has not heard of a death yet may save a parcel of the dead, or leave it one that it had put aside."""
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

    @rule(pick=which, dead=st.sampled_from(PEERS))
    def hear_of_a_death(self, pick: int, dead: PeerId) -> None:
        peer = self.node(pick)
        if dead not in self.live and (peer, dead) not in self.told:
            self.told.add((peer, dead))
            self.nodes[peer].lost(dead)

    # --- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once everybody has heard of all deaths and the network carries everything, nothing is under way any more."""
        if not hasattr(self, "nodes"):
            return
        for dead in sorted(set(PEERS) - self.live):
            for peer in sorted(self.live):
                if (peer, dead) not in self.told:
                    self.nodes[peer].lost(dead)
        self.network = [message for message in self.network if {message[0], message[1]} <= self.live]
        self.mass_is_conserved()
        for peer in sorted(self.live):
            self.network += [(peer, other, message) for other, message in self.nodes[peer].unanswered()]
        while self.network:
            self.arrive(*self.network.pop(0))
        assert self.under_way() == (set(), set())
        self.mass_is_conserved()


def row(mass: Mass) -> torch.Tensor:
    """(sum, weight) as one vector."""
    return torch.cat((mass.sum, torch.tensor([mass.weight], dtype=torch.float64)))


TestMass = MassMachine.TestCase
TestMass.settings = settings(max_examples=80, stateful_step_count=60, deadline=None, derandomize=True)
