"""Time one policy update of TRL's GRPOTrainer against ours: same model, same responses, same objective, one process.

    python examples/benchmark_update.py            # the table: about 15 minutes on 2 cores
    python examples/benchmark_update.py --modes full kl --rounds 5
    python examples/benchmark_update.py --ranks    # how evenly rows lie on simulated ranks

The responses have the lengths of 64 real ones (examples/rollout_lengths.json) and come from a `rollout_func`, so that
generation costs nothing. An update is everything else: log-probabilities of the reference, 8 micro-batches of 8 rows
forward and backward, the optimizer's step (AdamW at learning rate 0, so that every round starts from the same weights).
TRL's and our updates alternate in one process. *floor* is the bare model's forward and backward on the rows one by one,
without padding. Peak memory is measured in processes of their own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset

from grpo_ext.training.layout import CostModel, RowLength, balanced_ranks

LENGTHS = json.loads((Path(__file__).parent / "rollout_lengths.json").read_text())
MODES = {
    "full": {},
    "kl": {"kl": True},
    "lora": {"lora": True},
    "lora, kl": {"lora": True, "kl": True},
    "half of the groups flat": {"flat": True},
    "half of the groups flat, calculate_entropy off": {"flat": True, "entropy": False},
    "equal lengths": {"equal": True},
}
GENERATIONS = 4
VOCABULARY = 4096


def make_model(folder: Path) -> None:
    """Six layers of width 256, saved so that both trainers (and TRL's reference) load it by name."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)


def rows_of(mode: dict) -> list[RowLength]:
    """Lengths of the 64 rows."""
    rows = [RowLength(*n) for n in zip(LENGTHS["prompt_lengths"], LENGTHS["completion_lengths"], strict=True)]
    if mode.get("equal"):
        mean = sum(n.completion for n in rows) // len(rows)
        rows = [RowLength(100, mean)] * len(rows)
    return rows


def make_trainer(kind: str, folder: Path, mode: dict):
    """TRL's trainer or ours, set to the same objective: token-mean, clip 0.2, advantages without the std."""
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer

    rows = rows_of(mode)
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    prompt_ids = [draw(rows[i - i % GENERATIONS].prompt) for i in range(len(rows))]
    completion_ids = [draw(n.completion) for n in rows]

    def rollout(prompts, trainer):
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[0.0] * n.completion for n in rows],
        }

    def reward(completions, **kwargs):
        flat = [mode.get("flat") and (i // GENERATIONS) % 2 for i in range(len(rows))]
        return [0.0 if flat[i] else float(i % GENERATIONS) for i in range(len(rows))]

    common = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 8,
        "num_generations": GENERATIONS,
        "max_completion_length": 1024,
        "learning_rate": 0.0,
        "lr_scheduler_type": "constant",
        "activation_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "shuffle_dataset": False,
        "bf16": False,
        "dataloader_pin_memory": False,
    }
    if kind == "trl":
        args = GRPOConfig(
            str(folder / "trl"),
            loss_type="dapo",
            beta=0.001 if mode.get("kl") else 0.0,
            use_bias_correction_kl=False,
            scale_rewards="none",
            use_cpu=not torch.accelerator.is_available(),
            **common,
        )
    else:
        args = GRPOVerlConfig(
            str(folder / "ours"),
            use_kl_loss=bool(mode.get("kl")),
            norm_adv_by_std_in_grpo=False,
            calculate_entropy=mode.get("entropy", True),
            **common,
        )
    trainer = (GRPOTrainer if kind == "trl" else GRPOVerlTrainer)(
        str(folder / "model"),
        reward,
        args,
        Dataset.from_dict({"prompt": [f"t{i + 2}" for i in range(len(rows) // GENERATIONS)]}),
        rollout_func=rollout,
        peft_config=LoraConfig(r=16, target_modules="all-linear") if mode.get("lora") else None,
    )
    if mode.get("lora"):
        with torch.no_grad():  # a new adapter's B is 0, and so are all gradients but B's: give both trainers the same B
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.sin(torch.arange(parameter.numel()).view_as(parameter).float()) / 100)
    trainer.create_optimizer()
    trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.optimizer)
    trainer.current_gradient_accumulation_steps = 8
    return trainer


def update(trainer) -> torch.Tensor:
    """One update as the training loop runs it; returns the gradient."""
    batch = [row for row in trainer.train_dataset for _ in range(GENERATIONS)]
    for i in range(8):
        trainer.accelerator.gradient_state._set_sync_gradients(i == 7)
        trainer.training_step(trainer.model, batch, None)
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    trainer.optimizer.step()
    trainer.model.zero_grad()
    if hasattr(trainer, "_actor_metrics"):
        trainer.last = trainer._actor_metrics.sums["train"].reduce(trainer.accelerator)
    synchronise()
    return gradient


def synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def floor(trainer, mode: dict) -> float:
    """Seconds of the bare model's forward and backward on the unpadded rows, one by one."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    device = trainer.accelerator.device
    rows = [torch.randint(2, VOCABULARY, (1, n.total), device=device) for n in rows_of(mode)]
    start = time.perf_counter()
    for ids, n in zip(rows, rows_of(mode), strict=True):
        logits = model(input_ids=ids, logits_to_keep=n.completion + 1, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits.float(), ids[0, -n.completion :]).backward()
    synchronise()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def own_python(trainer) -> float:
    """Share of an update spent in the objective, the counts and the metrics."""
    from grpo_ext.training import trainer as module

    spent = 0.0

    def timed(function):
        def wrapper(*args, **kwargs):
            nonlocal spent
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.perf_counter() - start

        return wrapper

    names = ("ppo_loss", "forward_metrics", "nonfinite_counts", "mean_metric")
    originals = {name: getattr(module, name) for name in names}
    sums = trainer._actor_metrics.sums["train"]
    try:
        for name, function in originals.items():
            setattr(module, name, timed(function))
        sums.add = timed(sums.add)
        start = time.perf_counter()
        update(trainer)
        return spent / (time.perf_counter() - start)
    finally:
        del sums.add
        for name, function in originals.items():
            setattr(module, name, function)


def measure(name: str, rounds: int) -> dict:
    """The figures of one mode."""
    mode = MODES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model")
        trainers = {kind: make_trainer(kind, folder, mode) for kind in ("trl", "ours")}
        seconds = {"trl": [], "ours": [], "floor": []}
        gradients = {}
        for round_number in range(rounds + 1):
            for kind, trainer in trainers.items():
                start = time.perf_counter()
                gradients[kind] = update(trainer)
                seconds[kind].append(time.perf_counter() - start)
            seconds["floor"].append(floor(trainers["ours"], mode))
            if round_number == 0:  # a warm-up
                seconds = {kind: [] for kind in seconds}
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        gap = (gradients["ours"] - gradients["trl"]).norm() / gradients["trl"].norm()
        overhead = own_python(trainers["ours"])
    rows = rows_of(mode)
    real = sum(n.total for n in rows)
    padded = len(rows) * (max(n.prompt for n in rows) + max(n.completion for n in rows))
    padding = trainers["ours"].last["perf/padding_fraction"]
    memory = {kind: peak_memory(kind, name) for kind in ("trl", "ours")}
    return {
        "mode": name,
        "TRL s": median["trl"],
        "ours s": median["ours"],
        "floor s": median["floor"],
        "speed-up": statistics.median(t / o for t, o in zip(seconds["trl"], seconds["ours"], strict=True)),
        "ours / floor": statistics.median(o / f for o, f in zip(seconds["ours"], seconds["floor"], strict=True)),
        "TRL tokens": padded / real,
        "our tokens": 1 / (1 - padding),
        "gradient gap": gap.item(),
        "own Python": overhead,
        "memory": memory["ours"] / memory["trl"],
    }


def peak_memory(kind: str, mode: str) -> float:
    """Bytes that an update needs beyond what the trainer holds before it, in a process of its own."""
    command = [sys.executable, __file__, "--memory_of", kind, "--modes", mode]
    # Freed blocks go back to the system at once, so that the resident peak is the update's own
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return float(output.split()[-1])


def print_memory(kind: str, mode: dict) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model")
        trainer = make_trainer(kind, folder, mode)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            update(trainer)
            print(torch.cuda.max_memory_allocated() - before)
            return
        # Not getrusage: its maximum begins with that of the process that started this one
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_peak()
        update(trainer)
        print(resident_peak() - before)


def resident_peak() -> int:
    """Bytes, the largest resident size since it was reset; on Linux."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def ranks_table() -> None:
    """The dearest of 8 simulated ranks over their mean, with rows where they lie and with rows exchanged."""
    rows = rows_of({})
    print("| ranks | rows where they lie | exchanged |\n| --- | --- | --- |")
    cost = CostModel(crossover=6.0 * 896, overhead=0.0)
    costs = [cost.row(n.total) for n in rows]
    for ranks in (2, 4, 8):
        size, mean = len(rows) // ranks, sum(costs) / ranks
        lying = max(sum(costs[k : k + size]) for k in range(0, len(rows), size)) / mean
        dealt = max(sum(costs[i] for i in rank) for rank in balanced_ranks(costs, ranks, 1)) / mean
        print(f"| {ranks} | {lying:.2f} | {dealt:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), metavar="MODE")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one of warm-up")
    parser.add_argument("--ranks", action="store_true", help="print the balance of simulated ranks only")
    parser.add_argument("--memory_of", choices=["trl", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        ranks_table()
        return
    if options.memory_of:
        print_memory(options.memory_of, MODES[options.modes[0]])
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, median of {options.rounds} rounds")
    columns = None
    for name in options.modes:
        figures = measure(name, options.rounds)
        if columns is None:
            columns = list(figures)
            print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
        texts = [
            f"{v:.1e}" if k == "gradient gap" else f"{v:.2f}" if isinstance(v, float) else v for k, v in figures.items()
        ]
        print("| " + " | ".join(texts) + " |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
