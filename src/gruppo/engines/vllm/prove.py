"""What the trainer asks of a server before it samples from it: probes after each publish, a canary
at admission."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gruppo.distributed import sharding
from gruppo.distributed.collectives import rank
from gruppo.engines.proof import Evidence, Slope, regress
from gruppo.engines.vllm.client import Replica, SampledRow, ServerError
from gruppo.types import Prompt, Request, Rollouts, Sampling

PROBES, PROBE_TOKENS = 16, 16
"""Rows, one of each prompt, and their longest completion."""
STRENGTH = 0.2
"""Noise of the canary, relative to the root mean square of each tensor. With SmolLM2-135M, a layer,
the head or the embedding that is left out is then 3 to 7 times the rounding, one matrix 2 times; at
0.1, 1.5 to 4 and 1 times."""
ADAPTER_SCALE = 0.25
"""In place of a smaller root mean square of an adapter's tensor: half of them begin at 0."""
MAX_RATIO = 1.5
"""Error of a server under the canary, over the trainer's own rounding there. Measured: 0.82 to
1.12."""
JITTER = 0.25
"""Of the compute dtype's last bit: the log-probs of weights that differ by so much are rounded
independently. Measured with SmolLM2-135M in bfloat16 under the canary: 0.33 to 0.40 nats apart; two
independent roundings make 0.40."""
LEAST_NATS = 0.01
"""Rounding that is always allowed for: one float32 is not another's."""
OTHER_NATS = 0.5
"""Mean error on the probes that no rounding explains (0.035 to 0.1 with bfloat16); another model is
2 nats away."""
ISOLATING = 8
"""Probes that find which group of tensors a server did not load."""
UNDECIDED = 8
"""Publishes in a row that prove nothing by themselves, after which the canary is due."""
WARM = Sampling(temperature=1.5, top_k=20, max_actions=4)
"""Processed log-probs are then 0.3 nats and more from raw ones."""
LONG_PROMPT = 160
"""Tokens that fill a block of the prefix cache, which holds 16 to 128."""
SALT = "gruppo-probe"


@dataclass
class Standing:
    """What is known of one server."""

    previous: Float[Tensor, "N"]
    """The trainer's log-probs of the weights that it was last seen with."""
    last_error: Float[Tensor, "N"] | None = None
    undecided: list[Evidence] = field(default_factory=list)
    slope: Slope | None = None
    is_doubted: bool = False
    """Whether the regression refused it; the canary then decides."""


class Proof:
    """Compares log-probs of servers with the trainer's. Methods that take the policy are
    collectives."""

    def __init__(
        self, policy: Any, prompts: Sequence[Prompt], sampling: Sampling, *, max_mismatch: float
    ) -> None:
        distinct = list({str(prompt.inputs): prompt for prompt in prompts}.values())[:PROBES]
        requests = [
            Request(replace(prompt, draw=number), 1) for number, prompt in enumerate(distinct)
        ]
        # one less than a completion: to score a row, a server samples a token
        probes = Sampling(max_actions=max(min(PROBE_TOKENS, sampling.max_actions - 1), 1))
        self.max_mismatch, self.rollouts = max_mismatch, policy.sample(requests, probes, seed=0)
        self.row_ids = self.rollouts.mask.nonzero()[:, 0]
        self.prompts = [
            self.rollouts.shared["prompt_ids"][group].tolist() for group in self.rollouts.group_ids
        ]
        ids = zip(
            self.prompts,
            self.rollouts.actions.tolist(),
            self.rollouts.lengths.tolist(),
            strict=True,
        )
        self.rows = [prompt + actions[:length] for prompt, actions, length in ids]
        self.long_prompt = [token for row in self.rows for token in row][:LONG_PROMPT]
        # log-probs of the probes under the first weights, the newest, and the canary's
        self.first = self.new = self.canary = torch.zeros(0)  # [N]
        self.canary_limit = LEAST_NATS
        self.standings: dict[int, Standing] = {}
        """By the number of the server; of those that passed a canary and have been sampled from
        since."""
        self.passed: set[int] = set()
        """Servers that passed their last canary."""
        self.wrong: dict[int, Tensor] = {}
        """Answers of those that did not."""
        self.sampled: dict[int, list[SampledRow]] = {}
        """Rows of servers that passed a canary at this publish, for ``check_sampled``."""
        self.score_s = self.ask_s = 0.0
        """Of this publish: the trainer's scores, and the slowest server's answers."""
        self._kept: dict[str, Tensor] = {}

    # --- the trainer's side ---

    def publish(self, policy: Any) -> None:
        """Score the probes with the weights that are about to be published."""
        began = time.perf_counter()
        self.new = self.score(policy)
        self.score_s, self.ask_s = time.perf_counter() - began, 0.0
        if not len(self.first):
            self.first = self.new

    def score(self, policy: Any, rollouts: Rollouts | None = None) -> Float[Tensor, "N"]:
        """Return the log-probs of the probes in float32, from weights that are rounded as the
        published ones are.

        Sharded weights are scored in the compute dtype, with its noise.
        """
        if _is_sharded(policy.module):
            return _logprobs(policy, rollouts or self.rollouts)
        with _RoundedParameters(policy.compute_dtype):
            return _logprobs(policy.at(policy.module), rollouts or self.rollouts)

    @contextmanager
    def perturbed(self, policy: Any) -> Iterator[None]:
        """Within, the policy has the weights of the canary: every tensor that servers load has
        noise of its own."""
        is_adapter = policy.base_sha256 is not None
        named = policy.module.named_parameters()
        tensors = {
            name: sharding.local(p.detach())
            for name, p in named
            if p.requires_grad or not is_adapter
        }
        self._kept = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        least = ADAPTER_SCALE if is_adapter else 1e-3

        is_sharded = _is_sharded(policy.module)

        def perturb(jitter: float) -> None:
            with torch.random.fork_rng():
                torch.manual_seed(rank())
                for tensor, kept in zip(tensors.values(), self._kept.values(), strict=True):
                    tensor.copy_(kept)
                    scale = STRENGTH * tensor.float().square().mean().sqrt().clamp(min=least)
                    tensor += (torch.randn_like(tensor, dtype=torch.float32) * scale).to(
                        tensor.dtype
                    )
                    if is_sharded:
                        tensor *= 1 + jitter * (torch.rand_like(tensor) - 0.5)
            policy.refresh(force=True)

        try:
            if is_sharded:  # scored in the compute dtype, as by servers: two roundings differ
                perturb(JITTER * torch.finfo(policy.compute_dtype).eps)
                rounded = _logprobs(policy, self.rollouts)
            perturb(0.0)
            self.canary = self.score(policy)
            if not is_sharded:
                rounded = _logprobs(policy, self.rollouts)
            # in the compute dtype, as servers score: what rounding alone may make
            self.canary_limit = max(MAX_RATIO * _rms(rounded - self.canary), LEAST_NATS)
            yield
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(self._kept[name])
            self._kept = {}
            policy.refresh(force=True)

    def limit(self, context: int) -> None:
        """Keep requests within the servers' context."""
        self.long_prompt = self.long_prompt[: context - WARM.max_actions]

    # --- the servers' side ---

    async def ask(self, replica: Replica, label: str) -> Float[Tensor, "N"]:
        """Return a server's log-probs of the probes; ServerError where its labels or its cache are
        of other weights."""
        began = time.perf_counter()
        scores = await replica.score(self.rows)
        found = [
            x for row, ids in zip(scores, self.prompts, strict=True) for x in row[len(ids) - 1 :]
        ]
        if len(found) != len(self.row_ids):
            raise ServerError(
                f"it sent log-probs of {len(found)} probe tokens in place of {len(self.row_ids)}"
            )
        prompts = [self.long_prompt, *self.prompts[:8]]
        params = {
            "temperature": WARM.temperature,
            "top_k": WARM.top_k,
            "max_tokens": WARM.max_actions,
            "logprobs": 0,
        }
        sampled = [await replica.sample(self.long_prompt, params | {"seed": 0}, label, salt=SALT)]
        if cached := sampled[0].cached_tokens:
            raise ServerError(
                f"its prefix cache still held {cached} tokens of {label} from earlier weights"
            )
        if replica.number in self.sampled:  # admitted by a canary: see check_sampled
            for seed, ids in enumerate(prompts[1:]):
                sampled.append(await replica.sample(ids, params | {"seed": seed}, label))
            self.sampled[replica.number] = sampled
        self.ask_s = max(self.ask_s, time.perf_counter() - began)
        return torch.tensor(found, dtype=torch.float64)

    def needs_canary(self, replica: Replica) -> bool:
        """Whether a server is new or back, is doubted, or has proved nothing for long."""
        standing = self.standings.get(replica.number)
        return standing is None or standing.is_doubted or len(standing.undecided) >= UNDECIDED

    def judge_canary(self, replica: Replica, server: Float[Tensor, "N"]) -> None:
        """Admit a server that has the weights of the canary, up to rounding; ServerError if it has
        others."""
        error, rounding = _rms(server - self.canary), self.canary_limit / MAX_RATIO
        if not error <= self.canary_limit:  # NaN is not
            self.wrong[replica.number] = server
            why = (
                f"test weights are {error:.2g} nats from the trainer's, where rounding makes "
                f"{rounding:.2g}"
            )
            raise ServerError(f"it does not hold the weights that it loaded: {why}")
        self.standings[replica.number], self.sampled[replica.number] = Standing(self.canary), []
        self.passed.add(replica.number)

    def judge(self, replica: Replica, server: Float[Tensor, "N"]) -> None:
        """Note what a server's log-probs prove; ServerError if it does not hold the published
        weights."""
        # one that was restarted during a step has no standing: the canary follows at the next
        # publish
        known = self.standings.get(replica.number) or Standing(self.first)
        evidence = Evidence(server, self.new, known.previous, self.row_ids, known.last_error)
        slope = known.slope = regress([*known.undecided, evidence])
        known.is_doubted = slope.verdict == "refused" or not slope.error_nats <= OTHER_NATS
        if known.is_doubted:
            follows = (
                f"it follows {slope.value:.2f} of the update ({slope.low:.2f} to {slope.high:.2f})"
            )
            error = f"{follows}, {slope.error_nats:.2g} nats from the trainer on average"
            raise ServerError(f"it does not hold the weights that it loaded: {error}")
        known.undecided = [] if slope.verdict == "proved" else [*known.undecided, evidence]
        known.previous, known.last_error = self.new, server - self.new

    def forget(self, replica: Replica) -> None:
        """A server was left out: at the next publish it needs the canary."""
        self.standings.pop(replica.number, None)
        self.sampled.pop(replica.number, None)

    # --- after a canary ---

    def check_sampled(
        self, policy: Any, rows: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> str:
        """Return why the log-probs of sampled tokens are not those of the published weights; "" if
        they are."""
        prompts, count = [self.long_prompt, *self.prompts[:8]], len(rows)
        lengths = torch.tensor([len(tokens) for tokens, _ in rows])
        rollouts = replace(
            self.rollouts.take(range(1)),
            prompts=tuple(Prompt(str(n), None, draw=n) for n in range(count)),
            group_ids=torch.arange(count),
            actions=nn.utils.rnn.pad_sequence(
                [torch.tensor(tokens) for tokens, _ in rows], batch_first=True
            ),  # [B, T]
            mask=torch.arange(int(lengths.max())) < lengths[:, None],
            lengths=lengths,
            temperature=torch.full((count,), WARM.temperature),
            shared={"prompt_ids": tuple(torch.tensor(ids) for ids in prompts)},
            per_row={
                "top_k": torch.full((count,), WARM.top_k),
                "top_p": torch.ones(count, dtype=torch.float64),
            },
        )
        server = torch.tensor([x for _, logprobs in rows for x in logprobs], dtype=torch.float64)
        error = (server - self.score(policy, rollouts)).abs().mean().item()
        if error <= self.max_mismatch:
            return ""
        what = (
            f"log-probs of tokens that it samples at temperature {WARM.temperature:g} are "
            f"{error:.2g} nats from"
        )
        limit = f"the trainer's on average, more than engine.max_mismatch={self.max_mismatch:g}"
        do = (
            "Start it with gruppo serve, or with --logprobs-mode processed_logprobs and the dtype "
            "of the trainer"
        )
        return f"{what} {limit}. {do}"

    def isolate(self, policy: Any, number: int) -> str:
        """Return which group of tensors, left out of the canary, explains a server's error; "" if
        none does.

        Within ``perturbed``: a layer, or its adapter, the head, the embedding or the norm gets its
        weights from before. A group that the server did not load explains its error up to rounding.
        A collective; the first rank, which has the server's answers, knows.
        """
        server, module = self.wrong.pop(number, None), policy.module
        kept, is_sharded = dict(self._kept), _is_sharded(module)
        if not is_sharded:  # tied names, of which one is kept; shards of them are replaced together
            for name, tensor in module.state_dict(keep_vars=True).items():
                twin = next((other for other, p in module.named_parameters() if p is tensor), None)
                if name not in kept and twin in kept:
                    kept[name] = kept[twin]
        groups: dict[str, list[str]] = {}
        for name in kept:
            layer = re.match(r".*?\.\d+(?=\.)", name)
            groups.setdefault(layer[0] if layer else name.rpartition(".")[0], []).append(name)
        few = self.rollouts.take(
            range(min(ISOLATING, len(self.rollouts)))
        )  # one forward for each group
        groups["all"] = [*kept]
        left = {}
        for group, names in groups.items():
            with (_replaced_shards if is_sharded else _replaced)(
                module, {name: kept[name] for name in names}
            ):
                scores = self.score(policy, few)
            left[group] = 0.0 if server is None else _rms(server[self.row_ids < len(few)] - scores)
        best = min(left, key=lambda group: left[group])
        if server is None or left[best] > 2 * self.canary_limit:
            return ""
        return "nothing of it was loaded" if best == "all" else f"{best} was not loaded"

    def metrics(self) -> dict[str, float]:
        """Of the servers' last checks: the lowest slope, the largest error, and how many are
        undecided."""
        slopes = [
            standing.slope for standing in self.standings.values() if standing.slope is not None
        ]
        if not slopes:
            return {}
        return {
            "time/proof_s": self.score_s + self.ask_s,
            "engine/proof_slope": min(slope.value for slope in slopes),
            "engine/proof_error_nats": max(slope.error_nats for slope in slopes),
            "engine/update_nats": max(slope.signal_nats for slope in slopes),
            "engine/undecided": float(sum(slope.verdict == "undecided" for slope in slopes)),
        }


class _RoundedParameters(TorchFunctionMode):
    """Within, every operation reads parameters rounded to ``dtype`` and computes in float32,
    without a second copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def rounded(x: Any) -> Any:
            if type(x) in (list, tuple):  # tree_map on every argument took most of a proof's time
                return tree_map(rounded, x)
            return (
                x.detach().to(self.dtype).float()
                if isinstance(x, nn.Parameter) and x.is_floating_point()
                else x
            )

        return func(*map(rounded, args), **{name: rounded(x) for name, x in (kwargs or {}).items()})


def _is_sharded(module: nn.Module) -> bool:
    return any(map(sharding.is_sharded, module.parameters()))


@torch.no_grad()
def _logprobs(policy: Any, rollouts: Rollouts) -> Float[Tensor, "N"]:
    """Log-probs of the actions, row by row, in float64 on the CPU."""
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    columns = torch.arange(logprobs.shape[1])
    for micro_batch in policy.micro_batches(
        rollouts, rollouts.mask, policy.default_budgets[policy.device.type != "cpu"]
    ):
        likelihood = sharding.forward(policy.module, policy.likelihood, rollouts, micro_batch)
        logprobs[micro_batch.rows[:, None], columns[micro_batch.cols][None]] = (
            likelihood.logprobs.double().cpu()
        )
    return logprobs[rollouts.mask]


@contextmanager
def _replaced(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, parameters by name have other values; a tied one is untied."""
    places = [
        (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in weights
    ]
    originals = [getattr(owner, attribute) for owner, attribute in places]
    try:
        for (owner, attribute), original, value in zip(
            places, originals, weights.values(), strict=True
        ):
            setattr(owner, attribute, nn.Parameter(value.to(original.device), requires_grad=False))
        yield
    finally:
        for (owner, attribute), original in zip(places, originals, strict=True):
            setattr(owner, attribute, original)


@contextmanager
def _replaced_shards(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, this rank's shards of parameters by name have other values."""
    shards = {
        name: sharding.local(p.detach()) for name, p in module.named_parameters() if name in weights
    }
    originals = {name: shard.clone() for name, shard in shards.items()}
    try:
        for name, shard in shards.items():
            shard.copy_(weights[name])
        yield
    finally:
        for name, shard in shards.items():
            shard.copy_(originals[name])


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
