from __future__ import annotations

import asyncio
import threading
from email.utils import formatdate

import pytest

from peers.preemption.clouds import AwsSource, AzureSource, CloudSource, cloud_source
from peers.preemption.http import MetadataServer
from peers.preemption.notice_options import Cloud, read_url
from peers.preemption.notice_source import Notice, SourceFailed
from swarm.clock import SystemClock
from tests.harness.expect import eventually
from tests.harness.metadata_server import Metadata, azure_event, metadata_server
from tests.harness.rigs.peers import FakeClock

TOKEN = "/latest/api/token"
NOON = 1_767_268_800.0
"""2026-01-01T12:00:00Z."""
CLOUDS: tuple[Cloud, ...] = ("aws", "gcp", "azure")


def source(known: Metadata, cloud: Cloud | None = None) -> CloudSource:
    return cloud_source(cloud or known.cloud, read_url(known.url), SystemClock())  # type: ignore[arg-type]


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("here", CLOUDS)
async def test_is_here_is_true_of_the_cloud_that_answers_only(here: Cloud, cloud: Cloud) -> None:
    with metadata_server(here) as known:
        assert await source(known, cloud).is_here() == (here == cloud)
        assert known.seen


# --- AWS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
async def test_aws_action_is_a_notice_by_the_clock_of_aws(action: str) -> None:
    with metadata_server("aws") as known:
        known.date = NOON
        known.action = {"action": action, "time": "2026-01-01T12:02:00Z", "new": {"field": 1}}
        assert await source(known).ask() == Notice(left_s=120.0)


@pytest.mark.parametrize(
    ("time", "left"), [("2025-12-31T00:00:00Z", 0.0), ("soon", None), ("", None), (None, None), ("9" * 400, None)]
)
async def test_aws_action_with_an_odd_time_is_a_notice_all_the_same(time: str | None, left: float | None) -> None:
    with metadata_server("aws") as known:
        known.date = NOON
        known.action = {"action": "terminate", "time": time}
        assert await source(known).ask() == Notice(left_s=left)


async def test_aws_rebalance_recommendation_is_no_notice() -> None:
    with metadata_server("aws") as known:
        known.rebalance = {"noticeTime": "2026-01-01T12:00:00Z"}
        assert await source(known).ask() is None
        assert known.asked("/latest/meta-data/events/recommendations/rebalance") == 0


async def test_aws_token_that_is_refused_is_taken_anew() -> None:
    with metadata_server("aws") as known:
        aws = source(known)
        await aws.ask()
        known.tokens.append("another")  # from now on the first one is refused with 401
        known.action = {"action": "stop", "time": "2026-01-01T12:02:00Z"}
        assert await aws.ask() is not None
        assert known.asked(TOKEN) == 2


async def test_aws_token_is_taken_anew_before_it_ends() -> None:
    clock = FakeClock()
    with metadata_server("aws") as known:
        aws = AwsSource(MetadataServer(read_url(known.url)), clock)
        await aws.ask()
        clock.now = 21_600 - AwsSource.EARLY_S - 1
        await aws.ask()
        assert known.asked(TOKEN) == 1
        clock.now += 1
        await aws.ask()
        assert known.asked(TOKEN) == 2


@pytest.mark.parametrize("granted", ["", "-1", "soon", "99999999999"])
async def test_aws_token_without_a_lifetime_is_not_from_aws(granted: str) -> None:
    with metadata_server("aws") as known:
        known.granted = granted
        assert not await source(known).is_here()
        with pytest.raises(SourceFailed, match="not one of AWS"):
            await source(known).ask()


@pytest.mark.parametrize("action", [{}, {"action": "dance"}, {"action": 7, "time": ""}])
async def test_aws_answer_that_makes_no_sense_is_a_failure(action: dict[str, object]) -> None:
    with metadata_server("aws") as known:
        known.action = action
        with pytest.raises(SourceFailed, match="another form than expected: action"):
            await source(known).ask()


# --- GCP -------------------------------------------------------------------------------------------------------------


async def test_gcp_request_is_held_until_the_machine_is_taken() -> None:
    with metadata_server("gcp") as known:
        gcp = source(known)
        await gcp.ask()
        asking = asyncio.ensure_future(gcp.ask())
        await eventually(lambda: known.asked("/computeMetadata/v1/instance/preempted") == 2)
        assert not asking.done()
        known.preempt()
        assert await asking == Notice(left_s=30.0)


async def test_gcp_notice_between_two_requests_is_not_missed() -> None:
    with metadata_server("gcp") as known:
        gcp = source(known)
        await gcp.ask()
        known.preempt()
        assert await gcp.ask() is not None


# --- Azure -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
async def test_azure_event_of_this_machine_is_a_notice_by_the_clock_of_azure(kind: str) -> None:
    with metadata_server("azure") as known:
        known.date, known.machine = NOON, "Pool_3"
        known.events = [azure_event(kind, "pool_2", "pool_3", not_before=formatdate(NOON + 30, usegmt=True))]
        assert await source(known).ask() == Notice(left_s=30.0)


@pytest.mark.parametrize(
    "event",
    [
        azure_event("Preempt", "pool_2"),
        azure_event("Preempt"),
        azure_event("Reboot", "pool_3"),
        azure_event("Freeze", "pool_3"),
        azure_event("Redeploy", "pool_3"),
        azure_event("Preempt", "pool_3", status="Completed"),
        azure_event("Preempt", "pool_3") | {"Resources": None},
    ],
)
async def test_azure_event_of_others_or_of_another_kind_is_no_notice(event: dict[str, object]) -> None:
    with metadata_server("azure") as known:
        known.events = [event]
        assert await source(known).ask() is None
        assert known.asked("/metadata/scheduledevents") == 1


async def test_azure_of_several_events_the_first_counts() -> None:
    with metadata_server("azure") as known:
        known.date = NOON
        known.events = [
            azure_event("Terminate", "pool_3", not_before=formatdate(NOON + left, usegmt=True)) for left in (900, 30)
        ]
        assert await source(known).ask() == Notice(left_s=30.0)


async def test_azure_first_answer_may_take_long_and_later_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AzureSource, "LATER_S", 0.02)
    with metadata_server("azure") as known:
        azure, held = source(known), threading.Event()
        known.first_answer = held
        threading.Timer(0.1, held.set).start()
        assert await azure.ask() is None
        assert held.is_set()
        known.first_answer = threading.Event()
        with pytest.raises(SourceFailed, match=r"in 0\.02 s"):
            await azure.ask()


async def test_azure_answer_that_makes_no_sense_is_a_failure() -> None:
    with metadata_server("azure") as known:
        known.events = "none"  # type: ignore[assignment]
        with pytest.raises(SourceFailed, match="another form than expected: Events"):
            await source(known).ask()
