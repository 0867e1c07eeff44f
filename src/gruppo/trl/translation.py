"""TRL's arguments as a ``gruppo.Config``: each is translated, without effect, or refused by its
name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from gruppo import distributed as dist
from gruppo.config import peer_options, serialization
from gruppo.config.schema import Config
from gruppo.core.objective import PRESETS
from gruppo.errors import GruppoError, as_argument
from gruppo.trl.arguments import GRPOConfig, RLOOConfig


def _names(*lines: str) -> set[str]:
    return {name for line in lines for name in line.split()}


DEFAULTS = {"GRPO": GRPOConfig, "RLOO": RLOOConfig}
WITHOUT_EFFECT = _names(
    # memory and speed, which gruppo arranges itself without a change to the gradient
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_empty_cache_steps "
    "use_liger_kernel tf32",
    "liger_kernel_config torch_compile torch_compile_backend torch_compile_mode "
    "cast_lm_head_to_fp32 disable_dropout",
    # sampling: the local engine packs rows and keeps a cache per group; and padding
    "ds3_gather_for_generation use_transformers_paged use_transformers_continuous_batching "
    "use_cache",
    "transformers_continuous_batching_config cache_implementation pad_to_multiple_of",
    # data loaders: prompts are read by index, and every column goes to the rewards
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor",
    "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context "
    "remove_unused_columns label_names",
    "length_column_name",
    # processes: denominators are those of the whole batch, so ranks do not change the gradient
    "average_tokens_across_devices ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph",
    "ddp_backend local_rank full_determinism accelerator_config",
    # evaluation, which samples completions and has no loss
    "bf16_full_eval fp16_full_eval eval_accumulation_steps per_device_eval_batch_size "
    "eval_do_concat_batches",
    "eval_use_gather_object batch_eval_metrics prediction_loss_only include_for_metrics",
    # what is logged: every step is, with all completions
    "logging_steps logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node "
    "log_level",
    "log_level_replica disable_tqdm log_completions num_completions_to_print debug "
    "log_unique_prompts log_multimodal",
    "include_num_input_tokens_seen skip_memory_metrics run_name project trackio_space_id "
    "trackio_bucket_id",
    "trackio_static_space_id",
    # what the script does itself, and what save and push_to_hub of the trainer read
    "do_train do_eval do_predict resume_from_checkpoint push_to_hub hub_model_id hub_token "
    "hub_private_repo",
    "hub_revision hub_strategy hub_always_push save_only_model save_on_each_node ignore_data_skip",
    "restore_callback_states_from_checkpoint enable_jit_checkpoint greater_is_better",
    # of vLLM, without use_vllm; with it, some are translated below
    *(field.name for field in fields(GRPOConfig) if field.name.startswith("vllm_")),
)
"""Arguments that change nothing that is learned here."""
DIRECT = {
    option.theirs: option.ours
    for option in peer_options.peer_options("trl")
    if option.part in ("GRPOConfig", "TrainingArguments") and option.ours
    if " " not in option.ours and option.theirs not in WITHOUT_EFFECT
}
"""Arguments whose value is that of one option; those below replace some of them."""
TRANSLATED = _names(
    "output_dir per_device_train_batch_size gradient_accumulation_steps generation_batch_size "
    "steps_per_generation",
    "num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_steps adam_beta1 "
    "adam_beta2 optim bf16",
    "use_cpu report_to eval_strategy eval_steps eval_on_start save_strategy save_steps "
    "save_total_limit",
    "model_init_kwargs chat_template_kwargs ddp_timeout num_generations_eval epsilon epsilon_high "
    "delta beta",
    "use_bias_correction_kl entropy_coef use_adaptive_entropy entropy_target entropy_coef_delta "
    "scale_rewards",
    "loss_type sync_ref_model ref_model_mixup_alpha ref_model_sync_steps data_seed shuffle_dataset "
    "use_vllm",
    "gradient_checkpointing activation_checkpointing",
)
DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant"}
DECAYS |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
SCALES = ("group", "batch", "none")
# bnpo divides by the tokens of a micro-batch, which has no counterpart here.
LOSSES = {
    "cispo": {"surrogate": "cispo", "average": "token"},
    "sapo": {"surrogate": "sapo", "average": "sequence"},
    "vespo": {"surrogate": "vespo", "average": "token"},
    "luspo": {"surrogate": "clip", "average": "sequence_sum", "ratio": "sequence"},
    "grpo": {"surrogate": "clip", "average": "sequence"},
    "dapo": {"surrogate": "clip", "average": "token"},
    "dr_grpo": {"surrogate": "clip", "average": "constant"},
}
TRACKERS = ("tensorboard", "wandb", "trackio")


def refusal(name: str, value: Any, why: str = "") -> GruppoError:
    """An argument that has no counterpart, with the nearest option of ours."""
    text = f"{name}={value!r:.80} of TRL has no counterpart in gruppo"
    for option in peer_options.lookup("trl", name)[:1]:
        why = why or option.remark
        if near := as_argument(option.ours or option.near):
            text += f"; the nearest is {near} of gruppo.Trainer"
    return GruppoError(f"{text}{f' ({why})' if why else ''}. Leave {name} out.")


def translated(
    args: Any, kind: str, *, rows: int, has_evaluation: bool
) -> tuple[dict[str, Any], list[str]]:
    """Settings of gruppo by dotted name, and what differs in meaning.

    ``rows``: prompts of the training data, which ``num_train_epochs`` counts.
    """
    names = {f.name: f.default for f in fields(DEFAULTS[kind])}

    def of(name: str) -> Any:
        value = getattr(args, name, names[name])
        return getattr(value, "value", value)  # an enum of transformers

    notes = list[str]()
    settings = _direct(of, names, notes) | _objective(of, kind, notes)
    settings |= _learning_rate(of)
    settings |= _steps(of, rows, notes, has_evaluation=has_evaluation)
    is_recomputed = of("activation_checkpointing")
    if is_recomputed is None:  # transformers' new name for what TRL sets by the former one
        is_recomputed = of("gradient_checkpointing")
    settings |= {
        "optim.betas": (float(of("adam_beta1")), float(of("adam_beta2"))),
        "optim.recompute": "layer" if is_recomputed else "none",
        "saving.keep": of("save_total_limit") or 10**6,
        "prompts.held_out_fraction": 0.0,
        # as in TRL, which tokenizes prompts with the special tokens in their text
        "prompts.special_tokens": "keep",
        "prompts.chat_template_kwargs": json.dumps(of("chat_template_kwargs") or {}),
        "evaluation.samples": of("num_generations_eval") or 0,
        "distributed.timeout_s": float(of("ddp_timeout")),
        "device": "cpu" if of("use_cpu") else "auto",
        "compute": {None: "auto", True: "bfloat16", False: "float32"}[of("bf16")],
        "track": _trackers(of),
    }
    if of("use_vllm"):
        settings |= _servers(of, kind)
        notes.append("vLLM servers are started with gruppo serve in place of trl vllm-serve")
    if not str(of("optim")).startswith("adamw_torch"):
        raise refusal("optim", of("optim"))
    if has_evaluation:
        notes.append(
            "evaluation is greedy, one completion a prompt, and before and after training too"
        )
    if of("data_seed") is not None or of("shuffle_dataset") is not True:
        raise refusal("data_seed" if of("shuffle_dataset") else "shuffle_dataset", of("data_seed"))
    return settings, notes


def _learning_rate(of: Callable[[str], Any]) -> dict[str, Any]:
    """The decay of the learning rate, and what is left of it at the end."""
    decay, last = of("lr_scheduler_type"), 0.0
    kwargs = dict(of("lr_scheduler_kwargs") or {})
    if decay not in DECAYS:
        raise refusal("lr_scheduler_type", decay, f"it needs one of {', '.join(DECAYS)}")
    if decay == "cosine_with_min_lr":
        last = kwargs.pop("min_lr_rate", None)
        last = last or kwargs.pop("min_lr", 0.0) / (of("learning_rate") or 1.0)
    if kwargs:
        raise refusal("lr_scheduler_kwargs", kwargs)
    return {"optim.decay": DECAYS[decay], "optim.final_lr_frac": float(last)}


def _trackers(of: Callable[[str], Any]) -> tuple[str, ...]:
    trackers = of("report_to") or []
    trackers = [trackers] if isinstance(trackers, str) else list(trackers)
    for name in trackers:
        if name not in (*TRACKERS, "none", "all"):
            raise refusal("report_to", name, f"it needs one of {', '.join(TRACKERS)} or none")
    return tuple(name for name in trackers if name in TRACKERS)


def _servers(of: Callable[[str], Any], kind: str) -> dict[str, Any]:
    """The vLLM servers, and the correction for their arithmetic."""
    if of("vllm_mode") != "server":
        near = "vLLM runs in servers of its own: gruppo serve MODEL, vllm_mode='server'"
        raise refusal("vllm_mode", of("vllm_mode"), near)
    own = f"http://{of('vllm_server_host')}:{of('vllm_server_port')}"
    url = (of("vllm_server_base_url") or own).replace("//0.0.0.0", "//127.0.0.1")
    settings: dict[str, Any] = {"engine.kind": "vllm", "engine.urls": (url,)}
    # RLOO of TRL corrects for no sampler, and its config has none of these arguments.
    if kind == "GRPO" and of("vllm_importance_sampling_correction"):
        level, _, correction = of("vllm_importance_sampling_mode").partition("_")
        high = of("vllm_importance_sampling_cap") or of("vllm_importance_sampling_clip_max")
        settings |= {
            "objective.correction": correction,
            "objective.correction_level": level,
            "objective.correction_low": float(of("vllm_importance_sampling_clip_min") or 0.0),
            "objective.correction_high": 1e6 if high is None else float(high),
        }
    return settings


def _direct(of: Callable[[str], Any], names: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Arguments whose value is that of one option; one that nothing reads is refused, unless it has
    its default."""
    for name, default in names.items():
        known = name in DIRECT or name in TRANSLATED or name in WITHOUT_EFFECT
        if not known and of(name) not in (default, None, [], {}, ""):
            raise refusal(name, of(name))
    direct = [name for name in DIRECT if name in names and name not in TRANSLATED]
    for name in direct:
        remark = next(
            option.remark
            for option in peer_options.lookup("trl", name)
            if option.ours == DIRECT[name]
        )
        if remark and of(name) != names[name]:
            notes.append(f"{name}: {remark}")
    settings = {DIRECT[name]: of(name) for name in direct}
    if settings["scoring.weights"] is not None:
        settings["scoring.weights"] = tuple(map(float, settings["scoring.weights"]))
    return settings


def _steps(
    of: Callable[[str], Any], rows: int, notes: list[str], *, has_evaluation: bool
) -> dict[str, Any]:
    """Batches, and what is counted in steps: of a generation and its updates here, of the optimizer
    in TRL."""
    # A step here is a generation; there it is an optimizer step, of which a generation has
    # `updates`.
    generated, accumulated = of("steps_per_generation"), of("gradient_accumulation_steps")
    groups = of("generation_batch_size") // of("num_generations")
    if generated % accumulated:
        raise GruppoError(f"""steps_per_generation={generated} is no multiple of
            gradient_accumulation_steps={accumulated}, so an optimizer step would mix two
            generations. Set one to a divisor of the other.""")
    minibatches = generated // accumulated
    updates = minibatches * of("num_iterations")
    per_epoch = max(rows // groups, 1)
    is_limited = of("max_steps") > 0  # -1 there: by epochs
    steps = math.ceil(
        of("max_steps") / updates if is_limited else of("num_train_epochs") * per_epoch
    )

    def in_steps(name: str) -> int:
        """A count of optimizer steps, or a fraction of all of them, in steps of ours."""
        value = float(of(name))
        return max(1, round(value * steps) if 0 < value < 1 else math.ceil(value / updates))

    def every(strategy: str, name: str) -> int:
        return (
            in_steps(name)
            if of(strategy) == "steps"
            else per_epoch
            if of(strategy) == "epoch"
            else 0
        )

    if of("save_strategy") not in ("no", "steps", "epoch"):
        raise refusal(
            "save_strategy", of("save_strategy"), "the best weights are kept with back_off__metric"
        )
    # As in transformers, eval_steps is logging_steps where it is not set.
    evaluated = every(
        "eval_strategy", "logging_steps" if of("eval_steps") is None else "eval_steps"
    )
    settings: dict[str, Any] = {
        "steps": steps,
        "rollout.prompts": groups,
        "optim.minibatches": minibatches,
        "optim.warmup_steps": in_steps("warmup_steps") if of("warmup_steps") else 0,
        "saving.every": every("save_strategy", "save_steps"),
        "evaluation.every": evaluated if has_evaluation else 0,
    }
    if of("sync_ref_model"):
        settings |= {
            "reference.kind": "mixed",
            "reference.update_rate": of("ref_model_mixup_alpha"),
        }
        settings["reference.update_every"] = math.ceil(of("ref_model_sync_steps") / updates)
    if updates > 1:
        names = "max_steps, warmup_steps, save_steps, eval_steps and the learning rate go by"
        notes.append(
            f"a step here is a generation and its {updates} optimizer steps: {names} {steps} such "
            f"steps"
        )
    if minibatches > 1:
        text = "a loss that is averaged over tokens is averaged over those of each optimizer step"
        notes.append(f"{text}, there of the generation")
    if of("warmup_steps"):
        notes.append(
            "the warmup ends at the full learning rate, there one step later: its first step is "
            "not 0"
        )
    return settings


def _objective(of: Callable[[str], Any], kind: str, notes: list[str]) -> dict[str, Any]:
    """The objective, the KL and the entropy bonus."""
    beta = float(of("beta"))
    if kind == "RLOO":
        if of("num_iterations") > 1 or of("steps_per_generation") > of(
            "gradient_accumulation_steps"
        ):
            name = "num_iterations" if of("num_iterations") > 1 else "steps_per_generation"
            raise refusal(
                name, of(name), "RLOO takes one optimizer step per generation, with a ratio of 1"
            )
        own: dict[str, Any] = {"kl": "k1", "kl_in": "reward"} if beta else {}
        preset = serialization.to_dict(Config(objective=PRESETS["rloo"]))["objective"]
        return {f"objective.{name}": value for name, value in (preset | own).items()} | {
            "stage.kl_coef": beta
        }
    loss, choices = of("loss_type"), dict(LOSSES)
    # over one micro-batch per update on one process, its tokens are those of the update
    if loss == "bnpo" and of("gradient_accumulation_steps") == 1 and dist.world_size() == 1:
        choices["bnpo"] = choices["dapo"]
    if loss not in choices:
        raise refusal("loss_type", loss, f"it needs one of {', '.join(choices)}")
    choice, level = choices[loss], of("importance_sampling_level")
    if choice.get("ratio", level) != level:
        raise refusal("loss_type", loss, f"with importance_sampling_level={choice['ratio']!r}")
    if of("scale_rewards") not in SCALES:
        raise refusal("scale_rewards", of("scale_rewards"), f"it needs one of {', '.join(SCALES)}")
    low, high = (
        float(of("epsilon")),
        float(of("epsilon") if of("epsilon_high") is None else of("epsilon_high")),
    )
    # CISPO: TRL's epsilon_high is the cap itself, ours the distance from 1; a low bound of 1 never
    # acts.
    if loss == "cispo":
        if high <= 1:
            raise GruppoError(f"""loss_type='cispo' caps the ratio at epsilon_high, which is
                {high:g}: on-policy rows would learn with {high:g} of their gradient, as in TRL. Set
                epsilon_high=5.0 (MiniMax-M1).""")
        low, high = 1.0, high - 1
    objective = {
        "surrogate": choice["surrogate"],
        "average": choice["average"],
        "scale": of("scale_rewards"),
        "clip_low": low,
        "clip_high": high,
        "dual_clip": float(of("delta") or 0.0) if choice["surrogate"] == "clip" else 0.0,
        "kl_gradient": "unbiased" if of("use_bias_correction_kl") else "naive",
        "correction": "none",  # chosen, or servers would bring a correction that is none of TRL's
    }
    entropy: Any = float(of("entropy_coef"))
    if of("use_adaptive_entropy"):
        target, delta = of("entropy_target"), of("entropy_coef_delta")
        entropy = f"adaptive:{entropy:g},target={target:g},delta={delta:g}"
        notes.append(
            "use_adaptive_entropy: the coefficient has no upper bound; there entropy_coef_max"
        )
    if entropy:
        notes.append(
            "entropy_coef: averaged like the loss; there over the tokens of each micro-batch"
        )
    if of("multi_objective_aggregation") == "normalize_then_sum" and of("scale_rewards") != "group":
        notes.append(
            "scale_rewards applies to each reward; there it is ignored with normalize_then_sum"
        )
    settings = {f"objective.{name}": value for name, value in objective.items()}
    return settings | {"stage.kl_coef": beta, "stage.entropy_coef": entropy}
