"""Language models: from ``--model`` to a policy, and the options that it can satisfy."""

from __future__ import annotations

import difflib
import logging
from functools import partial
from pathlib import Path
from typing import Any

from gruppo.config.schema import IN_MEMORY, Config
from gruppo.loading import command_name
from gruppo.modalities.common.adapters import adapt_from, is_adapter, model_of
from gruppo.modalities.common.lora import inject
from gruppo.modalities.common.validation import refuse_unused_options
from gruppo.modalities.text.bundled import BUNDLED
from gruppo.modalities.text.critic import SeparateCritic
from gruppo.modalities.text.custom import ModelFunction, is_custom, names_function
from gruppo.modalities.text.load import Adapt, four_bit_error, from_pretrained, give_adapter
from gruppo.modalities.text.policy import TextPolicy
from gruppo.protocols import Critic, Modality, Policy, PromptSource
from gruppo.types import DataError, GruppoError

log = logging.getLogger("gruppo")

TEMPLATE_TOKENS = 512
"""More than a chat template adds to a conversation. Prompts shorter than the context by this are
not tokenized."""


class TextModality(Modality):
    """Language models from transformers, and modules of one's own that map token ids to logits."""

    name = "text"
    is_gaussian = False

    def matches(self, model: str) -> bool:
        return True

    def validate(self, config: Config) -> None:
        model, options = config.model, config.modality
        is_here = model in BUNDLED or names_function(model) or Path(model).exists()
        if not is_here and options is not None and options != type(options)():
            raise GruppoError(
                f"there is no folder {model!r} with an image model",
                advice=f"""Train one first, as with {command_name()} train digits-pretrain, or set
                    $model unet or diffusers:OWNER/NAME""",
            )
        refuse_unused_options(config, self)

    def open(self, config: Config, data: PromptSource) -> tuple[Policy, dict[str, Any]]:
        path, origin = found_model(config.model)
        adapt = _adapter_of(config)
        if is_adapter(path) and adapt is None:
            log.warning(
                "the model %s is an adapter: it is merged into its base, and all weights are "
                "trained.",
                path,
            )
        policy = from_pretrained(
            path,
            compute=config.compute,
            trust_remote_code=config.trust_remote_code,
            adapt=adapt,
            is_merged=True,
            load_in_4bit=config.lora.load_in_4bit,
            seed=config.seed,
            device=config.device,
        )
        policy.configure_prompts(config.prompts)
        return policy, origin

    def load(
        self,
        model: str,
        *,
        compute: Any = "auto",
        trust_remote_code: bool = False,
        is_merged: bool = False,
    ) -> Policy:
        return from_pretrained(
            model, compute=compute, trust_remote_code=trust_remote_code, is_merged=is_merged
        )

    def adapt(self, config: Config, policy: TextPolicy, data: PromptSource) -> Policy:  # type: ignore[override]
        if config.lora.load_in_4bit:
            raise four_bit_error(type(policy.module).__name__)
        policy.configure_prompts(config.prompts)
        if (adapt := _adapter_of(config)) is not None:
            give_adapter(policy, adapt)
        return policy

    def check(
        self, config: Config, policy: Policy, sampling: Any, data: PromptSource, rewards: Any
    ) -> None:
        assert isinstance(policy, TextPolicy)
        rewards.set_decoder(policy.chat.text)
        # one warning for all rows
        prompts = data.all_prompts() if policy.chat.special_tokens != "keep" else ()
        for row, prompt in enumerate(prompts, start=1):
            if token := policy.chat.special_token_in(prompt.inputs):
                log.warning(
                    "row %d: the text of prompt %r holds the special token %s. Such tokens get a "
                    "space, which makes them text; set --prompts.special-tokens keep if the chat "
                    "template is already applied to these prompts.",
                    *(row, prompt.id, token),
                )
                break
        check_lengths(data, policy, config)

    def critic(self, config: Config, policy: Policy, data: PromptSource) -> Critic | None:
        assert isinstance(policy, TextPolicy)
        if config.critic.kind == "shared":
            return None
        if not config.critic.model:
            return SeparateCritic(policy)
        path, _ = found_model(config.critic.model)
        # in float32, whatever the run computes in: the critic makes a copy of its trunk alone
        model = from_pretrained(
            path,
            compute="float32",
            trust_remote_code=config.trust_remote_code,
            needs_head=False,
            is_merged=True,
            device=config.device,
        )
        try:
            check_lengths(data, model, config)
        except DataError as error:
            raise DataError(
                f"the critic {config.critic.model} is too short for these data: {error}"
            ) from None
        return SeparateCritic(policy, model)


TEXT = TextModality()
TextPolicy.modality = TEXT


def check_lengths(source: Any, policy: TextPolicy, config: Config) -> None:
    """Refuse data with a prompt that the model's context cannot hold, or a text where tools need a
    conversation."""
    tools = policy.chat.tools
    added = TEMPLATE_TOKENS
    if tools:
        added += len(policy.chat.rendered([{"role": "user", "content": ""}], tools).encode())
    for prompt in source.all_prompts():
        longest = len(str(prompt.inputs).encode()) + added  # a token of text is at least a byte
        is_short = policy.context and longest + config.rollout.max_new_tokens < policy.context
        needs_conversation = tools and isinstance(prompt.inputs, str)
        if is_short and not needs_conversation:
            continue
        if why := policy.check_prompt(prompt, config.rollout.sampling):
            raise DataError(why)


def _adapter_of(config: Config) -> Adapt | None:
    """Return the function that adds the trained adapter; None where all weights are trained."""
    lora, base = config.lora, config.model if config.model != IN_MEMORY else ""
    if lora.adapter:
        return adapt_from(lora.adapter, base=base)
    if not lora.rank:
        return None
    return partial(
        inject, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed, base=base
    )


def found_model(name: str) -> tuple[str, dict[str, Any]]:
    """Return where a language model is loaded from, and its origin for the manifest."""
    if name in BUNDLED:
        found = BUNDLED[name]()
        return str(found.path), {"name": name, "source": found.source, "sha256": found.sha256}
    if names_function(name) or is_custom(model_of(name)):
        folder = Path(model_of(name)).expanduser()
        made = ModelFunction.from_name(name) if names_function(name) else ModelFunction.read(folder)
        return name, {"name": name, "made_by": made.made_by}
    near = difflib.get_close_matches(name, [*BUNDLED, "unet"], 1)
    if near and "/" not in name and not Path(name).exists():
        raise GruppoError(f"there is no model {name!r}. Did you mean {near[0]}?")
    return name, {"name": name}
