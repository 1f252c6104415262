"""Rollout correction in the trainer: the sampler's log-probabilities against the trainer's, once per generation."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..objective import ObjectiveConfig
from ..objective.rollout_correction import (
    finish_rollout_metrics,
    rejection_mask,
    rollout_correction_metrics,
    rollout_correction_weights,
    weight_sums,
)
from .callbacks import MetricSums
from .config import GRPOVerlConfig
from .windows import response_mask

logger = logging.getLogger(__name__)

SAMPLER = "sampling_per_token_logps"


def require_sampler(args: GRPOVerlConfig, rollout_func: Callable | None) -> None:
    """Fail on a correction where nothing gives the sampler's log-probabilities.

    Raises:
        ValueError: names the setting, its value and what would give them.
    """
    if args.use_vllm or rollout_func is not None:
        return
    for name, asked in (
        ("rollout_is", args.rollout_is is not None),
        ("rollout_rs", args.rollout_rs is not None),
        ("policy_loss", args.policy_loss == "bypass_mode"),
    ):
        if asked:
            raise ValueError(
                f"{name}={getattr(args, name)!r} needs the sampler's log-probabilities, which use_vllm=True or a "
                f"rollout_func that returns them as 'logprobs' gives; set use_vllm, or drop {name}"
            )


class RolloutCorrector:
    """Puts weights and the tokens that pass the rejection into a generation batch, as `ObjectiveConfig` says.

    With `bypass_mode` the sampler's log-probs become the old ones and the loss does the rest.
    """

    def __init__(self, objective: ObjectiveConfig, accelerator: Accelerator):
        self._correction, self._bypass = objective.rollout_correction, objective.policy_loss == "bypass_mode"
        self._accelerator = accelerator
        self._warned = False

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return self._bypass or self._correction.active

    def apply(self, batch: dict[str, Any], old_log_probs: Callable[[], Tensor]) -> dict[str, float]:
        """Correct this rank's generation batch in place; call it on every rank.

        Args:
            batch: TRL's scored generation batch, with the sampler's log-probs.
            old_log_probs: gives the trainer's, `(B, T)`, where the batch has none.

        Returns:
            `rollout_corr/*` over all ranks; none in bypass mode, where the update measures them.

        Raises:
            ValueError: the sampler gave no log-probs.
        """
        sampler = batch.get(SAMPLER)
        if sampler is None:
            raise ValueError(
                "the rollout correction needs the sampler's log-probabilities, and the rollout has none; use vLLM, or "
                "a rollout_func that returns them as 'logprobs'"
            )
        mask = response_mask(batch)
        if self._bypass:
            known = ~sampler.isnan()
            if not self._warned and not bool(known.all()):
                self._warned = True
                logger.warning("tokens without a log-probability of the sampler are left out of the loss")
            batch["old_per_token_logps"] = torch.where(known, sampler, 0.0)
            keep_only(batch, mask * known)
            return {}
        old = batch.get("old_per_token_logps")
        old = old_log_probs() if old is None else old
        weights = rollout_correction_weights(old, sampler, mask, self._correction, mean=self._mean(old, sampler, mask))
        sums = MetricSums()
        sums.add(rollout_correction_metrics(old, sampler, mask, self._correction))
        batch.pop("importance_sampling_ratio", None)
        if weights is not None:
            batch["importance_sampling_ratio"] = weights.float()
        keep_only(batch, rejection_mask(old, sampler, mask, self._correction))
        return finish_rollout_metrics(sums.reduce(self._accelerator))

    def _mean(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor | None:
        """The weights' mean over all ranks, where they are divided by it."""
        if self._correction.rollout_is is None or not self._correction.rollout_is_batch_normalize:
            return None
        weights = rollout_correction_weights(old, sampler, mask, self._correction, mean=1)
        total, count = weight_sums(weights, mask, self._correction)
        total, count = self._accelerator.reduce(torch.stack([total.double(), count.double()]), reduction="sum")
        return total / count.clamp(min=1)


def keep_only(batch: dict[str, Any], mask: Tensor) -> None:
    """Train on the tokens under `mask` `(B, T)` only; attention still sees the others."""
    batch["tool_mask"] = mask.long()
