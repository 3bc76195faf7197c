"""Runs planned pipeline stages on devices, by the schedules of `torch.distributed.pipelining`."""

from .lost_ranks import reaching
from .mailbox import Inbox, LocalExchange, Mailbox, Outbox
from .p2p import P2PInbox, P2PLink, P2POutbox, PendingSends
from .pipeline import PipelineRank
from .results import Results
from .single_process import SingleProcessPipeline
from .stage import Stage, StageMailboxes
from .worker import StageWorker

__all__ = [
    "Inbox",
    "LocalExchange",
    "Mailbox",
    "Outbox",
    "P2PInbox",
    "P2PLink",
    "P2POutbox",
    "PendingSends",
    "PipelineRank",
    "Results",
    "SingleProcessPipeline",
    "Stage",
    "StageMailboxes",
    "StageWorker",
    "reaching",
]
