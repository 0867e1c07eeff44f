"""Whether a server fits a run, before its first step. Each refusal is one line with what to set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gruppo.engines.vllm.client import CONNECT_S, CONTROL_S, GENERATE, KEY, Replica, ServerError
from gruppo.types import GruppoError

TEXT = "Is 17 + 25 = 42?\n\tNaïve café, 北京 😀"
"""Tokenized by both: digits, white space, and characters of several bytes."""
START = "Start the server with gruppo serve MODEL"


async def check_server(
    replica: Replica, policy: Any, *, tokens: int, is_colocated: bool = False
) -> int:
    """Return the context of a server. Refuse one that lacks a route, or has another model or a
    shorter context."""
    url = replica.url
    context = await _check_context(replica, tokens)
    path = "/server_info?config_format=json"
    info = await _ask(replica, f"development routes. {START}", path, method="GET")
    settings = (info.get("vllm_config") or {}).get("model_config") or {}
    _check_settings(replica, policy, settings, is_colocated=is_colocated)
    body = {"prompt": TEXT, "add_special_tokens": False}
    answer = await _ask(replica, f"route /tokenize. {START}", "/tokenize", body)
    ids = policy.encode_text(TEXT)
    if answer.get("tokens") != ids:
        raise GruppoError(
            f"""the server {url} has another tokenizer than the run's model: it makes other tokens
                of {TEXT!r}""",
            advice="Start it with gruppo serve and the run's $model",
        )
    # a run that died while it updated has left the server asleep, or while it published, paused
    if is_colocated:
        await replica.request("POST", "/wake_up")
    await replica.request("POST", "/resume")
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
    body = {"token_ids": ids[:1], "sampling_params": params}
    needed = f"route {GENERATE}. {START}, which sets --enable-scale-out"
    answer = await _ask(replica, needed, GENERATE, body)
    if not (answer.get("choices") or [{}])[0].get("weight_versions"):
        raise GruppoError(f"""the server {url} does not say which weights chose a token: its
            vLLM is too old. Install vLLM 0.32 or newer.""")
    try:
        await replica.count_tokens(timeout_s=CONTROL_S)
    except ServerError as error:
        raise GruppoError(f"""the server {url} does not count its tokens ({error}), by which
            one that hangs is found. Start it without --disable-log-stats.""") from None
    return context


async def _check_context(replica: Replica, tokens: int) -> int:
    try:
        await replica.request("GET", "/health", timeout_s=CONNECT_S)
        models = await replica.request("GET", "/v1/models")
    except ServerError as error:
        if error.status in (401, 403):
            raise GruppoError(
                f"the server {replica.url} needs a key. Set the environment variable {KEY} to its "
                f"key."
            ) from None
        raise GruppoError(
            f"no vLLM server answers at {replica.url} ({error})",
            advice="Start one with gruppo serve MODEL and wait until it answers, or correct "
            "$engine.urls",
        ) from None
    contexts = [model.get("max_model_len") for model in models.get("data", ())]
    context = min(filter(None, contexts), default=tokens)
    if context < tokens:
        raise GruppoError(
            f"""the server {replica.url} has a context of {context} tokens, and the longest prompt
                and its completion need {tokens}""",
            advice=f"""Start it with gruppo serve MODEL -- --max-model-len {tokens}, or lower
                    $rollout.max_new_tokens""",
        )
    return context


def _check_settings(
    replica: Replica, policy: Any, settings: Mapping[str, Any], *, is_colocated: bool
) -> None:
    url = replica.url
    if (mode := settings.get("logprobs_mode")) != "processed_logprobs":
        raise GruppoError(f"""the server {url} reports {mode}, which leave out temperature, top-k
            and top-p; processed_logprobs are needed. {START}, which sets --logprobs-mode
            processed_logprobs.""")
    if is_colocated and not settings.get("enable_sleep_mode"):
        raise GruppoError(f"""the server {url} cannot sleep, which engine.colocated needs. {START}
            -- --enable-sleep-mode, or leave --engine.colocated out.""")
    if settings.get("quantization"):  # not all of its parameters are weights that a load writes
        replica.can_reset = False
    theirs = str(settings.get("dtype") or "").removeprefix("torch.")
    ours = str(policy.compute_dtype).removeprefix("torch.")
    if theirs in ("float32", "bfloat16", "float16") and theirs != ours:
        raise GruppoError(
            f"the server {url} computes in {theirs}, and the trainer in {ours}",
            advice=f"Start it with gruppo serve MODEL -- --dtype {ours}, or set $compute {theirs}",
        )


async def _ask(
    replica: Replica, needed: str, path: str, body: Any = None, method: str = "POST"
) -> Any:
    try:
        return await replica.request(method, path, body)
    except ServerError as error:
        if error.status in (401, 403, 404, 405):
            raise GruppoError(f"the server {replica.url} has no {needed} ({error}).") from None
        raise GruppoError(f"the server {replica.url} fails: {error}. Look into its log.") from None
