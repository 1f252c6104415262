"""Runs that keep each generation batch as it was scored, for test_scoring.py and test_dynamic_sampling.py.

In one process: `run(job)`. As a program under torchrun it does jobs in one process group:
`torchrun --nproc_per_node 2 scoring_worker.py JOBS.json RESULTS.pt`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import conftest  # noqa: F401  (no network)

import tiny
import torch
from accelerate.state import AcceleratorState

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer
from grpo_ext.training.windows import response_mask

GROUP = tiny.SETTINGS["num_generations"]  # responses to a prompt
WEIGHTS = [1.0, -0.5]  # of the two functions of "two"
SETTINGS = {**tiny.SETTINGS, "max_steps": 1, "learning_rate": 1e-3, "optim": "sgd", "max_grad_norm": 0}


def last_token(completion_ids, **kwargs) -> list[float | None]:
    """The last token over 10; `None` for those that are `<eos>`."""
    return [None if ids[-1] == 1 else ids[-1] / 10 for ids in completion_ids]


def acc(prompts, completion_ids, **kwargs) -> list[float]:
    """Whether the first token is odd; never for prompts with an odd number, whose responses are all wrong."""
    numbers = [int(prompt.split()[0][1:]) for prompt in prompts]
    return [float(n % 2 == 0 and ids[0] % 2) for n, ids in zip(numbers, completion_ids, strict=True)]


def flat_for_odd(prompts, completion_ids, **kwargs) -> list[float]:
    """The responses to prompts with an odd number are all worth 0.7."""
    uneven = tiny.length_reward(prompts, None, completion_ids)
    return [0.7 if int(p.split()[0][1:]) % 2 else r for p, r in zip(prompts, uneven, strict=True)]


def constant(completion_ids, **kwargs) -> list[float]:
    """Never varies."""
    return [0.7] * len(completion_ids)


REWARDS = {
    "length": tiny.length_reward,
    "two": [tiny.length_reward, last_token],
    "acc": acc,
    "acc and length": [acc, tiny.length_reward],
    "flat for odd": flat_for_odd,
    "constant": constant,
}


def fixed(listed_prompts, trainer, tools: bool = False) -> dict[str, Any]:
    """`tiny.fixed_rollout`; with `tools` only even-numbered rows have tokens of a tool, and it ends some rows."""
    output = tiny.fixed_rollout(listed_prompts, trainer, tool_mask=tools)
    if tools:
        output["env_mask"][::2] = [[1] * len(mask) for mask in output["env_mask"][::2]]
    return output


def make(job: dict[str, Any], folder: str, **others) -> GRPOVerlTrainer:
    """The trainer of a job; a reference, if there is one, has other weights.

    Args:
        job: optionally `settings` of the config, `rows` of a micro-batch over all ranks (8), `reward` and `prompts`
            (numbers; the first 8), `rollout` (`fixed`, `tools` or `None`, the model's own).
        others: arguments of the trainer, instead of the job's.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {"per_device_train_batch_size": job.get("rows", 8) // ranks, **SETTINGS, **job.get("settings", {})}
    numbers = job.get("prompts", list(range(8)))
    rollouts = {
        "fixed": fixed,
        "tools": lambda prompts, trainer: fixed(prompts, trainer, tools=True),
        None: None,
    }
    given = {
        "reward_funcs": REWARDS[job.get("reward", "length")],
        "train_dataset": tiny.prompts(max(numbers) + 1).select(numbers),
        "rollout_func": rollouts[job.get("rollout", "fixed")],
        **others,
    }
    trainer = GRPOVerlTrainer(
        tiny.model(), args=GRPOVerlConfig(folder, **settings), processing_class=tiny.tokenizer(), **given
    )
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(tiny.model(seed=1).state_dict())
    return trainer


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each row its tokens without padding, its mask, and its advantage: a number, or one per token."""
    rows, mask, advantages = [], response_mask(batch), batch["advantages"]
    for i in range(len(mask)):
        own = batch["completion_mask"][i].bool()
        rows.append(
            {
                "prompt": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
                "completion": batch["completion_ids"][i][own].tolist(),
                "mask": mask[i][own].tolist(),
                "advantage": (advantages[i] if advantages.ndim == 1 else advantages[i][own]).tolist(),
                "items": int(batch["num_items_in_batch"]),
            }
        )
    return rows


def record(trainer: GRPOVerlTrainer) -> list[list[dict[str, Any]]]:
    """The list that gets this rank's rows of each generation batch of the training."""
    generate, batches = trainer._generate_and_score_completions, []

    def recorded(inputs):
        batch = generate(inputs)
        if trainer.model.training:
            batches.append(rows_of(batch))
        return batch

    trainer._generate_and_score_completions = recorded
    return batches


def run(job: dict[str, Any], **others) -> dict[str, Any]:
    """Train; returns `batches` (generation batches, each all ranks' rows), `log`, and `table` of completions."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(job, folder, **others)
        batches = record(trainer)
        trainer.train()
        table = {name: list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")}
        table["rewards"] = {name: list(column) for name, column in trainer._logs["rewards"].items()}
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        if trainer.accelerator.num_processes > 1:
            everywhere = [None] * trainer.accelerator.num_processes
            torch.distributed.all_gather_object(everywhere, batches)
            batches = [[row for part in parts for row in part] for parts in zip(*everywhere, strict=True)]
            # TRL and accelerate keep state that the next trainer would find
            trainer.accelerator.free_memory()
            torch.distributed.barrier()
            AcceleratorState._reset_state(reset_partial_state=True)
    return {"batches": batches, "log": log, "table": table}


def run_on_two_ranks(jobs: dict[str, dict], folder: Path) -> dict[str, dict[str, Any]]:
    """`run` of each job, all in one launch of two processes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, __file__, str(folder / "jobs.json"), str(folder / "results.pt")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return torch.load(folder / "results.pt")


def main(jobs_path: str, results_path: str) -> None:
    """Do the jobs of a JSON file on all ranks; the first one writes the results."""
    torch.set_num_threads(1)
    results = {name: run(job) for name, job in json.loads(Path(jobs_path).read_text()).items()}
    if torch.distributed.get_rank() == 0:
        torch.save(results, results_path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
