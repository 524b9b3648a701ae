"""Fixtures for the kernels' tests."""

import pytest
import torch

from lowprec import ops
from lowprec.ops import triton_matmul
from lowprec.ops.launch import Launch

INTEGER_POISON = 0x55  # 85 in int8


@pytest.fixture(autouse=True)
def use_right_interpreter(right_interpreter):
    """Applies to all tests of this folder."""


@pytest.fixture(autouse=True)
def launched_with_one_kind_of_tensors(monkeypatch):
    """A GPU compiles a `Launch` once: other dtypes or another device would need another one."""
    call = Launch.__call__

    def checked(launch, *tensors):
        call(launch, *tensors)
        kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
        assert vars(launch).setdefault("kinds", kinds) == kinds, launch.kernel

    monkeypatch.setattr(Launch, "__call__", checked)


@pytest.fixture
def by_kernels(monkeypatch):
    """Takes quantization and products to the kernels on any device, in compiled code too."""
    monkeypatch.setattr(ops, "_is_reference", lambda *_: False)
    library = torch.library.Library("lowprec", "IMPL")
    library.impl("quantize", ops._quantize_kernel, "CPU")
    library.impl("quantize_pair", ops._pair_kernel, "CPU")
    library.impl("matmul", triton_matmul.matmul, "CPU")
    yield
    library._destroy()


@pytest.fixture
def poisoned(monkeypatch):
    """Fills new tensors with poison, so that elements which are never written are detected."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and tensor.element_size() > 1:
                return tensor.fill_(torch.nan)
            tensor.view(torch.uint8).fill_(INTEGER_POISON)
            return tensor

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
