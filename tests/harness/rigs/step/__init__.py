"""The rig of ``swarm.step``: a member that is asked, a leader among puppets, and what both decide on.

bench = await brought_to("propose")  # a member, in ``member.py``
await bench.ask(decide(record()))

here = await stage()  # a leader among puppets, in ``leader.py``
here.puppets[A].instead[RECONCILE] = no(Busy("later"))
"""

from __future__ import annotations

from tests.harness.rigs.clocks import HandClock as HandClock
from tests.harness.rigs.clocks import LoopClock as LoopClock
from tests.harness.rigs.clocks import in_virtual_time as in_virtual_time
from tests.harness.rigs.clocks import stop as stop
from tests.harness.rigs.clocks import turns as turns
from tests.harness.rigs.clocks import virtual as virtual
from tests.harness.rigs.common import RUN as RUN
from tests.harness.rigs.common import EventList as EventList
from tests.harness.rigs.common import InlineDevice as InlineDevice
from tests.harness.rigs.common import asked as asked
from tests.harness.rigs.common import sign as sign
from tests.harness.rigs.common import verify as verify
from tests.harness.rigs.consensus import BEFORE as BEFORE
from tests.harness.rigs.consensus import COMMITTED as COMMITTED
from tests.harness.rigs.consensus import CURSOR as CURSOR
from tests.harness.rigs.consensus import FAULTY as FAULTY
from tests.harness.rigs.consensus import GENESIS as GENESIS
from tests.harness.rigs.consensus import PARTS as PARTS
from tests.harness.rigs.consensus import ROSTER as ROSTER
from tests.harness.rigs.consensus import SEVEN as SEVEN
from tests.harness.rigs.consensus import STEP as STEP
from tests.harness.rigs.consensus import A as A
from tests.harness.rigs.consensus import B as B
from tests.harness.rigs.consensus import T as T
from tests.harness.rigs.consensus import acceptances as acceptances
from tests.harness.rigs.consensus import admission as admission
from tests.harness.rigs.consensus import departure as departure
from tests.harness.rigs.consensus import evidence as evidence
from tests.harness.rigs.consensus import listed as listed
from tests.harness.rigs.consensus import microbatch as microbatch
from tests.harness.rigs.consensus import record as record
from tests.harness.rigs.consensus import voted as voted
from tests.harness.rigs.consensus import weights_digest as weights_digest
from tests.harness.rigs.step.leader import HOSTED as HOSTED
from tests.harness.rigs.step.leader import LEADER as LEADER
from tests.harness.rigs.step.leader import OTHER as OTHER
from tests.harness.rigs.step.leader import PAIRED as PAIRED
from tests.harness.rigs.step.leader import QUESTIONS as QUESTIONS
from tests.harness.rigs.step.leader import SUCCESSOR as SUCCESSOR
from tests.harness.rigs.step.leader import THREE as THREE
from tests.harness.rigs.step.leader import Puppet as Puppet
from tests.harness.rigs.step.leader import Stage as Stage
from tests.harness.rigs.step.leader import U as U
from tests.harness.rigs.step.leader import broken as broken
from tests.harness.rigs.step.leader import by as by
from tests.harness.rigs.step.leader import no as no
from tests.harness.rigs.step.leader import silence as silence
from tests.harness.rigs.step.leader import stage as stage
from tests.harness.rigs.step.member import HELD as HELD
from tests.harness.rigs.step.member import RULES as RULES
from tests.harness.rigs.step.member import CountedPart as CountedPart
from tests.harness.rigs.step.member import FakeAverage as FakeAverage
from tests.harness.rigs.step.member import FakeLiveness as FakeLiveness
from tests.harness.rigs.step.member import MemberBench as MemberBench
from tests.harness.rigs.step.member import apply as apply
from tests.harness.rigs.step.member import brought_to as brought_to
from tests.harness.rigs.step.member import decide as decide
from tests.harness.rigs.step.member import prepare as prepare
from tests.harness.rigs.step.member import reconcile as reconcile
