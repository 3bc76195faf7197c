"""Pipelines on devices: planned stages, driven by the schedules of `torch.distributed.pipelining`."""

from .alone import PipelineAlone
from .channel import Channel, ChannelInbox, ChannelOutbox, Departures
from .pipeline import PipelineRank
from .post import Inbox, Locker, Outbox, Post
from .results import Results
from .stage import Boxes, Stage
from .worker import StageWorker

__all__ = [
    "Boxes",
    "Channel",
    "ChannelInbox",
    "ChannelOutbox",
    "Departures",
    "Inbox",
    "Locker",
    "Outbox",
    "PipelineAlone",
    "PipelineRank",
    "Post",
    "Results",
    "Stage",
    "StageWorker",
]
