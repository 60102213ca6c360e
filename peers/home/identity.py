"""The identity of a place, for people: who a peer will be before it starts, and the name that its peer id gives it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from peers.console.words import CommandError, command_name
from peers.control.choose import choose_any
from peers.exit_codes import EXIT_OK, EXIT_USAGE
from peers.home.places import KEY_FILE, PlaceInfo, list_places, take_place
from swarm.clock import SystemClock
from swarm.ids import PeerId
from swarm.network.libp2p.identity import load_or_create


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceIdentity:
    """A place, the peer id of its key, the peer's name (its own, or the one that the id gives), and the key file."""

    place: str
    peer: PeerId
    name: str
    key: Path


def show_identity(home: Path, wanted: str) -> PlaceIdentity:
    """The identity of the place or peer called ``wanted``; makes nothing.

    Raises CommandError when there is no such place or no key in it yet, and ConfigError for a key file that is no good.
    """
    if not list_places(home):
        raise _none_yet(home, wanted)
    place = choose_any(home, wanted, command="id")
    if not (place.path / KEY_FILE).is_file():
        raise _none_yet(home, place.name)
    return _identity_of(place)


def _identity_of(place: PlaceInfo) -> PlaceIdentity:
    key = place.path / KEY_FILE
    peer = load_or_create(key).peer
    name = place.state.name if place.state is not None and place.state.name else friendly_name(peer)
    return PlaceIdentity(place=place.name, peer=peer, name=name, key=key)


def show_identities(home: Path) -> list[PlaceIdentity]:
    """The identity of every place that has one; makes nothing. Raises CommandError when none has, ConfigError for a key
    file that is no good."""
    found = [
        _identity_of(place) for place in list_places(home) if not place.owner and (place.path / KEY_FILE).is_file()
    ]
    if not found:
        raise _none_yet(home, "1")
    return found


def only_identity(home: Path) -> PlaceIdentity:
    """The identity of the only place that has one. Raises CommandError when none has, and (exit code 2) when several
    have."""
    found = show_identities(home)
    if len(found) == 1:
        return found[0]
    raise CommandError(f"there are {len(found)} places here",
                    check="; ".join(f"{one.place}: {one.name}" for one in found),
                    next_=f"{command_name()} id --json --place {found[0].place}", exit_code=EXIT_USAGE)  # fmt: skip


def create_identity(home: Path, place: str) -> PlaceIdentity:
    """The identity of a place, made when there is none. Raises ConfigError when a running peer has the place and no
    key, when the name cannot be one, or when the disk refuses."""
    known = {one.name for one in list_places(home) if not one.owner and (one.path / KEY_FILE).is_file()}
    if place not in known:
        with take_place(home, place, clock=SystemClock()) as taken:
            load_or_create(taken.identity)
            taken.ended("its identity was made; no peer has run here yet", EXIT_OK)
    return show_identity(home, place)


def _none_yet(home: Path, wanted: str) -> CommandError:
    return CommandError(f"place {wanted} has no identity yet",
                     check=f"places are looked for in {home} (--home, SWARM_HOME)",
                     next_=f"{command_name()} id --place {wanted} --create, or start a peer there")  # fmt: skip


# --- friendly names --------------------------------------------------------------------------------------------------
# Names that people can say to each other, for peers that have none: always the same for the same peer id.


_ADJECTIVES = """
able agile airy alert amber ample aqua azure bold brave breezy bright brisk broad bronze calm candid casual cheery
chief civil clean clear clever close cool coral cosy crisp dapper daring deep deft dewy dry eager early earthy easy
elder even exact fair fancy fast fine firm fleet fond frank free fresh frosty full gentle glad gold good grand great
green hardy hasty hazel honest humble ideal indigo jade jolly keen kind large late lavish level light lilac little
lively lofty long loud lucky lunar mellow merry mighty mild misty modest mossy neat nimble noble north novel olive open
pale patient pearl placid plain polite prime proud prompt proper pure quick quiet rapid ready regal rich robust rosy
round ruby rustic sage sandy serene sharp shy silent silver sleek smart smooth snowy snug sober soft solar solid south
spry stable steady still stout sunny sure swift tall tame teal tender tidy topaz trim trusty upper urban valid velvet
vivid warm wary wise witty woolly young zesty
"""

_ANIMALS = """
adder albatross alpaca ant antelope auk badger barbel bass bat bear beaver bee beetle bison bittern boar bobcat bream
bunting buzzard camel caribou carp cat chamois chough cicada civet clam cobra cod condor coot cormorant cougar coyote
crab crane cricket crow cuckoo curlew deer dingo dipper dolphin donkey dove dragonfly duck dunlin eagle eel egret eider
elk ermine falcon ferret finch firefly fox frog gannet gazelle gecko gibbon giraffe goat goose goshawk grebe grouse
gull haddock hamster hare harrier hawk hedgehog heron herring hippo hoopoe hornet horse ibex ibis iguana impala jackal
jackdaw jay kestrel kite kiwi koala koi lark lemur leopard linnet lion lizard llama lobster loon lynx magpie mallard
marlin marmot marten martin mink mole moose moth mouse mule narwhal newt nightjar ocelot octopus oriole osprey ostrich
otter owl ox oyster panda panther parrot partridge peacock pelican penguin perch petrel pheasant pigeon pike plover
pony poodle puffin puma quail rabbit raccoon ram raven ray redstart reindeer robin rook salmon sandpiper seal shark
sheep shrew shrike siskin skate skua skylark snail snipe sparrow squid squirrel starling stoat stork swallow swan swift
tapir teal tench tern thrush tiger toad trout tuna turtle viper vole vulture walrus warbler weasel whale wigeon wolf
wombat wren yak zebra
"""
_HOW, _WHO = _ADJECTIVES.split(), _ANIMALS.split()


def friendly_name(peer: str) -> str:
    """Two plain words for a peer id, such as ``brave-otter``; a valid peer name.

    Some 30,000 pairs: two of a swarm's peers may share one, so it is for people and never a key.
    """
    number = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8], "big")
    rest, how = divmod(number, len(_HOW))
    return f"{_HOW[how]}-{_WHO[rest % len(_WHO)]}"
