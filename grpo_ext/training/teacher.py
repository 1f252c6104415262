"""Teachers of on-policy distillation: who scores the student's tokens, a model at hand or a server.

A teacher is scored at temperature 1, its own distribution, whatever the student samples with: so does verl 0.9.1
(`experimental.teacher_loop`), and a vLLM server knows no other for tokens that it did not sample. The student's side is
the distribution that it samples from, so what is learnt is that the student *at its temperature* is the teacher.
"""

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, get_config_model_id

from .forward import Rows, choose_layout, score
from .layout import CostModel, RowLength, packed_groups, padded_groups
from .topk_head import Head, TeacherTopK, head_seen_by, most_likely, spread
from .windows import equally_many

_SHOWN = 3  # tokens in an error message


class TeacherScores(NamedTuple):
    """What a teacher says of the rows' completions, in TRL's padded layout.

    Attributes:
        log_probs: `(B, C)`, nats, of the sampled tokens; 0 where there is none.
        topk: `(B, C, K)`, its most likely tokens, most likely first; log-prob `-inf` and id 0 where it named none.
    """

    log_probs: Tensor
    topk: TeacherTopK | None


class Teacher(Protocol):
    """What the trainer asks of a teacher."""

    def check(self, tokenizer: Any, embedding_rows: int, topk: int | None = None) -> None:
        """Refuse, before training, a student that this teacher cannot score.

        Args:
            tokenizer: the student's.
            embedding_rows: of the student, padding included; no token beyond them is named.
            topk: what `score` will be asked for.

        Raises:
            ValueError: the vocabularies differ, or `topk` is not to be had.
        """

    def score(self, rows: Rows, topk: int | None = None) -> TeacherScores:
        """Score every completion token, without gradient.

        Args:
            rows: prompts and completions.
            topk: how many of the teacher's most likely tokens to name at each position; `None`: none.
        """


def require_same_vocabulary(student: Any, teacher: Any, name: str, sizes: str = "") -> None:
    """Refuse a teacher whose token ids mean other tokens than the student's.

    Tokenizers are compared token by token. The rows of an embedding are no vocabulary: many models have more of them
    than tokens, rounded up.

    Args:
        student, teacher: tokenizers.
        name: of the teacher, for the message.
        sizes: what else to say.

    Raises:
        ValueError: names the teacher, how many tokens differ and the first of them.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    differing = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, theirs.get(token)), token),
    )
    shown = "; ".join(
        f"{token!r} is {ours.get(token, 'unknown')} and {theirs.get(token, 'unknown')}" for token in differing[:_SHOWN]
    )
    raise ValueError(
        f"the teacher {name!r} has another vocabulary than the student: {len(differing)} tokens have different ids "
        f"(student {len(ours)} tokens, teacher {len(theirs)}{sizes}), such as {shown}. Distillation compares "
        f"probabilities id by id; take a teacher with the student's tokenizer, as models of one family have"
    )


def load_tokenizer(name: str, remedy: str = "give a name or path that has one") -> Any:
    """The tokenizer of a teacher.

    Raises:
        ValueError: there is none; names the teacher and the remedy.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(
            f"no tokenizer of the teacher can be loaded from {name!r} ({type(error).__name__}); {remedy}"
        ) from error


class ModelTeacher:
    """A teacher whose weights are here, frozen.

    Args:
        model: a name or path to load from, in the dtype it is stored in; or a model, which is frozen in place.
        tokenizer: the teacher's; `None`: loaded by the model's name.
        model_init_kwargs: for loading, such as `{"attn_implementation": "flash_attention_2"}`.
        max_tokens_per_forward: that one forward takes, padding included.

    Raises:
        ValueError: the adapter puts virtual tokens before each row; `model_init_kwargs` without anything to load.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        tokenizer: Any = None,
        *,
        model_init_kwargs: dict[str, Any] | None = None,
        max_tokens_per_forward: int = 16384,
    ):
        if isinstance(model, str):
            self.name = model
            model = AutoModelForCausalLM.from_pretrained(model, **{"dtype": "auto", **(model_init_kwargs or {})})
        else:
            self.name = get_config_model_id(model.config)
            if model_init_kwargs:
                raise ValueError(
                    f"model_init_kwargs={model_init_kwargs!r} has no effect on a teacher that is loaded already; pass "
                    f"its name, or drop model_init_kwargs"
                )
        if max_tokens_per_forward < 1:
            raise ValueError(f"max_tokens_per_forward={max_tokens_per_forward!r} must be a number of tokens >= 1")
        self.tokenizer = tokenizer
        self.max_tokens_per_forward = max_tokens_per_forward
        self._layout, _ = choose_layout("auto", model, images=False)
        if self._layout == "padded":
            raise ValueError(
                f"the teacher {self.name!r} has an adapter with virtual tokens, which cannot be scored; merge it or "
                f"take another kind of adapter"
            )
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        add_fused_lm_head(base, temperature=1.0)
        self._cost = CostModel.of(base.config, base.device.type)
        self._embedding_rows = base.config.get_text_config().vocab_size  # DeepSpeed's engine has another `config`
        self.model = model.requires_grad_(False).eval()
        self._accelerator: Accelerator | None = None
        self._vocabulary: int | None = None

    def place(self, accelerator: Accelerator) -> None:
        """Put the model where the student is, sharded as TRL shards its reference."""
        self._accelerator = accelerator
        if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
            self.model = prepare_deepspeed(self.model, accelerator)
        elif getattr(accelerator.state, "fsdp_plugin", None) is not None:
            self.model = prepare_fsdp(self.model, accelerator)
        else:
            self.model = accelerator.prepare_model(self.model, evaluation_mode=True)

    def check(self, tokenizer: Any, embedding_rows: int, topk: int | None = None) -> None:
        """Refuse a student with another vocabulary, and a `topk` beyond the vocabulary; see `Teacher`."""
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.name, "pass it: ModelTeacher(model, tokenizer)")
        own_rows = self._embedding_rows
        sizes = f"; embedding rows {embedding_rows} and {own_rows}"
        require_same_vocabulary(tokenizer, self.tokenizer, self.name, sizes)
        self._vocabulary = min(embedding_rows, own_rows)
        if topk is not None and topk > self._vocabulary:
            raise ValueError(f"distillation_topk={topk} is beyond the {self._vocabulary} tokens of the vocabulary")

    @torch.no_grad()
    def score(self, rows: Rows, topk: int | None = None) -> TeacherScores:
        """Score every completion token; under several ranks, all must call it. See `Teacher`."""
        shape, packed = (len(rows.lengths), rows.width), self._layout == "packed"
        groups = self._groups(rows.lengths)
        found: list[TeacherTopK] = []

        def see(head: Head, _: Tensor) -> None:
            if topk is not None:
                found.append(most_likely(head, topk, self._vocabulary))

        with head_seen_by(see, rows.input_ids.device):
            if self._accelerator is None:
                scores = score(self.model, rows, groups, packed=packed)
            else:
                with self._accelerator.autocast():
                    scores = score(self.model, rows, groups, packed=packed)
        if topk is None:
            return TeacherScores(scores.log_probs, None)
        real = [(top, rows.targets(group)) for top, group in zip(found, groups, strict=True) if group]
        return TeacherScores(scores.log_probs, _spread_top(real, shape, topk, rows.input_ids.device))

    def _groups(self, lengths: list[RowLength]) -> list[list[int]]:
        if self._layout == "packed":
            groups = packed_groups(lengths, self.max_tokens_per_forward)
        else:
            groups = padded_groups(lengths, self._cost, self.max_tokens_per_forward)
        return groups if self._accelerator is None else equally_many(groups, self._accelerator)


def _spread_top(
    parts: list[tuple[TeacherTopK, Tensor]], shape: tuple[int, int], topk: int, device: torch.device
) -> TeacherTopK:
    """Tokens of labelled positions as `(B, C, K)`, without any where nothing was scored."""
    nothing = TeacherTopK(torch.zeros(0, topk, dtype=torch.int32, device=device), torch.zeros(0, topk, device=device))
    parts = parts or [(nothing, torch.zeros(0, dtype=torch.long))]
    targets = [where for _, where in parts]
    return TeacherTopK(
        spread([top.ids for top, _ in parts], targets, shape),
        spread([top.log_probs for top, _ in parts], targets, shape, fill=-math.inf),
    )


class ServedTeacher:
    """A teacher behind a vLLM server with the OpenAI interface: `vllm serve TEACHER --max-logprobs K`.

    Each row is one request that generates nothing of use: `prompt_logprobs` scores the tokens that it sends. Uses the
    standard library only.

    Args:
        url: of the server, such as `http://localhost:8000`.
        model: as the server calls it; `None`: the first that it serves.
        tokenizer: the teacher's; `None`: loaded by the path that the server names.
        api_key: if the server wants one.
        timeout: seconds for one row.
        retries: further attempts when the server does not answer, is busy or fails.
        concurrency: requests at a time from each rank; the server batches them.

    Raises:
        ValueError: `url` is none, or a number is out of range.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        tokenizer: Any = None,
        *,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        concurrency: int = 16,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r} is no address; write it as http://host:port")
        if timeout <= 0 or retries < 0 or concurrency < 1:
            raise ValueError(
                f"timeout={timeout!r} must be > 0 seconds, retries={retries!r} >= 0, concurrency={concurrency!r} >= 1"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.tokenizer = tokenizer
        self.timeout = timeout
        self.retries = retries
        self.retry_wait = 1.0  # seconds before the second attempt, doubled before each further one
        self.concurrency = concurrency
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._vocabulary: int | None = None

    def check(self, tokenizer: Any, embedding_rows: int, topk: int | None = None) -> None:
        """Ask the server what it serves, compare vocabularies, and try `topk` on two tokens; see `Teacher`.

        Raises:
            ValueError: another vocabulary; the server refuses or does not know `topk`.
            ConnectionError: the server does not answer.
        """
        served = self._request("/v1/models").get("data") or [{}]
        known = {entry.get("id"): entry for entry in served}
        if self.model is None:
            self.model = served[0].get("id")
        if self.model not in known:
            raise ValueError(f"the teacher at {self.url} serves {sorted(map(str, known))}, not model={self.model!r}")
        if self.tokenizer is None:
            name = known[self.model].get("root") or self.model
            self.tokenizer = load_tokenizer(name, f"pass it: ServedTeacher({self.url!r}, tokenizer=...)")
        require_same_vocabulary(tokenizer, self.tokenizer, f"{self.model} at {self.url}")
        self._vocabulary = embedding_rows
        self._score_row([0, 0], 1, topk)

    def score(self, rows: Rows, topk: int | None = None) -> TeacherScores:
        """Score every completion token, one request per row; see `Teacher`.

        Raises:
            ValueError: the server refuses a request, or answers in a form that is not vLLM's.
            ConnectionError: it does not answer, after all attempts.
        """
        scored = [i for i, n in enumerate(rows.lengths) if n.total]
        tokens, starts = rows.input_ids.tolist(), rows.starts(range(len(rows.lengths)))
        sent = [tokens[i][starts[i] : starts[i] + rows.lengths[i].total] for i in scored]
        first = [max(rows.lengths[i].prompt, 1) for i in scored]
        with ThreadPoolExecutor(self.concurrency) as pool:
            answers = list(pool.map(self._score_row, sent, first, [topk] * len(scored)))

        device, shape = rows.input_ids.device, (len(rows.lengths), rows.width)
        log_probs = torch.zeros(shape[0] * shape[1], device=device)
        where = rows.targets(scored).to(device) if scored else torch.zeros(0, dtype=torch.long, device=device)
        sampled = [value for answer in answers for value in answer[0]]
        log_probs[where] = torch.tensor(sampled, device=device)
        if topk is None:
            return TeacherScores(log_probs.view(shape), None)
        top = TeacherTopK(
            torch.tensor([ids for answer in answers for ids in answer[1]], dtype=torch.int32, device=device),
            torch.tensor([values for answer in answers for values in answer[2]], device=device),
        )
        return TeacherScores(log_probs.view(shape), _spread_top([(top, where)] if scored else [], shape, topk, device))

    def _score_row(
        self, tokens: list[int], first: int, topk: int | None
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Of each token from `first` on: its log-prob, and the ids and log-probs of the most likely ones."""
        answer = self._request(
            "/v1/completions",
            {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": topk or 0},
        )
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            if len(entries) != len(tokens):
                raise KeyError(f"{len(entries)} entries")
            sampled, ids, log_probs = [], [], []
            for token, entry in zip(tokens[first:], entries[first:], strict=True):
                sampled.append(_log_prob(entry[str(token)]))
                if topk is not None:
                    # vLLM adds the sampled token to its k; it is the least likely of them then
                    named = [(_log_prob(value), int(name)) for name, value in entry.items()]
                    named = sorted((x for x in named if x[1] < (self._vocabulary or math.inf)), reverse=True)[:topk]
                    named += [(-math.inf, 0)] * (topk - len(named))
                    ids.append([token for _, token in named])
                    log_probs.append([value for value, _ in named])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the teacher at {self.url} did not score the {len(tokens)} tokens it was sent ({error!r}); it must be "
                f"a vLLM server that answers prompt_logprobs on /v1/completions: vllm serve {self.model} "
                f"--max-logprobs {topk or 1}"
            ) from error
        return sampled, ids, log_probs

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        failure: Exception | str = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.retry_wait * 2 ** (attempt - 1))
            request = urllib.request.Request(self.url + path, data, self._headers)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                said = error.read(2000).decode(errors="replace")
                if error.code < 500 and error.code not in (408, 429):
                    asked = (body or {}).get("prompt_logprobs", 0)
                    raise ValueError(
                        f"the teacher at {self.url}{path} refused the request: {error.code} {said}. Start it with room "
                        f"for it, as in: vllm serve {self.model or 'TEACHER'} --max-logprobs {max(asked, 1)} "
                        f"--max-model-len (longest prompt + completion + 1)"
                    ) from error
                failure = f"{error.code} {said}"
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                failure = error
        raise ConnectionError(
            f"the teacher at {self.url}{path} gave no answer in {self.retries + 1} attempts of {self.timeout:g} s "
            f"({failure}); start it with: vllm serve {self.model or 'TEACHER'}, and check url"
        )


def _log_prob(entry: dict[str, Any]) -> float:
    """Nats; vLLM writes -9999 for -inf, and NaN stays NaN for the trainer's guard to find."""
    return float(entry["logprob"])
