"""Triton kernels of the optimizer: every tensor of a model in one launch, statistics on the way.

A table of addresses on the device says where each tensor's parameter, gradient, moments and
compensation lie; each program takes one chunk of one tensor and leaves partial sums, which a second
small kernel adds in a fixed order. `lowprec.optim.reference` defines the numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops.triton_quantize import num_sms  # noqa: F401

CHUNK = 8192  # elements of one program
BLOCK = 2048  # of them at a time
P, G, M, U, C = range(5)  # rows of the table of addresses
