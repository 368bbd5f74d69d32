"""GPT-2 as nanoGPT and the authors of MARS train it.

Learned positions, LayerNorm before each half of a block, GELU in its tanh approximation (GPT-2's
own, "gelu_new" at Hugging Face; nanoGPT's today is the exact one), no biases unless asked for, the
head tied to the token table. Parameters have the names of Hugging Face's and nanoGPT's GPT-2
(`transformer.h.0.attn.c_attn.weight`); matrices are (out, in), as nn.Linear has them.

Letters in names: B batch, T time, D width, V vocabulary, H heads, E = D/H, N = B·T.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from mars.lab.dtensors import fill
from mars.lab.errors import LabError
from mars.lab.models.flops import Shape
from mars.lab.models.loss import linear_cross_entropy
from mars.lab.models.norms import add_norm, plain_add_norm
from mars.lab.models.products import gelu_mlp, heads, linear


class Config(Shape, Protocol):
    """What a configuration must have; `mars.lab.config.Model` does."""

    @property
    def n_head(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def bias(self) -> bool: ...


def _linear(n_in: int, n_out: int, bias: bool) -> nn.Linear:
    """Without values: `GPT.initialise` draws them."""
    device = torch.get_default_device()
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, n_in, n_out, bias=bias, device=device)
    return layer


def _table(rows: int, width: int) -> nn.Embedding:
    device = torch.get_default_device()
    table: nn.Embedding = nn.utils.skip_init(nn.Embedding, rows, width, device=device)
    return table


class Attention(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.scale = math.sqrt(config.n_head / config.n_embd)
        self.own_scale = getattr(config, "scale_attn_by_inverse_layer_idx", False)
        if self.own_scale:
            self.scale /= index + 1
        self.c_attn = _linear(config.n_embd, 3 * config.n_embd, config.bias)
        self.c_proj = _linear(config.n_embd, config.n_embd, config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Views all the way: kernels take q, k, v as strides into one product, and what they
        # return lies in memory as (B, T, H, E). On Hopper torch itself prefers cuDNN's kernel.
        q_BHTE, k_BHTE, v_BHTE = (
            part_BTD.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part_BTD in heads(x_BTD, self.c_attn)
        )
        y_BHTE = F.scaled_dot_product_attention(
            q_BHTE, k_BHTE, v_BHTE, is_causal=True, scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return linear(y_BHTE.transpose(1, 2).flatten(2), self.c_proj)


@_disable_dynamo  # torch.compiler.disable would import the compiler here and now
def _uncompiled(attention: Attention, x_BTD: Tensor) -> Tensor:
    """To the compiler a scale is a constant: it would compile every block anew, and after eight
    give up on the others. All that is in here is kernels that it could only call as well.
    """
    y_BTD: Tensor = attention(x_BTD)
    return y_BTD


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = _linear(config.n_embd, 4 * config.n_embd, config.bias)
        self.c_proj = _linear(4 * config.n_embd, config.n_embd, config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return gelu_mlp(x_BTD, self.c_fc, self.c_proj)


class Block(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config, index)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, y_BTD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream and what is still to be added to it; y is what the block before left.

        Who needs the sum adds: so it is computed together with the norm that reads it, by a kernel
        of ours, or by the compiler's, which can make dropout part of it.
        """
        drops = self.training and self.dropout > 0
        norm = plain_add_norm if drops else add_norm
        x_BTD, h_BTD = norm(x_BTD, y_BTD, self.ln_1)
        apart = self.attn.own_scale and torch.compiler.is_compiling()
        y_BTD = _uncompiled(self.attn, h_BTD) if apart else self.attn(h_BTD)
        if drops:
            y_BTD = F.dropout(y_BTD, self.dropout)
        x_BTD, h_BTD = norm(x_BTD, y_BTD, self.ln_2)
        y_BTD = self.mlp(h_BTD)
        return x_BTD, F.dropout(y_BTD, self.dropout) if drops else y_BTD


class Embed(nn.Module):
    """Tokens and positions to the stream; the tables are the transformer's."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, tokens_BT: Tensor, wte_VD: Tensor, wpe_TD: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        x_BTD = F.embedding(tokens_BT, wte_VD) + wpe_TD[: tokens_BT.shape[1]]
        return F.dropout(x_BTD, self.dropout, self.training).to(dtype or x_BTD.dtype)


class LastNorm(nn.LayerNorm):
    def forward(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:  # type: ignore[override]
        # Scores are computed from what autocast's norm leaves in float32.
        norm = add_norm if self.training else plain_add_norm
        return norm(x_BTD, y_BTD, self)[1]


class Transformer(nn.Module):
    """Tokens to hidden states; its own module for the sake of the names."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = _table(config.vocab_size, config.n_embd)
        self.wpe = _table(config.block_size, config.n_embd)
        self.embed = Embed(config.dropout)
        self.h = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.ln_f = LastNorm(config.n_embd, bias=config.bias)

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype | None) -> Tensor:
        x_BTD, y_BTD = self.embed(tokens_BT, self.wte.weight, self.wpe.weight, dtype), None
        for block in self.h:
            x_BTD, y_BTD = block(x_BTD, y_BTD)
        hidden_BTD: Tensor = self.ln_f(x_BTD, y_BTD)
        return hidden_BTD


class GPT(nn.Module):
    """A GPT-2 of any size.

    Args:
        config: sizes, dropout and bias, under their usual names.
        seed: of the initial weights; None draws none, which is for who only wants the shapes.
        lean_residual: under autocast, keep the residual stream in autocast's dtype (as Megatron
            and llm.c do) rather than in float32 (as autocast would).
        fp8_head: multiply by the vocabulary in 8 bits while training; not in eval mode, so that
            losses of validations stay comparable.
    """

    def __init__(
        self, config: Config, *, seed: int | None = 0, lean_residual: bool = True,
        fp8_head: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if config.n_embd % config.n_head:
            raise LabError(
                f"n_embd={config.n_embd} cannot be divided among n_head={config.n_head} heads"
            )
        self.config = config
        self.lean_residual, self.fp8_head = lean_residual, fp8_head
        self.transformer = Transformer(config)
        if seed is not None:
            self.initialise(seed)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As nn.Module.compile, but piece by piece: one block is compiled for all.

        So the time it takes does not grow with the number of blocks, as that of
        ``torch.compile(model)`` does. The pieces are cut where nothing could be fused.
        """
        for piece in self.pieces:
            piece.compile(*args, **kwargs)

    @property
    def pieces(self) -> list[nn.Module]:
        """What is compiled one by one."""
        return [self.transformer.embed, *self.transformer.h, self.transformer.ln_f]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights anew: N(0, 0.02²), a half's last matrix by 1/√(2·n_layer) less; norms 1.

        A pure function of the seed and the shapes: drawn on the CPU in float32, whatever the
        device and dtype, in the order of `named_parameters`. Of a sharded parameter,
        this process keeps its part.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            last = name.endswith("c_proj.weight")
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if last else 0.02
            drawn = torch.empty(p.shape, dtype=torch.float32, device="cpu")
            fill(p, drawn.normal_(0.0, std, generator=generator))

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, last_only: bool = False
    ) -> Tensor:
        """The mean loss in float32, if there are targets (-100: not counted); else the logits.

        Logits are (B, T, V), or (B, 1, V) of the last position with `last_only`.
        """
        hidden_BTD = self.hidden(tokens_BT)
        if targets_BT is not None:
            return linear_cross_entropy(
                hidden_BTD.flatten(0, 1), self.transformer.wte.weight, targets_BT.flatten(),
                fp8=self.fp8_head and self.training,
            )  # fmt: skip
        if last_only:
            hidden_BTD = hidden_BTD[:, -1:]
        return F.linear(hidden_BTD, self.transformer.wte.weight)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """What the head reads, for who wants the logits of a few positions only."""
        if tokens_BT.shape[1] > self.config.block_size:
            raise LabError(
                f"{tokens_BT.shape[1]} tokens in a row, but the model was built for at most "
                f"{self.config.block_size} (block_size)"
            )
        hidden_BTD: Tensor = self.transformer(tokens_BT, self._residual(tokens_BT.device.type))
        return hidden_BTD

    def _residual(self, device: str) -> torch.dtype | None:
        lean = self.lean_residual and torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if lean else None
