"""Advantages from the rewards of whole responses, by the name of their estimator.

Rows come in the order of the prompts: `num_generations` consecutive rows are one group. verl's estimators, with four
rules of ours:

- A row without a reward (NaN) is left out of the statistics of its group and of the batch, and gets 0.
- Where an estimator compares the responses of a group, a group of several with fewer than two scored rows has nothing
  to compare and counts as having none; a group of one (`num_generations=1`) keeps its reward, as in verl.
- There, rewards that are all equal differ from their baseline by exactly 0, whatever the float noise of a mean (README,
  departure 5); so do equal values from the mean of the batch in whitening.
- Nothing outside the mask is read, and advantages there are 0.

*Whitening* is `(x - mean) / sqrt(var + 1e-8)` over the valid tokens of all rows, with the unbiased variance; of fewer
than two tokens it is 0 (verl 0.9.1, `torch_functional.masked_whiten`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .config import is_number

_STD_EPS = 1e-6  # verl's; TRL has 1e-4
_VARIANCE_EPS = 1e-8


@dataclass(frozen=True)
class ScoredResponses:
    """All ranks' responses with their rewards, in the order of the prompts.

    Attributes:
        rewards: `(N,)` outcome of each response, per-token penalties included. NaN: no reward.
        response_mask: `(N, T)`, 1 where a token is trained on.
        num_generations: responses per prompt.
        token_level_rewards: `(N, T)` reward of each token, for estimators with an advantage per token; `None`: the
            outcome sits on the last valid token (`on_last_token`).
        rewards_per_func: `(N, F)`, the parts of the reward before weighting, for `gdpo`; NaN: that part is missing.
        reward_weights: `(F,)`; `None`: ones.
        reward_baselines: `(N,)`, the reward of the greedy response to the same prompt, for `remax`. NaN: none.

    Raises:
        ValueError: a shape or dtype that does not fit; names the tensor and both shapes.
    """

    rewards: Tensor
    response_mask: Tensor
    num_generations: int
    token_level_rewards: Tensor | None = None
    rewards_per_func: Tensor | None = None
    reward_weights: Tensor | None = None
    reward_baselines: Tensor | None = None

    def __post_init__(self):
        _require_groups(self.rewards, self.num_generations)
        if not self.rewards.is_floating_point():
            raise ValueError(f"rewards are {self.rewards.dtype}; give floats, where NaN is a response without a reward")
        rows = len(self.rewards)
        if self.response_mask.ndim != 2 or len(self.response_mask) != rows:
            raise ValueError(
                f"response_mask has shape {tuple(self.response_mask.shape)}, expected ({rows}, T) for {rows} rewards"
            )
        parts = None if self.rewards_per_func is None else self.rewards_per_func.shape[-1:]
        if self.reward_weights is not None and parts is None:
            raise ValueError("reward_weights are given without rewards_per_func; give both or neither")
        for name, shape in (
            ("token_level_rewards", self.response_mask.shape),
            ("rewards_per_func", (rows, *(parts or ()))),
            ("reward_weights", parts),
            ("reward_baselines", (rows,)),
        ):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != torch.Size(shape):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


AdvEstimator = Callable[..., Tensor]
ADV_ESTIMATORS: dict[str, AdvEstimator] = {}


@dataclass(frozen=True)
class AdvTraits:
    """What must be known of an estimator beside its formula.

    Attributes:
        needs_several: it refuses `num_generations=1`.
        per_token: its advantages are `(N, T)`; else one per response, `(N,)`, for all its tokens.
        batch_wide: its statistics span the batch, so that the rows of all ranks must be there.
        needs_baseline: it reads `reward_baselines`.
        rewards_alone: it reads nothing of the tokens, so that `response_mask` may be anything that broadcasts.
        keys: settings of `AdvantageConfig` that it reads; `None`: unknown.
    """

    needs_several: bool = False
    per_token: bool = False
    batch_wide: bool = False
    needs_baseline: bool = False
    rewards_alone: bool = False
    keys: tuple[str, ...] | None = None


_TRAITS: dict[str, AdvTraits] = {}


def adv_traits(name: str) -> AdvTraits:
    """Those of a registered estimator; the defaults for one that was put into `ADV_ESTIMATORS` by hand."""
    return _TRAITS.get(name, AdvTraits())


def register_adv_est(name: str, **known) -> Callable[[AdvEstimator], AdvEstimator]:
    """Make an estimator available as `AdvantageConfig(adv_estimator=name)`; a decorator.

    The decorated function is called as `f(responses, config)` with `ScoredResponses` and the `AdvantageConfig`, and
    returns `(N,)`, or `(N, T)` with `per_token=True`. The tensors it gets are float64 (float32 where there is none) and
    finite or NaN, `response_mask` is boolean and, with `per_token=True`, `token_level_rewards` are there, 0 outside
    the mask and in rows without a reward. Zeros in such rows and the dtype follow without it.

    Args:
        name: the new name.
        known: the fields of `AdvTraits`; those left out have their defaults.

    Raises:
        ValueError: the name is taken.
        TypeError: the name is not text, as when the parentheses are left out; or `known` has another field.

    Source: verl 0.9.1, `core_algos.register_adv_est`.
    """
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f'register_adv_est takes a name, got {name!r}; write @register_adv_est("name")')
    traits = AdvTraits(**known)

    def register(function: AdvEstimator) -> AdvEstimator:
        if name in ADV_ESTIMATORS:
            raise ValueError(f"advantage estimator {name!r} is already registered; choose another name")
        ADV_ESTIMATORS[name] = function
        _TRAITS[name] = traits
        return function

    return register


@dataclass(frozen=True)
class AdvantageConfig:
    """verl's `algorithm` keys that make advantages out of rewards.

    Attributes:
        adv_estimator: name in `ADV_ESTIMATORS`.
        norm_adv_by_std_in_grpo: whether `grpo`, `grpo_passk` and `gdpo` divide by the group's standard deviation.
        gamma: discount per valid token, in (0, 1], of `reinforce_plus_plus`.

    Raises:
        ValueError: names the setting, its value and the remedy; also for a setting that the estimator does not read.
    """

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    gamma: float = 1.0

    def __post_init__(self):
        if self.adv_estimator not in tuple(ADV_ESTIMATORS):
            raise ValueError(
                f"adv_estimator={self.adv_estimator!r} is unknown; choose one of {', '.join(ADV_ESTIMATORS)}"
            )
        if not isinstance(self.norm_adv_by_std_in_grpo, bool):
            raise ValueError(f"norm_adv_by_std_in_grpo={self.norm_adv_by_std_in_grpo!r} must be True or False")
        if not is_number(self.gamma) or not 0 < self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma!r} must be a number in (0, 1]; 1.0 does not discount")
        read = adv_traits(self.adv_estimator).keys
        for name, default in (("norm_adv_by_std_in_grpo", True), ("gamma", 1.0)):
            value = getattr(self, name)
            if value != default and read is not None and name not in read:
                readers = [known for known, traits in _TRAITS.items() if name in (traits.keys or ())]
                raise ValueError(
                    f"{name}={value!r} has no effect with adv_estimator={self.adv_estimator!r}; leave it at {default}, "
                    f"or choose one of {', '.join(readers)}"
                )


def compute_advantages(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """Advantages by the estimator that the config names.

    Args:
        responses: all ranks' rows; values outside the mask are never read.
        config: the estimator and its settings.

    Returns:
        `(N,)`, one per response, or `(N, T)` from an estimator per token; finite, in the dtype of `rewards`, computed
        in float64 where there is one. 0 in rows without a reward and, per token, outside the mask.

    Raises:
        ValueError: a value that is read is infinite, or NaN where that says nothing; too few generations; baselines
            that are missing; an estimator's output of another shape, or not finite.

    Source: verl 0.9.1, `ray_trainer.compute_advantage`.
    """
    name = config.adv_estimator
    traits = adv_traits(name)
    if traits.needs_several and responses.num_generations < 2:
        raise ValueError(
            f"adv_estimator={name!r} compares the responses to one prompt; set num_generations to 2 or more (now "
            f"{responses.num_generations})"
        )
    if traits.needs_baseline and responses.reward_baselines is None:
        raise ValueError(f"adv_estimator={name!r} needs reward_baselines: the reward of a greedy response per prompt")
    wide = _checked_and_widened(responses, traits)
    advantages = ADV_ESTIMATORS[name](wide, config)
    read = ~wide.rewards.isnan()
    if traits.per_token:
        read = read[:, None] & wide.response_mask
    if not isinstance(advantages, Tensor) or advantages.shape != read.shape:
        got = f"shape {tuple(advantages.shape)}" if isinstance(advantages, Tensor) else f"a {type(advantages).__name__}"
        raise ValueError(
            f"advantage estimator {name!r} returned {got}, expected {tuple(read.shape)}: one number per "
            f"{'token' if traits.per_token else 'response'} (per_token={traits.per_token})"
        )
    advantages = torch.where(read, advantages, advantages.new_zeros(())).to(responses.rewards.dtype)
    if not torch.isfinite(advantages).all():
        raise ValueError(f"advantage estimator {name!r} returned an infinity or NaN for finite rewards")
    return advantages


def on_last_token(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Rewards `(N,)` as rewards per token `(N, T)`: each on the last valid token of its row, if there is one.

    verl has it on the last token of the response, where a mask that ends with a tool's output drops it.
    """
    mask = response_mask.bool()
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, rewards[:, None], rewards.new_zeros(()))


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
    _require_groups(rewards, num_generations)
    groups = _by_group(_finite_or_nan("rewards", _widened(rewards)), num_generations)
    return _normalised(groups, by_std=norm_adv_by_std_in_grpo).view(-1).to(rewards.dtype)


@register_adv_est("grpo", rewards_alone=True, keys=("norm_adv_by_std_in_grpo",))
def grpo(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """`grpo_advantage`."""
    groups = _by_group(responses.rewards, responses.num_generations)
    return _normalised(groups, by_std=config.norm_adv_by_std_in_grpo).view(-1)


@register_adv_est("grpo_passk", rewards_alone=True, needs_several=True, keys=("norm_adv_by_std_in_grpo",))
def grpo_passk(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """The best response of a group gets its lead over the second, `(r_1 - r_2) / (std + 1e-6)`; all others get 0.

    Sources: Chow et al. 2025, arXiv:2503.19595; verl 0.9.1, `core_algos.compute_grpo_passk_outcome_advantage`.
    """
    groups = _by_group(responses.rewards, responses.num_generations)
    best = torch.where(groups.scored, groups.rewards, groups.rewards.new_tensor(-torch.inf)).topk(2, dim=-1)
    lead = torch.where(groups.differ, best.values[:, :1] - best.values[:, 1:], groups.rewards.new_zeros(()))
    if config.norm_adv_by_std_in_grpo:
        lead = lead / (_std(groups, _centered(groups)) + _STD_EPS)
    return torch.zeros_like(groups.rewards).scatter(-1, best.indices[:, :1], lead).view(-1)


@register_adv_est("rloo", rewards_alone=True, keys=())
def rloo(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """The reward minus the mean of the *other* rewards of its group, `(r - mean) * n / (n - 1)`.

    Sources: Ahmadian et al. 2024, arXiv:2402.14740; verl 0.9.1, `core_algos.compute_rloo_outcome_advantage`.
    """
    groups = _by_group(responses.rewards, responses.num_generations)
    return (_centered(groups) * groups.count / (groups.count - 1).clamp(min=1)).view(-1)


@register_adv_est("opo", keys=())
def opo(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """The reward minus the mean of its group weighted by length, `sum(tokens * r) / sum(tokens)`, in valid tokens.

    Sources: Hao et al. 2025, arXiv:2505.23585; verl 0.9.1, `core_algos.compute_opo_outcome_advantage`.
    """
    groups = _by_group(responses.rewards, responses.num_generations)
    tokens = responses.response_mask.sum(-1).view_as(groups.scored) * groups.scored
    baseline = (tokens * groups.rewards).sum(-1, keepdim=True) / tokens.sum(-1, keepdim=True).clamp(min=1)
    return _centered(groups, baseline).view(-1)


@register_adv_est("gpg", rewards_alone=True, batch_wide=True, keys=())
def gpg(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """`alpha * (r - mean)`, where `alpha` is the number of scored rows over that of rewards other than 0, in the batch.

    Sources: Chu et al. 2025, arXiv:2504.02546; verl 0.9.1, `core_algos.compute_gpg_outcome_advantage`.
    """
    groups = _by_group(responses.rewards, responses.num_generations)
    alpha = groups.scored.sum() / torch.count_nonzero(groups.rewards).clamp(min=1).to(groups.rewards.dtype)
    return (alpha * _centered(groups)).view(-1)


@register_adv_est("reinforce_plus_plus_baseline", batch_wide=True, keys=())
def reinforce_plus_plus_baseline(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """The reward minus the mean of its group, then whitened.

    Sources: Hu et al. 2025, arXiv:2501.03262; verl 0.9.1,
    `core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage`.
    """
    groups = _by_group(responses.rewards, responses.num_generations)
    tokens = responses.response_mask.sum(-1) * groups.scored.view(-1)
    return _whitened(_centered(groups).view(-1), tokens)


@register_adv_est("gdpo", batch_wide=True, keys=("norm_adv_by_std_in_grpo",))
def gdpo(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """Each part of the reward normalised in its group on its own (as `grpo`), the weighted sum of them whitened.

    A part that a row lacks adds 0 to it. Without `rewards_per_func` the outcome is the only part; with them, what
    `rewards` hold beside (KL or length penalties) is not seen, as in verl: give it as a part.

    Sources: Liu et al. 2026, arXiv:2601.05242; verl 0.9.1, `core_algos.compute_gdpo_outcome_advantage`.
    """
    rewards, parts = responses.rewards, responses.rewards_per_func
    parts = rewards[None] if parts is None else torch.where(rewards.isnan(), rewards, parts.T)
    weights = parts.new_ones(len(parts)) if responses.reward_weights is None else responses.reward_weights
    groups = _by_group(parts.reshape(-1), responses.num_generations)
    total = (weights[:, None] * _normalised(groups, by_std=config.norm_adv_by_std_in_grpo).view_as(parts)).sum(0)
    compared = groups.scored.view_as(parts).any(0)
    return _whitened(total, responses.response_mask.sum(-1) * compared)


@register_adv_est("reinforce_plus_plus", per_token=True, batch_wide=True, keys=("gamma",))
def reinforce_plus_plus(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """The discounted sum of the rewards from each token on, `G_t = r_t + gamma * G_next`, whitened; no groups.

    `next` is the next valid token: what lies between, a tool's output, does not discount.

    Sources: Hu et al. 2025, arXiv:2501.03262; verl 0.9.1,
    `core_algos.compute_reinforce_plus_plus_outcome_advantage`.
    """
    returns = _rewards_to_go(responses, config.gamma)
    return _whitened(returns, responses.response_mask & ~responses.rewards.isnan()[:, None])


@register_adv_est("remax", per_token=True, needs_baseline=True, keys=())
def remax(responses: ScoredResponses, config: AdvantageConfig) -> Tensor:
    """The sum of the rewards from each token on, minus the reward of the greedy response to the same prompt.

    A row whose baseline is NaN has nothing to be compared with and gets 0.

    Sources: Li et al. 2023, arXiv:2310.10505; verl 0.9.1, `core_algos.compute_remax_outcome_advantage`.
    """
    lead = _rewards_to_go(responses, gamma=1.0) - responses.reward_baselines[:, None]
    return torch.where(lead.isnan(), lead.new_zeros(()), lead)


class _Groups(NamedTuple):
    """Rewards by group."""

    rewards: Tensor  # (groups, num_generations), 0 where there is none
    scored: Tensor  # (groups, num_generations), whether the reward counts
    count: Tensor  # (groups, 1), scored rows
    differ: Tensor  # (groups, 1), whether the rewards that count are not all equal


def _by_group(rewards: Tensor, num_generations: int) -> _Groups:
    groups = rewards.view(-1, num_generations)
    scored = ~groups.isnan()  # README, departure 6
    if num_generations > 1:
        scored = scored & (scored.sum(-1, keepdim=True) > 1)
    infinity = groups.new_tensor(torch.inf)
    highest = torch.where(scored, groups, -infinity).amax(-1, keepdim=True)
    lowest = torch.where(scored, groups, infinity).amin(-1, keepdim=True)
    kept = torch.where(scored, groups, groups.new_zeros(()))
    return _Groups(kept, scored, scored.sum(-1, keepdim=True), highest > lowest)


def _centered(groups: _Groups, baseline: Tensor | None = None) -> Tensor:
    """Rewards minus their group's baseline (`None`: its mean); a group of one keeps its reward."""
    if groups.rewards.shape[-1] == 1:
        return groups.rewards
    if baseline is None:
        baseline = groups.rewards.sum(-1, keepdim=True) / groups.count.clamp(min=1)
    # The mean of equal floats need not equal them, and their tiny std would blow the noise up (README, departure 5)
    return torch.where(groups.scored & groups.differ, groups.rewards - baseline, groups.rewards.new_zeros(()))


def _std(groups: _Groups, centered: Tensor) -> Tensor:
    """The unbiased standard deviation of each group, `(groups, 1)`; 1 of a group of one, as in verl."""
    if groups.rewards.shape[-1] == 1:
        return torch.ones_like(groups.rewards)
    return (centered.square().sum(-1, keepdim=True) / (groups.count - 1).clamp(min=1)).sqrt()


def _normalised(groups: _Groups, *, by_std: bool) -> Tensor:
    centered = _centered(groups)
    return centered / (_std(groups, centered) + _STD_EPS) if by_std else centered


def _rewards_to_go(responses: ScoredResponses, gamma: float) -> Tensor:
    """`(N, T)`: at each valid token the discounted sum of the rewards from there on; elsewhere that of the next one."""
    to_go = responses.token_level_rewards
    discount = torch.where(responses.response_mask, gamma, to_go.new_ones(()))
    # Token t holds the sum over the next `step` tokens, and the discount across them; each round doubles the reach
    step, length = 1, to_go.shape[-1]
    while step < length:
        ahead = torch.nn.functional.pad(to_go[:, step:], (0, step))
        to_go = to_go + discount * ahead
        discount = discount * torch.nn.functional.pad(discount[:, step:], (0, step))
        step *= 2
    return to_go


def _whitened(values: Tensor, tokens: Tensor) -> Tensor:
    """Whitening, where each value stands for so many tokens; 0 where it stands for none."""
    if not values.numel():
        return values
    valid = tokens > 0
    tokens = tokens.to(values.dtype)
    count = tokens.sum()
    mean = torch.where(valid, tokens * values, values.new_zeros(())).sum() / count.clamp(min=1)
    centered = torch.where(valid, values - mean, values.new_zeros(()))
    variance = (tokens * centered.square()).sum() / (count - 1).clamp(min=1)
    infinity = values.new_tensor(torch.inf)
    differ = torch.where(valid, values, -infinity).amax() > torch.where(valid, values, infinity).amin()
    return torch.where(differ, centered * torch.rsqrt(variance + _VARIANCE_EPS), values.new_zeros(()))


def _require_groups(rewards: Tensor, num_generations: int) -> None:
    if rewards.ndim != 1 or num_generations < 1 or rewards.numel() % num_generations:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} do not form groups of num_generations={num_generations}"
        )


def _widened(x: Tensor) -> Tensor:
    # float64 where there is one: the square of 1e20 overflows float32
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def _finite_or_nan(name: str, x: Tensor) -> Tensor:
    if torch.isinf(x).any():
        raise ValueError(f"a value of {name} is infinite; it must be finite, or NaN for a response without one")
    return x


def _checked_and_widened(responses: ScoredResponses, traits: AdvTraits) -> ScoredResponses:
    """What `register_adv_est` promises to an estimator."""
    rewards = _finite_or_nan("rewards", _widened(responses.rewards))
    mask = responses.response_mask.bool()
    wide = {"rewards": rewards, "response_mask": mask, "token_level_rewards": None}
    for name in ("rewards_per_func", "reward_weights", "reward_baselines"):
        tensor = getattr(responses, name)
        if tensor is not None:
            wide[name] = _finite_or_nan(name, _widened(tensor))
    if responses.reward_weights is not None and torch.isnan(wide["reward_weights"]).any():
        raise ValueError("a value of reward_weights is NaN; it must be finite")
    if traits.per_token:
        scored = mask & ~rewards.isnan()[:, None]
        tokens = responses.token_level_rewards
        tokens = on_last_token(rewards, mask) if tokens is None else _widened(tokens)
        tokens = torch.where(scored, tokens, tokens.new_zeros(()))
        if not torch.isfinite(tokens).all():
            raise ValueError("token_level_rewards are infinite or NaN at a valid token of a row that has a reward")
        wide["token_level_rewards"] = tokens
    return dataclasses.replace(responses, **wide)
