"""CLIP, built on open_clip. Import it from here: `from lowprec.clip import open_clip`.

PyPI's torchvision is built for the CUDA build of torch. With a CPU build its C++ operators cannot
be loaded, and `import torchvision` fails: `operator torchvision::nms does not exist`. None of its
operators is needed, so it is enough to declare the two names that it looks up.
"""

import importlib.util
from pathlib import Path

import torch


def _load_operators() -> bool:
    """Loads torchvision's operators, as torchvision does; False if they do not fit this torch."""
    try:
        package = Path(importlib.util.find_spec("torchvision").origin)
        torch.ops.load_library(package.with_name("_C.so"))
    except OSError:
        return False
    return True


TORCHVISION_FITS = _load_operators()
if not TORCHVISION_FITS and not hasattr(torch.ops.torchvision, "nms"):
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # dropped with its last reference
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip  # noqa: E402, F401 (needs the names above)
