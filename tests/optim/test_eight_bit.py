"""8-bit AdamW against StableAdamW and against the library alone.

Behavior common to all libraries is tested with torch's AdamW in their place; bitsandbytes and
torchao are tested if they are installed.
"""

import math

import pytest
import torch

from lowprec.config.schema import UNKNOWN_WITH_8_BITS
from lowprec.optim.eight_bit import (
    BitsAndBytesAdamW8bit,
    EightBitAdamW,
    TorchaoAdamW8bit,
)
from lowprec.optim.loss_scaling import build_scaler
from lowprec.optim.schedules import matching
from lowprec.optim.stable_adamw import STATISTICS, StableAdamW

RULE = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}
SHAPES = {"a.weight": (64, 80), "a.bias": (80,), "b.weight": (16, 256), "b.scale": ()}
KNOWN = [i for i, name in enumerate(STATISTICS) if name not in UNKNOWN_WITH_8_BITS]


class OfTorch(EightBitAdamW):
    """Wraps torch's AdamW like a library's."""

    def __init__(self, groups, rule, **options):
        super().__init__(torch.optim.AdamW(groups, **rule, foreach=False), **options)

    def _start(self, p, is_wide):
        pass


def make_groups():
    torch.manual_seed(0)
    named = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in SHAPES.items()]
    return [
        {"params": named[::2], "weight_decay": 0.1},
        {"params": named[1::2], "weight_decay": 0.0},
    ]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_grads(optimizer, step, scale=1.0):
    for i, p in enumerate(params_of(optimizer)):
        generator = torch.Generator().manual_seed(100 * step + i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.device) * scale


def run(optimizer, steps=5, scale=1.0):
    for step in range(1, steps + 1):
        set_grads(optimizer, step, scale)
        optimizer.step()
    return [p.detach().clone() for p in params_of(optimizer)]


def assert_same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("clip_norm", [None, 50.0, 1e6])
def test_statistics_equal_those_of_adamw_except_rms(clip_norm):
    ours = OfTorch(make_groups(), RULE, clip_norm=clip_norm)
    reference = StableAdamW(make_groups(), **RULE, clip_norm=clip_norm)
    reference.param_groups[0]["clip_threshold"] = reference.param_groups[1]["clip_threshold"] = None
    torch.testing.assert_close(run(ours), run(reference))
    assert ours.names == reference.names
    expected = reference.statistics[:, KNOWN]
    torch.testing.assert_close(ours.statistics[:, KNOWN], expected, rtol=1e-4, atol=1e-6)
    assert ours.statistics.isnan().sum(dim=0).tolist() == [
        0 if i in KNOWN else len(SHAPES) for i in range(len(STATISTICS))
    ]
    torch.testing.assert_close(ours.grad_norm, reference.grad_norm)
    assert ours.all_finite
    torch.testing.assert_close(ours.clipped_grad_norm, reference.clipped_grad_norm)
    assert (ours.clipped_grad_norm < 0.9 * ours.grad_norm) == (clip_norm == 50)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("skip", ["step", "tensor"])
def test_a_non_finite_gradient_is_never_applied(bad, skip):
    ours = OfTorch(make_groups(), RULE, skip=skip)
    before = run(ours, 1)
    set_grads(ours, 2)
    ours.params[1].grad[0, :3] = bad
    ours.step()
    moved = [not torch.equal(a, b) for a, b in zip(params_of(ours), before, strict=True)]
    assert moved == ([False] * 4 if skip == "step" else [True, False, True, True])
    row = dict(zip(STATISTICS, ours.statistics[1].tolist(), strict=True))
    assert not ours.all_finite and not math.isfinite(row["grad_norm"])
    assert (row["grad_inf"], row["grad_nan"]) == ((3, 0) if bad == math.inf else (0, 3))
    steps = [float(ours.library.state[p]["step"]) for p in ours.params]
    assert steps == [1.0 + is_moved for is_moved in moved]


@pytest.mark.parametrize("veto", ["frozen", "found_inf"])
def test_a_veto_prevents_the_update(veto):
    ours = OfTorch(make_groups(), RULE, skip="tensor")
    before = run(ours, 1)
    setattr(ours, veto, torch.ones(()))
    set_grads(ours, 2)
    ours.step()
    assert_same(params_of(ours), before)
    assert ours.all_finite and ours.statistics[:, STATISTICS.index("grad_norm")].min() > 0


@pytest.mark.parametrize("name", ["fixed", "dynamic"])
def test_the_loss_scale_is_divided_out(name):
    expected = run(OfTorch(make_groups(), RULE), 1)
    ours = OfTorch(make_groups(), RULE, skip="tensor" if name == "fixed" else "step")
    scaler = build_scaler(name, 1024.0, torch.device("cpu"))
    set_grads(ours, 1, scale=1024.0)
    scaler.step(ours)
    assert_same(params_of(ours), expected)


def test_a_parameter_without_a_gradient_is_unchanged():
    ours = OfTorch(make_groups(), RULE)
    before = run(ours, 1)
    set_grads(ours, 2)
    ours.params[2].grad = None
    ours.step()
    assert torch.equal(ours.params[2], before[2]) and not torch.equal(ours.params[3], before[3])
    row = dict(zip(STATISTICS, ours.statistics[2].tolist(), strict=True))
    assert row["grad_norm"] == 0 and row["param_norm"] == pytest.approx(before[2].norm().item())


def test_patterns_match_names_and_modules_above_them():
    names = ["visual.conv1.weight", "visual.proj", "token_embedding.weight"]
    assert matching(names, ["visual"]) == set(names[:2])
    assert matching(names, ["*conv?", "token_*"]) == {names[0], names[2]}
    assert matching(names, []) == set()
    with pytest.raises(ValueError, match="'conv1' matches no module"):
        matching(names, ["conv1"])


LIBRARIES = {"torchao": TorchaoAdamW8bit, "bitsandbytes": BitsAndBytesAdamW8bit}


def assert_near_adamw(params, groups):
    starts = [p.detach().clone() for group in groups for _, p in group["params"]]
    for a, b, start in zip(params, run(OfTorch(groups, RULE)), starts, strict=True):
        assert (a - b).norm() <= 0.1 * (b - start).norm()


@pytest.mark.parametrize("library, options, codes", [
    ("torchao", {}, {"a.weight", "b.weight"}),
    ("torchao", {"min_8bit_size": 4097}, {"a.weight"}),
    ("torchao", {"min_8bit_size": 80}, {"a.weight", "b.weight"}),  # a.bias: no multiple of 256
    ("bitsandbytes", {"override_32bit": ["b"]}, {"a.weight"}),
    ("bitsandbytes", {"min_8bit_size": 80}, {"a.weight", "a.bias", "b.weight"}),
])  # fmt: skip
def test_a_library_codes_the_moments_it_is_told_to(library, options, codes, request):
    request.getfixturevalue(library)
    optimizer = LIBRARIES[library](make_groups(), RULE, **options)
    assert_near_adamw(run(optimizer), make_groups())
    states = optimizer.states()
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {n for n, t in states[kind].items() if t.dtype == torch.uint8} == codes
        assert set(states[f"{kind}_scale"]) == codes
        assert {n: tuple(t.shape) for n, t in states[kind].items()} == SHAPES
    assert optimizer.steps == [5.0] * 4


@pytest.mark.filterwarnings("ignore")  # torch.compile's and the libraries' own
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_move_as_under_the_library_alone(library, device, request):
    if device == "cpu":
        request.getfixturevalue(library)
    library, kind = pytest.importorskip(f"{library}.optim"), LIBRARIES[library]

    def groups():
        made = make_groups()
        for group in made:
            group["params"] = [(n, torch.nn.Parameter(p.to(device))) for n, p in group["params"]]
        return made

    found = run(kind(groups(), RULE))
    assert_near_adamw(found, groups())
    assert_same(found, run(library.AdamW8bit(groups(), **RULE)))
