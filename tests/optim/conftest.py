"""8-bit optimizers on a CPU, where their packages are installed."""

import pytest
import torch


@pytest.fixture
def torchao(monkeypatch):
    """torchao.optim without torch.compile, which takes seconds per shape."""
    found = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return found


@pytest.fixture
def bitsandbytes(monkeypatch):
    """bitsandbytes with its kernels replaced by plain torch."""
    library = pytest.importorskip("bitsandbytes")
    from bitsandbytes.backends.triton import kernels_optim

    def update_8bit(name, g, p, s1, s2, b1, b2, b3, alpha, eps, step, lr, *more, **options):
        options = {"gnorm_scale": 1.0, **options}
        maps, scales, decay = more[:2], more[2:4], more[4]
        kernels_optim.optimizer_update_8bit_blockwise_pytorch(
            *(p, g, s1, s2, b1, b2, b3, alpha, eps, step, lr, *maps, *scales, decay),
            **options, optimizer_name=name,
        )  # fmt: skip

    def update_32bit(name, g, p, s1, b1, eps, step, lr, s2, b2, b3, alpha, decay, *_, **__):
        s1.lerp_(g, 1 - b1)
        s2.lerp_(g * g, 1 - b2)
        p.mul_(1 - lr * decay).sub_(lr / (1 - b1**step) * s1 / ((s2 / (1 - b2**step)).sqrt() + eps))

    monkeypatch.setattr(library.functional, "optimizer_update_8bit_blockwise", update_8bit)
    monkeypatch.setattr(library.functional, "optimizer_update_32bit", update_32bit)
    return library
