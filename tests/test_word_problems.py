"""The word problems and the tiny model made from them: what a reader of the quickstart takes on trust."""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_ext.tasks.word_problems import TEMPLATES, Step, iter_word_problems, load_word_problems

ROOT = Path(__file__).parent.parent
MODEL_DIR = ROOT / "examples" / "tiny_qwen2"
MAX_WEIGHT_BYTES = 2_000_000
MAX_FOLDER_BYTES = 2_300_000

# The answer to each template from the numbers in the order of the question, written anew and not by way of the steps.
GOLD = {
    "price": lambda count, price: sum([price] * count),
    "change": lambda count, price, paid: paid - sum([price] * count),
    "share": lambda total, people: next(each for each in range(100) if each * people == total),
    "share_and_find": lambda total, people, found: next(each for each in range(100) if each * people == total) + found,
    "younger": lambda age, gap: age - gap,
    "age_later": lambda age, gap, later: age + gap + later,
    "walk": lambda daily, days, extra: sum([daily] * days) + extra,
    "trip": lambda length, morning, afternoon: length - (morning + afternoon),
    "give_away": lambda have, more, given: have - given + more,
    "together": lambda have, times: have * (times + 1),
}


def read_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def train():
    return load_word_problems("train")


@pytest.fixture(scope="module")
def test():
    return load_word_problems("test")


def test_columns(train, test):
    assert (len(train), len(test)) == (2000, 200)
    for rows in (train, test):
        assert rows.column_names == ["prompt", "question", "answer", "solution"]
        for row in rows:
            assert row["prompt"] == [{"role": "user", "content": row["question"]}]
            assert row["solution"].endswith(f"\n#### {row['answer']}")


def test_same_arguments_same_rows_in_another_process():
    code = (
        "from grpo_ext.tasks.word_problems import load_word_problems as load\n"
        "print(load('train', size=50, seed=3)['question'][:])"
    )
    # PYTHONHASHSEED differs on purpose: nothing may hang on hash().
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] == f"{load_word_problems('train', size=50, seed=3)['question'][:]}\n"


def test_seeds_differ(train):
    assert train["question"][:] != load_word_problems("train", seed=1)["question"][:]


def test_no_question_twice_and_none_in_both_splits():
    train = [load_word_problems("train", size=3000, seed=seed)["question"][:] for seed in (0, 1)]
    test = [load_word_problems("test", size=1000, seed=seed)["question"][:] for seed in (0, 1)]
    assert all(len(set(questions)) == len(questions) for questions in train + test)
    assert not set(train[0] + train[1]) & set(test[0] + test[1])


def test_no_template_with_the_same_numbers_in_both_splits():
    # Stronger than distinct questions: a test problem is no train problem with other names.
    numbers = {
        split: {(p.template, *read_numbers(p.question)) for p in islice(iter_word_problems(split), 5000)}
        for split in ("train", "test")
    }
    assert not numbers["train"] & numbers["test"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_is_right(split, template):
    problems = [p for p in islice(iter_word_problems(split), 3000) if p.template == template]
    assert len(problems) > 200
    for problem in problems:
        gold = GOLD[template](*read_numbers(problem.question))
        assert gold > 0
        assert problem.answer == str(gold)
        *lines, last = problem.solution.split("\n")
        assert last == f"#### {gold}"
        for line in lines:
            left, right = line.split("=")
            assert eval(left) == int(right)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        load_word_problems("dev")
    with pytest.raises(ValueError, match="size=0 leaves no row"):
        load_word_problems("test", size=0)
    with pytest.raises(ValueError, match="unknown operation"):
        str(Step(2, "^", 3))


def test_exhausted_split_is_refused(monkeypatch):
    # One draw a problem: the first repeat leaves too few.
    monkeypatch.setattr("grpo_ext.tasks.word_problems.MAX_DRAWS_PER_PROBLEM", 1)
    with pytest.raises(ValueError, match="size=1000, but only"):
        load_word_problems("test", size=1000)


def test_tokenizer_round_trip(tokenizer, train, test):
    for rows in (train, test):
        for column in ("question", "solution"):
            for text in rows[column]:
                assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Byte-level: text from outside the vocabulary survives too.
    text = "Zoë paid 12.50 € — why?"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_words_and_digits_are_single_tokens(tokenizer, test):
    for question in test["question"]:
        # As in Qwen2, a word takes the space before it with it, and a digit does not.
        pieces = re.findall(r"\d| ?[A-Za-z]+|[^\w\s]| (?=\d)", question)
        assert len(tokenizer(question).input_ids) == len(pieces)


def test_chat_template_and_special_tokens(tokenizer):
    prompt = [{"role": "user", "content": "How many?"}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")
    config = AutoModelForCausalLM.from_pretrained(MODEL_DIR).config
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_model_folder_is_small():
    assert (MODEL_DIR / "model.safetensors").stat().st_size < MAX_WEIGHT_BYTES
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < MAX_FOLDER_BYTES


def test_model_answers_in_the_right_form(tokenizer, test):
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    assert model.config.model_type == "qwen2"
    inputs = tokenizer.apply_chat_template(
        test["prompt"][:16], add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(re.search(r"^#### \d+$", text, re.MULTILINE) is not None for text in texts) >= 15
