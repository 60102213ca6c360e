"""The rig of ``swarm.pipeline``: real replicas and a real trainer with cheap parts, watched and broken.

crew = await Crew.of([[A0, A1], [B0, B1]], pace=quick())  # a trainer and its replicas, in ``crew.py``
crew.strike(0, "backward", crew.kill)
leader = await crew.feed(4)

scene = ReplicaScene()  # one replica among neighbours that take notes, in ``scene.py``
await scene.open()
await scene.there(x=3.0)
"""

from __future__ import annotations

from tests.harness.rigs.clocks import DialClock as DialClock
from tests.harness.rigs.clocks import FakeClock as FakeClock
from tests.harness.rigs.clocks import HandClock as HandClock
from tests.harness.rigs.clocks import LoopClock as LoopClock
from tests.harness.rigs.clocks import stop as stop
from tests.harness.rigs.clocks import turns as turns
from tests.harness.rigs.common import RUN as RUN
from tests.harness.rigs.common import EventList as EventList
from tests.harness.rigs.common import InlineDevice as InlineDevice
from tests.harness.rigs.common import sign as sign
from tests.harness.rigs.common import verify as verify
from tests.harness.rigs.pipeline.crew import PHASES as PHASES
from tests.harness.rigs.pipeline.crew import Crew as Crew
from tests.harness.rigs.pipeline.crew import quick as quick
from tests.harness.rigs.pipeline.crew import works as works
from tests.harness.rigs.pipeline.parts import ACTIVATION as ACTIVATION
from tests.harness.rigs.pipeline.parts import ACTIVATION_BYTES as ACTIVATION_BYTES
from tests.harness.rigs.pipeline.parts import BY_KIND as BY_KIND
from tests.harness.rigs.pipeline.parts import CONTEXT as CONTEXT
from tests.harness.rigs.pipeline.parts import RPCS as RPCS
from tests.harness.rigs.pipeline.parts import THIEF as THIEF
from tests.harness.rigs.pipeline.parts import TOKEN_BYTES as TOKEN_BYTES
from tests.harness.rigs.pipeline.parts import TOKENS as TOKENS
from tests.harness.rigs.pipeline.parts import TRAINER as TRAINER
from tests.harness.rigs.pipeline.parts import CheapPart as CheapPart
from tests.harness.rigs.pipeline.parts import FakeGraph as FakeGraph
from tests.harness.rigs.pipeline.parts import Mailbox as Mailbox
from tests.harness.rigs.pipeline.parts import failing as failing
from tests.harness.rigs.pipeline.parts import microbatch as microbatch
from tests.harness.rigs.pipeline.parts import specs as specs
from tests.harness.rigs.pipeline.parts import tensor as tensor
from tests.harness.rigs.pipeline.parts import token_ids as token_ids
from tests.harness.rigs.pipeline.parts import value as value
from tests.harness.rigs.pipeline.scene import ALIEN as ALIEN
from tests.harness.rigs.pipeline.scene import DOWN as DOWN
from tests.harness.rigs.pipeline.scene import ME as ME
from tests.harness.rigs.pipeline.scene import ROUTE as ROUTE
from tests.harness.rigs.pipeline.scene import UP as UP
from tests.harness.rigs.pipeline.scene import ReplicaScene as ReplicaScene
from tests.harness.rigs.pipeline.scene import chosen as chosen
from tests.harness.rigs.pipeline.scene import sealed as sealed
from tests.harness.rigs.pipeline.sides import FakeBatch as FakeBatch
from tests.harness.rigs.pipeline.sides import FakeLeader as FakeLeader
from tests.harness.rigs.pipeline.sides import FakeSource as FakeSource
from tests.harness.rigs.pipeline.sides import Replica as Replica
from tests.harness.rigs.pipeline.sides import TrainerSide as TrainerSide
from tests.harness.rigs.pipeline.sides import enter as enter
from tests.harness.rigs.pipeline.sides import places as places
from tests.harness.rigs.pipeline.sides import seals as seals
from tests.harness.rigs.pipeline.sides import working as working
