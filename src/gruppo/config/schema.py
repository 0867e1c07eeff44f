"""The configuration of a run: one tree of frozen dataclasses.

The first line of a field's docstring is its help on the command line, the rest is shown by
``--help-all``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from gruppo.config.options import Count, Fraction, NoneOr, NonNegative, Positive, Range
from gruppo.core.objective import Objective
from gruppo.core.schedules import Controller, Decay, Schedule, parse_schedule
from gruppo.types import Sampling

T = TypeVar("T")

IN_MEMORY = "<in memory>"
"""Written in place of a Python object that has no name to load it by."""

Scheduled = Annotated[float | str, Range(ge=0)]
"""A number, or a text with a schedule or controller; see ``Stage``."""
OptionalSchedule = Annotated[float | str | None, Range(ge=0)]
SCHEDULED = (
    "rl_coef",
    "sup_coef",
    "kl_coef",
    "cons_coef",
    "entropy_coef",
    "value_coef",
    "lr",
    "weight_decay",
    "temperature",
    "group_size",
)
"""Fields of a stage that may change from step to step."""


Timeout = Annotated[float | None, Range(gt=0)]


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of each training step."""

    prompts: Positive = 8
    """Prompts per step, over all ranks."""
    group_size: Positive = 8
    """Samples per prompt."""
    max_new_tokens: Positive = 128
    """Maximum length of a completion, in tokens."""
    temperature: Annotated[float, Range(gt=0)] = 1.0
    """Sampling temperature; log-probs are computed at the same temperature."""
    top_k: Count = 0
    """Sample among the k most likely tokens; 0 disables."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens of total probability p; 1 disables."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, in addition to the end tokens."""
    refill_rounds: Count = 0
    """Maximum resampling rounds for groups with equal rewards (DAPO); 0 disables."""
    first_samples: Count = 0
    """Samples per prompt before groups grow by their rewards; 0 samples whole groups.

    Groups with unequal rewards receive more samples, up to twice group_size each, within prompts x
    group_size per step.
    """

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens, self.stop)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, and how a batch is split into optimizer steps."""

    lr: NonNegative = 1e-6  # as in TRL and verl
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps of linear warmup."""
    decay: Decay = "constant"
    """Learning rate schedule after warmup."""
    final_lr_frac: Fraction = 0.0
    """Final learning rate as a fraction of lr."""
    betas: Annotated[tuple[float, float], Range(ge=0, lt=1)] = (
        0.9,
        0.999,
    )  # these and eps are torch's
    """AdamW betas."""
    eps: Annotated[float, Range(gt=0)] = 1e-8
    """AdamW epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    max_grad_norm: NonNegative = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    epochs: Positive = 1
    """Passes over each batch."""
    stop_kl: NonNegative = 0.0
    """KL to the old policy, in nats per token, that ends a batch's epochs; 0 disables."""
    minibatches: Positive = 1
    """Optimizer steps per epoch."""
    token_budget: Count = 0
    """Tokens per forward and backward pass, padding included; 0 chooses.

    Changes memory and speed, not the gradient. The automatic value is 640 on a CPU and 16384 on a
    GPU, or four times the longest prompt. Diffusion models count network evaluations (128),
    restoration networks squares of 16 x 16 pixels (4096). Halved when memory runs out.
    """
    recompute: Literal["none", "layer"] = "none"
    """layer: compute each layer's activations again in the backward pass.

    About a quarter slower, with the same gradients; keeps a layer's inputs alone.
    """


@dataclass(frozen=True)
class Stage:
    """A span of steps with its own loss coefficients, learning rate and sampling.

    A number can also be a schedule over the stage's steps, linear:FROM,TO  cosine:FROM,TO
    steps:FROM,50=X,100=Y, or, for kl_coef and entropy_coef, a controller,
    adaptive:FROM,target=X,... See docs/guides/stages.md.
    """

    name: str = ""
    """Name of the stage, in logs."""
    steps: Count = 0
    """Maximum length in steps; 0, in the last stage only, for all remaining steps."""
    until: str = ""
    """Condition that ends the stage, or the run, early: "eval/reward_mean > 0.5".

    "eval/psnr flat 3": the last 3 values are no higher than the best before them; "flat 3 by 0.05":
    not by more.
    """
    new_reference: bool = False
    """Reset the reference to the current policy at the start of the stage."""
    rl_coef: Scheduled = 1.0
    """Coefficient of the policy gradient loss; 0, with kl_coef 0, samples nothing."""
    sup_coef: Scheduled = 0.0
    """Coefficient of the supervised loss on demonstrations."""
    kl_coef: Scheduled = 0.0
    """Coefficient of the KL to the reference (beta of the papers).

    Or adaptive:FROM,target=NATS,horizon=SAMPLES. The reference is kept in memory if any stage has a
    value above 0.
    """
    cons_coef: Scheduled = 0.0
    """Coefficient of the consistency of restored images (restoration.consistency)."""
    entropy_coef: Scheduled = 0.0
    """Coefficient of the entropy bonus; or adaptive:FROM,target=NATS,delta=STEP."""
    value_coef: Scheduled = 0.5  # vf_coef of OpenAI Baselines
    """Coefficient of the critic's loss."""
    lr: OptionalSchedule = None
    """Learning rate; default: optim.lr with its warmup and decay."""
    warmup_steps: Count = 0
    """Steps of linear learning rate warmup at the start of the stage."""
    weight_decay: OptionalSchedule = None
    """Weight decay; default: optim.weight_decay."""
    temperature: Annotated[float | str | None, Range(gt=0)] = None
    """Sampling temperature; default: rollout.temperature."""
    group_size: Annotated[int | str | None, Range(ge=1)] = None
    """Samples per prompt; default: rollout.group_size."""

    @cached_property
    def schedules(self) -> dict[str, Schedule | Controller]:
        """Fields that may change from step to step and that are set, parsed."""
        values = {name: getattr(self, name) for name in SCHEDULED}
        return {n: parse_schedule(value, n) for n, value in values.items() if value is not None}


SUPERVISED = Stage("supervised", rl_coef=0.0, sup_coef=1.0)
"""Demonstrations alone."""


@dataclass(frozen=True)
class SupervisedConfig:
    """Demonstrations, for stages with sup_coef above 0."""

    data: str = ""
    """Data set with demonstrations; default: the run's data."""
    column: str = ""
    """Column with the completion to learn; default: the target column."""
    template: str = ""
    """Completion as a template of columns: "<answer>{answer}</answer>"."""
    batch: Positive = 32
    """Demonstrations per step, over all ranks."""


@dataclass(frozen=True)
class BackOffConfig:
    """Return to the best weights, at half the learning rate, when a metric drops."""

    metric: str = ""
    """Metric to watch, higher is better, such as eval/reward_mean; empty disables."""
    drop: NonNegative = 0.05
    """Drop below the best value that triggers the return."""


@dataclass(frozen=True)
class ReferenceConfig:
    """Reference policy of the KL, for stages with kl_coef above 0."""

    kind: Literal["frozen", "mixed"] = "frozen"
    """frozen: the initial weights. mixed: weights that follow the policy.

    reference <- rate policy + (1 - rate) reference. With LoRA the frozen reference is the model
    with its adapter disabled, the mixed one a second adapter.
    """
    update_rate: Fraction = (
        0.6  # this and update_every as in TRL (ref_model_mixup_alpha, ref_model_sync_steps)
    )
    """Weight of the policy in an update of a mixed reference."""
    update_every: Positive = 512
    """Steps between updates of a mixed reference."""
    place: Literal["device", "cpu"] = "device"
    """Where the reference weights are kept between uses."""
    watch_prompts: Count = 64
    """Held-out prompts on which a mixed reference is evaluated too; 0 disables."""

    @property
    def is_mixed(self) -> bool:
        return self.kind == "mixed"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters in place of full fine-tuning (extra lora)."""

    rank: Count = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float, Range(gt=0)] = 32.0
    """Scale of the adapter's output: alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers to adapt, such as q_proj; default: all but the head."""
    adapter: str = ""
    """Folder of an adapter to continue training; its rank, alpha and targets apply."""
    load_in_4bit: bool = False
    """Quantize the frozen base to 4 bits (QLoRA; extra qlora)."""


@dataclass(frozen=True)
class CriticConfig:
    """Value function of objectives with baseline=critic (PPO)."""

    kind: Literal["shared", "separate"] = "shared"
    """shared: a value head on the policy's network. separate: a network of its own."""
    model: str = ""
    """Model of a separate critic, or a reward model; default: a copy of the policy."""
    lr: Annotated[float | None, Range(ge=0)] = None
    """Peak learning rate, on the policy's schedule; default: the policy's."""
    warmup_steps: Count = 0
    """Initial steps that train only the critic."""


@dataclass(frozen=True)
class ScoringConfig:
    """Calls of the reward functions."""

    weights: Annotated[tuple[float, ...] | None, Range()] = None
    """Weight of each reward; default: all 1."""
    timeout_s: Timeout = 60.0
    """Seconds before a call fails and leaves its rows unscored; None disables."""
    isolate: bool = True
    """Call functions of files and modules in another process, killed when late.

    A reward that holds the interpreter lock, crashes or exits then costs only its rows. Not on
    Windows.
    """


@dataclass(frozen=True)
class EnvironmentConfig:
    """Environment of multi-turn conversations."""

    kind: str = ""
    """Environments: file.py:Class, openenv:URL or verifiers:NAME.

    A class has reset; its other methods are tools. --environment NAME is short for it.
    """
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, as file.py:function; default: none.

    Each needs type hints and a docstring. See docs/guides/conversations.md.
    """
    reply: str = ""
    """Function that replies, as file.py:function; default: one turn per prompt.

    It receives text, messages, state, turn, seed, prompt and the data's columns, and returns the
    reply, or None to end the conversation. See docs/guides/conversations.md.
    """
    turns: Positive = 8
    """Maximum turns of the policy; rollout.max_new_tokens limits their total length."""
    max_reply_tokens: Positive = 256
    """Maximum length of a reply, in tokens; longer ones are truncated."""
    timeout_s: Timeout = 60.0
    """Seconds after which a reply or a call of a tool counts as failed; None disables.

    Conversations without a reply are not trained on.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its functions and classes; empty without an environment."""
        return tuple(filter(None, (self.kind, *self.tools, self.reply)))


@dataclass(frozen=True)
class EngineConfig:
    """Where samples come from."""

    kind: str = ""
    """vllm (servers), or file.py:function of a policy; default: the policy itself.

    --engine NAME is short for it.
    """
    urls: tuple[str, ...] = ()
    """vLLM servers, such as http://127.0.0.1:8000; gruppo serve starts one."""
    publish_dir: str = ""
    """Folder of the weights that servers load; default: in the run's folder.

    The servers read it under the same path.
    """
    colocated: bool = False
    """Whether the servers share the trainer's GPU, and sleep while it updates.

    They need vLLM's --enable-sleep-mode. gruppo explain computes how to share the memory.
    """
    timeout_s: Annotated[float, Range(gt=0)] = 60.0
    """Seconds without a token after which a server is left out.

    Its groups are sampled on other servers. It is tried again at the next step.
    """
    max_mismatch: Annotated[float, Range(gt=0)] = 0.2
    """Mean difference of the server's log-probs to the trainer's, in nats.

    Rounding in bfloat16 makes 0.03 to 0.06.
    """
    lag: Count = 0
    """Publishes by which samples may be older than the weights they train.

    Above 0, engines sample while the trainer learns. 0 samples and learns in turns.
    """
    replay: str = ""
    """Folder of a run with lag, whose ledger is trained from without engines.

    gruppo train --replay RUN sets it.
    """


@dataclass(frozen=True)
class PromptsConfig:
    """Columns of the data, and the split."""

    column: str = "prompt"
    """Column with the prompt."""
    target_column: NoneOr[str] = None
    """Column with the target; default: answer, target, solution or label."""
    held_out_fraction: Annotated[float, Range(ge=0, lt=1)] = 0.1
    """Fraction of the prompts held out for evaluation, chosen by hash."""
    special_tokens: Literal["split", "keep"] = "split"
    """Special tokens in the text of prompts: encoded as text, or kept.

    keep is for prompts that already have the chat template applied.
    """
    chat_template: str = ""
    """Chat template, a Jinja file; default: the model's own.

    examples/chatml_tools.jinja writes tools for models with the tokens <|im_start|> and <|im_end|>
    whose own template ignores them.
    """
    chat_template_kwargs: str = ""
    """Variables of the chat template, as JSON: '{"enable_thinking": false}'.

    Saved models have them as defaults of their template.
    """


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out prompts, greedy and sampled, before and after training."""

    prompts: Count = 256
    """Number of held-out prompts; 0 disables evaluation."""
    every: Count = 0
    """Steps between evaluations during training; 0 disables."""
    data: str = ""
    """Validation data, such as a .jsonl file; default: a part of the training data.

    With it, prompts.held_out_fraction does not apply: every prompt of the training data is trained
    on.
    """
    samples: Count = 0
    """Samples per prompt besides the greedy one, for mean@k and pass@k; 0 disables.

    Sampled as in training.
    """


@dataclass(frozen=True)
class SavingConfig:
    """Checkpoints and completions."""

    every: Count = 50
    """Steps between checkpoints; one is always saved at the end."""
    keep: Positive = 2
    """Number of checkpoints to keep."""
    completions: Literal["all", "shown"] = "all"
    """all: every completion, in completions/. shown: only those of samples.jsonl.

    Of images, the rewards of every sample, without the pixels.
    """


@dataclass(frozen=True)
class DistributedConfig:
    """Several ranks, started by torchrun."""

    shard: Literal["none", "fsdp", "hybrid"] = "none"
    """Shard weights, gradients and optimizer state over ranks.

    none: each rank has all of them. fsdp: over all ranks. hybrid: over the ranks of each machine,
    replicated over machines.
    """
    offload_params: bool = False
    """Keep shards on the CPU between uses: weights, gradients, AdamW's state.

    Needs shards. 16 bytes per trained weight of the device are free; AdamW steps on the CPU.
    """
    timeout_s: Annotated[float, Range(gt=0)] = 1800.0
    """Seconds that a rank waits for the others before the run ends, resumable."""


@dataclass(frozen=True)
class Config:
    """Configuration of a run. Recipes are functions that return one."""

    model: str = ""
    """Model: a hub id, a folder, a bundled name, or file.py:function.

    Bundled: smollm2-135m. A function returns a language model made by gruppo.from_module. Images: a
    denoiser or diffusers folder, diffusers:OWNER/NAME, or unet (new). Restoration: restore:unet,
    restore:file.py:Class, or a folder.
    """
    data: str = ""
    """Data: a .jsonl file, a Hugging Face data set, or a built-in source.

    Built in: arithmetic, reasoning_gym:TASK, digits, images:FOLDER:SIZE; degraded images with clean
    ones photos:noise=25, degrade:FOLDER:noise=25, pairs:DEGRADED:CLEAN.
    """
    reward: tuple[str, ...] = ()
    """Reward functions: built-in names or file.py:function, called as in TRL."""
    steps: Positive = 200
    """Number of training steps."""
    seed: int = 0
    """Random seed."""
    name: str = ""
    """Name of the run's folder; default: recipe and time."""
    runs_dir: str = "runs"
    """Folder for runs."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to train on; auto takes an accelerator if there is one."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto measures both once. Master weights are always float32."""
    trust_remote_code: bool = False
    """Allow code from a hub model's repository to run; no config file can turn it on."""
    show_samples_every: Count = 10
    """Steps between samples shown on screen; 0 disables."""
    objective: Objective = field(default_factory=Objective)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    modality: Any = None
    """Options of the model's modality, such as DiffusionConfig; None for a language model.

    In files and in the shell the section has the modality's name: [diffusion], --diffusion.steps.
    """
    optim: OptimConfig = field(default_factory=OptimConfig)
    stage: Stage = field(default_factory=Stage)
    """The only stage of a run without stages."""
    stages: tuple[Stage, ...] = ()
    """Stages of the run; in the shell --stages supervised:50,ramp:30,full."""
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    back_off: BackOffConfig = field(default_factory=BackOffConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    track: tuple[str, ...] = ()
    """Additional trackers: tensorboard, wandb, trackio (extra track), file.py:Class."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    @property
    def plan(self) -> tuple[Stage, ...]:
        """The stages, in order."""
        return self.stages or (self.stage,)

    @property
    def without_servers(self) -> Config:
        """The config with the policy itself in place of vLLM servers, for commands that train
        nothing."""
        return replace(self, engine=EngineConfig()) if self.engine.kind == "vllm" else self

    def section(self, kind: type[T]) -> T:
        """The options of a modality, given by their dataclass; its defaults if the run has others
        or none."""
        return self.modality if isinstance(self.modality, kind) else kind()

    @property
    def updates_per_batch(self) -> int:
        return self.optim.epochs * self.optim.minibatches


@dataclass(frozen=True)
class Shortcuts:
    """Options that change many of a config's."""

    objective: str | None = None
    """Preset of the objective, such as grpo, dr-grpo, dapo, gspo, rloo or ppo."""
    stages: str | None = None
    """Stages NAME:STEPS,NAME (supervised, ramp, full); then --stages.0.lr ..."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``gruppo train`` besides those of the run."""

    replay: str = ""
    """Run with --engine.lag to train from, in place of a recipe."""
    trust_run: bool = False
    """Import the code that the folder names, though you did not create it."""


@dataclass(frozen=True)
class ExplainOptions:
    """Options of ``gruppo explain`` besides those of the run."""

    names: str = ""
    """System (trl, verl, ddpo or sources) whose names are shown; trl:beta for one."""
    trust_run: bool = False
    """Import the code that the folder names, though you did not create it."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``gruppo plan`` besides those of the run; the GPU is an H100 by default."""

    gpus: Positive = 1
    """Number of GPUs."""
    tflops: Annotated[float, Range(gt=0)] = 989.0
    """Dense bfloat16 teraflops of a GPU, by its data sheet."""
    bandwidth: Annotated[float, Range(gt=0)] = 3.35
    """Terabytes per second of a GPU's memory."""
    memory: Annotated[float, Range(gt=0)] = 80.0
    """Gibibytes of a GPU's memory."""
    mean_tokens: NonNegative = 0.0
    """Mean length of a completion; default: half of rollout.max_new_tokens."""
    prompt_tokens: Positive = 200
    """Mean length of a prompt."""
    model_config: str = ""
    """Folder of the model's config.json; default: the recipe's model."""


@dataclass(frozen=True)
class LaunchConfig:
    """Options of ``gruppo launch`` besides those of the run."""

    trainers: Positive = 1
    """Ranks of the trainer."""
    servers: Count = 1
    """vLLM servers; with 0, the policy itself samples."""
    dry_run: bool = False
    """Print the commands, or the script of the Slurm job, and start nothing."""
    max_restarts: Count = 3
    """Restarts of the trainers, and of each server."""
    trust_run: bool = False
    """Import the code that the folder names, though you did not create it."""
    slurm: str = ""
    """Submit a Slurm job: a script with the #SBATCH lines and the set-up of the cluster."""
