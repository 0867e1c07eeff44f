"""ddpo-pytorch's config/base.py, and what its change to GRPO added (source document 000)."""

from __future__ import annotations

from gruppo.config.peer_names.named import Named

DDPO = (
    Named("prompt_fn", "data"),
    Named("reward_fn", "reward"),
    Named("sample.num_steps", "diffusion.steps"),
    Named("sample.eta", "diffusion.eta", "None: the transition's own"),
    Named("sample.guidance_scale", "diffusion.guidance"),
    Named("sample.batch_size x sample.num_batches_per_epoch", "rollout.prompts", "times the group size"),
    Named("train.group_size", "rollout.group_size"),
    Named("train.learning_rate", "optim.lr"),
    Named("train.num_inner_epochs", "optim.epochs"),
    Named("train.gradient_accumulation_steps", "optim.minibatches", "the other way round: updates of each batch"),
    Named("train.max_grad_norm", "optim.max_grad_norm"),
    Named(
        "train.timestep_fraction", "diffusion.train_fraction", "also --diffusion.train-from and --diffusion.train-to"
    ),
    Named("train.adv_clip_max", "objective.adv_clip", "0: none"),
    Named("train.clip_range, train.epsilon", "objective.clip_high", "of the joint density, not of a mean over pixels"),
    Named("train.beta", "stage.kl_coef", "of the closed form to the reference"),
    Named("train.scale_rewards", "objective.scale", "none for False, group for True"),
    Named(
        "per_prompt_stat_tracking",
        "objective.scale",
        "prompt: the prompt's last rewards; with --objective.baseline prompt their mean too",
    ),
    Named("train.use_reference_model", "stage.kl_coef", "above 0 for True"),
    Named("train.reference_model_mixup_alpha", "reference.update_rate", "with --reference.kind mixed"),
    Named("train.reference_update_freq", "reference.update_every", "with --reference.kind mixed"),
    Named("train.cfg", "diffusion.guidance", "always scored as it was sampled"),
    Named("use_lora", "lora.rank", "0 for False"),
    Named("num_epochs", "steps"),
    Named("save_freq", "saving.every"),
)
"""What ``gruppo explain`` shows of every run of an image model."""

FURTHER = (
    Named("pretrained.model", "model"),
    Named("pretrained.revision", near="model", note="give the folder of that revision"),
    Named("prompt_fn_kwargs", near="data", note="options stand in the name: images:FOLDER:SIZE"),
    Named("train.batch_size", near="optim.token_budget", note="memory alone decides; it changes no gradient"),
    Named("train.adam_beta1, train.adam_beta2", "optim.betas"),
    Named("train.adam_weight_decay", "optim.weight_decay"),
    Named("train.adam_epsilon", "optim.eps"),
    Named("train.use_8bit_adam", near="lora.rank", note="moments are float32; an adapter has few of them"),
    Named("mixed_precision", "compute", "master weights are float32 in any case; of fp16 there is none"),
    Named("allow_tf32", near="compute"),
    Named(
        "per_prompt_stat_tracking.buffer_size",
        near="objective.scale",
        note="prompt keeps the last 32 rewards of a prompt",
    ),
    Named(
        "per_prompt_stat_tracking.min_count",
        near="objective.scale",
        note="2; there, below it, mean and deviation of the whole batch",
    ),
    Named("logdir, run_name", "runs_dir name"),
    Named("num_checkpoint_limit", "saving.keep"),
    Named("resume_from", near="model", note="gruppo resume RUN continues to the bit"),
    Named("seed", "seed"),
)
"""The rest."""
