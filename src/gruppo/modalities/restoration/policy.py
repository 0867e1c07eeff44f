"""A network that restores images as a policy: one action a picture, or one of each patch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo.core.gaussian import gaussian_entropy, gaussian_logprob
from gruppo.core.images import as_saved, psnr
from gruppo.core.pixel_losses import PIXEL_LOSSES, PixelLoss
from gruppo.modalities.restoration.consistency import Consistency, ToReference
from gruppo.modalities.restoration.demonstrations import clean_pictures, demonstrated
from gruppo.modalities.restoration.files import save_restorer
from gruppo.modalities.restoration.heads import Meant
from gruppo.modalities.restoration.patches import check_divides, patch_means, to_columns
from gruppo.modalities.restoration.restorer import Restorer, one_size, refusal
from gruppo.modalities.restoration.sampling import checked_sampling, finish_of, noise_at, refuse_namesakes
from gruppo.protocols import Outputs, Policy
from gruppo.types import Gaussian, GruppoError, Likelihood, MicroBatch, Prompt, Request, Rollouts, Sampling, Stat

SUPERVISED = {
    "output": "the picture of the mean action",
    "base": "the network's own picture, without an action",
    "told": "the picture of the network that is given the true controls",
}
BATCH_ROWS = 64
"""Pictures that are drawn together."""
MAX_PSNR_DB = 100.0
"""Equal images have an infinite PSNR; a mean needs a number."""
SQUARE = 16
"""A square of so many pixels a side counts as one token of a piece's budget."""
Trains = Literal["all", "action"]
Supervises = Literal["output", "base", "told"]


class RestorationPolicy(Policy):
    """Draws an action from N(m(x), s^2) for each degraded picture x, and shows the picture that the action makes.

    ``network``: any module from pictures [N, C, H, W] in [0, 1] to pictures of the same size, in its own dtype; dropout
    and moving statistics are off. ``action``: one of ``actions``. ``patches`` a side: a picture has that many squared
    actions, one of each patch (see ``patches``). ``trains``: all weights, or the action's alone; then the network
    rests. ``loss`` and ``supervises``: what the supervised term is of, the deterministic picture ("output") or the
    network's without any action ("base"); with a detached action, clean pictures then teach the network alone and
    rewards the action alone, in one run. "told", of controls: the network's, told the true value of each control, which
    the prompts' columns of the same names hold. ``consistency``: see there. ``spec``: how ``open_network`` finds the
    network, for a save.

    Actions are kept in float32, and a log-prob is that of the action as kept: joint nats, in float64. A temperature t
    draws from the density to the power 1 / t: a standard deviation of s t^(1/2). At temperature 0 the action is the
    mean, with its log-prob at 1; it is never learned from. A picture that rewards read is as a file would hold it.
    """

    copy = None
    """No copy of the weights in another dtype."""
    supports = frozenset({"consistency", "demonstrations", "shared_critic"})
    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian", "output", "values"})
    action_name, budget_name, renders_images = "action", "squares", True
    actions_are_positions = True
    module: Restorer

    def __init__(
        self,
        network: nn.Module,
        action: Any,
        *,
        channels: int = 3,
        patches: int = 1,
        trains: Trains = "all",
        loss: PixelLoss = "charbonnier",
        supervises: Supervises = "output",
        consistency: Consistency | None = None,
        spec: str = "",
    ) -> None:
        for name, value, known in (
            ("trains", trains, get_args(Trains)),
            ("loss", loss, get_args(PixelLoss)),
            ("supervises", supervises, get_args(Supervises)),
        ):
            if value not in known:
                raise GruppoError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}. Set {known[0]!r}.")
        if action.channels != channels:
            raise GruppoError(
                f"the action is for {action.channels} channels and the network for {channels}; give both the same."
            )
        if patches < 1:
            raise GruppoError(f"patches={patches} cuts nothing; set 1 for a picture as one action.")
        if supervises == "told" and not action.conditions:
            raise GruppoError(
                f"supervises='told' tells the network its controls, and the action {action.settings['kind']!r} tells "
                "it none. Set the action controls:noise=0-50@25, or supervises='output'."
            )
        self.channels, self.patches, self.spec = channels, patches, spec
        self.trains, self.loss, self.supervises = trains, loss, supervises
        self.consistency: Consistency = consistency or ToReference(loss)
        self.module = Restorer(network, action).eval()
        self.value_head: nn.Module | None = None
        """Features [N, F] to values [N]; beside ``module``, so that saves, copies and references are without it."""
        if trains == "action":
            network.requires_grad_(False)
            self._refuse_idle_choices()
        if action.settings["kind"] != "pixels":
            _, height, width = action.shape((channels, 1, 1))
            check_divides(patches, height, width, "the action's grid")
        self.module.probe(channels)

    def _refuse_idle_choices(self) -> None:
        """Where the network rests, something else has to learn."""
        if self.supervises in ("base", "told"):
            raise GruppoError(
                f"supervises={self.supervises!r} teaches the network alone, and trains='action' lets it rest. Set "
                "trains='all', or supervises='output'."
            )
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise GruppoError(
                f"trains='action' leaves nothing to train: the action {self.module.acts.settings['kind']!r} has no "
                "weights but its std, which is fixed. Set trains='all', or learned=true."
            )

    # --- what the trainer asks of any policy ---

    @property
    def columns(self) -> int:
        """Actions of a picture."""
        return self.patches**2

    def dims(self, picture: Sequence[int]) -> int:
        """Numbers in one action, of pictures [C, H, W]."""
        return math.prod(self.module.acts.shape(picture)) // self.columns

    def at(self, module: nn.Module) -> RestorationPolicy:
        """This policy over other weights of the same kind: a reference."""
        if not isinstance(module, Restorer):
            raise GruppoError(f"a restoration policy is over a Restorer, not a {type(module).__name__}. Give it one.")
        other = copy.copy(self)
        other.module, other.value_head = module.eval(), None
        return other

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with beside the network, as JSON."""
        own = {"patches": self.patches, "trains": self.trains, "loss": self.loss, "supervises": self.supervises}
        return {"channels": self.channels, "action": dict(self.module.acts.settings), **own}

    def save(self, folder: Path) -> None:
        """The weights and what they are called with; ``load_restorer`` opens it."""
        save_restorer(self.module, {"network": self.spec} | self.settings, folder)

    def describe(self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int) -> list[str]:
        picture, action = prompts[0].inputs, self.module.acts.settings
        settings = ", ".join(f"{name} {value}" for name, value in action.items() if name != "controls")
        weights = {name: sum(p.numel() for p in part.parameters()) for name, part in self.module.named_children()}
        parts = "" if self.patches == 1 else f"; one for each of {self.patches} x {self.patches} patches"
        frozen = ", frozen" if self.trains == "action" else ""
        return [
            f"an image    {list(picture.shape)}",
            f"an action   {settings}: {self.dims(picture.shape):,} numbers{parts}",
            f"weights     {weights['network']:,} of the network{frozen}, {weights['action']:,} of the action, at "
            f"{config.restoration.action_lr_factor:g} times the learning rate",
            f"losses      supervised on {SUPERVISED[self.supervises]}, by {self.loss}; consistency to "
            f"{config.restoration.consistency}",
            "evaluated   the picture of the mean action",
        ]

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Tensor:
        return read_image(text, channels=self.channels)

    def default_budget(self) -> int:
        return 4096 if self.device.type == "cpu" else 65536  # squares of 16 x 16 pixels

    def out_of_memory_hint(self, units: int) -> tuple[str, str]:
        return "one picture", "Crop the data smaller (crop=64), or train a smaller network."

    def evaluation_stats(self, rollouts: Rollouts) -> dict[str, Stat]:
        """PSNR in dB to the clean images, where there are any: what gates read, whatever is rewarded."""
        targets = [rollouts.prompts[group].target for group in rollouts.group_ids.tolist()]
        pairs = [(x, y) for x, y in zip(rollouts.completions, targets, strict=True) if isinstance(y, Tensor)]
        values = [float(psnr(x[None], as_saved(y)[None])[0].clamp(max=MAX_PSNR_DB)) for x, y in pairs]
        return {"mean:psnr": Stat.of(torch.tensor(values, dtype=torch.float64))}

    # --- sampling ---

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None."""
        why = refusal(prompt.inputs, self.channels, "input") or self._refuse_size(prompt.inputs)
        return f"prompt {prompt.id!r} {why}" if why else None

    def _refuse_size(self, picture: Tensor) -> str | None:
        height, width = picture.shape[-2:]
        if height % self.patches or width % self.patches:
            return (
                f"is {height} x {width}, which {self.patches} x {self.patches} patches do not divide. Crop it to a "
                f"multiple of {self.patches}."
            )
        return None

    def check_sampling(self, sampling: Sampling) -> Sampling:
        """Refuse what a normal has no part in."""
        return checked_sampling(sampling, self.columns)

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """``request.size`` pictures of each prompt; noise hangs on (seed, draw, sample) alone."""
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        sampling = self.check_sampling(sampling)
        for request in requests:
            if why := self.check_prompt(request.prompt, sampling):
                raise GruppoError(why)
        pictures = one_size([request.prompt.inputs for request in requests])
        refuse_namesakes(requests, pictures)
        self.module.eval()
        owners = torch.tensor([p for p, request in enumerate(requests) for _ in range(request.size)])
        samples = [request.first + n for request in requests for n in range(request.size)]
        parts = []
        for at in range(0, len(owners), BATCH_ROWS):
            asked, own = owners[at : at + BATCH_ROWS].unique(return_inverse=True)
            prompts = tuple(requests[p].prompt for p in asked.tolist())
            parts.append(self._drawn(prompts, pictures[asked], own, samples[at : at + BATCH_ROWS], sampling, seed))
        return Rollouts.cat(parts)

    def _drawn(
        self,
        prompts: tuple[Prompt, ...],
        pictures: Float[Tensor, "P C H W"],
        owners: Int[Tensor, "B"],
        samples: Sequence[int],
        sampling: Sampling,
        seed: int,
    ) -> Rollouts:
        count, own = len(owners), owners.to(self.device)
        x = pictures.to(self.device)
        meant, std = self._meant(x, torch.full((count,), float(sampling.temperature), dtype=torch.float64))
        mean = meant.mean.double()[own]  # [B, K, h, w]
        if sampling.temperature:
            where = [(prompts[p].draw, n) for p, n in zip(owners.tolist(), samples, strict=True)]
            mean = mean + std * noise_at(seed, where, mean.shape[1:]).to(self.device).double()
        drawn = mean.float()
        base = None if meant.base is None else meant.base[own]
        shown = self.module.shown(x[own], base, drawn).float()
        is_finite = (drawn.isfinite().flatten(1).all(dim=1) & shown.isfinite().flatten(1).all(dim=1)).cpu()
        actions = to_columns(drawn, self.patches)
        mask = is_finite[:, None].expand(-1, self.columns).contiguous()
        logprobs = self._logprobs(actions, to_columns(meant.mean, self.patches)[own], std, mask.to(self.device))
        return Rollouts(
            prompts=prompts,
            group_ids=owners,
            actions=actions.cpu(),
            mask=mask,
            lengths=torch.full((count,), self.columns),
            completions=tuple(as_saved(shown.nan_to_num()).cpu()),
            sampler_logprobs=logprobs.float().cpu(),
            policy_version=torch.zeros(mask.shape, dtype=torch.long),
            temperature=torch.full((count,), float(sampling.temperature)),
            finish=tuple(map(finish_of, is_finite.tolist())),
            shared={"degraded": pictures},
        )

    # --- evaluating ---

    def micro_batches(self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int) -> list[MicroBatch]:
        """Whole rows, those of a group together; squares of 16 x 16 pixels of each row count in ``budget``.

        Each row counts, although the rows of a group need one forward of the network.
        """
        height, width = rollouts.shared["degraded"].shape[-2:]
        cost = max(-(-height * width // SQUARE**2), 1)
        rows = loss_mask.any(dim=1).nonzero()[:, 0]
        rows = rows[rollouts.group_ids[rows].argsort(stable=True)]
        return [MicroBatch(part, slice(0, self.columns)) for part in rows.split(max(budget // cost, 1)) if len(part)]

    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        """Joint nats of each action, in float64; 0 where mask is False. The network is asked once for each prompt.

        "output" is the deterministic picture [b, C, H, W], neither clamped nor rounded. Demonstrations have it in any
        case, and log-probs of 0: their actions are clean pictures, which the policy did not draw.
        """
        self.module.eval()
        x, group = self._asked(rollouts, micro_batch)
        is_demonstration = "demonstration" in rollouts.per_row
        if is_demonstration:
            prompts = [rollouts.prompts[group] for group in rollouts.group_ids[micro_batch.rows].unique().tolist()]
            return self._said_of_demonstrations(rollouts, micro_batch, self.taught(x, prompts)[group])
        meant, std = self._meant(x, rollouts.temperature[micro_batch.rows].double())
        output = self.module.output(x, meant)[group] if "output" in outputs else None
        mask = micro_batch.of(rollouts.mask).to(self.device)
        mean = to_columns(meant.mean, self.patches)[group][:, micro_batch.cols]  # [b, t, *E]
        actions = micro_batch.of(rollouts.actions).to(self.device)
        wants_entropy = "entropy" in outputs or "entropy_value" in outputs
        spread = self._as_columns(std, mean)
        return Likelihood(
            self._logprobs(actions, mean, std, mask),
            torch.where(mask, gaussian_entropy(mean, spread), 0) if wants_entropy else None,
            Gaussian(mean, spread) if "gaussian" in outputs else None,
            torch.where(mask, self._valued(x, meant.base)[group][:, micro_batch.cols], 0)
            if "values" in outputs
            else None,
            output,
        )

    def _asked(self, rollouts: Rollouts, micro_batch: MicroBatch) -> tuple[Float[Tensor, "P C H W"], Int[Tensor, "b"]]:
        """The pictures of a piece's prompts, each once, and which of them is each row's."""
        groups, group = rollouts.group_ids[micro_batch.rows].unique(return_inverse=True)
        return rollouts.shared["degraded"][groups].to(self.device), group.to(self.device)

    def _meant(self, x: Tensor, temperature: Float[Tensor, "b"]) -> tuple[Meant, Float[Tensor, "b K 1 1"]]:
        """Of pictures; and each row's standard deviations. A mode's, which nothing is drawn with, are those at 1."""
        power = torch.where(temperature > 0, temperature, 1).sqrt().to(self.device)
        return self.module(x), power[:, None, None, None] * self.module.acts.scale()[:, None, None]

    def _as_columns(self, std: Float[Tensor, "b K 1 1"], mean: Float[Tensor, "b t ..."]) -> Float[Tensor, "b t ..."]:
        return std[:, None].expand(mean.shape)

    def _logprobs(
        self, actions: Tensor, mean: Tensor, std: Float[Tensor, "b K 1 1"], mask: Bool[Tensor, "b t"]
    ) -> Float[Tensor, "b t"]:
        """What is not the policy's own may be NaN: it is left out before it meets a gradient."""
        chosen = mask.reshape(*mask.shape, 1, 1, 1)
        action = torch.where(chosen, actions.double(), 0)
        mean = torch.where(chosen, mean.double(), 0)
        return torch.where(mask, gaussian_logprob(action, mean, self._as_columns(std, mean)), 0)

    # --- a critic on the network's pictures ---

    def feature_width(self) -> int:
        """Numbers that ``value_head`` reads of each patch."""
        has_base = self.module.acts.settings["kind"] != "controls"
        return 2 * self.channels * (2 if has_base else 1)

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """What ``value_head`` says of each patch before it is acted on, 0 where mask is False."""
        self.module.eval()
        x, group = self._asked(rollouts, micro_batch)
        values = self._valued(x, self.module(x).base)[group][:, micro_batch.cols]
        return torch.where(micro_batch.of(rollouts.mask).to(self.device), values, 0)

    def _valued(self, x: Tensor, base: Tensor | None) -> Float[Tensor, "P T"]:
        """Of the mean and the mean square of each channel of a patch, of x and of the network's picture."""
        if self.value_head is None:
            raise GruppoError("values are wanted of a policy without a value head. Set policy.value_head first.")
        seen = x.to(self.compute_dtype)
        seen = seen if base is None else torch.cat([seen, base.to(seen)], dim=1)
        parts = to_columns(torch.cat([seen, seen.square()], dim=1), self.patches)  # [P, T, F, h, w]
        features = parts.mean(dim=(-2, -1))
        return self.value_head(features.flatten(0, 1)).reshape(features.shape[:2])

    # --- demonstrations ---

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Why this prompt's clean picture cannot be learned from, or None."""
        if why := self.check_prompt(prompt, Sampling()):
            return why
        why = refusal(prompt.target, self.channels, "target")
        if why is None and prompt.target.shape != prompt.inputs.shape:
            why = (
                f"is {list(prompt.inputs.shape)} and its target {list(prompt.target.shape)}; both need one size. "
                "Resize the degraded picture."
            )
        if why is None and self.supervises == "told":
            action: Any = self.module.action
            why = action.refuse_values(prompt.meta)
        return f"prompt {prompt.id!r} {why}" if why else None

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Each prompt's degraded picture with its clean one, cut into patches, as actions. Nothing is random."""
        for prompt in prompts:
            if why := self.check_demonstration(prompt):
                raise GruppoError(why)
        return demonstrated(prompts, self.patches)

    def taught(self, x: Float[Tensor, "P C H W"], prompts: Sequence[Prompt]) -> Float[Tensor, "P C H W"]:
        """The pictures that clean ones are compared with: see ``supervises``."""
        if self.supervises == "base":
            return self.module.plain(x)
        if self.supervises == "told":
            action: Any = self.module.action
            return self.module.told(x, action.true_values([prompt.meta for prompt in prompts]).to(x))
        return self.output_of(x)

    def _said_of_demonstrations(self, rollouts: Rollouts, micro_batch: MicroBatch, output: Tensor | None) -> Likelihood:
        nothing = torch.zeros(micro_batch.of(rollouts.mask).shape, dtype=torch.float64, device=self.device)
        return Likelihood(nothing, output=output)

    def supervised_loss(self, rollouts: Rollouts, likelihood: Likelihood) -> Float[Tensor, "b t"]:
        """Mean of rho(picture, clean) over the channels and pixels of each patch: of demonstrations, or of rollouts of
        prompts with clean pictures whose likelihood was asked for "output"."""
        output = _needed(likelihood, "the supervised loss")
        if "demonstration" not in rollouts.per_row:
            for prompt in rollouts.prompts:
                if why := self.check_demonstration(prompt):
                    raise GruppoError(why)
        clean = clean_pictures(rollouts, self.patches)
        return patch_means(PIXEL_LOSSES[self.loss](output, clean.to(output)), self.patches)

    def consistency_loss(self, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood) -> Float[Tensor, "b t"]:
        """The mean of ``consistency`` over the channels and pixels of each patch; ``likelihood`` with its "output"."""
        _needed(likelihood, "the consistency loss")
        return patch_means(self.consistency(self, rollouts, likelihood, ref), self.patches)

    # --- pictures ---

    def output_of(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        """The deterministic picture of each, with gradient, neither clamped nor rounded."""
        self.module.eval()
        return self.module.output(x)

    @torch.no_grad()
    def restore(self, pictures: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        """The deterministic picture of each as a file would hold it; on the CPU."""
        for picture in pictures:
            if why := refusal(picture, self.channels, "input"):
                raise GruppoError(f"a picture to restore {why}")
        parts = [self.output_of(part.float().to(self.device)).float().cpu() for part in pictures.split(BATCH_ROWS)]
        return as_saved(torch.cat(parts))


def _needed(likelihood: Likelihood, what: str) -> Tensor:
    if likelihood.output is None:
        raise GruppoError(
            f'{what} reads the deterministic picture, and there is none. Ask likelihood want=("output",).'
        )
    return likelihood.output
