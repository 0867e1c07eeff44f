"""verl's yaml names: the objective's of 0.9.1, the rest as ``ppo_trainer.yaml`` printed it in 2025."""

from __future__ import annotations

from gruppo.config.peer_names import words
from gruppo.config.peer_names.named import Named, of_part

ACTOR = (
    Named(
        "clip_ratio_low, clip_ratio", "objective.clip_low", "clip_ratio alone is both", there=words.clip_low_of_ratio
    ),
    Named("clip_ratio_high", "objective.clip_high", there=words.clip_high_of_ratio),
    Named("clip_ratio_c", "objective.dual_clip", "always on there, 3 by default; 0 here: off"),
    Named("policy_loss.loss_mode", "objective.surrogate objective.ratio", there=words.verl_loss_mode),
    Named(
        "policy_loss.clip_cov_ratio, policy_loss.clip_cov_lb, policy_loss.clip_cov_ub, policy_loss.kl_cov_ratio, "
        "policy_loss.ppo_kl_coef",
        near="stage.entropy_coef",
        note="of clip_cov and kl_cov, which are against a falling entropy; neither is here",
    ),
    Named("tau_pos", "objective.tau_pos"),
    Named("tau_neg", "objective.tau_neg"),
    Named(
        "loss_agg_mode",
        "objective.average",
        "masked rows stay in the denominators of the seq modes there",
        there=words.verl_loss_agg_mode,
    ),
    Named("loss_scale_factor", "rollout.max_new_tokens", "of constant; null there is the width of the padded batch"),
    Named("entropy_coeff", "stage.entropy_coef"),
    Named("use_kl_loss", "stage.kl_coef objective.kl_in", there=words.kl_in_loss),
    Named("kl_loss_coef", "stage.kl_coef", "with --objective.kl-in loss; 0.001 there by default"),
    Named(
        "kl_loss_type",
        "objective.kl objective.kl_gradient",
        "naive is verl's gradient; kl, which is k1, has a gradient of zero there and is refused here",
        there=words.verl_kl_type,
    ),
    Named("ppo_epochs", "optim.epochs"),
    Named(
        "ppo_mini_batch_size",
        "optim.minibatches",
        "their number, not their size; the size in prompts",
        there=words.minibatch_prompts,
    ),
    Named(
        "ppo_micro_batch_size, ppo_micro_batch_size_per_gpu, use_dynamic_bsz",
        near="optim.token_budget",
        note="memory alone decides; no gradient hangs on it",
    ),
    Named("ppo_max_token_len_per_gpu", "optim.token_budget", "0 chooses"),
    Named("grad_clip, optim.clip_grad", "optim.max_grad_norm"),
    Named("shuffle", near="optim.minibatches", note="always, by the seed"),
    Named("optim.lr", "optim.lr"),
    Named("optim.weight_decay", "optim.weight_decay", "0.01 there by default"),
    Named("optim.betas", "optim.betas"),
    Named("optim.lr_warmup_steps", "optim.warmup_steps", "of rounds"),
    Named("optim.lr_warmup_steps_ratio", near="optim.warmup_steps", note="a number of rounds"),
    Named("optim.warmup_style, optim.lr_scheduler_type", "optim.decay"),
    Named("optim.min_lr_ratio", "optim.final_lr_frac"),
    Named("use_torch_compile, use_remove_padding, use_fused_kernels", note="packed, without padding"),
    Named("fsdp_config, strategy, ulysses_sequence_parallel_size", note="torchrun; every rank is whole"),
)

ROLLOUT = (
    Named("n", "rollout.group_size", "1 there by default"),
    Named("temperature", "rollout.temperature"),
    Named("top_k", "rollout.top_k", "0: all, which is -1 there; sampled and scored, there only sampled"),
    Named("top_p", "rollout.top_p", "sampled and scored; there only sampled"),
    Named("name, mode, gpu_memory_utilization, tensor_model_parallel_size", note="gruppo's own sampler"),
    Named("response_length", "rollout.max_new_tokens"),
    Named("prompt_length", near="rollout.max_new_tokens", note="a prompt that the context cannot hold is refused"),
    Named("do_sample", near="rollout.temperature", note="temperature 0 is never learned from"),
    Named("val_kwargs", near="evaluation.prompts", note="evaluations are greedy"),
    Named("multi_turn.max_assistant_turns", "environment.turns", "null there: no limit"),
    Named("multi_turn.max_user_turns", near="environment.turns", note="answers of the policy are counted"),
    Named(
        "multi_turn.enable, multi_turn.tool_config_path, multi_turn.interaction_config_path, multi_turn.format, "
        "multi_turn.max_parallel_calls, agent",
        near="environment.reply",
        note="a function that replies, and finds what it is asked for in the text itself",
    ),
    Named(
        "multi_turn.max_tool_response_length, multi_turn.tool_response_truncate_side",
        near="environment.max_reply_tokens",
        note="in tokens, cut at the end; there in characters",
    ),
    Named(
        "multi_turn.use_inference_chat_template, multi_turn.tokenization_sanity_check_mode",
        near="environment.reply",
        note="what was sampled is never encoded again",
    ),
    Named("calculate_log_probs", near="objective.correction", note="always reported"),
    Named(
        "log_prob_micro_batch_size_per_gpu, log_prob_max_token_len_per_gpu",
        near="optim.token_budget",
        note="the same pieces as in the update, so that the ratio starts at 1",
    ),
)

MODEL = (
    Named("path", "model"),
    Named("lora_rank", "lora.rank"),
    Named("lora_alpha", "lora.alpha"),
    Named("target_modules", "lora.targets", "none: all linear layers but the head"),
    Named("trust_remote_code", "trust_remote_code"),
    Named("enable_gradient_checkpointing, enable_activation_offload", near="optim.token_budget", note="smaller pieces"),
    Named("custom_chat_template, override_config", near="model", note="the model's folder is used as it is"),
)

DATA = (
    Named("train_files", "data", "a .jsonl, a folder or a Hugging Face name; parquet in a folder"),
    Named("val_files", "prompts.held_out_fraction", "held out of the same data, by hash"),
    Named("prompt_key", "prompts.column"),
    Named("reward_fn_key", near="reward", note="all columns reach every reward"),
    Named("train_batch_size", "rollout.prompts"),
    Named("max_response_length", "rollout.max_new_tokens"),
    Named(
        "max_prompt_length, truncation, filter_overlong_prompts",
        near="rollout.max_new_tokens",
        note="a prompt that the context cannot hold is refused",
    ),
    Named("shuffle, seed", "seed", "always shuffled, by the seed"),
)

ALGORITHM = (
    Named(
        "adv_estimator",
        "objective.baseline objective.credit objective.whiten",
        "--objective NAME sets them together",
        there=words.verl_adv_estimator,
    ),
    Named("gamma", "objective.gamma"),
    Named("lam", "objective.lam", "1.0 there by default"),
    Named("norm_adv_by_std_in_grpo", "objective.scale objective.scale_eps", "1e-6 there", there=words.is_divided),
    Named("gdpo_reward_weights", "scoring.weights", "with --objective.combine normalize_then_sum"),
    Named("use_kl_in_reward", "objective.kl_in", there=words.kl_in_reward),
    Named("kl_penalty", "objective.kl", "in the reward k1 alone, which is kl", there=words.verl_kl_type),
    Named("kl_ctrl.kl_coef", "stage.kl_coef", "with --objective.kl-in reward"),
    Named(
        "kl_ctrl.type, kl_ctrl.target_kl, kl_ctrl.horizon",
        "stage.kl_coef",
        'as a text: "adaptive:FROM,target=NATS,horizon=SAMPLES"; nats an action',
    ),
    Named("filter_groups.enable", "rollout.refill_rounds", there=words.refills),
    Named("filter_groups.max_num_gen_batches", "rollout.refill_rounds", "further rounds; 0 there: no limit"),
    Named("filter_groups.metric", "rollout.refill_by", "a reward's name; without it, the sum"),
    Named("rollout_correction.rollout_is", "objective.correction objective.correction_level"),
    Named(
        "rollout_correction.rollout_is_threshold",
        "objective.correction_low objective.correction_high",
        "a number there truncates; two, as 0.5_5.0, mask",
    ),
    Named("rollout_correction.rollout_is_batch_normalize", near="objective.correction"),
    Named(
        "rollout_correction.rollout_rs, rollout_correction.rollout_rs_threshold",
        near="objective.correction",
        note="mask keeps the action in the denominator; rejection takes it out",
    ),
    Named("use_pf_ppo, pf_ppo", near="rollout.first_samples", note="no rows are drawn again by their reward"),
)

CRITIC = (
    Named("cliprange_value", "objective.value_clip", "0.5 there by default"),
    Named("optim.lr", "critic.lr", "1e-5 there by default; None: the policy's"),
    Named("model.path", "critic.model", "with --critic.kind separate, which verl's always is"),
    Named("ppo_epochs, ppo_mini_batch_size", near="optim.epochs", note="the policy's: both take the same updates"),
    Named("loss_agg_mode", near="objective.average", note="the objective's"),
)

TRAINER = (
    Named("total_training_steps", "steps"),
    Named("total_epochs", near="steps", note="a run is so many rounds, over however many passes of the data"),
    Named("critic_warmup", "critic.warmup_steps"),
    Named("save_freq", "saving.every", "-1 there: never; here at the end in any case"),
    Named("test_freq", "evaluation.every", "-1 there and 0 here: never"),
    Named("val_before_train", "evaluation.prompts", "above 0: before and after in any case"),
    Named("max_actor_ckpt_to_keep", "saving.keep"),
    Named("project_name, default_local_dir", "runs_dir"),
    Named("experiment_name", "name"),
    Named("logger", near="show_samples_every", note="metrics.jsonl, metrics.csv and plots, each step"),
    Named("resume_mode, resume_from_path", near="model", note="gruppo resume RUN, to the bit"),
    Named("nnodes, n_gpus_per_node", note="torchrun decides"),
)

REWARD = (
    Named(
        "custom_reward_function.path, custom_reward_function.name",
        "reward",
        "file.py:function, in TRL's convention: keywords, and one number for each completion of a batch",
    ),
    Named("reward_model.enable, reward_model.model.path", "reward", "reward_model:PATH"),
    Named("reward_model.reward_manager", near="reward", note="functions are called with all columns"),
    Named("reward_model.reward_kwargs.overlong_buffer_cfg", "objective.overlong", "its len; the penalty factor is 1"),
)

VERL = (
    *of_part("actor_rollout_ref.actor", ACTOR),
    *of_part("actor_rollout_ref.rollout", ROLLOUT),
    *of_part("actor_rollout_ref.model", MODEL),
    *of_part("data", DATA),
    *of_part("algorithm", ALGORITHM),
    *of_part("critic", CRITIC),
    *of_part("trainer", TRAINER),
    *of_part("rewards", REWARD),
)
