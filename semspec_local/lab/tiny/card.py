"""What a trained pair can do and costs, measured in llama.cpp: the numbers of its model card."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...answer import final_answer
from ...config import SamplingConfig
from ...llama.chat import ChatTemplate
from ...llama.context import LlamaContext
from ...llama.lanes import Job, LlamaLanes
from ...llama.model import LlamaModel
from ...llama.quantize import requantize
from ...steps import StepReader
from ..world import Problem
from .gguf import Shape, random_weights, write_gguf

MAX_SOLUTION_TOKENS = 400
PREFILL_LENGTHS = (5, 9, 17, 24, 40)
_NO_BOUNDARY = "\0"  # a whole solution is written as one step
_N_CONTEXT = 150  # tokens in the cache while speeds are taken, as in the middle of a solution
_N_DECODED = 64
_CANDIDATE = 24  # tokens of a drafted step, about; one of PREFILL_LENGTHS


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


def speeds(path: Path, *, n_threads: int) -> dict[str, dict[str, Any]]:
    """Milliseconds per token, the median of some trials: writing one at a time, and reading several in one pass.

    By the number of threads, as text: one, and `n_threads`.
    """
    return {str(n): _speeds(path, n) for n in sorted({1, n_threads})}


def _speeds(path: Path, n_threads: int, n_trials: int = 9) -> dict[str, Any]:
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
        }


def shape_table(shapes: Sequence[Shape], draft: Shape, tokenizer: Any, *, n_threads: int) -> Iterator[str]:
    """What models of these shapes cost, with random weights: milliseconds per token, as a table in markdown.

    `ceiling` is the speedup that the shape as a target could have with `draft` if every drafted step were accepted: a
    token written alone, over one drafted and then read among `_CANDIDATE` others.
    """
    lengths = [str(n) for n in PREFILL_LENGTHS]
    yield f"| layers x width (ff) | file | decode | {' | '.join(f'read {n}' for n in lengths)} | threads | ceiling |"
    yield "| --- " * (5 + len(lengths)) + "|"
    with tempfile.TemporaryDirectory() as folder:
        _, _, drafting = _random_speeds(draft, tokenizer, Path(folder), n_threads)
        for shape in shapes:
            n_bytes, threads, found = _random_speeds(shape, tokenizer, Path(folder), n_threads)
            ceiling = found["decode_ms"] / (drafting["decode_ms"] + found["prefill_ms"][str(_CANDIDATE)])
            reads = " | ".join(f"{found['prefill_ms'][n]:.3f}" for n in lengths)
            size = f"{shape.file_type}, {n_bytes / 1e6:.1f} MB"
            yield (
                f"| {shape.n_layer} x {shape.n_embd} ({shape.n_ff}) | {size} | {found['decode_ms']:.3f} | {reads} "
                f"| {threads} | {ceiling:.1f} |"
            )


def _random_speeds(shape: Shape, tokenizer: Any, folder: Path, n_threads: int) -> tuple[int, str, dict[str, Any]]:
    """The size of such a file in bytes, and its speeds with the number of threads that writes fastest."""
    plain, path = folder / "plain.gguf", folder / "shape.gguf"
    weights = random_weights(shape, tokenizer.get_vocab_size())
    write_gguf(plain, weights, shape, tokenizer, name="random", description="random weights")
    requantize(plain, path, shape.file_type, n_threads)
    by_threads = speeds(path, n_threads=n_threads)
    best = min(by_threads, key=lambda n: float(by_threads[n]["decode_ms"]))
    return path.stat().st_size, best, by_threads[best]
