"""Members of one process: what they refuse, and what they are told together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peers.household import Household
from peers.orders import Orders
from peers.settings import PeerSettings
from swarm.consensus.roster import tail
from swarm.errors import ConfigError, Ending
from swarm.ids import PeerId
from swarm.membership.parts import check_takes_turns
from swarm.network.libp2p.identity import load_or_create
from swarm.schema import MAX_BESIDE
from tests.harness.rigs.membership import manifest

TRAINER = PeerId("12D3KooWTheTrainerOfThisProcess")


MANY = MAX_BESIDE + 1


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"hosts": MANY, "stages": MANY, "model": {"layers": MANY}}, f"this one has {MANY}"),
        (
            {"hosts": 3, "split": {"variants": [1, 2], "route_by": "domain", "domains": ["law", "code"]}},
            "one host of each stage, and so one variant",
        ),
    ],
)
def test_run_of_which_a_machine_cannot_hold_all_parts_is_refused(run: dict[str, Any], why: str) -> None:
    async def main() -> None:
        household = Household(Orders(60), lambda stage: pytest.fail("a place was taken"))
        household.check(manifest(**run))

    with pytest.raises(ConfigError, match=why):
        asyncio.run(main())


@pytest.mark.parametrize("failing", ["t", "s1"])
def test_member_that_ends_with_an_error_has_the_others_leave_and_all_name_each_other(
    failing: str, tmp_path: Path
) -> None:
    @contextmanager
    def hosts(stage: int) -> Iterator[PeerSettings]:
        home = tmp_path / str(stage)
        home.mkdir()
        yield PeerSettings(home=home, role="stage", name=f"s{stage}", bootstrap=("/x",))

    async def main() -> tuple[list[int], list[tuple[str, Ending]], tuple[str, ...]]:
        trainer = PeerSettings(home=tmp_path, role="trainer", name="t", bootstrap=("/x",))
        orders, told = Orders(60), list[tuple[str, Ending]]()
        household = Household(orders, hosts)

        def leave(reason: str, ending: Ending) -> str:
            told.append((reason, ending))
            return ""

        async def live(settings: PeerSettings) -> int:
            if settings.name == "t":
                household.begin(TRAINER, manifest(), live)
            return int(settings.name == failing)

        orders.adopt(leave)
        codes = [await household.live(trainer, live), *await household.ended()]
        orders.adopt(leave)  # who comes later is asked at once
        await household.close()
        return codes, told, household.beside(TRAINER)

    codes, told, beside = asyncio.run(main())
    assert codes == [int(name == failing) for name in ("t", "s0", "s1")]
    assert told == 2 * [(f"{failing}, of this process, has ended", Ending.FAILED)]
    keys = [load_or_create(tmp_path / str(stage) / "identity.key").peer for stage in range(2)]
    assert beside == tuple(map(tail, keys))


@pytest.mark.parametrize(
    "sections",
    [{"averaging": {"mode": "local"}}, {"speed": {"mode": "overlap", "early_share": 0.5}}],
)
def test_stages_of_some_runs_cannot_take_turns(sections: dict[str, Any]) -> None:
    check_takes_turns(manifest())
    with pytest.raises(ConfigError, match=r"Hold all parts in memory .*; or found a run with mode sync"):
        check_takes_turns(manifest(**sections))
