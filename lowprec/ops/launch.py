"""Launches Triton kernels with little work on the host.

At every launch, `kernel[grid](...)` specializes its arguments in Python and encodes TMA
descriptors, which takes 16 us, or 38 us with three descriptors. A `Launch` does this once for its
shapes; later launches pass addresses directly to Triton's launcher in C. That launcher is a private
interface, so releases of Triton other than 3.6 and 3.7 launch as usual.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from lowprec.ops.counters import next_counter

ALIGNMENT = 16  # bytes; Triton compiles another kernel for addresses that are not multiples of it
SWIZZLE = 128  # bytes; rows of blocks must be multiples of it
MAX_DESCRIPTORS = 4096  # per argument; the allocator reuses addresses, so few are needed
RELEASE = triton.__version__[:4]
IS_KNOWN = RELEASE in ("3.6.", "3.7.")
if IS_KNOWN:
    from triton.backends.nvidia.driver import make_tensordesc_arg
plan = functools.lru_cache(maxsize=4096)  # caches the `Launch` for each set of shapes


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a GPU the current one, on which Triton launches; does nothing for another device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Launch:
    """A kernel with a fixed grid, integers and constants, which is called with tensors.

    All calls must pass tensors of the same shapes, strides and dtypes, on the same device.

    Args:
        kernel: takes tensors, then integers, then constants.
        grid: number of programs along each axis.
        sizes: the integers.
        blocks: block shapes of the leading tensors, which a Gluon kernel takes as TMA descriptors;
            empty if the kernel takes no descriptors.
        is_counted: whether the kernel takes a counter (`next_counter`) after a call's tensors.
        constants: constants by name, and Triton's options, such as num_warps.
    """

    def __init__(
        self,
        kernel: JITFunction,
        grid: tuple[int, ...],
        sizes: tuple[int, ...],
        blocks: tuple[list[int], ...] = (),
        is_counted: bool = False,
        **constants: Any,
    ):
        self.kernel, self.grid, self.sizes, self.blocks = kernel, grid, sizes, blocks
        self.constants, self.is_counted = constants, is_counted
        self.num_programs = math.prod(grid)
        self.launch: Callable | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launches on the current stream of the tensors' device; the first call compiles.

        Raises ValueError for tensors on several devices.
        """
        device = tensors[0].get_device()  # -1 for a CPU
        if device >= 0 and device != torch._C._cuda_getDevice():
            with on_device(tensors[0].device):
                self(*tensors)
            return
        if self.is_counted:
            tensors += (next_counter(tensors[0]),)
        addresses, bits = [], 0
        for tensor in tensors:
            if tensor.get_device() != device:
                devices = ", ".join(str(tensor.device) for tensor in tensors)
                raise ValueError(f"tensors must be on one device, not on {devices}")
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
        is_aligned = bits % ALIGNMENT == 0
        if is_aligned and self.launch is not None:
            self.launch(tensors, addresses)
            return
        arguments = list(tensors)
        for position, block in enumerate(self.blocks):
            arguments[position] = _descriptor(tensors[position], block)
        compiled = self.kernel[self.grid](*arguments, *self.sizes, **self.constants)
        if is_aligned and device >= 0 and IS_KNOWN:
            self.launch = self._freeze(compiled, device)

    def _freeze(self, compiled: Any, device: int) -> Callable | None:
        """A function that launches a compiled kernel; None if the kernel needs scratch memory."""
        runner = compiled.run
        if runner.global_scratch_size or runner.profile_scratch_size:
            return None
        launch = _launcher_in_c(runner, compiled, self.grid)
        names, constants = compiled.src.fn.arg_names, self.constants
        last = [*self.sizes, *(constants[name] for name in names if name in constants)]
        current_stream = torch._C._cuda_getCurrentRawStream
        if not self.blocks:
            return lambda tensors, addresses: launch(current_stream(device), addresses + last)
        facts, encoded = compiled.metadata.tensordesc_meta, [{} for _ in self.blocks]

        def launch_with_descriptors(tensors: tuple[Tensor, ...], addresses: list[int]) -> None:
            arguments = []
            for position, table in enumerate(encoded):
                descriptor = table.get(addresses[position])
                if descriptor is None:
                    if len(table) >= MAX_DESCRIPTORS:
                        table.clear()
                    descriptor = _descriptor(tensors[position], self.blocks[position])
                    descriptor = make_tensordesc_arg(descriptor, facts[position])
                    table[addresses[position]] = descriptor
                arguments += descriptor
            launch(current_stream(device), arguments + addresses[len(encoded) :] + last)

        return launch_with_descriptors


def _descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor for Gluon: blocks have the shared memory layout of Hopper's tensor cores."""
    layout = NVMMASharedLayout(SWIZZLE, element_bitwidth=8 * tensor.element_size(), rank=2)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def _launcher_in_c(runner: Any, compiled: Any, grid: tuple[int, ...]) -> Callable:
    """A function of the stream and a list: addresses or descriptors, integers, constants."""
    launch, packed = runner.launch, compiled.packed_metadata
    wrapped = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    launch = wrapped.get("launcher", launch)  # Triton's wrapper encodes descriptors
    grid, function = (*grid, 1, 1)[:3], compiled.function
    options, no_hooks = (runner.launch_cooperative_grid, runner.launch_pdl), (None, None, None)
    no_scratch = (None, None)
    if RELEASE == "3.6.":
        options += (*no_scratch, packed, *no_hooks)
        return lambda stream, arguments: launch(*grid, stream, function, *options, *arguments)
    options += (packed, *no_hooks, *no_scratch, runner.arg_annotations, runner.kernel_signature)
    return lambda stream, arguments: launch(*grid, stream, function, *options, arguments)


def row_blocks(K: int, features_per_thread: int = 64, least_warps: int = 4) -> dict[str, int]:
    """Two power-of-two blocks that cover a row (5,120 = 4,096 + 1,024 idles no lane), and warps."""
    whole = triton.next_power_of_2(K)
    block_a = whole if whole == K else max(1, whole // 2)
    block_b = triton.next_power_of_2(max(1, K - block_a))
    warps = triton.next_power_of_2(triton.cdiv(K, 32 * features_per_thread))
    return {"BLOCK_A": block_a, "BLOCK_B": block_b, "num_warps": min(32, max(least_warps, warps))}


def pipelined(row_bytes: int) -> dict[str, int]:
    """Three stages for a loop over rows; one for rows over 20 kB, which fill shared memory."""
    return {"STAGES": 3 if row_bytes <= 20480 else 1}


def programs_that_sum(M: int, K: int, device: torch.device) -> int:
    """Number of programs for a kernel whose programs loop over rows and each store partial sums."""
    return min(M, (8 if K <= 2048 else 4) * num_sms(device))


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors; 1 on a CPU, where the kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU, whose matrix unit later GPUs lack; False on a CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def rows_contiguous(x: Tensor) -> Tensor:
    """The matrix, copied if the elements of a row are not next to each other."""
    return x if x.stride(1) == 1 else x.contiguous()
