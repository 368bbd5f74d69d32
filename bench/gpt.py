"""The small GPT of the first experiments, and its data: plain PyTorch, one file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mars.lab.data.embedded import embedded


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        split = (B, T, self.heads, C // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(self.norm_1(x_BTC)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x_BTC + self.down(F.gelu(self.up(self.norm_2(x_BTC))))


class GPT(nn.Module):
    """Pre-norm transformer with learned positions and a head tied to the embedding."""

    def __init__(self, vocab: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.reset(0)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """GPT-2's initial weights, the same for the same seed on any device."""
        random = torch.Generator().manual_seed(seed)
        depth = len(self.blocks)
        for name, p in self.named_parameters():
            if p.ndim < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                residual = name.endswith(("proj.weight", "down.weight"))
                std = 0.02 / (2 * depth) ** 0.5 if residual else 0.02
                p.copy_(std * torch.randn(p.shape, generator=random))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.blocks(self.wte(tokens_BT) + self.wpe(positions))
        logits = F.linear(self.norm(x_BTC), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())


def shakespeare() -> tuple[Tensor, Tensor, int]:
    """Train and validation characters of the tiny Shakespeare corpus (90/10), vocabulary size."""
    text = embedded("tinyshakespeare.txt")
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([index[c] for c in text])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(index)


def batch(data: Tensor, step: int, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets: a pure function of the arguments, so that every run sees the same."""
    random = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(data) - context - 1, (size,), generator=random)
    rows = starts[:, None] + torch.arange(context + 1)
    tokens = data[rows.to(data.device)].long()
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def validate(model: nn.Module, data: Tensor, context: int) -> float:
    """Mean loss on eight fixed batches of 32."""
    losses = [model(*batch(data, i, 32, context, seed=-1)) for i in range(8)]
    return float(torch.stack(losses).mean())
