"""The one import of open_clip: others take it from here.

The torchvision wheel registers its C++ operators only beside the CUDA torch that it was built for;
beside a CPU build `import torchvision` stops at `operator torchvision::nms does not exist`. We need
none of its operators, so declaring the two names that it looks up is enough.
"""

import torch

if not (torch.version.cuda or torch.version.hip) and not hasattr(torch.ops.torchvision, "nms"):
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # dropped with its last reference
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip  # noqa: E402, F401 (after the names above exist)
