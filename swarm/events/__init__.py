"""One frozen dataclass per thing that happens. Reports, plots, progress and tests read these, never log lines.

An event is plain data; who wrote it and when is added by the recorder. Fields are named with their units.
A microbatch is written whole, as the list (trainer, shard, epoch, position): its short text would be ambiguous.
"""

from __future__ import annotations

from swarm.events.averaging import Mixed as Mixed
from swarm.events.averaging import Participation as Participation
from swarm.events.averaging import ResidualHandedOver as ResidualHandedOver
from swarm.events.averaging import ResidualLost as ResidualLost
from swarm.events.averaging import RoundDone as RoundDone
from swarm.events.averaging import RoundVoid as RoundVoid
from swarm.events.averaging import SumTaken as SumTaken
from swarm.events.base import Event as Event
from swarm.events.base import EventList as EventList
from swarm.events.base import EventSink as EventSink
from swarm.events.base import EventT as EventT
from swarm.events.base import NullSink as NullSink
from swarm.events.microbatch import Accumulated as Accumulated
from swarm.events.microbatch import ContributionReplayed as ContributionReplayed
from swarm.events.microbatch import ContributionReversed as ContributionReversed
from swarm.events.microbatch import GraphsDropped as GraphsDropped
from swarm.events.microbatch import HopMoved as HopMoved
from swarm.events.microbatch import JourneyCompleted as JourneyCompleted
from swarm.events.microbatch import JourneySetAside as JourneySetAside
from swarm.events.microbatch import JourneyStarted as JourneyStarted
from swarm.events.microbatch import RetentionDropped as RetentionDropped
from swarm.events.microbatch import WorkExcluded as WorkExcluded
from swarm.events.microbatch import WorkWithdrawn as WorkWithdrawn
from swarm.events.peer import DaemonLost as DaemonLost
from swarm.events.peer import DaemonRestarted as DaemonRestarted
from swarm.events.peer import DashboardServed as DashboardServed
from swarm.events.peer import DataOpened as DataOpened
from swarm.events.peer import Draining as Draining
from swarm.events.peer import Invited as Invited
from swarm.events.peer import LimitTooLow as LimitTooLow
from swarm.events.peer import LoopLag as LoopLag
from swarm.events.peer import PartAssigned as PartAssigned
from swarm.events.peer import Paused as Paused
from swarm.events.peer import PauseWatch as PauseWatch
from swarm.events.peer import PeerBack as PeerBack
from swarm.events.peer import PeerLost as PeerLost
from swarm.events.peer import PeerReady as PeerReady
from swarm.events.peer import PeerStarted as PeerStarted
from swarm.events.peer import PeerStopped as PeerStopped
from swarm.events.peer import PreemptionNotice as PreemptionNotice
from swarm.events.peer import PreemptionWatch as PreemptionWatch
from swarm.events.peer import Reachability as Reachability
from swarm.events.peer import RelayServing as RelayServing
from swarm.events.peer import Resumed as Resumed
from swarm.events.peer import RosterChanged as RosterChanged
from swarm.events.peer import RunFound as RunFound
from swarm.events.peer import SyncProgress as SyncProgress
from swarm.events.peer import Waiting as Waiting
from swarm.events.run import AttemptFailed as AttemptFailed
from swarm.events.run import CaughtUp as CaughtUp
from swarm.events.run import ClosedWithout as ClosedWithout
from swarm.events.run import CodecsChanged as CodecsChanged
from swarm.events.run import Committed as Committed
from swarm.events.run import CutOff as CutOff
from swarm.events.run import DeviceUsed as DeviceUsed
from swarm.events.run import DigestMismatch as DigestMismatch
from swarm.events.run import HostsMoved as HostsMoved
from swarm.events.run import LineageBegan as LineageBegan
from swarm.events.run import LineageConfirmed as LineageConfirmed
from swarm.events.run import LineageGivenUp as LineageGivenUp
from swarm.events.run import LinkUsage as LinkUsage
from swarm.events.run import MoveDeclined as MoveDeclined
from swarm.events.run import PartsCapped as PartsCapped
from swarm.events.run import QuorumBack as QuorumBack
from swarm.events.run import QuorumLost as QuorumLost
from swarm.events.run import RunStarted as RunStarted
from swarm.events.run import StepClosed as StepClosed
from swarm.events.run import StepGivenUp as StepGivenUp
from swarm.events.run import TermBegan as TermBegan
from swarm.events.state import CheckpointFailed as CheckpointFailed
from swarm.events.state import CheckpointsSetAside as CheckpointsSetAside
from swarm.events.state import CheckpointWritten as CheckpointWritten
from swarm.events.state import CopyDropped as CopyDropped
from swarm.events.state import CopyHeld as CopyHeld
from swarm.events.state import DiskRefused as DiskRefused
from swarm.events.state import DiskTook as DiskTook
from swarm.events.state import DonorDropped as DonorDropped
from swarm.events.state import FrozenFetching as FrozenFetching
from swarm.events.state import FrozenReady as FrozenReady
from swarm.events.state import StateDownloaded as StateDownloaded
