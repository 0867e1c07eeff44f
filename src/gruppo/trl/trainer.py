"""``GRPOTrainer`` with TRL's arguments and methods; a ``gruppo.Trainer`` does the work."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gruppo import api
from gruppo import distributed as dist
from gruppo.build import Parts, name_of, validate
from gruppo.config import serialization
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.environments import EnvironmentClass
from gruppo.loading import import_extra
from gruppo.protocols import AdapterMixin, part, save_with_origin
from gruppo.rewards import RewardModel
from gruppo.trainer.callbacks import Callback, Step
from gruppo.trainer.evaluate import Evaluated
from gruppo.trainer.shards import whole_parameters
from gruppo.trainer.watch import logged
from gruppo.trl.arguments import GRPOConfig
from gruppo.trl.translation import Settings, Translation, refusal
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

RUN = "run"
"""What runs in ``output_dir`` are called; the folder itself holds what ``save_model`` writes, as in
TRL."""
METRICS = {
    "loss": "loss/policy",
    "grad_norm": "grad/norm",
    "learning_rate": "optim/lr",
    "reward": "reward/mean",
    "kl": "kl/ref_nats",
    "entropy": "entropy/mean_nats",
    "completions/mean_length": "len/mean_actions",
    "clip_ratio/low_mean": "clip/low_frac",
    "clip_ratio/high_mean": "clip/high_frac",
    "num_tokens": "progress/tokens",
    "step_time": "time/step_s",
    "tools/call_frequency": "tools/calls_mean",
}
"""Metrics under TRL's names, for ``state.log_history`` and ``on_log``."""
EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
)
"""Methods of transformers' callbacks that are called; at the end of a step, which is a generation
and its updates."""
LORA_FIELDS = {
    "r",
    "lora_alpha",
    "target_modules",
    # these change nothing that is trained
    "task_type",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "auto_mapping",
}
"""Fields of peft's LoraConfig that may differ from their defaults."""


class GRPOTrainer:
    """TRL's ``GRPOTrainer`` (1.16): the same arguments and methods, trained by gruppo.

    An argument without a counterpart is refused with its name and the nearest option here. What
    means something else is reported once, when the trainer is made. Everything that gruppo writes
    of the run is in ``output_dir/run-...``, with its metrics, completions and checkpoints;
    ``trainer.run`` is the ``gruppo.Trainer``.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        self._refuse("rollout_func", rollout_func, "an engine samples, engine=... of Trainer")
        self._refuse("quantization_config", quantization_config, "lora__rank trains few weights")
        near = "a reward model's own tokenizer is used"
        self._refuse("reward_processing_classes", reward_processing_classes, near)
        self._refuse("optimizers", any(optimizers), "AdamW; optim__lr and so on set it")
        source = model
        if not isinstance(model, str):
            source = getattr(getattr(model, "config", None), "_name_or_path", "")
        if args is None:
            name = (source or "model").rstrip("/").split("/")[-1]
            args = GRPOConfig(output_dir=f"{name}-GRPO")
        if environment_factory is not None:
            if train_dataset is not None or not isinstance(environment_factory, Mapping):
                train_dataset = _with_prompts(train_dataset, args)
            if eval_dataset is not None:
                eval_dataset = _with_prompts(eval_dataset, args)
        if train_dataset is None:
            raise GruppoError(
                "train_dataset is missing; it needs a Dataset, or a list of rows, with a column "
                "prompt."
            )
        if isinstance(eval_dataset, dict):
            raise GruppoError("eval_dataset is a dict of data sets; it needs one of them.")
        self.args = args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.output_dir = Path(getattr(args, "output_dir", None) or "trainer_output")
        rows = len(train_dataset) if hasattr(train_dataset, "__len__") else 0
        if not rows and not getattr(args, "max_steps", -1) > 0:
            raise GruppoError(
                "train_dataset has no length, so its epochs are not known. Set max_steps."
            )
        strategy = getattr(args, "eval_strategy", "no")
        evaluates = eval_dataset is not None and getattr(strategy, "value", strategy) != "no"
        translation = Translation(args, rows=rows, has_evaluation=evaluates)
        settings, notes = translation.settings, translation.notes
        if peft_config is not None:
            settings |= _adapter(peft_config, source, notes)
        if tools or environment_factory:
            settings |= _conversations(args, tools, environment_factory, notes)
        policy = self._policy(model, settings)
        self.rewards = _rewards(reward_funcs)
        if not self.rewards and not environment_factory:
            raise GruppoError(
                "reward_funcs is missing; it needs a function, the name of a reward model, or a "
                "list of them."
            )
        self.parts = Parts.of(
            policy,
            train_dataset,
            self.rewards,
            _environment(environment_factory),
            tools or None,
            engine=None,
            validation=eval_dataset,
        )
        settings |= {
            "model": source if policy is None else IN_MEMORY,
            "data": IN_MEMORY,
            "scoring.isolate": False,  # functions of the script are called in its process
            "reward": tuple(map(name_of, self.rewards)),
            "runs_dir": str(self.output_dir),
            "evaluation.data": "" if eval_dataset is None else IN_MEMORY,
            "evaluation.prompts": len(eval_dataset) if evaluates else 0,
        }
        self.config = serialization.change(Config(), settings)
        validate(self.config, self.parts)
        self._trainer: api.Trainer | None = None
        self._prepare_callbacks(callbacks or ())
        with logged():
            for note in notes:
                log.warning("gruppo.trl: %s.", note)

    def _refuse(self, name: str, value: Any, near: str) -> None:
        if value:
            raise GruppoError(f"GRPOTrainer({name}=...) has no counterpart in gruppo: {near}.")

    def _prepare_callbacks(self, callbacks: Sequence[Any]) -> None:
        from transformers import TrainerControl, TrainerState

        # What callbacks see counts optimizer steps, as in TRL; a step of a run is a generation with
        # `updates` of them.
        self.state, self.control = TrainerState(), TrainerControl()
        self.updates = self.config.updates_per_batch
        self.state.max_steps = self.config.steps * self.updates
        # No process group exists before the run is opened, so these are the launcher's variables.
        self.accelerator = SimpleNamespace(
            print=lambda *text: print(*text) if dist.is_main() else None,
            is_main_process=int(os.environ.get("RANK", 0)) == 0,
            num_processes=int(os.environ.get("WORLD_SIZE", 1)),
        )
        self.callbacks = list[Any]()
        for callback in callbacks:
            self.add_callback(callback)

    # --- training ---

    @property
    def run(self) -> api.Trainer:
        """The ``gruppo.Trainer``; opened at its first use."""
        if self._trainer is None:
            config = replace(self.config, name=api.new_name(RUN, self.output_dir))
            self._trainer = api.Trainer.open(config, self.parts, callbacks=[_Hooks(self)])
            self._call("on_init_end")
        return self._trainer

    @property
    def model(self) -> Any:
        return self.run.policy.module  # the trained module itself, as scripts of TRL look into it

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train from the beginning, or continue: True the newest run in ``output_dir``, or the
        folder of a run. Return transformers' ``TrainOutput``."""
        from transformers.trainer_utils import TrainOutput

        began = time.perf_counter()
        if resume_from_checkpoint:
            path = Path(str(resume_from_checkpoint))
            if resume_from_checkpoint is True:
                path = self._newest_run()
            self._trainer = api.Trainer.open(path, self.parts, callbacks=[_Hooks(self)])
        run = self.run
        with logged():
            self._call("on_train_begin")
            result = run.train()
            api.finish(result, show=False)
            self._call("on_train_end")
        losses = [row["loss"] for row in self.state.log_history if "loss" in row]
        loss = sum(losses) / len(losses) if losses else float("nan")
        metrics = {
            "train_runtime": time.perf_counter() - began,
            "total_tokens": float(result.tokens),
            "train_loss": loss,
        }
        return TrainOutput(self.state.global_step, loss, metrics)

    def _newest_run(self) -> Path:
        configs = [*self.output_dir.glob(f"{RUN}-*/config.json")]
        if not configs:
            raise GruppoError(
                f"{self.output_dir} has no run to resume; call train() without "
                f"resume_from_checkpoint."
            )
        return max(configs, key=lambda file: file.stat().st_mtime).parent

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Greedy completions of the trainer's evaluation data and their rewards, under TRL's
        names."""
        if eval_dataset is not None or not self.config.evaluation.prompts:
            raise GruppoError(
                "evaluate takes the eval_dataset of the trainer. Pass it there, with "
                "eval_strategy='steps' or 'epoch'."
            )
        return self._metrics(self.run.evaluate())

    def save_model(self, output_dir: str | None = None, **_: Any) -> None:
        """Write the model as it is now, and its tokenizer, to a folder for transformers (an
        adapter: for peft)."""
        folder, policy = Path(output_dir or self.output_dir), self.run.policy
        folder.mkdir(parents=True, exist_ok=True)
        weights = policy.checkpoint_weights()
        if part(policy, AdapterMixin).saves_base:
            weights = dict(policy.module.named_parameters())
        # Every rank takes part in gathering sharded parameters; one of them writes.
        with whole_parameters(policy.module, weights), dist.fail_together():
            if not dist.is_main():
                return
            with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as temporary:
                save_with_origin(policy, Path(temporary))
                for file in Path(temporary).iterdir():  # each replaced as a whole
                    file.replace(folder / file.name)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        token: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> str:
        """Upload the model and its card to the hub, as ``hub_model_id`` or under the name of
        ``output_dir``, to the branch ``revision``; return the address of the commit.

        Other arguments have no effect.
        """
        from gruppo.export import create_repository, upload, write_card

        args = self.args
        token = token or args.hub_token
        address = ""
        with tempfile.TemporaryDirectory(dir=self.output_dir) as work:
            name = args.hub_model_id or self.output_dir.resolve().name
            folder = Path(work) / name.rpartition("/")[2]  # the card's title is the folder's name
            self.save_model(str(folder))
            with dist.fail_together():
                if dist.is_main():
                    repository = create_repository(name, private=args.hub_private_repo, token=token)
                    write_card(folder, self.run.folder, is_online=True)
                    address = upload(
                        folder, repository, message=commit_message, token=token, revision=revision
                    )
        return dist.gather_json(address)[0]  # only the first rank knows it

    def add_callback(self, callback: Any) -> None:
        """Add a callback of transformers, an object or a class."""
        if self._trainer is not None:
            raise GruppoError(
                "add_callback comes after the run was opened; add callbacks before train and "
                "evaluate."
            )
        callback = callback() if isinstance(callback, type) else callback
        _check_callback(callback)
        self.callbacks.append(callback)

    def is_world_process_zero(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def end(self) -> None:
        """Close the run's files and trackers."""
        if self._trainer is not None:
            self._trainer.close()

    # --- parts ---

    def _policy(self, model: Any, settings: Settings) -> Any:
        """A policy if the model or its tokenizer is in memory or needs arguments; None if its name
        says all."""
        from gruppo.modalities.text import from_transformers

        kwargs = {
            name: value
            for name, value in (getattr(self.args, "model_init_kwargs", None) or {}).items()
            if value is not None and name not in ("attn_implementation", "device_map", "use_cache")
        }
        if "quantization_config" in kwargs:
            raise refusal("model_init_kwargs", kwargs, "no quantized training")
        dtype = str(kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))).removeprefix("torch.")
        if settings["compute"] == "auto":  # weights are kept in float32
            settings["compute"] = dtype
        settings["trust_remote_code"] |= bool(kwargs.pop("trust_remote_code", False))
        if isinstance(model, str):
            if not kwargs and self.processing_class is None:
                return None
            from transformers import AutoModelForCausalLM

            trusted = settings["trust_remote_code"]
            model = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=trusted, **kwargs)
        if type(model).__name__.startswith("Peft"):
            raise GruppoError(
                "model is a PeftModel, and gruppo adds the adapter itself. Pass the base model and "
                "a peft_config."
            )
        if self.processing_class is None:
            self.processing_class = _tokenizer_of(model)
        tokenizer = self.processing_class
        if not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
            raise GruppoError(f"""processing_class is a {type(tokenizer).__name__}, of a model that
                reads images; gruppo trains language models on text, and diffusion and restoration
                models on images. Pass a tokenizer.""")
        return from_transformers(model, tokenizer, compute=settings["compute"])

    # --- what callbacks of transformers see ---

    def _call(self, event: str, **values: Any) -> None:
        for callback in self.callbacks:
            control = getattr(callback, event)(
                self.args,
                self.state,
                self.control,
                model=self.model,
                processing_class=self.processing_class,
                **values,
            )
            self.control = control or self.control

    def _metrics(self, done: Evaluated) -> dict[str, float]:
        parts = {f"eval_rewards/{name}/mean": value for name, value in done.parts.items()}
        return {"eval_reward": done.mean, **parts, "epoch": self.state.epoch or 0.0}


@dataclass(eq=False)
class _Hooks(Callback):
    """Keeps ``state`` and ``log_history`` of a trainer, and calls its transformers callbacks."""

    owner: GRPOTrainer

    def on_step(self, trainer: Any, step: Step) -> None:
        owner, metrics = self.owner, step.metrics
        state, control, run = owner.state, owner.control, trainer.run
        state.global_step = step.step * owner.updates
        state.epoch = step.step * run.config.rollout.prompts / run.source.epoch_size
        named = {theirs: metrics[ours] for theirs, ours in METRICS.items() if ours in metrics}
        if calls := metrics.get("tools/calls_count"):
            failed = metrics["tools/failed_count"] + metrics["tools/timeout_count"]
            named["tools/failure_frequency"] = failed / calls
        for name in run.rewards.names:
            named[f"rewards/{name}/mean"] = metrics[f"reward/{name}/mean"]
        state.log_history.append(named | {"epoch": state.epoch, "step": state.global_step})
        control.should_save = control.should_evaluate = False
        owner._call("on_step_end")
        owner._call("on_log", logs=dict(named))
        control = owner.control
        # Requests of the callbacks, besides what --saving.every and so on do.
        if control.should_save:
            trainer.save()
            owner._call("on_save")
        if control.should_evaluate:
            trainer.evaluate()
        if control.should_training_stop:
            trainer.stop()

    def on_evaluate(self, trainer: Any, evaluation: Evaluated) -> None:
        state, metrics = self.owner.state, self.owner._metrics(evaluation)
        state.log_history.append(metrics | {"step": state.global_step})
        self.owner._call("on_evaluate", metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"log_history": self.owner.state.log_history, "step": self.owner.state.global_step}

    def load_state_dict(self, state: Any) -> None:
        self.owner.state.log_history = list(state["log_history"])
        self.owner.state.global_step = int(state["step"])


def _check_callback(callback: Any) -> None:
    """Refuse a callback whose methods would never be called."""
    from transformers import TrainerCallback

    if not isinstance(callback, TrainerCallback):
        raise GruppoError(
            f"the callback {callback!r:.80} is no TrainerCallback of transformers; pass an object "
            f"of one."
        )
    for name, unchanged in vars(TrainerCallback).items():
        is_called = name in EVENTS or not name.startswith("on_")
        if not is_called and getattr(type(callback), name) is not unchanged:
            raise GruppoError(f"""{type(callback).__name__}.{name} would never be called: gruppo
                calls {", ".join(EVENTS)}. Move it there, or write a gruppo.Callback for
                gruppo.Trainer.""")


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.config._name_or_path)


def _with_prompts(data: Any, args: Any) -> Any:
    """Data with a prompt in each row, an empty one if the environment makes it; without data, as
    many rows as a step takes."""
    empty = [{"role": "user", "content": ""}]
    if data is None:
        return [{"prompt": empty}] * (args.generation_batch_size // args.num_generations)
    return [{"prompt": empty, **row} for row in data]


def _environment(factory: Any) -> Any:
    """The environment, or several by the data's column environment."""
    if isinstance(factory, Mapping):
        return {name: _environment(one) for name, one in factory.items()}
    return None if factory is None else EnvironmentClass(factory, step_is_tool=True)


def _conversations(args: Any, tools: Any, factory: Any, notes: list[str]) -> Settings:
    """Settings of tools and environments.

    As in TRL, calls are made one after another without a deadline, and results are not cut.
    """
    longest = args.max_completion_length
    calls = getattr(args, "max_tool_calling_iterations", None)
    notes.append(
        "max_completion_length: tokens that the policy writes in a conversation; there those of "
        "results too"
    )
    settings = {
        "environment.max_reply_tokens": longest,
        "environment.timeout_s": None,
        "environment.turns": longest if calls is None else calls + 1,
        "environment.tools": tuple(map(name_of, tools or ())),
    }
    if factory is not None:
        settings["environment.kind"] = IN_MEMORY if hasattr(factory, "step") else name_of(factory)
    return settings


def _rewards(reward_funcs: Any) -> list[Any]:
    """Functions as they are; reward models by their name or as a module."""
    functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    rewards = list[Any]()
    for function in functions:
        if isinstance(function, str):
            function = RewardModel(function, name=_short_name(function))
        elif hasattr(function, "state_dict"):
            name = _short_name(function.config._name_or_path)
            function = RewardModel(function, _tokenizer_of(function), name=name)
        if function is not None:
            rewards.append(function)
    return rewards


def _short_name(model: str) -> str:
    return model.split("/")[-1] or "reward_model"


def _adapter(config: Any, source: str, notes: list[str]) -> Settings:
    """Settings of a LoraConfig of peft."""
    import_extra("peft", "lora", "peft_config")
    from peft import LoraConfig
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    from transformers import AutoConfig

    if type(config) is not LoraConfig:
        raise GruppoError(
            f"peft_config is a {type(config).__name__}; gruppo trains LoRA. Pass a LoraConfig."
        )
    default = LoraConfig()
    for name, value in vars(config).items():
        if name not in LORA_FIELDS and value != getattr(default, name, value):
            raise GruppoError(
                f"peft_config: {name}={value!r:.60} has no counterpart in gruppo. Leave it out."
            )
    targets = config.target_modules
    if targets is None and source:  # peft's own choice for the model, such as q_proj and v_proj
        targets = USUAL.get(AutoConfig.from_pretrained(source).model_type)
    if targets is None:
        notes.append("peft_config: target_modules=None adapts all linear layers but the head")
    if targets in (None, "all-linear"):
        targets = ()
    named = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    return {"lora.rank": config.r, "lora.alpha": float(config.lora_alpha), "lora.targets": named}
