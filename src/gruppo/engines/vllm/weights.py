"""Checks that a server holds the weights that were published to it.

The label of a version says what was requested, not what was loaded. So log-probs of fixed probe
tokens are compared with the trainer's. What rounding may make of them is measured:

- A server that is new or comes back first loads a canary, which is the policy with noise in every
  tensor. Its error must not exceed ``MAX_RATIO`` times what rounding alone makes of the canary.
- The error of its first real weights is its rounding. Beyond ``MAX_ERROR`` times it, or where it
  does not follow an update that is larger, a canary is published and the weights are sent again.
  The largest ratio of 318 right publishes was 2.1.

vLLM 0.32 and newer also zero all parameters before a load, so that what it leaves out shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.distributed import sharding
from gruppo.distributed.collectives import rank
from gruppo.engines.vllm.client import Replica, SampledRow, ServerError, generated
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
"""Error of a server under the canary, over what rounding makes there. Measured: 0.82 to 1.12."""
MAX_ERROR = 3.0
"""Error of a server's later weights, over that of its first."""
LEAST_FOLLOWED = 0.6
"""Share of a large update that a server follows. Measured of right ones: 0.8 to 1.0, as rounding
follows large changes of a token's log-prob incompletely."""
JITTER = 0.25
"""Of the compute dtype's last bit: the log-probs of weights that differ by so much are rounded
independently. Measured with SmolLM2-135M in bfloat16 under the canary: 0.33 to 0.40 nats apart; two
independent roundings make 0.40."""
LEAST_NATS, LEAST_ROUNDING_NATS = 0.01, 1e-4
"""Allowed of a canary, and least rounding of a server: one float32 is not another's."""
WARM = Sampling(temperature=1.5, top_k=20, max_actions=4)
"""Processed log-probs are then 0.3 nats and more from raw ones."""
SAMPLED = 8
"""Prompts that a new server samples after."""
LONG_PROMPT = 160
"""Tokens that fill a block of the prefix cache, which holds 16 to 128."""
SALT = "gruppo-probe"


@dataclass
class Standing:
    """What is known of one server that has passed a canary."""

    previous: Float[Tensor, "N"]
    """The trainer's log-probs of weights that it was seen to hold."""
    limit: float
    """Largest error."""
    is_measured: bool = False
    """Whether the limit is that of its own rounding."""
    error: float = 0.0
    is_doubted: bool = False
    """Whether a canary is due."""


class WeightCheck:
    """Compares log-probs of servers with the trainer's. Methods that take the policy are
    collectives."""

    def __init__(
        self, policy: Any, prompts: Sequence[Prompt], sampling: Sampling, *, max_mismatch: float
    ) -> None:
        distinct = list({str(prompt.inputs): prompt for prompt in prompts}.values())[:PROBES]
        self.requests = [
            Request(replace(prompt, draw=number), 1) for number, prompt in enumerate(distinct)
        ]
        # one less than a completion: to score a row, a server samples a token
        probes = Sampling(max_actions=max(min(PROBE_TOKENS, sampling.max_actions - 1), 1))
        self.max_mismatch = max_mismatch
        self.rollouts = policy.sample(self.requests, probes, seed=0)
        self.prompts = [ids.tolist() for ids in self.rollouts.shared["prompt_ids"]]
        actions = self.rollouts.actions.tolist()
        lengths = self.rollouts.lengths.tolist()
        rows = zip(self.prompts, actions, lengths, strict=True)
        self.rows = [prompt + tokens[:length] for prompt, tokens, length in rows]
        self.long_prompt = [token for row in self.rows for token in row][:LONG_PROMPT]
        # log-probs of the probes under the newest weights and the canary's
        self.new = self.canary = torch.zeros(0)  # [N]
        self.canary_limit = LEAST_NATS
        self.standings: dict[int, Standing] = {}
        """By the number of the server."""
        self.refused: set[int] = set()
        """Servers whose log-probs of this version are not the trainer's."""
        self.sampled: dict[int, list[SampledRow]] = {}
        """Rows of servers that passed a canary at this publish, for ``check_sampled``."""

    def limit(self, context: int) -> None:
        """Keep requests within the servers' context."""
        self.long_prompt = self.long_prompt[: context - WARM.max_actions]

    # --- the trainer's side ---

    def publish(self, policy: Any) -> None:
        """Score the probes with the weights that are about to be published."""
        self.new = logprobs_of(policy, self.rollouts)
        self.refused = set()

    @contextmanager
    def perturbed(self, policy: Any) -> Iterator[None]:
        """Within, the policy has the weights of the canary."""
        is_adapter = policy.base_sha256 is not None
        parameters = policy.module.parameters()
        tensors = [
            sharding.local(p.detach()) for p in parameters if p.requires_grad or not is_adapter
        ]
        kept = [tensor.to("cpu", copy=True) for tensor in tensors]
        least = ADAPTER_SCALE if is_adapter else 1e-3

        def perturb(jitter: float) -> None:
            with torch.random.fork_rng():
                torch.manual_seed(rank())
                for tensor, before in zip(tensors, kept, strict=True):
                    tensor.copy_(before)
                    scale = STRENGTH * tensor.float().square().mean().sqrt().clamp(min=least)
                    noise = scale * torch.randn_like(tensor, dtype=torch.float32)
                    tensor += noise.to(tensor.dtype)
                    tensor *= 1 + jitter * (torch.rand_like(tensor) - 0.5)
            policy.refresh(force=True)

        try:
            perturb(JITTER * torch.finfo(policy.compute_dtype).eps)
            rounded = logprobs_of(policy, self.rollouts)
            perturb(0.0)
            self.canary = logprobs_of(policy, self.rollouts)
            self.canary_limit = max(MAX_RATIO * _rms(rounded - self.canary), LEAST_NATS)
            yield
        finally:
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
            policy.refresh(force=True)

    # --- the servers' side ---

    async def ask(self, replica: Replica, label: str) -> Float[Tensor, "N"]:
        """Return a server's log-probs of the probes; ServerError where its labels or its cache are
        of other weights."""
        scores = await replica.score(self.rows)
        pairs = zip(scores, self.prompts, strict=True)
        found = [x for row, ids in pairs for x in row[len(ids) - 1 :]]
        if len(found) != len(self.new):
            raise ServerError(f"it sent log-probs of {len(found)} of {len(self.new)} probe tokens")
        params = {"temperature": WARM.temperature, "top_k": WARM.top_k}
        params |= {"max_tokens": WARM.max_actions, "logprobs": 0, "seed": 0}
        row = await replica.sample(self.long_prompt, params, label, salt=SALT)
        cached = row.cached_tokens
        if cached:
            raise ServerError(
                f"its prefix cache still held {cached} tokens of {label} from earlier weights"
            )
        if replica.number in self.sampled:  # admitted by a canary: see check_sampled
            self.sampled[replica.number] = [
                await replica.sample(ids, params | {"seed": seed}, label)
                for seed, ids in enumerate(self.prompts[:SAMPLED])
            ]
        return torch.tensor(found, dtype=torch.float64)

    def has_passed(self, replica: Replica) -> bool:
        """Whether a server may be given the published weights: its newest canary was right."""
        return replica.number in self.standings

    def needs_canary(self, replica: Replica) -> bool:
        """Whether a server is new or back, or its last error was too large."""
        return not self.has_passed(replica) or self.standings[replica.number].is_doubted

    def judge_canary(self, replica: Replica, server: Float[Tensor, "N"]) -> None:
        """Admit a server that has the weights of the canary, up to rounding; ServerError if it has
        others."""
        error = _rms(server - self.canary)
        if not error <= self.canary_limit:  # NaN is not
            raise _not_held("of test weights", error, self.canary_limit)
        known = self.standings.setdefault(
            replica.number, Standing(self.canary, limit=self.canary_limit)
        )
        known.previous = self.canary
        known.is_doubted = False
        self.sampled[replica.number] = []

    def judge(self, replica: Replica, server: Float[Tensor, "N"]) -> None:
        """ServerError unless a server's log-probs are those of the published weights."""
        known = self.standings[replica.number]
        change = self.new - known.previous
        followed = float((server - known.previous) @ change / (change @ change))
        known.error = _rms(server - self.new)
        is_large = _rms(change) > known.limit
        if not known.error <= known.limit or (is_large and not followed >= LEAST_FOLLOWED):
            known.is_doubted = True
            self.refused.add(replica.number)
            raise _not_held(f"follow {followed:.2f} of the update", known.error, known.limit)
        if not known.is_measured:
            # never above the canary's limit: a fault in the first weights is no rounding
            measured = MAX_ERROR * max(known.error, LEAST_ROUNDING_NATS)
            known.limit = min(known.limit, measured)
            known.is_measured = True
        if is_large:
            known.previous = self.new

    def doubt(self, replica: Replica, *, is_canary: bool = False) -> None:
        """A server was left out: at the next publish it needs the canary. Where it has failed a
        canary, nothing is loaded into it before it passes one."""
        self.sampled.pop(replica.number, None)
        if is_canary:
            self.standings.pop(replica.number, None)
        elif self.has_passed(replica):
            self.standings[replica.number].is_doubted = True

    def check_sampled(self, policy: Any, rows: Sequence[SampledRow]) -> str:
        """Return why the log-probs of sampled tokens are not those of the published weights; "" if
        they are."""
        requests = self.requests[: len(rows)]
        rollouts = policy.sample(requests, WARM, seed=0, generate=lambda *_: generated(rows))
        server = rollouts.sampler_logprobs[rollouts.mask].double()
        error = (server - logprobs_of(policy, rollouts)).abs().mean().item()
        if error <= self.max_mismatch:
            return ""
        return (
            f"log-probs of tokens that it samples at temperature {WARM.temperature:g} are "
            f"{error:.2g} nats from the trainer's on average, more than "
            f"engine.max_mismatch={self.max_mismatch:g}. Start it with gruppo serve, or with "
            f"--logprobs-mode processed_logprobs and the dtype of the trainer"
        )

    def metrics(self) -> dict[str, float]:
        """The largest error of a server at the last publish."""
        errors = [standing.error for standing in self.standings.values()]
        return {"engine/error_nats": max(errors)} if errors else {}


def _not_held(what: str, error: float, limit: float) -> ServerError:
    return ServerError(
        f"it does not hold the weights that it loaded: its log-probs {what} and are {error:.2g} "
        f"nats from the trainer's, where rounding makes at most {limit:.2g}"
    )


@torch.no_grad()
def logprobs_of(policy: Any, rollouts: Rollouts) -> Float[Tensor, "N"]:
    """Log-probs of the actions, row by row, in float64 on the CPU."""
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    columns = torch.arange(logprobs.shape[1])
    budget = policy.default_budgets[policy.device.type != "cpu"]
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, budget):
        likelihood = sharding.forward(policy.module, policy.likelihood, rollouts, micro_batch)
        rows, cols = micro_batch.rows[:, None], columns[micro_batch.cols][None]
        logprobs[rows, cols] = likelihood.logprobs.double().cpu()
    return logprobs[rollouts.mask]


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
