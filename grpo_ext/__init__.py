"""verl's GRPO objective, exactly, as a Hugging Face TRL trainer."""

import importlib

__version__ = "0.1.0"

# Where each public name lives. Loaded on first use: the objective needs torch only, and importing it must not pull in
# TRL and transformers.
_HOMES = {
    "GRPOVerlConfig": "training",
    "GRPOVerlTrainer": "training",
    "StepMetricsCallback": "training",
    "ADV_ESTIMATORS": "objective",
    "AdvantageConfig": "objective",
    "BatchInfo": "objective",
    "DistillationConfig": "objective",
    "KL_PENALTIES": "objective",
    "LOSS_AGG_MODES": "objective",
    "Metric": "objective",
    "ObjectiveConfig": "objective",
    "POLICY_LOSSES": "objective",
    "ScoredResponses": "objective",
    "TopKScores": "objective",
    "agg_loss": "objective",
    "compute_advantages": "objective",
    "distillation_ppo_loss": "objective",
    "grpo_advantage": "objective",
    "kl_penalty": "objective",
    "ppo_loss": "objective",
    "register_adv_est": "objective",
    "register_policy_loss": "objective",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_ext' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
