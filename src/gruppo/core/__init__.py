"""Mathematics of policy-gradient training: tensors and floats in, tensors out. No config, print or
global generator.

    objective      choices that make up an algorithm, and presets (GRPO, PPO, RLOO, ...)
    groups         statistics of the rewards of a group
    advantages     rewards to advantages: baselines and scales
    returns        credit in time: returns, GAE, whitening
    surrogates     policy-gradient losses per action, and the value loss
    kl             KL divergence to a reference
    weights        denominators of the loss, and importance corrections
    loss           all of them together: likelihoods to the terms of a loss
    distributions  categorical sampling and scoring, diagonal normals
    linear_head    log-probabilities under a large vocabulary without holding its logits
    schedules      values that change with the step or follow a metric
    images         fidelity, filters and augmentation of images
    describe       an objective as text

Reductions over ranks are arguments (``all_sum``, ``all_gather``), so that every function can be
tested in one process.
"""
