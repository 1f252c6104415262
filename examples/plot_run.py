"""Draw a run's reward and clip fractions: python examples/plot_run.py RUN [RUN ...]"""

import argparse
from pathlib import Path

from grpo_ext.training.logbook import read_log


def plot_run(log_path: Path, target: Path) -> Path:
    """Draw the reward and the two clip fractions of one run over its optimizer steps.

    Args:
        log_path: the run's log.jsonl.
        target: the image to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = read_log(log_path)

    def series(name: str) -> tuple[list[int], list[float]]:
        points = [(entry["step"], entry[name]) for entry in entries if entry.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    figure, (reward, clip) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    reward.plot(*series("reward"), marker=".")
    reward.set(xlabel="optimizer step", ylabel="mean reward of the responses", title="Reward")
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        clip.plot(*series(name), marker=".", label=name)
    clip.set(xlabel="optimizer step", ylabel="share of tokens", title="Clip fractions")
    clip.legend()
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, each with a log.jsonl")
    for run in parser.parse_args().runs:
        print(plot_run(run / "log.jsonl", run / "curves.png"))
