"""The reward of the greedy response to each prompt, for estimators that compare with it (`remax`)."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from ..objective.advantages import adv_traits
from .config import GRPOVerlConfig

# What `transformers` and vLLM sample with; beside a temperature of 0 (or do_sample=False) the rest has no effect
_SAMPLING = {"temperature": None, "top_p": None, "top_k": None, "min_p": None}
_VLLM_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": None}


def require_own_sampling(args: GRPOVerlConfig, rollout_func: Callable | None, environment_factory: Any) -> None:
    """Fail on an estimator that needs greedy responses where the trainer does not sample by itself.

    Raises:
        ValueError: names the estimator and what samples in its stead.
    """
    sampler = "rollout_func" if rollout_func is not None else "environment_factory"
    if adv_traits(args.adv_estimator).needs_baseline and not (rollout_func is None and environment_factory is None):
        raise ValueError(
            f"adv_estimator={args.adv_estimator!r} needs a greedy response to each prompt, and {sampler} decides how "
            f"responses are sampled; drop {sampler}, or choose an estimator without a baseline such as 'rloo'"
        )


@torch.no_grad()
def greedy_rewards(trainer: GRPOTrainer, inputs: list[dict[str, Any]], num_generations: int) -> tuple[Tensor, Tensor]:
    """Rewards and length of one greedy response to each prompt of a generation batch; call it on every rank.

    Through TRL's own generation, with sampling off, and the trainer's reward functions. It draws no random numbers and
    leaves nothing in the metrics and the completions table. Prompts are dealt out over ranks, the same number to each.

    Args:
        trainer: that has just sampled `inputs`, so that its tools are in place.
        inputs: this rank's rows of the batch, in the order of the prompts.
        num_generations: responses per prompt.

    Returns:
        Rewards `(prompts, functions)`, of all ranks; NaN: the function returned `None`. Lengths `(prompts,)`, tokens.

    Raises:
        ValueError: a prompt comes with images.
    """
    if "image" in inputs[0] or "images" in inputs[0]:
        raise ValueError(
            f"adv_estimator={trainer.args.adv_estimator!r} cannot decode prompts with images greedily; choose an "
            f"estimator without a baseline such as 'rloo'"
        )
    rank, ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
    first = -rank * len(inputs) % num_generations  # of this rank's rows, the first that begins a group
    rows = gather_object(inputs[first::num_generations])
    share = -(-len(rows) // ranks)
    mine = [copy.deepcopy(rows[i % len(rows)]) for i in range(rank * share, (rank + 1) * share)]
    prompts = [row["prompt"] for row in mine]
    with _greedy(trainer):
        _, completion_ids, _, completions, *_ = trainer._generate(prompts)
        rewards = trainer._calculate_rewards(mine, prompts, completions, completion_ids)
    lengths = torch.tensor([len(ids) for ids in completion_ids], device=rewards.device)
    return rewards[: len(rows)], trainer.accelerator.gather(lengths)[: len(rows)]


@contextmanager
def _greedy(trainer: GRPOTrainer) -> Iterator[None]:
    """Let the trainer decode greedily, one response to a prompt, and log into nothing."""
    changes: list[tuple[Any, dict[str, Any]]] = [
        (
            trainer,
            {
                "num_generations": 1,
                "num_generations_eval": 1,
                "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
                "_pending_extra_logs": defaultdict(list),
                "_pending_metrics": defaultdict(list),
            },
        ),
        (trainer.state, {"num_input_tokens_seen": trainer.state.num_input_tokens_seen}),
    ]
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        others = {name: value for name, value in (engine.generation_kwargs or {}).items() if name not in _VLLM_GREEDY}
        changes.append((engine, {**_VLLM_GREEDY, "generation_kwargs": others}))
    else:
        config = copy.deepcopy(trainer.generation_config)
        config.update(do_sample=False, **_SAMPLING)
        kwargs = {**trainer.generation_kwargs, "do_sample": False, **_SAMPLING}
        changes.append((trainer, {"generation_config": config, "generation_kwargs": kwargs}))
    with ExitStack() as stack:
        for owner, values in changes:
            stack.enter_context(_changed(owner, values))
        yield


@contextmanager
def _changed(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
