"""The run report: every kind of log, whole and cut short, one page that a browser opens and that loads nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from grpo_ext import report
from grpo_ext.report.__main__ import main
from grpo_ext.report.charts import is_noisy, moving_mean, segments, thin, tick_text, ticks, value_range
from grpo_ext.report.page import render
from grpo_ext.report.runs import read_runs
from grpo_ext.report.texts import plain_text
from grpo_ext.training import diagnosis

ATTACK = '</pre><script>document.title = "attacked"</script><img src=x onerror=\'document.title="attacked"\'>'


def entries(count: int = 12, slope: float = 0.05) -> list[dict]:
    """As `JsonlLogCallback` writes them."""
    return [
        {"step": i, "loss": 0.01 * (-1) ** i, "grad_norm": 0.5, "reward": slope * i, "rewards/right/mean": slope * i}
        | {"entropy": 0.4 + 0.01 * i, "completions/mean_length": 50.0 - i, "step_time": 2.0}
        for i in range(1, count + 1)
    ]


def make_run(folder: Path, log: list[dict], **settings) -> Path:
    """A run's folder with a log, and with settings if there are any."""
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    if settings:
        content = {"model": {"model_name_or_path": "tiny"}, "training": {"max_steps": len(log), **settings}}
        (folder / "settings.json").write_text(json.dumps(content))
    return folder


def make_state(path: Path, log: list[dict], max_steps: int = 20) -> Path:
    """A `trainer_state.json` as transformers writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"epoch": 0.5, "max_steps": max_steps, "train_batch_size": 8, "log_history": log, "trial_name": None}
    path.write_text(json.dumps(state))
    return path


def make_completions(folder: Path, step: int, texts: list[str], rewards: list[float]) -> Path:
    """A file as TRL's `log_completions` writes it: prompts and completions are messages."""
    (folder / "completions").mkdir(exist_ok=True)
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    table = {
        "step": [step] * len(texts),
        "prompt": [[{"role": "user", "content": f"problem of step {step}"}]] * len(texts),
        "completion": [[{"role": "assistant", "content": text}] for text in texts],
        "right": rewards,
        "advantage": [reward - sum(rewards) / len(rewards) for reward in rewards],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


def page_of(*runs: Path) -> str:
    return render(read_runs(list(runs)))


class Elements(HTMLParser):
    """The tags of a page with their attributes, and its text by section."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: dict[str, str] = {}
        self._section = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"]

    def handle_data(self, data):
        if self.get_starttag_text() not in ("<style>", "<script>"):
            self.text[self._section] = self.text.get(self._section, "") + data


# What is read


def test_a_finished_run(tmp_path):
    folder = make_run(tmp_path / "run", [*entries(), {"step": 12, "train_runtime": 30.0}], learning_rate=1e-5)
    (folder / "summary.json").write_text(
        json.dumps({"accuracy_before": 0.25, "accuracy_after": 0.5, "eval_problems": 100, "steps": 12, "seconds": 31})
    )
    run = report.read_run(folder)
    assert (run.label, run.last_step, run.finished, run.setting("learning_rate")) == ("run", 12, True, 1e-5)
    assert run.seconds() == (31, "summary.json")
    assert run.series()["summary.json/accuracy"] == {0: 0.25, 12: 0.5}
    assert run.notes == []
    text = Elements(page_of(folder)).text["summary"]
    # sqrt(0.25 * 0.75 / 100) = 0.0433; sqrt(0.5 * 0.5 / 100) = 0.05
    assert "25.0 ± 4.3 % before, 50.0 ± 5.0 % after (+25.0 points)" in text
    assert "at step 12" not in text
    (folder / "log.jsonl").write_text(json.dumps({"step": 13, "reward": 1.0}) + "\n")  # resumed
    assert "after: at step 12" in Elements(page_of(folder)).text["summary"]


def test_a_run_in_progress_and_a_log_cut_in_the_middle_of_a_line(tmp_path):
    folder = make_run(tmp_path / "run", entries(), max_steps=100)
    whole = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(whole[:-40])
    run = report.read_run(folder)
    assert (run.last_step, run.finished, run.max_steps) == (11, False, 100)
    assert run.seconds() == (22.0, "sum of step_time")
    assert run.notes == ["The last line of log.jsonl (line 12) was cut short and is left out."]
    text = Elements(page_of(folder)).text
    assert "going on, or cut short" in text["summary"] and "line 12" in text["warnings"]


def test_a_broken_line_before_the_last_is_an_error_that_names_it(tmp_path):
    folder = make_run(tmp_path / "run", entries())
    lines = (folder / "log.jsonl").read_text().split("\n")
    (folder / "log.jsonl").write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]))
    with pytest.raises(ValueError, match=r"log\.jsonl, line 4: not JSON"):
        report.read_run(folder)


@pytest.mark.parametrize("given", ["", "checkpoint-8", "checkpoint-8/trainer_state.json"])
def test_trl_alone(tmp_path, given):
    """The output_dir, a checkpoint, or the file; the completions of the output_dir in each case."""
    folder = tmp_path / "run"
    make_state(folder / "checkpoint-4" / "trainer_state.json", entries(4))
    make_state(folder / "checkpoint-8" / "trainer_state.json", entries(8))
    make_completions(folder, 8, ["one", "two"], [0.0, 1.0])
    run = report.read_run(folder / given)
    assert (run.last_step, run.max_steps, run.finished, run.folder) == (8, 20, False, folder)
    assert run.settings == {"max_steps": 20, "train_batch_size": 8}
    assert [completion.text for completion in run.sample.completions] == ["one", "two"]
    assert "only what the trainer's state says" in Elements(page_of(folder / given)).text["settings"]


def test_the_state_of_a_finished_run_of_trl(tmp_path):
    make_state(tmp_path / "run" / "trainer_state.json", entries(20))
    assert report.read_run(tmp_path / "run").finished


def test_a_checkpoint_cut_short_is_passed_over(tmp_path):
    make_state(tmp_path / "checkpoint-4" / "trainer_state.json", entries(4))
    path = make_state(tmp_path / "checkpoint-10" / "trainer_state.json", entries(10))
    path.write_text(path.read_text()[:200])
    run = report.read_run(tmp_path)
    assert run.last_step == 4 and "checkpoint-10" in run.notes[0] and "passed over" in run.notes[0]
    with pytest.raises(ValueError, match="checkpoint-10"):  # asked for by name
        report.read_run(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("what", ["settings.json", "summary.json", "greedy_after.jsonl"])
def test_a_malformed_file_beside_the_log_is_left_out_with_a_word(tmp_path, what):
    folder = make_run(tmp_path / "run", entries())
    (folder / what).write_text('{"cut\n{"short')
    (note,) = report.read_run(folder).notes
    assert note.startswith(f"{what} is left out. ") and "line 1" in note


def test_unreadable_completions_are_left_out_with_a_word(tmp_path):
    folder = make_run(tmp_path / "run", entries())
    for step in (1, 2, 3):
        path = make_completions(folder, step, [f"text of step {step}"], [1.0])
        if step == 2:
            path.write_bytes(path.read_bytes()[:100])
    pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), folder / "completions" / "completions_00004.parquet")
    run = report.read_run(folder)
    assert [completion.step for completion in run.sample.completions] == [1, 3]
    assert [note.split(" is left out")[0][-13:] for note in run.notes] == ["00002.parquet", "00004.parquet"]
    text = Elements(page_of(folder)).text
    assert "text of step 3" in text["completions"] and "00002.parquet is left out" in text["warnings"]


def test_the_best_and_worst_completions_are_chosen(tmp_path):
    folder = make_run(tmp_path / "run", entries())
    for step in range(1, 13):
        make_completions(folder, step, [f"{step}-{i}" for i in range(32)], [i / 31 for i in range(32)])
    sample = report.read_run(folder).sample
    assert (sample.seen, sample.steps_read, sample.steps_logged) == (12 * 32, 12, 12)
    assert len(sample.completions) == 12 * 4  # two ends of two; by advantage the same
    assert {completion.text for completion in sample.completions if completion.step == 5} == {
        "5-0",
        "5-1",
        "5-30",
        "5-31",
    }


def test_texts_of_every_form():
    assert plain_text("a") == "a"
    assert plain_text([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "b"}]}]) == "[image]\nb"
    two = [{"role": "assistant", "content": "c", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "d"}]
    assert plain_text(two) == '[assistant]\nc\n[{"name": "f"}]\n\n[tool]\nd'


# What is refused


def test_what_is_no_run_is_named(tmp_path):
    empty, other, fresh = tmp_path / "empty", tmp_path / "other", make_run(tmp_path / "fresh", [])
    empty.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("hello")
    for path, reason in (
        (empty, "the folder is empty"),
        (other, "no log.jsonl, and no trainer_state.json"),
        (other / "notes.txt", "give its folder"),
        (tmp_path / "absent", "there is no such file or folder"),
        (fresh, "no whole entry yet"),
    ):
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{reason}"):
            report.read_run(path)
    with pytest.raises(ValueError, match="given twice"):
        run = make_run(tmp_path / "run", entries())
        report.read_runs([run, run / "log.jsonl"])


# The page


def test_two_runs_side_by_side(tmp_path):
    first = make_run(tmp_path / "a" / "run", entries(), learning_rate=1e-5, seed=1, beta=None)
    second = make_run(tmp_path / "b" / "run", entries(slope=0.01), learning_rate=2e-5, seed=1, clip_ratio=0.2)
    page = page_of(first, second)
    assert [run.label for run in report.read_runs([first, second])] == ["a/run", "b/run"]
    (table,) = re.findall(r'<table class="settings different">.*?</table>', page)
    rows = re.findall(r"<tr><th>([^<]*)</th><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td></tr>", table)
    cell = {name: tuple(re.sub("<[^>]*>", "", value) for value in values) for name, *values in rows}
    assert cell == {
        "training.learning_rate": ("1e-05", "2e-05"),
        "training.beta": ("null", "not set"),
        "training.clip_ratio": ("not set", "0.2"),
    }
    # One colour a run in every chart, table and legend
    for name, number in (("a/run", 0), ("b/run", 1)):
        assert set(re.findall(rf'<g class="line ([^"]*)" data-name="{name}"', page)) == {f"r{number} c{number}"}
        assert set(re.findall(rf'<span class="run ([^"]*)"><i></i>{name}', page)) == {f"r{number} c{number}"}


def test_secrets_are_masked(tmp_path):
    folder = make_run(tmp_path / "run", entries(), hub_token="hf_1234", wandb_api_key="5678", max_tokens_per_forward=9)
    page = page_of(folder)
    assert "hf_1234" not in page and "5678" not in page
    assert report.read_run(folder).settings["training.max_tokens_per_forward"] == 9


def test_whatever_is_written_is_shown_and_never_obeyed(tmp_path):
    """A completion, prompt, reward name, setting, warning and folder that want to run a script."""
    folder = make_run(
        tmp_path / "<script>alert(1)<",
        [e | {f"rewards/{ATTACK}/mean": 0.1 * e["step"]} for e in entries()],
        note=ATTACK,
    )
    (folder / "greedy_before.jsonl").write_text(json.dumps({"problem": ATTACK, "completion": ATTACK, ATTACK: 1}) + "\n")
    make_completions(folder, 1, [ATTACK, "\ud7ff\x00\x1b[31m"], [0.0, 1.0])
    page = page_of(folder)
    elements = Elements(page)
    tags = [tag for tag, _ in elements.tags]
    assert tags.count("script") == 1 and "img" not in tags
    assert all(not name.startswith("on") for _, attributes in elements.tags for name in attributes)
    assert all(elements.text[section].count(ATTACK) for section in ("curves", "completions", "answers", "settings"))
    assert "\x00" not in page and "\x1b" not in page


def test_the_page_loads_nothing(tmp_path):
    folder = make_run(tmp_path / "run", entries(), url="https://example.com/x.js")
    make_completions(folder, 1, ["![](https://example.com/x.png) <img src=https://example.com/y.png>"], [0.0])
    page = page_of(folder)
    for tag, attributes in Elements(page).tags:
        assert tag not in (
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "video",
            "audio",
            "source",
            "base",
            "image",
            "use",
        )
        for name, value in attributes.items():
            if name in ("src", "srcset", "data", "action", "poster", "xlink:href"):
                raise AssertionError(f"<{tag} {name}={value!r}> is fetched")
            assert name != "href" or value.startswith("#")
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in page  # nor would the browser


def test_warnings_are_those_of_the_diagnosis(tmp_path):
    log = [entry | {"completions/clipped_ratio": 0.9} for entry in entries()]
    folder = make_run(tmp_path / "run", log, steps_per_generation=1, gradient_accumulation_steps=1)
    found = diagnosis.diagnose(log)
    assert [finding.rule for finding in found] == ["truncation"]
    assert report.read_run(folder).findings == found
    assert found[0].message in Elements(page_of(folder)).text["warnings"]
    # By the run's own thresholds
    strict = make_run(tmp_path / "other", log, diagnosis_thresholds={"truncation_max": 0.95})
    assert report.read_run(strict).findings == []
    wrong = make_run(tmp_path / "wrong", log, diagnosis_thresholds={"no such": 1})
    run = report.read_run(wrong)
    assert run.findings is None and "no such" in run.notes[0]


def test_training_does_not_know_the_report():
    for path in (Path(report.__file__).parent.parent / "training").glob("*.py"):
        assert not re.search(r"^\s*(from|import) .*\breport\b", path.read_text(), re.MULTILINE), path


# Charts


def test_axes():
    marks, step = ticks(0, 1)
    assert [tick_text(value, step) for value in marks] == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    marks, step = ticks(1, 4, whole=True)
    assert [tick_text(value, step) for value in marks] == ["1", "2", "3", "4"]
    assert (
        value_range([3.0, 3.0]) == (0.0, 3.75) and value_range([-2.0]) == (-2.5, 0.0) and value_range([0.0]) == (0, 1)
    )
    for low, high in ((1e-12, 3e-12), (-5e90, 9e90), (0.9999999, 1.0000001)):
        marks, _ = ticks(low, high)
        assert 3 <= len(marks) <= 8 and low <= marks[0] and marks[-1] <= high * (1 + 1e-9)


def test_lines_keep_their_extremes_and_break_where_a_value_is_missing():
    points = [(i, float(i % 7)) for i in range(5000)]
    points[1234] = (1234, 99.0)
    kept = thin(points)
    assert len(kept) <= 162 and (1234, 99.0) in kept and kept[0] == points[0] and kept[-1] == points[-1]
    nan, infinite = float("nan"), float("inf")
    assert segments({1: 1.0, 2: nan, 3: 3.0, 4: 4.0, 5: infinite}) == [[(1, 1.0)], [(3, 3.0), (4, 4.0)]]


def test_moving_mean():
    points = [(i, float(i)) for i in range(30)]
    mean = dict(moving_mean(points))  # over 5, centred: round(0.1 * 30 / 2) = 2 to each side
    assert mean[10] == 10.0 and mean[0] == 1.0 and mean[29] == 28.0  # (0 + 1 + 2) / 3, (27 + 28 + 29) / 3
    noise = [(i, float(i % 2)) for i in range(100)]
    assert is_noisy(noise) and not is_noisy([(i, float(i)) for i in range(100)]) and not is_noisy(noise[:20])


# The command line


def run_cli(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "grpo_ext.report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_line(tmp_path):
    folder = make_run(tmp_path / "run", entries())
    (folder / "summary.json").write_text("{")
    done = run_cli(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{folder / 'report.html'}: ") and done.stdout.endswith("MB, 1 run\n")
    assert "run: summary.json is left out" in done.stderr
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_the_command_line_on_bad_input(tmp_path, capsys):
    folder, empty, text = make_run(tmp_path / "run", entries()), tmp_path / "empty", tmp_path / "notes.txt"
    empty.mkdir()
    text.write_text("mine")
    for arguments, words in (
        ([empty], f"error: {empty} is no run: the folder is empty"),
        ([folder, "--output", text], f"error: {text} exists and is no HTML page"),
        ([folder, "--output", empty], f"error: {empty} is a folder"),
        ([folder, "--output", tmp_path / "no" / "page.html"], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        assert words in ended.value.code  # sys.exit of a text: printed to stderr, status 1
    assert text.read_text() == "mine"
    page = tmp_path / "page.html"
    for _ in range(2):  # an earlier page is replaced
        main([str(folder), "--output", str(page)])
    assert str(page) in capsys.readouterr().out


# A browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed")
def test_a_browser_opens_the_page(tmp_path):
    log = [entry | {"grad_norm": float("nan") if entry["step"] == 3 else 0.1 * entry["step"]} for entry in entries()]
    first = make_run(tmp_path / "first", log, learning_rate=1e-5)
    second = make_run(tmp_path / "second", entries(slope=0.01), learning_rate=2e-5)
    make_completions(first, 1, [ATTACK, "a good answer"], [0.0, 1.0])
    page = tmp_path / "page.html"
    report.write_report(report.read_runs([first, second]), page)
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'p'}",
    ]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console  # neither errors nor refusals of the page's own policy
    dom = Elements(done.stdout)
    charts = [
        attributes["aria-label"] for tag, attributes in dom.tags if tag == "svg" and "chart" in attributes["class"]
    ]
    assert any(label.startswith("Reward: mean reward of a response over optimizer steps 1 to 12") for label in charts)
    assert len(charts) >= 5
    assert "<title>Run report: 2 runs</title>" in done.stdout  # a script in a completion would have changed it
    assert "2 of 2 match" in dom.text["completions"]  # the page's own script ran
