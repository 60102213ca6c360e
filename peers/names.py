"""Names that people can say to each other for peers that have none: always the same for the same peer id."""

from __future__ import annotations

import hashlib

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
