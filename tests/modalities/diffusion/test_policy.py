"""A denoiser as a policy: what it samples, how it scores that, and that both are one function."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.fakes_diffusion import (
    FAKES,
    SHAPE,
    TinyDenoiser,
    ancestral,
    cps,
    ddim,
    ddpm,
    denoiser,
    doubled,
    flow_sde,
    prompts,
    requests,
    sampled,
    whole,
)

from gruppo.core.images import to_uint8
from gruppo.core.kl import gaussian_kl
from gruppo.modalities.common.critic import SharedCritic
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.diffusion import (
    ClassLabels,
    DenoiserPolicy,
    DenoisingUNet,
    DiffusionSampling,
    FlowSchedule,
    load_denoiser,
)
from gruppo.modalities.diffusion.denoiser import StepSelection
from gruppo.modalities.diffusion.policy import DenoiserCritic
from gruppo.modalities.diffusion.sampling import branch_step
from gruppo.modalities.diffusion.schedules import split_prediction
from gruppo.seeds import generator_at
from gruppo.testing import check_policy
from gruppo.types import GruppoError, MicroBatch, Prompt, Request, Rollouts

ALL = 10**9
DIMS = math.prod(SHAPE)


@pytest.fixture(params=FAKES, ids=lambda make: make.__name__)
def make(request):
    return request.param


@pytest.fixture
def fake(make):
    return make()


@torch.no_grad()
def logprobs_of(policy, rollouts, budget=ALL):
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, budget):
        place = (micro_batch.rows[:, None], torch.arange(logprobs.shape[1])[micro_batch.cols])
        logprobs[place] = policy.likelihood(rollouts, micro_batch).logprobs
    return logprobs


def noise_of(policy, rollouts):
    """What was drawn in each step that is learned from: (state - mean) / std, [B, T, *E]."""
    with torch.no_grad():
        normal = policy.likelihood(rollouts, whole(rollouts), outputs=("gaussian",)).gaussian
    return (rollouts.actions - normal.mean) / normal.std.reshape(*normal.std.shape, 1, 1, 1)


def disturbed(policy, by=0.1):
    with torch.no_grad():
        for n, parameter in enumerate(policy.module.parameters()):
            parameter.add_(
                by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
            )


# --- one distribution -----------------------------------------------------------------------------


def test_it_keeps_the_contract_of_a_policy(fake):
    check_policy(fake.policy, [0, 1, 2], sampling=fake.sampling)


@pytest.mark.silent_bug(2)
@pytest.mark.silent_bug(36)
@pytest.mark.parametrize("budget", [1, ALL])
def test_the_ratio_is_1_on_every_stored_step_at_other_batch_sizes(fake, budget):
    """At most 1e-5 nats per dimension; where mask is False both sides are 0."""
    rollouts = sampled(fake)
    apart = (logprobs_of(fake.policy, rollouts, budget) - rollouts.sampler_logprobs).abs()
    assert apart.max() <= 1e-5 * DIMS
    assert rollouts.sampler_logprobs[rollouts.mask].abs().min() > 0.01


@pytest.mark.silent_bug(36)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_joint_error_of_a_picture_of_28_by_28_is_far_below_a_clip_of_one_nat(guidance):
    """784 dimensions, ten steps down to a std of 0.1; two rows of the batch at a time and all at
    once."""
    torch.manual_seed(0)
    net = DenoisingUNet()
    torch.nn.init.normal_(net.conv_out[-1].weight, std=0.1)
    policy = DenoiserPolicy(net, (1, 28, 28), condition=ClassLabels(10, dropped=0.1))
    rollouts = policy.sample(requests(5, 3), DiffusionSampling(guidance=guidance), seed=0)
    for budget in (20, ALL):
        apart = (logprobs_of(policy, rollouts, budget) - rollouts.sampler_logprobs).abs()
        assert apart.max() <= 1e-5 * 784
        assert apart.max() <= 0.1, "a tenth of clip_nats 1"


@pytest.mark.silent_bug(35)
def test_a_log_prob_is_that_of_torch_s_normal_of_the_state_as_it_is_stored(fake):
    rollouts = sampled(fake)
    likelihood = fake.policy.likelihood(rollouts, whole(rollouts), outputs=("gaussian", "entropy"))
    assert rollouts.actions.dtype == torch.float32 and likelihood.logprobs.dtype == torch.float64
    std = likelihood.gaussian.std.reshape(*likelihood.gaussian.std.shape, 1, 1, 1).expand_as(
        likelihood.gaussian.mean
    )
    normal = torch.distributions.Normal(likelihood.gaussian.mean, std)
    by_hand = normal.log_prob(rollouts.actions.double()).flatten(2).sum(-1)
    entropy = normal.entropy().flatten(2).sum(-1)
    torch.testing.assert_close(
        likelihood.logprobs, torch.where(rollouts.mask, by_hand, 0), rtol=1e-12, atol=1e-9
    )
    torch.testing.assert_close(
        likelihood.entropy, torch.where(rollouts.mask, entropy, 0), rtol=1e-12, atol=1e-9
    )


def test_only_what_is_asked_for_is_there():
    fake = doubled(ancestral())
    rollouts = sampled(fake, 2)
    plain = fake.policy.likelihood(rollouts, whole(rollouts))
    assert (plain.entropy, plain.gaussian, plain.values, plain.output) == (None, None, None, None)
    likelihood = fake.policy.likelihood(rollouts, whole(rollouts), outputs=("entropy_value",))
    assert likelihood.entropy is not None and likelihood.gaussian is None


@pytest.mark.silent_bug(36)
def test_guidance_is_in_both_sides():
    """n + g (s - n), by the raw network; and scoring without it would be seen."""
    fake = doubled(cps())
    rollouts = sampled(fake, 2)
    x, one = rollouts.per_row["first"].double(), torch.ones(2, dtype=torch.float64)
    label = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        conditional, unconditional = (
            fake.policy.module(x, one, label),
            fake.policy.module(x, one, label + 3),
        )
        got = fake.policy.denoiser.predict(x, one, label, 2.5)[0]
    torch.testing.assert_close(got, unconditional + 2.5 * (conditional - unconditional))
    kinds = rollouts.per_row["sampling"].clone()
    kinds[:, -1] = 1
    unguided = replace(rollouts, per_row={**rollouts.per_row, "sampling": kinds})
    apart = logprobs_of(fake.policy, unguided) - logprobs_of(fake.policy, rollouts)
    assert apart[rollouts.mask].abs().max() > 1


@pytest.mark.silent_bug(17)
def test_the_kl_is_that_of_monte_carlo_within_its_error():
    fake = ancestral()
    rollouts = sampled(fake, 1)
    reference = ReferenceModel(fake.policy)
    disturbed(fake.policy, 0.3)
    ours, theirs = (
        of.likelihood(rollouts, whole(rollouts), outputs=("gaussian",)).gaussian
        for of in (fake.policy, reference)
    )
    exact = gaussian_kl(ours.mean, ours.std, theirs.mean, theirs.std)[0].detach()
    generator = torch.Generator().manual_seed(0)
    for step in (0, 3):
        p = torch.distributions.Normal(ours.mean[0, step].detach(), ours.std[0, step])
        q = torch.distributions.Normal(theirs.mean[0, step], theirs.std[0, step])
        x = p.loc + p.scale * torch.randn(100_000, *SHAPE, generator=generator, dtype=torch.float64)
        log_ratios = (p.log_prob(x) - q.log_prob(x)).flatten(1).sum(1)
        error = float(log_ratios.std() / math.sqrt(len(log_ratios)))
        assert (
            abs(float(log_ratios.mean() - exact[step])) <= 4 * error and error < 0.02 * exact[step]
        )


# --- steps, noise and their addresses -------------------------------------------------------------


@pytest.mark.silent_bug(36)
def test_the_last_step_is_the_ode_s_and_is_never_learned_from(fake):
    rollouts = sampled(fake)
    assert (
        not rollouts.mask[:, -1].any()
        and rollouts.lengths.tolist() == [fake.sampling.max_actions] * 9
    )
    again = sampled(replace_noise(fake, "independent"), 4, seed=3)
    twice = fake.policy.sample(requests(4), replace(fake.sampling, noise="independent"), seed=3)
    assert torch.equal(again.actions, twice.actions)
    before, clean = twice.actions[:, -2].double(), twice.actions[:, -1]
    with (
        torch.no_grad()
    ):  # x' = alpha' x0 + sigma' e at clean data: the picture that the network says
        one = replace(
            twice,
            mask=torch.zeros_like(twice.mask).index_fill(
                1, torch.tensor(fake.sampling.steps - 1), True
            ),
        )
        steps = StepSelection(fake.policy.denoiser, one, whole(one))
        sampling, condition = steps.sampling(), steps.condition
        levels, times = fake.policy.denoiser.levels(sampling.steps, steps.column)
        denoiser = fake.policy.denoiser
        prediction, _ = denoiser.predict(steps.states(), times, condition, sampling.guidance)
        level = (levels.alpha, levels.sigma)
        x0, _ = split_prediction(steps.states(), prediction, level, denoiser.predicts)
    torch.testing.assert_close(clean.double(), x0, rtol=0, atol=1e-5 * float(before.abs().max()))


def replace_noise(fake, noise):
    return replace(fake, sampling=replace(fake.sampling, noise=noise))


def test_which_steps_are_learned_from():
    assert sampled(ancestral()).mask[0].tolist() == [True] * 4 + [False]
    assert sampled(flow_sde()).mask.unique(dim=0).tolist() == [
        [False, True, True, True, False, False]
    ]
    masks = sampled(cps(), 4, 2, 3).mask  # half of four, of each group its own
    assert masks.sum(1).tolist() == [2] * 9
    halves = cps().policy.sample(
        [Request(Prompt(f"{n}", 0, draw=n), 2) for n in range(20)], cps().sampling, seed=0
    )
    assert len(halves.mask.unique(dim=0)) == 6, "all pairs of the four steps turn up"
    assert all(len(halves.mask[halves.group_ids == n].unique(dim=0)) == 1 for n in range(20))


@pytest.mark.silent_bug(26)
def test_each_number_of_noise_hangs_on_seed_draw_sample_and_step():
    rollouts = sampled(ancestral())
    noise = noise_of(ancestral().policy, rollouts)
    for row, (draw, sample) in enumerate(
        [(10, 0), (10, 1), (10, 2), (10, 3), (11, 0), (11, 1), (12, 0)]
    ):
        at = [
            torch.randn(SHAPE, generator=generator_at(3, "noise", draw, sample, step))
            for step in ("first", *range(4))
        ]
        assert torch.equal(rollouts.per_row["first"][row], at[0])
        torch.testing.assert_close(noise[row, :4].float(), torch.stack(at[1:]), rtol=0, atol=1e-4)


def test_a_group_of_shared_noise_has_one_first_latent_and_steps_of_its_own():
    rollouts = sampled(cps())
    first = rollouts.per_row["first"]
    assert all(torch.equal(first[n], first[0]) for n in range(4)) and not torch.equal(
        first[4], first[0]
    )
    assert len({tuple(row.flatten().tolist()) for row in rollouts.actions[:4, 0]}) == 4


def test_a_branched_group_parts_at_one_step_which_alone_is_learned_from():
    fake = ddpm()
    rollouts = sampled(fake, 4, 4, 4)
    for n in range(3):
        rows = rollouts.group_ids == n
        step = branch_step(fake.sampling, 3, 10 + n)
        assert rollouts.mask[rows].int().sum(0).tolist() == [
            4 * (column == step) for column in range(6)
        ]
        states = rollouts.actions[rows]
        torch.testing.assert_close(
            states[:, :step], states[:1, :step].expand(4, -1, -1, -1, -1), rtol=0, atol=1e-5
        )
        parted = states[:, step:].double().std(dim=0).flatten(1).mean(1)
        assert (parted > 1e-3).all()
    everything = replace(
        rollouts, mask=torch.ones_like(rollouts.mask).index_fill(1, torch.tensor(5), False)
    )
    noise = noise_of(fake.policy, everything)[:4, :5]
    apart = (noise - noise[:1]).abs().flatten(2).amax(dim=(0, 2))
    step = branch_step(fake.sampling, 3, 10)
    assert [bool(one > 0.1) for one in apart] == [column == step for column in range(5)], (
        "later noise is common again"
    )


def test_a_state_that_a_group_has_in_common_is_asked_for_once(make):
    """In sampling up to the step at which groups part, and in scoring that step; of own noise every
    row is asked."""
    fake = make()
    seen = []
    fake.policy.module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    rollouts = sampled(fake, 4, 2, 3)
    parts = {n: branch_step(fake.sampling, 3, 10 + n) for n in range(3)}
    sizes, each = (4, 2, 3), 2 if fake.sampling.guidance != 1 else 1
    common = {  # whether a group's rows are one before a step
        "independent": lambda step, n: False,
        "shared": lambda step, n: step == 0,
        "branched": lambda step, n: step <= parts[n],
    }[fake.sampling.noise]
    assert seen == [
        each * sum(1 if common(step, n) else sizes[n] for n in range(3))
        for step in range(fake.sampling.steps)
    ]
    seen.clear()
    fake.policy.likelihood(rollouts, whole(rollouts))
    evaluated = sum(
        1 if common(c, n) else sizes[n]
        for n in range(3)
        for c in rollouts.mask[rollouts.group_ids == n][0].nonzero()[:, 0].tolist()
    )
    assert seen == [each * evaluated]


@pytest.mark.silent_bug(25)
@pytest.mark.silent_bug(26)
def test_a_group_that_grows_equals_the_larger_group_at_once_and_company_changes_nothing(
    fake, monkeypatch
):
    whole_group = sampled(fake, 5, 3)
    both = prompts()
    calls = [[Request(both[1], 3), Request(both[0], 2)], [Request(both[0], 3, first=2)]]
    grown = Rollouts.cat([fake.policy.sample(call, fake.sampling, seed=3) for call in calls])
    monkeypatch.setattr(DenoiserPolicy, "batch_rows", 3)
    cut = sampled(fake, 5, 3)
    assert torch.equal(cut.group_ids, whole_group.group_ids) and torch.equal(
        cut.mask, whole_group.mask
    )
    torch.testing.assert_close(cut.actions, whole_group.actions, rtol=1e-5, atol=1e-4)
    together = fake.policy.sample([*calls[0], *calls[1]], fake.sampling, seed=3)
    assert len(together.prompts) == len(grown.prompts) == 2
    for n, prompt in enumerate(together.prompts):
        grown_rows, rows = grown.group_ids == n, together.group_ids == n
        assert grown.prompts[n].id == prompt.id
        torch.testing.assert_close(
            together.actions[rows], grown.actions[grown_rows], rtol=1e-5, atol=1e-4
        )
    for n, prompt in enumerate(grown.prompts):
        outputs = whole_group.group_ids == [p.id for p in whole_group.prompts].index(prompt.id)
        got = grown.group_ids == n
        torch.testing.assert_close(
            grown.actions[got], whole_group.actions[outputs], rtol=1e-5, atol=1e-4
        )
        assert torch.equal(grown.mask[got], whole_group.mask[outputs])


def test_temperature_0_is_the_ode_of_any_number_of_steps_from_latents_that_no_seed_changes():
    fake = ancestral()
    mode = replace(fake.sampling, temperature=0.0, ode_steps=7)
    rollouts = fake.policy.sample(requests(2), mode, seed=3)
    assert torch.equal(rollouts.actions, fake.policy.sample(requests(2), mode, seed=4).actions)
    assert (
        rollouts.actions.shape[1] == 7
        and not rollouts.mask.any()
        and not rollouts.sampler_logprobs.any()
    )
    assert not torch.equal(rollouts.per_row["first"][0], rollouts.per_row["first"][1])
    x, label = rollouts.per_row["first"], torch.zeros(2, dtype=torch.long)
    with torch.no_grad():  # Euler's steps of dx/dt = v
        for n in range(7):
            t = 1 - n / 7
            x0 = fake.policy.module(x, torch.full((2,), t), label)
            x = x - (x - x0) / t / 7
    torch.testing.assert_close(rollouts.actions[:, -1], x, rtol=1e-4, atol=1e-5)
    with pytest.raises(GruppoError, match=r"the ODE .temperature 0. have no density"):
        fake.policy.likelihood(replace(rollouts, mask=~rollouts.mask), whole(rollouts))


# --- pictures -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(38)
def test_a_picture_is_the_last_state_as_a_saved_file_gives_it_back(fake):
    rollouts = sampled(fake)
    for row, picture in enumerate(rollouts.completions):
        by_hand = ((rollouts.actions[row, -1] + 1) / 2 * 255).clamp(0, 255).round() / 255
        assert picture.shape == SHAPE and torch.equal(picture, by_hand)
        assert torch.equal(to_uint8(picture).float() / 255, picture)


def test_rows_whose_states_are_not_numbers_end_in_error_and_are_not_learned_from():
    fake = ancestral()
    with torch.no_grad():
        fake.policy.module.labels.weight[1] = torch.nan
    rollouts = sampled(fake, 2, 2, 1)
    assert rollouts.finish == ("stop", "stop", "error", "error", "stop")
    assert not rollouts.mask[2:4].any() and rollouts.sampler_logprobs.isfinite().all()
    assert all(picture.isfinite().all() for picture in rollouts.completions)
    logprobs = fake.policy.likelihood(rollouts, whole(rollouts)).logprobs
    logprobs.sum().backward()
    assert logprobs.isfinite().all() and fake.policy.module.conv_in.weight.grad.isfinite().all()


# --- pieces ---------------------------------------------------------------------------------------


@pytest.mark.silent_bug(3)
@pytest.mark.parametrize("budget", [1, 5, ALL])
def test_micro_batches_cover_each_kept_action_once_within_the_budget_of_evaluations(fake, budget):
    rollouts = sampled(fake)
    loss_mask = rollouts.mask.clone()
    loss_mask[[1, 6]] = False
    loss_mask[3, :2] = False
    each = 2 if fake.sampling.guidance != 1 else 1
    covered = torch.zeros(loss_mask.shape, dtype=torch.long)
    for micro_batch in fake.policy.micro_batches(rollouts, loss_mask, budget):
        covered[micro_batch.rows[:, None], torch.arange(loss_mask.shape[1])[micro_batch.cols]] += 1
        evaluations = each * int(micro_batch.of(rollouts.mask).sum())
        assert evaluations <= max(budget, each) and micro_batch.of(loss_mask).any()
    assert covered.max() == 1 and (covered[loss_mask] == 1).all() and not covered[[1, 6]].any()


def test_a_row_that_does_not_fit_is_cut_into_columns_and_others_are_not():
    fake = ancestral()  # four noisy steps a row
    rollouts = sampled(fake, 3)

    def cut(budget):
        return [
            (p.rows.tolist(), (p.cols.start, p.cols.stop))
            for p in fake.policy.micro_batches(rollouts, rollouts.mask, budget)
        ]

    assert cut(8) == [([0, 1], (0, 4)), ([2], (0, 4))]
    assert cut(3) == [([n], cols) for n in range(3) for cols in ((0, 3), (3, 4))]
    none = torch.zeros_like(rollouts.mask)
    assert fake.policy.micro_batches(rollouts, none, 3) == []


def test_nothing_is_said_of_a_micro_batch_in_which_nothing_was_chosen():
    fake = ancestral()
    SharedCritic(fake.policy)
    rollouts = sampled(fake)
    outputs = ("entropy", "gaussian", "values")
    likelihood = fake.policy.likelihood(
        rollouts, MicroBatch(torch.tensor([0, 1]), slice(4, 5)), outputs=outputs
    )
    assert (
        likelihood.logprobs.tolist()
        == likelihood.entropy.tolist()
        == likelihood.values.tolist()
        == [[0], [0]]
    )
    assert likelihood.gaussian.mean.shape == (2, 1, *SHAPE)
    assert likelihood.gaussian.std.tolist() == [[1], [1]]
    assert fake.policy.values(rollouts, MicroBatch(torch.tensor([0, 1]), slice(4, 5))).tolist() == [
        [0],
        [0],
    ]


# --- critics, references, weights -----------------------------------------------------------------


def test_a_shared_critic_reads_the_middle_of_the_state_before_each_step():
    """w . mean over space of the middle + b, by the raw network; through a likelihood the same."""
    fake = doubled(flow_sde())
    critic = SharedCritic(fake.policy)
    with torch.no_grad():
        critic.module.weight.normal_(generator=torch.Generator().manual_seed(0))
    rollouts = sampled(fake, 2)
    values = critic.values(rollouts, whole(rollouts))
    seen = []
    fake.policy.module.middle.register_forward_hook(lambda _, inputs, output: seen.append(output))
    t = fake.policy.denoiser.schedule.times(6)[2:3].expand(2)
    fake.policy.module(rollouts.actions[:, 1].double(), t, torch.zeros(2, dtype=torch.long))
    by_hand = seen[0].mean(dim=(2, 3)) @ critic.module.weight[0] + critic.module.bias
    torch.testing.assert_close(values[:, 2], by_hand, rtol=1e-10, atol=1e-12)
    likelihood = fake.policy.likelihood(rollouts, whole(rollouts), outputs=("values",))
    torch.testing.assert_close(likelihood.values, values, rtol=1e-10, atol=1e-12)
    assert values[~rollouts.mask].eq(0).all()
    values.sum().backward()
    assert fake.policy.module.conv_in.weight.grad.abs().sum() > 0, (
        "the trunk learns from the critic"
    )


@pytest.mark.silent_bug(40)
def test_a_critic_of_its_own_begins_as_the_policy_s_network_and_leaves_it_alone():
    fake = doubled(ancestral())
    shared, apart = SharedCritic(fake.policy), DenoiserCritic(fake.policy)
    with torch.no_grad():
        for critic in (shared, apart):
            head = critic.module if critic is shared else critic.module["head"]
            head.weight.normal_(generator=torch.Generator().manual_seed(0))
    rollouts = sampled(fake)
    values = apart.values(rollouts, whole(rollouts))
    torch.testing.assert_close(
        values, shared.values(rollouts, whole(rollouts)), rtol=1e-12, atol=1e-12
    )
    values.sum().backward()
    assert all(p.grad is None for p in fake.policy.module.parameters())
    assert apart.module["trunk"].conv_in.weight.grad.abs().sum() > 0 and not apart.is_shared
    resting = {name for name, p in apart.module.named_parameters() if not p.requires_grad}
    assert resting == {"trunk.conv_out.weight", "trunk.conv_out.bias"}
    assert all(p.grad is not None for p in apart.module.parameters() if p.requires_grad)
    disturbed(fake.policy)
    assert torch.equal(apart.values(rollouts, whole(rollouts)), values)


def test_a_guided_policy_s_values_are_those_with_the_condition():
    fake = doubled(cps())
    critic = SharedCritic(fake.policy)
    with torch.no_grad():
        critic.module.weight.fill_(1.0)
    rollouts = sampled(fake, 2)
    values = fake.policy.likelihood(rollouts, whole(rollouts), outputs=("values",)).values
    torch.testing.assert_close(
        values, critic.values(rollouts, whole(rollouts)), rtol=1e-10, atol=1e-12
    )


@pytest.mark.silent_bug(18)
@pytest.mark.silent_bug(40)
def test_a_reference_is_the_policy_as_it_was_and_its_kl_begins_at_0(fake):
    reference = ReferenceModel(fake.policy)
    rollouts = sampled(fake)
    ask = {"outputs": ("gaussian",)}

    def kl():
        ours, theirs = (
            of.likelihood(rollouts, whole(rollouts), **ask).gaussian
            for of in (fake.policy, reference)
        )
        return torch.where(
            rollouts.mask, gaussian_kl(ours.mean, ours.std, theirs.mean, theirs.std), 0
        )

    assert not kl().any()
    before = reference.likelihood(rollouts, whole(rollouts)).logprobs
    disturbed(fake.policy)
    assert (kl()[rollouts.mask] > 0).all()
    assert torch.equal(reference.likelihood(rollouts, whole(rollouts)).logprobs, before)


def test_a_mixed_reference_follows():
    fake = ancestral()
    mixed = ReferenceModel(fake.policy, rule="ema", rate=1.0, every=1)
    disturbed(fake.policy)
    mixed.update(fake.policy, 1)
    rollouts = sampled(fake, 2)
    theirs, ours = (
        of.likelihood(rollouts, whole(rollouts)).logprobs for of in (mixed, fake.policy)
    )
    assert torch.equal(theirs, ours)


@pytest.mark.silent_bug(27)
@pytest.mark.silent_bug(40)
def test_dropout_and_moving_statistics_rest_in_sampling_scoring_and_supervision():
    fake = ancestral(module={"dropout": 0.5, "norm": True})
    rollouts = sampled(fake)
    demos = fake.policy.demonstrations(
        [replace(p, target=torch.rand(SHAPE)) for p in prompts()], seed=0
    )
    quiet = fake.policy.likelihood(rollouts, whole(rollouts)).logprobs
    before = {name: value.clone() for name, value in fake.policy.module.named_buffers()}
    for ask in (
        lambda: sampled(fake).sampler_logprobs,
        lambda: fake.policy.likelihood(rollouts, whole(rollouts)).logprobs,
    ):
        fake.policy.module.train()
        torch.testing.assert_close(ask(), quiet, rtol=1e-6, atol=1e-4)
    fake.policy.module.train()
    fake.policy.likelihood(demos, whole(demos)).logprobs.sum().backward()
    after = dict(fake.policy.module.named_buffers())
    assert len(before) == 3 and all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_saved_comes_back_to_the_bit(tmp_path, fake):
    torch.manual_seed(1)
    made = DenoiserPolicy(
        DenoisingUNet((1, 4, 4), 3, width=8),
        (1, 4, 4),
        predicts=fake.policy.denoiser.predicts,
        schedule=fake.policy.denoiser.schedule,
        condition=ClassLabels(["one", "two", "three"], dropped=0.2),
        weighting="clean",
        middle="middle",
    )
    disturbed(made)
    made.save(tmp_path / "model")
    again = load_denoiser(tmp_path / "model")
    requested = [Request(Prompt("a", "two", draw=1), 3)]
    assert torch.equal(*(p.sample(requested, fake.sampling, seed=0).actions for p in (made, again)))
    assert (again.weighting, again.denoiser.middle, again.denoiser.condition.dropped) == (
        "clean",
        "middle",
        0.2,
    )
    fake.policy.save(tmp_path / "own")
    torch.manual_seed(5)
    own = load_denoiser(tmp_path / "own", TinyDenoiser())
    assert torch.equal(
        own.sample(requests(2), fake.sampling, seed=0).actions, sampled(fake, 2, seed=0).actions
    )
    with pytest.raises(
        GruppoError, match=r"of a module of your own. Give load_denoiser that module"
    ):
        load_denoiser(tmp_path / "own")
    with pytest.raises(
        GruppoError, match=r"of another network than DenoisingUNet: .* missing: coarse.conv1.bias"
    ):
        load_denoiser(tmp_path / "own", DenoisingUNet())
    with pytest.raises(GruppoError, match=r"holds no denoiser: .*It needs denoiser.json"):
        load_denoiser(tmp_path / "nothing")
    (tmp_path / "own" / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(GruppoError, match=r"holds no denoiser: .*header"):
        load_denoiser(tmp_path / "own", TinyDenoiser())


def test_a_policy_with_parts_that_a_folder_cannot_name_is_not_saved(tmp_path):
    made = DenoiserPolicy(TinyDenoiser(), SHAPE, condition=object())
    with pytest.raises(GruppoError, match=r"not a object. Save policy.module yourself"):
        made.save(tmp_path / "b")
    assert not (tmp_path / "b").exists()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eta": 0.0}, r"eta=0.0 does not fit .* no density: the ODE is for evaluation"),
        ({"transition": "euler"}, r"transition='euler' .* transition is one of ancestral, ddim"),
        ({"noise": "branched", "train_fraction": 0.5}, r"train_fraction=0.5 with noise='branched'"),
        ({"max_actions": 1}, r"are not a range of the steps 0 to 0 that have noise"),
        (
            {"train_from": 9},
            r"train_from=9, train_to=0 are not a range of the steps 0 to 9.*at most 9",
        ),
        ({"train_from": 3, "train_to": 3}, r"train_from=3, train_to=3 are not a range"),
    ],
)
def test_samplings_that_cannot_be_learned_from_are_refused_when_they_are_made(changes, says):
    with pytest.raises(GruppoError, match=says):
        DiffusionSampling(**changes)


@pytest.mark.parametrize(
    ("policy", "changes", "says"),
    [
        (
            lambda: denoiser(),
            {"guidance": 2.0},
            r"guidance=2 needs .*never trained without.*dropped=0.1",
        ),
        (
            lambda: DenoiserPolicy(TinyDenoiser(), SHAPE),
            {"guidance": 2.0},
            r"guidance=2 needs a prediction without a condition.*Set guidance 1",
        ),
        (
            lambda: denoiser(),
            {"temperature": 0.7},
            r"temperature=0.7: images .*Set 1",
        ),
        (lambda: denoiser(), {"top_k": 3}, r"top_k=3, .* apply to tokens.*Leave them out"),
        (
            lambda: denoiser(),
            {"transition": "ddim"},
            r"'ddim' does not fit the flow schedule.*Set one of ancestral, flow_sde",
        ),
        (
            lambda: ddim().policy,
            {"transition": "cps"},
            r"'cps' does not fit the diffusion schedule.*Set one of ancestral, ddim",
        ),
        (lambda: ddim().policy, {"max_actions": 1001}, r"1001 steps are more than the 1000"),
    ],
)
def test_what_a_policy_cannot_draw_and_score_alike_is_refused(policy, changes, says):
    with pytest.raises(GruppoError, match=says):
        policy().sample(requests(2), DiffusionSampling(**changes), seed=0)


def test_prompts_that_are_no_class_are_refused_by_name_and_names_are_known():
    policy = denoiser()
    assert (
        "prompt 'x': 7 is no class of this network; it knows '0', '1', '2'"
        in policy.check_prompt(Prompt("x", 7), None)
    )
    assert "None is no class" in policy.check_prompt(Prompt("x", None), None)
    assert "True is no class" in policy.check_prompt(Prompt("x", True), None)
    assert policy.check_prompt(Prompt("x", "2"), None) is None
    assert (
        int(ClassLabels(["a", "b"]).encode("b")) == 1
        and int(ClassLabels(["a", "b"]).unconditional) == 2
    )
    with pytest.raises(GruppoError, match=r"'seven' is no class"):
        policy.sample([Request(Prompt("x", "seven"), 1)], DiffusionSampling(), seed=0)


def test_two_prompts_of_one_name_are_refused():
    same = [Request(Prompt("x", label, draw=1), 1) for label in (0, 1)]
    with pytest.raises(GruppoError, match=r"two different prompts have the id 'x' and the draw 1"):
        denoiser().sample(same, DiffusionSampling(), seed=0)
    with pytest.raises(ValueError, match=r"at least one request"):
        denoiser().sample([], DiffusionSampling(), seed=0)


def test_rollouts_of_several_kinds_are_not_scored_together():
    policy = denoiser(predicts="velocity")
    kinds = [
        DiffusionSampling(max_actions=4, transition=name) for name in ("ancestral", "flow_sde")
    ]
    both = Rollouts.cat(
        [policy.sample([Request(p, 1)], s, seed=0) for p, s in zip(prompts(), kinds, strict=False)]
    )
    with pytest.raises(GruppoError, match=r"mix several samplings; evaluate each kind apart"):
        policy.likelihood(both, whole(both))


def test_predictions_that_a_path_cannot_take_are_refused():
    with pytest.raises(
        GruppoError,
        match=r"predicts='noise' with a schedule that starts at alpha=0.*'v', 'velocity' or 'x0'",
    ):
        denoiser(predicts="noise", schedule=FlowSchedule())
    with pytest.raises(GruppoError, match=r"predicts='score' is not one of .'noise', 'x0'"):
        denoiser(predicts="score")


def test_a_network_of_another_shape_is_refused():
    class Halves(TinyDenoiser):
        def forward(self, x, times, labels):
            return super().forward(x, times, labels)[:, :1]

    policy = DenoiserPolicy(Halves(), SHAPE, condition=ClassLabels(3))
    with pytest.raises(GruppoError, match=r"returned \[2, 1, 4, 4\] for states \[2, 2, 4, 4\]"):
        policy.sample(requests(2), DiffusionSampling(), seed=0)


def test_a_network_without_a_condition_is_called_with_none():
    class Free(TinyDenoiser):
        def forward(self, x, times, condition):
            assert condition is None
            return super().forward(x, times, torch.zeros(len(x), dtype=torch.long))

    policy = DenoiserPolicy(Free(), SHAPE, middle="middle")
    check_policy(policy, ["anything", "else"], sampling=DiffusionSampling(max_actions=4))
    assert SharedCritic(policy).module.weight.shape == (1, 6)
