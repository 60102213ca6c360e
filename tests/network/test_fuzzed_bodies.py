"""A hundred thousand bodies of legal size: none is looked at for longer than its form allows, none ends in a bug."""

from __future__ import annotations

import pytest

from peers.chaos.strangers.bodies import AnyRpc, all_rpcs, frames, schema_of
from tests.harness.fuzzed_bodies import fields_of, problems_of

EACH, SEED = 1800, 2

pytestmark = [pytest.mark.nemesis, pytest.mark.timeout(3600)]


def test_fuzzed_bodies_are_a_hundred_thousand() -> None:
    assert len(all_rpcs()) * EACH >= 100_000


@pytest.mark.parametrize("rpc", all_rpcs(), ids=lambda rpc: rpc.name)
def test_errors_collected_for_a_body_of_any_legal_size_do_not_grow_with_it(rpc: AnyRpc) -> None:
    most = fields_of(schema_of(rpc.request))
    for packed in frames(rpc, EACH, SEED, most_bytes=256 << 10):
        assert problems_of(rpc, packed) <= most
