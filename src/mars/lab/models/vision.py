"""Image classifiers: ResNet-18 for small images, a small vision transformer, a tiny CNN.

`ResNet18` is torchvision's, names included, but for what images of 32 or 64 pixels need: a 3×3 stem
of stride 1 and no max-pool, as in kuangliu's pytorch-cifar. `ViT` has timm's names and the mean of
its tokens in place of a class token. `CNN` is for digits.

Nothing but the usual: no zero-initialised residual branches, no tricks.
Letters in names: B batch, C channels, H × W pixels, T patches, D width, E = D / heads.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mars.lab.config import ImageModel
from mars.lab.dtensors import fill
from mars.lab.errors import LabError


def _conv(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Without values and without bias: a BatchNorm follows."""
    layer: nn.Conv2d = nn.utils.skip_init(
        nn.Conv2d, n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=False,
        device=torch.get_default_device(),
    )  # fmt: skip
    return layer


def _linear(n_in: int, n_out: int) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, n_in, n_out, device=torch.get_default_device())
    return layer


class Classifier(nn.Module):
    """What all of them have: `logits` is each one's own.

    Each is made of a configuration and the seed of its initial weights; None draws none, which is
    for who only wants the shapes.
    """

    def __init__(self, config: ImageModel) -> None:
        super().__init__()
        self.label_smoothing = config.label_smoothing  # of the loss while training

    def logits(self, x_BCHW: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_BCHW: Tensor, targets_B: Tensor | None = None) -> Tensor:
        """The mean cross-entropy in float32, if there are targets; else the logits."""
        logits = self.logits(x_BCHW)
        if targets_B is None:
            return logits
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits.float(), targets_B, label_smoothing=smoothing)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights anew; norms become 1 and 0, running statistics those of no data.

        A pure function of the seed and the shapes: drawn on the CPU in float32, in the order of
        `named_parameters`; of a sharded parameter, this process keeps its part. Convolutions and
        linear layers are torch's default, U(±1/√fan-in).
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                module.weight.fill_(1.0)
                module.bias.fill_(0.0)
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
            elif isinstance(module, (nn.Conv2d, nn.Linear)):
                bound = 1 / math.sqrt(math.prod(module.weight.shape[1:]))
                for p in module.parameters(recurse=False):
                    fill(p, _empty(p).uniform_(-bound, bound, generator=generator))


def _empty(p: Tensor) -> Tensor:
    return torch.empty(p.shape, dtype=torch.float32, device="cpu")


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(n_in, n_out, 3, stride), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = _conv(n_out, n_out, 3), nn.BatchNorm2d(n_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or n_in != n_out:
            self.downsample = nn.Sequential(_conv(n_in, n_out, 1, stride), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(Classifier):
    """For images of 32×32 and more, of any size: the last map is averaged.

    11,173,962 parameters for 10 classes and 3 channels.
    """

    def __init__(self, config: ImageModel, *, seed: int | None = 0) -> None:
        super().__init__(config)
        self.conv1, self.bn1 = _conv(config.channels, 64, 3), nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = _linear(512, config.classes)
        if seed is not None:
            self.initialise(seed)

    def logits(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        x_BCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_BCHW))))
        logits: Tensor = self.fc(x_BCHW.mean((2, 3)))
        return logits


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = _linear(width, 3 * width), _linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BTD in self.qkv(x_BTD).chunk(3, -1)
        )
        y_BHTE = F.scaled_dot_product_attention(q, k, v)
        y_BTD: Tensor = self.proj(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = _linear(width, 4 * width), _linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.fc2(F.gelu(self.fc1(x_BTD)))
        return y_BTD


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
        y_BTD: Tensor = self.mlp(self.norm2(x_BTD))
        return x_BTD + y_BTD


class ViT(Classifier):
    """Patches are multiplied by a matrix, so that every weight but the positions is one.

    As configured by default 10.7M parameters, about as many as `ResNet18`.
    """

    def __init__(self, config: ImageModel, *, seed: int | None = 0) -> None:
        super().__init__(config)
        size, patch, width, heads = config.size, config.patch, config.width, config.heads
        if size % patch:
            raise LabError(f"patch={patch} does not divide images of {size}×{size}")
        if width % heads:
            raise LabError(f"width={width} cannot be divided among heads={heads}")
        self.patch = patch
        self.patch_embed = _linear(config.channels * patch * patch, width)
        place = torch.empty(1, (size // patch) ** 2, width, device=torch.get_default_device())
        self.pos_embed = nn.Parameter(place)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        self.head = _linear(width, config.classes)
        if seed is not None:
            self.initialise(seed)

    def logits(self, x_BCHW: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x_BCHW, self.patch)  # (B, C·patch², rows, columns)
        x_BTD = self.patch_embed(x.flatten(2).transpose(1, 2)) + self.pos_embed
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD).mean(1))
        return logits

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """As `Classifier.initialise`, but N(0, 0.02²) for matrices and positions, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim < 2:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                fill(p, _empty(p).normal_(0.0, 0.02, generator=generator))


class CNN(Classifier):
    """Two convolutions and two matrices; the first matrix has most of the parameters.

    38 thousand for digits.
    """

    def __init__(self, config: ImageModel, *, seed: int | None = 0) -> None:
        super().__init__(config)
        self.conv1, self.bn1 = _conv(config.channels, 16, 3), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = _conv(16, 32, 3, stride=2), nn.BatchNorm2d(32)
        self.fc1 = _linear(32 * ((config.size + 1) // 2) ** 2, 64)
        self.fc2 = _linear(64, config.classes)
        if seed is not None:
            self.initialise(seed)

    def logits(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        x_BCHW = F.relu(self.bn2(self.conv2(x_BCHW)))
        logits: Tensor = self.fc2(F.relu(self.fc1(x_BCHW.flatten(1))))
        return logits


class Network(Protocol):
    def __call__(self, config: ImageModel, *, seed: int | None = 0) -> Classifier: ...


ARCHITECTURES: dict[str, Network] = {"resnet18": ResNet18, "vit": ViT, "cnn": CNN}


def flops_per_image(model: Classifier, channels: int, size: int) -> int:
    """Floating-point operations to train on one image, forward and backward: 6 a multiplication.

    Counted are convolutions, matrices and attention's two products, as `flops_per_token` does;
    norms and activations are too few to matter.
    """
    products = 0

    def count(module: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal products
        if isinstance(module, Attention):
            products += 2 * out.shape[1] ** 2 * out.shape[2]
        elif isinstance(module, (nn.Conv2d, nn.Linear)):
            products += module.weight[0].numel() * out.numel()

    shadow = copy.deepcopy(model).to("meta").eval()
    for module in shadow.modules():
        module.register_forward_hook(count)
    shadow(torch.empty(1, channels, size, size, device="meta"))
    return 6 * products
