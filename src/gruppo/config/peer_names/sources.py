"""The settings of the five documents of docs/sources.md, by the number of the document."""

from __future__ import annotations

from gruppo.config.peer_names import words
from gruppo.config.peer_names.named import Named, of_part

DIFFUSION = (
    Named("train.group_size", "rollout.group_size"),
    Named(
        "train.beta",
        "stage.kl_coef",
        "of the KL to the reference; there of mean(old - new), a number with no pull to it",
    ),
    Named("train.epsilon", "objective.clip_high", "of a joint density; of a mean over pixels it never clips"),
    Named("train.scale_rewards", "objective.scale", there=words.is_divided),
    Named(
        "train.use_reference_model",
        "reference.kind",
        "there is one where a KL coefficient is above 0",
        there=words.has_kl,
    ),
    Named("train.reference_model_mixup_alpha", "reference.update_rate", "with --reference.kind mixed"),
    Named("train.reference_update_freq", "reference.update_every", "with --reference.kind mixed"),
)

QWEN = (
    Named("GROUP_SIZE", "rollout.group_size"),
    Named("TEMPERATURE", "rollout.temperature"),
    Named("BETA_KL", "stage.kl_coef"),
    Named("LEARNING_RATE", "optim.lr"),
    Named("CLIP_RATIO", "objective.clip_low objective.clip_high"),
    Named("ENTROPY_COEF", "stage.entropy_coef"),
    Named("MAX_GRAD_NORM", "optim.max_grad_norm"),
    Named("model_name", "model"),
    Named("reward_functions", "reward", "called with lists, in TRL's convention; there with one prompt and response"),
    Named("length_reward", "reward", "length_target:50"),
    Named("coherence_reward", "reward", "keywords:因为,所以,然而,但是: their share, and not 0.2 for each"),
    Named("value_head", near="critic.kind", note="GRPO has none; --objective ppo has"),
)

CHAT = (
    Named("group_size, num_samples", "rollout.group_size"),
    Named("clip_epsilon", "objective.clip_low objective.clip_high"),
    Named("beta", "stage.kl_coef"),
    Named("update_epochs", "optim.epochs", "with 1 of them, and 1 minibatch, the clip is inert"),
    Named("num_passes", near="optim.token_budget", note="memory alone decides; no gradient hangs on it"),
    Named("device_batch_size", near="optim.token_budget", note="tokens of one forward, and not rows"),
    Named("num_steps", "steps"),
    Named("source", "model", "a folder, a hub id, or file.py:function for a plain module"),
    Named(
        "ref_model",
        "reference.kind",
        "there is one where a KL coefficient is above 0; --reference.place disk offloads it",
    ),
)

LESSON = (
    Named(
        "clip_epsilon", "objective.clip_low objective.clip_high", "also GRPOLoss(clip_epsilon), PPOLoss(clip_epsilon)"
    ),
    Named("kl_beta", "stage.kl_coef", "also GRPOLoss(kl_beta)"),
    Named("group_size", "rollout.group_size", "4 there"),
    Named(
        "value_loss_coef, vf_coef, c1",
        "stage.value_coef",
        "half of it there: squared errors are halved here, but not in PPOLoss(value_loss_coef)",
        there=words.whole_value_coef,
    ),
    Named("entropy_coef, c2", "stage.entropy_coef", "also PPOLoss(entropy_coef)"),
    Named("gamma", "objective.gamma", "0.99 there, also of compute_gae; 1 here"),
    Named("lam", "objective.lam"),
    Named("num_epochs", "optim.epochs", "4 there"),
    Named("max_new_tokens", "rollout.max_new_tokens", "100 there"),
    Named("actor_model, model", "model"),
    Named("critic_model", "critic.kind critic.model", "with --objective ppo"),
    Named("ref_model", "reference.kind", "there is one where a KL coefficient is above 0"),
)

RESTORATION = (
    Named("resume_ckpt", "model", "strict: a weight that does not fit is named; there strict=False drops it"),
    Named("grpo", "stage.rl_coef", "0 is supervision alone"),
    Named("grpo_group", "rollout.group_size", "2 there, where every advantage is +-0.707 or 0"),
    Named("batch_size", "rollout.prompts supervised.batch"),
    Named("lr", "optim.lr"),
    Named("epochs", "steps", "rounds, not passes"),
    Named("grpo_lambda_sup", "stage.sup_coef"),
    Named("grpo_lambda_pg", "stage.rl_coef"),
    Named("grpo_lambda_consistency", "stage.cons_coef", "to the reference; --restoration.consistency for others"),
    Named("grpo_warmup_epochs", near="stages", note="--stages supervised:10,ramp:20,full, in rounds"),
    Named("grpo_schedule_sup", "stage.sup_coef", "linear:1,0 as its text, or --stages ramp:20"),
    Named(
        "grpo_global_norm",
        "objective.scale",
        "running: the deviation within groups. A mean of all prompts is --objective.baseline running, and says how "
        "hard a prompt is",
    ),
    Named("grpo_max_grad_norm", "optim.max_grad_norm"),
    Named("grpo_clip_range", "objective.clip_low objective.clip_high", "of a joint density"),
    Named("grpo_adv_clip_max", "objective.adv_clip", "0: none"),
    Named("grpo_beta_kl, loss_kl", "stage.kl_coef"),
    Named("grpo_w_psnr, grpo_w_ssim", "scoring.weights", "in the order of --reward"),
    Named("weight_decay", "optim.weight_decay", "and of a stage"),
    Named("warmup", "optim.warmup_steps"),
)

SOURCES = (
    *of_part("000 diffusion", DIFFUSION),
    *of_part("001 Qwen", QWEN),
    *of_part("002 chat", CHAT),
    *of_part("003 lesson", LESSON),
    *of_part("004 restoration", RESTORATION),
)
