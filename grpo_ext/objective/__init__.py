"""verl's GRPO objective on tensors: knows torch and nothing else.

Notation used by every docstring in this package: `B` responses, `T` padded response tokens, all token tensors `(B, T)`;
`response_mask` is 1 where a token is trained on; log-probabilities, KL and entropy are in nats. Values outside the
mask are never read, so that garbage there (1e4, NaN) reaches neither the loss nor its gradient.
"""

from .advantages import (
    ADV_ESTIMATORS,
    AdvantageConfig,
    ScoredResponses,
    compute_advantages,
    grpo_advantage,
    register_adv_est,
)
from .aggregation import LOSS_AGG_MODES, agg_loss
from .assembly import ppo_loss
from .config import BatchInfo, ObjectiveConfig
from .distillation import DistillationConfig, TopKScores, distillation_ppo_loss
from .kl import KL_PENALTIES, kl_penalty
from .metrics import Metric
from .policy_registry import POLICY_LOSSES, register_policy_loss, step_function, traits
from .rollout_correction import RolloutCorrection

__all__ = [
    "ADV_ESTIMATORS",
    "KL_PENALTIES",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "AdvantageConfig",
    "BatchInfo",
    "DistillationConfig",
    "Metric",
    "ObjectiveConfig",
    "RolloutCorrection",
    "ScoredResponses",
    "TopKScores",
    "agg_loss",
    "compute_advantages",
    "distillation_ppo_loss",
    "grpo_advantage",
    "kl_penalty",
    "ppo_loss",
    "register_adv_est",
    "register_policy_loss",
    "step_function",
    "traits",
]
