"""On-policy distillation: a teacher scores the student's own tokens, and the student moves towards it."""

import math
import warnings
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import agg_metric
from .assembly import ppo_loss
from .config import BatchInfo, ObjectiveConfig, is_number
from .kl import KL_PENALTIES, REFERENCE_FREE_GRADIENT, kl_penalty
from .masking import compute_dtype, keep, masked_sum, require_token_shape
from .metrics import Metric, mean_metric

FORWARD_KL_TOPK = "forward_kl_topk"
DISTILLATION_LOSSES: tuple[str, ...] = (
    *(name for name in KL_PENALTIES if not name.endswith("+")),
    FORWARD_KL_TOPK,
)


class TopKScores(NamedTuple):
    """Both models at the teacher's k most likely tokens of each position, each `(B, T, K)`.

    Attributes:
        student_log_probs: nats, with gradient.
        teacher_log_probs: nats; `-inf` where the teacher named fewer than `K` tokens.
        overlap: whether the token is among the student's own k most likely; `None`: not known.
    """

    student_log_probs: Tensor
    teacher_log_probs: Tensor
    overlap: Tensor | None = None


class TopKTokens(NamedTuple):
    """What the top-k scores give per token, each `(B, T)`; all but `loss` without gradient."""

    loss: Tensor  # nats
    student_mass: Tensor  # probability of the student at the teacher's k tokens
    teacher_mass: Tensor  # probability of the teacher at them
    overlap_count: Tensor | None  # tokens that both models have among their k
    overlap_token_advantage: Tensor | None  # nats, mean of p_teacher (log p_student - log p_teacher) over these


@dataclass(frozen=True)
class DistillationConfig:
    """verl's `distillation.distillation_loss.*` keys, flat.

    Attributes:
        distillation_loss_mode: one of `DISTILLATION_LOSSES` (verl's `loss_mode`).
        distillation_topk: tokens of the teacher per position, for `forward_kl_topk` (verl's `topk`).
        use_task_rewards: whether the policy loss of the rewards is in the loss too (verl's `use_task_rewards`).
        use_policy_gradient: whether the negative distillation loss is an advantage for a clipped policy loss; else it
            is differentiated itself (verl's `use_policy_gradient`).
        distillation_loss_coef: weight beside the task rewards (verl's `distillation_loss_coef`).
        distillation_loss_max_clamp: nats, bound of the loss of a token on both sides; `None`: none (verl's
            `loss_max_clamp`).
        distillation_log_prob_min_clamp: nats, bound from below of both models' log-probs in `forward_kl_topk`; `None`:
            none (verl's `log_prob_min_clamp`). A token whose student log-prob lies below it has no gradient.
        distillation_clip_ratio_low: lower epsilon of the policy gradient's clip (verl's `clip_ratio_low`).
        distillation_clip_ratio_high: upper epsilon of it (verl's `clip_ratio_high`). The dual-clip bound is 3.

    Raises:
        ValueError: names the setting, its value and the remedy.
    """

    distillation_loss_mode: str = "k3"
    distillation_topk: int = 128
    use_task_rewards: bool = True
    use_policy_gradient: bool = True
    distillation_loss_coef: float = 1.0
    distillation_loss_max_clamp: float | None = 10.0
    distillation_log_prob_min_clamp: float | None = -10.0
    distillation_clip_ratio_low: float = 0.2
    distillation_clip_ratio_high: float = 0.2

    def __post_init__(self):
        self._check_values()
        mode = self.distillation_loss_mode
        if not self.use_policy_gradient and mode in REFERENCE_FREE_GRADIENT:
            raise ValueError(
                f"distillation_loss_mode={mode!r} with use_policy_gradient=False ignores the teacher: its gradient is "
                f"1 for every token; set use_policy_gradient=True, or distillation_loss_mode='k2', 'k3' or "
                f"'{FORWARD_KL_TOPK}'"
            )
        if not self.use_task_rewards:
            self._refuse_unread("distillation_loss_coef", "use_task_rewards=False", "use_task_rewards=True")
        if not self.use_policy_gradient:
            for name in ("distillation_clip_ratio_low", "distillation_clip_ratio_high"):
                self._refuse_unread(name, "use_policy_gradient=False", "use_policy_gradient=True")
        if not self.uses_topk:
            for name in ("distillation_topk", "distillation_log_prob_min_clamp"):
                self._refuse_unread(
                    name, f"distillation_loss_mode={mode!r}", f"distillation_loss_mode='{FORWARD_KL_TOPK}'"
                )
        self._warn_of_weak_gradient()

    def _check_values(self) -> None:
        if self.distillation_loss_mode not in DISTILLATION_LOSSES:
            raise ValueError(
                f"distillation_loss_mode={self.distillation_loss_mode!r} is unknown; choose one of "
                f"{', '.join(DISTILLATION_LOSSES)}"
            )
        for name in ("use_task_rewards", "use_policy_gradient"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.distillation_topk, int) or self.distillation_topk < 1 or self.distillation_topk is True:
            raise ValueError(
                f"distillation_topk={self.distillation_topk!r} must be a number of tokens >= 1, such as 32"
            )
        for name in ("distillation_loss_coef", "distillation_clip_ratio_low", "distillation_clip_ratio_high"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ValueError(f"{name}={value!r} must be a finite number >= 0")
        bound = self.distillation_loss_max_clamp
        if bound is not None and (not is_number(bound) or bound <= 0):
            raise ValueError(f"distillation_loss_max_clamp={bound!r} must be a number of nats > 0, or None")
        bound = self.distillation_log_prob_min_clamp
        if bound is not None and (not is_number(bound) or bound >= 0):
            raise ValueError(f"distillation_log_prob_min_clamp={bound!r} must be a number of nats < 0, or None")

    def _refuse_unread(self, name: str, because: str, remedy: str) -> None:
        """Refuse a setting that nothing would read, unless it has its default."""
        value = getattr(self, name)
        if value != next(f.default for f in fields(self) if f.name == name):
            raise ValueError(f"{name}={value!r} has no effect with {because}; set {remedy}, or drop {name}")

    def _warn_of_weak_gradient(self) -> None:
        mode = self.distillation_loss_mode
        if not self.use_policy_gradient or mode in REFERENCE_FREE_GRADIENT:
            return
        if self.uses_topk:
            why = "reaches the sampled token only, and what the teacher says of the other k is lost"
        else:
            why = f"is not that of KL(student || teacher): {mode!r} as a reward says how far, not in which direction"
        warnings.warn(
            f"the gradient of distillation_loss_mode={mode!r} with use_policy_gradient=True {why}. Set "
            f"use_policy_gradient=False, or distillation_loss_mode='k1'.",
            UserWarning,
            stacklevel=4,
        )

    @property
    def uses_topk(self) -> bool:
        """Whether the loss needs the teacher's k most likely tokens, and not only its score of the sampled one."""
        return self.distillation_loss_mode == FORWARD_KL_TOPK

    def require_compatible(self, config: ObjectiveConfig) -> None:
        """Refuse settings of the policy loss that distillation without task rewards would drop.

        Raises:
            ValueError: names the setting, its value and the remedy.
        """
        if self.use_task_rewards:
            return
        for name, unread in (
            ("policy_loss", config.policy_loss != "vanilla"),
            ("use_kl_loss", config.use_kl_loss),
            ("entropy_coeff", config.entropy_coeff != 0),
        ):
            if unread:
                raise ValueError(
                    f"{name}={getattr(config, name)!r} has no effect with use_task_rewards=False, where the loss is "
                    f"the distillation loss alone; set use_task_rewards=True, or drop {name}"
                )


def forward_kl_topk(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    log_prob_min_clamp: float | None = None,
    overlap: Tensor | None = None,
) -> TopKTokens:
    """The part of KL(teacher || student) that lies on the teacher's k most likely tokens.

    `loss = sum over the k tokens of p (log p - log q)`, with `p` the teacher and `q` the student, both log-probs
    bounded below by `log_prob_min_clamp` first. Neither mass is 1, so it may be negative. The masses
    are of the unbounded ones.

    Args:
        student_log_probs: `(..., K)`, nats, with gradient.
        teacher_log_probs: `(..., K)`, nats; `-inf` counts as no token.
        log_prob_min_clamp: nats, or `None`.
        overlap: `(..., K)`, whether the token is among the student's own k.

    Returns:
        `TopKTokens` of shape `(...)`, float32, or float64 if the student's are.

    Source: verl 0.9.1, `distillation.fsdp.losses.compute_forward_kl_topk`.
    """
    dtype = compute_dtype(student_log_probs)
    log_q, log_p = student_log_probs.to(dtype), teacher_log_probs.detach().to(dtype)
    named = log_p > -math.inf
    student_mass = torch.where(named, log_q.detach().exp(), 0).sum(-1)
    teacher_mass = log_p.exp().sum(-1)
    if log_prob_min_clamp is not None:
        log_q, log_p = log_q.clamp(min=log_prob_min_clamp), log_p.clamp(min=log_prob_min_clamp)
    log_p = torch.where(named, log_p, 0)
    gap = torch.where(named, log_p.exp() * (log_p - log_q), 0)
    count = advantage = None
    if overlap is not None:
        shared = overlap.bool() & named
        count = shared.sum(-1).to(dtype)
        advantage = torch.where(shared, -gap.detach(), 0).sum(-1) / count.clamp(min=1)
    return TopKTokens(gap.sum(-1), student_mass, teacher_mass, count, advantage)


def distillation_ppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    distillation: DistillationConfig,
    batch_info: BatchInfo | None = None,
    entropy: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    of_step: Tensor | None = None,
    teacher_log_prob: Tensor | None = None,
    topk: TopKScores | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """This micro-batch's share of the optimizer step's loss with a teacher.

    `loss = ppo_loss(...) + distillation_loss_coef * agg(D)` with task rewards, `agg(D)` without. `D` is the loss per
    token, clamped to `+-distillation_loss_max_clamp`: the KL estimate of `log_prob` against `teacher_log_prob`, or
    `max(forward_kl_topk, 0)`. With `use_policy_gradient`, `agg(D)` gives way to the clipped policy loss (`vanilla`)
    with the advantage `-D` per token.

    Args:
        log_prob, old_log_prob, advantages, response_mask, config, batch_info, entropy, ref_log_prob, of_step: as in
            `ppo_loss`.
        distillation: the settings of the distillation.
        rollout_is_weights: `(B, T)`, `(B, 1)` or `(B,)`, multiply both policy losses; a supervised distillation loss
            takes none, as in verl.
        teacher_log_prob: `(B, T)`, nats, the teacher's of the sampled tokens; needed unless the mode is top-k.
        topk: scores `(B, T, K)` at the teacher's k tokens; needed if the mode is top-k.

    Returns:
        The scalar loss, and the metrics of `ppo_loss` (unless the distillation loss is supervised and alone) with
        `distillation/loss` (before the coefficient), `distillation/loss_min` and `distillation/loss_max` (of a token,
        before the clamp), and further

        - of an estimator, `distillation/abs_loss`;
        - of top-k, `distillation/student_mass`, `distillation/teacher_mass`, each with `_min` and `_max`; if the
          overlap is known `distillation/overlap_ratio` (share of the k) and `distillation/overlap_token_advantage`
          (nats, over tokens with an overlap);
        - with policy gradient, `distillation/pg_clipfrac`, `distillation/pg_clipfrac_lower`, `distillation/ppo_kl`.

    Raises:
        ValueError: as `ppo_loss`; the teacher's scores are missing or misshaped; a setting would have no effect.

    Sources: verl 0.9.1, `distillation.losses.distillation_ppo_loss`; Agarwal et al. 2023 (supervised),
    arXiv:2306.13649; Thinking Machines, https://thinkingmachines.ai/blog/on-policy-distillation/ (policy gradient).
    """
    distillation.require_compatible(config)
    require_token_shape(log_prob.shape, response_mask=response_mask, teacher_log_prob=teacher_log_prob)
    if distillation.uses_topk:
        tokens, metrics = _topk_loss(topk, response_mask, distillation)
    else:
        tokens, metrics = _estimator_loss(log_prob, teacher_log_prob, response_mask, distillation)
    metrics["distillation/loss_min"] = _extreme(tokens, response_mask, "min")
    metrics["distillation/loss_max"] = _extreme(tokens, response_mask, "max")
    bound = distillation.distillation_loss_max_clamp
    if bound is not None:
        tokens = tokens.clamp(-bound, bound)

    counts = batch_info or BatchInfo()
    if distillation.use_policy_gradient:
        loss, gradient_metrics = ppo_loss(
            log_prob,
            old_log_prob,
            -tokens.detach(),
            response_mask,
            config=ObjectiveConfig(
                clip_ratio_low=distillation.distillation_clip_ratio_low,
                clip_ratio_high=distillation.distillation_clip_ratio_high,
                loss_agg_mode=config.loss_agg_mode,
                loss_scale_factor=config.loss_scale_factor,
            ),
            batch_info=counts,
            rollout_is_weights=rollout_is_weights,
        )
        metrics["distillation/loss"] = gradient_metrics.pop("actor/pg_loss")
        for name, metric in gradient_metrics.items():
            metrics[name.replace("actor/", "distillation/")] = metric
    else:
        term = agg_metric(
            tokens,
            response_mask,
            config.loss_agg_mode,
            dp_size=counts.dp_size,
            batch_num_tokens=counts.batch_num_tokens,
            global_batch_size=counts.global_batch_size,
            loss_scale_factor=config.loss_scale_factor,
        )
        loss = term.value
        metrics["distillation/loss"] = replace(term, total=term.total.detach())

    if not distillation.use_task_rewards and not distillation.use_policy_gradient:
        return loss, metrics
    # Without task rewards the policy loss is shown and not trained on, as in verl
    with torch.set_grad_enabled(distillation.use_task_rewards and torch.is_grad_enabled()):
        policy_loss, policy_metrics = ppo_loss(
            log_prob,
            old_log_prob,
            advantages,
            response_mask,
            config=config,
            batch_info=batch_info,
            entropy=entropy,
            ref_log_prob=ref_log_prob,
            rollout_is_weights=rollout_is_weights,
            of_step=of_step,
        )
    if distillation.use_task_rewards:
        loss = policy_loss + distillation.distillation_loss_coef * loss
    return loss, policy_metrics | metrics


def _estimator_loss(
    log_prob: Tensor, teacher_log_prob: Tensor | None, response_mask: Tensor, distillation: DistillationConfig
) -> tuple[Tensor, dict[str, Metric]]:
    mode = distillation.distillation_loss_mode
    if teacher_log_prob is None:
        raise ValueError(
            f"distillation_loss_mode={mode!r} needs teacher_log_prob, the teacher's (B, T) log-probabilities"
        )
    teacher_log_prob = keep(teacher_log_prob, response_mask).detach()
    loss = kl_penalty(keep(log_prob, response_mask), teacher_log_prob, mode)
    return loss, {"distillation/abs_loss": mean_metric(loss.abs(), response_mask)}


def _topk_loss(
    scores: TopKScores | None, response_mask: Tensor, distillation: DistillationConfig
) -> tuple[Tensor, dict[str, Metric]]:
    if scores is None:
        raise ValueError(f"distillation_loss_mode='{FORWARD_KL_TOPK}' needs topk, both models' TopKScores (B, T, K)")
    for name, tensor in scores._asdict().items():
        if tensor is not None and (tensor.ndim != 3 or tensor.shape != (*response_mask.shape, tensor.shape[-1])):
            raise ValueError(
                f"topk.{name} has shape {tuple(tensor.shape)}, expected (B, T, K) with (B, T) = "
                f"{tuple(response_mask.shape)}"
            )
    if len({tensor.shape for tensor in scores if tensor is not None}) > 1:
        raise ValueError(f"the tensors of topk differ in K: {[tuple(t.shape) for t in scores if t is not None]}")
    mask = response_mask.unsqueeze(-1)
    overlap = None if scores.overlap is None else scores.overlap & mask.bool()
    tokens = forward_kl_topk(
        keep(scores.student_log_probs, mask),
        keep(scores.teacher_log_probs, mask),
        log_prob_min_clamp=distillation.distillation_log_prob_min_clamp,
        overlap=overlap,
    )
    metrics = {}
    for name, mass in (("student_mass", tokens.student_mass), ("teacher_mass", tokens.teacher_mass)):
        metrics[f"distillation/{name}"] = mean_metric(mass, response_mask)
        metrics[f"distillation/{name}_min"] = _extreme(mass, response_mask, "min")
        metrics[f"distillation/{name}_max"] = _extreme(mass, response_mask, "max")
    if tokens.overlap_count is not None:
        width = scores.teacher_log_probs.shape[-1]
        metrics["distillation/overlap_ratio"] = mean_metric(tokens.overlap_count / width, response_mask)
        shared = response_mask.bool() & (tokens.overlap_count > 0)
        metrics["distillation/overlap_token_advantage"] = Metric(
            masked_sum(tokens.overlap_token_advantage, shared), shared.sum()
        )
    return tokens.loss.clamp(min=0), metrics


def _extreme(x: Tensor, mask: Tensor, which: str) -> Metric:
    """The smallest or largest value under the mask; infinite if there is none."""
    worst = math.inf if which == "min" else -math.inf
    kept = torch.where(mask.bool(), x.detach(), worst).flatten()
    kept = torch.cat([kept, kept.new_full((1,), worst)])
    return Metric(kept.amin() if which == "min" else kept.amax(), 1, extreme=which)
