"""The diagnosis: every rule speaks on a broken run, none on a healthy one, and each thing is said once."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from transformers import TrainerState
from trl import TrlParser

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer
from grpo_ext.training.diagnosis import (
    RULES,
    Diagnosis,
    DiagnosisCallback,
    DiagnosisThresholds,
    RunFacts,
    diagnose,
)
from grpo_ext.training.logbook import read_log

RECORDED = Path(__file__).parent / "data" / "diagnosis"
REAL = Path(__file__).parent.parent / "notebooks" / "data" / "qwen2.5-0.5b" / "log.jsonl"


def recorded(name: str) -> list[dict]:
    return read_log(RECORDED / f"{name}.jsonl")


def run(count: int = 40, every: int = 2, **series) -> list[dict]:
    """A healthy log of one step an entry, a generation every `every` of them, with some numbers put in its place.

    A number is a constant or a function of the step; `a__b` is the key `a/b`.
    """
    healthy = {
        "loss": 0.01,
        "grad_norm": 0.3,
        "entropy": 0.3,
        "reward": lambda step: 0.2 + step / 400,
        "reward_std": 0.4,
        "frac_reward_zero_std": 0.3,
        "completions/mean_length": 150.0,
        "completions/clipped_ratio": 0.02,
        "actor/pg_loss": 0.01,
        "actor/ppo_kl": 0.0005,
        "actor/kl_loss": 0.001,
        "actor/pg_clipfrac": 0.01,
        "actor/pg_clipfrac_lower": 0.0,
    }
    healthy |= {name.replace("__", "/"): value for name, value in series.items()}
    entries = []
    for step in range(1, count + 1):
        entry = {"step": step} | {key: value(step) if callable(value) else value for key, value in healthy.items()}
        if step % every != 1 % every:  # these are logged where a generation was
            entry = {
                key: value for key, value in entry.items() if not key.startswith(("reward", "frac", "completions"))
            }
        entries.append(entry)
    return entries


def names(findings) -> list[str]:
    return [finding.rule for finding in findings]


# What each rule speaks on: a recording, or a history of which one number is made up; with thresholds that differ
BROKEN = {
    "entropy_collapse": run(entropy=lambda step: 0.5 * 0.8**step),
    "ppo_kl": run(actor__ppo_kl=0.2),
    "kl_loss": run(actor__kl_loss=lambda step: 0.02 * step),
    "clip_fraction_high": run(actor__pg_clipfrac=0.4),
    "clip_fraction_low": (run(actor__pg_clipfrac=0.0), {"clip_fraction_min": 0.005}),
    "dual_clip": run(actor__pg_clipfrac_lower=0.02),
    "zero_spread": run(frac_reward_zero_std=0.75, reward=0.1),
    "truncation": run(completions__clipped_ratio=0.8),
    "length_runaway": run(80, completions__mean_length=lambda step: 100 if step < 40 else 20 * step),
    "reward_flat": run(220, reward=0.3),
    "no_gradient": run(loss=0.0, grad_norm=0.0),
    "loss_zero": run(every=1, actor__pg_loss=-1e-8),
    "first_ratio": run(actor__ppo_kl=lambda step: 0.004),
    "sampler_difference": run(**{"sampling/sampling_logp_difference/mean": 0.2}),
    "sampler_kl": run(**{"rollout_corr/k3_kl": 0.05}),
}


def broken(rule: str) -> tuple[list[dict], DiagnosisThresholds | None]:
    case = BROKEN[rule]
    return (case[0], DiagnosisThresholds(**case[1])) if isinstance(case, tuple) else (case, None)


def test_every_rule_is_tried():
    assert set(BROKEN) == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_speaks_on_a_broken_run_and_says_what_since_when_why_and_where_to_look(rule):
    entries, thresholds = broken(rule.name)
    (finding,) = [finding for finding in diagnose(entries, thresholds) if finding.rule == rule.name]
    assert 1 <= finding.step_since <= finding.step <= entries[-1]["step"]
    assert rule.what.lower() in finding.message.lower()
    assert f"since step {finding.step_since}:" in finding.message
    assert rule.meaning in finding.message
    assert f"{rule.reads[0]} is {finding.value:.3g}" in finding.message
    assert all(setting in finding.message for setting in rule.look_at)
    assert f"{rule.threshold}=" in finding.message


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_names_settings_and_thresholds_that_exist(rule):
    settings = {field.name for field in dataclasses.fields(GRPOVerlConfig)}
    assert rule.look_at and settings.issuperset(rule.look_at)
    assert hasattr(DiagnosisThresholds(), rule.threshold)
    assert rule.needs is None or hasattr(RunFacts(), rule.needs)
    assert rule.part in ("any", "first", "later")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_waits_for_several_entries(rule):
    """No single number, however bad, makes a finding."""
    entries, thresholds = broken(rule.name)
    least = (thresholds or DiagnosisThresholds()).min_entries
    assert rule.name not in names(diagnose(entries[: least - 1], thresholds))


def test_nothing_is_said_of_a_healthy_run():
    assert not diagnose(run(400, reward=lambda step: 0.2 + step / 800))
    # One optimizer step a generation: no token is ever clipped, and the ratio is always 1
    assert not diagnose(run(90, every=1, actor__ppo_kl=0.0, actor__pg_clipfrac=0.0))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_one_bad_value_among_good_ones_is_passed_over(rule):
    """Medians: an outlier in a healthy run is not a finding."""
    entries, thresholds = broken(rule.name)
    good = run(len(entries), every=1 if rule.name == "loss_zero" else 2)
    if rule.name == "reward_flat" or thresholds is not None:
        good = [{**entry, "actor/pg_clipfrac": 0.05} for entry in good]
    good[20] = {**entries[20]}
    assert not diagnose(good, thresholds)


def test_the_real_run_has_two_troubles():
    """Cut responses, and groups in which all answers are wrong; its loss, ratio and entropy are sound."""
    assert names(diagnose(read_log(REAL))) == ["zero_spread", "truncation"]


# Recordings (tests/data/diagnosis/README.md)

FOUR_STEPS = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}
ONE_STEP = {"steps_per_generation": 1, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("quickstart", FOUR_STEPS, []),
        ("quickstart_seed1", FOUR_STEPS, []),
        ("healthy_kl", FOUR_STEPS, []),
        ("short", ONE_STEP, ["no_gradient", "truncation", "zero_spread"]),
        ("steep", FOUR_STEPS, ["entropy_collapse", "kl_loss", "ppo_kl", "truncation", "zero_spread"]),
        ("dropout", FOUR_STEPS, ["dual_clip", "first_ratio", "ppo_kl"]),
        ("narrow_clip", FOUR_STEPS, ["clip_fraction_high"]),
        ("one_step", ONE_STEP, ["loss_zero"]),
    ],
)
def test_a_recorded_run_is_told_what_is_the_matter_and_no_more(name, settings, said):
    assert sorted(names(diagnose(recorded(name), settings=settings))) == said
    assert sorted(names(diagnose(recorded(name)))) == said  # a log alone suffices


# When, and how often


def test_what_is_seldom_wrong_is_said_again_only_after_long():
    def cut(*parts):
        return run(400, every=1, completions__clipped_ratio=lambda s: 0.9 * any(a <= s < b for a, b in parts))

    def steps(entries):
        return [finding.step for finding in diagnose(entries) if finding.rule == "truncation"]

    assert len(steps(cut((1, 400)))) == 1
    assert len(steps(cut((1, 100), (125, 400)))) == 1  # away for less than three windows
    again = steps(cut((1, 100), (150, 400)))
    assert len(again) == 2 and again[1] >= 150


def test_the_step_since_which_it_holds():
    (finding,) = diagnose(run(60, every=1, completions__clipped_ratio=lambda s: 0.02 if s < 31 else 0.9))
    assert (finding.rule, finding.step_since, finding.step) == ("truncation", 31, 36)  # the median of 10 turns later
    assert finding.value > 0.5


def test_loss_zero_is_a_note_and_a_loss_that_is_no_longer_zero_is_not_explained_again():
    (finding,) = diagnose(run(90, every=1, actor__pg_loss=1e-9, actor__ppo_kl=0.0))
    assert finding.note and "gradient is not 0" in finding.message
    assert not any(f.note for name in BROKEN if name != "loss_zero" for f in diagnose(*broken(name)))


def test_the_first_step_of_a_generation_is_told_from_the_others():
    """KL and clipping after a first update are no fault of the sampler, and in the first step they are no step size."""
    later = run(every=2, actor__ppo_kl=lambda step: 0.0 if step % 2 else 0.05)
    assert not diagnose(later)
    first = run(every=2, actor__ppo_kl=lambda step: 0.05 if step % 2 else 0.0)
    assert names(diagnose(first)) == ["first_ratio"]


def test_entries_that_average_several_steps_count_as_first_only_where_every_step_is():
    tens = [entry | {"step": 10 * entry["step"]} for entry in run(every=1, actor__ppo_kl=0.005)]
    one = {"steps_per_generation": 4, "gradient_accumulation_steps": 4, "num_iterations": 1}
    assert not diagnose(tens)
    assert not diagnose(tens, settings=one | {"num_iterations": 2})
    assert names(diagnose(tens, settings=one)) == ["first_ratio"]


def test_zero_spread_is_excused_where_the_reward_has_risen():
    solved = {"every": 1, "frac_reward_zero_std": lambda step: 0.3 if step < 5 else 0.7}
    assert not diagnose(run(60, **solved, reward=lambda step: 0.1 if step < 5 else 0.8))
    assert names(diagnose(run(60, **solved, reward=0.1))) == ["zero_spread"]


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("zero_spread", {"adv_estimator": "remax"}),
        ("zero_spread", {"teacher_model": "teacher", "use_task_rewards": False}),
        ("reward_flat", {"teacher_model": "teacher", "use_task_rewards": False}),
        ("kl_loss", {"loss_agg_mode": "seq-mean-token-sum"}),
    ],
)
def test_a_rule_that_does_not_fit_the_settings_is_silent(rule, settings):
    assert rule in names(diagnose(BROKEN[rule]))
    assert rule not in names(diagnose(BROKEN[rule], settings=settings))


def test_a_task_of_constant_length_and_a_distillation_without_rewards_are_healthy():
    assert not diagnose(run(90, completions__mean_length=200.0))
    settings = {"teacher_model": "teacher", "use_task_rewards": False}
    alike = run(220, reward=0.0, reward_std=0.0, frac_reward_zero_std=1.0, loss=0.0, grad_norm=0.0)
    assert not diagnose(alike, settings=settings)


def test_values_that_are_no_numbers_and_other_entries_are_passed_over():
    entries = run(completions__clipped_ratio=float("nan"), frac_reward_zero_std="most", entropy=None)
    others = [{"step": 40, "eval_reward": 1.0, "eval_completions/clipped_ratio": 1.0}, {"step": 40, "train_loss": 0.0}]
    assert not diagnose([*entries, *others * 20])


# Thresholds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window": 0}, "window=0 must be a whole number of at least 1"),
        ({"min_entries": 2.0}, "min_entries=2.0 must be a whole number"),
        ({"min_entries": 20}, "min_entries=20 must be at most window=10"),
        ({"reward_flat_entries": 1}, "reward_flat_entries=1 must be a whole number of at least 2"),
        ({"zero_spread_max": 1.5}, "zero_spread_max=1.5 must be in [0, 1]"),
        ({"kl_growth": 1.0}, "kl_growth=1.0 must be greater than 1"),
        ({"ppo_kl_max": -0.1}, "ppo_kl_max=-0.1 must be at least 0"),
        ({"ppo_kl_max": float("nan")}, "ppo_kl_max=nan must be a finite number"),
        ({"ppo_kl_max": "0.1"}, "ppo_kl_max='0.1' must be a finite number"),
        ({"ppo_kl_max": True}, "ppo_kl_max=True must be a finite number"),
        ({"clip_fraction_min": 0.4}, "clip_fraction_min=0.4 must be at most clip_fraction_max=0.3"),
        ({"clipfrac": 0.1}, "has no 'clipfrac'; choose among window, min_entries, entropy_fraction"),
        ("window: 5", "is not JSON"),
        ([5], "must be thresholds by name"),
        ("[5]", "must be thresholds by name"),
    ],
)
def test_a_bad_threshold_is_refused_by_name(tmp_path, given, said):
    with pytest.raises(ValueError, match="diagnosis_thresholds") as caught:
        GRPOVerlConfig(str(tmp_path), use_cpu=True, diagnosis_thresholds=given)
    assert said in str(caught.value)


def test_thresholds_without_a_diagnosis_are_refused(tmp_path):
    with pytest.raises(ValueError, match="diagnosis_thresholds=.* has no effect with diagnosis=False"):
        GRPOVerlConfig(str(tmp_path), use_cpu=True, diagnosis=False, diagnosis_thresholds={"window": 5})
    with pytest.raises(ValueError, match="diagnosis='no' must be True or False"):
        GRPOVerlConfig(str(tmp_path), use_cpu=True, diagnosis="no")


def test_thresholds_come_from_yaml_and_from_the_command_line(tmp_path):
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\ndiagnosis_thresholds:\n  window: 6\n  ppo_kl_max: 1\n")
    parser = TrlParser((GRPOVerlConfig,))
    (args,) = parser.parse_args_and_config(["--config", str(yaml)])
    assert args.diagnosis_config() == DiagnosisThresholds(window=6, ppo_kl_max=1)
    line = ["--config", str(yaml), "--diagnosis_thresholds", '{"truncation_max": 0.9}']
    (args,) = parser.parse_args_and_config(line)
    assert args.diagnosis_config() == DiagnosisThresholds(truncation_max=0.9)


# The callback


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "diagnosis: " in record.getMessage()]


def feed(entries, *, main: bool = True, history=()) -> None:
    """What a trainer tells the callback about these entries."""
    callback = DiagnosisCallback()
    state = TrainerState(is_world_process_zero=main, is_local_process_zero=main, log_history=list(history))
    callback.on_train_begin(SimpleNamespace(), state, None)
    for entry in entries:
        state.global_step = entry["step"]
        callback.on_log(None, state, None, logs={key: value for key, value in entry.items() if key != "step"})


def test_each_thing_is_said_once_and_by_the_main_process_only(caplog):
    entries, _ = broken("truncation")
    feed(entries, main=False)
    assert not warned(caplog)
    feed(entries)
    (message,) = warned(caplog)
    assert message == f"diagnosis: {diagnose(entries)[0].message}"


def test_a_resumed_run_does_not_repeat_what_it_said(caplog):
    entries, _ = broken("truncation")
    feed(entries[20:], history=entries[:20])
    assert not warned(caplog)


def trained(folder, **settings) -> GRPOVerlTrainer:
    """A trainer after 5 steps in which all rewards are equal and all responses are cut."""
    args = GRPOVerlConfig(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=5,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=2,
        **settings,
    )

    def reward(completions, **kwargs):
        return [0.5] * len(completions)

    trainer = GRPOVerlTrainer(tiny.model(), reward, args, tiny.prompts(), processing_class=tiny.tokenizer())
    trainer.train()
    return trainer


def test_a_run_warns_by_default_and_its_log_says_the_same_afterwards(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    trainer = trained(tmp_path)
    found = diagnose(trainer.state.log_history, settings=trainer.args.to_dict())
    assert {"zero_spread", "truncation"} <= set(names(found))
    assert warned(caplog) == [f"diagnosis: {finding.message}" for finding in found]


def test_a_run_without_a_diagnosis_is_silent(tmp_path, caplog):
    trained(tmp_path, diagnosis=False)
    assert not warned(caplog)


def test_a_later_call_adds_nothing_to_what_was_said():
    """Findings are the same whether entries come one by one or all at once."""
    diagnosis, entries = Diagnosis(), recorded("short")
    assert [finding for entry in entries for finding in diagnosis.add(entry)] == diagnose(entries)
