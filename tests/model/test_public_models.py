"""Models of torchvision and MONAI as they are, trained on split tensors beside the same ones alone."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.model.against_alone import train_beside
from tests.model.public import torchvision_models

CLASSES = 5


def resnet():
    models = torchvision_models().resnet

    class Narrow(models.ResNet):
        def _make_layer(self, block, planes, *arguments, **options):
            return super()._make_layer(block, planes // 8, *arguments, **options)

    net = Narrow(models.BasicBlock, [1, 1, 1, 1])
    net.fc = nn.Linear(net.inplanes, CLASSES)
    return net


def densenet():
    return torchvision_models().DenseNet(4, (2, 2), 8, bn_size=2, num_classes=CLASSES)


def mobilenet():
    models = torchvision_models().mobilenetv3
    block = partial(models.InvertedResidualConfig, dilation=1, width_mult=0.5)
    setting = [
        block(8, 3, 16, 16, True, "RE", 2),
        block(16, 5, 32, 16, True, "HS", 2),
        block(16, 5, 48, 24, False, "HS", 1),
    ]
    return models.MobileNetV3(setting, last_channel=16, num_classes=CLASSES, dropout=0.0)


def efficientnet():
    models = torchvision_models().efficientnet
    setting = [models.MBConvConfig(1, 3, 1, 8, 8, 1), models.MBConvConfig(4, 5, 2, 8, 16, 2)]
    return models.EfficientNet(
        setting, dropout=0.0, stochastic_depth_prob=0.4, num_classes=CLASSES, last_channel=16
    )


def convnext():
    models = torchvision_models().convnext
    return models.ConvNeXt(
        [models.CNBlockConfig(8, 16, 1), models.CNBlockConfig(16, None, 1)], num_classes=CLASSES
    )


def deeplab():
    models = torchvision_models()

    class Backbone(nn.Sequential):
        def forward(self, x):
            return {"out": super().forward(x)}

    backbone = Backbone(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    )
    # As its DeepLabHead, which has 256 channels.
    head = nn.Sequential(
        models.segmentation.deeplabv3.ASPP(8, (2, 3, 5), out_channels=12),
        nn.Conv2d(12, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, CLASSES, 1),
    )
    head[0].project[3].p = 0.0
    return models.segmentation.DeepLabV3(backbone, head)


def vit():
    models = torchvision_models()
    return models.VisionTransformer(24, 4, 2, 2, 8, 16, num_classes=CLASSES)


def swin():
    models = torchvision_models()
    return models.SwinTransformer(
        [2, 2], 8, [2, 2], [2, 2], [3, 3], stochastic_depth_prob=0.0, num_classes=CLASSES
    )


def monai_net(name, **arguments):
    from monai.networks import nets

    return getattr(nets, name)(**arguments)


def shufflenet():
    return torchvision_models().ShuffleNetV2([1, 1, 1], [8, 12, 16, 24, 32], num_classes=CLASSES)


def maxvit():
    models = torchvision_models()
    return models.MaxVit((24, 24), 8, 3, [8, 16], [1, 1], 4, stochastic_depth_prob=0.0, num_classes=CLASSES)


def swin_v2():
    models = torchvision_models().swin_transformer
    return models.SwinTransformer(
        [2, 2],
        8,
        [2, 2],
        [2, 2],
        [3, 3],
        stochastic_depth_prob=0.3,
        num_classes=CLASSES,
        block=models.SwinTransformerBlockV2,
        downsample_layer=models.PatchMergingV2,
    )


def swin_of_videos():
    models = torchvision_models().video.swin_transformer
    return models.SwinTransformer3d(
        [2, 2, 2], 8, [2, 2], [2, 2], [2, 3, 3], num_classes=CLASSES, stochastic_depth_prob=0.0
    )


def mvit():
    models = torchvision_models().video.mvit
    blocks = [
        models.MSBlockConfig(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        models.MSBlockConfig(2, 8, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return models.MViT(
        (20, 24),
        4,
        blocks,
        residual_pool=True,
        residual_with_cls_embed=True,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=CLASSES,
        dropout=0.0,
        stochastic_depth_prob=0.0,
    )


def of_all(y):
    """Loss of whatever a model returns."""
    if isinstance(y, torch.Tensor):
        return y.square().mean() + y.sin().mean()
    return sum(of_all(each) for each in (y.values() if isinstance(y, dict) else y))


_PLANE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (3, 4, 6), "strides": (2, 2)}
MODELS = {
    "ResNet": (resnet, [(2, 3, 45, 38)]),
    "DenseNet": (densenet, [(2, 3, 45, 38)]),
    "MobileNetV3": (mobilenet, [(2, 3, 45, 38)]),
    "EfficientNet": (efficientnet, [(2, 3, 45, 38)]),
    "ConvNeXt": (convnext, [(2, 3, 38, 45)]),
    "DeepLabV3": (deeplab, [(2, 3, 29, 34)]),
    "ViT": (vit, [(2, 3, 24, 24)]),
    "Swin": (swin, [(2, 3, 24, 24)]),
    "3-D U-Net": (partial(monai_net, "UNet", num_res_units=1, **_VOLUME), [(1, 1, 12, 16, 12)]),
    "ShuffleNet": (shufflenet, [(2, 3, 45, 38)]),
    "MaxViT": (maxvit, [(2, 3, 24, 24)]),
    "Swin, second version": (swin_v2, [(2, 3, 26, 30)]),
    "Swin of videos": (swin_of_videos, [(2, 3, 6, 20, 14)]),
    "MViT": (mvit, [(2, 3, 4, 20, 24)]),
    "AttentionUnet": (
        partial(monai_net, "AttentionUnet", channels=(4, 6, 8), strides=(2, 2), **_PLANE),
        [(2, 1, 36, 28)],
    ),
    "DynUNet": (
        partial(
            monai_net,
            "DynUNet",
            kernel_size=[3, 3, 3],
            strides=[1, 2, 2],
            upsample_kernel_size=[2, 2],
            filters=[2, 4, 4],
            deep_supervision=True,
            deep_supr_num=1,
            res_block=True,
            **_PLANE,
        ),
        [(2, 1, 20, 28)],
    ),
    "SegResNet": (
        partial(monai_net, "SegResNet", init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1), **_PLANE),
        [(2, 1, 36, 28)],
    ),
    "MedNeXt": (
        partial(
            monai_net,
            "MedNeXt",
            init_filters=4,
            encoder_expansion_ratio=2,
            decoder_expansion_ratio=2,
            bottleneck_expansion_ratio=2,
            blocks_down=(1, 1),
            blocks_bottleneck=1,
            blocks_up=(1, 1),
            **_PLANE,
        ),
        [(2, 1, 24, 20)],
    ),
    "VoxelMorph": (
        lambda: monai_net(
            "VoxelMorph",
            backbone=monai_net(
                "VoxelMorphUNet",
                spatial_dims=2,
                in_channels=2,
                unet_out_channels=4,
                channels=(4, 4, 4, 4),
                final_conv_channels=(4,),
            ),
            integration_steps=2,
            spatial_dims=2,
        ),
        [(2, 1, 24, 20), (2, 1, 24, 20)],
    ),
}


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Each of the four on one number of ranks and blocks on four: every cut of a model is seen within three days.
GRIDS = {2: ["2x1", {"N": 2}], 3: ["1x3", {"C": 3}], 4: ["2x2"]}


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.in_turn(2, 3, 4)
@pytest.mark.filterwarnings("ignore:monai.networks.blocks.Warp")
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_model_alone(comm, name):
    made, shapes = MODELS[name]
    for grid in GRIDS[comm.size]:
        torch.manual_seed(5)
        train_beside(made(), grid, tuple(torch.randn(shape) for shape in shapes), of_all, steps=2)
