"""The sections of texts: completions by reward and advantage, greedy answers before and after."""

from .markup import escape, number_text, run_tag, times
from .runs import Run
from .texts import Answer, Completion

MOST_ANSWERS = 100  # of a run
EXCERPT = 70  # characters of the beginning, and of the end


def completions(runs: list[Run]) -> str:
    """The best and worst completions, highest reward first; a script sorts and filters them, folded all the same."""
    many = len(runs) > 1
    said, cards = [], []
    for i, run in enumerate(runs):
        tag = run_tag(i, run.label, many)
        if run.sample is None:
            said.append(f'<li class="r{i}">{tag}No completions were logged (the setting log_completions).</li>')
            continue
        sample = run.sample
        said.append(
            f'<li class="r{i}">{tag}{len(sample.completions):,} of the {times(sample.seen, "completion")} of '
            f"{sample.steps_read} of {times(sample.steps_logged, 'logged step')}: those with the highest and lowest "
            f"reward and advantage of each.</li>"
        )
        cards += [(completion, i, run.label) for completion in sample.completions]
    text = f'<ul class="plain">{"".join(said)}</ul>'
    if not cards:
        return text
    cards.sort(key=lambda card: _rank(card[0]), reverse=True)
    steps = sorted({completion.step for completion, _, _ in cards})
    listed = "".join(_card(completion, i, label, many) for completion, i, label in cards)
    heading = (
        '<div class="heads"><span>step</span><span>reward</span><span>advantage</span><span>completion</span></div>'
    )
    return f'{text}{_controls(steps)}<div class="cards" tabindex="0">{heading}{listed}</div>'


def _rank(completion: Completion) -> tuple[float, float, int]:
    lowest = float("-inf")
    reward = lowest if completion.reward is None else completion.reward
    return reward, lowest if completion.advantage is None else completion.advantage, completion.step


def _controls(steps: list[int]) -> str:
    orders = {
        "reward-down": "highest reward first",
        "reward-up": "lowest reward first",
        "advantage-down": "highest advantage first",
        "advantage-up": "lowest advantage first",
        "step-up": "earliest step first",
        "step-down": "latest step first",
    }
    order = "".join(f'<option value="{value}">{text}</option>' for value, text in orders.items())
    step = "".join(f'<option value="{step}">{step:,}</option>' for step in steps)
    return (
        f'<div class="controls js" hidden><label>Order <select class="order">{order}</select></label>'
        f'<label>Step <select class="step"><option value="">all</option>{step}</select></label>'
        f'<label>Contains <input type="search" class="contains"></label><output></output></div>'
    )


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > 2 * EXCERPT:
        line = f"{line[:EXCERPT]} … {line[-EXCERPT:]}"  # the answer stands at the end
    return f"<bdi>{escape(line)}</bdi>" if line else "<em>(empty)</em>"


def _text(heading: str, text: str) -> str:
    return f'<h5>{heading}</h5><pre dir="auto">{escape(text)}</pre>'


def _others(others: dict[str, str]) -> str:
    items = "".join(f"<li>{escape(key)}: <bdi>{escape(value)}</bdi></li>" for key, value in others.items())
    return f'<ul class="plain">{items}</ul>' if items else ""


def _card(completion: Completion, index: int, label: str, many: bool) -> str:
    data = "".join(
        f' data-{name}="{"" if value is None else value}"'
        for name, value in (
            ("step", completion.step),
            ("reward", completion.reward),
            ("advantage", completion.advantage),
        )
    )
    parts = {f"reward of {name}": number_text(value) for name, value in completion.parts.items()}
    others = (parts if len(parts) > 1 else {}) | completion.others
    return (
        f'<details class="card r{index}"{data}><summary><span>{completion.step:,}</span>'
        f"<span>{number_text(completion.reward)}</span><span>{number_text(completion.advantage, signed=True)}</span>"
        f"<span>{run_tag(index, label, many)}{_excerpt(completion.text)}</span></summary>"
        f"{_others(others)}{_text('Prompt', completion.prompt)}{_text('Completion', completion.text)}</details>"
    )


def answers(runs: list[Run]) -> str:
    """Greedy answers side by side, those that changed first; nothing if no run has any."""
    parts = []
    for i, run in enumerate(runs):
        if run.answers:
            both = [answer for answer in run.answers if None not in (answer.before, answer.after)]
            changed = sum(answer.before != answer.after for answer in both)
            said = f"{changed:,} of {times(len(both), 'answer')} changed." if both else _only(run.answers)
            shown = run.answers[:MOST_ANSWERS]
            if len(shown) < len(run.answers):
                said += f" The first {len(shown)} are shown."
            listed = "".join(_answer(answer) for answer in shown)
            tag = run_tag(i, run.label, len(runs) > 1)
            parts.append(f'<div class="r{i}"><p>{tag}{said}</p><div class="cards" tabindex="0">{listed}</div></div>')
    return "".join(parts)


def _only(found: list[Answer]) -> str:
    after = found[0].before is None
    when, other = ("after", "before") if after else ("before", "after")
    return f"Answers {when} training to {times(len(found), 'problem')}; there are none from {other} it."


def _answer(answer: Answer) -> str:
    texts = {"Before": answer.before, "After": answer.after}
    columns = "".join(
        f"<div>{_text(f'{when} training', text)}</div>" for when, text in texts.items() if text is not None
    )
    state = "" if None in texts.values() else "same" if answer.before == answer.after else "changed"
    last = answer.before if answer.after is None else answer.after
    return (
        f'<details class="card"><summary><span>{escape(answer.problem)}</span><span>{state}</span>'
        f"<span>{_excerpt(last)}</span></summary>"
        f'{_others(answer.others)}<div class="pair">{columns}</div></details>'
    )
