"""A chat model in plain torch, like nanochat's: pretrained on wrong answers, then corrected by a
reward.

In the training data 7 + 5 is 12 one time in three, and 13 otherwise. The model learns that, and the
recipe ``chat`` (source document 002's settings) corrects it. No transformers.

    gruppo train examples/documents.py:chat --model examples/chat_rl.py:model --optim.lr 5e-4
    python examples/chat_rl.py
"""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import gruppo

HIGHEST, TEACHER = 20, (0, 1, 1)
"""The largest number, and the errors of the answers in the training data, equally likely."""
PIECES = ("What is ", "?", " + ", " - ", " =", " ", *"0123456789")
SPECIAL = ("<|user|>", "<|assistant|>", "<|end|>")
USER, ASSISTANT, END = range(len(PIECES), len(PIECES) + len(SPECIAL))
VOCABULARY = len(PIECES) + len(SPECIAL)


class Pieces:
    """A tokenizer of digits, a few words, and three special tokens between the speakers."""

    def encode(self, text):
        found = re.findall("|".join(map(re.escape, PIECES)), text)
        if "".join(found) != text:
            raise gruppo.GruppoError(
                f"{text!r} has characters beside sums and differences such as 'What is 7 + 12?'."
            )
        return [PIECES.index(piece) for piece in found]

    def decode(self, ids):
        return "".join((*PIECES, *SPECIAL)[i] for i in ids)

    def render_for_completion(self, messages):
        """Return the ids of a conversation up to the assistant's next words. Empty messages are
        skipped."""
        ids = []
        for message in (m for m in messages if m["content"]):
            is_user = message["role"] == "user"
            ids += [
                USER if is_user else ASSISTANT,
                *self.encode(message["content"]),
                *([] if is_user else [END]),
            ]
        return ids[:-1] if ids[-1] == END else [*ids, ASSISTANT]


def rotated(x):
    """Apply rotary position embeddings to x [B, H, T, D]."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * rates  # [T, D / 2]
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1
    )


def norm(x):
    """RMS norm without weights."""
    return F.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    """Causal attention with normalized queries and keys, then an MLP with squared ReLU."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(norm(rotated(q)), norm(rotated(k)), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    """A causal transformer from ids [B, T] to logits [B, T, V]."""

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
    """Return every sum and every non-negative difference, as a conversation that the assistant has
    begun to answer."""
    numbers = range(HIGHEST + 1)
    sums = [(f"{a} + {b}", a + b) for a in numbers for b in numbers]
    sums += [(f"{a} - {b}", a - b) for a in numbers for b in range(a + 1)]
    return [
        (
            [
                {"role": "user", "content": f"What is {text}?"},
                {"role": "assistant", "content": f"{text} ="},
            ],
            answer,
        )
        for text, answer in sums
    ]


def taught(module, steps, batch=64, lr=3e-3):
    """Pretrain on the wrong answers by cross-entropy."""
    tokenizer, rows = Pieces(), problems()
    prompts = [tokenizer.render_for_completion(messages) for messages, _ in rows]
    answers = [
        [[*tokenizer.encode(f" {answer + off}"), END] for off in TEACHER] for _, answer in rows
    ]
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    for step in range(steps):
        chosen = [
            (i, j)
            for i, j in zip(
                torch.randint(len(rows), (batch,)), torch.randint(3, (batch,)), strict=True
            )
        ]
        texts = [(prompts[i], answers[i][j]) for i, j in chosen]
        ids = nn.utils.rnn.pad_sequence(
            [torch.tensor(p + a) for p, a in texts], batch_first=True, padding_value=END
        )
        is_answer = torch.zeros_like(
            ids, dtype=torch.bool
        )  # [batch, T]: the assistant's tokens, end token included
        for row, (prompt, answer) in enumerate(texts):
            is_answer[row, len(prompt) : len(prompt) + len(answer)] = True
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        loss = F.cross_entropy(module(ids[:, :-1])[is_answer[:, 1:]], ids[:, 1:][is_answer[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module


def model(folder=None, taught_steps=1000):
    """Return the policy of ``--model examples/chat_rl.py:model``.

    ``folder``: the folder whose weights will be loaded, or None for a new model, which is
    pretrained.
    """
    module, tokenizer = GPT(), Pieces()
    if folder is None:
        taught(module, taught_steps)
    return gruppo.from_module(
        module, tokenizer, eos_ids=[END], context=128, render=tokenizer.render_for_completion
    )


def main(taught_steps=1000, steps=50, **options):
    """Pretrain, train by reward and return the result."""
    torch.manual_seed(0)
    recipe = f"{Path(__file__).with_name('documents.py')}:chat"
    options = {"optim__lr": 5e-4, **options}  # a small model needs a higher learning rate
    data = f"arithmetic:0:{HIGHEST}:natural"
    result = gruppo.train(
        recipe, model=model(taught_steps=taught_steps), data=data, steps=steps, **options
    )
    print(
        f"right answers {result.before['mean']:.2f} before, {result.after['mean']:.2f} after "
        f"{steps} steps"
    )
    return result


if __name__ == "__main__":
    main()
