"""A key of the manifest that nobody reads is a promise that nobody keeps."""

from __future__ import annotations

from swarm.config import Manifest
from swarm.schema import Section
from tests.harness.house import attributes_read
from tests.harness.sources import our_sources, parse


def test_attributes_read_of_a_toy_leaves_out_what_is_only_written() -> None:
    assert attributes_read([parse("toy", "self.written = config.read.deeper")]) == {"read", "deeper"}


def test_manifest_keys_are_all_read_beyond_their_validation() -> None:
    read = attributes_read(source for source in our_sources() if source.name != "swarm.config")
    unread = []
    for section, field in Manifest.model_fields.items():
        config = field.annotation
        assert isinstance(config, type)
        assert issubclass(config, Section)
        unread += [f"{section}.{key}" for key in config.model_fields if key not in read]
    assert unread == []
