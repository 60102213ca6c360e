"""The clouds that can be asked, by name."""

from __future__ import annotations

from typing import Protocol

from peers.preemption.aws import AwsSource
from peers.preemption.azure import AzureSource
from peers.preemption.choice import Cloud, MetadataUrl
from peers.preemption.gcp import GcpSource
from peers.preemption.http import MetadataServer
from peers.preemption.source import NoticeSource
from swarm.clock import Clock


class CloudSource(NoticeSource, Protocol):
    """A cloud's metadata server."""

    async def is_here(self) -> bool:
        """Whether this machine runs in that cloud: by an answer that only its server gives, never by a connection
        alone (addresses like theirs are served elsewhere too). At most ANSWER_S seconds; never raises."""


def cloud_source(cloud: Cloud, url: MetadataUrl, clock: Clock) -> CloudSource:
    """The source of one cloud at ``url``."""
    server = MetadataServer(url)
    match cloud:
        case "aws":
            return AwsSource(server, clock)
        case "gcp":
            return GcpSource(server)
        case "azure":
            return AzureSource(server, clock)
