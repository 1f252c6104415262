"""The scripts and configs under examples/, run as a reader runs them."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_ext import GRPOVerlConfig
from grpo_ext.training.config import OBJECTIVE_FIELDS
from grpo_ext.training.logbook import read_log

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
QUICKSTART = EXAMPLES / "configs" / "quickstart.yaml"
# Two optimizer steps of 8 responses in each generation of 16
SMALL = ["--per_device_train_batch_size", "8", "--steps_per_generation", "2", "--eval_problems", "8"]

# A recipe at the size of the embedded model; what differs between recipes stays as it is
EMBEDDED = [
    "--model_name_or_path", "examples/tiny_qwen2", "--dataset_name", "word_problems", "--bf16", "false",
    "--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1", "--steps_per_generation", "2",
    "--num_generations", "4", "--max_completion_length", "24", "--max_steps", "2", "--eval_problems", "0",
    "--save_strategy", "no", "--log_completions", "false", "--disable_tqdm", "true",
]  # fmt: skip
RECIPES = {
    "dapo": (["--overlong_buffer_len", "8"], ["filter_groups/kept", "reward_overlong/mean"]),
    "dr-grpo": ([], []),
    "gspo": ([], []),
    "cispo": ([], []),
    "gmpo": ([], []),
    "kl-cov": ([], []),
    "reinforce-plus-plus": ([], ["actor/reward_kl_penalty"]),
    "deepseek-v3": ([], []),
    "on-policy-distillation": (["--teacher_model", "examples/tiny_qwen2"], ["distillation/loss"]),
    "custom_policy_loss": ([], ["actor/positive_fraction"]),
}

sys.path.insert(0, str(EXAMPLES))
import custom_policy_loss  # noqa: E402, F401  (registers the loss that its config names)
import train_gsm8k  # noqa: E402


def run_script(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / "train_gsm8k.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def train(monkeypatch):
    """The script's `main` in this process, which saves the imports."""

    def run(*arguments) -> None:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["train_gsm8k.py", *map(str, arguments)])
        train_gsm8k.main()

    return run


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a quickstart of two steps with a checkpoint, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "two_steps"
    saving = ["--save_strategy", "steps", "--save_steps", "2"]
    done = run_script("--config", QUICKSTART, "--output_dir", folder, "--max_steps", "2", *SMALL, *saving)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


def test_help_shows_every_key_of_the_objective():
    done = run_script("--help")
    assert done.returncode == 0, done.stderr
    flags = set(re.findall(r"--(\w+)", done.stdout))
    assert flags.issuperset(OBJECTIVE_FIELDS)
    assert flags.issuperset(
        {"dataset_name", "reward", "overwrite", "use_peft", "learning_rate", "norm_adv_by_std_in_grpo"}
    )


@pytest.mark.parametrize("path", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_parses_and_means_what_it_says(path):
    # TrlParser refuses keys that it does not know
    task, training, model = train_gsm8k.make_parser().parse_args_and_config(["--config", str(path)])
    assert isinstance(training, GRPOVerlConfig)
    in_force = {**vars(model), **vars(training), **vars(task)}
    for key, value in yaml.safe_load(path.read_text()).items():
        value = [] if (key, value) == ("report_to", "none") else value
        assert in_force[key] in (value, [value]), key


def test_a_run_leaves_what_the_docstring_lists(two_steps):
    folder, printed = two_steps
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= {"accuracy_before", "accuracy_after", "steps", "seconds"}
    assert summary["steps"] == 2 and summary["seconds"] > 0
    assert {summary["accuracy_before"] * 8 % 1, summary["accuracy_after"] * 8 % 1} == {0}
    steps = [entry for entry in read_log(folder / "log.jsonl") if "actor/pg_clipfrac" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert "reward" in steps[0]
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["training"]["clip_ratio_high"] == 0.28 and settings["task"]["reward"] == "strict"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in ("curves.png", "summary.json", "final"):
        assert str(folder / name) in printed
    assert "Warning" not in printed and "Traceback" not in printed


def test_the_trained_model_reloads_and_answers(two_steps):
    final = two_steps[0] / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    message = [{"role": "user", "content": "Anna is 20 years old. Ben is 5 years younger. How old is Ben?"}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    assert re.search(r"#### \d+", tokenizer.decode(output[0]))


def test_resume_continues_the_log_and_keeps_the_accuracy_before(two_steps, tmp_path, train):
    folder = tmp_path / "resumed"
    shutil.copytree(two_steps[0], folder)
    train(
        "--config", QUICKSTART, "--output_dir", folder, "--max_steps", "4", *SMALL, "--resume_from_checkpoint", "auto"
    )  # fmt: skip
    steps = [entry["step"] for entry in read_log(folder / "log.jsonl") if "actor/pg_clipfrac" in entry]
    assert steps == [1, 2, 3, 4]
    earlier, summary = (json.loads((path / "summary.json").read_text()) for path in (two_steps[0], folder))
    assert summary["steps"] == 4 and summary["accuracy_before"] == earlier["accuracy_before"]


def test_lora_saves_an_adapter_that_reloads(tmp_path, train):
    train(
        "--config", QUICKSTART, "--output_dir", tmp_path, "--max_steps", "1", *SMALL, "--eval_problems", "0",
        "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear",
    )  # fmt: skip
    assert (tmp_path / "final" / "adapter_config.json").exists()
    assert not (tmp_path / "final" / "model.safetensors").exists()
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final")
    moved = [parameter for name, parameter in adapted.named_parameters() if "lora_B" in name]
    assert moved and all(parameter.abs().sum() > 0 for parameter in moved)  # B starts at 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_before"] is None and summary["accuracy_after"] is None


def test_every_recipe_is_run():
    ready = {path.stem for path in (EXAMPLES / "configs").glob("*.yaml")}
    assert ready - {"quickstart", "qwen2.5-0.5b-lora", "qwen3-8b"} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_two_steps_on_the_embedded_model(name, tmp_path, train):
    settings, logged = RECIPES[name]
    config = EXAMPLES / "configs" / f"{name}.yaml"
    train("--config", config, "--output_dir", tmp_path, *EMBEDDED, *settings)
    steps = [entry for entry in read_log(tmp_path / "log.jsonl") if "grad_norm" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert {"reward", *logged} <= {*steps[0], *steps[1]}  # one generation for both
    for entry in steps:
        assert "actor/pg_loss" in entry
        assert all(math.isfinite(value) for key, value in entry.items() if isinstance(value, float)), entry


def test_overwrite_removes_the_earlier_run_and_nothing_else(tmp_path):
    for name in ("checkpoint-2/model.safetensors", "final/model.safetensors", "completions/1.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    kept = {"notes.txt", "settings.json"}
    for name in ("log.jsonl", "summary.json", "curves.png", *kept):
        (tmp_path / name).touch()
    train_gsm8k.remove_earlier_run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


def an_earlier_run(tmp_path):
    (tmp_path / "log.jsonl").touch()
    return ["--output_dir", tmp_path, "--overwrite", "false"]


def a_file_as_parent(tmp_path):
    (tmp_path / "file").touch()
    return ["--output_dir", tmp_path / "file" / "run"]


def an_empty_dataset_folder(tmp_path):
    (tmp_path / "data").mkdir()
    return ["--output_dir", tmp_path, "--dataset_name", tmp_path / "data"]


def a_key_with_a_typo(tmp_path):
    (tmp_path / "typo.yaml").write_text("learning_rat: 1.0e-4\n")
    return ["--output_dir", tmp_path, "--config", tmp_path / "typo.yaml"]


CASES = {
    "an earlier run": (an_earlier_run, ["output_dir", "--overwrite", "--resume_from_checkpoint auto"]),
    "reward": (["--reward", "generous"], ["reward='generous'", "flexible, robust, strict"]),
    "model": (["--model_name_or_path", "examples/absent"], ["model_name_or_path='examples/absent'"]),
    "eval_problems": (["--eval_problems", "-1"], ["eval_problems=-1", "0"]),
    "no dataset folder": (["--dataset_name", "no/such/folder"], ["no/such/folder", "does not exist"]),
    "empty dataset folder": (an_empty_dataset_folder, ["train.jsonl", "does not exist"]),
    "output_dir": (a_file_as_parent, ["output_dir", "file/run", "writable"]),
    "checkpoint": (["--resume_from_checkpoint", "no/checkpoint"], ["resume_from_checkpoint='no/checkpoint'", "auto"]),
    "TRL's name": (["--epsilon", "0.1"], ["epsilon=0.1", "clip_ratio_low"]),
    "group size": (["--num_generations", "7"], ["num_generations=7", "use num_generations among"]),
    "unknown flag": (["--no_such_flag", "1"], ["--no_such_flag"]),
    "unknown key": (a_key_with_a_typo, ["learning_rat"]),
    "no config": (["--config", "no/such.yaml"], ["no/such.yaml"]),
}


@pytest.mark.parametrize(("arguments", "said"), CASES.values(), ids=CASES)
def test_a_setting_that_cannot_work_is_one_line(arguments, said, tmp_path, train):
    given = arguments(tmp_path) if callable(arguments) else ["--output_dir", tmp_path, *arguments]
    with pytest.raises(SystemExit) as exit_:
        train("--config", QUICKSTART, *given) if "--config" not in given else train(*given)
    message = str(exit_.value.code)
    assert message.startswith("error: ") and "\n" not in message
    assert all(part in message for part in said), message


def test_a_missing_model_name_is_one_line(tmp_path, train):
    with pytest.raises(SystemExit, match="error: model_name_or_path is not set"):
        train("--output_dir", tmp_path, "--dataset_name", "word_problems")


def test_the_environment_script_says_which_python_it_lacks(tmp_path):
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "environment.sh", tmp_path / ".ci")
    done = subprocess.run(
        ["bash", script, "plot"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "python3.none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not (tmp_path / ".venv").exists()
    assert done.stderr.startswith("error: python3.none does not run; install Python 3.11")


@pytest.mark.slow
def test_the_quickstart_raises_accuracy_by_twenty_points(tmp_path, train):
    train("--config", QUICKSTART, "--output_dir", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
    assert summary["seconds"] < 300
