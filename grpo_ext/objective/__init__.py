"""verl's GRPO objective on tensors: knows torch and nothing else.

Notation used by every docstring in this package: `B` responses, `T` padded response tokens, all token tensors `(B, T)`;
`response_mask` is 1 where a token is trained on; log-probabilities, KL and entropy are in nats. Values outside the
mask are never read, so that garbage there (1e4, NaN) reaches neither the loss nor its gradient.
"""

from .advantages import grpo_advantage
from .aggregation import LOSS_AGG_MODES, agg_loss
from .assembly import ppo_loss
from .config import BatchInfo, ObjectiveConfig
from .kl import KL_PENALTIES, kl_penalty
from .metrics import Metric
from .policy_losses import POLICY_LOSSES, PROPORTIONAL_TO_ADVANTAGE, register_policy_loss

__all__ = [
    "KL_PENALTIES",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "PROPORTIONAL_TO_ADVANTAGE",
    "BatchInfo",
    "Metric",
    "ObjectiveConfig",
    "agg_loss",
    "grpo_advantage",
    "kl_penalty",
    "ppo_loss",
    "register_policy_loss",
]
