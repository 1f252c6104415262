"""What goes wrong in a run, said once: rules over the numbers that the log holds anyway.

A rule looks at medians over a window of log entries and never at a single value. It reads nothing but the log, so a
run's `log.jsonl` is diagnosed afterwards as it is on the fly.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from transformers import TrainerCallback

logger = logging.getLogger(__name__)

_GENERATED = "completions/mean_length"  # logged with the optimizer step that began with a generation
_SILENCE = 3  # windows without the condition, after which a finding may be said again
_BEFORE = 10  # windows that a growth is measured against, those before the last


@dataclass(frozen=True)
class DiagnosisThresholds:
    """When the rules speak. An entry counts for a rule if it holds the rule's number.

    Attributes:
        window: entries that a median is over; the last ones.
        min_entries: entries before a rule says anything, and those that are the start of a run.
        entropy_fraction: of the entropy at the start, below which it has collapsed.
        ppo_kl_max: nats a token to the old policy. From a tenth of it on, growth counts (`kl_growth`).
        kl_loss_max: nats a token to the reference, likewise.
        kl_growth: times the median before the window.
        clip_fraction_min: share of the tokens held by the clip. 0: no lower bound.
        clip_fraction_max: the same, upper bound.
        dual_clip_max: share of the tokens held by the dual-clip.
        zero_spread_max: share of the groups whose rewards are all equal.
        zero_spread_rise: rise of the reward since the start that excuses it, in standard deviations of the rewards at
            the start: solved problems are what success looks like.
        truncation_max: share of the responses cut at `max_completion_length`.
        length_growth: times the mean response length before the window.
        reward_flat_entries: over which the reward has to rise.
        reward_flat_gain: least rise between the halves of these, in standard deviations of the rewards (`reward_std`).
        loss_zero: size of a loss that counts as 0.
        first_kl_max: size of `actor/ppo_kl`, nats a token, in the first optimizer step of a generation.
        sampler_difference_max: mean size of the log ratio of sampler and trainer, nats.
        sampler_kl_max: k3 estimate of the KL from sampler to trainer, nats a token.

    Raises:
        ValueError: names the threshold, its value and what it must be.
    """

    window: int = 10
    min_entries: int = 4
    entropy_fraction: float = 0.1
    ppo_kl_max: float = 0.1
    kl_loss_max: float = 0.5
    kl_growth: float = 10.0
    clip_fraction_min: float = 0.0
    clip_fraction_max: float = 0.3
    dual_clip_max: float = 0.01
    zero_spread_max: float = 0.5
    zero_spread_rise: float = 0.25
    truncation_max: float = 0.5
    length_growth: float = 2.0
    reward_flat_entries: int = 100
    reward_flat_gain: float = 0.05
    loss_zero: float = 1e-6
    first_kl_max: float = 1e-3
    sampler_difference_max: float = 0.05
    sampler_kl_max: float = 0.01

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self._check(field.name, getattr(self, field.name))
        if self.min_entries > self.window:
            raise ValueError(
                f"diagnosis_thresholds: min_entries={self.min_entries} must be at most window={self.window}"
            )
        if self.clip_fraction_min > self.clip_fraction_max:
            raise ValueError(
                f"diagnosis_thresholds: clip_fraction_min={self.clip_fraction_min} must be at most "
                f"clip_fraction_max={self.clip_fraction_max}"
            )

    @staticmethod
    def _check(name: str, value: Any) -> None:
        def must_be(what: str, right: bool) -> None:
            if not right:
                raise ValueError(f"diagnosis_thresholds: {name}={value!r} must be {what}")

        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in ("window", "min_entries"):
            must_be("a whole number of at least 1", whole and value >= 1)
        elif name == "reward_flat_entries":
            must_be("a whole number of at least 2", whole and value >= 2)
        else:
            must_be("a finite number", whole or (isinstance(value, float) and math.isfinite(value)))
            if name in ("kl_growth", "length_growth"):
                must_be("greater than 1", value > 1)
            elif name in _SHARES:
                must_be("in [0, 1]", 0 <= value <= 1)
            else:
                must_be("at least 0", value >= 0)

    @classmethod
    def of(cls, given: Mapping[str, float] | str | None) -> DiagnosisThresholds:
        """The defaults with what is given.

        Args:
            given: thresholds by name, or such an object in JSON, as a command line has it.

        Raises:
            ValueError: not such an object, or an unknown name; lists the names.
        """
        values = {} if given is None else given
        if isinstance(values, str):
            try:
                values = json.loads(values)
            except json.JSONDecodeError as error:
                raise ValueError(f"diagnosis_thresholds={given!r} is not JSON ({error}); write {_EXAMPLE}") from error
        if not isinstance(values, Mapping):
            raise ValueError(f"diagnosis_thresholds={given!r} must be thresholds by name, such as {_EXAMPLE}")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(f"diagnosis_thresholds has no {name!r}; choose among {', '.join(names)}")
        return cls(**values)


_EXAMPLE = '{"clip_fraction_max": 0.4}'
_SHARES = (
    "entropy_fraction",
    "clip_fraction_min",
    "clip_fraction_max",
    "dual_clip_max",
    "zero_spread_max",
    "truncation_max",
)


@dataclass(frozen=True)
class RunFacts:
    """What a log does not say of its run.

    Attributes:
        steps_per_generation: optimizer steps from one generation to the next; `None`: unknown, and then only entries of
            a single step tell which one is the first.
        kl_per_token: `actor/kl_loss` is a mean over tokens, so that a limit in nats a token fits.
        learns_from_rewards: the rewards are in the loss.
        learns_from_spread: a group of equal rewards teaches nothing.
    """

    steps_per_generation: int | None = None
    kl_per_token: bool = True
    learns_from_rewards: bool = True
    learns_from_spread: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> RunFacts:
        """From the fields of a `GRPOVerlConfig`; what is missing counts as its default, or as unknown."""
        micro_steps, accumulation = settings.get("steps_per_generation"), settings.get("gradient_accumulation_steps")
        steps = None
        if micro_steps and accumulation:
            steps = micro_steps // accumulation * (settings.get("num_iterations") or 1)
        rewards = settings.get("teacher_model") is None or settings.get("use_task_rewards", True)
        # The first two compare with something else than the group, the third looks at each reward function
        apart = settings.get("adv_estimator") in ("reinforce_plus_plus", "remax", "gdpo")
        return cls(
            steps_per_generation=steps,
            kl_per_token=settings.get("loss_agg_mode") not in ("token-sum", "seq-mean-token-sum"),
            learns_from_rewards=rewards,
            learns_from_spread=rewards and not apart,
        )


class Point(NamedTuple):
    """A rule's numbers in one log entry, in the order of `Rule.reads`."""

    step: int
    values: tuple[float, ...]


class Verdict(NamedTuple):
    """A condition that holds: since which step, at what value, and how that compares."""

    since: int
    value: float
    compared: str


Series = list[Point]
Condition = Callable[[Series, DiagnosisThresholds], Verdict | None]


def _sizes(points: Series) -> list[float]:
    return [abs(point.values[0]) for point in points]


def _recent(series: Series, thresholds: DiagnosisThresholds) -> Series:
    """The last window; empty while there are too few entries."""
    return series[-thresholds.window :] if len(series) >= thresholds.min_entries else []


def _before(series: Series, thresholds: DiagnosisThresholds) -> float | None:
    """The median of the windows before the last; `None` before there is a whole one."""
    window = thresholds.window
    earlier = series[-(_BEFORE + 1) * window : -window]
    return median(_sizes(earlier)) if len(earlier) >= window else None


def _verdict(points: Series, limit: float, compared: str, *, under: bool = False) -> Verdict | None:
    """If the median of the points is beyond the limit: since the first of them that is."""
    value = median(_sizes(points))
    if value >= limit if under else value <= limit:
        return None
    since = next(p.step for p in points if (abs(p.values[0]) < limit if under else abs(p.values[0]) > limit))
    return Verdict(since, value, compared)


def above(limit: str) -> Condition:
    """The median of the last window is larger than a threshold."""

    def condition(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
        points, most = _recent(series, thresholds), getattr(thresholds, limit)
        return _verdict(points, most, f"above {most:.3g}") if points else None

    return condition


def below(limit: str) -> Condition:
    """The median of the last window is smaller than a threshold."""

    def condition(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
        points, least = _recent(series, thresholds), getattr(thresholds, limit)
        return _verdict(points, least, f"below {least:.3g}", under=True) if points else None

    return condition


def growing(factor: str, limit: str | None = None) -> Condition:
    """The median of the last window is a multiple of what it was before, and above a tenth of a limit."""

    def condition(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
        before = _before(series, thresholds)
        if before is None:
            return None
        least = getattr(thresholds, limit) / 10 if limit else 0.0
        most = max(least, getattr(thresholds, factor) * before)
        return _verdict(_recent(series, thresholds), most, f"up from {before:.3g}")

    return condition


def either(*conditions: Condition) -> Condition:
    """The first of the conditions that holds."""

    def condition(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
        return next((verdict for c in conditions if (verdict := c(series, thresholds))), None)

    return condition


def above_without_rise(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
    """Most groups have no spread, and not because the reward has risen since the first entries of the run."""
    verdict = above("zero_spread_max")(series, thresholds)
    if verdict is None:
        return None
    start, points = series[: thresholds.min_entries], _recent(series, thresholds)
    rise = median(p.values[1] for p in points) - median(p.values[1] for p in start)
    spread = median(p.values[2] for p in start)
    return None if rise > thresholds.zero_spread_rise * spread else verdict


def fallen(fraction: str) -> Condition:
    """The median of the last window is a small fraction of what it was in the first entries of the run."""

    def condition(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
        points = _recent(series, thresholds)
        if not points:
            return None
        start = median(_sizes(series[: thresholds.min_entries]))
        return _verdict(points, getattr(thresholds, fraction) * start, f"down from {start:.3g}", under=True)

    return condition


def not_rising(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
    """The second half of a long window is hardly above the first, by the spread of the rewards."""
    points = series[-thresholds.reward_flat_entries :]
    if len(points) < thresholds.reward_flat_entries:
        return None
    half = len(points) // 2
    first, second = (median(p.values[0] for p in part) for part in (points[:half], points[half:]))
    spread = median(p.values[1] for p in points)
    if second - first > thresholds.reward_flat_gain * spread:
        return None
    return Verdict(points[0].step, second, f"after {first:.3g} (rewards spread by {spread:.3g})")


def no_gradient(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
    """Loss and gradient norm are 0 in every entry of a whole window."""
    points = series[-thresholds.window :]
    still = all(abs(p.values[0]) <= thresholds.loss_zero and p.values[1] == 0 for p in points)
    if len(points) < thresholds.window or not still:
        return None
    return Verdict(points[0].step, points[-1].values[0], "and so is grad_norm")


def zero_at_the_start(series: Series, thresholds: DiagnosisThresholds) -> Verdict | None:
    """The policy loss is 0 in the first entries of the run, and the gradient is not."""
    if len(series) != thresholds.min_entries:
        return None
    if any(abs(p.values[0]) > thresholds.loss_zero or p.values[1] == 0 for p in series):
        return None
    return Verdict(series[0].step, series[-1].values[0], f"while grad_norm is {series[-1].values[1]:.3g}")


@dataclass(frozen=True)
class Rule:
    """One thing that may be wrong with a run.

    Attributes:
        name: of the rule.
        what: is the matter, to be followed by "since step 12".
        reads: keys of a log entry; an entry without them all is passed over.
        condition: whether it holds at the end of a series.
        threshold: of `DiagnosisThresholds`, that decides.
        meaning: what it usually means.
        look_at: settings of `GRPOVerlConfig`.
        part: of a generation's optimizer steps: "first", "later", or "any".
        needs: attribute of `RunFacts` without which the rule says nothing.
        note: it explains a healthy number, and is said once only.
    """

    name: str
    what: str
    reads: tuple[str, ...]
    condition: Condition
    threshold: str
    meaning: str
    look_at: tuple[str, ...]
    part: str = "any"
    needs: str | None = None
    note: bool = False


_SAMPLER_DIFFERS = (
    "another precision or kernel, weights that did not reach the sampler, or another temperature or template there"
)

RULES = (
    Rule(
        "entropy_collapse",
        "the entropy has collapsed",
        ("entropy",),
        fallen("entropy_fraction"),
        "entropy_fraction",
        "the policy samples almost the same response each time and explores no more; harmless only where the task is "
        "solved",
        ("clip_ratio_high", "entropy_coeff", "learning_rate", "temperature"),
    ),
    Rule(
        "ppo_kl",
        "the policy runs away from the one that sampled",
        ("actor/ppo_kl",),
        either(above("ppo_kl_max"), growing("kl_growth", "ppo_kl_max")),
        "ppo_kl_max",
        "the optimizer steps of a generation are too large or too many, so that its responses say little about the "
        "policy; or dropout is on, if it is as large before the first of them",
        ("learning_rate", "max_grad_norm", "steps_per_generation", "num_iterations", "disable_dropout"),
        part="later",
    ),
    Rule(
        "kl_loss",
        "the policy runs away from the reference",
        ("actor/kl_loss",),
        either(above("kl_loss_max"), growing("kl_growth", "kl_loss_max")),
        "kl_loss_max",
        "the update is too strong for the KL term to hold, and the language often suffers: read some completions",
        ("kl_loss_coef", "learning_rate", "kl_loss_type"),
        needs="kl_per_token",
    ),
    Rule(
        "clip_fraction_high",
        "too many tokens are held by the clip",
        ("actor/pg_clipfrac",),
        above("clip_fraction_max"),
        "clip_fraction_max",
        "the policy moves too far within a generation, and what the clip holds teaches nothing",
        ("learning_rate", "steps_per_generation", "num_iterations", "clip_ratio", "clip_ratio_high"),
        part="later",
    ),
    Rule(
        "clip_fraction_low",
        "fewer tokens than asked for are held by the clip",
        ("actor/pg_clipfrac",),
        below("clip_fraction_min"),
        "clip_fraction_min",
        "the policy hardly moves within a generation",
        ("learning_rate", "clip_ratio", "steps_per_generation", "num_iterations"),
        part="later",
    ),
    Rule(
        "dual_clip",
        "the dual-clip is active",
        ("actor/pg_clipfrac_lower",),
        above("dual_clip_max"),
        "dual_clip_max",
        "tokens of bad responses have become several times more likely within a generation: steps too large, dropout, "
        "or a sampler that disagrees with the trainer",
        ("learning_rate", "steps_per_generation", "clip_ratio_c", "disable_dropout"),
        part="later",
    ),
    Rule(
        "zero_spread",
        "most groups have equal rewards",
        ("frac_reward_zero_std", "reward", "reward_std"),
        above_without_rise,
        "zero_spread_max",
        "their advantages are 0 and they teach nothing: the problems are too hard or too easy for the model, or the "
        "reward does not read its answers",
        ("filter_groups", "num_generations", "temperature"),
        needs="learns_from_spread",
    ),
    Rule(
        "truncation",
        "most responses are cut off",
        ("completions/clipped_ratio",),
        above("truncation_max"),
        "truncation_max",
        "they end before their answer and score badly for that alone, or the model does not stop (end token, chat "
        "template)",
        ("max_completion_length", "overlong_buffer_len", "mask_truncated_completions"),
    ),
    Rule(
        "length_runaway",
        "the responses are getting longer and longer",
        ("completions/mean_length",),
        growing("length_growth"),
        "length_growth",
        "the reward pays for length, or the model has begun to repeat itself; fine if the reward rises with it",
        ("overlong_buffer_len", "loss_agg_mode", "max_completion_length", "learning_rate"),
    ),
    Rule(
        "reward_flat",
        "the reward has not risen",
        ("reward", "reward_std"),
        not_rising,
        "reward_flat_gain",
        "the task is solved, the model cannot learn it this way, or the update is too weak",
        ("learning_rate", "num_generations", "reward_weights", "warmup_steps"),
        needs="learns_from_rewards",
    ),
    Rule(
        "no_gradient",
        "nothing is learnt",
        ("loss", "grad_norm"),
        no_gradient,
        "loss_zero",
        "every group has equal rewards, so every advantage is 0, or every response is masked",
        ("filter_groups", "num_generations", "temperature", "reward_weights", "mask_truncated_completions"),
        needs="learns_from_rewards",
    ),
    Rule(
        "loss_zero",
        "nothing is wrong, and the policy loss is about 0",
        ("actor/pg_loss", "grad_norm"),
        zero_at_the_start,
        "loss_zero",
        "every ratio is 1 before the first update of a generation, and the loss is then the mean of -advantage, which "
        "is 0 in a group; the gradient is not 0, and the model learns",
        ("steps_per_generation", "loss_agg_mode"),
        needs="learns_from_rewards",
        note=True,
    ),
    Rule(
        "first_ratio",
        "the log-ratio is not 0 before the first update of a generation",
        ("actor/ppo_kl",),
        above("first_kl_max"),
        "first_kl_max",
        "old and new log-probabilities are not computed alike: dropout is on, or they come from a sampler that "
        "disagrees with the trainer",
        ("disable_dropout", "policy_loss", "forward_layout", "bf16"),
        part="first",
    ),
    Rule(
        "sampler_difference",
        "the sampler's log-probabilities are not the trainer's",
        ("sampling/sampling_logp_difference/mean",),
        above("sampler_difference_max"),
        "sampler_difference_max",
        _SAMPLER_DIFFERS,
        ("rollout_is", "vllm_importance_sampling_correction", "temperature", "bf16"),
    ),
    Rule(
        "sampler_kl",
        "the sampler's policy is not the trainer's",
        ("rollout_corr/k3_kl",),
        above("sampler_kl_max"),
        "sampler_kl_max",
        _SAMPLER_DIFFERS,
        ("rollout_is", "rollout_rs", "temperature", "bf16"),
    ),
)


@dataclass(frozen=True)
class Finding:
    """What a rule said.

    Attributes:
        rule: its name.
        step: at which it was said.
        step_since: from which on it holds.
        value: of the first key that the rule reads; a median.
        message: what, since when, what it usually means, which setting to look at.
        note: it explains a healthy number.
    """

    rule: str
    step: int
    step_since: int
    value: float
    message: str
    note: bool = False


def _finding(rule: Rule, step: int, verdict: Verdict, thresholds: DiagnosisThresholds) -> Finding:
    message = (
        f"{rule.what}, since step {verdict.since}: {rule.reads[0]} is {verdict.value:.3g}, {verdict.compared}. "
        f"{'Because' if rule.note else 'Usually'}: {rule.meaning}. Look at {', '.join(rule.look_at)} "
        f"(diagnosis_thresholds: {rule.threshold}={getattr(thresholds, rule.threshold):g})."
    )
    return Finding(rule.name, step, verdict.since, verdict.value, message[0].upper() + message[1:], rule.note)


def _number(entry: Mapping[str, Any], key: str) -> float | None:
    value = entry.get(key)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


class Diagnosis:
    """The rules over a run as it goes.

    A finding is said when its condition begins to hold, and again only after the condition did not hold for three
    windows of its entries in between.
    """

    def __init__(self, thresholds: DiagnosisThresholds | None = None, facts: RunFacts | None = None):
        self._thresholds, self._facts = thresholds or DiagnosisThresholds(), facts or RunFacts()
        self._rules = [rule for rule in RULES if rule.needs is None or getattr(self._facts, rule.needs)]
        self._series: dict[str, Series] = {rule.name: [] for rule in self._rules}
        self._silent: dict[str, int] = {}  # entries since the condition last held, of the rules that have spoken
        self._last_step = 0

    def add(self, entry: Mapping[str, Any]) -> list[Finding]:
        """What is new with this log entry; one of an evaluation, or the run's summary, is passed over."""
        if "loss" not in entry:
            return []
        step, part = entry["step"], self._part(entry)
        self._last_step = step
        findings = []
        for rule in self._rules:
            values = [_number(entry, key) for key in rule.reads]
            if rule.part not in ("any", part) or None in values:
                continue
            series = self._series[rule.name]
            series.append(Point(step, tuple(values)))
            verdict = rule.condition(series, self._thresholds)
            if verdict is None:
                self._silent[rule.name] = self._silent.get(rule.name, self._patience) + 1
                continue
            if self._silent.get(rule.name, self._patience) >= self._patience:
                findings.append(_finding(rule, step, verdict, self._thresholds))
            self._silent[rule.name] = 0
        return findings

    @property
    def _patience(self) -> int:
        return _SILENCE * self._thresholds.window

    def _part(self, entry: Mapping[str, Any]) -> str:
        """Whether an entry is the first optimizer step of a generation; "later" also if it averages several."""
        single = entry["step"] == self._last_step + 1
        return "first" if self._facts.steps_per_generation == 1 or (single and _GENERATED in entry) else "later"


def diagnose(
    entries: Iterable[Mapping[str, Any]],
    thresholds: DiagnosisThresholds | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """All findings of a run, in the order in which they were to be said.

    Args:
        entries: of the log, each with its `step`, as `read_log` gives them.
        thresholds: `None`: the defaults.
        settings: the run's `GRPOVerlConfig` by name ("training" in settings.json), for what the log does not say.
    """
    diagnosis = Diagnosis(thresholds, RunFacts.of(settings or {}))
    return [finding for entry in entries for finding in diagnosis.add(entry)]


class DiagnosisCallback(TrainerCallback):
    """Warns of what the rules find in a run's log, each thing once, on the main process."""

    def __init__(self, thresholds: DiagnosisThresholds | None = None):
        self._thresholds = thresholds
        self._diagnosis = Diagnosis(thresholds)

    def on_train_begin(self, args, state, control, **kwargs):
        self._diagnosis = Diagnosis(self._thresholds, RunFacts.of(vars(args)))
        for entry in state.log_history:  # of a resumed run, where it was said before
            self._diagnosis.add(entry)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            for finding in self._diagnosis.add({**logs, "step": state.global_step}):
                logger.warning("diagnosis: %s", finding.message)
