"""The whole objective: policy, entropy and KL, aggregated alike."""

from torch import Tensor

from .aggregation import agg_metric
from .config import BatchInfo, ObjectiveConfig
from .kl import kl_penalty
from .masking import keep, require_token_shape, to_tokens
from .metrics import Metric, mean_metric
from .policy_losses import geometric_weights
from .policy_registry import POLICY_LOSSES, checked_output, step_function, traits


def ppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    batch_info: BatchInfo | None = None,
    entropy: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    of_step: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """This micro-batch's share of the optimizer step's loss.

    `loss = agg(policy) - entropy_coeff * agg(entropy) + kl_loss_coef * agg(kl)`, with `agg` as in `agg_loss`; the
    entropy term if `entropy` is passed, the KL term if `config.use_kl_loss`.

    Args:
        log_prob: `(B, T)`, nats, the policy's, with gradient. bfloat16 and float16 are computed in float32.
        old_log_prob: `(B, T)`, nats, of the policy that the step started from.
        advantages: `(B, T)`, or `(B,)` / `(B, 1)` for one value per response.
        response_mask: `(B, T)`, 1 where a token is trained on. Values elsewhere are never read.
        config: the settings.
        batch_info: counts over the optimizer step; `None`: this tensor is the whole step, on one rank.
        entropy: `(B, T)`, nats, of the policy's distribution at each position.
        ref_log_prob: `(B, T)`, nats, the frozen reference's; needed with `config.use_kl_loss`.
        rollout_is_weights: `(B, T)`, `(B, 1)` or `(B,)`, multiply the policy loss per token and nothing else.
        of_step: `(B, T)`, these rows of what the policy loss's step function gave for the whole optimizer step
            (`clip_cov`, `kl_cov`); `None`: these rows are the whole step, and draws come from torch's generator.

    Returns:
        The scalar loss (0 with zero gradient, attached to the graph, if no token is valid), and metrics by verl's
        names: `actor/pg_loss` (without the other two terms), those of the policy loss (`actor/pg_clipfrac`,
        `actor/pg_clipfrac_lower`, `actor/ppo_kl`), `actor/entropy_loss` if `entropy` is passed, `actor/kl_loss` and
        `actor/kl_coef` with the KL term. `float()` of each gives this micro-batch's value.

    Raises:
        ValueError: shapes differ; `use_kl_loss` without `ref_log_prob`; `dp_size > 1` without the mode's count;
            `rollout_is_weights` for a loss that makes its own.

    Source: verl 0.9.1, `verl.workers.utils.losses.ppo_loss`.
    """
    shape = log_prob.shape
    require_token_shape(
        shape,
        old_log_prob=old_log_prob,
        response_mask=response_mask,
        entropy=entropy,
        ref_log_prob=ref_log_prob,
        of_step=of_step,
    )
    if config.use_kl_loss and ref_log_prob is None:
        raise ValueError("use_kl_loss=True needs ref_log_prob, the reference's (B, T) log-probabilities")
    known = traits(config.policy_loss)
    if rollout_is_weights is not None and known.rollout_weights == "own":
        raise ValueError(f"policy_loss={config.policy_loss!r} makes its own weights; leave rollout_is_weights out")
    counts = batch_info or BatchInfo()

    def agg(loss_mat: Tensor, mask: Tensor = response_mask, mode: str = config.loss_agg_mode) -> Metric:
        return agg_metric(
            loss_mat,
            mask,
            mode,
            dp_size=counts.dp_size,
            batch_num_tokens=counts.batch_num_tokens,
            global_batch_size=counts.global_batch_size,
            loss_scale_factor=config.loss_scale_factor,
        )

    # Outside the mask everything is 0 from here on, so that no loss needs to think of it.
    log_prob = keep(log_prob, response_mask)
    old_log_prob = keep(old_log_prob, response_mask).detach()
    advantages = keep(to_tokens("advantages", advantages, shape), response_mask).detach()

    tensors = (log_prob, old_log_prob, advantages, response_mask)
    over_step = step_function(config)
    if over_step is None:
        output = POLICY_LOSSES[config.policy_loss](*tensors, config=config)
    else:
        of_step = over_step(*tensors, config=config) if of_step is None else of_step
        output = POLICY_LOSSES[config.policy_loss](*tensors, config=config, of_step=of_step)
    policy_loss, policy_metrics, kept = checked_output(config.policy_loss, output, log_prob, response_mask)
    if rollout_is_weights is not None:
        weights = keep(to_tokens("rollout_is_weights", rollout_is_weights, shape), response_mask).detach()
        if known.rollout_weights == "geometric":
            weights = geometric_weights(weights, response_mask)
        policy_loss = policy_loss * weights

    policy_term = agg(policy_loss, kept, known.loss_agg_mode if known.fixed_agg_mode else config.loss_agg_mode)
    loss = policy_term.value
    metrics = {"actor/pg_loss": policy_term}
    for name, value in policy_metrics.items():
        metrics[name] = mean_metric(value, response_mask) if isinstance(value, Tensor) else value
    if entropy is not None:
        entropy_term = agg(entropy)
        metrics["actor/entropy_loss"] = entropy_term
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * entropy_term.value
    if config.use_kl_loss:
        ref_log_prob = keep(ref_log_prob, response_mask).detach()
        kl_term = agg(kl_penalty(log_prob, ref_log_prob, config.kl_loss_type))
        loss = loss + config.kl_loss_coef * kl_term.value
        metrics["actor/kl_loss"] = kl_term
        metrics["actor/kl_coef"] = Metric(config.kl_loss_coef, 1)
    return loss, {name: _detached(metric) for name, metric in metrics.items()}


def _detached(metric: Metric) -> Metric:
    total, count = (x.detach() if isinstance(x, Tensor) else x for x in (metric.total, metric.count))
    return Metric(total, count, metric.share, metric.extreme)
