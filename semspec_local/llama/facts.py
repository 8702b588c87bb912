"""What can be said of a model, and of two vocabularies, before any weights are read; for `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelError
from ..protocols import TapPoint
from .chat import ChatTemplate
from .model import LlamaModel
from .native import C
from .taps import node_name
from .vocabulary import LlamaVocabulary

_VOCABULARY_TYPES = {1: "SentencePiece", 2: "BPE", 3: "WordPiece", 4: "Unigram", 5: "RWKV", 6: "PLaMo-2"}


def model_facts(path: Path) -> dict[str, Any]:
    """The facts of one GGUF as JSON knows them. Raises ModelError for a file that cannot be used.

    `chat` is None for a working chat template, else what is wrong with it; `states` likewise for hidden states.
    `memory` is plain, sliding window, recurrent or hybrid.
    """
    with LlamaModel(path, weights=False) as model:
        vocabulary = model.vocabulary
        return {
            "info": model.info().to_dict(),
            "n_ctx_train": model.n_ctx_train,
            "memory": _memory_kind(model),
            "chat": _chat_trouble(model),
            "states": _states_trouble(model),
            "vocabulary": _VOCABULARY_TYPES.get(vocabulary.type, f"type {vocabulary.type}"),
            "eog": sorted(vocabulary.eog_tokens),
            "tokens": {kind: model.meta(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot")},
        }


def vocabulary_difference(target: Path, draft: Path) -> str | None:
    """None where both models have one vocabulary, else the first thing in which theirs differ."""
    with LlamaModel(target, weights=False) as first, LlamaModel(draft, weights=False) as second:
        return _difference(first.vocabulary, second.vocabulary)


def _difference(target: LlamaVocabulary, draft: LlamaVocabulary) -> str | None:
    if target.fingerprint == draft.fingerprint:
        return None
    both = (target, draft)
    if target.type != draft.type:
        names = [_VOCABULARY_TYPES.get(one.type, f"type {one.type}") for one in both]
        return f"the target's is {names[0]}, the draft's {names[1]}"
    for token in range(min(one.n_used for one in both)):
        if target.text(token) != draft.text(token):
            return f"token {token} is {target.text(token)!a} in the target, {draft.text(token)!a} in the draft"
    if target.n_used != draft.n_used:
        return f"the target's has {target.n_used:,} tokens, the draft's {draft.n_used:,}"
    ends = sorted(target.eog_tokens ^ draft.eog_tokens)
    return f"token {ends[0]} ends a text in one of the models only" if ends else "their tokens differ in raw bytes"


def _memory_kind(model: LlamaModel) -> str:
    if C.llama_model_is_hybrid(model.handle):
        return "hybrid"
    if C.llama_model_is_recurrent(model.handle):
        return "recurrent"
    return "sliding window" if C.llama_model_n_swa(model.handle) else "plain"


def _chat_trouble(model: LlamaModel) -> str | None:
    if model.chat_template is None:
        return "it has no chat template"
    try:
        ChatTemplate(model).render([{"role": "user", "content": "hello"}])
    except ConfigError as error:
        return str(error)
    return None


def _states_trouble(model: LlamaModel) -> str | None:
    try:
        node_name(TapPoint(0, "pre"), architecture=model.architecture, n_layer=model.n_layer)
    except ModelError as error:
        return str(error)
    return None
