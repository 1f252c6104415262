"""A policy loss of your own, chosen by its name from YAML like the built-in ones.

    python examples/custom_policy_loss.py --config examples/configs/custom_policy_loss.yaml

Aggregation, rollout weights, entropy, KL and the logs follow without it, and it is right however the batch is split.
"""

import torch
from train_gsm8k import main

from grpo_ext import register_policy_loss


@register_policy_loss("positive_only", proportional_to_advantage=True)
def positive_only(log_prob, old_log_prob, advantages, response_mask, *, config):
    """Learn from the better half of each group only: `-max(A, 0) min(r, 1 + high)` per token, with `r` the ratio."""
    ratio = (log_prob - old_log_prob).exp()
    loss = -advantages.clamp(min=0) * torch.clamp(ratio, max=1 + config.clip_high)
    return loss, {"actor/positive_fraction": (advantages > 0).float()}


if __name__ == "__main__":
    main()
