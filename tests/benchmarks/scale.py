"""What every peer of many pays for: a record's bytes, what is found from each record, and the messages of a death.

The record, the roster, the duties of copies and the ring are the product's own at every size, with four microbatches a
peer in a step and one peer in eight a trainer; so are the watches, in virtual time, up to the sizes of ``DEATHS``:
beyond, messages are what its rule says, three watchers that tell each of the others. Times are medians.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from swarm.consensus.records import CloseRecord
    from swarm.consensus.roster import Roster

KEYS = (
    "bytes_per_microbatch", "bytes_per_microbatch_bar", "duties_ms_1024", "duties_ms_1024_bar",
    "messages_per_death", "messages_per_death_bar", "record_over_limit_1024",
)  # fmt: skip
COLUMNS = (
    "peers", "stages", "record_mb", "record_over_limit", "microbatch_bytes", "hash_ms", "hash_again_ms",
    "duties_first_ms", "duties_next_ms", "duties_again_ms", "watched_ms", "messages_per_death", "messages_over_n",
)  # fmt: skip
STAGES = {64: 5, 256: 21, 1_024: 32, 10_000: 32}
SIZES = {Size.SMOKE: (64, 1_024), Size.DEFAULT: (64, 256, 1_024, 10_000), Size.FULL: (64, 256, 1_024, 10_000)}
DEATHS = {Size.SMOKE: 64, Size.DEFAULT: 256, Size.FULL: 1_024}
ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 5, Size.FULL: 9}
MICROBATCHES_A_PEER, TRAINERS, COPIES = 4, 8, 2
BYTES_BAR, DUTIES_BAR_MS, MESSAGES_BAR = 100, 10.0, 4
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def run(size: Size) -> Result:
    """Bytes a microbatch in a record, milliseconds of what each record asks of a peer, messages a death, by peers."""
    from swarm.network.protocols import MAX_BODY_BYTES

    rows: list[list[Cell]] = []
    found: dict[int, dict[str, float]] = {}
    for peers in SIZES[size]:
        found[peers] = one = _measured(peers, STAGES[peers], ROUNDS[size], simulated=peers <= DEATHS[size])
        over = one["record_bytes"] / MAX_BODY_BYTES
        rows.append(
            [
                peers,
                STAGES[peers],
                round(one["record_bytes"] / 1e6, 3),
                round(over, 3),
                round(one["microbatch"], 1),
                *(round(one[name], 3) for name in ("hash", "hash_again", "first", "next", "again", "watched")),
                int(one["messages"]),
                round(one["messages"] / peers, 2),
            ]  # fmt: skip
        )
    at = found[1_024]
    simulated = max(peers for peers in SIZES[size] if peers <= DEATHS[size])
    return Result(
        columns=COLUMNS,
        rows=rows,
        summary={
            "bytes_per_microbatch": at["microbatch"],
            "bytes_per_microbatch_bar": BYTES_BAR,
            "duties_ms_1024": at["next"],
            "duties_ms_1024_bar": DUTIES_BAR_MS,
            "messages_per_death": found[simulated]["messages"],
            "messages_per_death_bar": MESSAGES_BAR * simulated,
            "record_over_limit_1024": at["record_bytes"] / MAX_BODY_BYTES,
        },
        notes=(
            f"{MICROBATCHES_A_PEER} microbatches a peer and step, one in {TRAINERS} a trainer, {COPIES} copies a part",
            "record_over_limit: the record as it is sent ÷ the 4 MiB that a message may have",
            "duties: of the first record, of the next, in which another peer has come for one, and of the same again",
            f"messages of a death: to {DEATHS[size]} peers by the product's watches in virtual time, then by rule",
        ),
    )


def _measured(peers: int, stages: int, rounds: int, *, simulated: bool) -> dict[str, float]:
    import msgpack

    from swarm.consensus.copies import copy_duties
    from swarm.health.verdicts import WATCHED_PEERS, watched

    rng = random.Random(peers)
    roster = _roster(peers, stages, rng)
    record = _record(roster, stages, rng)
    whole = len(msgpack.packb(record.to_wire()))
    without = len(msgpack.packb(record.model_copy(update={"committed": ()}).to_wire()))
    times: dict[str, list[float]] = {name: [] for name in ("hash", "hash_again", "next", "again", "watched")}
    first = _ms(lambda: copy_duties(roster, COPIES))
    for _ in range(rounds):
        one = record.model_copy()
        times["hash"].append(_ms(one.hash))
        times["hash_again"].append(_ms(one.hash))
        following = _changed(roster, rng)
        times["next"].append(_ms(lambda now=following: copy_duties(now, COPIES)))
        times["again"].append(_ms(lambda now=following: copy_duties(now, COPIES)))
        watched(following.peers[0], following.peers)
        times["watched"].append(_ms(lambda now=following: watched(now.peers[0], now.peers)))
    return {
        "record_bytes": whole,
        "microbatch": (whole - without) / len(record.committed),
        "first": first,
        "messages": _deaths(peers) if simulated else WATCHED_PEERS * (peers - 2),
        **{name: statistics.median(took) for name, took in times.items()},
    }


def _ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def _peer_id(rng: random.Random) -> str:
    return "12D3KooW" + "".join(rng.choices(ALPHABET, k=44))


def _roster(peers: int, stages: int, rng: random.Random) -> Roster:
    from swarm.consensus.roster import Member, Roster

    def member(number: int) -> Member:
        trains = number % TRAINERS == 0
        return Member(
            peer=_peer_id(rng),
            role="trainer" if trains else "stage",
            name=f"peer-{number}",
            part="ends" if trains else f"stage-{(number - number // TRAINERS - 1) % stages}",
            addresses=(f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/31330",),
            incarnation=rng.getrandbits(62),
        )

    return Roster(member(number) for number in range(peers))


def _changed(roster: Roster, rng: random.Random) -> Roster:
    """The roster after a record in which one peer has gone, and another come in its place."""
    from swarm.consensus.roster import Roster

    gone = rng.randrange(len(roster))
    new = roster.members[gone].model_copy(update={"peer": _peer_id(rng)})
    return Roster([*roster.members[:gone], new, *roster.members[gone + 1 :]])


def _record(roster: Roster, stages: int, rng: random.Random) -> CloseRecord:
    from swarm.consensus.records import CloseRecord, Contribution
    from swarm.ids import MicrobatchId

    replicas, trainers = roster.stages(), roster.trainers
    each = MICROBATCHES_A_PEER * len(roster) // len(trainers)
    shards = {trainer: hashlib.sha256(trainer.encode()).hexdigest()[:16] for trainer in trainers}
    committed = tuple(
        Contribution(
            microbatch=MicrobatchId(trainer, shards[trainer], 0, 1_000 + position),
            tokens=2_048,
            loss_sum=rng.uniform(4e3, 2e4),
            route=tuple(rng.choice(replicas[stage]) for stage in range(stages)),
        )
        for trainer in sorted(trainers)
        for position in range(each)
    )
    return CloseRecord(
        run="ab" * 32,
        step=100,
        committed=committed,
        tokens=sum(one.tokens for one in committed),
        loss_sum=sum(one.loss_sum for one in committed),
        grad_norm=1.5,
        clip=0.8,
        lr=3e-4,
        digests={str(part): hashlib.sha256(part.encode()).hexdigest() for part in roster.parts},
        cursors={trainer: (0, 1_000 + each) for trainer in trainers},
        roster=roster.members,
        previous="cd" * 32,
    )


def _deaths(peers: int) -> int:
    """The messages of watches when one of so many peers dies, until all know. Raises AssertionError if not all do."""
    from swarm.health.heartbeat import LOST
    from swarm.health.watch import HealthWatch
    from swarm.ids import PeerId, RunId
    from swarm.sim.network import SimNetwork
    from tests.harness.rigs.clocks import LoopClock, in_virtual_time

    names = tuple(PeerId(f"p{number}") for number in range(peers))
    told = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        async def counting(peer: PeerId, rpc: Any, *args: Any, **more: Any) -> Any:
            nonlocal told
            told += rpc is LOST
            return await call(peer, rpc, *args, **more)

        return counting

    async def story() -> None:
        network, watches = SimNetwork(LoopClock()), dict[PeerId, HealthWatch]()
        for name in names:
            endpoint = network.endpoint(name)
            await endpoint.enter(RunId("ab" * 32))
            watches[name] = watch = HealthWatch(endpoint, LoopClock(), incarnation=1)
            endpoint.mount(watch)
            watch.follow(names)
            endpoint.call = counted(endpoint.call)  # type: ignore[method-assign]
        running = {name: asyncio.create_task(watch.run()) for name, watch in watches.items()}
        await asyncio.sleep(2.0)
        victim = names[0]
        network.kill(victim)
        running.pop(victim).cancel()
        await asyncio.sleep(10.0)
        assert all(set(watches[name].gone) == {victim} for name in running)
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)

    in_virtual_time(story())
    return told
