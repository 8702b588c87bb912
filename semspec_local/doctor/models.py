"""The pair: is it here, whole, of a kind that can be driven, and does it fit together and into the memory?"""

from __future__ import annotations

from pathlib import Path

from ..errors import PairNotPulledError, SemspecError
from ..pairs import default_pair, is_embedded, list_pairs, load_manifest
from ..pairs.store import EMBEDDED_PAIR, pull_command
from ..roles import Role
from .check import Verdict, fail, ok, warn
from .child import Answer
from .examination import Examination

_NOT_LOOKED_AT = "not looked at, since llama_cpp cannot be imported"
_NEARLY = 0.9
"""Above this share of the free memory other programs may push the models out."""


def pair(examination: Examination) -> Verdict | None:
    """The pair's files are on this machine."""
    if examination.target is not None:
        return None
    found = examination.found
    if isinstance(found, PairNotPulledError):
        name = examination.pair or default_pair()
        shipped = is_embedded(load_manifest(name))
        return fail(str(found), "install semspec-local anew" if shipped else pull_command(name))
    if isinstance(found, SemspecError):
        return fail(str(found), "semspec-local models list shows the pairs that are known")
    try:
        list_pairs()
    except SemspecError as error:
        return warn(f"{found.pair}; but a manifest cannot be read: {error}", "correct that manifest, or delete it")
    if examination.pair is None and found.pair == EMBEDDED_PAIR != (default := default_pair()):
        about = load_manifest(EMBEDDED_PAIR).description
        return warn(f"{default} is not here, so {EMBEDDED_PAIR} answers: {about}", pull_command(default))
    return ok(f"{found.pair}; sizes are right, and semspec-local models verify {found.pair} looks at every byte")


def target(examination: Examination) -> Verdict | None:
    """The target's file is whole, and llama.cpp knows what it is."""
    return _model(examination, "target")


def draft(examination: Examination) -> Verdict | None:
    """The same of the draft's."""
    return _model(examination, "draft")


def _model(examination: Examination, role: Role) -> Verdict | None:
    path, answer = examination.path(role), examination.answer(role)
    if path is None:
        return None
    if answer is None:
        return warn(_NOT_LOOKED_AT, "first mend llama-cpp")
    if not answer.ok:
        return _bad_file(answer, path, examination.pair)
    facts = answer.value
    info, tokens = facts["info"], facts["tokens"]
    ids = " ".join(f"{kind} {number}" for kind, number in tokens.items() if number is not None)
    said = (
        f"{info['name']}, {info['architecture']} {info['quantization']}, {info['n_layer']} layers of {info['n_embd']}; "
        f"trained for {facts['n_ctx_train']:,} tokens; {ids or 'no bos, no eos'}; ends: {_listed(facts['eog'])}"
    )
    if not facts["eog"]:
        return warn(f"{said}; it has no token that ends a text", "limit its answers with -n, or use another GGUF of it")
    if facts["chat"] is not None:
        return warn(
            f"{said}; {facts['chat']}, so it may not read questions as it was taught to",
            "use an instruction-tuned GGUF that has its chat template inside",
        )
    if facts["states"] is not None:
        return warn(f"{said}; {facts['states']}", "use a policy without probes, such as --policy loglik-ratio")
    return ok(said)


def _bad_file(answer: Answer, path: Path, pair_name: str | None) -> Verdict:
    if answer.kind == "ModelError":
        if "architecture" in (answer.error or ""):
            return fail(f"{answer.error}", "use a model that this version of llama.cpp knows, or an older GGUF of it")
        again = f"get it again: {pull_command(pair_name)}" if pair_name else "check the path, or get the file again"
        return fail(f"{answer.error}", again)
    return fail(f"reading {path}: {answer.error}", "get another GGUF of this model; llama.cpp cannot read this one")


def vocabularies(examination: Examination) -> Verdict | None:
    """How steps get from one model to the other, and how each rolls back."""
    answer = examination.answer("vocabularies")
    if answer is None:
        return None
    if not answer.ok:
        return fail(f"comparing the vocabularies: {answer.error}", "use another draft")
    kinds = {role: facts["memory"] for role in ("target", "draft") if (facts := examination.facts(role)) is not None}
    rollback = "; ".join(f"{role} memory: {kind}, {_rolls_back(kind)}" for role, kind in kinds.items())
    if answer.value is None:
        return ok(f"one vocabulary, so steps are carried as tokens; {rollback}")
    return warn(
        f"two vocabularies, so steps are carried as text: {answer.value}; {rollback}",
        "a draft of the target's own family has its vocabulary, and is judged more exactly",
    )


def _rolls_back(kind: str) -> str:
    """How `LlamaStepModel` goes back in a memory of that kind."""
    return "rolls back by checkpoints" if kind in ("recurrent", "hybrid") else "rolls back by cutting"


def memory(examination: Examination) -> Verdict | None:
    """Both models and their caches fit into the memory that is free."""
    if examination.sources is None:
        return None
    answer, n_ctx = examination.answer("memory"), examination.models.n_ctx
    if answer is None:
        return warn("not estimated, since a file above cannot be read", "first mend what is above")
    if not answer.ok:
        return fail(f"estimating the memory: {answer.error}", "see the models above")
    needed, free, fits = (answer.value[name] for name in ("needed", "free", "fits"))
    total = sum(needed.values())
    parts = " + ".join(f"{role} {_gib(size)}" for role, size in needed.items())
    said = f"about {_gib(total)} GiB needed at -c {n_ctx} ({parts})"
    if free is None:
        return warn(f"{said}; this system does not tell what is free", "compare that with the machine's memory")
    said += f", {_gib(free)} GiB free within the limits of machine and container"
    smaller = f"use -c {fits}, which fits" if fits else "use smaller models or a smaller quantization"
    if total > free:
        return fail(said, f"{smaller}; or end other programs, or raise the container's limit")
    if total > _NEARLY * free:
        return warn(f"{said}: that is tight", f"end other programs, or {smaller}")
    return ok(said)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f}"


def _listed(tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) if len(tokens) <= 6 else f"{len(tokens)} tokens"
