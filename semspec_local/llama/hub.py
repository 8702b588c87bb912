"""Many runs in one process, one after the other by turns, so that what they want of a context is evaluated together.

Every run is a greenlet: a function with a stack of its own that waits in the middle of a call. One that wants tokens
evaluated waits here; when all of them wait, one decode serves as many as it can. Knows nothing of steps or of text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from ..errors import DecodeError
from .context import Decoded, LlamaContext

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Request:
    """What one run wants evaluated: tokens of its sequence at the positions from `n_past` on."""

    waiting: Any
    context: LlamaContext
    sequence: int
    tokens: Sequence[int]
    n_past: int
    outputs: Sequence[bool] | None
    states: bool

    def decode(self) -> Decoded:
        """Evaluate this request alone."""
        n = len(self.tokens)
        positions = range(self.n_past, self.n_past + n)
        self.context.read_states(self.states)
        return self.context.decode(self.tokens, positions, [self.sequence] * n, self.outputs)


class Hub:
    """Runs functions by turns, and evaluates for them."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._own: Any = None

    def evaluate(
        self,
        context: LlamaContext,
        sequence: int,
        tokens: Sequence[int],
        n_past: int,
        outputs: Sequence[bool] | None = None,
        states: bool = True,
    ) -> Decoded:
        """Called by a run: wait until the tokens are evaluated. What comes back is valid until the run waits again.

        Raises what `LlamaContext.decode` raises. Outside of `run` it evaluates at once.
        """
        request = Request(getcurrent(), context, sequence, tokens, n_past, outputs, states)
        if self._own is None or request.waiting is self._own:
            return request.decode()
        self._requests.append(request)
        answer: Decoded = self._own.switch()
        return answer

    def run(self, work: Callable[[int, Any], T], items: Iterator[Any], n_lanes: int) -> Iterator[T]:
        """Yield `work(lane, item)` of every item as it finishes, `n_lanes` at a time; a free lane takes the next one.

        What `work` raises is raised here, behind what has finished, and ends the other runs where they are.
        """
        self._own, self._requests = getcurrent(), []
        finished: dict[int, T] = {}
        runs: dict[int, Any] = {}

        def one(lane: int, item: Any) -> None:
            finished[lane] = work(lane, item)

        def start(lane: int) -> None:
            for item in items:
                runs[lane] = greenlet(one)
                runs[lane].switch(lane, item)
                return

        try:
            for lane in range(n_lanes):
                start(lane)
            while self._requests or finished:
                for lane in sorted(finished):
                    del runs[lane]
                    yield finished.pop(lane)
                    start(lane)
                if self._requests:
                    self._serve()
        except Exception:
            yield from finished.values()
            raise
        finally:
            self._own = None  # from here on, what a run still wants is evaluated at once
            for run in runs.values():
                if not run.dead:
                    run.throw()  # GreenletExit: its `finally` blocks run

    def _serve(self) -> None:
        """Evaluate what is wanted most, and let those who wanted it go on until they want more."""
        chosen = self._choose()
        self._requests = [request for request in self._requests if request not in chosen]
        if len(chosen) > 1:
            try:
                self._serve_together(chosen)
                return
            except DecodeError:  # one of them is at fault: see which
                for request in chosen:
                    request.context.trim(request.n_past, request.sequence)
        for request in chosen:
            try:
                answer = request.decode()
            except DecodeError as error:
                request.waiting.throw(error)
            else:
                request.waiting.switch(answer)

    def _choose(self) -> list[Request]:
        """A request of several tokens alone, for it fills the cores by itself; else the most singles of one context."""
        for request in self._requests:
            if len(request.tokens) > 1:
                return [request]
        by_context: dict[int, list[Request]] = {}
        for request in self._requests:
            by_context.setdefault(id(request.context), []).append(request)
        most = max(by_context.values(), key=len)
        # llama.cpp evaluates sequences in the order of their numbers, and so do the states come.
        return sorted(most, key=lambda request: request.sequence)[: most[0].context.n_batch]

    def _serve_together(self, chosen: list[Request]) -> None:
        n, context = len(chosen), chosen[0].context
        context.read_states(any(request.states for request in chosen))
        decoded = context.decode(
            [request.tokens[0] for request in chosen],
            [request.n_past for request in chosen],
            [request.sequence for request in chosen],
            [True] * n,
        )
        for i, request in enumerate(chosen):
            states = {tap: rows[i : i + 1] for tap, rows in decoded.states.items() if request.states}
            request.waiting.switch(Decoded(decoded.logits[i : i + 1], states))
