"""A rollout function or a prompt that cannot be trained on is one error that names it."""

import pytest
import tiny
from datasets import Dataset
from test_trainer_step import make


def spoiled(change):
    def rollout(prompts, trainer):
        output = tiny.fixed_rollout(prompts, trainer)
        change(output)
        return output

    return rollout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda output: output["completion_ids"].__setitem__(3, []), r"no tokens in completion_ids\[3\]"),
        (lambda output: output["prompt_ids"].__setitem__(0, []), r"no tokens in prompt_ids\[0\]"),
        (lambda output: output["completion_ids"].pop(), "7 completion_ids for 8 prompts"),
        (
            lambda output: output.update(env_mask=[[1]] * 8),
            r"env_mask\[\d\] of length 1 for a completion of \d+ tokens",
        ),
    ],
)
def test_a_rollout_that_does_not_fit_together_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, rollout=spoiled(change)).train()


@pytest.mark.parametrize("position", [0, 1])
def test_a_prompt_without_tokens_is_refused(tmp_path, position):
    prompts = ["w1 w2", "w3"]
    prompts[position] = ""
    trainer = make(tmp_path, rollout=None, dataset=Dataset.from_dict({"prompt": prompts}), max_completion_length=2)
    with pytest.raises(ValueError, match=r"the prompt '' has no tokens.*remove it"):
        trainer.train()
