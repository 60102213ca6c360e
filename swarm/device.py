"""The one thread that runs torch for a peer, off the event loop."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from swarm.errors import ConfigError
from swarm.phases import OnePhase, Phases, advance, complete
from swarm.residency import TurnOrder

if TYPE_CHECKING:
    import asyncio

    import torch

    from swarm.clock import Clock  # it imports asyncio, as does whatever runs a device: not who only asks for memory

P = ParamSpec("P")
T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0005
"""A thread that wants the interpreter lock waits this long before it asks the holder to let go. With Python's 5 ms
each wake-up of the loop could wait 5 ms behind Python code on the device thread (torch's kernels release the lock)."""


LANES = 3
"""Pieces of work that a GPU has under way at once: one arrives and one leaves while another is computed."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_KEPT_BYTES = 256 << 20
_GROWN_BYTES = 64 << 20
_LARGEST_MMAP_THRESHOLD = 32 << 20


class Executor(Protocol):
    """Where parts are worked on: the device's thread, or a copy's own."""

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """Run ``fn`` off the event loop, after everything asked for before."""


class Device(Protocol):
    """Where the modules of one peer are: one thread of work, and the device it works on."""

    @property
    def torch_device(self) -> torch.device:
        """Return where modules and their inputs belong."""

    @property
    def torch_devices(self) -> tuple[torch.device, ...]:
        """Return all on which one part is computed with: that one first."""

    def free_memory(self) -> int:
        """Return the bytes of its memory that this peer may still take. Blocking: some milliseconds."""

    def free_host_memory(self) -> int:
        """Return the bytes of the machine's memory that this peer may still take: a CPU's own."""

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` after everything asked for before."""

    @property
    def lanes(self) -> int:
        """Return how many pieces of work in phases are worth having under way at once."""

    async def run_phases(self, phases: Phases[T]) -> T:
        """Do a piece of work; return what it returns. Cancelled, it ends with the phase that it is in."""

    def place(self, part: T) -> T:
        """Return a part as this device works on it; the one who computes with one asks here first."""

    async def close(self) -> None:
        """End it."""


def device_name(device: torch.device) -> str:
    """Return what a GPU's driver calls it; "" for a CPU, and for Apple's."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def free_memory(device: torch.device | None = None) -> int:
    """Return the bytes of memory that this process may still take: what the machine has, within its container's
    limit; of a GPU, what it has left and what torch holds there unused; of Apple's, whose memory is the machine's, no
    more than it is recommended to have."""
    if device is not None and device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device is not None and device.type == "mps":
        import torch

        left = int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
        return min(max(0, left), free_memory())
    import psutil  # only a running peer needs it

    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or another kind of system
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        known = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(known["active_file"]) + int(known["inactive_file"])  # given up for one that needs memory
        free = min(free, max(0, limit - used + cached))
    return free


_CGROUP = Path("/sys/fs/cgroup")


def resident_memory() -> int:
    """Return the bytes of the machine's memory that this process has, whatever it has them for."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def allocated_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory that this process's tensors have; None of any other device."""
    if device.type not in ("cuda", "mps"):
        return None
    import torch

    return int(torch.cuda.memory_allocated(device) if device.type == "cuda" else torch.mps.current_allocated_memory())


class DeviceThread:
    """Runs callables one at a time, first in first out, on a thread of its own; torch modules live there only.

    The thread starts with the first call. ``threads`` is the number of CPU threads of torch's kernels, and is set on
    the thread itself: OpenMP keeps that number per calling thread. The interpreter's switch interval and what the
    allocator gives back to the kernel are process-wide; they are set here, because it is this thread that makes the
    loop wait, and whose tensors come and go.

    Work in phases has two more threads where the device is CUDA, each with a stream of its own that the GPU serves
    first: what arrives and what leaves is copied while something else is computed.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        beside: Sequence[torch.device] = (),
        threads: int = 1,
        max_memory: int | None = None,
        host_memory: int | None = None,
    ) -> None:
        """``max_memory`` bytes are what this peer plans with at most, of what the device has, and ``host_memory`` of
        what the machine has; None: all that is free. Those ``beside`` it have strips of what is computed on it."""
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        keep_freed_memory()
        self._device, self._max_memory, self._host_memory = device, max_memory, host_memory
        self._beside = tuple(beside)
        self._executor = ThreadPoolExecutor(1, "device", initializer=_set_threads, initargs=(threads,))
        self._copiers = [
            ThreadPoolExecutor(1, f"device-{name}", initializer=_set_stream, initargs=(device,))
            for name in ("in", "out")
            if device.type == "cuda"
        ]

    @property
    def torch_device(self) -> torch.device:
        """Return where modules and their inputs belong."""
        return self._device

    @property
    def torch_devices(self) -> tuple[torch.device, ...]:
        """See :class:`Device`."""
        return (self._device, *self._beside)

    def free_memory(self) -> int:
        """See :class:`Device`; of several devices that of the one with the least."""
        return min(map(self._free_memory, self.torch_devices))

    def _free_memory(self, device: torch.device) -> int:
        if (taken := allocated_memory(device)) is None:
            return _within(self._max_memory, resident_memory(), self.free_host_memory())
        return _within(self._max_memory, taken, free_memory(device))

    def free_host_memory(self) -> int:
        """See :class:`Device`."""
        return _within(self._host_memory, resident_memory(), free_memory())

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` after everything asked for before; its exceptions come out here.

        Cancelled while waiting in line, the work is dropped; cancelled while it runs, it runs to its end and the
        result is dropped. After :meth:`close`, RuntimeError.
        """
        import asyncio

        future = self._executor.submit(fn, *args, **kwargs)
        return await asyncio.wrap_future(future)

    @property
    def lanes(self) -> int:
        """See :class:`Device`."""
        return LANES if self._copiers else 1

    async def run_phases(self, phases: Phases[T]) -> T:
        """See :class:`Device`."""
        import asyncio

        if not self._copiers:
            return await self.run(complete, phases)
        threads = cycle((self._copiers[0], self._executor, self._copiers[1], self._executor))
        while (end := await asyncio.wrap_future(next(threads).submit(advance, phases))) is None:
            pass
        value: T = end.value
        return value

    def place(self, part: T) -> T:
        """Return the part as it is."""
        return part

    async def close(self) -> None:
        """Drop what has not started (its awaiters are cancelled), wait for what runs, end the threads. Idempotent."""
        import asyncio

        for thread in (*self._copiers, self._executor):
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)


class MeteredDevice:
    """A device, and how long it has had work: ``busy_s``, whatever the work was. Waiting in its line counts once."""

    def __init__(self, device: Device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._works, self._since, self._busy_s = 0, 0.0, 0.0

    @property
    def torch_device(self) -> torch.device:
        """See :class:`Device`."""
        return self._device.torch_device

    @property
    def torch_devices(self) -> tuple[torch.device, ...]:
        """See :class:`Device`."""
        return self._device.torch_devices

    @property
    def busy_s(self) -> float:
        """Seconds, those of the work under way included."""
        return self._busy_s + (self._clock.monotonic() - self._since if self._works else 0.0)

    def free_memory(self) -> int:
        """See :class:`Device`."""
        return self._device.free_memory()

    def free_host_memory(self) -> int:
        """See :class:`Device`."""
        return self._device.free_host_memory()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See :class:`Device`."""
        with self._working():
            return await self._device.run(fn, *args, **kwargs)

    @property
    def lanes(self) -> int:
        """See :class:`Device`."""
        return self._device.lanes

    async def run_phases(self, phases: Phases[T]) -> T:
        """See :class:`Device`."""
        with self._working():
            return await self._device.run_phases(phases)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        if not self._works:
            self._since = self._clock.monotonic()
        self._works += 1
        try:
            yield
        finally:
            self._works -= 1
            if not self._works:
                self._busy_s += self._clock.monotonic() - self._since

    def place(self, part: T) -> T:
        """See :class:`Device`."""
        return self._device.place(part)

    async def close(self) -> None:
        """See :class:`Device`."""
        await self._device.close()


class TakingTurns:
    """Gives the device to one piece of work at a time (:class:`~swarm.residency.TurnOrder`). One event loop."""

    def __init__(self) -> None:
        self._turns, self._busy = TurnOrder(), False
        self._waiting = defaultdict[str, deque["asyncio.Future[None]"]](deque)

    @contextlib.asynccontextmanager
    async def turn(self, part: str) -> AsyncIterator[None]:
        """Have the device for a piece of a part's work."""
        import asyncio

        self._loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = self._loop.create_future()
        self._waiting[part].append(mine)
        self._turns.wait(part)
        self._loop.call_soon(self._decide)
        try:
            await mine
            yield
        finally:
            if mine in self._waiting[part]:
                self._waiting[part].remove(mine)
                self._turns.give_up(part)
            elif not mine.cancelled():
                self._busy = False
                self._loop.call_soon(self._decide)  # when who had it has asked for its next one

    def _decide(self) -> None:
        while not self._busy and (part := self._turns.next()) is not None:
            first = self._waiting[part].popleft()
            if not first.cancelled():
                self._busy = True
                first.set_result(None)


class Seat(OnePhase):
    """A device as one of several parts has it that take turns there. Pieces of its work are done whole."""

    def __init__(self, device: Device, turns: TakingTurns, name: str) -> None:
        self._device, self._turns, self._name = device, turns, name

    @property
    def torch_device(self) -> torch.device:
        """See :class:`Device`."""
        return self._device.torch_device

    def free_memory(self) -> int:
        """See :class:`Device`; of an accelerator half of it, since two parts are there at a time."""
        free = self._device.free_memory()
        return free if self.torch_device.type == "cpu" else free // 2

    def free_host_memory(self) -> int:
        """See :class:`Device`."""
        return self._device.free_host_memory()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See :class:`Device`."""
        async with self._turns.turn(self._name):
            return await self._device.run(fn, *args, **kwargs)

    def place(self, part: T) -> T:
        """See :class:`Device`."""
        return self._device.place(part)

    async def close(self) -> None:
        """Nothing: others have it, too."""


def _within(limit: int | None, taken: int, free: int) -> int:
    """Return how many of the ``free`` bytes may be taken by who has ``taken`` some of its ``limit``. Pure."""
    return free if limit is None else min(free, max(0, limit - taken))


def keep_freed_memory() -> None:
    """Have glibc's allocator keep what a microbatch frees for the next one, for the whole process; nothing elsewhere.

    By default it hands tensors of this size back to the kernel, which clears the pages anew each time: a thousand page
    faults for one microbatch of a small stage, a tenth of its time. What is kept is bounded by what was in use at once.
    One arena for all threads: the heaps of others are given back whole whenever they fall empty, whatever is said here.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TOP_PAD, _GROWN_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


NAMES = "auto, mps, cpu, cuda or cuda:N"


def resolve_device(text: str) -> torch.device:
    """Return a device by its name: see :func:`choose_device`."""
    return choose_device(text)[0]


def choose_device(text: str, turn: int = 0) -> tuple[torch.device, str]:
    """Return a device by its name, and the reason for it in words.

    Imports torch: seconds, on a cold start.

    Args:
        text: ``cpu``, ``cuda`` or ``cuda:N`` (NVIDIA's and, in a build of torch for ROCm, AMD's), ``mps`` (Apple's), or
            ``auto``: a GPU that computes, else the CPU.
        turn: Number of the peer on this machine: with ``auto`` the first takes the first GPU, and so on, round and
            round.

    Raises:
        ConfigError: For another name or an absent GPU.
    """
    import torch

    found, apple = torch.cuda.device_count(), torch.backends.mps.is_available()
    if text == "auto":
        return _best_device(turn, found, apple=apple)
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError("device", text, NAMES, "Correct the name.") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError("device", text, NAMES, "Correct the name.")
    if device.type == "cuda" and (device.index or 0) >= found:
        allowed = "cpu" if not found else f"cpu, or cuda:0 … cuda:{found - 1}"
        remedy = "Use cpu, or check that nvidia-smi lists the GPU and that torch is a CUDA build (torch.version.cuda)."
        raise ConfigError("device", text, allowed, remedy)
    if device.type == "mps" and not apple:
        remedy = "Use cpu, or a Mac with Apple silicon and a torch that can use it."
        raise ConfigError("device", text, "cpu here", remedy, why="torch finds no MPS here")
    return device, "as asked"


def named_devices(text: str, key: str = "device") -> list[str]:
    """Return the names of the devices that a text with ``+`` joins. Pure. Raises ConfigError, about ``key``, for
    several that cannot compute with one part."""
    names = ["cuda:0" if name == "cuda" and "+" in text else name for name in text.split("+")]
    if len(names) > 1 and "auto" in names:
        raise ConfigError(key, text, "devices by name where there are several", "Name them all, as cuda:0+cuda:1.")
    if len({name.partition(":")[0] for name in names}) > 1:
        why = "their bits differ, and the slower one sets the pace"
        raise ConfigError(key, text, "devices of one kind", "Join with one kind, or with a peer for each.", why=why)
    if twice := {name for name in names if name != "cpu" and names.count(name) > 1}:
        raise ConfigError(key, text, "each GPU once", f"Name {min(twice)} once.")
    return names


def choose_devices(text: str, turn: int = 0) -> tuple[tuple[torch.device, ...], str]:
    """Return the devices that a text with ``+`` joins, or the one of :func:`choose_device`, and the reason. Raises as
    both."""
    if len(names := named_devices(text)) == 1:
        device, why = choose_device(text, turn)
        return (device,), why
    return tuple(map(resolve_device, names)), "as asked"


def _best_device(turn: int, gpus: int, *, apple: bool) -> tuple[torch.device, str]:
    import torch

    cpu = torch.device("cpu")
    if not gpus and apple:
        return torch.device("mps"), "Apple's GPU"
    if not gpus and not (torch.version.cuda or torch.version.hip):
        return cpu, "this torch is built for the CPU"
    if not gpus:
        return cpu, "no CUDA device is visible"
    device = torch.device("cuda", turn % gpus)
    try:
        torch.ones(8, device=device).sum().item()
    except RuntimeError as error:  # its memory is full, its driver too old, or torch has no kernels for it
        return cpu, f"{device} does not compute: {str(error).partition(chr(10))[0]}"
    return device, device_name(device) + (f", the peer's turn among {gpus}" if gpus > 1 else "")


# --- memory of an accelerator ----------------------------------------------------------------------------------------

_NO_MEMORY = (
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What says so in another RuntimeError: of MPS, and of CUDA and its libraries, which allocate without torch."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether work failed because its device has no memory left."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def compute_reproducibly(device: torch.device) -> None:
    """Have a GPU give the same bits when it computes the same again: slower, and for the whole process. Nothing on a
    CPU, whose kernels do. cuBLAS wants CUBLAS_WORKSPACE_CONFIG in the environment for it, which the one who starts the
    peer sets."""
    if device.type != "cuda":
        return
    import torch

    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def release_memory(device: torch.device) -> None:
    """Give memory that torch keeps for tensors to come back to the device. Nothing on a CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def _set_stream(device: torch.device) -> None:
    """Give this thread a stream of the GPU that is served before the one on which is computed: it has little to do."""
    import torch

    torch.set_num_threads(1)
    torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.get_num_threads()  # a thread that was not asked once would take the number that another sets last
