"""Widen networks of torchvision and timm twice, and print by how much their outputs change, and what stays.

    pip install torchvision timm
    python scripts/widen_known_models.py

The networks are drawn, in float64 and in evaluation mode; weights that begin at 0 are drawn too, because nothing would be
seen behind them. `change` is the largest difference of an output from before, divided by the largest output. `times` is how
many times as many parameters there are: 4 where all inner widths are twice what they were, but for embeddings and layers by
feature.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

import esper

SWIN_V2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
OF_TORCHVISION: dict[str, Callable[[], nn.Module]] = {
    "AlexNet": models.alexnet,
    "VGG-11": models.vgg11_bn,
    "ResNet-18": models.resnet18,
    "ResNeXt-50": models.resnext50_32x4d,
    "SqueezeNet": models.squeezenet1_1,
    "DenseNet-121": models.densenet121,
    "GoogLeNet": lambda: models.googlenet(aux_logits=False, init_weights=False),
    "MobileNet v2": models.mobilenet_v2,
    "MobileNet v3": models.mobilenet_v3_small,
    "ShuffleNet v2": models.shufflenet_v2_x0_5,
    "MnasNet": models.mnasnet0_5,
    "EfficientNet": models.efficientnet_b0,
    "RegNet": models.regnet_y_400mf,
    "ConvNeXt": models.convnext_tiny,
    "ViT": lambda: models.VisionTransformer(64, 16, 2, 4, 64, 128),
    "Swin": lambda: SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4]),
    "Swin v2": lambda: SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], **SWIN_V2),
    "LR-ASPP (segmentation)": lambda: models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None),
    "R3D-18 (video)": models.video.r3d_18,
}
OF_TIMM = {  # with the side of the images
    "mixer_s32_224": 224,
    "gmlp_ti16_224": 64,
    "resmlp_12_224": 64,
    "vit_tiny_patch16_224": 64,
    "deit_tiny_distilled_patch16_224": 64,
    "resnet10t": 64,
    "efficientnet_lite0": 64,
    "mobilenetv3_small_050": 64,
    "convnext_atto": 64,
    "mobilevit_xxs": 64,
    "repvgg_a0": 64,
    "starnet_s1": 64,
    "poolformer_s12": 64,
    "levit_128s": 224,
    "ghostnet_050": 64,
    "xcit_nano_12_p16_224": 64,
    "edgenext_xx_small": 64,
    "pit_ti_224": 224,
    "nf_resnet26": 64,
}
BY_IMAGE = ("mixer", "gmlp", "resmlp", "vit", "deit", "xcit")
"""What is built for a size of image."""


def of_timm(name: str, side: int) -> nn.Module:
    """Build a network of timm, for images of a side."""
    size = {"img_size": side} if name.startswith(BY_IMAGE) else {}
    built: nn.Module = timm.create_model(name, **size)
    return built


def output(model: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a network; its first one if it has several."""
    found = model(x)
    values = [found] if isinstance(found, Tensor) else [*found.values()] if isinstance(found, dict) else [*found]
    return values[0]


@torch.no_grad()
def row(name: str, build: Callable[[], nn.Module], x: Tensor) -> str:
    """Widen one network, and return its row of the table."""
    torch.manual_seed(0)
    model, begin = build().double().eval(), time.perf_counter()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    before, parameters = output(model, x), sum(each.numel() for each in model.parameters())
    try:
        widened = esper.widen(model, 2, example=x)
    except esper.InputError as error:
        return f"| {name} | - | - | - | {error} |"
    change = float((output(model, x) - before).abs().max() / before.abs().max())
    times = sum(each.numel() for each in model.parameters()) / parameters
    left, seconds = widened.left_out, time.perf_counter() - begin
    stays = f"{len(left)} groups of layers, the first as {next(iter(left.values()))}" if left else ""
    return f"| {name} | {change:.0e} | {times:.2f} | {seconds:.0f} | {stays} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks by name (all)")
    asked = parser.parse_args().names
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| network | change | times | seconds | what stays |\n|---|---|---|---|---|")
    for name, build in OF_TORCHVISION.items():
        shape = (1, 3, 4, 32, 32) if "video" in name else (2, 3, 64, 64)
        if not asked or name in asked:
            print(row(name, build, torch.randn(shape, dtype=torch.float64)), flush=True)
    for name, side in OF_TIMM.items():
        if not asked or name in asked:
            shape = (2, 3, side, side)
            print(
                row(name, lambda name=name, side=side: of_timm(name, side), torch.randn(shape, dtype=torch.float64)),
                flush=True,
            )


if __name__ == "__main__":
    main()
