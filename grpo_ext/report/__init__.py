"""The run report: one HTML page of curves, settings, completions and warnings, of one run or several side by side.

Knows the files of a run (`log.jsonl`, `trainer_state.json`, `settings.json`, completions, ...) and nothing of torch, so
that a page is made in seconds, also of a run that goes on.
"""

from .page import write_report
from .runs import Run, read_run, read_runs

__all__ = ["Run", "read_run", "read_runs", "write_report"]
