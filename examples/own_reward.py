"""A reward function of your own: a chat model learns to answer sums in as few words as possible.

Run it with ``python examples/own_reward.py``.
"""

import gruppo


def short_and_right(completions, answer, **kwargs):
    """Return 1 for the right number, minus 0.05 per word. Called with lists, one entry per
    completion."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(a in text) - 0.05 * len(text.split()) for text, a in zip(texts, answer, strict=True)
    ]


def main(model="smollm2-135m", steps=20, **options):
    """Train and print where the model is. ``options`` are further fields of the config."""
    result = gruppo.train(
        model=model,
        data=[
            {
                "prompt": [{"role": "user", "content": f"How much is {a} plus {b}?"}],
                "answer": str(a + b),
            }
            for a in range(10)
            for b in range(10)
        ],
        reward=short_and_right,
        steps=steps,
        **{"rollout__max_new_tokens": 24, "optim__lr": 1e-5, "evaluation__prompts": 8} | options,
    )
    before, after = result.before["mean"], result.after["mean"]
    print(f"mean reward {before:.2f} before, {after:.2f} after; the model is in {result.model}")
    return result


if __name__ == "__main__":
    main()
