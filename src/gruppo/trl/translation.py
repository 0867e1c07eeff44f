"""TRL's arguments as a ``gruppo.Config``: each is translated, without effect, or refused by its
name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from gruppo.config import peer_options
from gruppo.errors import GruppoError, as_argument
from gruppo.trl.arguments import GRPOConfig


def _names(*lines: str) -> set[str]:
    return {name for line in lines for name in line.split()}


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
    option.theirs: option
    for option in peer_options.peer_options("trl")
    if option.part in ("GRPOConfig", "TrainingArguments") and option.ours
    if " " not in option.ours and option.theirs not in WITHOUT_EFFECT
}
"""Arguments whose value is that of one option; those below replace some of them."""
TRANSLATED = _names(
    "output_dir per_device_train_batch_size gradient_accumulation_steps generation_batch_size",
    "steps_per_generation num_train_epochs max_steps lr_scheduler_type warmup_steps adam_beta1",
    "adam_beta2 optim bf16 use_cpu report_to eval_strategy eval_steps eval_on_start save_strategy",
    "save_steps save_total_limit model_init_kwargs chat_template_kwargs ddp_timeout epsilon delta",
    "num_generations_eval epsilon_high beta use_bias_correction_kl entropy_coef scale_rewards",
    "loss_type sync_ref_model ref_model_mixup_alpha ref_model_sync_steps use_vllm",
    "gradient_checkpointing activation_checkpointing",
)
DECAYS = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
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
Settings = dict[str, Any]


def refusal(name: str, value: Any, why: str = "") -> GruppoError:
    """An argument that has no counterpart, with the nearest option of ours."""
    text = f"{name}={value!r:.80} of TRL has no counterpart in gruppo"
    for option in peer_options.lookup("trl", name)[:1]:
        why = why or option.remark
        if near := as_argument(option.ours or option.near):
            text += f"; the nearest is {near} of gruppo.Trainer"
    return GruppoError(f"{text}{f' ({why})' if why else ''}. Leave {name} out.")


class Translation:
    """Settings of gruppo by dotted name, and notes on what differs in meaning.

    ``rows``: prompts of the training data, which ``num_train_epochs`` counts.
    """

    def __init__(self, args: Any, *, rows: int, has_evaluation: bool) -> None:
        self.args = args
        self.defaults = {f.name: f.default for f in fields(GRPOConfig)}
        self.notes = list[str]()
        self.settings = self._direct()
        self.settings |= self._objective()
        self.settings |= self._steps(rows, has_evaluation=has_evaluation)
        self.settings |= self._others()
        if self.of("use_vllm"):
            self.settings |= self._servers()
            self.notes.append("vLLM servers are started with gruppo serve, not with trl vllm-serve")
        if has_evaluation:
            self.notes.append(
                "evaluation is greedy, one completion a prompt, and before and after training too"
            )

    def of(self, name: str) -> Any:
        """The value of an argument, also in a config of TRL itself."""
        value = getattr(self.args, name, self.defaults.get(name))
        return getattr(value, "value", value)  # an enum of transformers

    def choice(self, name: str, known: Iterable[str]) -> str:
        """The value of an argument, one of ``known``."""
        value = str(self.of(name))
        if value not in known:
            raise refusal(name, value, f"it needs one of {', '.join(known)}")
        return value

    def _direct(self) -> Settings:
        """Arguments whose value is that of one option. One that nothing reads is refused unless it
        has its default."""
        settings: Settings = {}
        for name, default in self.defaults.items():
            value = self.of(name)
            if name in DIRECT and name not in TRANSLATED:
                option = DIRECT[name]
                settings[option.ours] = value
                if option.remark and value != default:
                    self.notes.append(f"{name}: {option.remark}")
            elif name not in TRANSLATED | WITHOUT_EFFECT and value not in (default, None, [], {}):
                raise refusal(name, value)
        return settings

    def _others(self) -> Settings:
        is_recomputed = self.of("activation_checkpointing")
        if is_recomputed is None:  # transformers' new name for what TRL sets by the former one
            is_recomputed = self.of("gradient_checkpointing")
        trackers = self.of("report_to") or []
        trackers = [trackers] if isinstance(trackers, str) else list(trackers)
        for name in trackers:
            if name not in (*TRACKERS, "none", "all"):
                raise refusal("report_to", name, f"it needs one of {', '.join(TRACKERS)} or none")
        if not str(self.of("optim")).startswith("adamw_torch"):
            raise refusal("optim", self.of("optim"))
        return {
            "optim.decay": DECAYS[self.choice("lr_scheduler_type", DECAYS)],
            "optim.betas": (self.of("adam_beta1"), self.of("adam_beta2")),
            "optim.recompute": "layer" if is_recomputed else "none",
            "saving.keep": self.of("save_total_limit") or 10**6,
            "prompts.held_out_fraction": 0.0,
            # as in TRL, which tokenizes prompts with the special tokens in their text
            "prompts.special_tokens": "keep",
            "prompts.chat_template_kwargs": json.dumps(self.of("chat_template_kwargs") or {}),
            "evaluation.samples": self.of("num_generations_eval") or 0,
            "distributed.timeout_s": self.of("ddp_timeout"),
            "device": "cpu" if self.of("use_cpu") else "auto",
            "compute": {None: "auto", True: "bfloat16", False: "float32"}[self.of("bf16")],
            "track": tuple(name for name in trackers if name in TRACKERS),
        }

    def _servers(self) -> Settings:
        """The vLLM servers, and the correction for their arithmetic."""
        if self.of("vllm_mode") != "server":
            near = "vLLM runs in servers of its own: gruppo serve MODEL, vllm_mode='server'"
            raise refusal("vllm_mode", self.of("vllm_mode"), near)
        own = f"http://{self.of('vllm_server_host')}:{self.of('vllm_server_port')}"
        url = (self.of("vllm_server_base_url") or own).replace("//0.0.0.0", "//127.0.0.1")
        settings: Settings = {"engine.kind": "vllm", "engine.urls": (url,)}
        if self.of("vllm_importance_sampling_correction"):
            level, _, correction = self.of("vllm_importance_sampling_mode").partition("_")
            cap = self.of("vllm_importance_sampling_cap")
            high = cap or self.of("vllm_importance_sampling_clip_max")
            settings |= {
                "objective.correction": correction,
                "objective.correction_level": level,
                "objective.correction_low": self.of("vllm_importance_sampling_clip_min") or 0.0,
                "objective.correction_high": 1e6 if high is None else high,
            }
        return settings

    def _steps(self, rows: int, *, has_evaluation: bool) -> Settings:
        """Batches, and what is counted in steps: of a generation and its updates here, of the
        optimizer in TRL."""
        of = self.of
        generated, accumulated = of("steps_per_generation"), of("gradient_accumulation_steps")
        if generated % accumulated:
            raise GruppoError(f"""steps_per_generation={generated} is not a multiple of
                gradient_accumulation_steps={accumulated}, so an optimizer step would mix two
                generations. Set one to a divisor of the other.""")
        minibatches = generated // accumulated
        updates = minibatches * of("num_iterations")
        groups = of("generation_batch_size") // of("num_generations")
        per_epoch = max(rows // groups, 1)
        steps = math.ceil(of("num_train_epochs") * per_epoch)
        if of("max_steps") > 0:  # -1 there: by epochs
            steps = math.ceil(of("max_steps") / updates)

        def in_steps(name: str) -> int:
            """A count of optimizer steps, or a fraction of all of them, in steps of ours."""
            value = float(of(name))
            return max(1, round(value * steps) if 0 < value < 1 else math.ceil(value / updates))

        def every(strategy: str, name: str) -> int:
            counts = {"steps": in_steps(name), "epoch": per_epoch, "no": 0}
            return counts[self.choice(strategy, counts)]

        # As in transformers, eval_steps is logging_steps where it is not set.
        evaluates = "logging_steps" if of("eval_steps") is None else "eval_steps"
        settings: Settings = {
            "steps": steps,
            "rollout.prompts": groups,
            "optim.minibatches": minibatches,
            "optim.warmup_steps": in_steps("warmup_steps") if of("warmup_steps") else 0,
            "saving.every": every("save_strategy", "save_steps"),
            "evaluation.every": every("eval_strategy", evaluates) if has_evaluation else 0,
        }
        if of("sync_ref_model"):
            settings |= {
                "reference.kind": "mixed",
                "reference.update_rate": of("ref_model_mixup_alpha"),
                "reference.update_every": math.ceil(of("ref_model_sync_steps") / updates),
            }
        if updates > 1:
            self.notes.append(
                f"a step here is a generation and its {updates} optimizer steps: max_steps, "
                f"warmup_steps, save_steps, eval_steps and the learning rate go by {steps} such "
                f"steps"
            )
        if minibatches > 1:
            self.notes.append(
                "a loss that is averaged over tokens is averaged over those of each optimizer "
                "step, there of the generation"
            )
        if of("warmup_steps"):
            self.notes.append(
                "the warmup ends at the full learning rate, there one step later: its first step "
                "is not 0"
            )
        return settings

    def _objective(self) -> Settings:
        """The objective, the KL and the entropy bonus."""
        of = self.of
        loss = self.choice("loss_type", LOSSES)
        choice, level = LOSSES[loss], of("importance_sampling_level")
        if choice.get("ratio", level) != level:
            raise refusal("loss_type", loss, f"with importance_sampling_level={choice['ratio']!r}")
        low = of("epsilon")
        high = low if of("epsilon_high") is None else of("epsilon_high")
        # CISPO: TRL's epsilon_high is the cap itself, ours the distance from 1; a low bound of 1
        # never acts.
        if loss == "cispo":
            if high <= 1:
                raise GruppoError(f"""loss_type='cispo' caps the ratio at epsilon_high, which is
                    {high:g}: on-policy rows would learn with {high:g} of their gradient, as in TRL.
                    Set epsilon_high=5.0 (MiniMax-M1).""")
            low, high = 1.0, high - 1
        if of("entropy_coef"):
            self.notes.append(
                "entropy_coef: averaged like the loss; there over the tokens of each micro-batch"
            )
        scale = self.choice("scale_rewards", SCALES)
        if of("multi_objective_aggregation") == "normalize_then_sum" and scale != "group":
            self.notes.append(
                "scale_rewards applies to each reward; there it is ignored with normalize_then_sum"
            )
        return {
            "objective.surrogate": choice["surrogate"],
            "objective.average": choice["average"],
            "objective.scale": scale,
            "objective.clip_low": low,
            "objective.clip_high": high,
            "objective.dual_clip": of("delta") or 0.0 if choice["surrogate"] == "clip" else 0.0,
            "objective.kl_gradient": "unbiased" if of("use_bias_correction_kl") else "naive",
            # chosen, or servers would bring a correction that is not TRL's
            "objective.correction": "none",
            "stage.kl_coef": of("beta"),
            "stage.entropy_coef": of("entropy_coef"),
        }
