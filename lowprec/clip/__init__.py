"""CLIP, built on open_clip. Import it from here: `from lowprec.clip import open_clip`.

The torchvision wheel registers its C++ operators only with the CUDA build of torch it was made
for. With a CPU build, `import torchvision` fails: `operator torchvision::nms does not exist`. None
of its operators is needed, so it is enough to declare the two names that it looks up.
"""

import torch

if not (torch.version.cuda or torch.version.hip) and not hasattr(torch.ops.torchvision, "nms"):
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # dropped with its last reference
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip  # noqa: E402, F401 (needs the names above)
