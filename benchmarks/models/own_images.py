"""Models of images of our own: cells, generators and flows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from .images import Classifier
from .registry import Instance, Maker, architecture, enter

# ---------------------------------------------------------------------- NASNet


class Separable(nn.Sequential):
    """ReLU, depthwise and pointwise convolution, BatchNorm; twice, as NASNet has it.

    Args:
        width: Channels in and out.
        kernel: Of the depthwise convolutions.
        stride: Of the first.
    """

    def __init__(self, width: int, kernel: int, stride: int) -> None:
        parts: list[nn.Module] = []
        for step in (stride, 1):
            depthwise = nn.Conv2d(width, width, kernel, step, kernel // 2, groups=width, bias=False)
            parts += [nn.ReLU(), depthwise, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)]
        super().__init__(*parts)


class Cell(nn.Module):
    """The normal cell (stride 1) or a reduction cell (stride 2) of NASNet-A (Zoph et al. 2018), figure 4.

    Args:
        before: Channels of the output of the cell before the last.
        last: Channels of the output of the last cell.
        width: Of each of the five blocks, which are joined.
        stride: 1 or 2.
        catch_up: Whether the output of the cell before the last is twice as large.
    """

    def __init__(self, before: int, last: int, width: int, stride: int, catch_up: bool) -> None:
        super().__init__()
        self.squeeze_before = self._squeezed(before, width, 2 if catch_up else 1)
        self.squeeze_last = self._squeezed(last, width, 1)
        self.left = nn.ModuleList(Separable(width, k, stride) for k in (3, 5))
        self.right = nn.ModuleList(Separable(width, k, stride) for k in (3, 5, 7))
        self.average = nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        self.largest = nn.MaxPool2d(3, stride, 1)

    @staticmethod
    def _squeezed(source: int, width: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv2d(source, width, 1, stride, bias=False)
        return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(width))

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Joins five sums of two branches: [batch, 5 * width, h / stride, w / stride]."""
        p, h = self.squeeze_before(before), self.squeeze_last(last)
        blocks = (
            self.left[0](h) + self.average(p),
            self.right[0](p) + self.left[1](h),
            self.average(h) + self.average(p),
            self.largest(p) + self.right[1](p),
            self.right[2](p) + self.largest(h),
        )
        return torch.cat(blocks, 1)


class CellNetwork(nn.Module):
    """A stem, normal and reduction cells by turns, and a classifier.

    Args:
        width: Of a block of the first cells; it doubles at each reduction.
        classes: Number of classes.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        before, last, catch_up = width, width, False
        self.cells = nn.ModuleList()
        for stride in (1, 2, 1):
            width *= stride
            self.cells.append(Cell(before, last, width, stride, catch_up))
            before, last, catch_up = last, 5 * width, stride == 2
        self.head = nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images to scores [batch, classes]."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(functional.relu(last).mean((2, 3)))


def _classifier(module: nn.Module, size: int = 32, batch: int = 8) -> Instance:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Instance(Classifier(module), (images, labels))


# ---------------------------------------------------------------------- other blocks


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021): perceptrons over patches and over channels by turns.

    Args:
        patches: Number of patches.
        width: Channels of each.
        depth: Number of blocks.
    """

    def __init__(self, patches: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(self._perceptron(patches) for _ in range(depth))
        self.channels = nn.ModuleList(self._perceptron(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _perceptron(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, images: Tensor) -> Tensor:
        """Maps images to scores [batch, classes]."""
        x = self.embed(images).flatten(2).mT
        norms = iter(self.norms)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(next(norms)(x).mT).mT
            x = x + channels(next(norms)(x))
        return self.head(x.mean(1))


class ShuffleUnit(nn.Module):
    """ShuffleNet-v2 unit with squeeze and excitation (Ma et al. 2018, Hu et al. 2018).

    Args:
        width: Channels; half of them pass through.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.Hardswish(inplace=True),
        )
        self.excite = nn.Sequential(nn.Linear(half, 4), nn.ReLU(), nn.Linear(4, half), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, width, h, w] to the same shape, the channels shuffled."""
        kept, changed = x.chunk(2, 1)
        changed = self.branch(changed)
        changed = changed * self.excite(changed.mean((2, 3)))[:, :, None, None]
        return nn.functional.channel_shuffle(torch.cat([kept, changed], 1), 2)


@architecture
def shufflenet() -> Instance:
    """ShuffleNet-v2 units with squeeze and excitation."""
    stem = nn.Conv2d(3, 32, 3, 2, 1)
    units = [ShuffleUnit(32) for _ in range(4)]
    return _classifier(nn.Sequential(stem, *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)))


# ---------------------------------------------------------------------- generators


class Autoencoder(nn.Module):
    """A variational autoencoder (Kingma and Welling 2014); it draws within its forward.

    Args:
        width: Channels of the hidden layers.
        latent: Size of the code.
    """

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1),
            nn.SiLU(),
            nn.Conv2d(width, width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(width, width, 4, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
        )
        self.moments = nn.Linear(width * 16, 2 * latent)
        self.widen = nn.Linear(latent, width * 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(width, 3, 3, 1, 1),
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The evidence lower bound, negated, and the reconstruction."""
        mean, logarithm = self.moments(self.encoder(images)).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * logarithm).exp()
        made = self.decoder(self.widen(code).view(len(images), -1, 4, 4))
        divergence = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).sum(-1).mean()
        error = functional.binary_cross_entropy_with_logits(made, images.sigmoid(), reduction="sum") / len(
            images
        )
        return {"loss": error + divergence, "made": made.detach()}


class StraightThrough(torch.autograd.Function):
    """The nearest code forward, the identity backward: an autograd function as users write them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor) -> Tensor:
        """The nearest of `codes` [count, size] for each row of `x` [rows, size]."""
        return codes[torch.cdist(x, codes).argmin(-1)]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient of the result, for `x`."""
        return gradients[0], None


class QuantizedAutoencoder(nn.Module):
    """VQ-VAE with an average of codes that a buffer keeps (van den Oord et al. 2017, appendix A.1).

    Args:
        width: Channels.
        codes: Number of codes.
    """

    codes: Tensor
    counts: Tensor

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1)
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruction and commitment."""
        states = self.encoder(images).permute(0, 2, 3, 1)
        rows = states.flatten(0, 2)
        quantized: Any = StraightThrough.apply(rows, self.codes)
        with torch.no_grad():
            chosen = functional.one_hot(torch.cdist(rows, self.codes).argmin(-1), len(self.codes)).float()
            self.counts.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
            self.codes.lerp_(chosen.T @ rows / chosen.sum(0).clamp(min=1)[:, None], 0.01)
        made = self.decoder(quantized.view_as(states).permute(0, 3, 1, 2))
        return functional.mse_loss(made, images) + 0.25 * functional.mse_loss(rows, quantized.detach())


@architecture
def spectral_discriminator() -> Instance:
    """The discriminator of SN-GAN (Miyato et al. 2018): spectral norm, with a buffer for its vectors."""
    norm = parametrizations.spectral_norm
    parts: list[nn.Module] = []
    for source, width in ((3, 8), (8, 16), (16, 16)):
        parts += [norm(nn.Conv2d(source, width, 3, 1, 1)), nn.LeakyReLU(0.1, inplace=True)]
        parts += [norm(nn.Conv2d(width, width, 4, 2, 1)), nn.LeakyReLU(0.1, inplace=True)]
    return Instance(
        nn.Sequential(*parts, nn.Flatten(), norm(nn.Linear(16 * 16, 1))), (torch.randn(32, 3, 32, 32),)
    )


class ModulatedConvolution(nn.Module):
    """A convolution whose weights each image's style scales, as groups (Karras et al. 2020, StyleGAN2).

    Args:
        width: Channels.
        style: Size of the style.
    """

    def __init__(self, width: int, style: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 3, 3))
        self.affine = nn.Linear(style, width)
        self.noise = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """Maps [batch, width, h, w] to the same shape."""
        batch, width, height, breadth = x.shape
        weight = self.weight * (self.affine(style) + 1)[:, None, :, None, None]
        weight = weight * weight.square().sum((2, 3, 4), keepdim=True).add(1e-8).rsqrt()
        y = functional.conv2d(
            x.reshape(1, -1, height, breadth), weight.flatten(0, 1), padding=1, groups=batch
        )
        y = y.view(batch, width, height, breadth)
        return functional.leaky_relu(y + self.noise * torch.randn(batch, 1, height, breadth), 0.2)


class StyleGenerator(nn.Module):
    """A constant that modulated convolutions and upsampling turn into an image.

    Args:
        width: Channels.
        levels: How often the size doubles, from 4 on, with two convolutions each time.
    """

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, width, 4, 4))
        self.mapping = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16))
        self.layers = nn.ModuleList(ModulatedConvolution(width, 16) for _ in range(2 * levels))
        self.colours = nn.Conv2d(width, 3, 1)

    def forward(self, codes: Tensor) -> Tensor:
        """Maps codes [batch, 8] to images."""
        style = self.mapping(codes)
        x = self.start.expand(len(codes), -1, -1, -1)
        for index, layer in enumerate(self.layers):
            if index % 2 == 0:
                x = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = layer(x, style)
        return self.colours(x)


class Denoiser(nn.Module):
    """A residual block of a diffusion U-Net with the time's embedding (Ho et al. 2020).

    Args:
        width: Channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Maps [batch, width, h, w] to the same shape."""
        y = self.first(functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        x = x + self.second(functional.dropout(functional.silu(self.norm2(y)), 0.1, self.training))
        rows = x.flatten(2).mT
        return x + self.attention(rows, rows, rows, need_weights=False)[0].mT.view_as(x)


class Diffusion(nn.Module):
    """A U-Net that predicts the noise that its forward adds at a random time.

    Args:
        width: Channels.
    """

    levels: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(Denoiser(width) for _ in range(3))
        self.joined = nn.Conv2d(2 * width, width, 1)
        self.register_buffer("levels", torch.linspace(0.99, 0.01, 100), persistent=False)
        self.width = width

    def forward(self, images: Tensor) -> Tensor:
        """The mean square error of the predicted noise."""
        times = torch.randint(100, (len(images),))
        noise, level = torch.randn_like(images), self.levels[times][:, None, None, None]
        noisy = level.sqrt() * images + (1 - level).sqrt() * noise
        rates = torch.exp(-math.log(1e4) * torch.arange(self.width // 2) / self.width)
        angles = times[:, None] * rates
        time = torch.cat([angles.sin(), angles.cos()], -1)
        high = self.blocks[0](self.enter(noisy), time)
        low = self.blocks[1](functional.avg_pool2d(high, 2), time)
        up = functional.interpolate(low, scale_factor=2.0, mode="nearest")
        return functional.mse_loss(
            self.leave(self.blocks[2](self.joined(torch.cat([up, high], 1)), time)), noise
        )


class Coupling(nn.Module):
    """An affine coupling layer of RealNVP (Dinh et al. 2017).

    Args:
        width: Of the hidden layer.
        flipped: Whether the second half stays.
    """

    def __init__(self, width: int, flipped: bool) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 16))
        self.flipped = flipped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The transformed [batch, 16] and the logarithm of the determinant."""
        kept, changed = x.chunk(2, -1)[:: -1 if self.flipped else 1]
        scale, shift = self.network(kept).chunk(2, -1)
        changed = changed * scale.tanh().exp() + shift
        joined = (changed, kept) if self.flipped else (kept, changed)
        return torch.cat(joined, -1), scale.tanh().sum(-1)


class Flow(nn.Module):
    """A normalizing flow: the negative log-likelihood under a standard normal.

    Args:
        depth: Number of couplings.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(32, index % 2 == 1) for index in range(depth))
        self.prior = torch.distributions.Normal(0.0, 1.0, validate_args=True)

    def forward(self, x: Tensor) -> Tensor:
        """The mean over the batch."""
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            x, determinant = coupling(x)
            total = total + determinant
        return -(self.prior.log_prob(x).sum(-1) + total).mean()


@architecture
def super_resolution() -> Instance:
    """ESPCN with residual blocks and sub-pixel convolution (Shi et al. 2016)."""
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 5, padding=2)]
    for _ in range(3):
        parts += [
            nn.PReLU(16),
            nn.InstanceNorm2d(16, affine=True),
            nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
        ]
    return Instance(
        nn.Sequential(*parts, nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2)),
        (torch.randn(4, 3, 24, 24),),
    )


class Capsules(nn.Module):
    """Capsules with three rounds of routing by agreement (Sabour et al. 2017).

    Args:
        count: Input capsules.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, 10, 8, 4) * 0.1)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        """A vector with the same direction and a length below 1."""
        length = x.square().sum(-1, keepdim=True)
        return x * (length / (1 + length)) / (length + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """Maps capsules [batch, count, 4] to lengths [batch, 10]."""
        votes = torch.einsum("ncij,bnj->bnci", self.weight, x)
        agreement = torch.zeros(votes.shape[:3])
        result = votes.mean(1)
        for _ in range(3):
            result = self.squash((agreement.softmax(2)[..., None] * votes).sum(1))
            agreement = agreement + (votes.detach() * result[:, None].detach()).sum(-1)
        return torch.linalg.vector_norm(result, dim=-1)


@architecture
def capsule_network() -> Instance:
    """A convolution and capsules."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.Flatten(), nn.Unflatten(1, (-1, 4)))
    return _classifier(nn.Sequential(stem, Capsules(196)), batch=4)


@architecture
def unet_3d() -> Instance:
    """Convolutions of volumes, with pooling and trilinear upsampling."""

    def convolved(source: int) -> list[nn.Module]:
        return [nn.Conv3d(source, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ELU(inplace=True)]

    down = [*convolved(1), *convolved(4), *convolved(4), nn.MaxPool3d(2), *convolved(4)]
    up = [nn.Upsample(scale_factor=2, mode="trilinear"), *convolved(4), *convolved(4), nn.Conv3d(4, 2, 1)]
    return Instance(nn.Sequential(*down, *up), (torch.randn(2, 1, 12, 12, 12),))


_INSTANCES: dict[str, Maker] = {
    "nasnet": lambda: _classifier(CellNetwork(8, 10)),
    "mlp-mixer": lambda: _classifier(Mixer(64, 32, 3)),
    "variational-autoencoder": lambda: Instance(Autoencoder(16, 8), (torch.randn(32, 3, 16, 16),)),
    "vq-vae": lambda: Instance(QuantizedAutoencoder(16, 12), (torch.randn(16, 3, 16, 16),)),
    "style-generator": lambda: Instance(StyleGenerator(16, 3), (torch.randn(8, 8),)),
    "diffusion-unet": lambda: Instance(Diffusion(16), (torch.randn(8, 3, 16, 16),)),
    "normalizing-flow": lambda: Instance(Flow(6), (torch.randn(128, 16),)),
}

for _name, _make in _INSTANCES.items():
    enter(_name, _make)
