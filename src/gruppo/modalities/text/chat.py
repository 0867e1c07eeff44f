"""Prompts to token ids, and sampled ids to what rewards read. Sampled text is never tokenised again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gruppo.types import DataError


class Chat(Protocol):
    """A tokenizer with its way of writing conversations."""

    eos_ids: tuple[int, ...]

    @property
    def can_chat(self) -> bool:
        """Whether conversations can be encoded."""
        ...

    @property
    def vocabulary(self) -> Mapping[str, int] | None:
        """Every token's id; None where the tokenizer does not tell."""
        ...

    @property
    def closing(self) -> list[int]:
        """The end token that a completion is closed with where nothing else says which; none where there is none."""
        ...

    def encode(self, inputs: Any) -> list[int]:
        """Ids of a string, or of messages up to where the assistant is to speak."""
        ...

    def encode_answered(self, inputs: Any, text: str) -> list[int]:
        """Ids of the prompt and of what it is answered with, written as one; none where that cannot be written."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text in the middle of others: no token stands for its beginning or end."""
        ...

    def encode_reply(self, inputs: Any, said: Any, reply: Any, *, is_closed: bool) -> list[int]:
        """Ids from where the assistant ended to where it is to speak again, with a reply between: a text or messages.

        ``inputs`` is the prompt, ``said`` what followed it, the assistant's words last. ``is_closed``: its last token
        was an end token, which is then not written again.
        """
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens and end tokens left out."""
        ...

    def text_with_specials(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens shown."""
        ...

    def save(self, folder: Path) -> None: ...


def output_of(text: str, inputs: Any) -> Any:
    """A completion in the form of its prompt: a string for a string, messages for messages."""
    return text if isinstance(inputs, str) else [{"role": "assistant", "content": text}]


_HELLO = {"role": "user", "content": "Hello."}
_SPOKEN = "gruppo5spoke5here"
"""Stands for the assistant's words where a template writes what follows them."""


class TransformersChat:
    """A Hugging Face tokenizer and its chat template. An empty system message that the template refuses is left out."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self._writes_empty_system = not self.can_chat or self._can_write([{"role": "system", "content": ""}, _HELLO])

    @property
    def can_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def vocabulary(self) -> Mapping[str, int] | None:
        return self.tokenizer.get_vocab()

    def encode(self, inputs: Any) -> list[int]:
        if isinstance(inputs, str):
            return _not_empty(list(self.tokenizer(inputs)["input_ids"]), inputs)
        if not self.can_chat:
            raise DataError(
                "the prompt is a conversation, but this tokenizer has no chat template. Use a chat model, give prompts "
                "as plain strings, or set tokenizer.chat_template."
            )
        return _not_empty(self._written(self._taken(list(inputs))), inputs)

    def encode_answered(self, inputs: Any, text: str) -> list[int]:
        if isinstance(inputs, str):
            return list(self.tokenizer(inputs + text)["input_ids"])
        messages = self._taken(list(inputs))
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        try:
            return self._written([*messages, {"role": "assistant", "content": begun + text}], is_whole=True)
        except DataError:
            return []

    def encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_reply(self, inputs: Any, said: Any, reply: Any, *, is_closed: bool) -> list[int]:
        if isinstance(reply, str):
            return self._encode_between(reply)
        before = self._taken(list(inputs))
        before = before[:-1] if before[-1]["role"] == "assistant" else before  # an answer that was begun is in said
        spoken = {"role": "assistant", "content": _SPOKEN}
        written = self._rendered([*before, *said[:-1], spoken, *reply], tokenize=False, add_generation_prompt=True)
        _, found, tail = written.rpartition(_SPOKEN)
        if not found:
            raise DataError(
                "the model's chat template leaves the assistant's words out of a conversation, so none can go on. Use "
                "a model whose template writes them."
            )
        return self._encode_tail(tail, is_closed=is_closed)

    def _encode_tail(self, tail: str, *, is_closed: bool) -> list[int]:
        """What a template writes behind an answer, less the end token that the answer has already.

        It is encoded behind that token: some tokenizers put a space before what begins a text.
        """
        ends = self.tokenizer.convert_ids_to_tokens(list(self.eos_ids))
        end = next((end for end in ends if tail.lstrip().startswith(end)), None)
        if not is_closed or not ends:
            return self._encode_between(tail)
        tail = tail if end is None else tail.lstrip()[len(end) :]
        ids = self.encode_text((end or ends[0]) + tail)
        return ids[1:] if ids and ids[0] in self.eos_ids else self.encode_text(tail)

    def _encode_between(self, text: str) -> list[int]:
        """Ids of a text that follows others, without the space that some tokenizers put before a text alone."""
        for anchor in ("\n", "#", "a"):
            before, whole = self.encode_text(anchor), self.encode_text(anchor + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self.encode_text(text)

    @property
    def closing(self) -> list[int]:
        own = self.tokenizer.eos_token_id
        return [own] if own in self.eos_ids else list(self.eos_ids[:1])

    def _taken(self, messages: list[Any]) -> list[Any]:
        """The messages, without an empty system message that the template refuses."""
        if not self._writes_empty_system and (messages[0]["role"], messages[0]["content"]) == ("system", ""):
            return messages[1:] or messages
        return messages

    def _written(self, messages: list[Any], *, is_whole: bool = False) -> list[int]:
        """Ids up to where the assistant is to speak or to speak on; ``is_whole``, with its last words and their end."""
        continues = messages[-1]["role"] == "assistant" and not is_whole
        return list(
            self._rendered(
                messages,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=not continues and not is_whole,
                continue_final_message=continues,
            )
        )

    def _rendered(self, messages: list[Any], **how: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, **how)
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the model's chat template cannot write a conversation of {roles}: {error}. Change the messages, or "
                "use a model whose template takes them."
            ) from error

    def _can_write(self, messages: list[Any]) -> bool:
        try:
            return bool(self._written(messages))
        except Exception:  # a template may be broken in any way; that is said when a conversation needs it
            return False

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in self.eos_ids], skip_special_tokens=True)

    def text_with_specials(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


class PlainChat:
    """Anything with ``encode(text) -> ids`` and ``decode(ids) -> text``; ``render(messages) -> ids`` for chats."""

    def __init__(
        self, tokenizer: Any, eos_ids: Sequence[int], render: Callable[[Sequence[Any]], list[int]] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.render = render

    @property
    def can_chat(self) -> bool:
        return self.render is not None

    @property
    def vocabulary(self) -> Mapping[str, int] | None:
        return None

    def encode(self, inputs: Any) -> list[int]:
        if isinstance(inputs, str):
            return _not_empty(list(self.tokenizer.encode(inputs)), inputs)
        if self.render is None:
            raise DataError(
                "the prompt is a conversation, but this policy was built without render. Pass render=messages_to_ids "
                "to from_module, or give prompts as plain strings."
            )
        return _not_empty(list(self.render(inputs)), inputs)

    def encode_answered(self, inputs: Any, text: str) -> list[int]:
        return list(self.tokenizer.encode(inputs + text)) if isinstance(inputs, str) else []

    def encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def encode_reply(self, inputs: Any, said: Any, reply: Any, *, is_closed: bool) -> list[int]:
        if isinstance(reply, str):
            return self.encode_text(reply)
        assert self.render is not None  # its prompt was written by it
        begun = list(self.render([*inputs, *said[:-1]]))
        begun += self.encode_text(said[-1]["content"])
        whole = list(self.render([*inputs, *said, *reply]))
        if whole[: len(begun)] != begun:
            raise DataError(
                "render writes a conversation that goes on in another way than its beginning, so no reply can be added "
                "to what was sampled. Let render(messages) begin with render(messages before the answer) and the "
                "answer's own ids, or give prompts as plain strings."
            )
        return _after_end(whole[len(begun) :], self.eos_ids, is_closed=is_closed)

    @property
    def closing(self) -> list[int]:
        return list(self.eos_ids[:1])

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in self.eos_ids])

    def text_with_specials(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def save(self, folder: Path) -> None:
        """Nothing: a tokenizer of one's own is saved by its owner."""


def _after_end(ids: list[int], eos_ids: Sequence[int], *, is_closed: bool) -> list[int]:
    """What follows an answer, without the end token that it has already."""
    return ids[1:] if is_closed and ids and ids[0] in eos_ids else ids


def _not_empty(ids: list[int], inputs: Any) -> list[int]:
    if not ids:
        raise DataError(f"the prompt {inputs!r} has no tokens; a model needs at least one to answer.")
    return ids
