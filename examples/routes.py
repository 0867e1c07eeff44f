"""Short tours through cities (the travelling-salesman problem): a policy of your own, trained by
GRPO.

A pointer decoder (Kool et al. 2019, arXiv 1803.08475) picks the next city; the reward is the
negative length of the tour, and the mean of a group is the shared baseline of POMO (Kwon et al.
2020, arXiv 2010.16011).

    gruppo train examples/routes.py:routes --name routes   # a few minutes on one core
    python examples/routes.py runs/routes   # held-out tours against nearest neighbour and 2-opt
"""

from __future__ import annotations

import math
import sys

import torch
from torch import nn

import gruppo
from gruppo.protocols import ImageDescriptionMixin, MemoryMixin
from gruppo.seeds import generator_at, uniforms_at

CITIES, WIDTH, HEADS = 20, 64, 4
HELD_OUT = 256


class PointerNetwork(nn.Module):
    """Encodes cities [P, N, 2] once, and scores every next city [P, B, T, N] from the first and the
    last one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            activation="gelu",
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first_query, self.last_query = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.mean_query = nn.Linear(WIDTH, WIDTH)
        self.keys, self.attended = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.start = nn.Parameter(
            torch.zeros(2, WIDTH)
        )  # stands for the first and last city before there is one

    def encode(self, cities):
        cities = self.encoder(self.embed(cities))  # [P, N, W]
        return cities, cities.mean(1, keepdim=True)

    def logits(self, encoded, group, first, last, visited):
        """Scores [b, t, N] of the next city. ``first``, ``last``: cities [b, t], -1 for none;
        ``visited`` [b, t, N]."""
        nodes, mean = encoded
        nodes = nodes[group]  # [b, N, W]

        def embedding(city, place):
            chosen = nodes.gather(1, city.clamp(min=0)[..., None].expand(-1, -1, WIDTH))
            return torch.where(city[..., None] < 0, self.start[place], chosen)

        query = self.mean_query(mean[group]) + self.first_query(embedding(first, 0))
        query = query + self.last_query(embedding(last, 1))  # [b, t, W]
        keys, values = self.keys(nodes).chunk(2, dim=-1)

        def heads(x):
            return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # [b, H, n, W / H]

        seen = ~visited[:, None]  # every row has a city left
        glimpse = nn.functional.scaled_dot_product_attention(
            heads(query), heads(keys), heads(values), attn_mask=seen
        )
        glimpse = self.attended(glimpse.transpose(1, 2).flatten(2))  # [b, t, W]
        scores = 10 * torch.tanh(glimpse @ nodes.transpose(1, 2) / math.sqrt(WIDTH))
        return scores.masked_fill(visited, -math.inf)


class RoutePolicy(gruppo.Policy, ImageDescriptionMixin, MemoryMixin):
    """Chooses the cities of a tour one after the other."""

    likelihood_outputs = frozenset({"entropy", "entropy_value"})
    action_name, budget_name = "city", "cities"

    def __init__(self, module):
        self.module = module.eval()

    def check_sampling(self, sampling):
        if sampling.top_k or sampling.top_p < 1:
            raise gruppo.GruppoError(
                "routes have no top-k and top-p. Leave --rollout.top-k and --rollout.top-p out."
            )
        return sampling

    @torch.no_grad()
    def sample(self, requests, sampling, *, seed):
        sampling = self.check_sampling(sampling)
        cities = torch.tensor([request.prompt.inputs for request in requests])  # [P, N, 2]
        count = cities.shape[1]
        group = torch.tensor([g for g, request in enumerate(requests) for _ in range(request.size)])
        device = self.device
        samples = [
            (q.prompt.draw, number) for q in requests for number in range(q.first, q.first + q.size)
        ]
        uniforms = torch.stack(
            [uniforms_at(seed, draw, sample, count) for draw, sample in samples]
        ).to(device)  # [B, N], float64
        rows, of_row = len(group), group.to(device)
        encoded = self.module.encode(cities.to(device))
        visited = torch.zeros(rows, 1, count, dtype=torch.bool, device=device)
        first = last = torch.full((rows, 1), -1, device=device)
        actions = torch.zeros(rows, count, dtype=torch.long, device=device)
        logprobs = torch.zeros(rows, count, device=device)
        for t in range(count):
            scores = self.module.logits(encoded, of_row, first, last, visited)
            scores = scores[:, 0].double()  # [B, N]
            distribution = (scores / (sampling.temperature or 1.0)).log_softmax(-1)
            if (
                sampling.temperature
            ):  # inverse of the distribution function, at the sample's own random number
                cumulative = distribution.exp().cumsum(-1)
                choice = torch.searchsorted(
                    cumulative, (uniforms[:, t] * cumulative[:, -1])[:, None], right=True
                )
                possible = (
                    torch.arange(count, device=device)
                    .expand(rows, -1)
                    .masked_fill(visited[:, 0], -1)
                    .amax(-1, keepdim=True)
                )
                choice = torch.minimum(
                    choice, possible
                )  # rounding may go past the last city that is left
            else:
                choice = scores.argmax(-1, keepdim=True)
            actions[:, t], logprobs[:, t] = choice[:, 0], distribution.gather(-1, choice)[:, 0]
            visited = visited.scatter(2, choice[:, None], True)
            first, last = choice if t == 0 else first, choice
        actions, mask = actions.cpu(), torch.ones(rows, count, dtype=torch.bool)
        return gruppo.Rollouts(
            prompts=tuple(request.prompt for request in requests),
            group_ids=group,
            actions=actions,
            mask=mask,
            lengths=mask.sum(1),
            completions=tuple(actions.tolist()),
            sampler_logprobs=logprobs.cpu(),
            policy_version=torch.zeros_like(actions),
            temperature=torch.full((rows,), float(sampling.temperature)),
            finish=("stop",) * rows,
        )

    def likelihood(self, rollouts, micro_batch, *, outputs=()):
        groups, group = rollouts.group_ids[micro_batch.rows].unique(return_inverse=True)
        cities = torch.tensor([rollouts.prompts[g].inputs for g in groups.tolist()])
        actions = micro_batch.of(rollouts.actions).to(self.device)  # [b, t], whole rows
        none = torch.full_like(actions[:, :1], -1)
        last = torch.cat([none, actions[:, :-1]], dim=1)
        first = torch.cat([none, actions[:, :1].expand(-1, actions.shape[1] - 1)], dim=1)
        chosen = nn.functional.one_hot(actions, cities.shape[1]).bool()
        visited = chosen.cumsum(1) - chosen.long() > 0
        scores = self.module.logits(
            self.module.encode(cities.to(self.device)), group.to(self.device), first, last, visited
        ).double()
        temperature = rollouts.temperature[micro_batch.rows].to(self.device)[:, None, None]
        logprobs = (scores / temperature).log_softmax(-1)
        entropy = None
        if "entropy" in outputs or "entropy_value" in outputs:
            entropy = -(logprobs.exp() * logprobs.masked_fill(visited, 0)).sum(-1)
        return gruppo.Likelihood(logprobs.gather(-1, actions[..., None])[..., 0], entropy)

    def render(self, rollouts, row):
        """The tour as an image [3, 128, 128]: cities dark, its first edge blue, the others
        orange."""
        cities = torch.tensor(rollouts.prompts[int(rollouts.group_ids[row])].inputs)[
            rollouts.actions[row]
        ]
        image, steps = torch.ones(3, 128, 128), torch.linspace(0, 1, 200)[:, None]
        colors = {"edge": (0.9, 0.5, 0.1), "start": (0.1, 0.4, 0.9), "city": (0.1, 0.1, 0.1)}
        for n, (a, b) in enumerate(zip(cities, cities.roll(-1, 0), strict=True)):
            x, y = ((a + steps * (b - a)) * 123 + 2).round().long().T
            image[:, y, x] = torch.tensor(colors["edge" if n else "start"])[:, None]
        for x, y in (cities * 123 + 2).round().long().tolist():
            image[:, y - 1 : y + 2, x - 1 : x + 2] = torch.tensor(colors["city"])[:, None, None]
        return image


def policy():
    """An untrained policy; gruppo seeds torch's generator before it calls this."""
    return RoutePolicy(PointerNetwork())


def instances(seed=0):
    """An endless stream of random instances, and ``HELD_OUT`` others for evaluation."""

    def cities(*address):
        return torch.rand(CITIES, 2, generator=generator_at(*address)).tolist()

    def prompt(item, draw):
        return gruppo.Prompt("-".join(map(str, item)), cities(*item), draw=draw)

    return gruppo.IndexedSource(
        name="routes",
        seed=seed,
        train=lambda draw: (seed, "train", draw),
        evaluation=[(0, "held out", n) for n in range(HELD_OUT)],
        prompt_at=prompt,
        columns=(),
        digest=f"routes of {CITIES} cities",
    )


def length_of(cities, tour):
    path = torch.tensor(cities)[torch.tensor(tour)]
    return float((path - path.roll(-1, 0)).norm(dim=-1).sum())


def tour_length(prompts, completions, **kwargs):
    """The reward: the negative length of each tour."""
    return [-length_of(cities, tour) for cities, tour in zip(prompts, completions, strict=True)]


def routes():
    """Short tours by GRPO with the group mean as baseline (POMO); 256 held-out instances of 20
    cities."""
    return gruppo.Config(
        model=f"{__file__}:policy",
        data=f"{__file__}:instances",
        reward=(f"{__file__}:tour_length",),
        objective=gruppo.PRESETS["dr_grpo"],
        rollout=gruppo.RolloutConfig(prompts=64, group_size=20, max_new_tokens=CITIES),
        optim=gruppo.OptimConfig(lr=1e-3, warmup_steps=10, decay="cosine", token_budget=26000),
        evaluation=gruppo.EvaluationConfig(prompts=HELD_OUT, every=100),
        steps=300,
        show_samples_every=50,
    )


# --- baselines ------------------------------------------------------------------------------------


def nearest_neighbour(cities, start=0):
    apart = torch.cdist(torch.tensor(cities), torch.tensor(cities))
    tour = [start]
    while len(tour) < len(cities):
        row = apart[tour[-1]].clone()
        row[tour] = math.inf
        tour.append(int(row.argmin()))
    return tour


def two_opt(cities, tour):
    """Reverse parts of the tour for as long as that makes it shorter."""
    apart, improved = torch.cdist(torch.tensor(cities), torch.tensor(cities)).tolist(), True
    while improved:
        improved = False
        for i in range(1, len(tour) - 1):
            for j in range(i + 1, len(tour)):
                a, b, c, d = tour[i - 1], tour[i], tour[j], tour[(j + 1) % len(tour)]
                if apart[a][c] + apart[b][d] < apart[a][b] + apart[c][d] - 1e-9:
                    tour[i : j + 1], improved = tour[i : j + 1][::-1], True
    return tour


def compare(run):
    """Print the mean length of held-out tours, of the policy and of the baselines."""
    trained = gruppo.load_policy(run)
    prompts = instances().held_out(HELD_OUT)
    greedy = trained.sample(
        [gruppo.Request(p, 1) for p in prompts], gruppo.Sampling(temperature=0.0), seed=0
    )
    sampled = trained.sample([gruppo.Request(p, 16) for p in prompts], gruppo.Sampling(), seed=0)
    tours = zip(sampled.group_ids.tolist(), sampled.completions, strict=True)
    lengths = torch.tensor(
        [length_of(sampled.prompts[group].inputs, tour) for group, tour in tours]
    )
    neighbours = [nearest_neighbour(p.inputs) for p in prompts]
    rows = {
        "nearest neighbour": [
            length_of(p.inputs, tour) for p, tour in zip(prompts, neighbours, strict=True)
        ],
        "2-opt from it": [
            length_of(p.inputs, two_opt(p.inputs, list(tour)))
            for p, tour in zip(prompts, neighbours, strict=True)
        ],
        "policy, greedy": [
            length_of(p.inputs, tour) for p, tour in zip(prompts, greedy.completions, strict=True)
        ],
        "policy, best of 16": lengths.reshape(len(prompts), 16).amin(1).tolist(),
    }
    for name, values in rows.items():
        print(f"{name:<20} {sum(values) / len(values):.3f}")


if __name__ == "__main__":
    compare(sys.argv[1] if len(sys.argv) > 1 else "runs/routes")
