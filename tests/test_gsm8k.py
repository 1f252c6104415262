"""GSM8K: the loader on files made here, and the three rewards on tables of completions."""

import json
import logging
import threading
import time

import pytest

from grpo_ext.tasks import (
    INSTRUCTION,
    REWARDS,
    completion_text,
    final_answer,
    flexible_reward,
    flexible_score,
    gold_number,
    load_gsm8k,
    read_gsm8k,
    robust_reward,
    robust_score,
    strict_reward,
    strict_score,
)

# Completion, gold, and what `verl.utils.reward_score.gsm8k.compute_score` of verl 0.9.1 gave for it: strict, flexible.
VERL = [
    ("", "18", 0.0, 0.0),
    ("18", "18", 0.0, 1.0),
    ("#### 18", "18", 1.0, 1.0),
    ("She makes 9 * 2 = 18.\n#### 18", "18", 1.0, 1.0),
    ("####18", "18", 0.0, 1.0),
    ("####  18", "18", 0.0, 1.0),
    ("####\n18", "18", 0.0, 1.0),
    ("##### 18", "18", 1.0, 1.0),
    ("### 18", "18", 0.0, 1.0),
    ("#### 18.", "18", 0.0, 0.0),
    ("#### 18.0", "18", 0.0, 0.0),
    ("#### 18.0", "18.0", 1.0, 1.0),
    ("#### $18", "18", 0.0, 1.0),
    ("#### 18$", "18", 1.0, 1.0),
    ("#### 18 dollars per day.", "18", 1.0, 1.0),
    ("#### 18 dollars for 2 days", "18", 1.0, 0.0),
    ("#### 70,000", "70000", 1.0, 0.0),
    ("#### 70000", "70,000", 0.0, 0.0),
    ("#### $70,000", "70000", 0.0, 0.0),
    ("#### 7,0,000,", "70000", 1.0, 0.0),
    ("#### -5", "-5", 1.0, 1.0),
    ("#### −5", "-5", 0.0, 0.0),
    ("#### - 5", "-5", 0.0, 0.0),
    ("#### --5", "-5", 0.0, 1.0),
    ("#### 5", "-5", 0.0, 0.0),
    ("#### 10-5", "-5", 0.0, 1.0),
    ("#### 18\n#### 19", "18", 0.0, 0.0),
    ("#### 18\n#### 19", "19", 1.0, 1.0),
    ("#### **18**", "18", 0.0, 1.0),
    ("**18**", "18", 0.0, 1.0),
    ("\\boxed{18}", "18", 0.0, 1.0),
    ("#### \\boxed{18}", "18", 0.0, 1.0),
    ("The answer is 18", "18", 0.0, 1.0),
    ("The answer is 18.", "18", 0.0, 0.0),
    ("The answer is 18, I think", "18", 0.0, 0.0),
    ("The answer is 18 , I think", "18", 0.0, 0.0),
    ("The answer is 18 . . .", "18", 0.0, 1.0),
    ("18 eggs in 2 days", "18", 0.0, 0.0),
    (". . .", "18", 0.0, 0.0),
    ("...", "18", 0.0, 0.0),
    ("#### .", "18", 0.0, 0.0),
    ("#### eighteen", "18", 0.0, 0.0),
    ("#### ١٨", "18", 0.0, 0.0),
    ("#### 18%", "18", 1.0, 1.0),
    ("#### 1/2", "0.5", 0.0, 0.0),
    ("#### 18" + "x" * 293, "18", 1.0, 1.0),
    ("#### 18" + "x" * 294, "18", 0.0, 1.0),
    ("#### 18" + "x" * 300, "18", 0.0, 0.0),
    ("18" + "x" * 298, "18", 0.0, 1.0),
    ("18" + "x" * 299, "18", 0.0, 0.0),
    ("218" + "x" * 298, "18", 0.0, 1.0),
]


@pytest.mark.parametrize(("text", "gold", "strict", "flexible"), VERL)
def test_strict_and_flexible_give_verls_numbers(text, gold, strict, flexible):
    assert strict_score(text, gold) == strict
    assert flexible_score(text, gold) == flexible


# Completion, and the number it ends on.
ANSWERS = [
    # 1. after the hashes
    ("#### 18", "18"),
    ("####18", "18"),
    ("####\n18", "18"),
    ("#### 18.", "18"),
    ("#### 18.0", "18.0"),
    ("#### .5", "0.5"),
    ("#### 018", "18"),
    ("#### $70,000", "70000"),
    ("#### 70 000", "70000"),
    ("#### 70\u202f000", "70000"),
    ("#### 1,00,000", "100000"),
    ("#### 1e3", "1000"),
    ("#### 18%", "18"),
    ("#### €18", "18"),
    ("#### \\$18", "18"),
    ("#### $18$", "18"),
    ("#### \\(18\\)", "18"),
    ("#### **18**", "18"),
    ("**#### 18**", "18"),
    ("#### \\boxed{18}", "18"),
    ("#### The final answer is: 18", "18"),
    ("#### x = 18", "18"),
    ("#### 18<|im_end|>", "18"),
    ("#### -5", "-5"),
    ("#### \u22125", "-5"),
    ("#### - 5", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### 18 dollars per day.", "18"),
    ("#### 18 dollars for 2 days (see step 3)", "18"),
    ("#### 18kg", "18"),
    ("#### 18\nThat took 3 steps.", "18"),
    ("#### 18\n#### 19", "19"),
    ("#### 3 * 6 = 18", "18"),
    ("#### (3 * 6) = $18", "18"),
    ("#### 1/2", "1/2"),
    ("#### -1/2", "-1/2"),
    ("#### \\frac{1}{2}", "1/2"),
    ("#### -\\dfrac12", "-1/2"),
    # ... something else than a number: no lower rule is tried
    ("so 18.\n#### 3 * 6", None),
    ("so 18.\n#### 3 \\times 6", None),
    ("so 18.\n#### 36/2", None),
    ("so 18.\n#### 18 - 20", None),
    ("so 18.\n#### 18,19", None),
    ("so 18.\n#### 3 1/2", None),
    ("so 18.\n#### 3\\frac{1}{2}", None),
    ("so 18.\n#### 3:30", None),
    ("so 18.\n#### 1.2.3", None),
    ("so 18.\n#### 2\\sqrt{3}", None),
    ("so 18.\n#### \\sqrt{16}", None),
    ("so 18.\n#### 3^2", None),
    # ... a heading
    ("#### Step 2: add\nSo it is \\boxed{18}.", "18"),
    ("#### Step 2: add\nSo it is 18.", "18"),
    ("#### Total: 18", "18"),
    ("#### 18\n#### Total: 19", "19"),
    # 2. boxed
    ("\\boxed{18}", "18"),
    ("\\boxed{18} after 3 steps", "18"),
    ("\\boxed{17} no, \\boxed{18}", "18"),
    ("\\boxed{\\boxed{18}}", "18"),
    ("\\boxed{{{18}}}", "18"),
    ("\\boxed{\\text{Total: } 18\\text{ dollars}}", "18"),
    ("\\boxed{x = 18}", "18"),
    ("\\boxed{\\$70{,}000}", "70000"),
    ("\\boxed{70\\,000}", "70000"),
    ("\\boxed{18\\%}", "18"),
    ("\\boxed{18^\\circ}", "18"),
    ("\\boxed{\\frac{1}{2}}", "1/2"),
    ("18 \\boxed{}", None),
    ("18 \\boxed{\\text{eighteen}}", None),
    ("18 \\boxed{3 \\cdot 6}", None),
    ("18 \\boxed{9^{9^{9}}}", None),
    ("\\boxed{18} and \\boxed{19", "18"),
    ("\\boxed{18", "18"),
    # 3. the last number
    ("The answer is 18.", "18"),
    ("**18**", "18"),
    ("18 eggs, 19 ducks", "19"),
    ("It costs $70,000.", "70000"),
    ("3 * 6 = 18", "18"),
    ("so 3 * 6", None),
    ("- 18 apples", "18"),
    ("for 5\n- 18 apples", "18"),
    ("18 cubes of H2O", "18"),
    ("on day-18", "18"),
    ("a total \u2014 18", "18"),
    ("no number", None),
    ("#### eighteen", None),
    ("", None),
    (None, None),
    (18, None),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("#### 18", "18", 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### 18", "18.00", 1.0),
        ("#### $70,000", "70000", 1.0),
        ("#### 70000", "70,000", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("#### \u22125", "-5", 1.0),
        ("#### -5", "\u22125", 1.0),
        ("#### -0", "0", 1.0),
        ("#### 18%", "18", 1.0),
        ("#### 5", "-5", 0.0),
        ("#### 18.000001", "18", 0.0),
        ("#### 180", "18", 0.0),
        ("It is 18, so\n#### 19", "18", 0.0),
        ("#### 18\nwait\n#### 19", "18", 0.0),
        ("\\boxed{18}, or rather \\boxed{19}", "18", 0.0),
        ("18, no, 19", "18", 0.0),
        ("#### 9 * 2", "18", 0.0),
        ("#### 36/2", "18", 0.0),
        ("", "18", 0.0),
        ("   \n", "18", 0.0),
        (None, "18", 0.0),
        ("#### 100000000000000000001", "100000000000000000000", 0.0),
        ("#### abc", "abc", 0.0),
        ("", "", 0.0),
        ("#### 18", None, 0.0),
    ],
)
def test_robust_score(text, gold, score):
    assert robust_score(text, gold) == score


HOSTILE = {
    "digits": "9" * 100_000,
    "hashed digits": "#### " + "9" * 100_000,
    "grouped digits": "#### 1" + ",000" * 25_000,
    "spaced digits": "#### 1" + " 111" * 25_000 + "1",
    "sum": "#### " + "1+" * 50_000 + "1",
    "equalities": "#### " + "1=" * 50_000 + "1",
    "tower": "\\boxed{" + "9^{" * 30_000 + "9" + "}" * 30_001,
    "open boxes": "\\boxed{" * 14_000,
    "open braces": "\\boxed{" + "{" * 100_000,
    "shut braces": "\\boxed{" + "}" * 100_000,
    "open fractions": "1\\frac{" * 14_000,
    "hashes": "#" * 100_000,
    "hash lines": "####\n" * 20_000,
    "blanks": "#### 1" + " " * 100_000 + "=",
    "minus signs": "#### " + "-" * 100_000,
    "equals signs": "#### " + " =" * 50_000,
    "dots": "." * 100_000,
    "exponent": "#### 1e999999999",
    "small exponent": "#### 1e-999999999",
    "long exponent": "#### 1e" + "9" * 10_000,
    "zero denominator": "#### 19/0",
    "letters": "x" * 100_000,
    "null": "#### \x0019",
    "surrogate": "\ud800 18 \ud800 19",
    "code": "#### __import__('os')",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_scores_zero_and_soon(name):
    start = time.perf_counter()
    assert [f(None, [HOSTILE[name]], ["18"]) for f in REWARDS.values()] == [[0.0]] * 3
    # Linear work takes some 50 ms here; quadratic work on 10^5 characters would take minutes.
    assert time.perf_counter() - start < 5.0


def test_robust_score_outside_the_main_thread_and_without_a_log_line(caplog):
    scores = []
    with caplog.at_level(logging.DEBUG):
        thread = threading.Thread(target=lambda: scores.extend(robust_score(f"#### {n}", "18") for n in (18, 19)))
        thread.start()
        thread.join()
    assert scores == [1.0, 0.0]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_rewards_read_plain_and_conversational_completions():
    prompts = ["q"] * 5
    completions = [
        "#### 18",
        [{"role": "assistant", "content": "#### 18"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "#### "}, {"type": "text", "text": "18"}]}],
        [
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "#### 19"},
            {"role": "assistant", "content": "#### 18"},
            {"role": "tool", "content": "#### 20"},
        ],
        [{"role": "assistant", "content": "#### 19"}],
    ]
    for reward in REWARDS.values():
        got = reward(
            prompts=prompts, completions=completions, answer=["18"] * 5, completion_ids=[[1]] * 5, question=[""] * 5
        )
        assert got == [1.0, 1.0, 1.0, 1.0, 0.0]
        assert all(type(value) is float for value in got)


def test_rewards_are_named_and_tabled():
    assert {"strict": strict_reward, "flexible": flexible_reward, "robust": robust_reward} == REWARDS
    # TRL names its metrics after the function.
    assert [f.__name__ for f in REWARDS.values()] == ["strict_reward", "flexible_reward", "robust_reward"]


@pytest.mark.parametrize(
    "completion",
    [None, [], [None], {}, [{"role": "assistant"}], [{"role": "assistant", "content": None}], 18, [["#### 18"]]],
)
def test_a_completion_without_text_scores_zero(completion):
    assert completion_text(completion) == ""
    assert [f(None, [completion], ["18"]) for f in REWARDS.values()] == [[0.0]] * 3


@pytest.mark.parametrize(
    "gold", [None, "", " ", ".", "-", "eighteen", "18 eggs", "1,2", "18.", "1/2", "1$8", "nan", 1.5, True, ["18"]]
)
def test_a_row_without_a_gold_is_unscored_and_never_paid(gold):
    completion = f"#### {gold}"
    assert gold_number(gold) is None
    assert [f(None, [completion, "#### 18"], [gold, "18"]) for f in REWARDS.values()] == [[None, 1.0]] * 3
    assert robust_score(completion, gold) == 0.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("18", "18"),
        (" 70,000\n", "70000"),
        ("$18", "18"),
        ("-$18", "-18"),
        (18, "18"),
        ("\u22125", "-5"),
        ("18.50", "18.50"),
        ("3+15=18\n#### 18", "18"),
    ],
)
def test_gold_number(answer, gold):
    assert gold_number(answer) == gold


def test_rewards_refuse_columns_of_different_length():
    with pytest.raises(ValueError, match="2 completions but 1 answers"):
        robust_reward(["q", "q"], ["#### 18", "#### 18"], ["18"])


GOOD = [
    {"question": "A hen lays 9 eggs a day at $2. What does it earn?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"},
    {"question": "And 35,000 at $2?", "answer": "35000 * 2 = 70000\n#### 70,000"},
    {"question": "It is 3\u00b0 and falls by 8\u00b0?\u2028", "answer": "3 - 8 = -5\n#### -5"},
]


def write(folder, lines, split="train"):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    (folder / f"{split}.jsonl").write_text(text + "\n", encoding="utf-8")
    return folder


def test_load_gives_verls_prompt_and_gold(tmp_path, recwarn):
    data = load_gsm8k(write(tmp_path, GOOD, "test"), "test")
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    assert data.column_names == ["prompt", "answer", "question", "solution"]
    assert data["answer"][:] == ["18", "70000", "-5"]
    assert data["question"][:] == [row["question"] for row in GOOD]
    assert data["solution"][:] == [row["answer"] for row in GOOD]
    asked = 'What does it earn? Let\'s think step by step and output the final answer after "####".'
    assert data[0]["prompt"] == [{"role": "user", "content": "A hen lays 9 eggs a day at $2. " + asked}]


def test_a_worked_solution_is_paid_by_strict_and_robust(tmp_path):
    data = load_gsm8k(str(write(tmp_path, GOOD)))
    solutions, golds = data["solution"][:], data["answer"][:]
    assert strict_reward(None, solutions, golds) == [1.0, 1.0, 1.0]
    assert robust_reward(None, solutions, golds) == [1.0, 1.0, 1.0]
    # verl keeps the comma of the completion but drops the gold's, so flexible misses 70,000.
    assert flexible_reward(None, solutions, golds) == [1.0, 0.0, 1.0]


def test_load_limit_seed_and_wording(tmp_path):
    rows = [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(20)]
    write(tmp_path, rows)
    assert load_gsm8k(tmp_path, limit=3)["answer"][:] == ["0", "1", "2"]
    assert len(load_gsm8k(tmp_path, limit=99)) == 20
    shuffled = load_gsm8k(tmp_path, seed=1)["answer"][:]
    assert shuffled != [str(n) for n in range(20)] and sorted(shuffled, key=int) == [str(n) for n in range(20)]
    assert load_gsm8k(tmp_path, seed=1, limit=5)["answer"][:] == shuffled[:5]
    assert load_gsm8k(tmp_path, limit=1, system_prompt="Be brief.", instruction="Go.")[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q0 Go."},
    ]
    assert load_gsm8k(tmp_path, limit=1, instruction="")[0]["prompt"] == [{"role": "user", "content": "q0"}]
    assert INSTRUCTION in load_gsm8k(tmp_path, limit=1)[0]["prompt"][0]["content"]
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit={limit} leaves no row"):
            load_gsm8k(tmp_path, limit=limit)


def test_rows_without_a_readable_gold_are_skipped_and_counted(tmp_path):
    bad = ["no hashes 18", "18", "#### eighteen", "####", "#### 18 eggs", "#### 1,2", "#### 18\n####"]
    lines = [GOOD[0], "", *({"question": "q", "answer": answer} for answer in bad), GOOD[1]]
    rows, skipped = read_gsm8k(write(tmp_path, lines))
    assert [row["answer"] for row in rows] == ["18", "70000"]
    assert skipped == [3, 4, 5, 6, 7, 8, 9]
    with pytest.warns(UserWarning, match=r"7 of 9 rows have no gold number .* \(lines 3, 4, 5, 6, 7, \.\.\.\)"):
        assert load_gsm8k(tmp_path)["answer"][:] == ["18", "70000"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"question": "q", "answer": "#### 1"', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('["q", "#### 1"]', "expected an object, got list"),
        ("null", "expected an object, got NoneType"),
        ('{"question": "q"}', r"no key 'answer' \(keys: question\)"),
        ("{}", r"no key 'question' \(keys: none\)"),
        ('{"question": "q", "answer": 1}', "'answer' must be a string, got int"),
        ('{"question": null, "answer": "#### 1"}', "'question' must be a string, got NoneType"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, line, problem):
    write(tmp_path, [GOOD[0], GOOD[1], line])
    with pytest.raises(ValueError, match=rf"train\.jsonl, line 3: {problem}") as error:
        load_gsm8k(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_line_that_is_not_utf8_is_named_by_file_and_number(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(
        json.dumps(GOOD[0]).encode() + b'\n{"question": "\xff", "answer": "#### 1"}\n'
    )
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: not a JSON object in UTF-8"):
        load_gsm8k(tmp_path)


def test_what_is_missing_is_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: give a folder that holds train.jsonl"):
        load_gsm8k(tmp_path / "nowhere")
    write(tmp_path, GOOD)
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl is a file: give a folder"):
        load_gsm8k(tmp_path / "train.jsonl")
    with pytest.raises(
        FileNotFoundError, match=r"test\.jsonl does not exist .*: train\.jsonl\): put the test split there"
    ):
        load_gsm8k(tmp_path, "test")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "it has no rows"), ("\n\n", "it has no rows"), ('{"question": "q", "answer": "18"}', "none of its 1 rows")],
)
def test_a_file_without_a_usable_row_is_refused(tmp_path, text, problem):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(ValueError, match=rf"train\.jsonl: {problem}.*#### N"):
        load_gsm8k(tmp_path)


def test_the_hub_is_asked_for_the_main_configuration(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(GOOD)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_gsm8k(split="test")["answer"][:] == ["18", "70000", "-5"]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_a_hub_failure_says_what_to_do(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        FileNotFoundError, match=r"data/gsm8k: no such folder, .*no route.* folder that holds train\.jsonl"
    ):
        load_gsm8k("data/gsm8k")
