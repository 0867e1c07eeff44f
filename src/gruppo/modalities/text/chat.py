"""Prompts and targets to token ids, and sampled ids to completions. Sampled text is never tokenized
again."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from gruppo.config.schema import PromptsConfig
from gruppo.loading import code_digest
from gruppo.modalities.text import chat_template
from gruppo.modalities.text.chat_template import prepared, strings
from gruppo.modalities.text.tool_calls import ToolFormat, call_of, read_calls, split_reasoning
from gruppo.timeouts import CallError, interrupt_after
from gruppo.types import DataError, GruppoError

T = TypeVar("T")
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""
Render = Callable[[Sequence[Any]], list[int]]
"""Messages to ids up to where the assistant answers, for a tokenizer without chat template."""

_GREETING = {"role": "user", "content": "Hello."}
_EMPTY_SYSTEM = {"role": "system", "content": ""}
_PLACEHOLDER = "gruppo5spoke5here"
"""Stands for the assistant's turn where only the text that a template writes behind it is
needed."""
RENDER_S = 10.0
"""Of one conversation, which takes milliseconds. The template of a model is a program: it may
loop."""
BREAK = "\ue0f0\ue0f1\ue0f0"
"""Private-use characters that keep a special token of the user's text apart from those that a
template writes."""


_LOCK = threading.RLock()
"""Of all tokenizers: ``encode`` may change settings of a tokenizer, and engines encode while
rewards decode."""


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with _LOCK:
        yield


class Chat:
    """A tokenizer and its way of writing conversations.

    A Hugging Face tokenizer with its chat template, without empty system messages that the template
    refuses; or, with ``is_plain``, one with ``encode(text) -> ids`` and ``decode(ids) -> text``,
    and ``render(messages) -> ids``.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int],
        *,
        is_plain: bool = False,
        render: Render | None = None,
    ) -> None:
        self.tokenizer, self.eos_ids, self.is_plain, self.render = (
            tokenizer,
            tuple(eos_ids),
            is_plain,
            render,
        )
        end = None if is_plain else tokenizer.eos_token_id
        self.closing = [end] if end in self.eos_ids else list(self.eos_ids[:1])
        """The end token that closes a completion where the conversation does not say which; empty
        if there is none."""
        added = {} if is_plain else tokenizer.added_tokens_decoder
        names = sorted(
            (token.content for token in added.values() if token.special), key=len, reverse=True
        )
        self._special = _any_of(names)
        self._guarded_special = _any_of([name[0] + BREAK + name[1:] for name in names])
        self._given = tokenizer
        self._hangs = False
        """Whether the template has once not come to its end."""
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of all tools; each call says which of them its conversation has."""
        self._tool_format: ToolFormat | None = None
        """How the model writes calls; None where the tokenizer's response template reads them."""
        self._begun = ""
        self.configure(PromptsConfig())

    def configure(self, prompts: PromptsConfig) -> None:
        """Write conversations as the config says: by another template, with further variables of
        it."""
        template, kwargs = prompts.chat_template, prompts.chat_template_kwargs
        try:
            values = json.loads(kwargs or "{}")
        except ValueError:
            values = None
        if not isinstance(values, dict) or not all(map(str.isidentifier, values)):
            raise GruppoError(
                f"prompts.chat_template_kwargs is {kwargs!r:.80}",
                advice="""It needs a JSON object, such as $prompts.chat_template_kwargs '{"enable_thinking": false}'""",
            )
        if taken := [name for name in values if name in chat_template.SET_BY_GRUPPO]:
            raise GruppoError(
                f"prompts.chat_template_kwargs sets {taken[0]}, which gruppo sets itself. Leave it "
                f"out."
            )
        self.special_tokens = prompts.special_tokens
        """What becomes of special tokens in the text of messages; a tokenizer of one's own decides
        by itself."""
        if self.is_plain and (template or values):
            raise GruppoError(
                "a module with render of its own has no chat template",
                advice="Leave $prompts.chat_template out",
            )
        self.tokenizer = self._given
        if template:
            self.tokenizer = copy.copy(self._given)  # the caller's stays as it is
            self.tokenizer.chat_template = chat_template.read_template(template)
        written = getattr(self.tokenizer, "chat_template", None) or ""
        texts = (
            written.values() if isinstance(written, Mapping) else [written]
        )  # a template may have variants
        for name in values:  # a misspelled one would change nothing, silently
            if not any(re.search(rf"\b{name}\b", text) for text in texts):
                raise GruppoError(f"""prompts.chat_template_kwargs sets {name}, which the model's chat template never
                    reads. Correct the name, or leave it out.""")
        self.template_kwargs = values
        """Further variables of the chat template, such as enable_thinking."""
        self._drops_empty_system = False
        if template or values:
            try:
                self.rendered([_GREETING])
            except Exception as error:  # a template may fail in any way
                name = f"the chat template {template}" if template else "the model's chat template"
                raise GruppoError(
                    f"{name} with {values} cannot write a conversation: {error}. Correct it."
                ) from None
        if self.can_chat and not self.is_plain:
            try:
                self._drops_empty_system = not self._encode_messages([_EMPTY_SYSTEM, _GREETING])
            except (
                Exception
            ):  # a template may fail in any way; the error is raised when a conversation needs it
                self._drops_empty_system = True

    def set_tools(self, tools: Tools) -> None:
        """Read the calls of these tools from what the model writes; GruppoError if the template has
        no tools."""
        self.tools = [dict(tool) for tool in tools]
        self._tool_format = chat_template.tool_support(self) if tools else None
        self._begun = self.generation_prompt() if tools else ""

    @property
    def can_chat(self) -> bool:
        """Whether conversations can be encoded."""
        return self.render is not None if self.is_plain else bool(self.tokenizer.chat_template)

    def digests(self) -> dict[str, str | None]:
        """SHA-256 of the tokenizer and of the chat template, or of the code of the user that stands
        for them."""
        if self.is_plain:
            code = {"tokenizer": type(self.tokenizer), "chat template": self.render}
            return {
                name: code_digest(f"{getattr(value, '__module__', '')}:")
                for name, value in code.items()
            }
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        content = (
            {"vocabulary": self.tokenizer.get_vocab()}
            if backend is None
            else json.loads(backend.to_str())
        )
        # without the settings that the last call has left in the tokenizer
        kept = {
            name: part for name, part in content.items() if name not in ("padding", "truncation")
        }
        parts = {
            "tokenizer": kept,
            "chat template": [self.tokenizer.chat_template, self.template_kwargs, self.tools],
        }
        written = {name: json.dumps(part, sort_keys=True) for name, part in parts.items()}
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in written.items()}

    @_one_at_a_time()
    def encode(self, inputs: Any, tools: Tools = ()) -> list[int]:
        """Ids of a string, or of messages and the schemas of tools up to where the assistant
        answers."""
        if isinstance(inputs, str):
            ids = list(self.tokenizer.encode(inputs, **self._split(inputs)))
        elif self.can_chat:
            ids = self._encode_messages(inputs, tools)
        elif self.is_plain:
            raise DataError("""the prompt is a conversation, but this policy was built without render. Pass
                render=messages_to_ids to from_module, or give prompts as plain strings.""")
        else:
            raise DataError("""the prompt is a conversation, but this tokenizer has no chat template. Use a chat model,
                give prompts as plain strings, or set tokenizer.chat_template.""")
        if not ids:
            raise DataError(
                f"the prompt {inputs!r} has no tokens; a model needs at least one to answer."
            )
        return ids

    @_one_at_a_time()
    def encode_answered(
        self, inputs: Any, answer: str | Mapping[str, Any], tools: Tools = ()
    ) -> list[int]:
        """Ids of the prompt with an answer, a text or a message, encoded together; empty if that is
        impossible."""
        if isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        if isinstance(inputs, str):
            return list(self.tokenizer.encode(inputs + answer["content"], **self._split(inputs)))
        if self.is_plain:
            return []
        if inputs[-1]["role"] == "assistant":  # an answer begun there goes on
            inputs, answer = (
                inputs[:-1],
                {**answer, "content": inputs[-1]["content"] + answer["content"]},
            )
        try:
            return self._encode_messages([*inputs, answer], tools, is_whole=True)
        except DataError:
            return []

    @_one_at_a_time()
    def encode_text(self, text: str, **options: bool) -> list[int]:
        """Ids of a text between others, without tokens of a beginning or end."""
        if BREAK in text:
            return self._encode_rendered(text)
        return list(
            self.tokenizer.encode(
                text, **({} if self.is_plain else {"add_special_tokens": False}), **options
            )
        )

    # --- special tokens in the text of users ---

    def special_token_in(self, inputs: Any) -> str:
        """The first special token in the text of a prompt, "" if there is none."""
        return next(
            (found[0] for text in strings(inputs) if (found := self._special.search(text))), ""
        )

    def _split(self, text: str) -> dict[str, bool]:
        splits = self.special_tokens != "keep" and bool(self._special.search(text))
        return {"split_special_tokens": True} if splits else {}

    def _guarded(self, value: T, *, is_forced: bool = False) -> T:
        """Messages or schemas with a break in each special token of their texts."""
        if (self.special_tokens == "keep" and not is_forced) or not self.special_token_in(value):
            return value

        def guard(value: Any) -> Any:
            if isinstance(value, str):
                return self._special.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
            if isinstance(value, Mapping):
                return {name: guard(item) for name, item in value.items()}
            return [guard(item) for item in value] if isinstance(value, list | tuple) else value

        return guard(value)

    def _encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered conversation in which the user's special tokens are guarded: those are
        encoded as text.

        The text is cut at the template's tokens. That this gives the tokenizer's own ids is checked
        on the same text without the user's special tokens.
        """

        def by_parts(text: str, encode: Callable[..., list[int]]) -> list[int]:
            ends = [found.span() for found in self._special.finditer(text)]
            ids, start = list[int](), 0
            for first, last in [*ends, (len(text), len(text))]:
                if part := text[start:first].replace(BREAK, ""):
                    ids += encode(part, split_special_tokens=True)
                ids += (
                    [self.tokenizer.convert_tokens_to_ids(text[first:last])] if first < last else []
                )
                start = last
            return ids

        plain = self._guarded_special.sub("x", text)
        expected = self.encode_text(
            plain
        )  # without breaks, as the tokenizer itself reads a whole text
        for encode in (
            self.encode_text,
            self._encode_between,
        ):  # each part alone, or behind other text
            if by_parts(plain, encode) == expected:
                return by_parts(text, encode)
        raise DataError(
            """the text of a message holds a special token, which this tokenizer cannot encode as
                    text""",
            advice="Remove it, or set $prompts.special_tokens keep",
        )

    @_one_at_a_time()
    def encode_reply(
        self, inputs: Any, completion: Any, reply: Any, *, is_closed: bool, tools: Tools = ()
    ) -> list[int]:
        """Ids from where the assistant ended to where it answers again, with a reply between: a
        text or messages.

        ``completion`` is all that followed the prompt ``inputs``, the assistant's last turn
        included. ``is_closed``: its last token was an end token, which is then not written again.
        """
        if isinstance(reply, str):
            return (
                self.encode_text(reply)
                if self.is_plain
                else self._encode_between(reply, **self._split(reply))
            )
        if self.is_plain:
            begun = self._encode_messages([*inputs, *completion[:-1]]) + self.encode_text(
                completion[-1]["content"]
            )
            whole = self._encode_messages([*inputs, *completion, *reply])
            if whole[: len(begun)] != begun:
                raise DataError("""render writes the beginning of a longer conversation differently, so no reply can be
                    added to the sampled tokens. Let render(messages) begin with render(messages before the answer) and
                    the answer's ids, or give prompts as plain strings.""")
            ids = whole[len(begun) :]
            return ids[1:] if is_closed and ids and ids[0] in self.eos_ids else ids
        before = (
            inputs[:-1] if inputs[-1]["role"] == "assistant" else inputs
        )  # an answer begun there is in completion
        spoken = self._guarded([*before, *completion[:-1]])
        # what tools return is never the template's, whatever was done to the prompts
        reply = [self._guarded(message, is_forced=message["role"] == "tool") for message in reply]
        tail = self._text_behind_turn(spoken, completion[-1], reply, tools)
        ends = self.tokenizer.convert_ids_to_tokens(list(self.eos_ids))
        if not is_closed or not ends:
            return self._encode_between(tail)
        # without the end token that the answer already has, but encoded behind it: some tokenizers
        # put a space before the beginning of a text
        end = next((end for end in ends if tail.lstrip().startswith(end)), None)
        tail = tail if end is None else tail.lstrip()[len(end) :]
        ids = self.encode_text((end or ends[0]) + tail)
        return ids[1:] if ids and ids[0] in self.eos_ids else self.encode_text(tail)

    def _text_behind_turn(
        self, before: Sequence[Any], turn: Any, reply: Sequence[Any], tools: Tools
    ) -> str:
        """What the template writes from the end of the assistant's turn to where it answers again.

        A placeholder stands for the turn's text. Where results of tools follow, it stands in the
        arguments of a call: many templates write no result without its call. The turn then ends
        with the first end token behind it.
        """
        results = [message for message in reply if message["role"] == "tool"]
        ids = [{"id": call["id"]} if "id" in call else {} for call in turn.get("tool_calls", ())]
        calls: list[dict[str, Any]] = [
            {
                "type": "function",
                "function": {"name": result.get("name") or "tool", "arguments": {}},
                **call_id,
            }
            for result, call_id in zip_longest(
                results, ids[: len(results)], fillvalue=dict[str, Any]()
            )
        ]
        if calls:
            calls[-1]["function"]["arguments"] = {"placeholder": _PLACEHOLDER}
        # a template may refuse two calls in a turn (Llama) or write the first alone (gpt-oss),
        # refuse a turn before that a model has got wrong, and write results without calls
        written, tail, problem = (
            [(before, calls), (before, calls[-1:]), ([_GREETING], calls[-1:])],
            "",
            None,
        )
        for history, some in [*written, *([(before, [])] if calls else [])]:
            spoken = {"content": "", "tool_calls": some} if some else {"content": _PLACEHOLDER}
            called, found = [*history, {"role": "assistant", **spoken}], ""
            try:
                _, found, tail = self.rendered([*called, *reply], tools).rpartition(_PLACEHOLDER)
            except DataError as error:
                problem = problem or error
            if found:
                break
        else:
            raise problem or DataError("""the model's chat template leaves the assistant's turn out of a conversation,
                so that it cannot continue. Use a model whose template writes it.""")
        if not some:
            return tail
        ends = self.tokenizer.convert_ids_to_tokens(list(self.eos_ids))
        if places := [place for end in ends if (place := tail.find(end)) >= 0]:
            return tail[min(places) :]
        # no end token follows: the turn ends behind what the template writes too where no result
        # follows
        alone = self.rendered(called, tools, is_answered=True).rpartition(_PLACEHOLDER)[2]
        pieces = [
            [text for text in re.split(f"({self._special.pattern})", part) if text]
            for part in (tail, alone)
        ]
        common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*pieces, strict=False))])
        return "".join(pieces[0][common:])

    def _encode_between(self, text: str, **options: bool) -> list[int]:
        """Ids of a text behind others, without the space that some tokenizers put before the
        beginning of a text."""
        for anchor in ("\n", "#", "a"):
            before, whole = (
                self.encode_text(anchor, **options),
                self.encode_text(anchor + text, **options),
            )
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self.encode_text(text, **options)

    def _encode_messages(
        self, messages: Sequence[Any], tools: Tools = (), *, is_whole: bool = False
    ) -> list[int]:
        """Ids up to where the assistant answers or continues; with ``is_whole``, up to the end of
        its last turn."""
        if self.render is not None:
            return list(self.render(messages))
        continues = messages[-1]["role"] == "assistant" and not is_whole
        options = {
            "add_generation_prompt": not continues and not is_whole,
            "continue_final_message": continues,
        }
        # the answer of a demonstration keeps its end token, for which it is refused later
        guarded = (
            [*self._guarded(messages[:-1]), messages[-1]] if is_whole else self._guarded(messages)
        )
        if any(BREAK in text for text in strings([guarded, self._guarded(tools)])):
            return self._encode_rendered(
                self._apply_template(guarded, tools, tokenize=False, **options)
            )
        return list(
            self._apply_template(messages, tools, tokenize=True, return_dict=False, **options)
        )

    def rendered(
        self, messages: Sequence[Any], tools: Tools = (), *, is_answered: bool = False
    ) -> str:
        """The text of a conversation up to where the assistant answers, or up to its end."""
        return self._apply_template(
            messages, tools, tokenize=False, add_generation_prompt=not is_answered
        )

    def generation_prompt(self) -> str:
        """What the template writes where the assistant answers."""
        return self.rendered([_GREETING]).removeprefix(self.rendered([_GREETING], is_answered=True))

    def _apply_template(self, messages: Sequence[Any], tools: Tools, **options: Any) -> Any:
        from jinja2 import TemplateError

        messages = list(messages)
        if self._drops_empty_system and (messages[0]["role"], messages[0]["content"]) == (
            "system",
            "",
        ):
            messages = messages[1:] or messages
        options |= {**self.template_kwargs, "tools": self._guarded(list(tools)) or None}

        def apply() -> Any:
            try:
                return self.tokenizer.apply_chat_template(
                    prepared(messages, arguments_as_text=False), **options
                )
            except TypeError:  # DeepSeek's templates join the arguments of a call to texts
                return self.tokenizer.apply_chat_template(
                    prepared(messages, arguments_as_text=True), **options
                )

        roles = ", ".join(str(message["role"]) for message in messages)
        try:
            if self._hangs:  # not waited for again at each conversation
                raise CallError("timeout", "it did not come to its end before")
            return interrupt_after(apply, RENDER_S)
        except CallError as error:
            self._hangs = True
            raise DataError(
                f"the model's chat template cannot write a conversation of {roles}: {error}",
                advice="Use a model whose template ends, or another template with "
                "$prompts.chat_template",
            ) from None
        except (TemplateError, TypeError) as error:
            raise DataError(f"""the model's chat template cannot write a conversation of {roles}: {error}. Change the
                messages, or use a model whose template takes them.""") from error

    @_one_at_a_time()
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

        With tools, its text, and as far as there are any ``reasoning_content``, ``tool_calls``, and
        ``parse_error``, what is wrong with a call that cannot be read.
        """
        if not tools:
            return {"role": "assistant", "content": text}
        begun = self._begun + (inputs[-1]["content"] if inputs[-1]["role"] == "assistant" else "")
        message = self.parsed(self.tokenizer.decode(list(ids)), begun, tools)
        ends = _any_of(self.tokenizer.convert_ids_to_tokens(list(self.eos_ids)))
        content = cut_at_stop(self._special.sub("", ends.sub("", message["content"])), stop)
        # beside calls or reasoning, the line ends around the text are the template's
        return message | {"content": content.strip() if len(message) > 2 else content}

    def parsed(self, text: str, begun: str, tools: Tools) -> dict[str, Any]:
        """The assistant's message in a text with special tokens; ``begun``: what the template has
        written of it."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        try:
            if self._tool_format is None:
                found = self.tokenizer.parse_response(text, prefix=begun, tools=list(tools))
                reasoning, content = (
                    found.get("reasoning_content") or found.get("thinking"),
                    found.get("content"),
                )
                calls = [call_of(call) for call in found.get("tool_calls") or ()]
            else:
                reasoning, rest = split_reasoning(text, begun)
                message["content"] = rest
                content, calls = read_calls(rest, self._tool_format, tools)
        except (
            Exception
        ) as error:  # transformers fails in any way: RecursionError for a thousand brackets
            return message | {"parse_error": f"the tool call cannot be read: {error}"}
        message |= {
            name: part
            for name, part in (("reasoning_content", reasoning), ("tool_calls", calls))
            if part
        }
        # a response template drops what stands outside of its fields
        return message | {"content": content or ("" if len(message) > 2 else text)}

    @_one_at_a_time()
    def text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens and end tokens."""
        options = {} if self.is_plain else {"skip_special_tokens": True}
        return self.tokenizer.decode([i for i in ids if i not in self.eos_ids], **options)

    @_one_at_a_time()
    def text_with_specials(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(list(ids))

    def save(self, folder: Path) -> None:
        """Save a Hugging Face tokenizer; another one is saved by its owner."""
        if self.is_plain:
            return
        tokenizer = self.tokenizer
        if self.template_kwargs:
            # the template gets defaults for its variables, so that the saved model writes prompts
            # as it was trained
            values, text = self.template_kwargs.items(), tokenizer.chat_template
            lines = [
                f"{{%- if {n} is not defined %}}{{%- set {n} = {v!r} %}}{{%- endif +%}}"
                for n, v in values
            ]
            begin, variants = (
                "".join(lines),
                text if isinstance(text, Mapping) else {},
            )  # such as one for tools
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = {
                name: begin + part for name, part in variants.items()
            } or begin + text
        tokenizer.save_pretrained(folder)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the first stop text."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def special_token_error(prompt_id: str, token: str) -> str:
    problem = (
        f"the text of prompt {prompt_id!r} holds the special token {token}, which the model "
        f"would read"
    )
    return f"{problem} as a control token. Remove it, or set --prompts.special-tokens split."


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
