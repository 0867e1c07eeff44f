"""Prompts and targets to token ids, and sampled ids to completions. Sampled text is never tokenized
again."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gruppo.config.schema import PromptsConfig
from gruppo.loading import code_digest
from gruppo.modalities.text import chat_template
from gruppo.modalities.text.chat_template import map_strings, prepared
from gruppo.modalities.text.tool_calls import REASONING, ToolFormat, calls_of, read_message
from gruppo.timeouts import CallError, interrupt_after
from gruppo.types import DataError, GruppoError

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""
Render = Callable[[Sequence[Any]], list[int]]
"""Messages to ids up to where the assistant answers, for a tokenizer without chat template."""

_GREETING = {"role": "user", "content": "Hello."}
_PLACEHOLDER = "gruppo5spoke5here"
"""Stands for the assistant's turn where only the text that a template writes behind it is
needed."""
RENDER_S = 10.0
"""Limit for one conversation, which takes milliseconds. The template of a model is a program: it
may loop."""


class Chat:
    """A tokenizer and its way of writing conversations.

    A Hugging Face tokenizer with its chat template; or, with ``is_plain``, one with ``encode(text)
    -> ids`` and ``decode(ids) -> text``, and ``render(messages) -> ids``.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int],
        *,
        is_plain: bool = False,
        render: Render | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.is_plain = is_plain
        self.render = render
        end = None if is_plain else tokenizer.eos_token_id
        self.closing = [end] if end in self.eos_ids else list(self.eos_ids[:1])
        """The end token that closes a completion where the conversation does not say which; empty
        if there is none."""
        added = {} if is_plain else tokenizer.added_tokens_decoder
        self._special = _any_of([token.content for token in added.values() if token.special])
        self._original_tokenizer = tokenizer
        self._hangs = False
        """Whether the template has once not come to its end."""
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of all tools; each call says which of them its conversation has."""
        self._tool_format: ToolFormat | None = None
        """How the model writes calls; None where the tokenizer's response template reads them."""
        self.configure(PromptsConfig())

    def configure(self, prompts: PromptsConfig) -> None:
        """Write conversations as the config says: by another template, with further variables of
        it."""
        self.special_tokens = prompts.special_tokens
        """What becomes of special tokens in the text of messages; a tokenizer of one's own decides
        by itself."""
        self.template_kwargs = chat_template.template_kwargs(prompts.chat_template_kwargs)
        """Further variables of the chat template, such as enable_thinking."""
        self.tokenizer = self._original_tokenizer
        if not (prompts.chat_template or self.template_kwargs):
            return
        if self.is_plain:
            raise GruppoError(
                "a module with render of its own has no chat template",
                advice="Leave $prompts.chat_template out",
            )
        if prompts.chat_template:
            self.tokenizer = copy.copy(self.tokenizer)  # the caller's stays as it is
            self.tokenizer.chat_template = chat_template.read_template(prompts.chat_template)
        for name in self.template_kwargs:  # a misspelled one would change nothing, silently
            if not re.search(rf"\b{name}\b", str(self.tokenizer.chat_template)):
                raise GruppoError(
                    f"prompts.chat_template_kwargs sets {name}, which the chat template never reads"
                )
        try:
            self.rendered([_GREETING])
        except Exception as error:  # a template may fail in any way
            raise GruppoError(
                f"the chat template cannot write a conversation: {error}",
                option="prompts.chat_template",
            ) from None

    def set_tools(self, tools: Tools) -> None:
        """Read the calls of these tools from what the model writes; GruppoError if the template has
        no tools."""
        self.tools = [dict(tool) for tool in tools]
        self._tool_format = chat_template.tool_format(self) if tools else None

    @property
    def can_chat(self) -> bool:
        """Whether conversations can be encoded."""
        return self.render is not None if self.is_plain else bool(self.tokenizer.chat_template)

    def digests(self) -> dict[str, str | None]:
        """SHA-256 of the tokenizer and of the chat template, or of the user's code in their
        place."""
        if self.is_plain:
            return {
                "tokenizer": code_digest(f"{type(self.tokenizer).__module__}:"),
                "chat template": code_digest(f"{getattr(self.render, '__module__', '')}:"),
            }
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        model = self.tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
        model = model | {"padding": None, "truncation": None}  # left by the last call
        template = [self.tokenizer.chat_template, self.template_kwargs, self.tools]
        return {"tokenizer": _sha256(model), "chat template": _sha256(template)}

    def encode(self, inputs: Any, tools: Tools = ()) -> list[int]:
        """Ids of a string, or of messages and the schemas of tools up to where the assistant
        answers."""
        if isinstance(inputs, str):
            ids = list(self.tokenizer.encode(self._without_special(inputs)))
        elif self.render is not None:
            ids = list(self.render(inputs))
        elif self.can_chat:
            continues = inputs[-1]["role"] == "assistant"
            ids = self._apply_template(
                self._without_special(inputs),
                tools,
                tokenize=True,
                add_generation_prompt=not continues,
                continue_final_message=continues,
            )
        else:
            raise DataError("""the prompt is a conversation, but this tokenizer has no chat
                template. Use a chat model, give prompts as plain strings, set
                tokenizer.chat_template, or pass render=messages_to_ids to from_module.""")
        if not ids:
            raise DataError(
                f"the prompt {inputs!r} has no tokens; a model needs at least one to answer."
            )
        return ids

    def encode_answered(
        self, inputs: Any, answer: str | Mapping[str, Any], tools: Tools = ()
    ) -> list[int]:
        """Ids of the prompt with an answer, a string or a message, encoded together; empty if that
        is impossible."""
        if isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        if isinstance(inputs, str):
            return list(self.tokenizer.encode(self._without_special(inputs) + answer["content"]))
        if self.is_plain:
            return []
        if inputs[-1]["role"] == "assistant":  # the answer continues that turn
            answer = {**answer, "content": inputs[-1]["content"] + answer["content"]}
            inputs = inputs[:-1]
        try:
            # the answer keeps its end token, for which it is refused later
            messages = [*self._without_special(inputs), answer]
            return self._apply_template(messages, tools, tokenize=True)
        except DataError:
            return []

    def encode_text(self, text: str) -> list[int]:
        """Ids of a string between others, without tokens of a beginning or end."""
        options = {} if self.is_plain else {"add_special_tokens": False}
        return list(self.tokenizer.encode(text, **options))

    def _encode_between(self, text: str) -> list[int]:
        """Ids of a string behind others, without the space that some tokenizers put before the
        beginning of a string."""
        for anchor in ("\n", "#", "a"):
            before = self.encode_text(anchor)
            whole = self.encode_text(anchor + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self.encode_text(text)

    # --- special tokens in the text of users ---

    def special_token_in(self, inputs: Any) -> str:
        """The first special token in the strings of a prompt, "" if there is none."""
        found: list[str] = []
        map_strings(inputs, lambda text: found.extend(self._special.findall(text)))
        return next(iter(found), "")

    def _without_special(self, value: Any, *, is_forced: bool = False) -> Any:
        """Break special tokens in the strings of messages or schemas up, by a space; those of one
        character become a space."""
        if self.special_tokens == "keep" and not is_forced:
            return value
        return map_strings(value, lambda text: self._special.sub(_broken, text))

    # --- further turns ---

    def encode_reply(
        self, inputs: Any, completion: Any, reply: Any, *, is_closed: bool, tools: Tools = ()
    ) -> list[int]:
        """Ids from where the assistant ended to where it answers again, with a reply between: a
        string or messages.

        ``completion`` is all that followed the prompt ``inputs``, the assistant's last turn
        included. ``is_closed``: its last token was an end token, which is then not written again.
        """
        if isinstance(reply, str):
            text = self._without_special(reply)
            return self.encode_text(text) if self.is_plain else self._encode_between(text)
        if self.is_plain:
            raise DataError("""a tokenizer of your own writes no messages after an answer. Give
                prompts and replies as plain strings, or a Hugging Face tokenizer.""")
        if inputs[-1]["role"] == "assistant":  # that turn continues in the completion
            inputs = inputs[:-1]
        before = self._without_special([*inputs, *completion[:-1]])
        # what tools return is never the template's, whatever was done to the prompts
        reply = [self._without_special(m, is_forced=m["role"] == "tool") for m in reply]
        tail = self._text_behind_turn(before, completion[-1], reply, tools)
        ends = self._end_tokens()
        if not is_closed or not ends:
            return self._encode_between(tail)
        # without the end token that the answer already has, but encoded behind it: some tokenizers
        # put a space before the beginning of a string
        stripped = tail.lstrip()
        end = next((end for end in ends if stripped.startswith(end)), None)
        if end is None:
            end = ends[0]
        else:
            tail = stripped.removeprefix(end)
        ids = self.encode_text(end + tail)
        return ids[1:] if ids and ids[0] in self.eos_ids else self.encode_text(tail)

    def _end_tokens(self) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(list(self.eos_ids))

    def _text_behind_turn(
        self, before: Sequence[Any], turn: Any, reply: Sequence[Any], tools: Tools
    ) -> str:
        """What the template writes from the end of the assistant's turn to where it answers again.

        A placeholder stands for the turn's text. Where results of tools follow, it stands in the
        arguments of a call: many templates write no result without its call. The turn then ends
        with the first end token behind it.
        """
        results = [message for message in reply if message["role"] == "tool"]
        ids = [call.get("id") for call in turn.get("tool_calls", ())][: len(results)]
        calls: list[dict[str, Any]] = []
        for result, call_id in zip_longest(results, ids):
            function: dict[str, Any] = {"name": result.get("name") or "tool", "arguments": {}}
            calls.append({"id": call_id, "function": function})
        if calls:
            calls[-1]["function"]["arguments"] = {"placeholder": _PLACEHOLDER}
        # a template may refuse two calls in a turn (Llama) or write the first alone (gpt-oss),
        # refuse a turn before that a model has got wrong, and write results without calls
        problem: DataError | None = None
        last = calls[-1:]
        for history, some in ((before, calls), (before, last), ([_GREETING], last), (before, [])):
            spoken = {"content": "", "tool_calls": some} if some else {"content": _PLACEHOLDER}
            called = [*history, {"role": "assistant", **spoken}]
            try:
                _, found, tail = self.rendered([*called, *reply], tools).rpartition(_PLACEHOLDER)
            except DataError as error:
                problem = problem or error
                continue
            if found:
                return self._behind_call(tail) if some else tail
        raise problem or DataError("""the model's chat template leaves the assistant's turn out of a
            conversation, so that it cannot continue. Use a model whose template writes it.""")

    def _behind_call(self, tail: str) -> str:
        """The text from the first end token on; if there is none, what follows the call's end."""
        if found := _any_of(self._end_tokens()).search(tail):
            return tail[found.start() :]
        end = self._tool_format and re.search(self._tool_format.end, tail)
        return tail[end.end() :] if end else tail

    # --- templates ---

    def rendered(
        self, messages: Sequence[Any], tools: Tools = (), *, is_answered: bool = False
    ) -> str:
        """The text of a conversation up to where the assistant answers, or up to its end."""
        return self._apply_template(
            messages, tools, tokenize=False, add_generation_prompt=not is_answered
        )

    def _apply_template(self, messages: Sequence[Any], tools: Tools, **options: Any) -> Any:
        from jinja2 import TemplateError

        options |= {**self.template_kwargs, "return_dict": False}
        options["tools"] = self._without_special(list(tools)) or None

        def apply() -> Any:
            apply_template = self.tokenizer.apply_chat_template
            try:
                return apply_template(prepared(messages), **options)
            except TypeError:  # DeepSeek's templates join the arguments of a call to strings
                return apply_template(prepared(messages, arguments_as_text=True), **options)

        try:
            if self._hangs:  # not waited for again at each conversation
                raise CallError("timeout", "it did not come to its end before")
            return interrupt_after(apply, RENDER_S)
        except (CallError, TemplateError, TypeError) as error:
            self._hangs = isinstance(error, CallError)
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the model's chat template cannot write a conversation of {roles}: {error}",
                advice="""Change the messages, or use a model whose template takes them, or another
                    template with $prompts.chat_template""",
            ) from error

    # --- answers ---

    def answer(
        self,
        ids: Sequence[int],
        text: str,
        inputs: Any,
        tools: Tools = (),
        stop: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The assistant's message of sampled ids, which have this text; ``inputs``: the messages
        before.

        With tools, its text, and if present ``reasoning_content``, ``tool_calls``, and
        ``parse_error``, what is wrong with a call that cannot be read.
        """
        if not tools:
            return {"role": "assistant", "content": text}
        # what the template writes where the assistant answers
        begun = self.rendered([_GREETING])
        begun = begun.removeprefix(self.rendered([_GREETING], is_answered=True))
        if inputs[-1]["role"] == "assistant":
            begun += inputs[-1]["content"]
        message = self.parsed(self.text_with_specials(ids), begun, tools, self._tool_format)
        content = cut_at_stop(self._special.sub("", message["content"]), stop)
        # besides calls or reasoning, the line ends around the text are the template's
        return message | {"content": content.strip() if len(message) > 2 else content}

    def parsed(
        self, text: str, begun: str, tools: Tools, form: ToolFormat | None
    ) -> dict[str, Any]:
        """The assistant's message in a text with special tokens; ``begun``: what the template has
        written of it."""
        text = re.sub(rf"(?:{_any_of(self._end_tokens()).pattern})\s*\Z", "", text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        try:
            if form is None:
                found = self.tokenizer.parse_response(text, prefix=begun, tools=list(tools))
            else:
                opened = max(map(begun.rfind, REASONING))
                whole = begun[opened:] + text if opened >= 0 else text
                found = read_message(whole, form, list(tools))
            calls = calls_of(found.get("tool_calls"))
        except Exception as error:  # whatever a parser raises, RecursionError too
            return message | {"parse_error": f"the tool call cannot be read: {error}"}
        if reasoning := (found.get("reasoning_content") or found.get("thinking") or "").strip():
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        # a response template drops what stands outside of its fields
        return message | {"content": found.get("content") or ("" if len(message) > 2 else text)}

    def text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens and end tokens."""
        options = {} if self.is_plain else {"skip_special_tokens": True}
        return self.tokenizer.decode([i for i in ids if i not in self.eos_ids], **options)

    def text_with_specials(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(list(ids))

    def save(self, folder: Path) -> None:
        """Save a Hugging Face tokenizer, with the variables of its template as their defaults."""
        if self.is_plain:
            return
        tokenizer = copy.copy(self.tokenizer)
        defaults = "".join(
            f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif +%}}"
            for name, value in self.template_kwargs.items()
        )
        if defaults:  # of each variant, such as one for tools
            tokenizer.chat_template = map_strings(
                self.tokenizer.chat_template, lambda text: defaults + text
            )
        tokenizer.save_pretrained(folder)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the first stop text."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=None)]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _broken(found: re.Match[str]) -> str:
    token = found[0]
    return f"{token[0]} {token[1:]}" if len(token) > 1 else " "
