"""Pipelines on devices: stages of planned programs, run by the schedules of `torch.distributed.pipelining`."""

from .channel import Channel, ChannelInbox, ChannelOutbox
from .pipeline import PipelineRank, StagePart
from .post import Inbox, Locker, Outbox, Post
from .results import Results
from .stage import Boxes, Stage
from .worker import StageWorker

__all__ = [
    "Boxes",
    "Channel",
    "ChannelInbox",
    "ChannelOutbox",
    "Inbox",
    "Locker",
    "Outbox",
    "PipelineRank",
    "Post",
    "Results",
    "Stage",
    "StagePart",
    "StageWorker",
]
