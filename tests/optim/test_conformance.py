"""Which rule each installed StableAdamW follows; `lowprec/optim/README.md` has the table."""

from functools import partial

import pytest
import torch

import lowprec.clip  # noqa: F401 (before timm, which imports torchvision)
from experiments.benchmarks.peers import library_optimizer
from tests.optim.conformance import BETAS, TOLERANCES, WEIGHT_DECAY, Rule, explain, run_optimizer

COMMON = {"betas": BETAS, "eps": 1e-6, "weight_decay": WEIGHT_DECAY}
stable_adamw = partial(library_optimizer, name="StableAdamW", **COMMON)
OURS = partial(stable_adamw, "lowprec.optim")
OPTIMI = partial(stable_adamw, "optimi", lr=1e-3)
# timm has no StableAdamW; this AdamW, which can clip, is the closest
TIMM = partial(library_optimizer, "timm.optim", "AdamWLegacy", clipping_threshold=1.0, **COMMON)
TIMMS = Rule(rms="g^2 / (sqrt(u) + eps)^2", decay_rate="the raw rate")
UNCLIPPED = Rule(clipping="nothing")
CASES = {  # package, builder, device, rule
    "ours": ("lowprec", OURS(), "cpu", Rule()),
    "ours, raw decay": (
        *("lowprec", OURS(clip_weight_decay=False), "cpu"),
        Rule(decay_rate="the raw rate"),
    ),
    "ours, unclipped": ("lowprec", OURS(clip_threshold=None), "cpu", UNCLIPPED),
    "ours, gpu": ("lowprec", OURS(), "cuda", Rule()),
    "torch": ("torch", library_optimizer("torch.optim", "AdamW", **COMMON), "cpu", UNCLIPPED),
    "optimi": ("optimi", OPTIMI(foreach=False, triton=False), "cpu", Rule()),
    "optimi, foreach": ("optimi", OPTIMI(foreach=True, triton=False), "cpu", Rule()),
    "optimi, triton": ("optimi", OPTIMI(foreach=False, triton=True), "cuda", Rule()),
    "timm": ("timm", TIMM(), "cpu", TIMMS),
    "pytorch_optimizer": (
        *("pytorch_optimizer", stable_adamw("pytorch_optimizer", foreach=False), "cpu"),
        Rule(),
    ),
    "pytorch_optimizer, foreach": (
        *("pytorch_optimizer", stable_adamw("pytorch_optimizer", foreach=True), "cpu"),
        Rule(),
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.gpu) if CASES[c][2] == "cuda" else c for c in CASES]
)
@pytest.mark.filterwarnings("ignore:Parameter `foreach` is deprecated:DeprecationWarning")  # optimi
def test_each_installed_implementation_follows_its_rule(case):
    package, build, device, rule = CASES[case]
    # earlier versions of timm cannot clip
    pytest.importorskip(package, minversion="1.0.31" if package == "timm" else None)
    dtype = torch.float32 if package == "lowprec" or device == "cuda" else torch.float64
    path = run_optimizer(build, device, dtype)
    rules, distance = explain(path, TOLERANCES[dtype])
    assert rules == [rule], (case, distance)
