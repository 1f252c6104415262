"""`GRPOVerlConfig`: TRL's training arguments with verl's objective keys."""

import dataclasses
import logging
import math
import os
from dataclasses import dataclass, field

import torch
from trl import GRPOConfig

from ..objective import KL_PENALTIES, LOSS_AGG_MODES, POLICY_LOSSES, ObjectiveConfig
from ..objective.advantages import ADV_ESTIMATORS, AdvantageConfig, adv_traits
from ..objective.distillation import DISTILLATION_LOSSES, DistillationConfig
from ..objective.reward_shaping import KLControl
from .diagnosis import DiagnosisThresholds
from .forward import LAYOUTS

logger = logging.getLogger(__name__)

OBJECTIVE_FIELDS = tuple(f.name for f in dataclasses.fields(ObjectiveConfig))
DISTILLATION_FIELDS = tuple(f.name for f in dataclasses.fields(DistillationConfig))


@dataclass
class GRPOVerlConfig(GRPOConfig):
    """[`trl.GRPOConfig`] for [`GRPOVerlTrainer`]: the objective's settings carry verl's names and defaults.

    Every TRL setting carries on, except those that name a quantity of the objective by another name (`epsilon`, `beta`,
    `loss_type`, ...): they are refused with the name to use instead, unless they agree with it. All checks run when the
    config is made, before any model is loaded.

    Raises:
        ValueError: names the setting, its value and the remedy.
    """

    policy_loss: str = field(
        default=ObjectiveConfig.policy_loss,
        metadata={
            "help": "Policy loss by name (verl: policy_loss.loss_mode): "
            + ", ".join(POLICY_LOSSES)
            + ". 'vanilla' is PPO's clipped loss with Clip-Higher and dual-clip; `register_policy_loss` adds names."
        },
    )
    clip_ratio: float = field(
        default=ObjectiveConfig.clip_ratio,
        metadata={"help": "Epsilon of the ratio's clip [1-epsilon, 1+epsilon], where the next two are None."},
    )
    clip_ratio_low: float | None = field(
        default=ObjectiveConfig.clip_ratio_low, metadata={"help": "Lower epsilon. None: clip_ratio."}
    )
    clip_ratio_high: float | None = field(
        default=ObjectiveConfig.clip_ratio_high,
        metadata={"help": "Upper epsilon (Clip-Higher; DAPO and DeepSeek-V3 use 0.28). None: clip_ratio."},
    )
    clip_ratio_c: float = field(
        default=ObjectiveConfig.clip_ratio_c,
        metadata={"help": "Dual-clip bound c > 1: where the advantage A is negative, a token's loss is at most -A*c."},
    )
    loss_agg_mode: str = field(
        default=ObjectiveConfig.loss_agg_mode,
        metadata={
            "help": "How per-token losses become one number, with counts over the optimizer step: "
            + ", ".join(LOSS_AGG_MODES)
            + "."
        },
    )
    loss_scale_factor: float | None = field(
        default=ObjectiveConfig.loss_scale_factor,
        metadata={"help": "Constant of 'seq-mean-token-sum-norm', in tokens. None: max_completion_length."},
    )
    entropy_coeff: float = field(
        default=ObjectiveConfig.entropy_coeff, metadata={"help": "Weight of the entropy bonus. 0: no bonus."}
    )
    use_kl_loss: bool = field(
        default=ObjectiveConfig.use_kl_loss,
        metadata={"help": "Whether the loss has a KL term towards the frozen reference model."},
    )
    kl_loss_coef: float = field(
        default=ObjectiveConfig.kl_loss_coef, metadata={"help": "Weight of the KL term, with use_kl_loss."}
    )
    kl_loss_type: str = field(
        default=ObjectiveConfig.kl_loss_type,
        metadata={"help": "KL estimator, with use_kl_loss: " + ", ".join(KL_PENALTIES) + "."},
    )
    tau_pos: float = field(
        default=ObjectiveConfig.tau_pos, metadata={"help": "'sapo': steepness of the gate where the advantage is > 0."}
    )
    tau_neg: float = field(
        default=ObjectiveConfig.tau_neg, metadata={"help": "'sapo': steepness of the gate where the advantage is <= 0."}
    )
    clip_cov_ratio: float = field(
        default=ObjectiveConfig.clip_cov_ratio, metadata={"help": "'clip_cov': share of the tokens that is left out."}
    )
    clip_cov_lb: float = field(
        default=ObjectiveConfig.clip_cov_lb, metadata={"help": "'clip_cov': least covariance of a token left out."}
    )
    clip_cov_ub: float = field(
        default=ObjectiveConfig.clip_cov_ub, metadata={"help": "'clip_cov': largest covariance of a token left out."}
    )
    kl_cov_ratio: float = field(
        default=ObjectiveConfig.kl_cov_ratio, metadata={"help": "'kl_cov': share of the tokens with the KL penalty."}
    )
    ppo_kl_coef: float = field(
        default=ObjectiveConfig.ppo_kl_coef, metadata={"help": "'kl_cov': weight of the KL penalty."}
    )
    dro_beta: float | None = field(
        default=ObjectiveConfig.dro_beta, metadata={"help": "'dro': weight of the quadratic penalty; needed there."}
    )
    rollout_is: str | None = field(
        default=ObjectiveConfig.rollout_is,
        metadata={
            "help": "Rollout correction: importance weights of the trainer's policy over the sampler's, per 'token' or "
            "'sequence'. None: no weights."
        },
    )
    rollout_is_threshold: str = field(  # or a number
        default=ObjectiveConfig.rollout_is_threshold,
        metadata={"help": "Upper bound of the weights (truncated there), or 'low_high' (0 outside)."},
    )
    rollout_is_batch_normalize: bool = field(
        default=ObjectiveConfig.rollout_is_batch_normalize,
        metadata={"help": "Whether the weights are divided by their mean over the batch."},
    )
    rollout_rs: str | None = field(
        default=ObjectiveConfig.rollout_rs,
        metadata={
            "help": "Rollout correction: rejection by the log ratio of the two policies: token_k1, token_k2, token_k3, "
            "seq_sum_k1, seq_mean_k1, seq_max_k2, ...; several with commas. None: no rejection."
        },
    )
    rollout_rs_threshold: str | None = field(
        default=ObjectiveConfig.rollout_rs_threshold,
        metadata={"help": "Bounds of rollout_rs: for k1 'low_high' or an upper bound of the ratio, else nats."},
    )
    bypass_loss_type: str = field(
        default=ObjectiveConfig.bypass_loss_type,
        metadata={"help": "'bypass_mode': 'ppo_clip' or 'reinforce' (verl: rollout_correction.loss_type)."},
    )
    adv_estimator: str = field(
        default=AdvantageConfig.adv_estimator,
        metadata={
            "help": "How rewards become advantages (verl: algorithm.adv_estimator): "
            + ", ".join(ADV_ESTIMATORS)
            + "; `register_adv_est` adds names."
        },
    )
    gamma: float = field(
        default=AdvantageConfig.gamma,
        metadata={"help": "'reinforce_plus_plus': discount per token, in (0, 1]."},
    )
    norm_adv_by_std_in_grpo: bool = field(
        default=True,
        metadata={"help": "Whether advantages are divided by their group's standard deviation. False: Dr.GRPO."},
    )
    use_kl_in_reward: bool = field(
        default=False,
        metadata={"help": "Whether the KL of each token to the frozen reference is taken off its reward."},
    )
    kl_penalty: str = field(
        default="kl",
        metadata={"help": "KL estimator, with use_kl_in_reward: " + ", ".join(KL_PENALTIES) + "."},
    )
    kl_ctrl: str = field(
        default=KLControl.kl_ctrl,
        metadata={
            "help": "Coefficient of the KL in the reward (verl: kl_ctrl.type): 'fixed', or 'adaptive', which steers "
            "the KL towards target_kl."
        },
    )
    kl_coef: float = field(
        default=KLControl.kl_coef,
        metadata={"help": "Coefficient of the KL in the reward, at the start if it is adaptive."},
    )
    target_kl: float = field(
        default=KLControl.target_kl, metadata={"help": "'adaptive': KL to the reference to aim at, nats per token."}
    )
    horizon: float = field(
        default=KLControl.horizon,
        metadata={"help": "'adaptive': responses over which the coefficient moves; the larger, the slower."},
    )
    overlong_buffer_len: int | None = field(
        default=None,
        metadata={
            "help": "DAPO's soft overlong punishment: tokens before max_completion_length over which the reward falls. "
            "None: no punishment."
        },
    )
    overlong_buffer_penalty_factor: float = field(
        default=1.0, metadata={"help": "What the punishment takes off the reward at max_completion_length."}
    )
    filter_groups: bool = field(
        default=False,
        metadata={
            "help": "DAPO's dynamic sampling: whether groups whose responses all score alike are dropped and replaced "
            "by groups of further prompts."
        },
    )
    filter_groups_metric: str = field(
        default="reward",
        metadata={
            "help": "What has to differ within a group: 'reward', the summed reward before KL and overlong punishment, "
            "or a reward function's name, such as 'acc'."
        },
    )
    max_num_gen_batches: int = field(
        default=10,
        metadata={
            "help": "With filter_groups: generation batches sampled at most for one; what is missing then is filled "
            "with dropped groups."
        },
    )
    teacher_model: str | None = field(
        default=None,
        metadata={
            "help": "On-policy distillation: the teacher, a name, a path, or the URL of a vLLM server. None: none."
        },
    )
    distillation_loss_mode: str = field(
        default=DistillationConfig.distillation_loss_mode,
        metadata={"help": "Distance to the teacher: " + ", ".join(DISTILLATION_LOSSES) + "."},
    )
    distillation_topk: int = field(
        default=DistillationConfig.distillation_topk,
        metadata={"help": "'forward_kl_topk': the teacher's most likely tokens at each position that are compared."},
    )
    use_task_rewards: bool = field(
        default=DistillationConfig.use_task_rewards,
        metadata={"help": "With a teacher: whether the policy loss of the rewards is in the loss too."},
    )
    use_policy_gradient: bool = field(
        default=DistillationConfig.use_policy_gradient,
        metadata={
            "help": "With a teacher: whether the negative distance is an advantage; False differentiates it directly."
        },
    )
    distillation_loss_coef: float = field(
        default=DistillationConfig.distillation_loss_coef,
        metadata={"help": "Weight of the distillation loss beside the task rewards."},
    )
    distillation_loss_max_clamp: float | None = field(
        default=DistillationConfig.distillation_loss_max_clamp,
        metadata={"help": "Bound of a token's distillation loss on both sides, nats. None: none."},
    )
    distillation_log_prob_min_clamp: float | None = field(
        default=DistillationConfig.distillation_log_prob_min_clamp,
        metadata={"help": "'forward_kl_topk': bound from below of both models' log-probs, nats. None: none."},
    )
    distillation_clip_ratio_low: float = field(
        default=DistillationConfig.distillation_clip_ratio_low,
        metadata={"help": "Lower epsilon of the distillation's clip, with use_policy_gradient."},
    )
    distillation_clip_ratio_high: float = field(
        default=DistillationConfig.distillation_clip_ratio_high,
        metadata={"help": "Upper epsilon of the distillation's clip, with use_policy_gradient."},
    )
    shuffle_mini_batches: bool = field(
        default=False,
        metadata={
            "help": "Whether the rows of a generation batch are shuffled before they are split into optimizer steps, "
            "as TRL does. False keeps verl's order: the responses to a prompt stay together."
        },
    )

    forward_layout: str = field(
        default="auto",
        metadata={
            "help": "How rows go through the model: 'packed' end to end (verl: use_remove_padding), for attention with "
            "row boundaries; 'grouped' with rows of similar length; 'padded' as TRL does; 'auto' chooses by the "
            "model's attention."
        },
    )
    max_tokens_per_forward: int | None = field(
        default=None,
        metadata={
            "help": "Bound on the tokens of one forward, padding included (verl: ppo_max_token_len_per_gpu). A longer "
            "single row still is one. None: per_device_train_batch_size rows as long as the longest."
        },
    )
    calculate_entropy: bool = field(
        default=True,
        metadata={
            "help": "Whether the entropy is logged when entropy_coeff is 0. False lets rows with advantage 0 skip "
            "their forward too."
        },
    )
    max_nonfinite_steps: int = field(
        default=3,
        metadata={
            "help": "A step whose gradient is NaN or infinite is skipped and counted; so many in a row end the run."
        },
    )
    preflight: bool = field(
        default=True,
        metadata={
            "help": "Whether the batch plan, the parameters, the memory and warnings are printed before the first "
            "step. Reward functions are called once each for it, on a gold answer and a wrong one: set False where a "
            "call has side effects."
        },
    )

    diagnosis: bool = field(
        default=True,
        metadata={
            "help": "Whether a warning says what is wrong with the run: collapsed entropy, groups without spread, "
            "truncation, ... Each is said once; a healthy run has none."
        },
    )
    diagnosis_thresholds: dict[str, float] | str | None = field(
        default=None,
        metadata={
            "help": "When the diagnosis speaks, by name; the others keep their defaults: "
            + ", ".join(f"{f.name} ({f.default:g})" for f in dataclasses.fields(DiagnosisThresholds))
            + "."
        },
    )

    # README, departure 12. With dropout the ratio differs from 1 before any update; verl runs without it.
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Whether dropout is off in the policy and the reference. True, unlike TRL: with dropout on, old "
            "and new log-probabilities differ before any update."
        },
    )
    # README, departure 11. True, TRL's default, multiplies the KL term by the ratio; verl does not. Refused below.
    use_bias_correction_kl: bool = field(
        default=False,
        metadata={"help": "Not available: it multiplies the KL term by the ratio, which verl does not. Leave False."},
    )

    def __post_init__(self):
        self._refuse_wrong_types()
        objective = self.objective_config()
        self._refuse_other_names(objective)
        self._check_scoring()
        self._replace_vllm_correction(objective)
        self._check_distillation(objective)
        self._refuse_without_effect("diagnosis", "diagnosis_thresholds")
        self.diagnosis_config()
        self._refuse_indivisible_batches()
        if self.bf16 is None and (self.use_cpu or not torch.accelerator.is_available()):
            self.bf16 = False  # TRL's default, True, needs an accelerator
        if self.forward_layout not in LAYOUTS:
            raise ValueError(f"forward_layout={self.forward_layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        # TRL 1.16 sets these by names that transformers 5.24 has given up, and each run would warn of it
        for name in ("checkpointing", "checkpointing_kwargs"):
            if getattr(self, f"activation_{name}") is None:
                setattr(self, f"activation_{name}", getattr(self, f"gradient_{name}"))
        super().__post_init__()
        if self.deepspeed_plugin is not None:
            # Left out of a DeepSpeed config, clipping is 1.0 there, whatever max_grad_norm says
            deepspeed = self.deepspeed_plugin.hf_ds_config.config
            deepspeed.setdefault("gradient_clipping", self.max_grad_norm)
            if deepspeed.get("bf16", {}).get("check_grad_overflow") is False:
                raise ValueError(
                    "DeepSpeed's bf16.check_grad_overflow=False lets it take steps whose gradient is NaN or infinite; "
                    "leave it out, or set it to true"
                )
        self._refuse_windows_across_generations()

    def _refuse_wrong_types(self) -> None:
        """Refuse counts that are not whole numbers from 1, and switches that are not booleans."""
        for name in (
            "norm_adv_by_std_in_grpo",
            "shuffle_mini_batches",
            "calculate_entropy",
            "disable_dropout",
            "diagnosis",
            "preflight",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        optional = ("steps_per_generation", "generation_batch_size", "num_generations_eval", "max_tokens_per_forward")
        counts = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations")
        for name in (*counts, "max_nonfinite_steps", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.reward_weights is not None and not isinstance(self.reward_weights, (list, tuple)):
            raise ValueError(f"reward_weights={self.reward_weights!r} must be a list with a number for each function")
        for weight in self.reward_weights or ():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(f"reward_weights={self.reward_weights!r} must be finite numbers")
        # Both are set in a config that is copied, or read back from its own record
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if self.steps_per_generation is not None and self.generation_batch_size == (
            self.per_device_train_batch_size * ranks * self.steps_per_generation
        ):
            self.generation_batch_size = None

    def _replace_vllm_correction(self, objective: ObjectiveConfig) -> None:
        """Let the rollout correction, where it is set, take the place of TRL's own, which is on by default."""
        if not objective.rollout_correction.active and objective.policy_loss != "bypass_mode":
            return
        default = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
        for name in ("mode", "clip_max", "clip_min"):
            name = f"vllm_importance_sampling_{name}"
            if getattr(self, name) != default[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} belongs to TRL's own correction, which rollout_is, rollout_rs and "
                    f"policy_loss='bypass_mode' replace; drop it, and set rollout_is and rollout_is_threshold"
                )
        self.vllm_importance_sampling_correction = False

    def _check_scoring(self) -> None:
        """Refuse what cannot be scored with, and what would have no effect on the advantages."""
        for name in ("use_kl_in_reward", "filter_groups"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("max_num_gen_batches", "overlong_buffer_len"):
            value = getattr(self, name)
            if value is None and name == "overlong_buffer_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        self._refuse_without_effect("use_kl_in_reward", "kl_penalty", "kl_ctrl", "kl_coef", "target_kl", "horizon")
        self._refuse_without_effect("filter_groups", "filter_groups_metric", "max_num_gen_batches")
        self._refuse_without_effect("overlong_buffer_len", "overlong_buffer_penalty_factor")
        if self.kl_penalty not in KL_PENALTIES:
            raise ValueError(f"kl_penalty={self.kl_penalty!r} is unknown; choose one of {', '.join(KL_PENALTIES)}")
        self.kl_control()
        self._check_estimator()
        factor = self.overlong_buffer_penalty_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e30:
            raise ValueError(f"overlong_buffer_penalty_factor={factor!r} must be a finite number > 0, such as 1.0")
        limit = self.max_completion_length
        if self.overlong_buffer_len is not None and (limit is None or self.overlong_buffer_len > limit):
            raise ValueError(
                f"overlong_buffer_len={self.overlong_buffer_len} is longer than "
                f"max_completion_length={self.max_completion_length}; shorten the buffer or allow longer completions"
            )
        if self.use_kl_in_reward and self.use_kl_loss:
            logger.warning(
                "use_kl_in_reward and use_kl_loss are both on, so the KL to the reference counts twice; verl's recipes "
                "use one of them"
            )

    def _check_estimator(self) -> None:
        name = self.advantage_config().adv_estimator
        if adv_traits(name).needs_several and self.num_generations_eval == 1:
            raise ValueError(
                f"num_generations_eval=1 does not fit adv_estimator={name!r}, which compares the responses to one "
                f"prompt; set it to 2 or more"
            )
        if name == "gdpo":
            for setting, on in (
                ("use_kl_in_reward", self.use_kl_in_reward),
                ("overlong_buffer_len", self.overlong_buffer_len is not None),
            ):
                if on:
                    raise ValueError(
                        f"{setting}={getattr(self, setting)!r} has no effect with adv_estimator='gdpo', which reads "
                        f"the reward functions one by one; drop it, or give the penalty as a reward function"
                    )

    def _refuse_without_effect(self, switch: str, *names: str) -> None:
        """Refuse settings that differ from their defaults while the one that makes them count is off."""
        if getattr(self, switch):
            return
        default = {f.name: f.default for f in dataclasses.fields(self)}
        for name in names:
            if getattr(self, name) != default[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with {switch}={getattr(self, switch)!r}; set "
                    f"{switch}, or drop {name}"
                )

    def advantage_config(self) -> AdvantageConfig:
        """The settings of `compute_advantages`."""
        return AdvantageConfig(self.adv_estimator, self.norm_adv_by_std_in_grpo, self.gamma)

    def kl_control(self) -> KLControl:
        """The settings of the coefficient of the KL in the reward."""
        return KLControl(self.kl_ctrl, self.kl_coef, self.target_kl, self.horizon)

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads the frozen reference model."""
        return self.use_kl_loss or self.use_kl_in_reward

    def distillation_config(self) -> DistillationConfig:
        """The settings of `distillation_ppo_loss`."""
        return DistillationConfig(**{name: getattr(self, name) for name in DISTILLATION_FIELDS})

    def diagnosis_config(self) -> DiagnosisThresholds:
        """The thresholds of `diagnose`."""
        return DiagnosisThresholds.of(self.diagnosis_thresholds)

    def _check_distillation(self, objective: ObjectiveConfig) -> None:
        """Refuse settings of the distillation without a teacher, or that do not fit the rest."""
        if self.teacher_model is not None and not (isinstance(self.teacher_model, str) and self.teacher_model.strip()):
            raise ValueError(
                f"teacher_model={self.teacher_model!r} must be a model's name or path, or the URL of a vLLM server"
            )
        if self.teacher_model is None:
            for name in DISTILLATION_FIELDS:
                if getattr(self, name) != getattr(DistillationConfig, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} has no effect without a teacher; set teacher_model, or drop "
                        f"{name}"
                    )
            return
        self.distillation_config().require_compatible(objective)
        if self.use_task_rewards:
            return
        for name, unread in (
            ("use_kl_in_reward", self.use_kl_in_reward),
            ("adv_estimator", self.adv_estimator != AdvantageConfig.adv_estimator),
            ("overlong_buffer_len", self.overlong_buffer_len is not None),
            ("rollout_is", self.rollout_is is not None and not self.use_policy_gradient),
        ):
            if unread:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with use_task_rewards=False, where the loss is the "
                    f"distillation loss alone; set use_task_rewards=True, or drop {name}"
                )

    def objective_config(self) -> ObjectiveConfig:
        """The settings of `ppo_loss`, with `loss_scale_factor=None` resolved to `max_completion_length` tokens."""
        settings = {name: getattr(self, name) for name in OBJECTIVE_FIELDS}
        # README, departure 3
        if settings["loss_agg_mode"] == "seq-mean-token-sum-norm" and settings["loss_scale_factor"] is None:
            settings["loss_scale_factor"] = self.max_completion_length
        return ObjectiveConfig(**settings)

    def _refuse_other_names(self, objective: ObjectiveConfig) -> None:
        """Refuse each TRL name of a quantity that has another name here, unless both agree."""
        for name, value, agrees, remedy in self._other_names(objective):
            if not agrees:
                raise ValueError(f"{name}={value!r} is TRL's setting and would have no effect here: {remedy}")

    def _other_names(self, objective: ObjectiveConfig):
        """Yield (TRL's name, its value, whether it says what is in force anyway, remedy); the table is this method."""
        default = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}

        def row(name: str, remedy: str, *in_force):
            value = getattr(self, name)
            # 0 equals False, and "False" from a command line is a string: compare as TRL will read it
            return name, value, value in (default[name], *in_force), remedy

        kl_coef = objective.kl_loss_coef if objective.use_kl_loss else 0.0
        yield row("epsilon", f"set clip_ratio_low={self.epsilon!r} (now {objective.clip_low})", objective.clip_low)
        yield row(
            "epsilon_high",
            f"set clip_ratio_high={self.epsilon_high!r} (now {objective.clip_high})",
            objective.clip_high,
        )
        yield row(
            "delta",
            f"set clip_ratio_c={self.delta!r} (now {objective.clip_ratio_c}), the bound where the advantage is "
            f"negative; the two are equal when it exceeds 1 + clip_ratio_high",
            objective.clip_ratio_c,
        )
        yield row("beta", f"set use_kl_loss=True and kl_loss_coef={self.beta!r} (in force now: {kl_coef})", kl_coef)
        yield row(
            "loss_type",
            {
                "grpo": "set loss_agg_mode='seq-mean-token-mean' instead",
                "bnpo": "set loss_agg_mode='token-mean' instead",
                "dr_grpo": "set loss_agg_mode='seq-mean-token-sum-norm' and norm_adv_by_std_in_grpo=False instead",
            }.get(self.loss_type, f"choose policy_loss among {', '.join(POLICY_LOSSES)}, and loss_agg_mode"),
        )
        scale_rewards = {True: "group", False: "none", "True": "group", "False": "none"}.get(
            self.scale_rewards, self.scale_rewards
        )
        in_force = "group" if self.norm_adv_by_std_in_grpo else "none"
        yield (
            "scale_rewards",
            self.scale_rewards,
            scale_rewards in ("group", in_force),
            "set norm_adv_by_std_in_grpo=False to leave the division by the group's std out"
            if scale_rewards == "none"
            else "advantages are normalised per group; set norm_adv_by_std_in_grpo",
        )
        yield row(
            "multi_objective_aggregation",
            "set adv_estimator='gdpo', which normalises the reward functions one by one, and leave "
            "'sum_then_normalize'",
            *(("normalize_then_sum",) if self.adv_estimator == "gdpo" else ()),
        )
        yield row("entropy_coef", f"set entropy_coeff={self.entropy_coef!r}", objective.entropy_coeff)
        adaptive = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
        for name in ("use_adaptive_entropy", *adaptive):
            yield row(name, "the entropy bonus has a fixed weight, entropy_coeff")
        yield row("top_entropy_quantile", "every token with response_mask 1 is trained on; leave 1.0")
        yield row("off_policy_mask_threshold", "leave None; mask or weight rows through a reward or a policy loss")
        yield row(
            "importance_sampling_level",
            "the policy loss decides the ratio's level; 'vanilla' has token ratios. Register a sequence-level policy "
            "loss with register_policy_loss and leave 'token'",
        )
        value = self.use_bias_correction_kl
        yield (
            "use_bias_correction_kl",
            value,
            not value,
            "leave False; for a KL gradient without bias set kl_loss_type='low_var_kl+' or 'k2'",
        )
        for name in ("sapo_temperature_neg", "sapo_temperature_pos"):
            yield row(name, f"it belongs to loss_type='sapo'; choose policy_loss among {', '.join(POLICY_LOSSES)}")
        for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            yield row(name, f"it belongs to loss_type='vespo'; choose policy_loss among {', '.join(POLICY_LOSSES)}")

    def _refuse_indivisible_batches(self) -> None:
        """Refuse batch sizes that do not divide, with the numbers that would; before TRL, which names none."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        rows = self.per_device_train_batch_size * ranks
        generations = self.num_generations
        if generations is None or generations < 2:
            raise ValueError(
                f"num_generations={generations!r} must be at least 2: a response is scored against the others of its "
                f"group"
            )
        whole = self._steps_of_whole_groups() * rows
        if self.generation_batch_size is not None and self.generation_batch_size % rows:
            below = self.generation_batch_size // whole * whole
            raise ValueError(
                f"generation_batch_size={self.generation_batch_size} must be a multiple of "
                f"per_device_train_batch_size x ranks = {self.per_device_train_batch_size} x {ranks} = {rows}; use "
                f"{' or '.join(str(n) for n in (below, below + whole) if n)}"
            )
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        batch = self.generation_batch_size or rows * steps
        if batch % generations:
            divisors = [n for n in range(2, batch + 1) if batch % n == 0]
            fitting = -(-batch // whole) * whole
            raise ValueError(
                f"the generation batch of {batch} responses (per_device_train_batch_size "
                f"{self.per_device_train_batch_size} x ranks {ranks} x steps_per_generation {batch // rows}) must be a "
                f"multiple of num_generations={generations}; use num_generations among {divisors}, or a batch of "
                f"{fitting} (steps_per_generation={fitting // rows})"
            )

    def _steps_of_whole_groups(self) -> int:
        """The least number of micro-batches that make whole optimizer steps and hold whole groups."""
        rows = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
        groups = self.num_generations // math.gcd(rows, self.num_generations)
        return math.lcm(self.gradient_accumulation_steps, groups)

    def _refuse_windows_across_generations(self) -> None:
        """Refuse optimizer steps that span generations: their counts are unknown at their first backward."""
        accumulation, steps = self.gradient_accumulation_steps, self.steps_per_generation
        if steps % accumulation:
            whole = self._steps_of_whole_groups()
            multiple = -(-steps // whole) * whole
            raise ValueError(
                f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={accumulation}, so "
                f"that each optimizer step has all its responses before its first backward; use "
                f"steps_per_generation={multiple}, or gradient_accumulation_steps among "
                f"{[n for n in range(1, steps + 1) if steps % n == 0]}"
            )
