"""One tree of frozen dataclasses: all that a run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gruppo.core.objective import Objective
from gruppo.core.schedules import Decay
from gruppo.types import Sampling

IN_MEMORY = "<in memory>"
"""Written in place of a Python object that has no name to load it by."""


@dataclass(frozen=True)
class RolloutConfig:
    """What is sampled each step."""

    prompts: int = 8
    """Prompts a step, over all ranks."""
    group_size: int = 8
    """Samples of each prompt."""
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    """1 keeps every token."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, beside the end tokens."""
    refill_rounds: int = 0
    """Further rounds of generation a step that may replace groups without spread (DAPO's dynamic sampling)."""
    refill_by: str = ""
    """Name of the reward whose spread decides; without it, or where it scores no row, the sum before shaping."""
    first_samples: int = 0
    """Samples of each prompt before rewards decide which groups grow: those with spread, in the budget of prompts x
    group_size samples a step; 0 samples whole groups at once."""
    max_group_size: int = 0
    """Largest size of a group that grows; 0 for twice group_size."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens, self.stop)


@dataclass(frozen=True)
class DiffusionConfig:
    """How an image model is drawn from, and what a new one is. Read where the model is one."""

    steps: int = 10
    """Denoising steps of a sample; the last one adds no noise and is not learned from."""
    transition: str = "ancestral"
    """How each step but the last is drawn: ddim, ddpm, ddpm_large or ancestral; of a flow ancestral, flow_sde,
    dance_sde or cps."""
    eta: float | None = None
    """Share of new noise in a step; without it, the transition's own."""
    guidance: float = 1.0
    """Classifier-free, sampled and scored alike; 1 asks the network once."""
    noise: Literal["independent", "shared", "branched"] = "independent"
    """shared: a group has one first latent. branched: and all noise in common but one random step's, which alone is
    learned from."""
    train_from: int = 0
    """The first step that is learned from."""
    train_to: int = 0
    """The step before which learning ends; 0 for the last one."""
    train_fraction: float = 1.0
    """Share of these steps that is learned from, drawn anew for each group."""
    eval_steps: int = 0
    """Steps of an evaluation, which follows the ODE; 0 for as many as in training."""
    path: Literal["flow", "diffusion"] = "flow"
    """Of a new network: x = (1 - t) x0 + t e, or sqrt(a) x0 + sqrt(1 - a) e."""
    shift: float = 1.0
    """Of a new network's flow: above 1, more of its steps and of what it learns from are where there is much noise."""
    predicts: Literal["noise", "x0", "v", "velocity"] = "x0"
    """What a new network says of a noisy picture."""
    weighting: Literal["uniform", "clean"] = "clean"
    """Of a new network's denoising loss; clean: 1 / (sigma^2 + 0.05)."""
    dropped: float = 0.0
    """Share of demonstrations that a new network learns from without their class, for guidance."""
    width: int = 32
    """Channels of a new network."""
    size: tuple[int, int] | None = None
    """Height and width of a pipeline's pictures in pixels; without it, what it was trained for."""
    embedded_guidance: float = 3.5
    """The guidance that FLUX is told as a number; it is not classifier-free."""


@dataclass(frozen=True)
class RestorationConfig:
    """What a network that restores images draws, and how it learns. Read where the model is one."""

    action: str = "low_resolution"
    """Of a new policy, what is drawn: pixels:std=0.01, low_resolution:grid=8, band_gains:grid=8,std=0.15 or
    controls:noise=0-50@25,mix=0-1@1."""
    weights: str = ""
    """Of a new policy, the network's weights to begin with: a .safetensors file, or the folder of a policy."""
    patches: int = 1
    """Of a new policy, patches a side: each has an action of its own, and may have a reward of its own."""
    trains: Literal["all", "action"] | None = None
    """action lets the network rest. Without it all, or as the model was saved."""
    supervises: Literal["output", "base", "told"] | None = None
    """What clean pictures are compared with: the picture of the mean action; the network's own; or that of a network
    which is told the true controls. Without it output, or as the model was saved."""
    loss: Literal["charbonnier", "l1", "mse"] | None = None
    """Of a pixel, in the supervised term and in the consistency. Without it charbonnier, or as the model was saved."""
    consistency: str = "reference"
    """What a stage's cons_coef is of: reference, to the reference's picture; equivariance, under flips and turns;
    degradation, degraded again it is what was given; or a function file.py:degrade of pictures and prompts."""
    action_lr_factor: float = 1.0
    """The learning rate of what draws the action over the network's; what is 0 at first needs 10 to 50."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, and how a batch is cut into updates."""

    lr: float = 1e-6
    warmup_steps: int = 0
    decay: Decay = "constant"
    final_lr_frac: float = 0.0
    """Where the decay ends, as a fraction of lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    epochs: int = 1
    """Passes over each batch."""
    stop_kl: float = 0.0
    """Epochs of a batch end when the mean KL to the old policy, in nats a token, exceeds this; 0 never."""
    minibatches: int = 1
    """Updates a pass."""
    token_budget: int = 0
    """Tokens one forward and backward may cover, padding included; 0 chooses 640 on a CPU and 16384 on a GPU, or four
    times the longest prompt, or fewer where memory is short. Of an image model, evaluations of its network: 128. Of
    one that restores images, squares of 16 x 16 pixels: 4096. Halved where it runs out. Changes memory and speed, never
    the gradient."""
    terms_every: int = 0
    """Steps between measurements of each loss term's own gradient, its norm and its cosine with each other's, at the
    cost of a backward pass for each term; 0 for none."""


@dataclass(frozen=True)
class Stage:
    """A part of a run: the coefficients of its loss terms, and what else changes while it lasts.

    A field of type number or text takes a schedule over the stage's steps: linear:FROM,TO  cosine:FROM,TO
    steps:FROM,50=X,100=Y; or, of three of them, a controller: adaptive:FROM,target=X,... See docs/stages.md.
    """

    name: str = ""
    steps: int = 0
    """Steps it lasts at most; 0, in the last stage alone, for all that are left. The last one also has the steps that
    gates before it have saved."""
    until: str = ""
    """Ends it earlier, as soon as a metric says so: "eval/reward_mean > 0.5", or "eval/psnr flat 3" where its last 3
    values were no higher than the best before them ("flat 3 by 0.05": not by more than that)."""
    new_reference: bool = False
    """As it begins, the reference becomes the policy as it then is."""
    rl_coef: float | str = 1.0
    """Of the objective's surrogate. Where it and kl_coef stay 0 nothing is sampled: demonstrations alone teach."""
    sup_coef: float | str = 0.0
    """Of the supervised loss of demonstrations."""
    kl_coef: float | str = 0.0
    """The papers' beta. Above 0 in any stage, a reference is kept. Or adaptive:FROM,target=NATS,horizon=SAMPLES."""
    cons_coef: float | str = 0.0
    """Of the consistency of restored pictures (restoration.consistency)."""
    entropy_coef: float | str = 0.0
    """Or adaptive:FROM,target=NATS,delta=STEP."""
    value_coef: float | str = 0.5
    """Of the critic's loss."""
    lr: float | str | None = None
    """Without it, optim.lr with its warm-up and decay over the whole run."""
    warmup_steps: int = 0
    """First steps of the stage, in which lr rises linearly to what it is set to."""
    weight_decay: float | str | None = None
    """Without it, optim.weight_decay."""
    temperature: float | str | None = None
    """Without it, rollout.temperature."""
    group_size: int | str | None = None
    """Without it, rollout.group_size."""
    difficulty: float | str = 1.0
    """Share of the prompts that are drawn from, the easiest first (prompts.difficulty_column). Or
    adaptive:FROM,target=REWARD,rate=STEP."""


@dataclass(frozen=True)
class SupervisedConfig:
    """The demonstrations that a stage with sup_coef above 0 learns from."""

    data: str = ""
    """Prompts with what to answer; without it, the run's own data."""
    column: str = ""
    """Column of what to answer; without it, the target."""
    template: str = ""
    """What to answer as a text around columns: "<answer>{answer}</answer>"."""
    batch: int = 32
    """Demonstrations a step, over all ranks."""


@dataclass(frozen=True)
class BackOffConfig:
    """Return to the best weights, with a lower learning rate, where a metric has fallen."""

    metric: str = ""
    """Such as eval/reward_mean, higher is better; without it, never."""
    drop: float = 0.05
    """How far below its best the metric may be."""
    lr_factor: float = 0.5
    """Of the learning rate, at each return."""


@dataclass(frozen=True)
class ReferenceConfig:
    """What the KL is measured against, where some stage's kl_coef is above 0."""

    kind: Literal["frozen", "mixed"] = "frozen"
    """The first weights for ever, or weights that follow the policy: reference <- rate policy + (1 - rate) reference.
    Of a run with LoRA the frozen one is the model with its adapter off, and the mixed one a second adapter."""
    update_rate: float = 0.6
    """Share of the policy in a mixed reference after an update."""
    update_every: int = 512
    """Steps between updates of a mixed reference."""
    place: Literal["device", "cpu", "disk"] = "device"
    """Where a copy of the weights rests. On cpu or disk it comes to the device for one pass before the updates, and is
    released before they begin."""
    watch_prompts: int = 64
    """Held-out prompts that a mixed reference answers too at each evaluation; 0 for none."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters in place of the weights (extra lora)."""

    rank: int = 0
    """0 trains the weights themselves."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, such as q_proj; without any, all but the head."""
    adapter: str = ""
    """A folder with an adapter of the same base to begin from; its rank, alpha and targets are its own."""


@dataclass(frozen=True)
class CriticConfig:
    """What predicts the return before each action. Used where objective.baseline is critic, and nowhere else."""

    kind: Literal["shared", "separate"] = "shared"
    """A head on the policy's own network, or a network of its own: twice the memory, no pull on the policy."""
    model: str = ""
    """The separate network: a hub id, a folder (a reward model too) or a bundled model; without it, a copy of the
    policy."""
    lr: float | None = None
    """Peak learning rate, on the policy's schedule; without it, the policy's."""
    warmup_steps: int = 0
    """First steps, in which the critic learns alone."""


@dataclass(frozen=True)
class ScoringConfig:
    """How reward functions are called."""

    weights: tuple[float, ...] | None = None
    """One for each reward; all 1 without."""
    timeout_s: float | None = 60.0
    """A call that takes longer leaves its rows unscored; None waits for ever."""


@dataclass(frozen=True)
class EnvironmentConfig:
    """What replies to the policy, so that it speaks again: conversations of several turns."""

    reply: str = ""
    """A function file.py:function of (text, messages, state, turn, seed, prompt and the data's columns) that returns
    what is said next, or None at the end; without it, each prompt is answered once. See docs/environments.md."""
    turns: int = 8
    """Answers of the policy in a conversation at most; rollout.max_new_tokens is of all of them."""
    max_reply_tokens: int = 256
    """A longer reply is cut."""
    timeout_s: float | None = 60.0
    """A reply that takes longer ends its conversation, which is not learned from; None waits for ever."""


@dataclass(frozen=True)
class PromptsConfig:
    """How the data is read."""

    column: str = "prompt"
    target_column: str | None = None
    """Without it, the first of answer, target, solution, label that is there."""
    held_out_fraction: float = 0.1
    """Share of the prompts, by hash, that are kept for evaluation and never trained on."""
    difficulty_column: str = ""
    """Column with a number, higher is harder, for a stage's difficulty."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Greedy answers to held-out prompts, before and after training."""

    prompts: int = 256
    """0 evaluates nothing."""
    every: int = 0
    """Steps between further evaluations; 0 for none."""
    along_steps: int = 16
    """Of an image model, so many held-out prompts whose pictures are also rewarded as they stand after each denoising
    step; 0 asks the rewards nothing more."""


@dataclass(frozen=True)
class SavingConfig:
    every: int = 50
    """Steps between checkpoints; one is written at the end and at a stop in any case."""
    keep: int = 2
    """Checkpoints kept."""


@dataclass(frozen=True)
class Config:
    """A whole run. Recipes are functions that return one; the shell overrides its leaves."""

    model: str = ""
    """A hub id, a local folder, or a bundled model such as smollm2-135m; file.py:function for a language model of one's
    own, which the function returns as gruppo.from_module made it; a folder with a denoiser or a pipeline of
    diffusers, diffusers:OWNER/NAME, or unet for a new one of the size of the data's pictures; restore:unet,
    restore:dncnn or restore:file.py:Class for a network that restores images, or a folder with one."""
    data: str = ""
    """A .jsonl file, a Hugging Face data set, arithmetic, reasoning_gym:TASK, digits, or images:FOLDER:SIZE; degraded
    images with clean ones: photos:noise=25, degrade:FOLDER:noise=25 or pairs:DEGRADED:CLEAN."""
    reward: tuple[str, ...] = ()
    """Built-in names, or file.py:function; called as in TRL."""
    steps: int = 200
    """Number of collect-learn-publish rounds."""
    seed: int = 0
    name: str = ""
    """Folder below runs_dir; without it, one is made from the recipe's name and the time."""
    runs_dir: str = "runs"
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of forward and backward; auto measures once. Master weights are float32 in any case."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the policy; auto takes a CUDA device if there is one."""
    engine: str = ""
    """file.py:function of a policy that returns an engine; without it, the policy samples in this process."""
    trust_remote_code: bool = False
    """Let a hub model run code of its own."""
    show_samples_every: int = 10
    """Steps between sample completions on the screen; 0 shows none."""
    objective: Objective = field(default_factory=Objective)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    restoration: RestorationConfig = field(default_factory=RestorationConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    stage: Stage = field(default_factory=Stage)
    """The whole run as one stage, where stages names none."""
    stages: tuple[Stage, ...] = ()
    """Parts of the run, one after another; on the shell --stages supervised:50,ramp:30,full."""
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
    """Trackers beside the run's own files (extra track): tensorboard, wandb, trackio, or file.py:Class."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    @property
    def plan(self) -> tuple[Stage, ...]:
        """The stages, in order."""
        return self.stages or (self.stage,)

    @property
    def updates_per_batch(self) -> int:
        return self.optim.epochs * self.optim.minibatches
