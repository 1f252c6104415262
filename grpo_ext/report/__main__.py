"""The command line of the run report: `python -m grpo_ext.report RUN [RUN ...] [--output FILE]`."""

import argparse
import sys

from .markup import times
from .page import write_report
from .runs import read_runs


def main(arguments: list[str] | None = None) -> None:
    """The command line; `arguments` stand for `sys.argv[1:]`."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_ext.report",
        description="Write one HTML page about one or several training runs: curves, settings, completions, warnings.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run's folder (log.jsonl, or TRL's trainer_state.json in it or in its last checkpoint), or such a file",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the page; default: report.html, of one run in its folder, of several in the current folder",
    )
    given = parser.parse_args(arguments)
    try:
        runs = read_runs(given.runs)
        page = write_report(runs, given.output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for run in runs:
        for note in run.notes:
            print(f"{run.label}: {note}", file=sys.stderr)
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB, {times(len(runs), 'run')}")


if __name__ == "__main__":
    main()
