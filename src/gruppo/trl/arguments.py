"""``GRPOConfig`` and ``RLOOConfig`` with the names and defaults of TRL 1.16 and the TrainingArguments below them."""

from __future__ import annotations

import difflib
import os
from dataclasses import field, fields, make_dataclass
from typing import Any

from gruppo.config import peer_options
from gruppo.types import GruppoError

_BOTH: dict[Any, dict[str, Any]] = {
    str | None: {
        **dict.fromkeys(
            ("output_dir", "run_name", "resume_from_checkpoint", "optim_args", "hub_model_id", "hub_token")
        ),
        **dict.fromkeys(("hub_revision", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")),
        **dict.fromkeys(
            ("torch_compile_backend", "torch_compile_mode", "metric_for_best_model", "fsdp", "ddp_backend")
        ),
        **dict.fromkeys(("dataloader_multiprocessing_context", "cache_implementation", "vllm_server_base_url")),
        **dict.fromkeys(("vllm_structured_outputs_regex",)),
    },
    int: {
        **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": -1, "seed": 42, "top_k": 0},
        **{"per_device_eval_batch_size": 8, "dataloader_num_workers": 0, "ddp_timeout": 1800, "local_rank": -1},
        **{"num_iterations": 1, "ref_model_sync_steps": 512, "max_completion_length": 512},
        **{"vllm_server_port": 8000, "vllm_group_port": 51216, "vllm_tensor_parallel_size": 1},
    },
    float: {
        **{"learning_rate": 1e-6, "num_train_epochs": 3.0, "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9},
        **{"adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "label_smoothing_factor": 0.0},
        **{"logging_steps": 10, "eval_delay": 0, "save_steps": 500, "temperature": 1.0, "top_p": 1.0},
        **{"repetition_penalty": 1.0, "epsilon": 0.2, "ref_model_mixup_alpha": 0.6},
        **{"vllm_server_timeout": 240.0, "vllm_gpu_memory_utilization": 0.3},
    },
    str: {
        **{"lr_scheduler_type": "linear", "optim": "adamw_torch_fused", "logging_strategy": "steps"},
        **{"eval_strategy": "no", "save_strategy": "steps", "hub_strategy": "every_save", "log_level": "passive"},
        **{"log_level_replica": "warning", "project": "huggingface", "train_sampling_strategy": "random", "debug": ""},
        **{"length_column_name": "length", "include_num_input_tokens_seen": "no", "pad_to_multiple_of": "auto"},
        **{"vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_server_host": "0.0.0.0"},
    },
    None | str | list[str]: {"report_to": "none", "optim_target_modules": None},
    dict | str | None: {
        **dict.fromkeys(
            ("lr_scheduler_kwargs", "accelerator_config", "deepspeed", "fsdp_config", "parallelism_config")
        ),
        **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "liger_kernel_config")),
        **dict.fromkeys(("model_init_kwargs", "generation_kwargs", "chat_template_kwargs")),
        **dict.fromkeys(("transformers_continuous_batching_config",)),
    },
    bool: {
        **dict.fromkeys(("average_tokens_across_devices", "gradient_checkpointing", "log_on_each_node"), True),
        **dict.fromkeys(("logging_nan_inf_filter", "eval_do_concat_batches", "dataloader_pin_memory"), True),
        **dict.fromkeys(("dataloader_in_order", "skip_memory_metrics", "ds3_gather_for_generation"), True),
        **dict.fromkeys(("shuffle_dataset", "log_multimodal"), True),
        **dict.fromkeys(("fp16", "bf16_full_eval", "fp16_full_eval", "torch_compile", "use_liger_kernel"), False),
        **dict.fromkeys(("use_cache", "auto_find_batch_size", "logging_first_step", "prediction_loss_only"), False),
        **dict.fromkeys(("eval_on_start", "eval_use_gather_object", "batch_eval_metrics", "save_only_model"), False),
        **dict.fromkeys(("save_on_each_node", "enable_jit_checkpoint", "push_to_hub", "hub_always_push"), False),
        **dict.fromkeys(("load_best_model_at_end", "ignore_data_skip", "full_determinism", "use_cpu"), False),
        **dict.fromkeys(("restore_callback_states_from_checkpoint", "dataloader_drop_last", "do_train"), False),
        **dict.fromkeys(("dataloader_persistent_workers", "do_eval", "do_predict", "remove_unused_columns"), False),
        **dict.fromkeys(("trust_remote_code", "disable_dropout", "use_vllm", "vllm_enable_sleep_mode"), False),
        **dict.fromkeys(("mask_truncated_completions", "sync_ref_model", "log_completions"), False),
        **dict.fromkeys(("log_unique_prompts", "use_transformers_continuous_batching"), False),
        **dict.fromkeys(("use_transformers_paged",), False),
    },
    bool | None: {
        **dict.fromkeys(("bf16", "tf32", "activation_checkpointing", "disable_tqdm", "hub_private_repo")),
        **dict.fromkeys(("greater_is_better", "ddp_find_unused_parameters", "ddp_broadcast_buffers")),
        **dict.fromkeys(("ddp_static_graph",)),
    },
    float | None: dict.fromkeys(("eval_steps", "neftune_noise_alpha", "router_aux_loss_coef", "min_p", "epsilon_high")),
    int | None: {
        **dict.fromkeys(("torch_empty_cache_steps", "eval_accumulation_steps", "save_total_limit", "data_seed")),
        **dict.fromkeys(("ddp_bucket_cap_mb", "dataloader_prefetch_factor", "num_generations_eval")),
        **dict.fromkeys(("generation_batch_size", "steps_per_generation", "vllm_max_model_length")),
        **dict.fromkeys(("num_completions_to_print",)),
    },
    list[str] | None: {"label_names": None, "include_for_metrics": None},
    list[float] | None: {"reward_weights": None},
}
_GRPO: dict[Any, dict[str, Any]] = {
    int: {"num_generations": 8},
    float: {
        **{"beta": 0.0, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "top_entropy_quantile": 1.0},
        **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
        **{"entropy_coef": 0.0, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005},
        **{"entropy_target": 0.2},
    },
    str: {
        **{"loss_type": "dapo", "importance_sampling_level": "token", "scale_rewards": "group"},
        **{"multi_objective_aggregation": "sum_then_normalize", "vllm_importance_sampling_mode": "sequence_mask"},
    },
    bool: {
        **{"use_bias_correction_kl": True, "vllm_importance_sampling_correction": True},
        **{"use_adaptive_entropy": False, "cast_lm_head_to_fp32": False},
    },
    float | None: {
        **{"delta": None, "off_policy_mask_threshold": None, "vllm_importance_sampling_clip_max": 3.0},
        **{"vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_cap": None},
    },
    int | None: {"max_tool_calling_iterations": None},
    str | None: {"log_completions_hub_repo": None},
}
_RLOO: dict[Any, dict[str, Any]] = {
    int: {"num_generations": 2},
    float: {"beta": 0.05},
    bool: {"normalize_advantages": False},
    list[float] | None: {"reward_clip_range": None},
}


class TrlArguments:
    """What both configs do beyond holding values: refuse unknown names, and derive the generation batch as TRL does."""

    def __new__(cls, *_: Any, **arguments: Any) -> Any:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if unknown := [name for name in arguments if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            ours = "" if near else peer_options.hint(unknown[0], lambda name: name.replace(".", "__"))
            ours = f" {ours}" if ours else ""
            raise GruppoError(f"{cls.__name__} of TRL 1.16 has no argument {unknown[0]!r}.{hint}{ours}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        args: Any = self
        for name in ("lr_scheduler_type", "eval_strategy", "save_strategy", "logging_strategy", "optim"):
            setattr(args, name, getattr(getattr(args, name), "value", getattr(args, name)))  # an enum of transformers
        if hasattr(args, "scale_rewards"):
            args.scale_rewards = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
        rows = args.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", 1))
        if args.generation_batch_size is not None and args.steps_per_generation is not None:
            raise GruppoError("generation_batch_size and steps_per_generation are both set; leave one of them out.")
        if args.generation_batch_size is None:
            args.steps_per_generation = args.steps_per_generation or args.gradient_accumulation_steps
            args.generation_batch_size = rows * args.steps_per_generation
        elif args.generation_batch_size % rows:
            raise GruppoError(
                f"generation_batch_size={args.generation_batch_size} is no multiple of the {rows} rows of "
                "per_device_train_batch_size on all processes, as in TRL. Set one of the two to a divisor of the other."
            )
        else:
            args.steps_per_generation = args.generation_batch_size // rows
        if args.generation_batch_size % args.num_generations:
            raise GruppoError(
                f"a generation batch of {args.generation_batch_size} rows is no multiple of "
                f"num_generations={args.num_generations}, as in TRL. Set per_device_train_batch_size to one."
            )

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))


def _arguments(name: str, *tables: dict[Any, dict[str, Any]]) -> Any:
    """A dataclass of all values in the tables, which a parser of TRL or transformers reads too."""
    values = [
        (key, kind, field(default=default)) for t in tables for kind, own in t.items() for key, default in own.items()
    ]
    made = make_dataclass(name, values, bases=(TrlArguments,))
    made.__module__, made.__doc__ = __name__, f"Arguments of TRL 1.16's {name}, with its defaults."
    return made


GRPOConfig: Any = _arguments("GRPOConfig", _BOTH, _GRPO)
RLOOConfig: Any = _arguments("RLOOConfig", _BOTH, _RLOO)
