"""Runs that write down their prompts and completions, for test_resume.py and test_nonfinite.py.

In a test's own process: `trainer(...)` and `outcome(...)`. As a script, alone or under torchrun, it does one job after
another:

    python resume_worker.py '[{"out": "a", "settings": {"max_steps": 4}}, {"out": "b", "resume": "a/checkpoint-1"}]'
"""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import conftest  # noqa: F401  (no network)

import grid_worker
import tiny
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from grpo_ext import POLICY_LOSSES, GRPOVerlConfig, GRPOVerlTrainer, register_policy_loss
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
# Dynamic sampling, and a KL in the reward whose coefficient moves
FILTERED = {
    "filter_groups": True,
    "use_kl_in_reward": True,
    "kl_penalty": "low_var_kl",
    "kl_ctrl": "adaptive",
    "kl_coef": 0.1,
    "target_kl": 0.01,
    "horizon": 50,
}
RANK = int(os.environ.get("RANK", "0"))


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
        with (out / f"record_{RANK}.jsonl").open("a") as file:
            entry = {"step": trainer_state.global_step, "prompts": prompts, "completions": completion_ids}
            file.write(json.dumps(entry) + "\n")
        return tiny.length_reward(prompts, None, completion_ids)

    settings = {**SETTINGS, **settings}
    if "zero" in settings:
        settings["deepspeed"] = grid_worker.deepspeed_config(settings.pop("zero"))
        del settings["deepspeed"]["train_batch_size"]  # with `use_cpu` the ranks are counted too late for it
    data = tiny.prompts(8)
    out.mkdir(parents=True, exist_ok=True)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return GRPOVerlTrainer(
        policy(kind),
        reward,
        GRPOVerlConfig(str(out), **settings),
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
    """Every parameter, and what the optimizer keeps; with DeepSpeed, of this rank's share."""
    if not run.is_deepspeed_enabled:
        state = list(run.optimizer.state_dict()["state"].values())
        found = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    else:
        import deepspeed

        zero = run.model_wrapped.optimizer
        shares = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
        state = [{"weights": share.detach(), **zero.optimizer.state[share]} for share in shares]
        with deepspeed.zero.GatheredParameters([p for p in run.model.parameters() if hasattr(p, "ds_id")]):
            found = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for i, kept in enumerate(state):
        found |= {f"optimizer {i} {name}": value.clone() for name, value in kept.items() if torch.is_tensor(value)}
    return found


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names under which two outcomes are not the same, bit for bit (NaN is not the same as NaN)."""
    return [name for name in left | right if name not in left or name not in right or not left[name].equal(right[name])]


def launch(jobs: list[dict], ranks: int = 1, *, fails: bool = False) -> str:
    """Run this file on `ranks` processes; returns what it printed.

    Args:
        jobs: as `main` takes them.
        fails: whether it has to fail, instead of having to succeed.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *torchrun, __file__, json.dumps(jobs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert (done.returncode != 0) == fails, done.stdout[-6000:]
    return done.stdout


def result(out, rank: int = 0) -> dict:
    """What a job of `launch` left: its `outcome`, `log` and `error`."""
    return torch.load(Path(out) / f"result_{rank}.pt", weights_only=True)


# Numbers that are not finite

_SPOILED: dict = {}


def spoil(
    run: GRPOVerlTrainer, steps: list[int], how: str = "gradient", rank: int = 0, value: float = math.nan
) -> None:
    """Make the gradient of the given optimizer steps (the first is 1) not finite, on one rank.

    Args:
        how: `gradient`, a hook on a parameter; or `loss`, the policy loss that is registered as `spoiled`.
    """

    def now() -> bool:
        return rank == RANK and run.model.training and run.state.global_step + 1 in steps

    _SPOILED.update(now=now, value=value)
    if how == "gradient":
        parameter = next(p for p in run.model.parameters() if p.requires_grad)
        parameter.register_hook(lambda grad: torch.full_like(grad, value) if now() else grad)


@register_policy_loss("spoiled")
def spoiled(*args, **kwargs):
    """`vanilla`, times something that is not finite when `spoil` says so."""
    loss, metrics = POLICY_LOSSES["vanilla"](*args, **kwargs)
    return loss * _SPOILED["value"] if _SPOILED["now"]() else loss, metrics


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
    torch.save({"outcome": outcome(run)}, out / "result_0.pt")


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
            (out / "result_0.pt").unlink()
            for folder in out.glob("checkpoint-*"):
                shutil.rmtree(folder)
            continue
        assert code == -signal.SIGKILL, f"an attempt failed by itself, after {kills} kills, with {kill}"
        kills += 1
        complete = list(out.glob("checkpoint-*/grpo_ext_complete.json"))
        print(json.dumps({"kill": kills, **kill, "complete": sorted(p.parent.name for p in complete)}), flush=True)


def run(job: dict) -> None:
    """Train, or go on from `job["resume"]`; leaves the outcome and the log beside the record."""
    out = Path(job["out"])
    job_settings = job.get("settings", {})
    found = trainer(out, job.get("kind", "full"), stream=job.get("stream", False), **job_settings)
    if "spoil" in job:
        spoil(found, **job["spoil"])
    if job.get("kill", {}).get("rank") == RANK:
        kill_at(job["kill"]["call"], job["kill"]["count"])
    error = None
    try:
        found.train(resume_from_checkpoint=job.get("resume"))
    except (FloatingPointError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    left = {"outcome": outcome(found), "log": found.state.log_history, "error": error}
    torch.save(left, out / f"result_{RANK}.pt")
    if "RANK" in os.environ:
        # TRL and accelerate keep the model's engine in a shared state: the next job starts afresh
        found.accelerator.free_memory()
        torch.distributed.barrier()
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()


def main() -> None:
    """Do the jobs that the command line describes as JSON."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        import deepspeed

        # On CPUs it compiles a kernel for collectives, which takes minutes; without it they are gloo's
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for job in json.loads(sys.argv[1]):
        killed_over_and_over(job) if "kills" in job else run(job)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
