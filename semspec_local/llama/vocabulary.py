"""Text to token ids and back. Text of users and models never becomes a control token."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ..config import THINK_CLOSE, THINK_OPEN
from ..errors import ModelError
from .native import C

Span = tuple[int, int]

_STARTS = ("\n", ".", "a", "0")
_SPACE = " \t\n\v\f\r"


class LlamaVocabulary:
    """The vocabulary of one model; implements `protocols.Vocabulary`."""

    def __init__(self, model_handle: Any, name: str) -> None:
        self._handle = C.llama_model_get_vocab(model_handle)
        self.n_tokens = int(C.llama_vocab_n_tokens(self._handle))
        self.type = int(C.llama_vocab_type(self._handle))
        if self.type == C.LLAMA_VOCAB_TYPE_NONE or self.n_tokens == 0:
            raise ModelError(f"{name} has no vocabulary; wanted a model with its tokenizer inside")
        self.piece = lru_cache(maxsize=65536)(self._piece)

    # -- ids to text --------------------------------------------------------------------------------

    def _piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; empty for control tokens."""
        # Some models spell their thinking tags as control tokens; they are part of the text all the same.
        shown = self.text(token) in (THINK_OPEN, THINK_CLOSE)
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = C.llama_token_to_piece(self._handle, token, buffer, size, 0, shown)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; a torn character at either end becomes U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", errors="replace")

    def text(self, token: int) -> str:
        """A token as the vocabulary spells it, control tokens included."""
        text: bytes | None = C.llama_vocab_get_text(self._handle, token)
        return (text or b"").decode("utf-8", errors="replace")

    def is_eog(self, token: int) -> bool:
        """Is this one of the tokens that end generation? A model may have several."""
        return bool(C.llama_vocab_is_eog(self._handle, token))

    @cached_property
    def eog_tokens(self) -> frozenset[int]:
        return frozenset(token for token in range(self.n_tokens) if self.is_eog(token))

    # -- text to ids --------------------------------------------------------------------------------

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Ids of text that continues earlier text; what looks like a control token stays text, unless `control`."""
        if self.type != C.LLAMA_VOCAB_TYPE_SPM:
            return self._tokenize(text, control)
        # SentencePiece puts a space before a text: give it something to continue that does not grow together with it,
        # and cut that off again.
        for start in _STARTS:
            ids = self._tokenize(start)
            whole = self._tokenize(start + text, control)
            if whole[: len(ids)] == ids:
                return whole[len(ids) :]
        return self._tokenize(text, control)

    def encode_prompt(self, text: str, content: Sequence[Span] = ()) -> list[int]:
        """Ids of a rendered prompt, with the vocabulary's own first token where it wants one.

        `content` are the [start, end) character spans that came from people or models: control tokens are looked for
        everywhere else. All other text is encoded across the edges of the spans, as llama.cpp would.
        """
        ids: list[int] = []
        for part, is_control in self._split_at_controls(text, content):
            ids += self._tokenize(part, parse_special=is_control)
        bos = int(C.llama_vocab_bos(self._handle))
        if C.llama_vocab_get_add_bos(self._handle) and bos >= 0 and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _tokenize(self, text: str, parse_special: bool = False) -> list[int]:
        data = text.encode("utf-8", errors="surrogatepass")
        size = len(data) + 8
        while True:
            buffer = (C.llama_token * size)()
            n = C.llama_tokenize(self._handle, data, len(data), buffer, size, False, parse_special)
            if n >= 0:
                return list(buffer[:n])
            size = -n

    @cached_property
    def _controls(self) -> dict[str, int]:
        """The spelling and the attributes of each control token."""
        wanted = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN
        attributes = ((token, C.llama_vocab_get_attr(self._handle, token)) for token in range(self.n_tokens))
        return {name: flags for token, flags in attributes if flags & wanted and (name := self.text(token))}

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        names = sorted(self._controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) if names else r"(?!)")

    def _split_at_controls(self, text: str, content: Sequence[Span]) -> Iterable[tuple[str, bool]]:
        edges = [0, *(edge for span in sorted(content) for edge in span), len(text)]
        position = 0
        for start, end in zip(edges[::2], edges[1::2]):  # the gaps between the contents
            for match in self._control_pattern.finditer(text, start, end):
                before, attributes = text[position : match.start()], self._controls[match.group()]
                position = match.end()
                # Some tokens (Phi-3's) swallow the space around them.
                if attributes & C.LLAMA_TOKEN_ATTR_LSTRIP:
                    before = before.rstrip(_SPACE)
                if attributes & C.LLAMA_TOKEN_ATTR_RSTRIP:
                    position += len(text[position:]) - len(text[position:].lstrip(_SPACE))
                if before:
                    yield before, False
                yield match.group(), True
        if position < len(text):
            yield text[position:], False

    # -- identity -----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Equal for vocabularies that give every token the same id and end at the same ones.

        Padding at the end does not count.
        """
        digest = hashlib.sha256(f"{self.type} {sorted(self.eog_tokens)}".encode())
        for token in range(self.n_used):
            text: bytes = C.llama_vocab_get_text(self._handle, token) or b""
            digest.update(text + b"\0")
        return digest.hexdigest()

    @cached_property
    def n_used(self) -> int:
        """Ids from here on are padding at the end of the vocabulary; they are never generated."""
        last = self.n_tokens
        while last and self._is_padding(last - 1):
            last -= 1
        return last

    def _is_padding(self, token: int) -> bool:
        attributes = C.llama_vocab_get_attr(self._handle, token)
        return bool(attributes & C.LLAMA_TOKEN_ATTR_UNUSED) or self.text(token).startswith(("[PAD", "<pad", "<|pad"))
