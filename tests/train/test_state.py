"""Packed tensors are what the safetensors library reads and writes."""

import pytest
import torch
from safetensors.torch import load

from lowprec.train.state import DTYPES, pack


def same(a, b):
    return set(a) == set(b) and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape
        and a[n].reshape(-1).view(torch.uint8).equal(b[n].reshape(-1).view(torch.uint8))
        for n in a
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_reads_every_dtype_shape_and_layout(dtype):
    values = torch.arange(24).reshape(4, 6)
    tensors = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "matrix": values.to(dtype),
        "transposed": values.T.to(dtype).T,
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 5, dtype=dtype),
        "name with \u00fc": torch.tensor([float("nan"), -0.0]),
    }
    packed = load(b"".join(pack(tensors)))
    assert same(packed, {name: tensor.contiguous() for name, tensor in tensors.items()})


def test_no_tensors_are_an_empty_file_of_the_format():
    assert load(b"".join(pack({}))) == {}
