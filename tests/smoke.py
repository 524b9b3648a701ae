"""First use of the installed library, away from the checkout: `make wheel` runs it."""

import importlib
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import lowprec.diagnostics
import lowprec.nn
import lowprec.ops
import lowprec.optim
from lowprec.diagnostics import watch
from lowprec.formats import parse_format
from lowprec.nn import advise, prepare_for_training
from lowprec.ops import matmul, quantize
from lowprec.optim import StableAdamW, param_groups


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.c_proj(self.gelu(self.c_fc(x)))


for package in (lowprec.nn, lowprec.optim, lowprec.diagnostics, lowprec.ops):
    assert all(getattr(package, name) for name in package.__all__)
assert importlib.util.find_spec("lowprec.train") is None, "not the wheel but a checkout"
torch.manual_seed(0)
model, x = nn.Sequential(Block(), Block()), torch.randn(32, 64)
advice = advise(model, x, loss=lambda output: output.square().mean())
assert {row["verdict"] for row in advice.rows} == {"not timed"}, advice
report = prepare_for_training(model, "switchback", inputs=x, skip_slow=False)
assert sum(layer.swapped for layer in report) == 4, report
optimizer = StableAdamW(param_groups(model, weight_decay=0.1), lr=1e-2)
monitor = watch(model, optimizer)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    monitor.loss(loss)
    loss.backward()
    optimizer.step()
first, *_, last = monitor.rows()
assert last["loss"] < first["loss"] and last["rms/0.c_fc.weight"] > 0, (first, last)
a, b = torch.randn(2, 8, 32)
(a8, _, a_scale), (b8, _, b_scale) = (quantize(y, parse_format("int8"), "rowwise") for y in (a, b))
product = matmul(a8, b8, a_scale, b_scale, None, torch.float32)
torch.testing.assert_close(product, a @ b.T, rtol=0, atol=0.3)
try:
    monitor.save(Path(tempfile.mkdtemp(), "run"))
    saved = "save works"
except ImportError as error:
    saved = str(error)
words = f"lowprec {version('lowprec')}, Python {sys.version.split()[0]}, torch {torch.__version__}"
print(f"{words}: {saved}")
