"""One update on the device: forward, loss, backward, optimizer. Nothing is read back."""

import math

import torch
from torch import Tensor

from lowprec.config.schema import EIGHT_BIT, Config
from lowprec.data.loader import Batch
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.train.task import ContrastiveTask

MAX_LOGIT_SCALE = math.log(100)  # of the parameter, whose exponential multiplies; as open_clip


class TrainStep:
    """`step(batch)` updates the model and returns 0-d device values; statistics: the optimizer's.

    From a non-finite loss on (without loss scaling from a non-finite gradient on) the model stays
    as it is: `frozen` is set on the device, and the host learns of it when it next reads. The logit
    scale is kept within 1 to 100 after each update, as in open_clip's trainer.
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
        """Loss, logit scale, global gradient norms and loss scale of this step."""
        batch = batch.to(self.frozen.device)
        loss, logit_scale = self.task.backward(batch, self.scaler.scale)
        self.frozen |= ~loss.isfinite()
        values = {"loss": loss, "logit_scale": logit_scale}
        if self.is_scaled:
            values["loss_scale"] = self.scaler.value.clone()
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
    """A TrainStep captured as one CUDA graph: the same kernels without the cost of launching them.

    The first batch fixes the shapes. Capture runs the step a few times with `frozen` set and puts
    the random state back, so that it leaves no trace. Returned values are overwritten by the next
    call.
    """

    def __init__(self, step: TrainStep, batch: Batch):
        device = step.frozen.device
        self.step = step
        self.batch = batch.to(device)
        for group in step.optimizer.param_groups:  # read at replay, so it must live on the device
            group["lr"] = torch.zeros((), device=device)
        random_state = torch.cuda.get_rng_state(device)
        step.frozen.fill_(True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(self.batch)
        torch.cuda.current_stream().wait_stream(stream)
        step.frozen.fill_(False)
        torch.cuda.set_rng_state(random_state, device)
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: the data loader's thread that pins memory goes on beside the capture
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.values = step(self.batch)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Copies the batch in and replays."""
        self.batch.images.copy_(batch.images, non_blocking=True)
        self.batch.tokens.copy_(batch.tokens, non_blocking=True)
        self.graph.replay()
        return self.values


def can_capture(config: Config, device: torch.device) -> bool:
    """Whether a run's step becomes a CUDA graph: compiled, on one GPU, no recomputation.

    Recomputation saves random states on the host, the dynamic scaler keeps a counter that capture
    would advance, and an 8-bit optimizer reads on the host whether gradients are finite.
    """
    return (
        config.compile
        and device.type == "cuda"
        and config.distributed.name == "none"
        and config.accumulate == 1
        and not config.checkpointing
        and config.scaler.name != "dynamic"
        and config.optimizer.name not in EIGHT_BIT
    )
