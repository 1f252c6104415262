"""One optimizer step (or two) on fixed rows, split in a given way: the cells of `test_grid.py`.

In one process a cell is `run_cell(cell)`. On several ranks this file is a program that runs a list of cells in one
process group: `torchrun --nproc_per_node 2 grid_worker.py CELLS.json RESULTS.pt`.
"""

import contextlib
import copy
import functools
import json
import os
import sys
import tempfile
import time
from typing import Any

import tiny
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer

GROUP = 4  # responses to a prompt
# Steps of about the same size in all modes: the sums over tokens have larger gradients than the means.
LEARNING_RATES = {
    "token-mean": 0.5,
    "seq-mean-token-sum": 0.5 / 13,
    "seq-mean-token-sum-norm": 0.5 / 13 * tiny.LONGEST,
    "seq-mean-token-mean": 0.5,
    "token-sum": 0.5 / 106,
}

DEFAULTS = {
    "num_generations": GROUP,
    "max_completion_length": tiny.LONGEST,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0,
    "max_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "activation_checkpointing": False,
    "disable_tqdm": True,
    "shuffle_dataset": False,
    "entropy_coeff": 0.02,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
}


def deepspeed_config(stage: int, **extra) -> dict[str, Any]:
    """A DeepSpeed config without `gradient_clipping`, which is 1.0 there unless `GRPOVerlConfig` says otherwise."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"stage": stage}
    if stage == 3:
        # Else every parameter of so small a model is kept whole on each rank, and nothing is sharded
        zero["stage3_param_persistence_threshold"] = 0
    return {**dict.fromkeys(auto, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": zero, **extra}


# Rollouts and rewards


def _cut_off(keep, listed_prompts, trainer) -> dict:
    """The fixed responses, of which only those that `keep(number of the prompt, copy)` end with `<eos>`."""
    output = tiny.fixed_rollout(listed_prompts, trainer)
    rank, rows = trainer.accelerator.process_index, len(listed_prompts)
    for i, prompt in enumerate(listed_prompts):
        number, copy_of_it = int(prompt.split()[0][1:]), (rank * rows + i) % GROUP
        ids = output["completion_ids"][i]
        last = 1 if keep(number, copy_of_it) else 20
        output["completion_ids"][i] = [*ids[:-1], last] if len(ids) > 1 else [30, last]
        output["logprobs"][i] = [0.0] * len(output["completion_ids"][i])
    return output


ROLLOUTS = {
    "fixed": tiny.fixed_rollout,
    "tools": functools.partial(tiny.fixed_rollout, tool_mask=True),
    # With mask_truncated_completions: on two ranks in TRL's order, the second has nothing to train on
    "first prompt": functools.partial(_cut_off, lambda number, _: number == 0),
    # ... and one of them has nothing however the rows are dealt
    "one row": functools.partial(_cut_off, lambda number, copy_of_it: (number, copy_of_it) == (0, 1)),
}


def flat_reward(prompts, completion_ids, **kwargs) -> list[float]:
    """Every second prompt's responses are worth the same: advantage 0."""
    uneven = tiny.length_reward(prompts, None, completion_ids)
    return [0.5 if int(p.split()[0][1:]) % 2 else r for p, r in zip(prompts, uneven, strict=True)]


REWARDS = {"uneven": tiny.length_reward, "flat": flat_reward}


# Weights, wherever they lie


def gathered(parameter: nn.Parameter, modify: bool = False):
    """Context in which a parameter is whole; under ZeRO-3 it else is this rank's shard."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameter, modifier_rank=0 if modify else None)


def plain_name(name: str) -> str:
    return name.removeprefix("module.")


@torch.no_grad()
def assign(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Overwrite the parameters that `values` names."""
    for name, parameter in module.named_parameters():
        if plain_name(name) in values:
            value = values[plain_name(name)]
            if isinstance(parameter, DTensor):  # FSDP2
                value = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements)
            with gathered(parameter, modify=True):
                if not hasattr(parameter, "ds_id") or torch.distributed.get_rank() == 0:
                    parameter.copy_(value)


@torch.no_grad()
def read(module: nn.Module) -> torch.Tensor:
    """All trainable parameters as one vector, float64."""
    parts = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            with gathered(parameter):
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                parts.append(whole.detach().double().flatten().clone())
    return torch.cat(parts)


def noise(module: nn.Module, only: str) -> dict[str, torch.Tensor]:
    """Fixed random values for the parameters with `only` in their names: `lora_B` starts at 0 and hides the KL term."""
    values, generator = {}, torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        if only in name:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            values[plain_name(name)] = 0.1 * torch.randn(shape, generator=generator)
    return values


# Sharding where there is no accelerator


def allow_sharding_on_cpu() -> None:
    """Let accelerate find several ranks and DeepSpeed or FSDP together on CPUs, and DeepSpeed do without a compiler.

    accelerate 1.15 finds CPU ranks only if told `cpu=True`, and then no DeepSpeed; FSDP only with what it takes for
    GPUs. DeepSpeed on CPUs compiles a kernel for collectives, which takes minutes; without it they are gloo's.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    found = ("gloo", DistributedType.MULTI_GPU if fsdp else DistributedType.MULTI_CPU)
    PartialState._prepare_backend = lambda *args, **kwargs: found


# A cell


def sizes(cell: dict[str, Any]) -> dict[str, int]:
    """The batch geometry, in TRL's names; `windows` optimizer steps are made of one generation."""
    accumulation = cell["accumulation"]
    return {
        "per_device_train_batch_size": cell["rows"],
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * cell.get("windows", 1),
    }


def prompts_in_order(windows: int, ranks: int, as_on_ranks: int):
    """Prompts such that each optimizer step has the rows that it has on `as_on_ranks` ranks.

    A generation batch is dealt to ranks first and cut into optimizer steps then, so that the first step on two ranks
    has the first half of each rank's prompts.
    """
    prompts = tiny.prompts(2 * windows)
    if ranks == as_on_ranks:
        return prompts
    per_rank = len(prompts) // as_on_ranks
    order = [r * per_rank + w * per_rank // windows for w in range(windows) for r in range(as_on_ranks)]
    return prompts.select(order)


def make_trainer(cell: dict[str, Any], folder: str) -> GRPOVerlTrainer:
    """The trainer of a cell, with the reference's (or the adapter's) weights in place."""
    backend = cell["backend"]
    settings = {**DEFAULTS, **sizes(cell), **cell.get("settings", {})}
    settings.setdefault("learning_rate", LEARNING_RATES[settings.get("loss_agg_mode", "token-mean")])
    if backend.startswith("zero"):
        settings["deepspeed"] = deepspeed_config(int(backend[-1]), **cell.get("deepspeed", {}))
    elif backend != "launched":
        settings["use_cpu"] = True
    args = GRPOVerlConfig(folder, **settings)
    model = tiny.model()
    if cell.get("from_disk"):  # under ZeRO-3 it is born sharded
        with contextlib.redirect_stderr(None):
            model = type(model).from_pretrained(cell["from_disk"])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = GRPOVerlTrainer(
        model,
        REWARDS[cell.get("reward", "uneven")],
        args,
        prompts_in_order(cell.get("windows", 1), ranks, cell.get("as_on_ranks", ranks)),
        processing_class=tiny.tokenizer(),
        rollout_func=ROLLOUTS[cell.get("rollout", "fixed")],
        peft_config=LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear") if cell.get("lora") else None,
    )
    if trainer.ref_model is not None:  # a KL gradient needs a reference with other weights
        other = tiny.model(seed=1)
        assign(trainer.ref_model, dict(other.named_parameters()))
    if cell.get("lora"):
        assign(trainer.model, noise(trainer.model, "lora_B"))
    return trainer


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Train a cell.

    Args:
        cell: `backend` (`single`, `ddp`, `zero1`, ..., or `launched`: what `accelerate launch` says), `rows` (of a
            micro-batch), `accumulation`, and optionally
            `windows` (optimizer steps of a generation), `as_on_ranks`, `rollout`, `reward`, `lora`, `from_disk`,
            `settings` of the config, `deepspeed` keys of DeepSpeed's.

    Returns:
        `before` and `after`, the trainable parameters; `log`, one entry for each step; `forwards`, of the last
        generation on this rank: for each micro-batch the rows of its forwards; `seconds`; `distributed`, accelerate's
        name of how it ran, and `zero_stage` and `gradient_clipping` of a DeepSpeed engine.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cell, folder)
        before = read(trainer.model)
        trainer.train()
        plans = [plan for plan in trainer._rollout.plans if plan is not None]
        result = {
            "before": before,
            "after": read(trainer.model),
            "log": [copy.deepcopy(entry) for entry in trainer.state.log_history if "loss" in entry],
            "forwards": [[len(group) for group in plan.train] for plan in plans],
            "seconds": time.perf_counter() - start,
            "distributed": trainer.accelerator.distributed_type.value,
        }
        if trainer.is_deepspeed_enabled:
            engine = trainer.model_wrapped
            result |= {
                "zero_stage": engine.zero_optimization_stage(),
                "gradient_clipping": engine.gradient_clipping(),
            }
        if cell["backend"] != "single":
            # TRL and accelerate keep the model's engine in a shared state: the next cell starts afresh
            trainer.accelerator.free_memory()
            torch.distributed.barrier()
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
    return result


def main(cells_path: str, results_path: str) -> None:
    """Run the cells of a JSON file on all ranks; the first one writes all ranks' forwards and its own results."""
    allow_sharding_on_cpu()
    with open(cells_path, encoding="utf-8") as file:
        cells = json.load(file)
    results = {}
    for name, cell in cells.items():
        print(f"cell: {name}", flush=True)
        result = run_cell(cell)
        everywhere = [None] * int(os.environ["WORLD_SIZE"])
        torch.distributed.all_gather_object(everywhere, (result["forwards"], result["after"]))
        result["forwards"] = [forwards for forwards, _ in everywhere]
        result["ranks agree"] = all(torch.equal(after, result["after"]) for _, after in everywhere)
        results[name] = result
    if torch.distributed.get_rank() == 0:
        torch.save(results, results_path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
