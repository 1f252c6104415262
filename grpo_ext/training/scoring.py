"""From the rewards of a generation batch to its advantages: totals, penalties, the estimator."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ..objective.advantages import ScoredResponses, adv_traits, compute_advantages, on_last_token
from ..objective.masking import masked_sum
from ..objective.reward_shaping import kl_in_reward, overlong_penalty
from .config import GRPOVerlConfig
from .windows import Batch, gathered_rows, response_mask


class Sampled(NamedTuple):
    """A generation batch with its rewards, without advantages."""

    batch: Batch  # this rank's rows, with `completion_lengths` (rows,) in tokens
    rewards: Tensor  # (N, functions), all ranks' rows in the order of the prompts; NaN: a function returned None


class Outcomes(NamedTuple):
    """What the advantages are computed from."""

    rewards: Tensor  # (N,), all ranks', penalties included; NaN: no function scored the response
    without_kl: Tensor  # (N,), the same before the KL was taken off
    kl_penalty: Tensor | None  # (B, T), this rank's
    metrics: dict[str, float]


class Scorer:
    """Turns rewards into advantages as verl's trainer does: punishment of length, KL, estimator.

    Every rank gets the same outcomes and advantages of all rows; call each method on every rank.

    Attributes:
        needs_baseline: whether the estimator compares with the reward of a greedy response.
    """

    def __init__(self, args: GRPOVerlConfig, reward_weights: Tensor, accelerator: Accelerator):
        self._args, self._weights, self._accelerator = args, reward_weights, accelerator
        self._config = args.advantage_config()
        self._traits = adv_traits(self._config.adv_estimator)
        self.needs_baseline = self._traits.needs_baseline
        self.load_state(None)

    def total(self, rewards: Tensor) -> Tensor:
        """The weighted sum of the functions' rewards `(N, functions)`, `(N,)`; NaN where all returned `None`."""
        total = (rewards * self._weights.to(rewards.device)).nansum(1)
        return torch.where(rewards.isnan().all(1), torch.nan, total)

    def outcomes(self, sampled: Sampled, old_log_probs: Callable[[], Tensor], *, train: bool) -> Outcomes:
        """The total rewards less what length and the KL to the reference cost.

        Args:
            sampled: the batch, with `ref_per_token_logps` if the KL counts.
            old_log_probs: gives the policy's log-probs `(B, T)`, nats, where the batch has none.
            train: whether an adaptive coefficient moves.

        Raises:
            ValueError: the KL is not finite.
        """
        rewards, metrics = self.total(sampled.rewards), {}
        if self._args.overlong_buffer_len is not None:
            penalty = self._overlong_penalty(self._gathered(sampled.batch["completion_lengths"]))
            rewards = rewards + penalty
            metrics["reward_overlong/mean"] = penalty.mean().item()
            metrics["reward_overlong/fraction"] = (penalty < 0).float().mean().item()
        if not self._args.use_kl_in_reward:
            return Outcomes(rewards, rewards, None, metrics)
        penalty, known = self._kl_penalty(sampled.batch, old_log_probs, train)
        after = rewards - self._gathered(penalty.sum(1)).to(rewards.dtype)
        return Outcomes(after, rewards, penalty, metrics | known)

    def baselines(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """The total rewards of greedy responses, less what their length costs; the KL costs them nothing, as in verl.

        Args:
            rewards: `(prompts, functions)`.
            lengths: `(prompts,)`, tokens.

        Returns:
            `(prompts,)`; NaN: no function scored the response.
        """
        total = self.total(rewards)
        return total if self._args.overlong_buffer_len is None else total + self._overlong_penalty(lengths)

    def advantages(
        self, sampled: Sampled, outcomes: Outcomes, num_generations: int, baselines: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The estimator's advantages.

        Args:
            sampled: the batch; its mask as it is now.
            outcomes: of the batch.
            num_generations: responses per prompt.
            baselines: `(N,)`, the reward of the greedy response to each row's prompt; NaN: none.

        Returns:
            Those of this rank's rows, `(B,)` or `(B, T)`; and one number for each of all ranks' rows, `(N,)`: the
            mean over the row's valid tokens.

        Raises:
            ValueError: as `compute_advantages`.
        """
        mask = response_mask(sampled.batch)
        rows, width = mask.shape
        if self._traits.rewards_alone:  # no mask needs to be gathered
            all_masks = torch.ones_like(outcomes.rewards, dtype=torch.bool)[:, None]
        else:
            all_masks = self._gathered(mask.to(torch.uint8)).bool()
        responses = ScoredResponses(
            rewards=outcomes.rewards,
            response_mask=all_masks,
            num_generations=num_generations,
            token_level_rewards=self._token_level_rewards(outcomes, all_masks),
            rewards_per_func=sampled.rewards,
            reward_weights=self._weights.to(sampled.rewards.device),
            reward_baselines=baselines,
        )
        advantages = compute_advantages(responses, self._config)
        first = self._accelerator.process_index * rows
        mine = advantages[first : first + rows]
        if advantages.ndim == 1:
            return mine, advantages
        return mine[:, :width].contiguous(), masked_sum(advantages, all_masks, dim=-1) / all_masks.sum(1).clamp(min=1)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps: the coefficient of the KL in the reward; the same on every rank."""
        return self._controller.state() if self._args.use_kl_in_reward else None

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's; `None`: start anew.

        Raises:
            ValueError: the checkpoint's coefficient is of the other kind (`kl_ctrl`).
        """
        self._controller = self._args.kl_control().controller()
        if state is not None and self._args.use_kl_in_reward:
            self._controller.load_state(state)

    def _overlong_penalty(self, lengths: Tensor) -> Tensor:
        return overlong_penalty(
            lengths,
            self._args.max_completion_length,
            self._args.overlong_buffer_len,
            self._args.overlong_buffer_penalty_factor,
        )

    def _token_level_rewards(self, outcomes: Outcomes, all_masks: Tensor) -> Tensor | None:
        """`(N, T)`, where the KL makes them more than the outcome on the last valid token."""
        if not self._traits.per_token or outcomes.kl_penalty is None:
            return None
        return on_last_token(outcomes.without_kl, all_masks) - self._gathered(outcomes.kl_penalty)

    def _kl_penalty(
        self, batch: Batch, old_log_probs: Callable[[], Tensor], train: bool
    ) -> tuple[Tensor, dict[str, float]]:
        old = batch.get("old_per_token_logps")
        coefficient = self._controller.value
        penalty, kl = kl_in_reward(
            old_log_probs() if old is None else old,
            batch["ref_per_token_logps"],
            response_mask(batch),
            kl_penalty=self._args.kl_penalty,
            kl_coef=coefficient,
        )
        # Added up on every rank alike, so that an adaptive coefficient is the same everywhere to the last bit
        rows = kl.count * self._accelerator.num_processes
        current = sum(self._accelerator.gather(kl.total[None]).tolist()) / rows
        if not math.isfinite(current):
            raise ValueError(
                f"the KL to the reference is {current} and cannot be taken off the rewards; check the "
                f"log-probabilities of the policy and of the reference"
            )
        if train:
            self._controller.update(current, rows)
        return penalty, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}

    def _gathered(self, rows: Tensor) -> Tensor:
        """All ranks' rows, `(N,)` or `(N, T)` with the longest rank's T."""
        return gathered_rows("completion", rows, self._accelerator)
