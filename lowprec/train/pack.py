"""The content of a safetensors file without a second copy of the tensors in memory.

`safetensors.torch.save` copies tensor by tensor into fresh memory, which takes longer than the disk
does; here they go into one buffer, page-locked for tensors of a GPU and used again by the next
call. The library reads the files. Source of the format: the safetensors README.
"""

import json

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pack(tensors: dict[str, Tensor]) -> list[bytes | memoryview]:
    """Header and data of a safetensors file of named tensors on any device."""
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that all are aligned
    header, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
    for name in names:
        tensor, (start, stop) = tensors[name].detach(), header[name]["data_offsets"]
        place = buffer[start:stop].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, memoryview(buffer.numpy())]
