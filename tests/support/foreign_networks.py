"""Networks of other libraries, small and with random weights, and their inputs.

Run by itself it is a fresh process: `python foreign_networks.py DIRECTORY NAME...` loads what a swap has saved and
verifies it once more, without anything that the first process knew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tconv_swap
from tconv_swap import Inputs


@dataclass(frozen=True)
class Foreign:
    """A network of another library.

    `layers`: how many transposed convolutions it has. `build` and `inputs` are called with a seeded generator of
    random numbers, and need the packages in `needs`.
    """

    layers: int
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    needs: tuple[str, ...] = ("transformers",)
    include_1d: bool = False


def detection_inputs(**more: Callable[[], Tensor]) -> Inputs:
    """Returns two images of different sizes and their targets: a list of tensors, a list of dicts."""
    images = [torch.rand(3, 64, 64), torch.rand(3, 48, 64)]
    targets = [
        {
            "boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0], [4.0, 4.0, 30.0, 44.0]]),
            "labels": torch.tensor([1, 2]),
            **{name: make() for name, make in more.items()},
        }
        for _ in images
    ]
    return Inputs((images, targets))


def detector(kind: str) -> nn.Module:
    """Returns torchvision's detector with a backbone of two convolutions and heads of few channels, small enough for
    CI."""
    from torchvision.models import detection
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    backbone: Any = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()
    )
    backbone.out_channels = 16
    heads: dict[str, nn.Module] = (
        dict(mask_head=MaskRCNNHeads(16, (16,), 1), mask_predictor=MaskRCNNPredictor(16, 16, 3))
        if kind == "MaskRCNN"
        else dict(
            keypoint_head=KeypointRCNNHeads(16, (16,)), keypoint_predictor=KeypointRCNNPredictor(16, 17)
        )
    )
    return getattr(detection, kind)(
        backbone,
        num_classes=None,
        box_predictor=FastRCNNPredictor(1024, 3),
        min_size=64,
        max_size=64,
        rpn_anchor_generator=detection.anchor_utils.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
        rpn_post_nms_top_n_train=16,
        rpn_post_nms_top_n_test=8,
        box_batch_size_per_image=8,
        box_detections_per_img=4,
        box_score_thresh=0.0,
        **heads,
    )


def keypoints() -> Tensor:
    return torch.cat([torch.rand(2, 17, 2) * 20 + 10, torch.ones(2, 17, 1)], dim=2)


def masks() -> Tensor:
    return (torch.rand(2, 64, 64) > 0.5).to(torch.uint8)


def sam() -> nn.Module:
    from transformers import SamConfig, SamModel

    vision = dict(hidden_size=32, output_channels=16, num_hidden_layers=1, num_attention_heads=2, mlp_dim=64)
    image = dict(image_size=64, patch_size=16)
    return SamModel(
        SamConfig(
            vision_config=dict(**vision, **image, window_size=2, global_attn_indexes=[0], num_pos_feats=8),
            prompt_encoder_config=dict(**image, hidden_size=16, mask_input_channels=4),
            mask_decoder_config=dict(
                hidden_size=16, mlp_dim=32, num_hidden_layers=1, num_attention_heads=2, iou_head_hidden_dim=16
            ),
        )
    )


def dpt() -> nn.Module:
    from transformers import DPTConfig, DPTForDepthEstimation

    return DPTForDepthEstimation(
        DPTConfig(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 16, 16, 16],
            fusion_hidden_size=16,
            is_hybrid=False,
        )
    )


def vitpose() -> nn.Module:
    from transformers import VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

    backbone = VitPoseBackboneConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=(64, 48),
        patch_size=(16, 16),
        mlp_ratio=2,
        out_features=["stage2"],
    )
    return VitPoseForPoseEstimation(
        VitPoseConfig(backbone_config=backbone, use_simple_decoder=False, num_labels=5)
    )


def clipseg() -> nn.Module:
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation

    common = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, projection_dim=16)
    return CLIPSegForImageSegmentation(
        CLIPSegConfig(
            text_config=dict(**common, num_hidden_layers=1, vocab_size=50, max_position_embeddings=8),
            vision_config=dict(**common, num_hidden_layers=3, image_size=32, patch_size=8),
            projection_dim=16,
            extract_layers=[0, 1, 2],
            reduce_dim=8,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=16,
        )
    )


def eomt() -> nn.Module:
    """Scales its features up like the simple pyramid of ViTDet."""
    from transformers import EomtConfig, EomtForUniversalSegmentation

    return EomtForUniversalSegmentation(
        EomtConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            mlp_ratio=2,
            image_size=64,
            patch_size=16,
            num_upscale_blocks=2,
            num_blocks=1,
            num_queries=3,
            num_register_tokens=1,
            num_labels=3,
        )
    )


def mask2former() -> nn.Module:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    swin = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return Mask2FormerForUniversalSegmentation(
        Mask2FormerConfig(
            backbone_config=swin,
            feature_size=32,
            mask_feature_size=32,
            hidden_dim=32,
            encoder_feedforward_dim=32,
            encoder_layers=1,
            decoder_layers=2,
            num_attention_heads=2,
            dim_feedforward=32,
            num_queries=3,
        )
    )


def hifigan() -> nn.Module:
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    return SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=8,
            upsample_initial_channel=16,
            upsample_rates=[4, 2],
            upsample_kernel_sizes=[8, 4],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
        )
    )


def monai_unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(2, in_channels=1, out_channels=2, channels=(8, 16, 16), strides=(2, 2), num_res_units=1)


def linknet() -> nn.Module:
    from segmentation_models_pytorch import Linknet

    return Linknet("timm-regnetx_002", encoder_depth=3, encoder_weights=None)


FOREIGN: dict[str, Foreign] = {
    "mask_rcnn": Foreign(
        1, lambda: detector("MaskRCNN"), lambda: detection_inputs(masks=masks), ("torchvision",)
    ),
    "keypoint_rcnn": Foreign(
        1, lambda: detector("KeypointRCNN"), lambda: detection_inputs(keypoints=keypoints), ("torchvision",)
    ),
    "sam": Foreign(
        2,
        sam,
        lambda: Inputs(
            (),
            dict(
                pixel_values=torch.randn(1, 3, 64, 64),
                input_points=torch.rand(1, 1, 2, 2) * 64,
                input_labels=torch.ones(1, 1, 2, dtype=torch.long),
                multimask_output=True,
            ),
        ),
    ),
    "dpt": Foreign(2, dpt, lambda: Inputs((), dict(pixel_values=torch.randn(1, 3, 32, 32)))),
    "vitpose": Foreign(2, vitpose, lambda: Inputs((), dict(pixel_values=torch.randn(1, 3, 64, 48)))),
    "clipseg": Foreign(
        1,
        clipseg,
        lambda: Inputs(
            (), dict(input_ids=torch.randint(0, 49, (2, 6)), pixel_values=torch.randn(2, 3, 32, 32))
        ),
    ),
    "eomt": Foreign(2, eomt, lambda: Inputs((), dict(pixel_values=torch.randn(1, 3, 64, 64)))),
    "hifigan": Foreign(2, hifigan, lambda: Inputs((torch.randn(1, 9, 8),)), include_1d=True),
    "monai_unet": Foreign(2, monai_unet, lambda: Inputs((torch.randn(1, 1, 16, 16),)), ("monai",)),
    "linknet": Foreign(
        3, linknet, lambda: Inputs((torch.randn(2, 3, 32, 32),)), ("segmentation_models_pytorch",)
    ),
}


def main(directory: Path, names: list[str]) -> None:
    for name in names:
        swapped = torch.load(directory / f"{name}-fast.pt", weights_only=False)
        inputs = Inputs(*torch.load(directory / f"{name}-inputs.pt"))
        original = tconv_swap.unswap_layers(swapped, inplace=False)
        report = tconv_swap.verify(original, swapped, inputs)
        assert report.passed, (name, report.failures)
        expected = torch.load(directory / f"{name}-outputs.pt")
        torch.manual_seed(0)
        with torch.no_grad():
            found = [t for _, t in tconv_swap.inputs.named_tensors(inputs(swapped.eval()))]
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
        print(f"{name}: verified")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
