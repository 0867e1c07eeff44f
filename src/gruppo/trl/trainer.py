"""``GRPOTrainer`` and ``RLOOTrainer`` with TRL's arguments and methods; a ``gruppo.Trainer`` does
the work."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from gruppo import api
from gruppo import distributed as dist
from gruppo.build import Parts, name_of, validate
from gruppo.config import serialization
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.data.open import open_source
from gruppo.environments import EnvironmentClass
from gruppo.loading import import_extra
from gruppo.protocols import AdapterMixin, part, save_with_origin
from gruppo.rewards import RewardModel
from gruppo.trainer.callbacks import Callback, Step
from gruppo.trainer.evaluate import Evaluated, evaluate
from gruppo.trainer.forward import whole_weights
from gruppo.trainer.shards import whole_parameters
from gruppo.trainer.watch import logged
from gruppo.trl.translation import DEFAULTS, refusal, translated
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


class TrainOutput(NamedTuple):
    """What ``train`` returns, as in transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class GRPOTrainer:
    """TRL's ``GRPOTrainer`` (1.16): the same arguments and methods, trained by gruppo.

    What has no counterpart is refused with its name and the nearest option here. What means
    something else is reported once, when the trainer is made. Everything that gruppo writes of the
    run is in ``output_dir/run-...``, with its metrics, completions and checkpoints; ``trainer.run``
    is the ``gruppo.Trainer``.
    """

    kind = "GRPO"

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
        unsupported = {
            "rollout_func": (rollout_func, "give an engine that samples, engine=... of Trainer"),
            "quantization_config": (quantization_config, "lora__rank trains few weights"),
            "optimizers": (any(optimizers), "AdamW; optim__lr and so on set it"),
        }
        for name, (value, near) in unsupported.items():
            if value:
                raise GruppoError(
                    f"{type(self).__name__}({name}=...) has no counterpart in gruppo: {near}."
                )
        source = model
        if not isinstance(model, str):
            source = getattr(getattr(model, "config", None), "_name_or_path", "")
        if args is None:
            name = f"{(source or 'model').rstrip('/').split('/')[-1]}-{self.kind}"
            args = DEFAULTS[self.kind](output_dir=name)
        if environment_factory is not None:
            if train_dataset is not None or not isinstance(environment_factory, Mapping):
                train_dataset = _prompted(train_dataset, args)
            eval_dataset = None if eval_dataset is None else _prompted(eval_dataset, args)
        if train_dataset is None:
            raise GruppoError(
                "train_dataset is missing; it needs a Dataset, or a list of rows, with a column "
                "prompt."
            )
        if isinstance(eval_dataset, dict):
            raise GruppoError(
                "eval_dataset is a dict of data sets; it needs one of them. trainer.evaluate takes "
                "others."
            )
        self.args, self.callbacks = args, list(callbacks or ())
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.output_dir = Path(getattr(args, "output_dir", None) or "trainer_output")
        rows = len(train_dataset) if hasattr(train_dataset, "__len__") else 0
        strategy = getattr(args, "eval_strategy", "no")
        evaluates = eval_dataset is not None and getattr(strategy, "value", strategy) != "no"
        settings, notes = translated(args, self.kind, rows=rows, has_evaluation=evaluates)
        if not rows and not getattr(args, "max_steps", -1) > 0:
            raise GruppoError(
                "train_dataset has no length, so its epochs are not known. Set max_steps."
            )
        settings |= _adapter(peft_config, source, notes)
        if tools or environment_factory:
            settings |= _conversations(args, tools, environment_factory, notes)
        environment = environment_factory
        if isinstance(environment, Mapping):  # by the data's column environment
            environment = {
                name: EnvironmentClass(one, step_is_tool=True) for name, one in environment.items()
            }
        elif environment is not None:
            environment = EnvironmentClass(environment, step_is_tool=True)
        policy = self._opened(model, settings, notes)
        self.rewards = _rewards(reward_funcs, reward_processing_classes, may_be_empty=environment)
        self.parts = Parts.of(
            policy,
            train_dataset,
            self.rewards,
            environment,
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
        self._prepare_callbacks()
        with logged():
            for note in notes:
                log.warning("gruppo.trl: %s.", note)

    def _prepare_callbacks(self) -> None:
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
        for callback in self.callbacks:
            _check_callback(callback)

    # --- training ---

    @property
    def run(self) -> api.Trainer:
        """The ``gruppo.Trainer``; opened at its first use."""
        if self._trainer is None:
            name = api.new_name(RUN, self.output_dir)
            self._trainer = api.Trainer.open(
                replace(self.config, name=name), self.parts, callbacks=[_Hooks(self)]
            )
            self._call("on_init_end")
        return self._trainer

    @property
    def model(self) -> Any:
        return self.run.policy.module  # the trained module itself, as scripts of TRL look into it

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train from the beginning, or continue: True the newest run in ``output_dir``, or the
        folder of a run."""
        began = time.perf_counter()
        if resume_from_checkpoint:
            path = Path(str(resume_from_checkpoint))
            if resume_from_checkpoint is True:
                runs = sorted(
                    self.output_dir.glob(f"{RUN}-*/config.json"),
                    key=lambda file: file.stat().st_mtime,
                )
                if not runs:
                    text = (
                        f"{self.output_dir} has no run to resume; call train() without "
                        f"resume_from_checkpoint."
                    )
                    raise GruppoError(text)
                path = runs[-1].parent
            self._trainer = api.Trainer.open(path, self.parts, callbacks=[_Hooks(self)])
        run = self.run
        with logged():
            self._call("on_train_begin")
            result = run.train()
            api.finish(result, show=False)
            self._call("on_train_end")
        losses = [row["loss"] for row in self.state.log_history if "loss" in row]
        metrics = {
            "train_runtime": time.perf_counter() - began,
            "total_tokens": float(result.tokens),
        }
        loss = sum(losses) / len(losses) if losses else float("nan")
        return TrainOutput(self.state.global_step, loss, metrics | {"train_loss": loss})

    def evaluate(self, eval_dataset: Any = None, **_: Any) -> dict[str, float]:
        """Greedy completions of the evaluation data and their rewards, under TRL's names."""
        run, data = self.run.run, self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise GruppoError("evaluate has no data: pass eval_dataset to it or to the trainer.")
        if eval_dataset is None and self.config.evaluation.prompts:  # 0 under eval_strategy="no"
            return self._metrics(self.run.evaluate())
        source = open_source(data, seed=self.config.seed, held_out_fraction=0.0).only_held_out()
        # A prompt that does not fit into the context is left out, as from a run's own held-out
        # prompts.
        held_out = [
            p
            for p in source.held_out(len(data))
            if run.policy.check_prompt(p, run.sampling) is None
        ]
        with run.stopper.listening(), whole_weights(run.policy, engine=run.config.engine.kind):
            done, _rows = evaluate(run, held_out)
        return self._evaluated(done)

    def save_model(self, output_dir: str | None = None, **_: Any) -> None:
        """Write the model as it is now, and its tokenizer, to a folder for transformers (an
        adapter: for peft)."""
        folder, policy = Path(output_dir or self.output_dir), self.run.policy
        folder.mkdir(parents=True, exist_ok=True)
        read = (
            dict(policy.module.named_parameters())
            if part(policy, AdapterMixin).saves_base
            else policy.checkpoint_weights()
        )
        # Every rank takes part in gathering sharded parameters; one of them writes.
        with whole_parameters(policy.module, read), dist.fail_together():
            if not dist.is_main():
                return
            with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as temporary:
                save_with_origin(policy, Path(temporary))
                for file in Path(
                    temporary
                ).iterdir():  # each replaced as a whole, beside what else the folder has
                    file.replace(folder / file.name)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> str:
        """Upload the model and its card to the hub, as ``hub_model_id`` or under the name of
        ``output_dir``.

        ``revision``: a branch, which is created. ``blocking`` has no effect. Others are words of
        TRL's own card.
        """
        from gruppo.export import create_repository, upload, write_card

        args, run = self.args, self.run.folder
        token = token or getattr(args, "hub_token", None)
        revision = revision or getattr(args, "hub_revision", None)
        private = getattr(args, "hub_private_repo", None)
        name = getattr(args, "hub_model_id", None) or self.output_dir.resolve().name
        address = ""
        with dist.fail_together():
            if dist.is_main():
                self.hub_model_id = create_repository(name, private=private, token=token)
        with tempfile.TemporaryDirectory(dir=self.output_dir) as work:
            folder = Path(work) / name.rpartition("/")[2]  # the card's title is the folder's name
            self.save_model(str(folder))
            with dist.fail_together():
                if dist.is_main():
                    write_card(folder, run, is_online=True)
                    address = upload(
                        folder,
                        self.hub_model_id,
                        message=commit_message,
                        token=token,
                        revision=revision,
                    )
        return dist.all_gather(address.encode())[0].decode()  # only the first rank knows it

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

    def _opened(self, model: Any, settings: dict[str, Any], notes: list[str]) -> Any:
        """A policy where the model or its tokenizer is in memory or needs arguments; None where its
        name says all."""
        from gruppo.modalities.text import from_transformers

        kwargs = dict(getattr(self.args, "model_init_kwargs", None) or {})
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if "quantization_config" in kwargs:
            raise refusal("model_init_kwargs", kwargs, "no quantized training")
        dtype = str(kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))).removeprefix("torch.")
        if dtype not in ("auto", "float32", "bfloat16"):
            raise refusal("model_init_kwargs", {"dtype": dtype}, "float32 or bfloat16")
        if dtype != "auto" and settings["compute"] == "auto":
            settings["compute"] = dtype
        if dtype == "bfloat16":
            notes.append(
                "dtype=bfloat16 is what forward and backward compute in; the weights are kept in "
                "float32"
            )
        for name in ("attn_implementation", "device_map", "use_cache"):
            if name in kwargs:
                notes.append(f"model_init_kwargs: {name}={kwargs.pop(name)!r} is not used")
        settings["trust_remote_code"] |= bool(kwargs.pop("trust_remote_code", False))
        # A model in memory, or one with arguments of its own, is a policy; a plain name stays in
        # the config.
        if not isinstance(model, str):
            module = model
        elif kwargs or self.processing_class is not None:
            from transformers import AutoModelForCausalLM

            trusted = settings["trust_remote_code"]
            module = AutoModelForCausalLM.from_pretrained(
                model, trust_remote_code=trusted, **kwargs
            )
        else:
            return None
        if type(module).__name__.startswith("Peft"):
            text = (
                "model is a PeftModel, and gruppo adds the adapter itself. Pass the base model "
                "and a peft_config."
            )
            raise GruppoError(text)
        tokenizer = self.processing_class
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(module.config._name_or_path)
            self.processing_class = tokenizer
        if not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
            raise GruppoError(f"""processing_class is a {type(tokenizer).__name__}, of a model that
                reads images; gruppo trains language models on text, and diffusion and restoration
                models on images. Pass a tokenizer.""")
        return from_transformers(module, tokenizer, compute=settings["compute"])

    # --- what callbacks of transformers see ---

    def _call(self, event: str, **what: Any) -> None:
        for callback in self.callbacks:
            control = getattr(callback, event)(
                self.args,
                self.state,
                self.control,
                model=self.model,
                processing_class=self.processing_class,
                **what,
            )
            self.control = control or self.control

    def _metrics(self, done: Evaluated) -> dict[str, float]:
        parts = {f"eval_rewards/{name}/mean": value for name, value in done.parts.items()}
        return {"eval_reward": done.mean, **parts, "epoch": self.state.epoch or 0.0}

    def _evaluated(self, done: Evaluated) -> dict[str, float]:
        metrics = self._metrics(done)
        self.state.log_history.append(metrics | {"step": self.state.global_step})
        self._call("on_evaluate", metrics=metrics)
        return metrics


class RLOOTrainer(GRPOTrainer):
    """TRL's ``RLOOTrainer`` (1.16): see ``GRPOTrainer``."""

    kind = "RLOO"


@dataclass(eq=False)
class _Hooks(Callback):
    """Keeps ``state`` and ``log_history`` of a trainer, and calls its transformers callbacks."""

    owner: GRPOTrainer

    def on_step(self, trainer: Any, step: Step) -> None:
        owner, metrics = self.owner, step.metrics
        state, run = owner.state, trainer.run
        state.global_step = step.step * owner.updates
        state.epoch = step.step * run.config.rollout.prompts / run.source.epoch_size
        named = {theirs: metrics[ours] for theirs, ours in METRICS.items() if ours in metrics}
        if calls := metrics.get("tools/calls_count"):
            failed = metrics["tools/failed_count"] + metrics["tools/timeout_count"]
            named["tools/failure_frequency"] = failed / calls
        named |= {
            f"rewards/{name}/mean": metrics[f"reward/{name}/mean"] for name in run.rewards.names
        }
        state.log_history.append(named | {"epoch": state.epoch, "step": state.global_step})
        owner.control.should_save = owner.control.should_evaluate = False
        owner._call("on_step_end")
        owner._call("on_log", logs=dict(named))
        if (
            owner.control.should_save
        ):  # requests of the callbacks, beside what --saving.every and so on do
            trainer.save()
            owner._call("on_save")
        if owner.control.should_evaluate:
            trainer.evaluate()
        if owner.control.should_training_stop:
            trainer.stop()

    def on_evaluate(self, trainer: Any, evaluation: Evaluated) -> None:
        self.owner._evaluated(evaluation)

    def state_dict(self) -> dict[str, Any]:
        return {"log_history": self.owner.state.log_history, "step": self.owner.state.global_step}

    def load_state_dict(self, state: Any) -> None:
        self.owner.state.log_history, self.owner.state.global_step = (
            list(state["log_history"]),
            int(state["step"]),
        )


def _check_callback(callback: Any) -> None:
    """Refuse a callback whose methods would never be called."""
    from transformers import TrainerCallback

    if not isinstance(callback, TrainerCallback):
        text = (
            f"the callback {callback!r:.80} is no TrainerCallback of transformers; pass an "
            f"object of one."
        )
        raise GruppoError(text)
    for name in (
        name for name in dir(TrainerCallback) if name.startswith("on_") and name not in EVENTS
    ):
        if getattr(type(callback), name, None) is not getattr(TrainerCallback, name):
            raise GruppoError(f"""{type(callback).__name__}.{name} would never be called: gruppo
                calls {", ".join(EVENTS)}. Move it there, or write a gruppo.Callback for
                gruppo.Trainer.""")


def _prompted(data: Any, args: Any) -> Any:
    """Data with a prompt in each row, an empty one where the environment makes it; as many rows as
    a step takes."""
    empty = [{"role": "user", "content": ""}]
    if data is None:
        return [{"prompt": empty}] * (args.generation_batch_size // args.num_generations)
    columns = getattr(data, "column_names", None) or (
        list(data[0]) if isinstance(data, list) and data else ["prompt"]
    )
    return data if "prompt" in columns else [{"prompt": empty, **row} for row in data]


def _conversations(
    args: Any, tools: Any, environment_factory: Any, notes: list[str]
) -> dict[str, Any]:
    """Settings of tools and environments.

    As in TRL, calls are made one after another without a deadline, and results are not cut.
    """
    longest = args.max_completion_length
    calls = getattr(args, "max_tool_calling_iterations", None)
    meaning = "tokens that the policy writes in a conversation; there those of results too"
    notes.append(f"max_completion_length: {meaning}")
    settings = {
        "environment.max_reply_tokens": longest,
        "environment.timeout_s": None,
        "environment.turns": longest if calls is None else calls + 1,
        "environment.tools": tuple(map(name_of, tools or ())),
    }
    if environment_factory is not None:
        has_step = hasattr(environment_factory, "step")
        settings["environment.kind"] = IN_MEMORY if has_step else name_of(environment_factory)
    return settings


def _rewards(reward_funcs: Any, tokenizers: Any, *, may_be_empty: Any) -> list[Any]:
    """Functions as they are; reward models by their name or as a module."""
    if reward_funcs is None and may_be_empty:
        return []
    if reward_funcs is None:
        raise GruppoError(
            "reward_funcs is missing; it needs a function, the name of a reward model, or a list "
            "of them."
        )
    functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if not isinstance(tokenizers, list | tuple):
        tokenizers = [tokenizers] * len(functions)
    opened = []
    for function, tokenizer in zip(functions, tokenizers, strict=True):
        is_module = hasattr(function, "state_dict")
        if isinstance(function, str) or is_module:
            name = function.config._name_or_path if is_module else function
            if tokenizer is None and is_module:
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(name)
            function = RewardModel(function, tokenizer, name=name.split("/")[-1] or "reward_model")
        opened.append(function)
    return opened


def _adapter(config: Any, source: str, notes: list[str]) -> dict[str, Any]:
    """Settings of a LoraConfig of peft."""
    if config is None:
        return {}
    import_extra("peft", "lora", "peft_config")
    from peft import LoraConfig
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    from transformers import AutoConfig

    if type(config) is not LoraConfig:
        raise GruppoError(
            f"peft_config is a {type(config).__name__}; gruppo trains LoRA. Pass a LoraConfig."
        )
    default = LoraConfig()
    known = {"r", "lora_alpha", "target_modules", "task_type", "base_model_name_or_path"}
    # These change nothing that is trained.
    known |= {"inference_mode", "peft_version", "revision", "auto_mapping"}
    for name, value in vars(config).items():
        if name not in known and value != getattr(default, name, value):
            raise GruppoError(
                f"peft_config: {name}={value!r:.60} has no counterpart in gruppo. Leave it out."
            )
    targets = config.target_modules
    if targets is None:  # peft's own choice for the model, such as q_proj and v_proj
        targets = USUAL.get(AutoConfig.from_pretrained(source).model_type) if source else None
        if targets is None:
            notes.append("peft_config: target_modules=None adapts all linear layers but the head")
    if isinstance(targets, str) and targets != "all-linear":
        raise GruppoError(
            f"peft_config: target_modules={targets!r} is a pattern; it needs a list of names of "
            f"layers."
        )
    named = () if targets is None or isinstance(targets, str) else tuple(sorted(targets))
    return {"lora.rank": config.r, "lora.alpha": float(config.lora_alpha), "lora.targets": named}
