"""States in page-locked memory; without a GPU, kernels are interpreted and locks pretended."""

from types import SimpleNamespace

import pytest
import torch

from lowprec.optim import StableAdamW, fused, paging
from lowprec.optim.adamw_update import Tensors
from lowprec.optim.state import TENSORS
from lowprec.runs.read import scan_rows
from lowprec.train import loop
from tests.optim.optimizers import COPIES, HALF, RULE, assert_equal, make_groups, params_of, take
from tests.same import contents, differing, recorded

BITS = {"optim_bits": 8, "min_8bit_size": 300}
KINDS = {  # options and the parameters' dtype; bytes of the state of a.0.weight, the second largest
    "StableAdamW": ({}, 4800),
    "AdamW": ({"clip_threshold": None}, 4800),
    "StableAdamW, 8-bit moments": (BITS, 1224),
    "AdamW, 8-bit moments": ({**BITS, "clip_threshold": None}, 1224),
    "16-bit parameters": (HALF, 6000),
}
pytestmark = [
    pytest.mark.usefixtures("right_interpreter"),
    pytest.mark.filterwarnings("ignore:invalid value"),  # numpy's, of the interpreter's inf - inf
]


@pytest.fixture
def available(monkeypatch, device):
    """`available(n)`: leaves n bytes of the GPU to states."""
    locked = []

    def page_locked(x):
        locked.append(torch.zeros_like(x, device="cpu") if x.is_meta else x.clone())
        return locked[-1]

    if device.type == "cpu":
        monkeypatch.setattr(fused, "DEVICES", ("cpu",))
        monkeypatch.setattr(paging, "page_locked", page_locked)
        monkeypatch.setattr(fused, "is_page_locked", lambda x: any(x is y for y in locked))
    return lambda n: monkeypatch.setattr(paging, "available_bytes", lambda device: n)


def make(kind, device, **options):
    own = dict(KINDS[kind][0])
    groups = make_groups(own.pop("dtype", torch.float32), device)
    return StableAdamW(groups, **RULE, **own, fused=True, **options)


def states_of(optimizer):
    return [optimizer.state.get(p, {}) for p in params_of(optimizer)]


def on_host(optimizer):
    """Names of the parameters whose whole state is page-locked."""
    named = zip(optimizer.names, states_of(optimizer), strict=True)
    kinds = {
        name: {fused.is_page_locked(x) for x in paging.tensors_of(state).values()}
        for name, state in named
    }
    assert all(len(each) == 1 for each in kinds.values())
    return {name for name, each in kinds.items() if each == {True}}


@pytest.mark.parametrize("kind", KINDS)
def test_paged_states_step_to_the_bit_as_unpaged_ones(kind, device, available):
    available(KINDS[kind][1])
    optimizer, plain = make(kind, device, paged=True), make(kind, device)
    for each in (optimizer, plain):
        take(each, [1, 2])
    copies = COPIES.values() if kind == "StableAdamW" else ()
    others = [copy(optimizer, make(kind, device, paged=True)) for copy in copies]
    for each in (optimizer, plain, *others):
        take(each, [4])  # whose gradients jump
    for paged in (optimizer, *others):
        assert_equal(paged, plain)
        assert torch.equal(paged.statistics, plain.statistics)
        for state, expected in zip(states_of(paged), states_of(plain), strict=True):
            assert state.keys() == expected.keys()
            for name, x in state.items():
                assert torch.equal(x.to(device), expected[name])
        host = on_host(paged)
        assert "b.0.weight" in host and "a.0.weight" not in host


def test_all_states_stay_on_the_gpu_if_they_fit(device, available, monkeypatch):
    available(10**6)
    monkeypatch.setattr(paging, "page_locked", None)
    optimizer, plain = make("StableAdamW", device, paged=True), make("StableAdamW", device)
    for each in (optimizer, plain):
        take(each, [1, 2])
    assert_equal(optimizer, plain)
    assert {x.device.type for s in states_of(optimizer) for x in s.values()} == {device.type}


def test_the_largest_sizes_fit_first():
    assert paging.too_large([5, 1, 9, 3], 10) == {0, 3}
    assert paging.too_large([5, 1, 9, 3], 18) == set()
    assert paging.too_large([5, 0], -1) == {0, 1}


@pytest.mark.parametrize("fraction, expected", [(1.0, 15 / 16 * 70 - 50), (0.8, 15 / 16 * 64 - 50)])
def test_moments_may_take_what_the_largest_step_leaves(monkeypatch, fraction, expected):
    calls = []
    cuda = SimpleNamespace(
        empty_cache=lambda: calls.append("empty"),
        mem_get_info=lambda device: calls.append("read") or (30 * 2**30, 80 * 2**30),
        get_per_process_memory_fraction=lambda device: fraction,
        memory_reserved=lambda device: 40 * 2**30,
        max_memory_allocated=lambda device: 50 * 2**30,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    assert paging.available_bytes(torch.device("cuda")) == int(expected * 2**30)
    assert calls == ["empty", "read"]


def test_only_a_gpu_is_waited_for(monkeypatch):
    """None is left once `model.cpu()` has moved the parameters; the first group may be empty."""
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail(f"{device}"))
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = StableAdamW([{"params": []}, {"params": [p]}], paged=True)
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_run_counts_its_own_largest_step(make_config, run_once, tmp_path, monkeypatch):
    """Another run of its process may have had a larger one."""
    reset, begun, cuda = [], [], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    for device in (torch.device("cpu"), cuda):
        paging.forget_peak(device)
    assert reset == [cuda]
    monkeypatch.setattr(loop, "forget_peak", begun.append)
    _, built = run_once(make_config({"num_steps": 1}), tmp_path)
    assert begun == [built.device]


def test_what_cannot_be_paged_is_refused(device, available, monkeypatch):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    with pytest.raises(ValueError, match="paged=True needs the kernels, which fused=False turns"):
        StableAdamW([p], paged=True, fused=False)
    wide = torch.nn.Parameter(p.double())
    wide.grad = torch.ones_like(wide)
    available(0)
    optimizer = StableAdamW([("w", wide)], paged=True)
    with pytest.raises(ValueError, match=r"paged=True: kernels need .* unlike parameter 0 \(w\)"):
        optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(paging, "is_sharded", lambda x: True)
        with pytest.raises(ValueError, match="paged=True: parameter 0 is sharded; .* whole"):
            StableAdamW([p], paged=True)
    monkeypatch.setattr(fused, "DEVICES", ("cuda",))
    with pytest.raises(ValueError, match=r"paged=True: parameter 0 \(p\) is on device cpu; .* GPU"):
        StableAdamW([("p", p.detach().cpu())], paged=True)


def test_kernels_take_page_locked_states_but_no_such_gradients(monkeypatch):
    p, x = torch.empty(3, 4, device="meta"), torch.zeros(3, 4)
    monkeypatch.setattr(fused, "DEVICES", ("meta",))
    for is_locked in (True, False):
        monkeypatch.setattr(fused, "is_page_locked", lambda x, is_locked=is_locked: is_locked)
        unfit = [fused.first_unfit(Tensors([p], [g], [x], [x], *[[None]] * 3)) for g in (p, x)]
        assert unfit == [None if is_locked else 0, 0]
        codes, scales = torch.empty_like(p, dtype=torch.uint8), torch.zeros(1)
        eight_bit = Tensors([p], [p], [codes], [codes], [None], [scales], [scales])
        assert fused.first_unfit(eight_bit) == (None if is_locked else 0)


def test_tensors_before_the_first_step_are_placed_by_it(device, available):
    available(0)
    optimizer = make("StableAdamW, 8-bit moments", device, paged=True)
    for tensors in optimizer.tensors().values():
        for x in tensors.values():
            assert x.is_cpu and not fused.is_page_locked(x) and not x.any()
    take(optimizer, [1])
    assert on_host(optimizer) == {*optimizer.names}
    assert optimizer.tensors().keys() == {*TENSORS} - {"compensation"}
    total = sum(x.nbytes for tensors in optimizer.tensors().values() for x in tensors.values())
    assert paging.host_bytes(optimizer) == total


@pytest.mark.parametrize(
    "compiles",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.gpu)],
)
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own ways
def test_a_paged_run_is_resumed_and_equals_an_unpaged_one(
    make_config, run_once, tmp_path, device, available, compiles
):
    """Captured, if compiled. Without a GPU, device=auto takes the interpreter."""
    available(100_000)
    changes = {"device": "auto", "optimizer.name": "stable_adamw", "optimizer.clip_threshold": 1.0}
    changes |= {"deterministic": True, "compile": compiles, "model.patch_dropout": 0.5}
    changes |= {"num_steps": 3, "save_every": 1, "log_every": 1, "model.vocab_size": 512}
    changes |= {"model.vision_layers": 1, "model.text_layers": 1, "optimizer.optim_bits": 8}
    paged, whole, cut = {**changes, "optimizer.paged": True}, tmp_path / "whole", tmp_path / "cut"
    _, built = run_once(make_config(paged), whole)
    run_once(make_config(paged), cut, kill_at=3)
    torch.manual_seed(12345)
    run_once(make_config(paged), cut)
    assert not differing(contents(whole), contents(cut))
    run_once(make_config(changes), tmp_path / "plain")
    for name in ("loss", "grad_norm"):
        assert recorded(whole, name) == recorded(tmp_path / "plain", name)
    gib = [row["paged_gib"] for row in scan_rows(whole / "timing.jsonl")[0]]
    states = built.state.optimizer.tensors().values()
    total = sum(x.nbytes for tensors in states for x in tensors.values()) / 2**30
    assert 0 < gib[-1] < total or device.type == "cpu" and gib[-1] == total
    assert "paged_gib" not in scan_rows(tmp_path / "plain" / "timing.jsonl")[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_reads_and_writes_paged_states(kind, device, available):
    available(KINDS[kind][1])
    optimizer, plain = make(kind, device, paged=True), make(kind, device)
    for each in (optimizer, plain):
        take(each, [1])
    assert on_host(optimizer)
    grads = [p.grad for p in params_of(optimizer)]  # the graph reads them
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in (2, 3, 4):
        take(plain, [step])
        for own, p in zip(grads, params_of(plain), strict=True):
            own.copy_(p.grad)
        graph.replay()
    assert_equal(optimizer, plain)
    for kind_of, tensors in optimizer.tensors().items():  # waits for the GPU
        for name, x in tensors.items():
            assert torch.equal(x.to(device), plain.tensors()[kind_of][name])
