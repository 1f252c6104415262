"""The TRL trainer that computes `grpo_ext.objective`: knows TRL, transformers, accelerate and DeepSpeed."""

from ._versions import require_tested_trl

require_tested_trl()

from .callbacks import StepMetricsCallback  # noqa: E402
from .config import GRPOVerlConfig  # noqa: E402
from .trainer import GRPOVerlTrainer  # noqa: E402

__all__ = ["GRPOVerlConfig", "GRPOVerlTrainer", "StepMetricsCallback"]
