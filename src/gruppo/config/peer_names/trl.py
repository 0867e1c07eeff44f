"""TRL 1.16: GRPOConfig, RLOOConfig, what both have of transformers' TrainingArguments, and the PPOConfig of before."""

from __future__ import annotations

from gruppo.config.peer_names import words
from gruppo.config.peer_names.named import Named, of_part

ADAPTIVE = 'as a text: "adaptive:FROM,target=NATS,delta=STEP"'

GRPO = (
    Named(
        "loss_type",
        "objective.surrogate objective.average",
        "a preset sets the advantage too",
        there=words.trl_loss_type,
    ),
    Named("epsilon", "objective.clip_low", there=words.clip_low_of_ratio),
    Named("epsilon_high", "objective.clip_high", "unset there, it is epsilon", there=words.trl_clip_high),
    Named("delta", "objective.dual_clip", there=words.trl_delta),
    Named("importance_sampling_level", "objective.ratio"),
    Named("sapo_temperature_pos", "objective.tau_pos"),
    Named("sapo_temperature_neg", "objective.tau_neg"),
    Named(
        "vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg",
        near="objective.surrogate",
        note="of vespo; fixed at 2, 3, 3 and 2, TRL's defaults",
    ),
    Named("beta", "stage.kl_coef", "of the objective.kl estimator, k3 there"),
    Named("use_bias_correction_kl", "objective.kl_gradient", there=words.is_unbiased),
    Named("entropy_coef", "stage.entropy_coef", "averaged as the loss is; there always over tokens"),
    Named("use_adaptive_entropy, entropy_target, entropy_coef_delta", "stage.entropy_coef", ADAPTIVE),
    Named("entropy_coef_min", near="stage.entropy_coef", note="an adaptive one is never below 0"),
    Named("entropy_coef_max", near="stage.entropy_coef", note="an adaptive one has no upper bound"),
    Named("top_entropy_quantile", near="stage.entropy_coef", note="every kept action learns, whatever its entropy"),
    Named(
        "off_policy_mask_threshold",
        near="objective.kl_mask",
        note="of single actions that would move further; there of whole rows with a negative advantage",
    ),
    Named("scale_rewards", "objective.scale", there=words.trl_scale),
    Named("reward_weights", "scoring.weights", "None: all 1"),
    Named("multi_objective_aggregation", "objective.combine", "normalize_then_sum ignores scale_rewards there"),
    Named(
        "mask_truncated_completions",
        "objective.mask_truncated",
        "such rows leave the denominator; there, under averages of rows, they stay in it",
    ),
    Named("num_generations", "rollout.group_size"),
    Named("generation_batch_size", "rollout.prompts rollout.group_size", "rows", there=words.rows),
    Named("num_iterations", "optim.epochs"),
    Named("steps_per_generation", "optim.minibatches", "over gradient_accumulation_steps"),
    Named("max_completion_length", "rollout.max_new_tokens"),
    Named("temperature", "rollout.temperature"),
    Named("top_k", "rollout.top_k", "sampled and scored; there only sampled"),
    Named("top_p", "rollout.top_p", "sampled and scored; there only sampled"),
    Named("min_p", near="rollout.top_p", note="what is sampled would not be what is scored"),
    Named(
        "repetition_penalty",
        near="reward",
        note="of the sampler, which would no longer be the policy; the reward repetition_penalty is in the gradient",
    ),
    Named("generation_kwargs, cache_implementation", near="rollout.temperature", note="the sampler is the policy"),
    Named("sync_ref_model", "reference.kind", there=words.is_mixed),
    Named("ref_model_mixup_alpha", "reference.update_rate", "with --reference.kind mixed"),
    Named(
        "ref_model_sync_steps",
        "reference.update_every",
        "with --reference.kind mixed; steps are rounds, there optimiser steps",
    ),
    Named("vllm_importance_sampling_correction", "objective.correction", there=words.trl_correction),
    Named(
        "vllm_importance_sampling_mode",
        "objective.correction objective.correction_level",
        there=words.trl_correction_mode,
    ),
    Named("vllm_importance_sampling_clip_max, vllm_importance_sampling_cap", "objective.correction_high"),
    Named("vllm_importance_sampling_clip_min", "objective.correction_low", "None for 0"),
    Named("disable_dropout", note="always off: sampled and scored rows come from one network"),
    Named("router_aux_loss_coef", note="no loss that balances experts"),
    Named("cast_lm_head_to_fp32", near="compute", note="log-probs are taken in float32 in any case"),
    Named("model_init_kwargs", near="model", note="a policy of gruppo.from_pretrained may be given in Python"),
    Named("trust_remote_code", "trust_remote_code"),
    Named("chat_template_kwargs", near="model", note="the template of the model's folder is used as it is"),
    Named(
        "max_tool_calling_iterations",
        near="environment.turns",
        note="answers, one more than calls; a tool is a function that replies, --environment.reply",
    ),
    Named("num_generations_eval", near="evaluation.prompts", note="evaluations are greedy: one answer a prompt"),
    Named("shuffle_dataset", near="seed", note="always shuffled, by the seed"),
    Named("remove_unused_columns", near="prompts.column", note="every column reaches the rewards"),
    Named("pad_to_multiple_of", near="optim.token_budget", note="nothing is padded where rows are packed"),
    Named(
        "use_vllm, vllm_mode, vllm_model_impl, vllm_enable_sleep_mode, vllm_structured_outputs_regex, "
        "vllm_server_base_url, vllm_server_host, vllm_server_port, vllm_server_timeout, vllm_group_port, "
        "vllm_gpu_memory_utilization, vllm_max_model_length, vllm_tensor_parallel_size",
        note="the sampler is gruppo's own, in the process that trains",
    ),
    Named(
        "use_transformers_paged, use_transformers_continuous_batching, transformers_continuous_batching_config",
        note="rows that have ended leave the batch, and a prompt is held once for its group, in any case",
    ),
    Named("ds3_gather_for_generation", note="no DeepSpeed"),
    Named(
        "log_completions, num_completions_to_print",
        "show_samples_every",
        "on the screen; samples.jsonl has them in any case",
    ),
    Named("log_unique_prompts, log_multimodal", near="show_samples_every"),
    Named("log_completions_hub_repo", near="show_samples_every", note="nothing is sent anywhere"),
)

RLOO = (
    Named("beta", "stage.kl_coef", "with --objective.kl k1 --objective.kl-in reward"),
    Named("num_generations", "rollout.group_size", "2 there by default"),
    Named(
        "epsilon, epsilon_high",
        near="objective.clip_high",
        note="of whole rows' ratios; --objective rloo has none, and one update a batch: the gradient is the same",
    ),
    Named("num_iterations", "optim.epochs", "1 alone under --objective rloo"),
    Named("normalize_advantages", near="objective.whiten", note="over rows there, over actions here"),
    Named("reward_clip_range", near="objective.adv_clip", note="of advantages; a reward function may clip itself"),
)

PPO = (
    Named("num_ppo_epochs", "optim.epochs", "4 there by default"),
    Named("num_mini_batches", "optim.minibatches"),
    Named("kl_coef", "stage.kl_coef", "0.05 there by default"),
    Named("kl_estimator", "objective.kl", "k1 alone in the reward: k3's gradient there is 37 to 125% off"),
    Named("cliprange", "objective.clip_low objective.clip_high"),
    Named("vf_coef", "stage.value_coef", "squared errors are halved on both sides"),
    Named("cliprange_value", "objective.value_clip"),
    Named("gamma", "objective.gamma"),
    Named("lam", "objective.lam"),
)

TRAINING = (
    Named("learning_rate", "optim.lr"),
    Named("lr_scheduler_type", "optim.decay", "linear there by default"),
    Named("warmup_steps", "optim.warmup_steps", "of rounds; there of optimiser steps"),
    Named("max_steps", "steps", "rounds; there optimiser steps", there=words.updates),
    Named("num_train_epochs", near="steps", note="a run is so many rounds, over however many passes of the data"),
    Named(
        "per_device_train_batch_size, gradient_accumulation_steps, auto_find_batch_size",
        near="optim.token_budget",
        note="memory alone decides; no gradient hangs on it. Rows of an update: --rollout.prompts x "
        "--rollout.group-size over --optim.minibatches",
    ),
    Named("max_grad_norm", "optim.max_grad_norm"),
    Named("weight_decay", "optim.weight_decay"),
    Named("adam_beta1, adam_beta2", "optim.betas"),
    Named("adam_epsilon", "optim.eps"),
    Named("optim", note="AdamW in float32"),
    Named("bf16, fp16, tf32", "compute", "master weights are float32; of fp16 there is none"),
    Named("gradient_checkpointing", near="optim.token_budget", note="log-probs are computed in blocks, smaller pieces"),
    Named("seed", "seed"),
    Named("output_dir, run_name", "runs_dir name"),
    Named("save_steps", "saving.every", "of rounds"),
    Named("save_total_limit", "saving.keep"),
    Named("resume_from_checkpoint", near="model", note="gruppo resume RUN, to the bit"),
    Named("eval_steps, eval_strategy", "evaluation.every", "of rounds; greedy, on held-out prompts"),
    Named(
        "logging_steps, report_to", near="show_samples_every", note="metrics.jsonl, metrics.csv and plots, each step"
    ),
    Named("peft_config", "lora.rank lora.alpha", "r and lora_alpha; an argument of the trainer there"),
    Named("reward_funcs", "reward", "called alike; an argument of the trainer there"),
    Named("train_dataset", "data", "an argument of the trainer there"),
    Named("model", "model"),
)


TRL = (
    *of_part("GRPOConfig", GRPO),
    *of_part("RLOOConfig, where it differs", RLOO),
    *of_part("PPOConfig, of before 1.16", PPO),
    *of_part("all of them", TRAINING),
)
