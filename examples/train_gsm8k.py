"""Fine-tune a language model on GSM8K (or on the embedded word problems) with verl's GRPO objective.

Full fine-tuning of Qwen2.5-0.5B-Instruct:

    python examples/train_gsm8k.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --output_dir runs/qwen

With LoRA, from a config, one value changed on the command line:

    python examples/train_gsm8k.py --config examples/configs/qwen2.5-0.5b-lora.yaml --learning_rate 2e-5

Every option of `GRPOVerlConfig` (verl's objective keys and TRL's settings) and of TRL's `ModelConfig` (--use_peft,
--lora_r, --dtype, ...) is a flag and a YAML key. The run's folder receives log.jsonl (one line per log entry),
completions/ (parquet, one file per log entry), greedy_before.jsonl and greedy_after.jsonl (answers to the test
problems), settings.json, checkpoints, final/ (the model or adapter with its tokenizer), curves.png and summary.json.
"""

import json
import logging
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpo_ext.tasks.rewards import REWARDS, flexible_score, robust_score, strict_score

SCORES = {"strict": strict_score, "flexible": flexible_score, "robust": robust_score}
WORD_PROBLEMS = "word_problems"


@dataclass
class TaskArguments:
    """What is trained on and how it is rewarded."""

    dataset_name: str = field(
        default="openai/gsm8k",
        metadata={
            "help": "GSM8K on the hub, a local folder with train.jsonl and test.jsonl, or 'word_problems' (embedded)."
        },
    )
    reward: str = field(
        default="robust",
        metadata={
            "help": "How answers are scored: 'strict' (verl's, only after '#### '), 'flexible' (verl's, the last "
            "number) or 'robust' (numeric comparison of the final answer)."
        },
    )
    train_problems: int | None = field(default=None, metadata={"help": "Use so many training problems. None: all."})
    eval_problems: int = field(
        default=200,
        metadata={"help": "Test problems for the greedy accuracy before and after training. 0: none."},
    )
    eval_decoding_batch: int = field(
        default=32, metadata={"help": "Test problems per rank that are decoded at a time."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Start anew in a folder that holds an earlier run."})


def load_problems(task: TaskArguments, seed: int):
    """The training set and the test subset (`None` if empty), with `prompt` and `answer` columns."""
    if task.eval_problems < 0:
        raise ValueError(f"eval_problems={task.eval_problems} must be 0 (no evaluation) or more")
    if task.dataset_name == WORD_PROBLEMS:
        from grpo_ext.tasks.word_problems import load_word_problems

        train = load_word_problems("train", size=task.train_problems)
        test = load_word_problems("test", size=task.eval_problems) if task.eval_problems else None
    else:
        from grpo_ext.tasks.gsm8k import load_gsm8k

        train = load_gsm8k(task.dataset_name, "train", limit=task.train_problems, seed=seed)
        test = load_gsm8k(task.dataset_name, "test", limit=task.eval_problems) if task.eval_problems else None
    return train, test


def resume_choice(training_args, overwrite: bool) -> str | bool | None:
    """What `--resume_from_checkpoint` asks for: a path, True for the last checkpoint, or None for a fresh start.

    `auto` resumes if the run's folder has a complete checkpoint and starts anew otherwise.

    Raises:
        ValueError: a fresh start would write over an earlier run's log.
    """
    from grpo_ext.training.checkpoints import last_usable

    asked = training_args.resume_from_checkpoint
    folder = Path(training_args.output_dir)
    if asked is None or asked.lower() in ("false", "none"):
        if (folder / "log.jsonl").exists() and not overwrite:
            raise ValueError(
                f"output_dir={str(folder)!r} holds an earlier run (log.jsonl); pass --resume_from_checkpoint auto to "
                f"continue it, --overwrite to start anew there, or another --output_dir"
            )
        return None
    if asked.lower() in ("auto", "true", "last"):
        try:
            last_usable(str(folder))
        except ValueError as error:
            if asked.lower() != "auto":
                raise ValueError(f"resume_from_checkpoint={asked!r}: {error}") from error
            return None
        return True
    if not os.path.isdir(asked):
        raise ValueError(f"resume_from_checkpoint={asked!r} is no folder; give a checkpoint's path, or auto")
    return asked


def prepare(task: TaskArguments, training_args, model_args):
    """The trainer, its accuracy callback (`None` without test problems) and where it resumes.

    Raises:
        ValueError, OSError: a setting, a folder, the model or the data cannot be used.
    """
    from transformers import ProgressCallback
    from trl import get_peft_config, get_quantization_config

    from grpo_ext import GRPOVerlTrainer
    from grpo_ext.training.evaluation import GreedyAccuracyCallback
    from grpo_ext.training.logbook import JsonlLogCallback, ShortProgressCallback

    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is not set; give a model, such as Qwen/Qwen2.5-0.5B-Instruct")
    if task.reward not in REWARDS:
        raise ValueError(f"reward={task.reward!r} is unknown; choose one of {', '.join(sorted(REWARDS))}")
    resume = resume_choice(training_args, task.overwrite)
    train_dataset, test_dataset = load_problems(task, training_args.seed)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    folder = Path(training_args.output_dir)
    try:
        trainer = GRPOVerlTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=REWARDS[task.reward],
            args=training_args,
            train_dataset=train_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    except ConnectionError as error:  # the teacher's, a kind of OSError
        raise ValueError(f"teacher_model={training_args.teacher_model!r} does not answer: {error}") from error
    except OSError as error:  # transformers' own text does not always name the model
        reason = " ".join(str(error).split())
        raise ValueError(f"model_name_or_path={model_args.model_name_or_path!r} cannot be loaded: {reason}") from error
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ShortProgressCallback())
    trainer.add_callback(JsonlLogCallback(folder / "log.jsonl"))
    accuracy = None
    if test_dataset is not None:
        accuracy = GreedyAccuracyCallback(
            trainer, test_dataset, SCORES[task.reward], batch_size=task.eval_decoding_batch
        )
        trainer.add_callback(accuracy)
    if trainer.accelerator.is_main_process:
        if resume is None:
            remove_earlier_run(folder)
        settings = {"task": asdict(task), "training": training_args.to_dict(), "model": asdict(model_args)}
        write_json(folder / "settings.json", settings)
    return trainer, accuracy, resume


def remove_earlier_run(folder: Path) -> None:
    """Remove what an earlier run left, so that no later one resumes from its checkpoints or reports its results."""
    if not (folder / "log.jsonl").exists():
        return
    for name in ("final", "completions", *(path.name for path in folder.glob("checkpoint-*"))):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("log.jsonl", "curves.png", "summary.json", "greedy_before.jsonl", "greedy_after.jsonl"):
        (folder / name).unlink(missing_ok=True)


def main() -> None:
    """Train, evaluate, save, and report in summary.json."""
    started = time.time()
    try:
        task, training_args, model_args = make_parser().parse_args_and_config()
        trainer, accuracy, resume = prepare(task, training_args, model_args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")

    folder = Path(training_args.output_dir)
    main_process = trainer.accelerator.is_main_process

    def record() -> dict:
        """Write what is known by now, so that a run that is cut short and resumed keeps its first accuracy."""
        summary = read_summary(folder) if resume or accuracy is None else {"accuracy_before": accuracy.before}
        if accuracy is not None:
            summary["accuracy_after"] = accuracy.after
            summary["eval_problems"] = len(next(iter(accuracy.completions.values()), []))
        summary |= {"steps": trainer.state.global_step, "seconds": round(time.time() - started, 1)}
        if main_process:
            write_json(folder / "summary.json", summary)
            for when, texts in (accuracy.completions if accuracy else {}).items():
                lines = [json.dumps({"problem": i, "completion": text}) + "\n" for i, text in enumerate(texts)]
                (folder / f"greedy_{when}.jsonl").write_text("".join(lines), encoding="utf-8")
        return summary

    if accuracy is not None:
        accuracy.on_measured = record
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    summary = record()
    if main_process:
        report(folder, summary)
    trainer.end()


def read_summary(folder: Path) -> dict:
    """The summary so far of a run that is resumed."""
    path = folder / "summary.json"
    empty = {"accuracy_before": None, "accuracy_after": None, "eval_problems": 0}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or cut short
        return empty


def write_json(path: Path, content: dict) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    scratch.replace(path)  # at once, so that a killed run leaves the old one or the new one


def report(folder: Path, summary: dict) -> None:
    """Draw the curves where matplotlib is installed, and say where everything lies."""
    folder = folder.resolve()  # a script may have changed the folder that the reader is in
    try:
        from plot_run import plot_run

        plot = str(plot_run(folder / "log.jsonl", folder / "curves.png"))
    except ImportError:
        plot = "not drawn: pip install matplotlib, then python examples/plot_run.py " + str(folder)
    if summary["accuracy_after"] is not None:
        before = summary["accuracy_before"]
        before = "not measured" if before is None else f"{before:.1%}"
        print(
            f"greedy accuracy on {summary['eval_problems']} test problems: {before} before, "
            f"{summary['accuracy_after']:.1%} after"
        )
    print(f"plot:    {plot}\nsummary: {folder / 'summary.json'}\nmodel:   {folder / 'final'}")


def make_parser():
    from trl import ModelConfig, TrlParser

    from grpo_ext import GRPOVerlConfig

    return TrlParser(
        (TaskArguments, GRPOVerlConfig, ModelConfig),
        usage="%(prog)s [--config YAML] [--KEY VALUE ...]",  # argparse would list some 300 flags at each error
        description=__doc__.split("\n\n")[0],
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # TRL 1.16 still sets and reads names that transformers 5.24 has changed
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing` is deprecated", category=FutureWarning)
    main()
