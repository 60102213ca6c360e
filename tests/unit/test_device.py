from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio
import torch

from swarm import device as devices
from swarm.device import (
    SWITCH_INTERVAL_S,
    DeviceThread,
    allocated_memory,
    choose_device,
    choose_devices,
    compute_reproducibly,
    free_memory,
    is_out_of_memory,
    release_memory,
    resolve_device,
)
from swarm.errors import ConfigError
from swarm.phases import Phases


@pytest.fixture(autouse=True)
def _switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest_asyncio.fixture
async def device() -> AsyncIterator[DeviceThread]:
    thread = DeviceThread(torch.device("cpu"), threads=1)
    yield thread
    await thread.close()


async def test_device_runs_in_order_on_one_thread_of_its_own(device: DeviceThread) -> None:
    seen: list[int] = []
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(device.run(lambda n=n: (seen.append(n), threading.get_ident())[1])) for n in range(9)
        ]
    assert seen == list(range(9))
    assert {task.result() for task in tasks} != {threading.get_ident()}
    assert len({task.result() for task in tasks}) == 1
    assert await device.run(torch.get_num_threads) == 1
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)


async def test_device_keeps_its_number_of_threads_whatever_another_thread_sets() -> None:
    device = DeviceThread(torch.device("cpu"), threads=2)
    await device.run(bool)
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.set_num_threads, 1).result()
    assert await device.run(torch.get_num_threads) == 2
    await device.close()


async def test_device_exception_comes_out_and_the_thread_goes_on(device: DeviceThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    assert await device.run(max, 1, 2) == 2
    assert await device.run(sorted, [1, 2], reverse=True) == [2, 1]


async def test_device_work_cancelled_in_line_is_dropped_and_running_work_ends(device: DeviceThread) -> None:
    started, release, ran = threading.Event(), threading.Event(), []

    def slow() -> None:
        started.set()
        release.wait(60)
        ran.append("slow")

    running = asyncio.create_task(device.run(slow))
    waiting = asyncio.create_task(device.run(ran.append, "waiting"))
    await asyncio.to_thread(started.wait, 60)
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    release.set()
    assert await device.run(len, ran) == 1
    assert ran == ["slow"]


async def test_device_close_joins_what_runs_and_cancels_what_waits() -> None:
    device = DeviceThread(torch.device("cpu"))
    started, release, ran = threading.Event(), threading.Event(), []

    def slow() -> str:
        started.set()
        release.wait(60)
        ran.append("slow")
        return "done"

    running = asyncio.create_task(device.run(slow))
    waiting = asyncio.create_task(device.run(ran.append, "waiting"))
    await asyncio.to_thread(started.wait, 60)
    closing = asyncio.create_task(device.close())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await closing
    assert await running == "done"
    assert ran == ["slow"]
    await device.close()
    with pytest.raises(RuntimeError):
        await device.run(len, [])


@pytest.mark.parametrize("text", ["tpu", "meta", "", "cuda:99", "cpu cpu"])
def test_resolve_device_unknown_or_absent_names_the_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        resolve_device(text)


def test_resolve_device_cpu_is_there() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [("cpu+auto", "by name"), ("cpu+cuda:0", "of one kind"), ("cuda+cuda:0", "each GPU once"), ("mps+mps", "once"),
     ("cpu+tpu", "of one kind"), ("cpu+", "of one kind"), ("cuda:98+cuda:99", "cpu")],
)  # fmt: skip
def test_devices_that_cannot_compute_one_part_together_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_devices(text)


async def test_devices_of_one_peer_are_asked_for_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_devices("cpu+cpu") == ((torch.device("cpu"),) * 2, "as asked")
    assert len(choose_devices("auto")[0]) == 1
    gpus = [torch.device("cuda", number) for number in range(3)]
    monkeypatch.setattr(devices, "free_memory", lambda device=None: 500 - 100 * device.index)
    monkeypatch.setattr(devices, "allocated_memory", lambda device: 10)
    thread = DeviceThread.__new__(DeviceThread)
    thread._device, thread._beside, thread._max_memory = gpus[0], (gpus[2], gpus[1]), None
    assert (thread.torch_devices, thread.free_memory()) == ((gpus[0], gpus[2], gpus[1]), 300)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18.0 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("CUDA error: out of memory"), False),
        (MemoryError(), False),
    ],
    ids=str,
)
def test_out_of_memory_is_what_an_accelerator_says(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) == memory


def test_release_memory_of_a_cpu_does_nothing() -> None:
    release_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("gpus", "apple", "cuda", "turn", "found", "why"),
    [
        (0, False, None, 0, "cpu", "this torch is built for the CPU"),
        (0, False, "13.0", 0, "cpu", "no CUDA device is visible"),
        (0, True, None, 0, "mps", "Apple's GPU"),
        (1, True, "13.0", 3, "cuda:0", "A GPU"),
        (2, False, "13.0", 0, "cuda:0", "A GPU, the peer's turn among 2"),
        (2, False, "13.0", 3, "cuda:1", "A GPU, the peer's turn among 2"),
    ],
)
def test_auto_takes_a_gpu_where_there_is_one_and_each_in_turn(
    monkeypatch: pytest.MonkeyPatch, gpus: int, apple: bool, cuda: str | None, turn: int, found: str, why: str
) -> None:
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)
    assert tuple(map(str, choose_device("auto", turn))) == (found, why)


def test_auto_takes_the_cpu_where_the_gpu_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(count: int, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory\nof a GPU that others use")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", full)
    assert choose_device("auto") == (torch.device("cpu"), "cuda:0 does not compute: CUDA out of memory")


def test_apples_device_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no MPS here"):
        resolve_device("mps")


def test_memory_of_apples_device_is_what_it_is_recommended_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 300)
    assert (free_memory(torch.device("mps")), allocated_memory(torch.device("mps"))) == (700, 300)


@pytest.mark.parametrize(("limit", "left"), [(None, 500), (200, 0), (400, 100), (10_000, 500)])
def test_peer_plans_with_no_more_memory_than_its_owner_gives(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, left: int
) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device=None: 500)
    monkeypatch.setattr(devices, "resident_memory", lambda: 300)
    assert DeviceThread(torch.device("cpu"), max_memory=limit).free_memory() == left


def test_peer_beside_others_plans_with_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device=None: 500 if device is None else 90)
    monkeypatch.setattr(devices, "resident_memory", lambda: 300)
    cpu = DeviceThread(torch.device("cpu"), max_memory=1000, host_memory=700)
    assert (cpu.free_memory(), cpu.free_host_memory()) == (400, 400)
    assert DeviceThread(torch.device("cpu"), max_memory=350, host_memory=700).free_memory() == 50
    monkeypatch.setattr(devices, "allocated_memory", lambda device: 20)
    gpu = DeviceThread(torch.device("cuda"), max_memory=60, host_memory=700)
    assert (gpu.free_memory(), gpu.free_host_memory()) == (40, 400), "its own memory is another"
    assert DeviceThread(torch.device("cuda"), host_memory=0).free_memory() == 90


def test_apples_device_has_no_more_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1 << 60)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    assert free_memory(torch.device("mps")) < 1 << 60


@pytest.mark.parametrize(("name", "asked"), [("cpu", []), ("cuda", [True])])
def test_gpu_is_asked_for_the_same_bits_again_and_a_cpu_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: list[bool]
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, warn_only: told.append(mode))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    compute_reproducibly(torch.device(name))
    assert told == asked


# --- work in phases --------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def lanes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DeviceThread]:
    """What runs a GPU's work, without the GPU."""
    monkeypatch.setattr(devices, "_set_stream", lambda device: None)
    thread = DeviceThread(torch.device("cuda"))
    yield thread
    await thread.close()


def _places() -> Phases[list[str]]:
    """Return the threads on which its phases were done."""
    seen = []
    for _ in range(3):
        seen.append(threading.current_thread().name)
        yield
    return [*seen, threading.current_thread().name]


async def test_phases_on_cuda_come_and_go_on_threads_of_their_own(lanes: DeviceThread) -> None:
    first, second = await asyncio.gather(lanes.run_phases(_places()), lanes.run_phases(_places()))
    assert first == second == ["device-in_0", "device_0", "device-out_0", "device_0"]
    assert await lanes.run(lambda: threading.current_thread().name) == "device_0"
    assert lanes.lanes == 3


async def test_phases_elsewhere_are_done_in_one_go(device: DeviceThread) -> None:
    assert await device.run_phases(_places()) == ["device_0"] * 4
    assert device.lanes == 1


async def test_phases_of_one_piece_are_done_while_another_waits(lanes: DeviceThread) -> None:
    computed = threading.Event()

    def waits() -> Phases[str]:
        yield
        yield
        assert computed.wait(60), "nothing was computed meanwhile"
        return "left"

    def computes() -> Phases[str]:
        yield
        computed.set()
        return "computed"

    assert await asyncio.gather(lanes.run_phases(waits()), lanes.run_phases(computes())) == ["left", "computed"]


@pytest.mark.parametrize("phase", [0, 1, 2, 3])
async def test_phase_that_fails_ends_the_work(lanes: DeviceThread, phase: int) -> None:
    def fails() -> Phases[None]:
        for _ in range(phase):
            yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await lanes.run_phases(fails())


async def test_phases_cancelled_end_with_the_one_under_way(lanes: DeviceThread) -> None:
    began, release, done = threading.Event(), threading.Event(), []

    def work() -> Phases[None]:
        began.set()
        release.wait(60)
        done.append("arrived")
        yield
        done.append("computed")

    task = asyncio.create_task(lanes.run_phases(work()))
    await asyncio.to_thread(began.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    await lanes.run_phases(_places())
    assert done == ["arrived"]
