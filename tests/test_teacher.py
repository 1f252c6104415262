"""Teachers and the top-k head against plain softmaxes, a served teacher, and students that learn from a teacher."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tiny
import torch
from test_trainer_step import Recorder, make
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.training.forward import Rows, score
from grpo_ext.training.layout import RowLength
from grpo_ext.training.teacher import ModelTeacher, ServedTeacher
from grpo_ext.training.topk_head import score_topk

K = 5
PROMPTS = [[6, 7, 8], [9], [10, 11, 12, 13, 14]]
COMPLETIONS = [[20, 21, 22, 1], [23, 24], [25, 26, 27, 28, 29, 30, 1]]


def padded_rows() -> Rows:
    """In TRL's layout, with garbage outside the rows' own tokens."""
    left, right = max(map(len, PROMPTS)), max(map(len, COMPLETIONS))
    table = [[3] * (left - len(p)) + p + c + [4] * (right - len(c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    lengths = [RowLength(len(p), len(c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    return Rows(torch.tensor(table), right, lengths)


def log_softmaxes(model, temperature=1.0):
    """For each row `(tokens, V)`, one row at a time through the logits."""
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        yield torch.log_softmax(logits / temperature, -1)


@pytest.fixture
def saved_teacher(tmp_path):
    """A teacher's folder, as `teacher_model` takes it."""
    folder = tmp_path / "teacher"
    tiny.model(seed=1).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


# Scores


@pytest.mark.parametrize("topk", [None, K])
def test_a_teacher_scores_as_a_plain_softmax_does(topk):
    teacher = ModelTeacher(tiny.model(seed=1), tiny.tokenizer())
    teacher.check(tiny.tokenizer(), 64, topk)
    scores = teacher.score(padded_rows(), topk)
    with torch.no_grad():
        plain = list(log_softmaxes(tiny.model(seed=1)))
    for i, (expected, completion) in enumerate(zip(plain, COMPLETIONS, strict=True)):
        n = len(completion)
        chosen = expected.gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(scores.log_probs[i, :n], chosen, rtol=1e-5, atol=1e-5)
        assert not scores.log_probs[i, n:].any()
        if topk is not None:
            top = expected.topk(K)
            torch.testing.assert_close(scores.topk.log_probs[i, :n], top.values, rtol=1e-5, atol=1e-5)
            assert scores.topk.ids[i, :n].tolist() == top.indices.tolist()
            assert scores.topk.log_probs[i, n:].eq(float("-inf")).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_students_topk_has_the_softmaxes_value_and_gradient(temperature):
    rows, ids = padded_rows(), torch.zeros(3, 7, K, dtype=torch.int32)
    ids[:] = torch.tensor([20, 3, 40, 41, 63])
    weights = torch.randn(3, 7, K, generator=torch.Generator().manual_seed(0))
    weights[~(torch.arange(7) < torch.tensor([[len(c)] for c in COMPLETIONS]))] = 0

    ours = tiny.model()
    add_fused_lm_head(ours, temperature=temperature)
    plain_scores = score(ours, rows, [[1, 0], [2]])
    scores, topk = score_topk(ours, rows, [[1, 0], [2]], ids)
    assert torch.equal(scores.log_probs, plain_scores.log_probs)
    (topk.log_probs * weights).sum().backward()

    plain = tiny.model()
    total = 0.0
    for i, expected in enumerate(log_softmaxes(plain, temperature)):
        n = len(expected)
        chosen = expected.gather(1, ids[i, :n].long())
        torch.testing.assert_close(topk.log_probs[i, :n], chosen, rtol=1e-5, atol=1e-5)
        among = expected.topk(K).values[:, -1:] <= chosen
        assert torch.equal(topk.overlap[i, :n], among)
        total = total + (chosen * weights[i, :n]).sum()
    total.backward()
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_no_buffer_of_all_tokens_times_the_vocabulary(monkeypatch):
    """Whatever the number of tokens, a tile holds at most `_CHUNK` elements and one row's more."""
    from grpo_ext.training import topk_head

    monkeypatch.setattr(topk_head, "_CHUNK", 128)  # two positions of 64 tokens
    seen = []
    tiles = topk_head.Head.tiles
    monkeypatch.setattr(topk_head.Head, "tiles", lambda head: (seen.append(t[1].shape) or t for t in tiles(head)))
    teacher = ModelTeacher(tiny.model(seed=1), tiny.tokenizer())
    teacher.check(tiny.tokenizer(), 64, K)
    chunked = teacher.score(padded_rows(), K)
    assert seen and max(shape[0] for shape in seen) <= 2
    monkeypatch.setattr(topk_head, "_CHUNK", 2**24)
    whole = teacher.score(padded_rows(), K)
    torch.testing.assert_close(chunked.topk.log_probs, whole.topk.log_probs)


# Vocabularies


def test_another_vocabulary_is_refused_before_the_teacher_is_loaded(tmp_path, saved_teacher):
    other = tiny.tokenizer()
    other.add_tokens(["new"])
    other.save_pretrained(saved_teacher)
    (saved_teacher / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has another vocabulary than the student: 1 tokens.*'new' is unknown and 64"):
        make(tmp_path / "run", teacher_model=str(saved_teacher))


def test_a_teacher_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer of the teacher can be loaded from '.*absent'"):
        make(tmp_path, teacher_model=str(tmp_path / "absent"))


def test_more_topk_than_tokens_is_refused(tmp_path, saved_teacher):
    with pytest.raises(ValueError, match="distillation_topk=65 is beyond the 64 tokens"):
        make(
            tmp_path / "run",
            teacher_model=str(saved_teacher),
            distillation_loss_mode="forward_kl_topk",
            use_policy_gradient=False,
            distillation_topk=65,
        )


# A server


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does: log-probs of the prompt's tokens, its k most likely with the sampled one."""

    model, failures, requests = None, 0, 0

    def log_message(self, *args):
        pass

    def answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(200, {"data": [{"id": "teacher", "root": "teacher"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests += 1
        if type(self).failures > 0:
            type(self).failures -= 1
            return self.answer(503, {"error": "busy"})
        if asked["prompt_logprobs"] > 20:
            return self.answer(400, {"error": "prompt_logprobs exceeds max_logprobs 20"})
        tokens = asked["prompt"]
        with torch.no_grad():
            all_tokens = torch.log_softmax(self.model(torch.tensor([tokens])).logits[0], -1)
        entries = [None]
        for token, row in zip(tokens[1:], all_tokens, strict=False):
            named = {*row.topk(asked["prompt_logprobs"]).indices.tolist(), token}
            entries.append({str(i): {"logprob": row[i].item()} for i in named})
        self.answer(200, {"choices": [{"prompt_logprobs": entries}]})


@pytest.fixture
def served():
    Server.model, Server.failures, Server.requests = tiny.model(seed=1), 0, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def a_served_teacher(url, **settings) -> ServedTeacher:
    teacher = ServedTeacher(url, tokenizer=tiny.tokenizer(), **settings)
    teacher.retry_wait = 0.01
    return teacher


@pytest.mark.parametrize("topk", [None, K])
def test_a_served_teacher_says_what_its_model_says(served, topk):
    ours, theirs = ModelTeacher(tiny.model(seed=1), tiny.tokenizer()), a_served_teacher(served)
    for teacher in (ours, theirs):
        teacher.check(tiny.tokenizer(), 64, topk)
    expected, got = ours.score(padded_rows(), topk), theirs.score(padded_rows(), topk)
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    if topk is not None:
        torch.testing.assert_close(got.topk.log_probs, expected.topk.log_probs, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.topk.ids, expected.topk.ids)


def test_a_busy_server_is_asked_again(served):
    Server.failures = 2
    a_served_teacher(served).check(tiny.tokenizer(), 64)
    assert Server.requests == 3


def test_a_server_that_stays_busy_is_an_error_with_the_attempts(served):
    Server.failures = 99
    with pytest.raises(ConnectionError, match="no answer in 2 attempts.*busy"):
        a_served_teacher(served, retries=1).check(tiny.tokenizer(), 64)


def test_a_server_without_room_for_topk_says_how_to_start_it(served):
    with pytest.raises(ValueError, match="--max-logprobs 21"):
        a_served_teacher(served).check(tiny.tokenizer(), 64, 21)


def test_a_server_that_is_not_there():
    with pytest.raises(ConnectionError, match="start it with: vllm serve"):
        a_served_teacher("http://127.0.0.1:9", retries=0, timeout=2).check(tiny.tokenizer(), 64)


# Students


TOKENS = 12  # of a response


@torch.no_grad()
def draw(model, prompt_ids: list[int], copies: int, draws: torch.Generator) -> torch.Tensor:
    """Responses sampled from the model, `(copies, TOKENS)`."""
    rows = torch.tensor([prompt_ids] * copies)
    for _ in range(TOKENS):
        probabilities = model(rows).logits[:, -1].softmax(-1)
        rows = torch.cat([rows, torch.multinomial(probabilities, 1, generator=draws)], 1)
    return rows[:, len(prompt_ids) :]


def sampled(listed_prompts, trainer) -> dict:
    """A `rollout_func` that samples from the policy as it is; the copies of a prompt stand together."""
    copies, tokenizer = trainer.num_generations, trainer.processing_class
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in listed_prompts]
    model = trainer.accelerator.unwrap_model(trainer.model)
    groups = [draw(model, ids, copies, trainer.draws) for ids in prompt_ids[::copies]]
    return {"prompt_ids": prompt_ids, "completion_ids": torch.cat(groups).tolist(), "logprobs": None}


@torch.no_grad()
def kl_on_own_responses(student, teacher) -> float:
    """KL(student || teacher) over all tokens at the positions of the student's responses, nats a token."""
    draws, tokenizer, gaps = torch.Generator().manual_seed(1), tiny.tokenizer(), []
    for prompt in tiny.prompts()["prompt"]:
        ids = tokenizer(prompt)["input_ids"]
        rows = torch.cat([torch.tensor([ids] * 16), draw(student, ids, 16, draws)], 1)
        log_q, log_p = (torch.log_softmax(m(rows).logits[:, len(ids) - 1 : -1], -1) for m in (student, teacher))
        gaps.append((log_q.exp() * (log_q - log_p)).sum(-1).mean())
    return torch.stack(gaps).mean().item()


LEARNING = [
    {"distillation_loss_mode": "k1", "use_task_rewards": False},
    {"distillation_loss_mode": "k3", "use_task_rewards": False, "use_policy_gradient": False},
    {
        "distillation_loss_mode": "forward_kl_topk",
        "distillation_topk": 16,
        "use_task_rewards": False,
        "use_policy_gradient": False,
    },
    {"distillation_loss_mode": "k1", "use_task_rewards": True, "distillation_loss_coef": 2.0},
]


@pytest.mark.parametrize("settings", LEARNING, ids=["policy_gradient", "supervised", "topk", "with_rewards"])
def test_the_kl_to_the_teacher_halves(tmp_path, saved_teacher, settings):
    student = tiny.model()
    before = kl_on_own_responses(student, tiny.model(seed=1))
    trainer = make(
        tmp_path / "run",
        student,
        rollout=sampled,
        teacher_model=str(saved_teacher),
        optim="adamw_torch",
        learning_rate=3e-2,
        per_device_train_batch_size=32,
        max_completion_length=TOKENS,
        max_steps=40,
        **settings,
    )
    trainer.draws = torch.Generator().manual_seed(0)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    after = kl_on_own_responses(student, tiny.model(seed=1))
    assert after < before / 2, (before, after)
    expected = {"distillation/loss", "distillation/loss_max"}
    if settings["distillation_loss_mode"] == "forward_kl_topk":
        expected |= {"distillation/teacher_mass", "distillation/overlap_ratio"}
    assert expected <= recorder.steps[-1].keys()
    assert ("actor/pg_loss" in recorder.steps[-1]) == (
        settings["use_task_rewards"] or settings.get("use_policy_gradient", True)
    )
