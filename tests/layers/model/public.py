"""Models of torchvision, whose wheel wants another torch than this one for its compiled half."""

from __future__ import annotations

import torch


def torchvision_models():
    """``torchvision.models``, which need none of the compiled operators; these are only declared."""
    if not hasattr(torch.ops.torchvision, "nms"):
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(declared)
    from torchvision import models

    return models


_kept: list[torch.library.Library] = []
