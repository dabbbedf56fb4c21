"""Builds well-known networks with transposed convolutions, as published, with random weights and random inputs.

Nothing is downloaded. Some are built by the files of examples/; the others come from torchvision and transformers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

#: The arguments of a network: positional ones, or keyword arguments.
Arguments = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        name, title: the names for the command line and for the reader.
        build: ``build(tiny)`` returns the network as published or, for a machine without a GPU, a small one.
        inputs: ``inputs(batch, tiny, device)`` returns its arguments.
        batch: the number of images, or prompts, of one call.
        no_compile: why it is not measured under ``torch.compile``; ``""`` if it is.
    """

    name: str
    title: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[int, bool, torch.device], Arguments]
    batch: int
    no_compile: str = ""


def _example(name: str) -> Any:
    """Imports a module of examples/; these are scripts that import one another by name."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def _random(*shape: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device)


def _images(size: int, tiny_size: int) -> Callable[[int, bool, torch.device], Arguments]:
    def inputs(batch: int, tiny: bool, device: torch.device) -> Arguments:
        side = tiny_size if tiny else size
        return (_random(batch, 3, side, side, device=device),)

    return inputs


def _dcgan(tiny: bool) -> nn.Module:
    return _example("dcgan").build_generator(64, 8 if tiny else 64)  # type: ignore[no-any-return]


def _latents(batch: int, tiny: bool, device: torch.device) -> Arguments:
    return (_random(batch, 100, 1, 1, device=device),)


def _pix2pix(tiny: bool) -> nn.Module:
    return _example("pix2pix").UNetGenerator(*((5, 4) if tiny else (8, 64)))  # type: ignore[no-any-return]


def _cyclegan(tiny: bool) -> nn.Module:
    cyclegan = _example("cyclegan")
    network: nn.Module = cyclegan.build_generator(*((4, 1) if tiny else (64, 9)))
    return network.apply(_example("common").init_gan_weights)


def _vae_decoder(tiny: bool) -> nn.Module:
    """Returns the decoder, which makes an image from a code."""
    decoder: nn.Module = _example("vae").Autoencoder(*((32, 4) if tiny else (64, 64))).decoder
    return decoder


def _codes(batch: int, tiny: bool, device: torch.device) -> Arguments:
    return (_random(batch, 128, device=device),)


def _unet(tiny: bool) -> nn.Module:
    return _example("unet").UNet(2, *((4, 2) if tiny else (64, 4)))  # type: ignore[no-any-return]


class _PoseNetwork(nn.Module):
    """SimpleBaseline (Xiao et al. 2018): a ResNet, three k4 s2 p1 transposed convolutions, a heat map for each
    joint."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        from torchvision.models import resnet18, resnet50

        resnet = resnet18(weights=None) if tiny else resnet50(weights=None)
        self.backbone = nn.Sequential(*list(resnet.children())[:-2])
        channels, width = (512, 8) if tiny else (2048, 256)
        layers: list[nn.Module] = []
        for inner in (channels, width, width):
            layers += [
                nn.ConvTranspose2d(inner, width, 4, 2, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
        self.head = nn.Sequential(*layers, nn.Conv2d(width, 17, 1))

    def forward(self, images: Tensor) -> Tensor:
        heat_maps: Tensor = self.head(self.backbone(images))
        return heat_maps


def _people(batch: int, tiny: bool, device: torch.device) -> Arguments:
    height, width = (64, 32) if tiny else (256, 192)
    return (_random(batch, 3, height, width, device=device),)


def _mask_rcnn(tiny: bool) -> nn.Module:
    """Has two classes, so that random weights score above the threshold and the mask head gets its 100 boxes per
    image."""
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    if tiny:
        return _example("mask_rcnn").build_model(96)  # type: ignore[no-any-return]
    network: nn.Module = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=2)
    return network


def _disks(batch: int, tiny: bool, device: torch.device) -> Arguments:
    return _example("mask_rcnn").batch_of_disks(batch, 96 if tiny else 800, 0, device)  # type: ignore[no-any-return]


class _SamDecoder(nn.Module):
    """SAM's interactive part: from prompts on an image that the encoder has already seen to masks."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        from transformers import (
            SamConfig,
            SamMaskDecoderConfig,
            SamModel,
            SamPromptEncoderConfig,
            SamVisionConfig,
        )

        side = 128 if tiny else 1024
        # The encoder is not called, so it is as small as possible.
        vision = SamVisionConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=side,
            global_attn_indexes=[],
        )
        config = SamConfig(
            vision_config=vision.to_dict(),
            prompt_encoder_config=SamPromptEncoderConfig(
                image_size=side, image_embedding_size=side // 16
            ).to_dict(),
            mask_decoder_config=SamMaskDecoderConfig().to_dict(),
        )
        self.sam = SamModel(config)

    def forward(self, image_embeddings: Tensor, input_points: Tensor) -> tuple[Tensor, Tensor]:
        made = self.sam(image_embeddings=image_embeddings, input_points=input_points)
        return made.pred_masks, made.iou_scores


def _prompts(batch: int, tiny: bool, device: torch.device) -> Arguments:
    """Returns prompts: one image per entry, with four points on each."""
    side = 8 if tiny else 64
    points = 16 * side * torch.rand(batch, 4, 1, 2, generator=torch.Generator().manual_seed(0))
    return (_random(batch, 256, side, side, device=device), points.to(device))


class _First(nn.Module):
    """Returns one tensor of the object that transformers returns."""

    def __init__(self, network: nn.Module, field: str) -> None:
        super().__init__()
        self.network = network
        self.field = field

    def forward(self, pixel_values: Tensor) -> Tensor:
        found: Tensor = getattr(self.network(pixel_values=pixel_values), self.field)
        return found


def _dpt(tiny: bool) -> nn.Module:
    from transformers import DPTConfig, DPTForDepthEstimation

    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 64,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 16, 24, 32],
        "fusion_hidden_size": 16,
    }
    return _First(DPTForDepthEstimation(DPTConfig(**(small if tiny else {}))), "predicted_depth")


def _vitpose(tiny: bool) -> nn.Module:
    from transformers import VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    base: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    layers = small if tiny else base
    backbone = VitPoseBackboneConfig(out_indices=[layers["num_hidden_layers"]], **layers)
    config = VitPoseConfig(backbone_config=backbone, use_simple_decoder=False, num_labels=17)
    return _First(VitPoseForPoseEstimation(config), "heatmaps")


def _vitpose_people(batch: int, tiny: bool, device: torch.device) -> Arguments:
    return (_random(batch, 3, 256, 192, device=device),)


NETWORKS = {
    network.name: network
    for network in (
        Network("dcgan", "DCGAN generator, 64 pixels", _dcgan, _latents, 128),
        Network("pix2pix", "pix2pix U-Net, 256 pixels", _pix2pix, _images(256, 32), 16),
        Network("cyclegan", "CycleGAN generator, 256 pixels", _cyclegan, _images(256, 32), 8),
        Network("vae", "VAE decoder, 64 pixels", _vae_decoder, _codes, 128),
        Network("unet", "U-Net, 256 pixels", _unet, _images(256, 32), 8),
        Network("simplebaseline", "SimpleBaseline pose, ResNet-50", _PoseNetwork, _people, 32),
        Network(
            "maskrcnn",
            "Mask R-CNN, ResNet-50 FPN, 800 pixels",
            _mask_rcnn,
            _disks,
            2,
            "torch.compile breaks it into graphs whose shapes change with every box that is found",
        ),
        Network("sam", "SAM mask decoder, 1024 pixels", _SamDecoder, _prompts, 8),
        Network("dpt", "DPT depth, ViT-B, 384 pixels", _dpt, _images(384, 64), 8),
        Network("vitpose", "ViTPose-B, classic decoder", _vitpose, _vitpose_people, 32),
    )
}
