"""What a trained pair can do and costs, measured in llama.cpp: the numbers of its model card."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..answer import final_answer
from ..config import SamplingConfig
from ..llama.chat import ChatTemplate
from ..llama.context import LlamaContext
from ..llama.lanes import Job, LlamaLanes
from ..llama.model import LlamaModel
from ..steps import StepReader
from .world import Problem

MAX_SOLUTION_TOKENS = 400
PREFILL_LENGTHS = (5, 9, 17, 24, 40)
_NO_BOUNDARY = "\0"  # a whole solution is written as one step
_N_CONTEXT = 150  # tokens in the cache while speeds are taken, as in the middle of a solution
_N_DECODED = 64


def solve_rate(
    path: Path, problems: Sequence[Problem], *, temperature: float, n_threads: int, seed: int = 0, n_lanes: int = 32
) -> float:
    """Share of problems that a model answers rightly by itself, in one solution each; top-k and top-p as in a run."""
    sampling = SamplingConfig(temperature=temperature)
    with LlamaLanes(
        path, n_lanes=n_lanes, n_trunks=n_lanes, n_ctx=1024, n_threads=n_threads, sampling=sampling
    ) as lanes:
        chat = ChatTemplate(lanes.model)

        def jobs() -> Iterator[Job]:
            for number, problem in enumerate(problems):
                trunk = lanes.plant(chat.render([{"role": "user", "content": problem.question}]).tokens)
                reader = StepReader(max_tokens=MAX_SOLUTION_TOKENS, boundary=_NO_BOUNDARY)
                yield Job(problem, trunk, reader, (seed * 1_000_003 + number) % 2**31)

        n_right = 0
        for job, step in lanes.write(jobs()):
            lanes.release(job.trunk)
            n_right += step.end == "eos" and final_answer(job.reader.text) == str(job.key.answer)
    return n_right / len(problems)


def speeds(path: Path, *, n_threads: int, n_trials: int = 9) -> dict[str, Any]:
    """Milliseconds per token, the median of some trials: writing one at a time, and reading several in one pass."""
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=512, n_threads=n_threads) as context:

        def timed(lengths: Sequence[int]) -> float:
            context.clear()
            context.decode(list(range(_N_CONTEXT)), range(_N_CONTEXT))
            position, start = _N_CONTEXT, time.perf_counter()
            for n in lengths:
                if n == 1:
                    context.decode_one(position, position)
                else:
                    context.decode(list(range(n)), range(position, position + n))
                position += n
            return (time.perf_counter() - start) / sum(lengths) * 1000

        def median(lengths: Sequence[int]) -> float:
            timed(lengths)
            return sorted(timed(lengths) for _ in range(n_trials))[n_trials // 2]

        return {
            "decode_ms": median([1] * _N_DECODED),
            "prefill_ms": {str(n): median([n] * 4) for n in PREFILL_LENGTHS},
            "n_threads": n_threads,
        }
