"""The classifiers: their sizes, initial weights, loss and cost, and that they learn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn import functional as F

from mars import MARS
from mars.lab.config import ImageModel
from mars.lab.errors import LabError
from mars.lab.images import draws, open_images, transform
from mars.lab.models.vision import CNN, Classifier, ResNet18, ViT, flops_per_image

SMALL_VIT = ImageModel(size=16, depth=2, width=32, heads=4)
DIGITS = ImageModel(channels=1, size=8)
SMALL: dict[str, tuple[Callable[..., Classifier], int, int]] = {
    "resnet18": (lambda **kw: ResNet18(ImageModel(), **kw), 3, 16),
    "vit": (lambda **kw: ViT(SMALL_VIT, **kw), 3, 16),
    "cnn": (lambda **kw: CNN(DIGITS, **kw), 1, 8),
}
each = pytest.mark.parametrize("name", SMALL)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet18_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert count(ResNet18(ImageModel(), seed=None)) == 11_173_962
        assert count(ResNet18(ImageModel(classes=100), seed=None)) == 11_173_962 + 90 * 513
        assert count(ViT(ImageModel(), seed=None)) == 10_694_794
        assert count(CNN(DIGITS, seed=None)) == 38_330
        names = dict(ResNet18(ImageModel(), seed=None).named_parameters())
    assert names["conv1.weight"].shape == (64, 3, 3, 3)
    assert names["layer4.0.downsample.0.weight"].shape == (512, 256, 1, 1)
    # What the authors' rule gives to MARS: of all matrices, `fc` alone is 2-D.
    assert [name for name, p in names.items() if p.ndim == 2] == ["fc.weight"]


def test_resnet18_takes_larger_images_and_keeps_its_maps_large() -> None:
    with torch.device("meta"):
        model = ResNet18(ImageModel(classes=200), seed=None)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 200)
        assert model.layer4(model.layer3(model.layer2(torch.empty(1, 64, 32, 32)))).shape[2:] == (
            4,
            4,
        )


@each
def test_initial_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    make = SMALL[name][0]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(seed=3)
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's numbers are used up
    again, other = make(seed=None), make(seed=4)
    with torch.no_grad():
        for tensor in again.state_dict().values():
            tensor.fill_(7)
    again.initialise(3)
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    drawn = [key for key, p in first.named_parameters() if p.ndim > 1]
    assert not any(torch.equal(first.state_dict()[k], other.state_dict()[k]) for k in drawn)


def test_initial_weights_are_torchs_default() -> None:
    model, fresh = ResNet18(ImageModel()), nn.Conv2d(256, 512, 3, bias=False)
    mine = model.layer4[0].conv1.weight
    bound = 1 / math.sqrt(256 * 9)
    assert mine.abs().max() <= bound
    assert fresh.weight.abs().max() <= bound
    assert mine.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert fresh.weight.std().item() == pytest.approx(mine.std().item(), rel=0.01)
    assert model.fc.bias.abs().max() <= 1 / math.sqrt(512)
    assert model.bn1.weight.eq(1).all()
    assert model.bn1.running_var.eq(1).all()


@each
def test_loss_is_the_cross_entropy_of_the_logits(name: str) -> None:
    make, channels, size = SMALL[name]
    model = make().eval()
    x, y = torch.randn(5, channels, size, size), torch.tensor([0, 9, 3, 3, 1])
    logits = model(x)
    assert logits.shape == (5, 10)
    assert torch.equal(model(x, y), F.cross_entropy(logits, y))
    # Initial logits are small: no class is preferred, and channels-last changes nothing.
    assert model(x, y).item() == pytest.approx(math.log(10), abs=0.5)
    last = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, logits, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x, y).dtype == torch.float32
        torch.testing.assert_close(model(x).float(), logits, rtol=0.1, atol=0.1)


def test_vit_sees_patches_as_a_convolution_would() -> None:
    model = ViT(replace(SMALL_VIT, depth=1))
    x = torch.randn(2, 3, 16, 16)
    kernel = model.patch_embed.weight.view(32, 3, 4, 4)
    wanted = F.conv2d(x, kernel, model.patch_embed.bias, stride=4).flatten(2).transpose(1, 2)
    mine = model.patch_embed(F.pixel_unshuffle(x, 4).flatten(2).transpose(1, 2))
    torch.testing.assert_close(mine, wanted)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(LabError, match="patch=5 does not divide images of 32×32"):
        ViT(ImageModel(patch=5))
    with pytest.raises(LabError, match="width=384 cannot be divided among heads=7"):
        ViT(ImageModel(heads=7))


def test_flops_are_those_of_a_count_by_hand() -> None:
    with torch.device("meta"):
        small = CNN(DIGITS, seed=None)
        hand = 9 * 16 * 64 + 9 * 16 * 32 * 16 + 512 * 64 + 64 * 10
        assert flops_per_image(small, 1, 8) == 6 * hand
        # The usual figure: 0.56 G multiplications for an image of 32×32.
        assert flops_per_image(ResNet18(ImageModel(), seed=None), 3, 32) / 6e9 == pytest.approx(
            0.5555, 1e-3
        )
        model = ViT(ImageModel(), seed=None)
        matrices = sum(p.numel() for b in model.blocks for p in b.parameters() if p.ndim == 2)
        hand = 64 * (matrices + 48 * 384) + 3840 + 6 * 2 * 64 * 64 * 384
        assert flops_per_image(model, 3, 32) == 6 * hand
    real = CNN(DIGITS)
    before = copy.deepcopy(real.state_dict())
    flops_per_image(real, 1, 8)
    assert all(torch.equal(v, before[k]) for k, v in real.state_dict().items())
    assert not real._forward_hooks


@pytest.mark.parametrize("rule", ["2d", "flatten"])
def test_mars_learns_digits(rule: str) -> None:
    """100 steps, a second; 600 reach 97 … 99 %."""
    train, valid = open_images("digits", "train"), open_images("digits", "valid")
    model = CNN(DIGITS).to(memory_format=torch.channels_last)
    optimizer = MARS(model.parameters(), lr=3e-3, matrix_rule=rule)
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        chosen = torch.randint(0, len(train), (64,), generator=generator)
        moved = draws(0, step, 0, 64, pad=1, flip=False)
        x = transform(train.pixels[chosen], moved, 1, train.mean, train.std, torch.float32)
        optimizer.zero_grad()
        model(x, train.labels[chosen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x = transform(valid.pixels, None, 0, valid.mean, valid.std, torch.float32)
        right = (model(x).argmax(1) == valid.labels).float().mean().item()
    assert right > 0.88


@pytest.mark.slow
def test_a_model_is_one_graph_for_all_steps() -> None:
    model = CNN(DIGITS)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        loss = step(torch.randn(4, 1, 8, 8), torch.tensor([1, 2, 3, 4]))
        loss.backward()
    assert counter.frame_count == 1
