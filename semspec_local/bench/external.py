"""The arms outside our own runtime: llama.cpp's server, alone and with its own speculation by tokens.

They read the very tokens that our runtime reads, draw with the same samplers and the same seed, and stop at the same
places; so at equal logits `llama-server` writes what `target` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..config import MAX_SEED, ModelConfig, RunConfig, SamplingConfig, check_seed
from ..errors import ConfigError, SemspecError
from ..llama.chat import ChatTemplate, Prompt
from ..llama.model import LlamaModel
from ..llama.vocabulary import LlamaVocabulary
from ..prefix import Prefix
from ..reasoner import Sources
from ..trace import StopReason
from .arms import ArmRun, cannot_close_thinking
from .llama_server import LlamaServer, Reply, ServerOptions

_MIN_TO_DRAFT = 4
"""An answer of fewer tokens may end before the server could draft."""

_OFF: dict[str, float] = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dynatemp_range": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
}
"""Samplers of the server that our runtime has not, each at the value that switches it off."""


def completion_request(
    tokens: Sequence[int], *, sampling: SamplingConfig, seed: int, max_tokens: int, stop: Sequence[str] = ()
) -> dict[str, Any]:
    """A request to /completion that draws as `LlamaSampler` does.

    Tokens and no text: so the server adds no first token of its own, and applies no template.
    """
    return {
        "prompt": list(tokens),
        "n_predict": max_tokens,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "samplers": ["top_k", "top_p", "temperature"],
        **_OFF,
        "stop": list(stop),
        "ignore_eos": False,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }


def target_seed(seed: int) -> int:
    """The seed that the target's sampler gets in a run of ours with this seed."""
    return int(np.random.SeedSequence(check_seed(seed)).generate_state(3)[0]) % (MAX_SEED + 1)


class ServerArm:
    """llama-server with the target, and with the draft where it `drafts`. Use it in a `with`.

    Of the target it also reads the vocabulary and the template itself, not the weights. Times: `wall_s` is from the
    request to the whole answer, `prefill_s` is what the server says. Its counters of drafted tokens are the server's:
    the last draft of an answer may go beyond its end.
    """

    calls_back = None  # it computes in a process of its own

    def __init__(
        self,
        name: str,
        binary: Path,
        sources: Sources,
        config: RunConfig | None = None,
        models: ModelConfig | None = None,
        *,
        n_max: int = 0,
        n_slots: int = 1,
    ) -> None:
        """`n_max` tokens are drafted at a time, none for 0; `n_slots` questions may be answered at once."""
        self.name, self.n_slots, self._drafts = name, n_slots, n_max > 0
        self._system, self._config = sources.system, config or RunConfig()
        models = models or ModelConfig()
        if self._config.think_budget is not None:
            raise ConfigError(cannot_close_thinking(name))
        if n_slots < 1:
            raise ConfigError(f"the arm {name} has {n_slots} slots; wanted 1 or more")
        if self._drafts and sources.draft is None:
            raise ConfigError(f"the arm {name} needs a draft, and there is none; give one with -md")
        with ExitStack() as stack:
            model = stack.enter_context(LlamaModel(sources.target, weights=False))
            self._vocabulary: LlamaVocabulary = model.vocabulary
            self._chat = ChatTemplate(model)
            self._n_ctx = min(models.n_ctx, model.n_ctx_train)
            options = ServerOptions(
                model=sources.target,
                draft=sources.draft if self._drafts else None,
                n_max=n_max,
                n_ctx=self._n_ctx,
                n_threads=models.threads["target"],
                n_threads_draft=models.threads["draft"],
                n_gpu_layers=models.n_gpu_layers,
                n_gpu_layers_draft=models.n_gpu_layers_draft,
                n_slots=n_slots,
            )
            self.server = stack.enter_context(LlamaServer(binary, options))
            self._stack = stack.pop_all()

    def run(self, question: str, seed: int) -> ArmRun:
        return self.answer(self.prompt(question), seed)

    def prompt(self, question: str) -> Prompt:
        """The question as a run of our own reads it; ConfigError when it leaves no room to write."""
        messages = [{"role": "user", "content": question}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        prompt = self._chat.render(messages)
        if len(prompt.tokens) >= self._n_ctx:
            raise ConfigError(
                f"the question is too long: {len(prompt.tokens):,} tokens with its template, and the context holds "
                f"{self._n_ctx:,} (with room for an answer); use a larger -c or a shorter question"
            )
        return prompt

    def answer(self, prompt: Prompt, seed: int) -> ArmRun:
        """One prompt, answered; several threads may ask at once."""
        limit = min(self._config.max_tokens, self._n_ctx - len(prompt.tokens))
        request = completion_request(
            prompt.tokens,
            sampling=self._config.sampling,
            seed=target_seed(seed),
            max_tokens=limit,
            stop=self._config.stop,
        )
        reply = self.server.complete(request)
        self._check(reply, len(prompt.tokens))
        tokens, data = kept(reply, self._vocabulary)
        return ArmRun(
            text=data.decode("utf-8", errors="replace"),
            final=Prefix(opened=prompt.thinking, data=data).split()[1],
            stop_reason=self._stop_reason(reply, limit),
            wall_s=reply.wall_s,
            prefill_s=reply.prompt_s,
            ttft_s=reply.prompt_s,  # the first token is drawn from the prompt's own logits
            n_tokens=len(tokens),
            n_proposed=(reply.n_drafted or 0) if self._drafts else None,
            n_accepted=(reply.n_accepted or 0) if self._drafts else None,
        )

    def _check(self, reply: Reply, n_prompt: int) -> None:
        """Did it read what it should, and speculate where it should?"""
        if reply.n_prompt != n_prompt or reply.n_cached:
            raise SemspecError(
                f"llama-server read a prompt of {reply.n_prompt:,} tokens, {reply.n_cached:,} of them from its cache; "
                f"wanted {n_prompt:,}, all of them anew"
            )
        # Where the two models do not go together it says so in its log, and goes on alone.
        if self._drafts and not reply.n_drafted and len(reply.tokens) >= _MIN_TO_DRAFT:
            raise SemspecError(
                f"the arm {self.name} has drafted nothing: llama-server took the draft and does not use it; "
                "wanted two models with one vocabulary"
            )

    def _stop_reason(self, reply: Reply, limit: int) -> StopReason:
        if reply.stop_type in ("eos", "word"):
            return "eos" if reply.stop_type == "eos" else "stop"
        return "context_full" if reply.truncated or limit < self._config.max_tokens else "budget"

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> ServerArm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kept(reply: Reply, vocabulary: LlamaVocabulary) -> tuple[list[int], bytes]:
    """The tokens and the text that stay: without the token that ended generation, and up to a stop string."""
    tokens = reply.tokens
    if tokens and vocabulary.is_eog(tokens[-1]):
        tokens = tokens[:-1]
    pieces = [vocabulary.piece(token) for token in tokens]
    data = b"".join(pieces)
    end = data.find(reply.stopping_word.encode()) if reply.stop_type == "word" else -1
    if end < 0:
        return tokens, data
    position = 0
    for i, piece in enumerate(pieces):
        if position >= end:
            return tokens[:i], data[:end]
        position += len(piece)
    return tokens, data[:end]


@dataclass(frozen=True)
class Throughput:
    """Many questions, some of them in flight at once. `outcomes` in the order of the questions; a failure is one."""

    outcomes: tuple[ArmRun | SemspecError, ...]
    n_in_flight: int
    wall_s: float

    @property
    def runs(self) -> list[ArmRun]:
        """Those that were answered."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, ArmRun)]

    @property
    def n_tokens(self) -> int:
        """Tokens that were written, in all answers."""
        return sum(run.n_tokens for run in self.runs)


def ask_many(
    arm: ServerArm,
    questions: Sequence[tuple[str, int]],
    *,
    n_in_flight: int | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Throughput:
    """Answer questions, each with its seed, `n_in_flight` at once (default: as many as the arm has slots).

    The clock runs from the first request to the last answer; prompts are made before. An interruption stops the server.
    """
    n = arm.n_slots if n_in_flight is None else n_in_flight
    if n < 1:
        raise ConfigError(f"{n} questions in flight; wanted 1 or more")
    prompts = [(arm.prompt(question), seed) for question, seed in questions]

    def ask(job: tuple[Prompt, int]) -> ArmRun | SemspecError:
        try:
            return arm.answer(*job)
        except SemspecError as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        start = clock()
        futures = [pool.submit(ask, job) for job in prompts]
        try:
            outcomes = tuple(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            arm.server.close()  # else the pool would wait for answers that nobody wants
            raise
        return Throughput(outcomes, n, clock() - start)
