"""How far an optimizer step moves when the same rows are split differently: TRL's `GRPOTrainer` beside ours.

    python examples/compare_splits.py

8 rows an optimizer step go through a model of 0.35 M parameters as 8x1, 4x2, 2x4 and 1x8 (rows of a micro-batch x
`gradient_accumulation_steps`) on one process, and as 4x1, 2x2 and 1x4 on each of two DDP ranks; with one and with two
optimizer steps on a generation; with KL and entropy terms; SGD in float32. The table gives, for each loss, the largest
difference of the trained parameters from those of 8x1 on one process, over the size of the step, and how many splits
agree to 1e-5. A gap above 1 is a second step that explodes because the first was larger.

TRL adds the mean entropy of each micro-batch, whatever its tokens; with `--entropy_coeff 0` its dapo, grpo and dr_grpo
agree too; bnpo, a mean over the tokens of a micro-batch, does not. Takes minutes on two CPU cores; needs no network.

What is held fixed, so that the same rows form the same optimizer step everywhere:

1. The completions (1 to 40 tokens) are a function of the prompt and of which copy of it is answered.
2. TRL shuffles the rows of each rank's generation batch (`torch.randperm`) before it cuts it into optimizer steps.
   `shuffle_sequence_dict` is replaced by the identity for both trainers; ours does not call it by default.
3. A generation batch is dealt to ranks before it is cut into steps, so with two steps on a generation the first step on
   two ranks has the first half of each rank's prompts. The single process gets the prompts in that order.
4. The reference model gets other weights than the policy; else the KL term has no gradient in the first step.
"""

import argparse
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_ext import LOSS_AGG_MODES, GRPOVerlConfig, GRPOVerlTrainer

MODEL = Path(__file__).parent / "tiny_qwen2"
TOLERANCE = 1e-5
GROUP = 4  # completions of a prompt
LONGEST = 40
ONE_PROCESS = [(8, 1), (4, 2), (2, 4), (1, 8)]
TWO_RANKS = [(4, 1), (2, 2), (1, 4)]
TRL_LOSSES = ("bnpo", "dapo", "grpo", "dr_grpo")
# Steps of about the same size: sums over tokens have larger gradients than means. Not so small that float32 cannot hold
# them, and not so large that the second step is chaos.
RATE = 0.02
LEARNING_RATES = {
    **dict.fromkeys(("bnpo", "dapo", "token-mean"), RATE),
    **dict.fromkeys(("grpo", "seq-mean-token-mean"), RATE * 3),
    **dict.fromkeys(("dr_grpo", "seq-mean-token-sum-norm"), RATE * LONGEST / 10),
    "seq-mean-token-sum": RATE / 10,
    "token-sum": RATE / 80,
}


def rollout(prompts, trainer) -> dict:
    """Fixed uneven completions, in TRL's format of a `rollout_func`."""
    tokenizer = trainer.processing_class
    rank, rows = trainer.accelerator.process_index, len(prompts)
    completions = []
    for i, prompt in enumerate(prompts):
        draw = random.Random(f"{prompt}/{(rank * rows + i) % GROUP}")
        length = draw.choice([1, 2, 3, 5, 8, 13, 21, 30, LONGEST])
        completions.append([draw.randrange(10, trainer.model.config.vocab_size) for _ in range(length)])
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[0.0] * len(ids) for ids in completions],
    }


def reward(completion_ids, **kwargs) -> list[float]:
    """Uneven, and a function of the completion alone."""
    return [len(ids) % 7 + 0.1 * (ids[0] % 5) for ids in completion_ids]


def prompts_in_order(steps: int, ranks: int) -> Dataset:
    """Two prompts for each optimizer step, each step's as it has them on two ranks (see 3. above)."""
    prompts = [f"What is {i} plus {i * i + 3}?" for i in range(2 * steps)]
    if ranks == 1:
        prompts = [prompts[rank * steps + step] for step in range(steps) for rank in range(2)]
    return Dataset.from_dict({"prompt": prompts})


@torch.no_grad()
def train(cell: dict) -> dict[str, torch.Tensor]:
    """Train a cell and return the parameters as vectors.

    Args:
        cell: `trainer`, `loss`, `entropy` (its coefficient), `steps` on a generation, `rows` of a micro-batch,
            `accumulation`.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ours, loss, steps = cell["trainer"] == "grpo_ext", cell["loss"], cell["steps"]
    if ours:
        objective = {"loss_agg_mode": loss, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": cell["entropy"]}
    else:
        objective = {"loss_type": loss, "beta": 0.1, "entropy_coef": cell["entropy"]}
    with tempfile.TemporaryDirectory() as folder:
        args = (GRPOVerlConfig if ours else GRPOConfig)(
            folder,
            per_device_train_batch_size=cell["rows"],
            gradient_accumulation_steps=cell["accumulation"],
            steps_per_generation=cell["accumulation"] * steps,
            num_generations=GROUP,
            max_completion_length=LONGEST,
            max_steps=steps,
            learning_rate=LEARNING_RATES[loss],
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            shuffle_dataset=False,
            disable_dropout=True,
            activation_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **objective,
        )
        trainer = (GRPOVerlTrainer if ours else GRPOTrainer)(
            str(MODEL), reward, args, prompts_in_order(steps, ranks), rollout_func=rollout
        )
        trainer.remove_callback(PrinterCallback)
        generator = torch.Generator().manual_seed(0)
        for parameter in trainer.ref_model.parameters():
            parameter += 0.002 * torch.randn(parameter.shape, generator=generator)

        def vector() -> torch.Tensor:
            return torch.cat([p.flatten() for p in trainer.model.parameters()])

        before = vector()
        with torch.enable_grad():
            trainer.train()
        return {"before": before, "after": vector()}


def train_all(cells: list[dict]) -> list[dict]:
    """Train the cells one after another, in this process or on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # see 2. above
    return [train(cell) for cell in cells]


def train_all_on_two_ranks(cells: list[dict]) -> list[dict]:
    """The same under DDP: this file again, on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run([*command, "--cells", json.dumps(cells), "--results", str(results)], check=True, env=environment)
        return torch.load(results)


def gap(result: dict, expected: dict) -> float:
    """Difference of the trained parameters over the size of the step."""
    before, wanted, got = expected["before"].double(), expected["after"].double(), result["after"].double()
    return ((got - wanted).norm() / (wanted - before).norm()).item()


def table(losses: list[tuple[str, str]], entropy: float) -> str:
    """Train the grid for each (trainer, loss), and tabulate."""
    kinds = list(itertools.product(losses, (1, 2)))

    def cells(splits) -> list[dict]:
        names = ("trainer", "loss", "entropy", "steps", "rows", "accumulation")
        return [dict(zip(names, (*kind, entropy, steps, *s), strict=True)) for kind, steps in kinds for s in splits]

    def by_kind(results: list[dict], splits) -> list[list[dict]]:
        return [results[i : i + len(splits)] for i in range(0, len(results), len(splits))]

    one = by_kind(train_all(cells(ONE_PROCESS)), ONE_PROCESS)
    two = by_kind(train_all_on_two_ranks(cells(TWO_RANKS)), TWO_RANKS)
    lines = [
        "| trainer | loss | steps a generation | one process: largest gap | agree | DDP x2: largest gap | agree |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ((trainer, loss), steps), (whole, *splits), on_ranks in zip(kinds, one, two, strict=True):
        columns = [trainer, loss, str(steps)]
        for results in (splits, on_ranks):
            gaps = [gap(result, whole) for result in results]
            columns += [f"{max(gaps):.1e}", f"{sum(g < TOLERANCE for g in gaps)} of {len(gaps)}"]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table; as a rank of the second half, train the given cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entropy_coeff", type=float, default=0.02, help="Weight of the entropy term (0.02).")
    parser.add_argument("--cells", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cells is None:
        losses = [*(("trl", loss) for loss in TRL_LOSSES), *(("grpo_ext", mode) for mode in LOSS_AGG_MODES)]
        print(table(losses, options.entropy_coeff))
        return
    results = train_all(options.cells)
    if torch.distributed.get_rank() == 0:
        torch.save(results, options.results)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
