"""Models of images and video, of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from .hub import BATCH, Batch, hub, images


def _labelled(size: int) -> Batch:
    def make() -> dict[str, Any]:
        return {
            "pixel_values": images(size),
            "labels": torch.randint(10, (BATCH,)),
        }

    return make


def _unlabelled(size: int) -> Batch:
    return lambda: {"pixel_values": images(size)}


def _segmented(size: int) -> Batch:
    return lambda: {"pixel_values": images(size, 4), "labels": torch.randint(10, (4, size, size))}


def _depths(size: int) -> Batch:
    return lambda: {"pixel_values": images(size, 4)}


def _clips(frames: int, size: int) -> Batch:
    return lambda: {"pixel_values": torch.randn(4, frames, 3, size, size), "labels": torch.randint(10, (4,))}


_TEN = {"num_labels": 10}
_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    **_TEN,
}
_WINDOWS = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    **_TEN,
}
_STAGES = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 1], **_TEN}


def _classifier(name: str, prefix: str, settings: dict[str, Any], size: int = 32, **more: Any) -> None:
    hub(name, f"{prefix}Config", f"{prefix}ForImageClassification", settings, _labelled(size), **more)


_classifier("vit", "ViT", _VIT)
_classifier("deit", "DeiT", _VIT)
_classifier("beit", "Beit", _VIT)
_classifier("dinov2", "Dinov2", _VIT)
_classifier("swin", "Swin", _WINDOWS, drop_path_rate=0.1)
_classifier("swinv2", "Swinv2", _WINDOWS)
_classifier(
    "convnext", "ConvNext", _TEN, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, drop_path_rate=0.1
)
_classifier("resnet", "ResNet", _STAGES, size=96)
_classifier("regnet", "RegNet", _STAGES, groups_width=8, size=64)
_classifier("bit", "Bit", _STAGES, num_groups=8, size=64)
_classifier("mobilenet-v2", "MobileNetV2", _TEN, depth_multiplier=0.25)
_classifier(
    "mobilevit",
    "MobileViT",
    _TEN,
    image_size=64,
    patch_size=2,
    hidden_sizes=[16, 24, 32],
    neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    num_attention_heads=2,
    size=64,
)
_classifier(
    "efficientnet",
    "EfficientNet",
    _TEN,
    width_coefficient=0.25,
    depth_coefficient=0.25,
    hidden_dim=320,
    size=64,
)
_classifier(
    "levit",
    "Levit",
    _TEN,
    image_size=64,
    hidden_sizes=[16, 32, 48],
    num_attention_heads=[2, 2, 2],
    depths=[1, 1, 1],
    key_dim=[8, 8, 8],
    attention_ratio=[2, 2, 2],
    mlp_ratio=[2, 2, 2],
    size=64,
)
_classifier(
    "poolformer",
    "PoolFormer",
    _TEN,
    depths=[1, 1, 1, 1],
    hidden_sizes=[8, 16, 24, 32],
    drop_path_rate=0.1,
    size=64,
)
_classifier(
    "pvt",
    "Pvt",
    _TEN,
    image_size=64,
    depths=[1, 1, 1, 1],
    hidden_sizes=[8, 16, 24, 32],
    num_attention_heads=[1, 2, 2, 4],
    size=64,
)
_classifier(
    "focalnet",
    "FocalNet",
    _TEN,
    image_size=32,
    patch_size=2,
    embed_dim=16,
    depths=[1, 1],
    hidden_sizes=[16, 32],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
)
_classifier(
    "hiera",
    "Hiera",
    _TEN,
    embed_dim=16,
    image_size=[64, 64],
    depths=[1, 1, 1, 1],
    num_heads=[1, 1, 2, 2],
    size=64,
)
hub(
    "vit-mae",
    "ViTMAEConfig",
    "ViTMAEForPreTraining",
    _VIT,
    _unlabelled(32),
    decoder_hidden_size=32,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=4,
    decoder_intermediate_size=64,
)
hub(
    "segformer",
    "SegformerConfig",
    "SegformerForSemanticSegmentation",
    _TEN,
    _segmented(64),
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
    decoder_hidden_size=32,
)
hub(
    "yolos",
    "YolosConfig",
    "YolosForObjectDetection",
    {**_VIT, "image_size": [32, 32]},
    _unlabelled(32),
    num_detection_tokens=8,
)
hub(
    "glpn",
    "GLPNConfig",
    "GLPNForDepthEstimation",
    {},
    _depths(64),
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
    decoder_hidden_size=16,
)
hub(
    "videomae",
    "VideoMAEConfig",
    "VideoMAEForVideoClassification",
    _VIT,
    _clips(4, 32),
    num_frames=4,
    tubelet_size=2,
)
hub(
    "swin2sr",
    "Swin2SRConfig",
    "Swin2SRForImageSuperResolution",
    {},
    _unlabelled(32),
    image_size=32,
    embed_dim=16,
    depths=[2, 2],
    num_heads=[2, 2],
    window_size=4,
)


def _backbone() -> dict[str, Any]:
    import transformers

    return {
        "backbone_config": transformers.ResNetConfig(
            **_STAGES,
            out_features=["stage1", "stage2", "stage3"],  # pyright: ignore[reportCallIssue]
        ),
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
    }


_DETR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 10,
    **_TEN,
}
hub("detr", "DetrConfig", "DetrForObjectDetection", _DETR, _unlabelled(64), backbone=_backbone)
hub(
    "deformable-detr",
    "DeformableDetrConfig",
    "DeformableDetrForObjectDetection",
    {**_DETR, "decoder_layers": 2},
    _unlabelled(64),
    backbone=_backbone,
    num_feature_levels=3,
)
hub(
    "upernet",
    "UperNetConfig",
    "UperNetForSemanticSegmentation",
    {},
    _segmented(64),
    backbone=_backbone,
    hidden_size=32,
    auxiliary_channels=16,
    auxiliary_in_channels=64,
    num_labels=10,
)
hub(
    "dpt",
    "DPTConfig",
    "DPTForSemanticSegmentation",
    _TEN,
    _segmented(32),
    image_size=32,
    patch_size=8,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=64,
    backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[8, 16, 24, 32],
    fusion_hidden_size=16,
)


def _maskformer() -> dict[str, Any]:
    import transformers

    return {
        "backbone_config": transformers.SwinConfig(
            image_size=64,
            patch_size=2,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[1, 2, 2, 2],
            window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],  # pyright: ignore[reportCallIssue]
        ),
        "decoder_config": transformers.DetrConfig(**_DETR, **_backbone()),
    }


hub(
    "maskformer",
    "MaskFormerConfig",
    "MaskFormerModel",
    _TEN,
    _unlabelled(64),
    backbone=_maskformer,
    fpn_feature_size=32,
    mask_feature_size=32,
)
