"""Runs that write down their prompts and completions, for test_resume.py and test_nonfinite.py.

In a test's own process: `trainer(...)` and `outcome(...)`. As a script, alone or under torchrun:

    python tests/resume_worker.py '{"out": "run", "mode": "run", "settings": {"max_steps": 4}, "resume": "run/checkpoint-2"}'
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import conftest  # noqa: F401  (no network)

import tiny
import torch
from peft import LoraConfig, get_peft_model

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer
from grpo_ext.training.logbook import JsonlLogCallback

STEPS = 10  # two and a half epochs of 8 prompts, unless a test says otherwise
SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "report_to": [],
    "activation_checkpointing": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 7,
}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


def policy(kind: str):
    """The model as a user would pass it at the start of a run and again when it is resumed."""
    if kind != "adapter":
        return tiny.model()
    # An adapter that has been trained before: not the identity
    model = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    return model


def trainer(out, kind: str = "full", *, stream: bool = False, callbacks=(), **settings) -> GRPOVerlTrainer:
    """A trainer that samples from the model and records what it saw in `out/record_<rank>.jsonl`.

    Args:
        kind: `full`, `lora` (a `peft_config`) or `adapter` (a `PeftModel` that is trained further).
        stream: whether the dataset is iterable.
    """
    out = Path(out)

    def reward(prompts, completion_ids, trainer_state, **kwargs):
        rank = int(os.environ.get("RANK", "0"))
        with (out / f"record_{rank}.jsonl").open("a") as file:
            entry = {"step": trainer_state.global_step, "prompts": prompts, "completions": completion_ids}
            file.write(json.dumps(entry) + "\n")
        return tiny.length_reward(prompts, None, completion_ids)

    data = tiny.prompts(8)
    out.mkdir(parents=True, exist_ok=True)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return GRPOVerlTrainer(
        policy(kind),
        reward,
        GRPOVerlConfig(str(out), **{**SETTINGS, **settings}),
        data.to_iterable_dataset() if stream else data,
        processing_class=tiny.tokenizer(),
        callbacks=list(callbacks),
        **({"peft_config": lora} if kind == "lora" else {}),
    )


def records(out, rank: int = 0) -> list[dict]:
    """What a run saw, in the order in which it saw it; a line cut short by a kill is left out."""
    path = Path(out) / f"record_{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    entries = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return entries


def outcome(run: GRPOVerlTrainer) -> dict[str, torch.Tensor]:
    """Every parameter, and the optimizer's state of each; under ZeRO-3 gathered, without the optimizer's."""
    if run.is_deepspeed_enabled:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(run.model.parameters())):
            found = {name: p.detach().float().clone() for name, p in run.model.named_parameters()}
        for i, partition in enumerate(_partitions(run)):
            for name, value in run.model_wrapped.optimizer.optimizer.state[partition].items():
                if torch.is_tensor(value):
                    found[f"partition {i} {name}"] = value.clone()
        return found
    found = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for i, state in run.optimizer.state_dict()["state"].items():
        found |= {f"optimizer {i} {name}": value.clone() for name, value in state.items() if torch.is_tensor(value)}
    return found


def _partitions(run: GRPOVerlTrainer) -> list[torch.Tensor]:
    return [p for group in run.model_wrapped.optimizer.optimizer.param_groups for p in group["params"]]


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names under which two outcomes are not the same, bit for bit (NaN is not the same as NaN)."""
    return [name for name in left | right if name not in left or name not in right or not left[name].equal(right[name])]


# Kills


def kill_at(call: str, count: int) -> None:
    """End this process without warning at the `count`-th call of a function that saving uses."""
    module, name = {"save": (torch, "save"), "replace": (os, "replace"), "rmtree": (shutil, "rmtree")}[call]
    real, calls = getattr(module, name), 0

    def patched(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls < count:
            return real(*args, **kwargs)
        if call == "save":  # half a file
            torch_file = Path(args[1])
            real(*args, **kwargs)
            os.truncate(torch_file, torch_file.stat().st_size // 2)
        if call == "rmtree":  # half a folder
            for path in sorted(Path(args[0]).rglob("*"))[::2]:
                if path.is_file():
                    path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, patched)


def attempt(job: dict, kill: dict | None) -> None:
    """Start the run, or go on with it after a kill; `kill` says where this attempt ends."""
    out = Path(job["out"])
    run = trainer(out, job.get("kind", "full"), callbacks=[JsonlLogCallback(out / "log.jsonl")], **job["settings"])
    if kill and "call" in kill:
        kill_at(**kill)
    elif kill:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, kill["seconds"])
    begun = any(out.glob("checkpoint-*/grpo_ext_complete.json"))
    (out / "attempts.jsonl").open("a").write(json.dumps({"kill": kill, "resumed": begun}) + "\n")
    run.train(resume_from_checkpoint=begun)
    torch.save(outcome(run), out / "outcome.pt")


def killed_over_and_over(job: dict) -> None:
    """Kill the run `job["kills"]` times, resume it each time, and let it finish.

    Each attempt is a fork of this process, which has imported everything and done nothing with it. A whole run is timed
    first, for delays that end it at a random point.
    """
    draw = random.Random(job["seed"])
    out = Path(job["out"])

    def forked(kill, folder=out) -> int:
        child = os.fork()
        if child == 0:
            try:
                attempt({**job, "out": str(folder)}, kill)
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    started = time.monotonic()
    assert forked(None, out / "whole") == 0
    whole = time.monotonic() - started
    kills = 0
    while True:
        kill = None
        if kills < job["kills"]:
            kill = draw.choice(
                [
                    {"seconds": draw.uniform(0.05, 0.5) * whole},
                    {"call": "save", "count": draw.randint(1, 8)},
                    {"call": "replace", "count": draw.randint(1, 6)},
                    {"call": "rmtree", "count": draw.randint(1, 2)},
                ]
            )
        code = forked(kill)
        if code == 0 and kill is None:
            break
        if code == 0:  # it ended before the kill: begin anew, the kills so far stay counted
            (out / "outcome.pt").unlink()
            for folder in out.glob("checkpoint-*"):
                shutil.rmtree(folder)
            continue
        assert code == -signal.SIGKILL, f"an attempt failed by itself, after {kills} kills, with {kill}"
        kills += 1
        complete = list(out.glob("checkpoint-*/grpo_ext_complete.json"))
        print(json.dumps({"kill": kills, **kill, "complete": sorted(p.parent.name for p in complete)}), flush=True)
    torch.save({"kills": kills}, out / "kills.pt")


def main() -> None:
    """Do the job that the command line describes as JSON."""
    job = json.loads(sys.argv[1])
    if job["mode"] == "kills":
        return killed_over_and_over(job)
    rank = int(os.environ.get("RANK", "0"))
    out = Path(job["out"])
    run = trainer(out, job.get("kind", "full"), stream=job.get("stream", False), **job["settings"])
    run.train(resume_from_checkpoint=job.get("resume"))
    torch.save(outcome(run), out / f"outcome_{rank}.pt")


if __name__ == "__main__":
    main()
