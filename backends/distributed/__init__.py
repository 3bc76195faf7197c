"""Pipelines on devices: planned stages, driven by the schedules of `torch.distributed.pipelining`."""

from .mailbox import Inbox, Locker, Mailbox, Outbox
from .p2p import Channel, ChannelInbox, ChannelOutbox, Departures
from .pipeline import PipelineRank
from .results import Results
from .single_process import PipelineAlone
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
    "Mailbox",
    "Outbox",
    "PipelineAlone",
    "PipelineRank",
    "Results",
    "Stage",
    "StageWorker",
]
