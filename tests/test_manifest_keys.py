"""A key of the manifest that nobody reads is a promise that nobody keeps."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.config import Manifest
from swarm.schema import Section
from tests.harness.house import attributes_read
from tests.harness.sources import our_sources, parse


def test_attributes_read_of_a_toy_leaves_out_what_is_only_written() -> None:
    assert attributes_read([parse("toy", "self.written = config.read.deeper")]) == {"read", "deeper"}


def test_manifest_keys_are_all_read_beyond_their_validation() -> None:
    read = attributes_read(source for source in our_sources() if source.name != "swarm.config")
    by_the_run_id_alone = {"run.nonce"}
    keys = [key for key in _keys(Manifest) if key not in by_the_run_id_alone]
    assert [key for key in keys if key.rpartition(".")[2] not in read] == []


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
