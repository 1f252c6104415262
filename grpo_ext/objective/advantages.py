"""Advantages of whole responses, from the rewards of their groups."""

import torch
from torch import Tensor

_STD_EPS = 1e-6  # verl's; TRL has 1e-4


def grpo_advantage(rewards: Tensor, num_generations: int, *, norm_adv_by_std_in_grpo: bool = True) -> Tensor:
    """Each reward against the other responses to its prompt: `(r - mean) / (std + 1e-6)`, with the unbiased std.

    Rows without a reward (NaN) are left out of their group's mean and std and get advantage 0. A group whose rewards
    are all equal has advantage exactly 0. A group of one keeps its reward, over `1 + 1e-6` as in verl; a larger group
    of which only one row has a reward has nothing to compare it with and gets 0.

    Args:
        rewards: `(N,)`, in the order of the prompts: `num_generations` consecutive rows are one group. NaN: no reward.
        num_generations: responses per prompt.
        norm_adv_by_std_in_grpo: `False` leaves out the division (Dr.GRPO, arXiv:2503.20783).

    Returns:
        `(N,)`, finite, in the dtype of `rewards`.

    Raises:
        ValueError: `N` is no multiple of `num_generations`, or a reward is infinite.

    Sources: Shao et al. 2024, arXiv:2402.03300; verl 0.9.1, `core_algos.compute_grpo_outcome_advantage`.
    """
    if rewards.ndim != 1 or num_generations < 1 or rewards.numel() % num_generations:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} do not form groups of num_generations={num_generations}"
        )
    given = rewards.dtype
    # float64 where there is one: the square of 1e20 overflows float32
    rewards = rewards.to(torch.float32 if rewards.device.type == "mps" else torch.float64)
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite; rewards must be finite, or NaN for a response without one")
    if num_generations == 1:
        alone = torch.nan_to_num(rewards, nan=0.0) / (1 + _STD_EPS if norm_adv_by_std_in_grpo else 1)
        return alone.to(given)
    groups = rewards.view(-1, num_generations)
    scored = ~groups.isnan()  # README, departure 6
    count = scored.sum(-1, keepdim=True)
    kept = torch.where(scored, groups, groups.new_zeros(()))
    mean = kept.sum(-1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(scored, groups - mean, groups.new_zeros(()))
    if norm_adv_by_std_in_grpo:
        std = (centered.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        advantages = centered / (std + _STD_EPS)
    else:
        advantages = centered
    # The mean of equal floats need not equal them, and their tiny std would blow the noise up (README, departure 5)
    infinity = groups.new_tensor(float("inf"))
    highest = torch.where(scored, groups, -infinity).amax(-1, keepdim=True)
    lowest = torch.where(scored, groups, infinity).amin(-1, keepdim=True)
    return torch.where(highest > lowest, advantages, advantages.new_zeros(())).view(-1).to(given)
