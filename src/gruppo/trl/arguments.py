"""``GRPOConfig``: transformers' TrainingArguments with the fields and defaults that TRL 1.16
adds."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any

from transformers import TrainingArguments

from gruppo.config import peer_options
from gruppo.errors import GruppoError, as_argument

SCALES: dict[Any, str] = {True: "group", False: "none"}
"""Former values of ``scale_rewards``, which TRL still takes."""


@dataclass
class GRPOConfig(TrainingArguments):
    """Arguments of TRL 1.16's GRPOConfig, with its defaults."""

    learning_rate: float = 1e-6
    bf16: bool | None = None
    gradient_checkpointing: bool = True
    logging_steps: float = 10
    remove_unused_columns: bool = False
    model_init_kwargs: dict | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    num_generations: int = 8
    num_generations_eval: int | None = None
    max_completion_length: int = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool = True
    pad_to_multiple_of: str = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict | str | None = None
    chat_template_kwargs: dict | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_weights: list[float] | None = None
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict | str | None = None
    use_transformers_paged: bool = False
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    use_bias_correction_kl: bool = True
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    off_policy_mask_threshold: float | None = None
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None
    cast_lm_head_to_fp32: bool = False
    log_completions_hub_repo: str | None = None

    def __new__(cls, *_: Any, **arguments: Any) -> Any:
        """Refuse an unknown name with the nearest one; a dataclass's own TypeError names none."""
        known = [f.name for f in fields(cls)]
        for name in arguments:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]}?" if near else peer_options.hint(name, as_argument)
                problem = f"{cls.__name__} of TRL 1.16 has no argument {name!r}. {hint}"
                raise GruppoError(problem.rstrip())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Derive the generation batch as TRL does, without the devices that transformers opens."""
        self.scale_rewards = SCALES.get(self.scale_rewards, self.scale_rewards)
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise GruppoError(
                "generation_batch_size and steps_per_generation are both set; leave one of them "
                "out."
            )
        # A generation is steps_per_generation micro-batches of each process.
        rows = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is None:
            accumulated = self.gradient_accumulation_steps
            self.steps_per_generation = self.steps_per_generation or accumulated
            self.generation_batch_size = rows * self.steps_per_generation
        elif self.generation_batch_size % rows:
            raise GruppoError(f"""generation_batch_size={self.generation_batch_size} is not a
                multiple of the {rows} rows of per_device_train_batch_size on all processes. Set one
                of the two to a divisor of the other.""")
        else:
            self.steps_per_generation = self.generation_batch_size // rows
        if self.generation_batch_size % self.num_generations:
            raise GruppoError(f"""a generation batch of {self.generation_batch_size} rows is not a
                multiple of num_generations={self.num_generations}. Set per_device_train_batch_size
                to one.""")

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))
