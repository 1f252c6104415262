"""The sections that say what a run was and what came of it: summary, warnings, settings."""

import math
from datetime import datetime
from pathlib import Path

from .markup import escape, number_text, run_tag, times, value_text
from .runs import Run, is_number, setting_name

MAIN_SETTINGS = [
    "dataset_name",
    "reward",
    "model_name_or_path",
    "use_peft",
    "lora_r",
    "dtype",
    "learning_rate",
    "lr_scheduler_type",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "max_completion_length",
    "temperature",
    "use_vllm",
    "policy_loss",
    "adv_estimator",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "loss_agg_mode",
    "norm_adv_by_std_in_grpo",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "entropy_coeff",
    "seed",
]
REMEDY = 'json.dump(trainer.args.to_dict(), open("settings.json", "w"), default=str)'


def run_table(first: str, runs: list[Run], rows: list[tuple[str, list[str]]], classes: str = "") -> str:
    """A table with a column for each run; the cells are HTML already."""
    head = "".join(f'<th class="r{i}">{run_tag(i, run.label, True)}</th>' for i, run in enumerate(runs))
    body = "".join(
        f"<tr><th>{name}</th>" + "".join(f'<td class="r{i}">{cell}</td>' for i, cell in enumerate(cells)) + "</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="wide"><table class="{classes}"><thead><tr><th>{escape(first)}</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def summary(runs: list[Run]) -> str:
    """How far each run came, what it gained and how long it took."""
    facts = {
        "State": _state,
        "Optimizer steps": _steps,
        "Greedy accuracy": _accuracy,
        "Reward": lambda run: _change(run, "reward"),
        "Completion length, tokens": lambda run: _change(run, "completions/mean_length"),
        "Time": _time,
        "Warnings": _warning_count,
        "Read from": lambda run: f"<code>{escape(run.log)}</code>",
    }
    return run_table("", runs, [(name, [fact(run) for run in runs]) for name, fact in facts.items()], "facts")


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    written = datetime.fromtimestamp(run.written).strftime("%Y-%m-%d %H:%M")
    return f"going on, or cut short: its log has no end<br><small>last written {written}</small>"


def _steps(run: Run) -> str:
    return f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")


def _accuracy(run: Run) -> str:
    before, after = (run.summary.get(f"accuracy_{when}") for when in ("before", "after"))
    if not is_number(before) and not is_number(after):
        return "not measured"
    problems = run.summary.get("eval_problems")
    count = problems if is_number(problems) and problems > 0 else None
    share = [f"{_share(value, count)} {when}" for value, when in ((before, "before"), (after, "after"))]
    text = ", ".join(share)
    if is_number(before) and is_number(after):
        text += f" (<strong>{100 * (after - before):+.1f} points</strong>)"
    said = [f"{times(count, 'test problem')}; ± one standard error"] if count else []
    # A run that was resumed has gone further than where it was measured
    if is_number(after) and run.summary.get("steps") != run.last_step:
        said.append(f"after: at step {value_text(run.summary.get('steps'))}")
    return text + "".join(f"<br><small>{escape(line)}</small>" for line in said)


def _share(value: object, count: int | None) -> str:
    """An accuracy in percent, with its standard error if it is known of how many problems."""
    if not is_number(value):
        return "not measured"
    if count is None or not 0 <= value <= 1:
        return f"{value:.1%}"
    return f"{100 * value:.1f} ± {100 * math.sqrt(value * (1 - value) / count):.1f} %"


def _change(run: Run, key: str) -> str:
    """The means of the first and the last logged values."""
    values = [value for value in run.series().get(key, {}).values() if math.isfinite(value)]
    if not values:
        return "not logged"
    count = max(1, min(10, len(values) // 4))
    first, last = sum(values[:count]) / count, sum(values[-count:]) / count
    if len(values) == 1:
        return f"{number_text(first)} <br><small>logged once</small>"
    which = f"mean of the first and last {count} logged" if count > 1 else "first and last logged"
    return f"{number_text(first)} → <strong>{number_text(last)}</strong><br><small>{which}</small>"


def _time(run: Run) -> str:
    known = run.seconds()
    if known is None:
        return "not logged"
    seconds, source = known
    whole = round(seconds) if math.isfinite(seconds) else 0
    clock = f"{whole // 3600} h {whole // 60 % 60} min" if whole >= 3600 else f"{whole // 60} min {whole % 60} s"
    return f"{number_text(float(f'{seconds:.1f}'))} s" + f" ({clock})" * (whole >= 60) + f"<br><small>{source}</small>"


def _warning_count(run: Run) -> str:
    if run.findings is None:
        return "not searched for"
    count = sum(not finding.note for finding in run.findings)
    return f'<a href="#warnings">{count:,}</a>' if count else "none"


def warnings(runs: list[Run]) -> str:
    """What the diagnosis found in each log, and what could not be read of each run."""
    many = len(runs) > 1
    parts = []
    for i, run in enumerate(runs):
        tag = run_tag(i, run.label, many)
        for finding in run.findings or []:
            text = f"<strong>{escape(finding.rule)}</strong> {escape(finding.message)}"
            kind = "note" if finding.note else "warning"
            parts.append(f'<div class="{kind} r{i}">{tag}{text}</div>')
        if run.findings == []:
            parts.append(f'<p class="r{i}">{tag}Nothing suspicious in the log.</p>')
        parts += [f'<div class="note r{i}">{tag}{escape(note)}</div>' for note in run.notes]
    return "".join(parts)


def settings(runs: list[Run]) -> str:
    """First what differs between the runs, then the main settings, then all."""
    known = [run for run in runs if run.settings]
    parts = [f"<p>{text}</p>" for text in _without_settings(runs)]
    names = [*dict.fromkeys(name for run in known for name in run.settings)]
    different = [n for n in names if len({_setting(run, n) for run in known}) > 1]
    if len(known) > 1:
        count = times(len(different), "setting") if different else "No setting"
        parts.append(f"<h3>{count} differ{'s' * (len(different) < 2)} between the runs</h3>")
        if different:
            parts.append(_settings_table(runs, different, "different"))
    same = [name for name in names if setting_name(name) in MAIN_SETTINGS and name not in different]
    if same:
        same.sort(key=lambda name: MAIN_SETTINGS.index(setting_name(name)))
        heading = "Main settings" if len(known) == 1 else "Main settings, the same in all runs"
        # One column says it for all
        parts.append(f"<h3>{heading}</h3>" + _same_table(known[0], same))
    if names:
        search = '<label class="js" hidden>Search <input type="search" class="search"></label>'
        parts.append(
            f'<details class="all"><summary>All {len(names)} settings</summary>{search}'
            f"{_settings_table(runs, names, '', different)}</details>"
        )
    return "".join(parts)


def _without_settings(runs: list[Run]) -> list[str]:
    """A sentence for each source of settings other than `settings.json`."""
    remedy = (
        "<code>json.dump(trainer.args.to_dict(), open(&quot;settings.json&quot;, &quot;w&quot;), default=str)</code>"
    )
    few = [run.label for run in runs if run.settings and run.settings_file != "settings.json"]
    none = [run.label for run in runs if not run.settings]
    said = []
    if few:
        said.append(f"Of {escape(', '.join(few))} there is only what the trainer's state says.")
    if none:
        said.append(f"There are no settings of {escape(', '.join(none))}.")
    if said:
        said[-1] += f" To have all here, write them into the run's folder: {remedy}"
    return said


def _setting(run: Run, name: str) -> str | None:
    """As text, so that 1 and 1.0 differ and lists can be compared; `None`: not there."""
    return value_text(run.settings[name]) if name in run.settings else None


def _cell(value: str | None) -> str:
    return '<span class="none">not set</span>' if value is None else f"<code>{escape(value)}</code>"


def _settings_table(runs: list[Run], names: list[str], classes: str, marked: list[str] = ()) -> str:
    rows = []
    for name in names:
        heading = escape(name) if name not in marked else f"<mark>{escape(name)}</mark>"
        rows.append((heading, [_cell(_setting(run, name)) for run in runs]))
    return run_table("setting", runs, rows, f"settings {classes}")


def _same_table(run: Run, names: list[str]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{_cell(_setting(run, name))}</dd></div>" for name in names)
    return f'<dl class="main">{items}</dl>'


def title(runs: list[Run]) -> str:
    """The page's."""
    return f"Run report: {runs[0].label}" if len(runs) == 1 else f"Run report: {times(len(runs), 'run')}"


def default_page(runs: list[Run]) -> Path:
    """Where the page goes if nobody says: of one run into its folder, of several into the current one."""
    return (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
