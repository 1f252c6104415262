"""Tasks: data sets with verifiable answers, and the reward functions that score them.

- `gsm8k`: GSM8K as prompts, gold answers and worked solutions.
- `rewards`: strict, flexible and robust rewards for a task whose answer is one number.
"""

from .gsm8k import INSTRUCTION, GSM8KRows, load_gsm8k, read_gsm8k
from .rewards import (
    REWARDS,
    completion_text,
    final_answer,
    flexible_reward,
    flexible_score,
    gold_number,
    robust_reward,
    robust_score,
    strict_reward,
    strict_score,
)

__all__ = [
    "INSTRUCTION",
    "REWARDS",
    "GSM8KRows",
    "completion_text",
    "final_answer",
    "flexible_reward",
    "flexible_score",
    "gold_number",
    "load_gsm8k",
    "read_gsm8k",
    "robust_reward",
    "robust_score",
    "strict_reward",
    "strict_score",
]
