"""Reports made from logs: a table for the terminal, one HTML file for everything else."""

from mars.lab.report.command import ReportArgs, report_command
from mars.lab.report.page import render, write
from mars.lab.report.rates import read_rates
from mars.lab.report.runs import RunLog, load
from mars.lab.report.summary import Summary, summarise
from mars.lab.report.words import headline, table

__all__ = [
    "ReportArgs", "RunLog", "Summary", "headline", "load", "read_rates", "render",
    "report_command", "summarise", "table", "write",
]  # fmt: skip
