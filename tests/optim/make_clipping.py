"""Computes what zclip and OLMo-core do with the norms and losses in tests/fixtures/clipping.json.

    pip install zclip==1.0.0 ai2-olmo-core==3.0.0
    python tests/optim/make_clipping.py

Writes the file anew; with these versions it stays the same, byte for byte.
"""

import json
from pathlib import Path

import torch
from olmo_core.optim import SkipStepOptimizer
from zclip import ZClip

PATH = Path(__file__).parents[1] / "fixtures" / "clipping.json"


def main() -> None:
    reference = json.loads(PATH.read_text())
    norms, losses = reference["norms"], reference["losses"]
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)  # its gradient is the norm
    zclip = ZClip(max_grad_norm=None)
    clipped = []
    for norm in norms:
        model.weight.grad = torch.full((1, 1), norm, dtype=torch.float64)
        zclip.step(model)
        clipped.append(float(f"{model.weight.grad.item():.12g}"))
    optimizer, skipped = SkipStepOptimizer(model.parameters(), {}), []
    for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        optimizer.latest_loss = torch.tensor(loss, dtype=torch.float64)
        optimizer.latest_grad_norm = torch.tensor(norm, dtype=torch.float64)
        if optimizer.step_skipped:
            skipped.append(i)
    reference |= {"clipped": clipped, "skipped": skipped}
    reference |= {"mean": zclip.mean, "variance": zclip.var}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(reference[key])}" for key in reference)
    PATH.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
