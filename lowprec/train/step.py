"""One update of the model on the device: forward, loss, backward, optimizer."""

import functools
import math

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lowprec.config.schema import TORCH_OPTIMIZERS, Config
from lowprec.data.loader import Batch
from lowprec.ops.launch import on_device
from lowprec.optim.clipping import SkipStep
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.train.task import ContrastiveTask

# Eager steps before a capture. DDP records events in its first ten and in every hundredth.
WARMUPS, WARMUPS_DDP = 3, 12
MAX_LOGIT_SCALE = math.log(100)  # the parameter is the logarithm of the factor, as in open_clip


class TrainStep:
    """Updates the model with a batch and returns 0-d device values; the host never waits.

    From the first non-finite loss on (without loss scaling also from the first non-finite
    gradient), the model no longer changes: `frozen`, a bool on the device, is set. The logit scale
    is clamped to [1, 100] after each update, as in open_clip's trainer.
    """

    def __init__(self, task: ContrastiveTask, optimizer: StableAdamW, scaler: object):
        self.task = task
        self.optimizer = optimizer
        self.scaler = scaler
        self.is_scaled = isinstance(scaler.value, Tensor)
        device = next(task.model.parameters()).device
        self.frozen = torch.zeros((), dtype=torch.bool, device=device)
        optimizer.frozen = self.frozen

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Returns loss, logit scale, global gradient norms and, if scaled, the loss scale."""
        batch = batch.to(self.frozen.device)
        loss, logit_scale = self.task.backward(batch, self.scaler.scale)
        self.frozen |= ~loss.isfinite()
        values = {"loss": loss, "logit_scale": logit_scale}
        if self.is_scaled:
            values["loss_scale"] = self.scaler.value.clone()
        if isinstance(self.optimizer.clip_norm, SkipStep):
            self.optimizer.clip_norm.loss = loss
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        values["grad_norm"] = self.optimizer.grad_norm
        values["clipped_grad_norm"] = self.optimizer.clipped_grad_norm
        if not self.is_scaled:
            self.frozen |= ~self.optimizer.all_finite
        with torch.no_grad():
            self.task.model.logit_scale.clamp_(0, MAX_LOGIT_SCALE)
        return values


class GraphedStep:
    """Replays a TrainStep as one CUDA graph, which saves the cost of launching its kernels.

    The first batch fixes the shapes; all batches are on the host. Capture runs the step a few times
    with `frozen` set and restores the random state and the model's buffers, so it changes nothing.
    In several processes the graph also communicates, and all ranks capture together; DDP must have
    been built on `capture_stream`. The next call overwrites the returned values.
    """

    def __init__(self, step: TrainStep, batch: Batch):
        self.step, self.device = step, step.frozen.device
        self.sharded = [m for m in step.task.model.modules() if isinstance(m, FSDPModule)]
        with on_device(self.device):
            self._capture(batch)

    def _capture(self, batch: Batch) -> None:
        step, device = self.step, self.device
        self.batch, self.next = batch.to(device), batch.to(device)
        self.copies, self.next_is_free = torch.cuda.Stream(device), torch.cuda.Event()
        for group in step.optimizer.param_groups:  # read at replay, so it lives on the device
            group["lr"] = torch.zeros((), dtype=torch.float32, device=device)
        random_state, was_frozen = torch.cuda.get_rng_state(device), step.frozen.clone()
        buffers = [(buffer, buffer.clone()) for buffer in step.task.model.buffers()]  # batch norm
        step.frozen.fill_(True)
        is_ddp = isinstance(step.task.parallel, DistributedDataParallel)
        stream = capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS_DDP if is_ddp else WARMUPS):
                step(self.batch)
        torch.cuda.current_stream().wait_stream(stream)
        step.frozen.copy_(was_frozen)
        for buffer, value in buffers:
            buffer.copy_(value)
        torch.cuda.set_rng_state(random_state, device)
        torch.cuda.synchronize(device)
        step.task.world.each(lambda: None)  # no rank captures while another one still communicates
        self.graph = torch.cuda.CUDAGraph()
        # a stream of this device, since torch's default for captures is one of the first's;
        # thread_local: the loader's pinning thread and NCCL's may use CUDA during the capture
        options = {"stream": stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(self.graph, **options):
                self.values = step(self.batch)
        except BaseException:
            self.close()
            raise
        self.next_is_free.record()

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Copies a batch to the GPU while the previous step runs, then replays the graph."""
        for module in self.sharded:  # a replay does not renew what an evaluation gathered
            module.reshard()
        with on_device(self.device):
            with torch.cuda.stream(self.copies):
                self.copies.wait_event(self.next_is_free)
                self._copy(batch, self.next)
            torch.cuda.current_stream().wait_stream(self.copies)
            self._copy(self.next, self.batch)
            self.next_is_free.record()
            self.graph.replay()
        return self.values

    def close(self) -> None:
        """Frees the graph: at the end of a process, NCCL waits for graphs with its operations."""
        self.graph.reset()

    @staticmethod
    def _copy(source: Batch, target: Batch) -> None:
        target.images.copy_(source.images, non_blocking=True)
        target.tokens.copy_(source.tokens, non_blocking=True)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of captures; DDP must be built on it, since its hooks run where it was built."""
    return torch.cuda.Stream(device)


def can_capture(config: Config, device: torch.device) -> bool:
    """Returns whether a run's step can be a CUDA graph: compiled, on a GPU, no host state.

    Micro-batches restore random states on the host, the dynamic scaler keeps a counter there that
    capture would advance, and torch's Muon needs to know there which gradients are finite.
    """
    return (
        config.compile
        and device.type == "cuda"
        and config.accumulate == 1
        and config.scaler.name != "dynamic"
        and config.optimizer.name not in TORCH_OPTIMIZERS
    )
