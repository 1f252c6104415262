"""What the trainer makes of rewards: the advantages of its batches against `compute_advantages` called by hand.

Responses are fixed, except where an estimator needs the model's own greedy ones.
"""

import copy
import math

import pytest
import scoring_worker as worker
import tiny
import torch
from test_trainer_step import LR, expected_step, log_probs_and_entropy, make, padded, relative_gap

from grpo_ext import GRPOVerlConfig
from grpo_ext.objective import advantages as estimators
from grpo_ext.objective.advantages import ADV_ESTIMATORS, AdvantageConfig, ScoredResponses, compute_advantages

NAMES = tuple(ADV_ESTIMATORS)
OWN = {"rollout": None, "settings": {"max_completion_length": 6, "temperature": 0.8}}  # for greedy baselines
TOL = {"rtol": 1e-6, "atol": 1e-6}
# Log-probs by hand are float64, one row at a time; the trainer's float32, rows together
LOG_PROBS = {"rtol": 1e-5, "atol": 2e-5}


def mask_of(rows) -> torch.Tensor:
    return padded([torch.tensor(row["mask"]) for row in rows])


def rewards_of(rows, functions=(tiny.length_reward,)) -> torch.Tensor:
    """`(N, functions)`, of the rows' completions."""
    completions = [row["completion"] for row in rows]
    values = [function(prompts=None, completions=None, completion_ids=completions) for function in functions]
    return torch.tensor([[math.nan if v is None else v for v in column] for column in values]).T


def by_hand(rows, estimator, parts, *, weights=None, num_generations=worker.GROUP, settings=None, **given):
    """Each row's advantage, a number or one per token of the row."""
    weights = torch.ones(parts.shape[1]) if weights is None else torch.tensor(weights)
    total = torch.where(parts.isnan().all(1), math.nan, (parts * weights).nansum(1))
    mask = mask_of(rows)
    responses = ScoredResponses(
        given.pop("rewards", total), mask, num_generations, rewards_per_func=parts, reward_weights=weights, **given
    )
    values = compute_advantages(responses, AdvantageConfig(estimator, **(settings or {})))
    if values.ndim == 1:
        return list(values)
    return [row[: len(known["completion"])] for row, known in zip(values, rows, strict=True)]


def assert_advantages(rows, expected, tolerance=TOL):
    assert any(torch.as_tensor(value).any() for value in expected)
    for row, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(torch.tensor(row["advantage"]), wanted, **tolerance)


@torch.no_grad()
def greedy(prompt_ids: list[int], longest: int) -> list[int]:
    """The model's most likely response, token by token."""
    model, ids = tiny.model(), list(prompt_ids)
    while len(ids) < len(prompt_ids) + longest and (ids == prompt_ids or ids[-1] != 1):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt_ids) :]


def greedy_rows(rows) -> list[dict]:
    """One row of the most likely response in the place of each."""
    known = {tuple(row["prompt"]): greedy(row["prompt"], 6) for row in rows}
    return [{"completion": known[tuple(row["prompt"])]} for row in rows]


# Estimators


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_has_the_estimators_advantages(name):
    """Two weighted functions, rows that one or both leave out, and tool tokens inside and at the end of rows."""
    weighted = {"reward_weights": worker.WEIGHTS, "adv_estimator": name}
    if name == "remax":
        job = {**OWN, "settings": {**OWN["settings"], **weighted}, "reward": "two"}
    else:
        job = {"settings": weighted, "reward": "two", "rollout": "tools"}
    (rows,) = worker.run(job)["batches"]
    functions = worker.REWARDS["two"]
    parts, given = rewards_of(rows, functions), {}
    if name == "remax":
        own = rewards_of(greedy_rows(rows), functions)
        given["reward_baselines"] = (own * torch.tensor(worker.WEIGHTS)).nansum(1)
    else:
        assert parts.isnan().any() and 0 < mask_of(rows).sum() < sum(len(row["completion"]) for row in rows)
    assert_advantages(rows, by_hand(rows, name, parts, weights=worker.WEIGHTS, **given))
    per_token = estimators.adv_traits(name).per_token
    assert all(isinstance(row["advantage"], list) == per_token for row in rows)


def test_the_settings_of_estimators_arrive():
    for name, settings in (("reinforce_plus_plus", {"gamma": 0.9}), ("grpo", {"norm_adv_by_std_in_grpo": False})):
        (rows,) = worker.run({"settings": {"adv_estimator": name, **settings}})["batches"]
        assert_advantages(rows, by_hand(rows, name, rewards_of(rows), settings=settings))


def test_a_response_without_a_reward_gets_none(monkeypatch):
    """... and the completions table has the advantages in force."""

    def some(completion_ids, **kwargs):
        return [None if len(ids) > 25 else float(len(ids)) for ids in completion_ids]

    result = worker.run({"settings": {"adv_estimator": "rloo"}}, reward_funcs=some)
    (rows,) = result["batches"]
    parts = rewards_of(rows, [some])
    assert 0 < parts.isnan().sum() < 8
    assert_advantages(rows, by_hand(rows, "rloo", parts))
    assert not any(row["advantage"] for row, part in zip(rows, parts, strict=True) if part.isnan())
    assert result["table"]["advantages"] == [row["advantage"] for row in rows]


def test_advantages_per_token_reach_the_loss(tmp_path):
    """Through the split into micro-batches and the forwards without padding, to the parameters."""
    model, reference = tiny.model(), tiny.model(seed=1)
    start = copy.deepcopy(model)
    settings = {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "kl_coef": 0.5}
    trainer = make(tmp_path, model, per_device_train_batch_size=2, gradient_accumulation_steps=4, **settings)
    trainer.ref_model.load_state_dict(reference.state_dict())
    batches = worker.record(trainer)
    trainer.train()
    (rows,) = batches
    assert len({round(value, 3) for row in rows for value in row["advantage"]}) > 20
    width = max(len(row["completion"]) for row in rows)
    known = [
        {
            "prompt_ids": row["prompt"],
            "completion_ids": row["completion"],
            "advantage": row["advantage"] + [0.0] * (width - len(row["completion"])),
        }
        for row in rows
    ]
    expected, _ = expected_step(start, known, trainer.objective_config)
    assert trainer.optimizer.param_groups[0]["lr"] == LR
    assert relative_gap(trainer.model, expected, start) < 1e-5


def test_an_unknown_estimator(tmp_path):
    with pytest.raises(ValueError, match=f"adv_estimator='gae' is unknown; choose one of {', '.join(NAMES)}"):
        GRPOVerlConfig(str(tmp_path), adv_estimator="gae", use_cpu=True)


# The greedy baseline


def test_the_greedy_baseline_leaves_no_trace():
    """The same responses, logs and table as without it; the baseline itself is logged."""
    plain = worker.run({**OWN, "settings": {**OWN["settings"], "max_steps": 2, "adv_estimator": "rloo"}})
    remax = worker.run({**OWN, "settings": {**OWN["settings"], "max_steps": 2, "adv_estimator": "remax"}})
    (rows, *_), (same, *_) = remax["batches"], plain["batches"]
    assert [row["completion"] for row in rows] == [row["completion"] for row in same]
    first, other = remax["log"][0], plain["log"][0]
    names = ("num_tokens", "reward", "reward_std", "rewards/length_reward/mean", *(n for n in first if "length" in n))
    assert {name: first[name] for name in names} == {name: other[name] for name in names}
    assert len(remax["table"]["prompt"]) == 8
    expected = rewards_of(greedy_rows(rows)).mean().item()
    assert first["remax/baseline_reward"] == pytest.approx(expected, rel=1e-6)


def test_the_baseline_pays_for_its_length_too():
    """verl's reward manager takes the overlong punishment off the greedy response as off any other."""
    punished = {"overlong_buffer_len": 5, "overlong_buffer_penalty_factor": 2.0}
    job = {**OWN, "settings": {**OWN["settings"], "adv_estimator": "remax", **punished}}
    (rows,) = worker.run(job)["batches"]

    def shaped(of):
        lengths = torch.tensor([len(row["completion"]) for row in of], dtype=torch.float32)
        return rewards_of(of)[:, 0] - (lengths - 1).clamp(min=0) / 5 * 2.0

    baselines = greedy_rows(rows)
    assert any(len(row["completion"]) > 1 for row in baselines)
    wanted = by_hand(rows, "remax", rewards_of(rows), rewards=shaped(rows), reward_baselines=shaped(baselines))
    assert_advantages(rows, wanted)


def test_a_rollout_function_has_no_greedy_response(tmp_path):
    with pytest.raises(ValueError, match="adv_estimator='remax' needs a greedy response.*rollout_func.*'rloo'"):
        make(tmp_path, adv_estimator="remax")


# KL in the reward

REF = {"use_kl_in_reward": True, "kl_coef": 0.3}


@pytest.fixture
def probes(monkeypatch):
    """Estimators that give what they get: `tokens`, the token rewards; `outcomes`, the rewards."""
    for name, field, per_token in (("tokens", "token_level_rewards", True), ("outcomes", "rewards", False)):
        monkeypatch.setitem(ADV_ESTIMATORS, name, lambda responses, config, field=field: getattr(responses, field))
        monkeypatch.setitem(estimators._TRAITS, name, estimators.AdvTraits(per_token=per_token))


@torch.no_grad()
def distances(rows) -> list[torch.Tensor]:
    """`log_prob - ref_log_prob` of each token, of `tiny.model()` and the worker's reference."""
    pairs = [
        [log_probs_and_entropy(model, row["prompt"], row["completion"])[0] for row in rows]
        for model in (tiny.model(), tiny.model(seed=1))
    ]
    return [policy - reference for policy, reference in zip(*pairs, strict=True)]


KL = {"kl": lambda d: d, "low_var_kl": lambda d: (torch.exp(-d) + d - 1).clamp(-10, 10)}


@pytest.mark.parametrize("name", KL)
@pytest.mark.parametrize("steps", [1, 2], ids=["on-policy", "old log-probs"])
def test_kl_is_taken_off_the_reward_of_each_token(probes, name, steps):
    """`r_t - kl_coef * kl_t` on the tokens that are trained on, where `r_t` is the reward on the last of them."""
    settings = {**REF, "kl_penalty": name, "adv_estimator": "tokens", "gradient_accumulation_steps": 1}
    settings |= {"steps_per_generation": steps, "max_steps": steps}
    result = worker.run({"settings": settings, "rows": 8 // steps, "rollout": "tools"})
    (rows,) = result["batches"]
    masks = [torch.tensor(row["mask"]).bool() for row in rows]
    kls = [torch.where(mask, KL[name](d), 0.0) for mask, d in zip(masks, distances(rows), strict=True)]
    for row, mask, kl, reward in zip(rows, masks, kls, rewards_of(rows)[:, 0], strict=True):
        expected = -0.3 * kl
        expected[mask.nonzero()[-1]] += reward
        torch.testing.assert_close(torch.tensor(row["advantage"]), expected.float(), **LOG_PROBS)
    mean = sum(kl.sum() / mask.sum() for kl, mask in zip(kls, masks, strict=True)) / len(rows)
    assert result["log"][0]["actor/reward_kl_penalty"] == pytest.approx(mean.item(), rel=1e-5)
    assert result["log"][0]["actor/reward_kl_penalty_coeff"] == 0.3


def test_kl_is_taken_off_the_outcome(probes):
    (rows,) = worker.run({"settings": {**REF, "adv_estimator": "outcomes"}, "rollout": "tools"})["batches"]
    kls = [(d * torch.tensor(row["mask"])).sum() for row, d in zip(rows, distances(rows), strict=True)]
    expected = rewards_of(rows)[:, 0] - 0.3 * torch.stack(kls)
    torch.testing.assert_close(torch.tensor([row["advantage"] for row in rows]), expected.float(), **LOG_PROBS)


def test_kl_in_the_reward_is_not_in_the_loss(tmp_path):
    trainer = make(tmp_path, use_kl_in_reward=True)
    trainer.train()
    assert "actor/kl_loss" not in trainer.state.log_history[0]
    assert all("ref_per_token_logps" not in micro for micro in trainer._rollout.micro_batches)


def test_the_coefficient_moves_as_verl_says():
    """Once a generation of 8 responses; the horizon is 100, the bound of the relative error 0.2."""
    base = {**REF, "kl_penalty": "mse", "learning_rate": 0.05, "gradient_accumulation_steps": 1}
    base |= {"steps_per_generation": 2, "max_steps": 6}

    def moves(**settings):
        log = worker.run({"settings": {**base, **settings}, "rows": 4})["log"]
        log = [entry for entry in log if "actor/reward_kl_penalty" in entry]
        assert [entry["step"] for entry in log] == [1, 3, 5]
        return [entry["actor/reward_kl_penalty"] for entry in log], [
            entry["actor/reward_kl_penalty_coeff"] for entry in log
        ]

    kl, fixed = moves()
    assert fixed == [0.3] * 3
    # The KL is at first a tenth above the target: times 1 + 0.1 * 8 / 100
    target = kl[0] / 1.1
    kl, adaptive = moves(kl_ctrl="adaptive", target_kl=target, horizon=100)
    assert adaptive[:2] == pytest.approx([0.3, 0.3 * 1.008], rel=1e-9)
    error = min(max(kl[1] / target - 1, -0.2), 0.2)
    assert adaptive[2] == pytest.approx(0.3 * 1.008 * (1 + error * 0.08), rel=1e-9)
    assert adaptive[2] != pytest.approx(adaptive[1], rel=1e-4)
    # Far above: times 1 + 0.2 * 8 / 100; far below: times 1 - 0.2 * 8 / 100
    assert moves(kl_ctrl="adaptive", target_kl=1e-3, horizon=100)[1][1] == pytest.approx(0.3 * 1.016, rel=1e-9)
    assert moves(kl_ctrl="adaptive", target_kl=1e3, horizon=100)[1][1] == pytest.approx(0.3 * 0.984, rel=1e-9)


def test_an_evaluation_does_not_move_the_coefficient(tmp_path):
    adaptive = {"use_kl_in_reward": True, "kl_ctrl": "adaptive", "target_kl": 0.1, "horizon": 100}
    trainer = make(tmp_path, eval_dataset=tiny.prompts(2), eval_strategy="steps", eval_steps=1, max_steps=2, **adaptive)
    trainer.train()
    log = trainer.state.log_history
    assert [e["actor/reward_kl_penalty_coeff"] for e in log if "loss" in e] == pytest.approx([0.001, 0.001 * 0.984])
    assert len([entry for entry in log if "eval_actor/reward_kl_penalty" in entry]) == 2


def test_both_places_of_the_kl_at_once_warn(tmp_path, caplog):
    GRPOVerlConfig(str(tmp_path), use_cpu=True, use_kl_in_reward=True)
    assert "counts twice" not in caplog.text
    GRPOVerlConfig(str(tmp_path), use_cpu=True, use_kl_in_reward=True, use_kl_loss=True)
    assert "use_kl_in_reward and use_kl_loss are both on, so the KL to the reference counts twice" in caplog.text


# Length


def test_the_overlong_punishment_reaches_the_rewards(probes):
    """Up to 20 of 40 tokens nothing; 0.5 at 40: tools' tokens count, and those of masked truncated responses."""
    settings = {"adv_estimator": "outcomes", "overlong_buffer_len": 20, "overlong_buffer_penalty_factor": 0.5}
    job = {"rollout": "tools", "prompts": [0, 8]}
    result = worker.run({**job, "settings": settings})
    (rows,) = result["batches"]
    penalties = [-max(len(row["completion"]) - 20, 0) / 20 * 0.5 for row in rows]
    assert 0 in penalties and len(set(penalties)) > 2
    expected = rewards_of(rows)[:, 0] + torch.tensor(penalties)
    torch.testing.assert_close(torch.tensor([row["advantage"] for row in rows]), expected, **TOL)
    assert result["log"][0]["reward_overlong/mean"] == pytest.approx(sum(penalties) / 8)
    assert result["log"][0]["reward_overlong/fraction"] == sum(p < 0 for p in penalties) / 8

    (masked,) = worker.run({**job, "settings": {**settings, "mask_truncated_completions": True}})["batches"]
    assert any(not row["completion"] for row in masked)
    torch.testing.assert_close(torch.tensor([row["advantage"] for row in masked]), expected, **TOL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0.1}, "kl_coef=0.1 has no effect with use_kl_in_reward=False"),
        ({"use_kl_in_reward": True, "target_kl": 0.5}, "target_kl=0.5 has no effect with kl_ctrl='fixed'"),
        ({"use_kl_in_reward": True, "kl_penalty": "full"}, "kl_penalty='full' is unknown; choose one of kl, "),
        ({"use_kl_in_reward": "yes"}, "use_kl_in_reward='yes' must be True or False"),
        ({"overlong_buffer_penalty_factor": 2.0}, "overlong_buffer_penalty_factor=2.0 has no effect"),
        ({"overlong_buffer_len": 0}, "overlong_buffer_len=0 must be a whole number of at least 1"),
        ({"overlong_buffer_len": 10**6}, "overlong_buffer_len=1000000 is longer than max_completion_length="),
        ({"gamma": 0.5}, "gamma=0.5 has no effect with adv_estimator='grpo'"),
        ({"adv_estimator": "gdpo", "use_kl_in_reward": True}, "use_kl_in_reward=True has no effect.*'gdpo'"),
        ({"adv_estimator": "gdpo", "overlong_buffer_len": 9}, "overlong_buffer_len=9 has no effect.*'gdpo'"),
    ],
)
def test_settings_without_effect(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOVerlConfig(str(tmp_path), use_cpu=True, **settings)


# Two ranks: 3 prompts, 6 rows each, so that one group lies across

ACROSS = {"rows": 12, "prompts": list(range(6))}
ON_TWO = {
    "opo": {"rollout": "tools"},
    "gdpo": {"reward": "two", "settings": {"reward_weights": worker.WEIGHTS}},
    "reinforce_plus_plus": {"rollout": "tools", "settings": {**REF, "kl_penalty": "low_var_kl"}},
    "reinforce_plus_plus_baseline": {"settings": {"overlong_buffer_len": 20}},
    "remax": {**OWN, "prompts": list(range(3))},
}
ON_TWO = {
    name: {**ACROSS, **job, "settings": {**job.get("settings", {}), "adv_estimator": name}}
    for name, job in ON_TWO.items()
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return worker.run_on_two_ranks(ON_TWO, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(two_ranks, name):
    result = two_ranks[name]
    (rows,) = result["batches"]
    assert len(rows) == 12 and result["table"]["advantages"] != [0.0] * 12
    if name == "remax":  # the ranks sample with seeds of their own
        wanted = by_hand(rows, name, rewards_of(rows), reward_baselines=rewards_of(greedy_rows(rows))[:, 0])
        assert_advantages(rows, wanted)
        return
    whole = worker.run(ON_TWO[name])
    (expected,) = whole["batches"]
    assert [row["completion"] for row in rows] == [row["completion"] for row in expected]
    assert_advantages(rows, [torch.tensor(row["advantage"]) for row in expected], LOG_PROBS)
    for metric in ("actor/reward_kl_penalty", "reward_overlong/mean", "reward_overlong/fraction", "reward"):
        assert (metric in result["log"][0]) == (metric in whole["log"][0])
        assert result["log"][0].get(metric, 0) == pytest.approx(whole["log"][0].get(metric, 0), rel=1e-5)
