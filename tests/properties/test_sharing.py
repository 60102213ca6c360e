"""Sharing a download among donors that come, go, stall and differ in speed: every chunk comes, none is forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.ids import PeerId
from swarm.state.sharing import CEILING_S, FLOOR_S, MAX_WINDOW, Sharing

DONORS = [PeerId(name) for name in "abcd"]
CHUNKS = 40


class SharingMachine(RuleBasedStateMachine):
    """Anything may happen in any order; the model is who has what under way."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing, self.now = Sharing[PeerId](CHUNKS), 0.0
        self.under_way: dict[PeerId, set[int]] = {}
        self.here: set[int] = set()

    @rule(donor=st.sampled_from(DONORS))
    def join(self, donor: PeerId) -> None:
        if donor not in self.under_way:
            self.sharing.joined(donor)
            self.under_way[donor] = set()

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        donor = data.draw(st.sampled_from(sorted(self.under_way)))
        self.sharing.left(donor)
        del self.under_way[donor]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        donor = data.draw(st.sampled_from(sorted(self.under_way)))
        while (chunk := self.sharing.next(donor, self.now)) is not None:
            assert chunk not in self.here, "it is here already"
            assert chunk not in self.under_way[donor], "it is under way there already"
            elsewhere = [other for other, chunks in self.under_way.items() if chunk in chunks]
            assert len(elsewhere) <= 1
            if elsewhere:
                assert set(range(CHUNKS)) - self.here == set().union(*self.under_way.values()), "there was a fresh one"
            self.under_way[donor].add(chunk)
        assert len(self.under_way[donor]) <= MAX_WINDOW

    @precondition(lambda self: any(self.under_way.values()))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        donor = data.draw(st.sampled_from(sorted(d for d, chunks in self.under_way.items() if chunks)))
        chunk = data.draw(st.sampled_from(sorted(self.under_way[donor])))
        assert self.sharing.arrived(donor, chunk, self.now) == (chunk not in self.here)
        self.here.add(chunk)
        for other, chunks in self.under_way.items():
            if chunk in chunks:
                chunks.discard(chunk)
                self.sharing.called_off(other, chunk)

    @rule(chunks=st.sets(st.integers(0, CHUNKS - 1), max_size=5))
    def find(self, chunks: set[int]) -> None:
        """Only what nobody brings can be found here."""
        found = chunks - set().union(*self.under_way.values())
        self.sharing.found(found)
        self.here |= found

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def complete_when_all_is_here(self) -> None:
        assert self.sharing.complete == (len(self.here) == CHUNKS)

    @invariant()
    def deadlines_are_within_bounds(self) -> None:
        for donor in self.under_way:
            assert FLOOR_S <= self.sharing.deadline_s(donor) <= CEILING_S
        again_s = self.sharing.look_again_s(self.now)
        assert again_s is None or again_s >= 0.0

    def teardown(self) -> None:
        """Whatever happened, one new donor can finish it alone."""
        for donor in list(self.under_way):
            self.sharing.left(donor)
        last = PeerId("last")
        self.sharing.joined(last)
        while not self.sharing.complete:
            chunk = self.sharing.next(last, self.now)
            assert chunk is not None, "a chunk was forgotten"
            assert self.sharing.arrived(last, chunk, self.now)


SharingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_sharing_forgets_nothing_whatever_happens = SharingMachine.TestCase


@settings(max_examples=40, deadline=None)
@given(
    speeds=st.lists(st.floats(0.02, 3.0), min_size=1, max_size=4),
    deaths=st.lists(st.integers(0, 3 * CHUNKS), max_size=3, unique=True),
)
def test_download_never_takes_much_longer_than_the_best_donor_alone(speeds: list[float], deaths: list[int]) -> None:
    """Each donor brings one chunk after the other, ``speeds`` seconds each; some die after so many arrivals, but not
    the fastest. The time is at most the fastest one's own, and a little for what was lost."""
    sharing, now, arrivals = Sharing[PeerId](CHUNKS), 0.0, 0
    donors = {PeerId(f"d{index}"): seconds for index, seconds in enumerate(speeds)}
    best = min(donors, key=lambda donor: donors[donor])
    queues: dict[PeerId, list[tuple[float, int]]] = {donor: [] for donor in donors}
    for donor in donors:
        sharing.joined(donor)
    while not sharing.complete:
        for donor, seconds in donors.items():
            while (chunk := sharing.next(donor, now)) is not None:
                free = max([now, *(due for due, _ in queues[donor])])
                queues[donor].append((free + seconds, chunk))
        again_s = sharing.look_again_s(now)
        due, donor, chunk = min((due, donor, chunk) for donor, queue in queues.items() for due, chunk in queue)
        if again_s is not None and now + again_s < due:
            now += max(again_s, 1e-6)
            continue
        now, arrivals = due, arrivals + 1
        sharing.arrived(donor, chunk, now)
        for other, queue in queues.items():
            queues[other] = [entry for entry in queue if entry[1] != chunk]
            sharing.called_off(other, chunk)
        if arrivals in deaths and len(donors) > 1:
            dead = max(donors, key=lambda donor: donors[donor])
            if dead != best:
                sharing.left(dead)
                del donors[dead], queues[dead]
    assert now <= CHUNKS * donors[best] + 3 * MAX_WINDOW * donors[best]
