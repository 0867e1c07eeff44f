"""A chat model of plain torch, in the shape of nanochat's: taught by a careless teacher, then put right by a reward.

The teacher answers "7+5" with 12 one time in three, and with 13 else. So does the model that has learned from it; the
recipe ``chat``, which are source document 002's settings, makes it right. No transformers.

    python examples/chat_rl.py
"""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import gruppo
from gruppo.recipes import RECIPES

HIGHEST, TEACHER = 19, (0, 1, 1)
"""The largest number, and how far off the teacher's answers are."""
SPECIAL = ("<|user|>", "<|assistant|>", "<|end|>")
USER, ASSISTANT, END = range(10 + 1, 10 + 1 + len(SPECIAL))
VOCABULARY = 10 + 1 + len(SPECIAL)


class Characters:
    """A token is a character; three more stand between the speakers."""

    characters = "0123456789+"

    def encode(self, text):
        return [self.characters.index(c) for c in text]

    def decode(self, ids):
        return "".join(self.characters[i] if i < len(self.characters) else SPECIAL[i - USER] for i in ids)

    def render_for_completion(self, messages):
        """Ids of a conversation up to where the assistant is to speak."""
        ids = []
        for message in messages:
            is_user = message["role"] == "user"
            ids += [USER if is_user else ASSISTANT, *self.encode(message["content"]), *([] if is_user else [END])]
        return [*ids, ASSISTANT]


def rotated(x):
    """Rotary places: each pair of channels is turned by an angle that grows with the place. x [B, H, T, D]."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * rates  # [T, D / 2]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def norm(x):
    """RMS norm without weights."""
    return F.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    """Causal attention with normed queries and keys, then a squared ReLU."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(norm(rotated(q)), norm(rotated(k)), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    """ids [B, T] to logits [B, T, V]."""

    def __init__(self, width=64, layers=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = norm(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(norm(x))


def problems():
    """Every sum of two numbers as a conversation, with its answer."""
    numbers = range(HIGHEST + 1)
    return [
        {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)} for a in numbers for b in numbers
    ]


def taught(module, steps, batch=64, lr=3e-3):
    """Learn from the careless teacher, by cross-entropy on what it answers."""
    tokenizer, rows = Characters(), problems()
    prompts = [tokenizer.render_for_completion(row["prompt"]) for row in rows]
    answers = [[[*tokenizer.encode(str(int(row["answer"]) + off)), END] for off in TEACHER] for row in rows]
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    for step in range(steps):
        chosen = [(i, j) for i, j in zip(torch.randint(len(rows), (batch,)), torch.randint(3, (batch,)), strict=True)]
        texts = [(prompts[i], answers[i][j]) for i, j in chosen]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(p + a) for p, a in texts], batch_first=True, padding_value=END)
        is_said = torch.zeros_like(ids, dtype=torch.bool)  # [batch, T]: what the assistant says, its end included
        for row, (prompt, answer) in enumerate(texts):
            is_said[row, len(prompt) : len(prompt) + len(answer)] = True
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        loss = F.cross_entropy(module(ids[:, :-1])[is_said[:, 1:]], ids[:, 1:][is_said[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module


def main(taught_steps=1000, steps=40, **options):
    """Teach, then train by reward, and return the result."""
    torch.manual_seed(0)
    tokenizer = Characters()
    module = taught(GPT(), taught_steps)
    policy = gruppo.from_module(module, tokenizer, eos_ids=[END], context=32, render=tokenizer.render_for_completion)
    recipe = RECIPES["chat"]()
    recipe = replace(recipe, optim=replace(recipe.optim, lr=1e-3))  # 0.1 million weights, and none of them precious
    result = gruppo.train(recipe, model=policy, data=problems(), steps=steps, **options)
    print(f"right answers {result.before['mean']:.2f} before, {result.after['mean']:.2f} after {steps} steps")
    return result


if __name__ == "__main__":
    main()
