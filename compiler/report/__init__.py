"""Reports of a plan: a page of HTML, a trace for Perfetto, a snapshot of memory, a picture."""

from .front import front_of
from .measured import measured_trace
from .write_report import check_report, report, write_pipeline_report, write_report
from .written import read_memory

__all__ = [
    "check_report",
    "front_of",
    "measured_trace",
    "read_memory",
    "report",
    "write_pipeline_report",
    "write_report",
]
