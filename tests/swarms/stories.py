"""Small runs in virtual time, each with one thing that happens in it: the tests beside this file and golden runs play
them. A story that needs more than a line of checks has them in :mod:`tests.swarms.test_stories`.

Which peer leads, holds or copies depends on peers' ids, which are the same in every run: who is named here as a victim
is one whose death matters at that moment, and what a story ``shows`` says whether it did.

Links have latency and nothing else, so that no moment depends on how many bytes a message has. A seed decides the
first weights and each peer's latency, which is its own: hardly two things ever happen at the same moment, and a task
more or less on the loop changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.golden.names import (
    Links,
    On,
    SimSwarm,
    Strike,
    build_shard,
    documents,
    faults,
    leave,
)

SHAPE: Mapping[str, Any] = {
    "hosts": 4,
    "trainers": 2,
    "max_in_flight": 2,
    "run": {"steps": 3},
    "model": {"layers": 2, "dim": 16, "context": 8},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 4},
    "stage_s": {"forward": 0.05, "forward_loss": 0.05, "backward": 0.1},
}
NAMES = ("bootstrap", "host-0", "host-1", "host-2", "host-3", "trainer-0", "trainer-1", "late")
SLOW_MS = 30.0
LEADER_OF_2 = "trainer-1"
FIRST_OF_EACH = ("bootstrap", "host-0", "host-1", "host-2", "trainer-0")

FOUR_OF_ONE: Mapping[str, Any] = {"split": {"stages": 1}, "trainers": 1}
"""Four replicas of one stage: what groups, and trees, are made of."""
EXACT: Mapping[str, Any] = {"run": {"reproducible": True}}
LOCAL: Mapping[str, Any] = {"averaging": {"mode": "local", "local": {"steps": 2}}, "optimizer": {"warmup_steps": 0}}
MIXED: Mapping[str, Any] = {"averaging": {"local": {"steps": 1, "sync_every": 2}}}
REGIONS = {f"{kind}-{number}": {"region": "ab"[number // 2]} for kind in ("host", "trainer") for number in range(4)}


@dataclass(frozen=True, slots=True)
class Act:
    """What somebody does on purpose at an event, beside the faults."""

    label: str
    on: On
    do: Callable[[SimSwarm], Coroutine[Any, Any, Any] | None]


@dataclass(frozen=True, slots=True)
class Story:
    """A run's shape, section for section on top of :data:`SHAPE`, and what happens in it. A story that does not come
    to ``shows``, as often as it says, has not told what it is for. Its weights after each step are those of
    ``weights_of``, another story, to the bit."""

    shape: Mapping[str, Any] = field(default_factory=dict)
    strikes: tuple[Strike, ...] = ()
    acts: tuple[Act, ...] = ()
    shows: On | None = None
    weights_of: str = ""


def links(seed: int) -> Links:
    """Every peer's own latency."""
    rng = random.Random(seed)
    rules = [{"from": f"{name}*", "to": "*", "latency_ms": round(rng.uniform(2, SLOW_MS), 3)} for name in NAMES]
    return Links.parse({"default": {"latency_ms": SLOW_MS}, "link": rules})


def shape_of(story: Story, seed: int) -> dict[str, Any]:
    """For :class:`SimSwarm`."""
    shape = merged(SHAPE, story.shape)
    return merged(shape, {"run": {"seed": seed}})


def merged(*shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The later decides, key for key."""
    found: dict[str, Any] = {}
    for shape in shapes:
        for key, value in shape.items():
            old = found.get(key)
            found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def steps(count: int, **more: Any) -> dict[str, Any]:
    """A run of so many steps."""
    return {"run": {"steps": count, **more}}


def kill(*names: str, at: On) -> tuple[Strike, ...]:
    """These die there."""
    return (Strike("kill", at, faults.Kill(names)),)


def at_step(step: int, peer: str = "host-0") -> On:
    """When a peer has closed this step."""
    return On("StepClosed", peer=peer, where={"step": step})


def work(peer: str, step: int = 2, nth: int = 1) -> On:
    """In the midst of a step, when a replica has accumulated."""
    return On("Accumulated", peer=peer, where={"step": step}, nth=nth)


def fed(peer: str, step: int = 2, nth: int = 1) -> On:
    """In the midst of a step, when a trainer's microbatch is back."""
    return On("JourneyCompleted", peer=peer, where={"step": step}, nth=nth)


def ready(peer: str, nth: int = 1) -> On:
    """When a peer takes work."""
    return On("PeerReady", peer=peer, nth=nth)


def ready_again(peer: str) -> On:
    """When it does so after it was lost."""
    return ready(peer, 2)


def back(peer: str, steps: int = 1, *, keep_disk: bool = True) -> Strike:
    """So many steps after the death it is started again."""
    after = On("StepClosed", peer="host-0", nth=steps, after="kill")
    return Strike("back", after, faults.Restart(peer, keep_disk=keep_disk))


def cut(*peers: str, others: tuple[str, ...], seconds: float) -> tuple[Strike, ...]:
    """No message passes between the two groups for a while, from the second close on."""
    return (Strike("cut", at_step(2), faults.Partition(peers, others, seconds=seconds)),)


def joins(role: str, number: int = 300, step: int = 2, **settings: Any) -> Act:
    """A peer called "late" joins the run in progress."""

    def join(swarm: SimSwarm) -> Coroutine[Any, Any, Any]:
        more = dict(settings)
        if role == "trainer":
            more["data"] = swarm.root / "late-shard"
            build_shard(more["data"], documents(7), swarm.tokenizer)
        return swarm.join("late", role, number, may_fail=True, **more)

    return Act("late joins", at_step(step), join)


def leaves(peer: str, on: On) -> Act:
    """A member leaves in order."""
    return Act(f"{peer} leaves", on, lambda swarm: leave(swarm.peers[peer]))


def dies(peer: str, on: On) -> Act:
    """As a kill, of a peer that is not there yet."""
    return Act(f"{peer} dies", on, lambda swarm: swarm.kill(peer))


def of_strategy(name: str, *, local: bool = False, shows: On | None = None, **more: Any) -> Story:
    """Four replicas that average with this strategy, or part of them: each that is exact gives the same weights."""
    mode = merged(LOCAL, MIXED, steps(2)) if local else merged(EXACT, steps(2))
    shape = merged(FOUR_OF_ONE, mode, {"averaging": {"strategy": name}}, more)
    return Story(shape, shows=shows, weights_of="" if local or shape == EVERYONE else "everyone")


EVERYONE = merged(FOUR_OF_ONE, EXACT, steps(2), {"averaging": {"strategy": "everyone"}})


def of_schedule(name: str) -> Story:
    """Four replicas whose sums travel so."""
    return of_strategy("everyone", averaging={"schedule": name}, shows=On("RoundDone", where={"schedule": name}))


def void_round(schedule: str) -> Story:
    """One of four dies while sums travel; the next round has three."""
    shape = merged(EVERYONE, steps(3), {"averaging": {"schedule": schedule}})
    return Story(shape, kill("host-2", at=On("asks averaging/1/chunk", peer="host-2", nth=4)), shows=FAILED)


def closing(peer: str, step: int = 2) -> On:
    """When its part's mean of this step is there."""
    return On("RoundDone", peer=peer, where={"step": step})


COPIES = {"run": {"copies": 2}}
DIAL_OUT = {f"host-{number}": {"dial_out_only": True} for number in (1, 2)}
HOSTED = {"split": {"ends": "hosted"}}
LOST = On("PeerLost")
FAILED = On("AttemptFailed")
STORIES: Mapping[str, Story] = {
    # Without faults.
    "sync": Story(),
    "reproducible": Story(EXACT),
    "hosted": Story(HOSTED),
    "local": Story(LOCAL),
    "narrow": Story({"codecs": {"activations": "bfloat16"}, "averaging": {"codec": "int8"}}),
    "copies": Story(COPIES, shows=On("CopyHeld")),
    "checkpoints": Story(
        {"sites": {"host-0": {"run_directory": "kept", "checkpoint_every": 2}}},
        (
            Strike("full", at_step(1), faults.FillDisk("host-0")),
            Strike("free", at_step(2, "host-1"), faults.FreeDisk("host-0")),
        ),
        shows=On("CheckpointWritten"),
    ),
    # Every strategy, and the ways that sums travel.
    "everyone": of_strategy("everyone"),
    "grid": of_strategy("grid", shows=On("RoundDone", where={"round": 1})),
    "butterfly-groups": of_strategy("butterfly-groups", shows=On("RoundDone", where={"round": 1})),
    "server": of_strategy("server", sites={"host-1": {"dial_out_only": True}}),
    "hierarchy": of_strategy("hierarchy", sites=REGIONS, shows=On("RoundDone", where={"round": 2})),
    "random": of_strategy("random", local=True, shows=On("Mixed")),
    "push-sum": of_strategy("push-sum", local=True, shows=On("Mixed", where={"own": "pushed"})),
    **{schedule: of_schedule(schedule) for schedule in ("tree", "ring", "halving", "butterfly")},
    "auto": of_strategy("everyone", averaging={"schedule": "auto"}),
    # Deaths.
    "kill-host": Story(EXACT, kill("host-1", at=work("host-1")), shows=LOST, weights_of="reproducible"),
    "kill-host-closing": Story(EXACT, kill("host-1", at=closing("host-1")), shows=LOST, weights_of="reproducible"),
    "kill-host-hosted": Story(HOSTED, kill("host-1", at=work("host-1")), shows=LOST),
    "kill-host-local": Story(LOCAL, kill("host-1", at=work("host-1")), shows=LOST),
    "kill-trainer": Story({}, kill("trainer-0", at=fed("trainer-0")), shows=LOST),
    "kill-trainer-hosted": Story(HOSTED, kill("trainer-0", at=fed("trainer-0")), shows=LOST),
    "kill-trainer-closing": Story({}, kill("trainer-0", at=closing("trainer-0")), shows=LOST),
    "kill-leader": Story({}, kill(LEADER_OF_2, at=work("host-0")), shows=On("TermBegan")),
    "kill-leader-closing": Story({}, kill(LEADER_OF_2, at=closing("host-0")), shows=On("TermBegan")),
    "kill-leader-decided": Story({}, kill(LEADER_OF_2, at=On("Committed", peer=LEADER_OF_2)), shows=On("TermBegan")),
    "kill-founder": Story({}, kill("bootstrap", at=work("host-0")), shows=LOST),
    "kill-between-rounds": Story(
        merged(of_strategy("grid").shape, steps(3)),
        kill("host-1", at=closing("host-1")),
        shows=FAILED,
    ),
    "kill-server": Story(
        merged(EVERYONE, steps(4), {"hosts": 3, "averaging": {"strategy": "server"}, "sites": DIAL_OUT}),
        kill("host-0", at=closing("host-0")),
        shows=LOST,
    ),
    **{f"kill-{schedule}": void_round(schedule) for schedule in ("ring", "halving", "butterfly")},
    "kill-many": Story(
        merged(steps(7), {"hosts": 6, "trainers": 3}),
        tuple(
            Strike(f"kill {name}", at_step(number), faults.Kill((name,)))
            for number, name in enumerate(("bootstrap", "host-1", "trainer-2", "host-4"), 1)
        ),
        shows=LOST,
    ),
    "kill-stage": Story(COPIES, kill("host-1", "host-3", at=work("host-1")), shows=On("StepGivenUp")),
    "kill-copy": Story(COPIES, kill("host-0", at=On("CopyHeld", peer="host-0")), shows=LOST),
    # Who stands still, is out of reach, or comes back.
    "pause-short": Story({}, (Strike("pause", work("host-1"), faults.Pause(("host-1",), seconds=1.0)),)),
    "pause-long": Story(
        steps(8),
        (Strike("pause", work("host-1"), faults.Pause(("host-1",), seconds=9.0)),),
        shows=ready_again("host-1"),
    ),
    "pause-trainer": Story(
        steps(6),
        (Strike("pause", fed("trainer-0"), faults.Pause(("trainer-0",), seconds=6.0)),),
        shows=On("PeerBack"),
    ),
    "cut-few": Story(
        steps(9), cut("host-3", "trainer-1", others=FIRST_OF_EACH, seconds=9.0), shows=ready_again("trainer-1")
    ),
    "no-majority": Story(
        steps(9, quorum_grace_s=4.0),
        (
            *kill("bootstrap", at=at_step(1)),
            *cut("host-2", "host-3", "trainer-1", others=("host-0", "host-1", "trainer-0"), seconds=12.0),
        ),
        shows=On("LineageBegan"),
    ),
    "restart-host": Story(steps(6), (*kill("host-1", at=work("host-1")), back("host-1")), shows=ready_again("host-1")),
    "restart-host-bare": Story(
        steps(6), (*kill("host-1", at=work("host-1")), back("host-1", keep_disk=False)), shows=ready_again("host-1")
    ),
    "restart-trainer": Story(
        steps(7), (*kill("trainer-0", at=fed("trainer-0")), back("trainer-0")), shows=ready_again("trainer-0")
    ),
    "twin": Story(steps(6), (Strike("twin", work("host-1"), faults.Twin("host-1")),)),
    # Who comes and goes.
    "join-host": Story(steps(6), acts=(joins("stage"),), shows=ready("late")),
    "join-trainer": Story(steps(6), acts=(joins("trainer"),), shows=ready("late")),
    "join-trainer-hosted": Story(merged(HOSTED, steps(6)), acts=(joins("trainer"),), shows=ready("late")),
    "join-local": Story(merged(LOCAL, steps(5)), acts=(joins("stage", step=1),), shows=ready("late")),
    "join-donor-dies": Story(
        steps(7), kill("host-1", at=On("PartAssigned", peer="late")), (joins("stage", stage=0),), shows=ready("late")
    ),
    "joiner-dies": Story(
        steps(4),
        acts=(joins("stage"), dies("late", On("StateDownloaded", peer="late"))),
    ),
    "newcomer-dies": Story(steps(6), acts=(joins("stage"), dies("late", ready("late"))), shows=LOST),
    "leave-host": Story(acts=(leaves("host-1", work("host-0")),), shows=On("Draining")),
    "leave-trainer": Story(acts=(leaves("trainer-1", work("host-0")),), shows=On("Draining")),
    "leave-founder": Story(acts=(leaves("bootstrap", work("host-0")),), shows=On("Draining")),
}
