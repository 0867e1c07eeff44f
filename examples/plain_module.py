"""A language model without transformers: any module from ids to logits, with a tokenizer that has
encode and decode.

A character model learns to write vowels. The interface is that of nanochat's GPT: ``module(ids) ->
logits``.

    python examples/plain_module.py
"""

import torch
from torch import nn

import gruppo

ALPHABET = "\nabcdefghijklmnopqrstuvwxyz "


class Characters:
    """A tokenizer with one token per character."""

    def encode(self, text):
        return [ALPHABET.index(c) for c in text]

    def decode(self, ids):
        return "".join(ALPHABET[i] for i in ids)


class TinyGPT(nn.Module):
    """Two causal layers from ids [B, T] to logits [B, T, V]."""

    def __init__(self, width=32, context=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, ids):
        length = ids.shape[1]
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.head(self.layers(x, mask=causal, is_causal=True))


def share_of_vowels(completions, **kwargs):
    """Return the fraction of vowels; 0 for an empty completion."""
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]


def main(steps=30, **options):
    """Train and return the result."""
    torch.manual_seed(0)
    policy = gruppo.from_module(TinyGPT(), Characters(), eos_ids=[0], context=64)
    result = gruppo.train(
        model=policy,
        data=[f"{a} {b} " for a in "abcdefghij" for b in "klmnopqrst"],
        reward=share_of_vowels,
        steps=steps,
        **{"rollout__max_new_tokens": 12, "optim__lr": 3e-3, "evaluation__prompts": 16} | options,
    )
    print(f"vowels {result.before['mean']:.2f} before, {result.after['mean']:.2f} after")
    return result


if __name__ == "__main__":
    main()
