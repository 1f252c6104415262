"""The numbers a log may have: how each is called on the page, in what unit, beside which others."""

from typing import NamedTuple

from .runs import ACCURACY


class Meaning(NamedTuple):
    """A key's heading and the label of its axis."""

    title: str
    unit: str


KNOWN = {
    "reward": Meaning("Reward", "mean reward of a response"),
    ACCURACY: Meaning("Greedy accuracy", "share of problems"),
    "completions/mean_length": Meaning("Completion length", "tokens, mean"),
    "entropy": Meaning("Entropy", "nats per token"),
    "actor/ppo_kl": Meaning("KL to the old policy", "nats per token"),
    "actor/pg_clipfrac": Meaning("Clipped tokens", "share of tokens"),
    "clip_ratio/region_mean": Meaning("Clipped tokens (TRL)", "share of tokens"),
    "actor/pg_clipfrac_lower": Meaning("Dual-clipped tokens", "share of tokens"),
    "actor/pg_loss": Meaning("Policy loss", "loss"),
    "actor/kl_loss": Meaning("KL to the reference", "nats"),
    "kl": Meaning("KL to the reference (TRL)", "nats per token"),
    "grad_norm": Meaning("Gradient norm", "norm before clipping"),
    "perf/tokens_per_second": Meaning("Speed of the update", "tokens per second"),
    "actor/entropy_loss": Meaning("Entropy term", "nats"),
    "actor/kl_coef": Meaning("Coefficient of the KL term", "coefficient"),
    "actor/nonfinite_skips": Meaning("Steps skipped for a bad gradient", "steps so far"),
    "completions/clipped_ratio": Meaning("Responses cut at the length limit", "share of responses"),
    "frac_reward_zero_std": Meaning("Groups without a difference in reward", "share of groups"),
    "reward_std": Meaning("Spread of the rewards", "standard deviation"),
    "learning_rate": Meaning("Learning rate", "learning rate"),
    "loss": Meaning("Loss, all terms", "loss"),
    "num_tokens": Meaning("Tokens so far", "tokens"),
    "perf/padding_fraction": Meaning("Padding", "share of processed tokens"),
    "perf/skipped_row_fraction": Meaning("Rows without a backward", "share of rows"),
    "step_time": Meaning("Time of a step", "seconds"),
    "epoch": Meaning("Passes through the data", "epochs"),
}
# In this order, at the head of the page
MAIN = [*KNOWN][:13]
GROUPS = {  # prefix of a key: heading; in the order of the page
    "reward": "Rewards",
    "frac_reward": "Rewards",
    "completions/": "Completions",
    "actor/": "Policy update",
    "clip_ratio/": "Policy update",
    "loss": "Policy update",
    "learning_rate": "Policy update",
    "filter_groups/": "Filtered groups",
    "distillation/": "Distillation",
    "rollout_corr/": "Rollout correction",
    "sampling/": "Sampling against training",
    "perf/": "Speed",
    "step_time": "Speed",
    "num_tokens": "Speed",
    "eval": "Evaluation",
}
_UNITS = {  # end of a key: unit
    "/mean": "mean",
    "length": "tokens",
    "ratio": "share",
    "frac": "share",
    "fraction": "share",
    "accuracy": "share",
    "kl": "nats",
    "std": "standard deviation",
    "time": "seconds",
    "seconds": "seconds",
    "runtime": "seconds",
}


def meaning(key: str) -> Meaning:
    """A key's heading and unit; of one that is not known the key itself."""
    if key in KNOWN:
        return KNOWN[key]
    unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), "value")
    return Meaning(key, unit)


def grouped(keys: set[str]) -> dict[str, list[str]]:
    """Keys by heading: the main ones, the known groups, other prefixes, the rest."""
    groups = {"": [key for key in MAIN if key in keys]}
    order = [*dict.fromkeys(GROUPS.values())]
    others: dict[str, list[str]] = {}
    # `perf/x` of an evaluation is `eval_perf/x`: an evaluation's first
    for key in sorted(keys - set(MAIN)):
        start = max((prefix for prefix in GROUPS if key.startswith(prefix)), key=len, default=None)
        heading = GROUPS[start] if start else key.split("/")[0] if "/" in key else "Other numbers"
        others.setdefault(heading, []).append(key)
    last = len(order)
    for heading in sorted(others, key=lambda h: (order.index(h) if h in order else last + (h == "Other numbers"), h)):
        groups[heading] = others[heading]
    return groups
