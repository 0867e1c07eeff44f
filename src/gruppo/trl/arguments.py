"""``GRPOConfig`` and ``RLOOConfig`` with the names and defaults of TRL 1.16 and the
TrainingArguments below them."""

from __future__ import annotations

import ast
import difflib
import os
from dataclasses import field, fields, make_dataclass
from typing import Any

from gruppo.config import peer_options
from gruppo.errors import GruppoError, as_argument

_BOTH: dict[Any, str] = {
    str | None: """
        output_dir run_name resume_from_checkpoint optim_args hub_model_id hub_token hub_revision
        trackio_space_id trackio_bucket_id trackio_static_space_id torch_compile_backend
        torch_compile_mode metric_for_best_model fsdp ddp_backend dataloader_multiprocessing_context
        cache_implementation vllm_server_base_url vllm_structured_outputs_regex
    """,
    int: """
        per_device_train_batch_size=8 gradient_accumulation_steps=1 max_steps=-1 seed=42 top_k=0
        per_device_eval_batch_size=8 dataloader_num_workers=0 ddp_timeout=1800 local_rank=-1
        num_iterations=1 ref_model_sync_steps=512 max_completion_length=512 vllm_server_port=8000
        vllm_group_port=51216 vllm_tensor_parallel_size=1
    """,
    float: """
        learning_rate=1e-06 num_train_epochs=3.0 warmup_steps=0 weight_decay=0.0 adam_beta1=0.9
        adam_beta2=0.999 adam_epsilon=1e-08 max_grad_norm=1.0 label_smoothing_factor=0.0
        logging_steps=10 eval_delay=0 save_steps=500 temperature=1.0 top_p=1.0
        repetition_penalty=1.0 epsilon=0.2 ref_model_mixup_alpha=0.6 vllm_server_timeout=240.0
        vllm_gpu_memory_utilization=0.3
    """,
    str: """
        lr_scheduler_type=linear optim=adamw_torch_fused logging_strategy=steps eval_strategy=no
        save_strategy=steps hub_strategy=every_save log_level=passive log_level_replica=warning
        project=huggingface train_sampling_strategy=random debug= length_column_name=length
        include_num_input_tokens_seen=no pad_to_multiple_of=auto vllm_mode=colocate
        vllm_model_impl=vllm vllm_server_host=0.0.0.0
    """,
    None | str | list[str]: "report_to=none optim_target_modules",
    dict | str | None: """
        lr_scheduler_kwargs accelerator_config deepspeed fsdp_config parallelism_config
        activation_checkpointing_kwargs gradient_checkpointing_kwargs liger_kernel_config
        model_init_kwargs generation_kwargs chat_template_kwargs
        transformers_continuous_batching_config
    """,
    bool: """
        average_tokens_across_devices=True gradient_checkpointing=True log_on_each_node=True
        logging_nan_inf_filter=True eval_do_concat_batches=True dataloader_pin_memory=True
        dataloader_in_order=True skip_memory_metrics=True ds3_gather_for_generation=True
        shuffle_dataset=True log_multimodal=True fp16 bf16_full_eval fp16_full_eval torch_compile
        use_liger_kernel use_cache auto_find_batch_size logging_first_step prediction_loss_only
        eval_on_start eval_use_gather_object batch_eval_metrics save_only_model save_on_each_node
        enable_jit_checkpoint push_to_hub hub_always_push load_best_model_at_end ignore_data_skip
        full_determinism use_cpu restore_callback_states_from_checkpoint dataloader_drop_last
        do_train dataloader_persistent_workers do_eval do_predict remove_unused_columns
        trust_remote_code disable_dropout use_vllm vllm_enable_sleep_mode mask_truncated_completions
        sync_ref_model log_completions log_unique_prompts use_transformers_continuous_batching
        use_transformers_paged
    """,
    bool | None: """
        bf16 tf32 activation_checkpointing disable_tqdm hub_private_repo greater_is_better
        ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph
    """,
    float | None: "eval_steps neftune_noise_alpha router_aux_loss_coef min_p epsilon_high",
    int | None: """
        torch_empty_cache_steps eval_accumulation_steps save_total_limit data_seed ddp_bucket_cap_mb
        dataloader_prefetch_factor num_generations_eval generation_batch_size steps_per_generation
        vllm_max_model_length num_completions_to_print
    """,
    list[str] | None: "label_names include_for_metrics",
    list[float] | None: "reward_weights",
}
"""Of both, by type: NAME=DEFAULT, or NAME alone where the default is None, or False for a flag."""
_GRPO: dict[Any, str] = {
    int: "num_generations=8",
    float: """
        beta=0.0 sapo_temperature_neg=1.05 sapo_temperature_pos=1.0 top_entropy_quantile=1.0
        vespo_k_pos=2.0 vespo_lambda_pos=3.0 vespo_k_neg=3.0 vespo_lambda_neg=2.0 entropy_coef=0.0
        entropy_coef_min=0.0 entropy_coef_max=1.0 entropy_coef_delta=0.005 entropy_target=0.2
    """,
    str: """
        loss_type=dapo importance_sampling_level=token scale_rewards=group
        multi_objective_aggregation=sum_then_normalize vllm_importance_sampling_mode=sequence_mask
    """,
    bool: """
        use_bias_correction_kl=True vllm_importance_sampling_correction=True use_adaptive_entropy
        cast_lm_head_to_fp32
    """,
    float | None: """
        delta off_policy_mask_threshold vllm_importance_sampling_clip_max=3.0
        vllm_importance_sampling_clip_min vllm_importance_sampling_cap
    """,
    int | None: "max_tool_calling_iterations",
    str | None: "log_completions_hub_repo",
}
_RLOO: dict[Any, str] = {
    int: "num_generations=2",
    float: "beta=0.05",
    bool: "normalize_advantages",
    list[float] | None: "reward_clip_range",
}


class TrlArguments:
    """What both configs do beyond holding values: refuse unknown names, and derive the generation
    batch as TRL does."""

    def __new__(cls, *_: Any, **arguments: Any) -> Any:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        # Here and not in __init__, which a dataclass writes itself and whose TypeError names no
        # alternative.
        if unknown := [name for name in arguments if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, 1)
            ours = (
                f"Did you mean {near[0]}?" if near else peer_options.hint(unknown[0], as_argument)
            )
            raise GruppoError(
                f"{cls.__name__} of TRL 1.16 has no argument {unknown[0]!r}. {ours}".rstrip()
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        args: Any = self
        for name in (
            "lr_scheduler_type",
            "eval_strategy",
            "save_strategy",
            "logging_strategy",
            "optim",
        ):
            setattr(
                args, name, getattr(getattr(args, name), "value", getattr(args, name))
            )  # an enum of transformers
        if hasattr(
            args, "scale_rewards"
        ):  # True and False were its values before, and TRL still takes them
            args.scale_rewards = {True: "group", False: "none"}.get(
                args.scale_rewards, args.scale_rewards
            )
        if args.generation_batch_size is not None and args.steps_per_generation is not None:
            raise GruppoError(
                "generation_batch_size and steps_per_generation are both set; leave one of them "
                "out."
            )
        # As in TRL: a generation is steps_per_generation micro-batches of each process.
        rows = args.per_device_train_batch_size * self.world_size
        if args.generation_batch_size is None:
            args.steps_per_generation = (
                args.steps_per_generation or args.gradient_accumulation_steps
            )
            args.generation_batch_size = rows * args.steps_per_generation
        elif args.generation_batch_size % rows:
            raise GruppoError(f"""generation_batch_size={args.generation_batch_size} is no multiple
                of the {rows} rows of per_device_train_batch_size on all processes, as in TRL. Set
                one of the two to a divisor of the other.""")
        else:
            args.steps_per_generation = args.generation_batch_size // rows
        if args.generation_batch_size % args.num_generations:
            raise GruppoError(f"""a generation batch of {args.generation_batch_size} rows is no
                multiple of num_generations={args.num_generations}, as in TRL. Set
                per_device_train_batch_size to one.""")

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))


def _arguments(name: str, *tables: dict[Any, str]) -> Any:
    """A dataclass of all values in the tables, which a parser of TRL or transformers reads too."""
    values = []
    for kind, words in (item for table in tables for item in table.items()):
        for argument, has_default, text in (word.partition("=") for word in words.split()):
            default: Any = False if kind is bool else None
            if has_default:  # numbers keep their type: save_steps is 500, not 500.0, as in TRL
                default = text if kind in (str, None | str | list[str]) else ast.literal_eval(text)
            values.append((argument, kind, field(default=default)))
    made = make_dataclass(name, values, bases=(TrlArguments,))
    made.__module__, made.__doc__ = __name__, f"Arguments of TRL 1.16's {name}, with its defaults."
    return made


GRPOConfig: Any = _arguments("GRPOConfig", _BOTH, _GRPO)
RLOOConfig: Any = _arguments("RLOOConfig", _BOTH, _RLOO)
