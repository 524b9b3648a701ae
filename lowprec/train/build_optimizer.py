"""The optimizer of a config."""

import torch

from lowprec.config.check import ConfigError
from lowprec.config.schema import EIGHT_BIT, Config, OptimizerConfig
from lowprec.optim.eight_bit import BitsAndBytesAdamW8bit, EightBitAdamW, TorchaoAdamW8bit
from lowprec.optim.schedules import param_groups
from lowprec.optim.stable_adamw import StableAdamW


def build_optimizer(config: Config, model: torch.nn.Module) -> StableAdamW | EightBitAdamW:
    """The optimizer of a config's `optimizer` group: AdamW is StableAdamW without clipping."""
    rule = config.optimizer
    groups = param_groups(model, rule.weight_decay)
    common = {"lr": rule.lr, "betas": (rule.beta1, rule.beta2), "eps": rule.eps}
    skip = "tensor" if config.scaler.name == "fixed" else "step"
    if rule.name in EIGHT_BIT:
        return _build_eight_bit(rule, groups, common, skip)
    return StableAdamW(
        groups,
        clip_threshold=rule.clip_threshold,
        clip_weight_decay=rule.clip_weight_decay,
        beta2_decay=rule.beta2_decay,
        clip_norm=rule.clip_norm,
        skip=skip,
        **common,
    )


def _build_eight_bit(
    rule: OptimizerConfig, groups: list[dict], common: dict, skip: str
) -> EightBitAdamW:
    embedding = ["*token_embedding"] if rule.stable_embedding else []
    options = {"min_8bit_size": rule.min_8bit_size, "skip": skip}
    options["override_32bit"] = [*rule.override_32bit, *embedding]
    try:
        if rule.name == "adamw8bit_torchao":
            return TorchaoAdamW8bit(groups, common, **options)
        on_gpu = groups[0]["params"][0][1].is_cuda  # a CPU only ever evaluates such a run
        common |= {"is_paged": rule.paged and on_gpu}
        return BitsAndBytesAdamW8bit(groups, common, **options)
    except ValueError as error:
        raise ConfigError([f"optimizer.override_32bit: {error}"]) from error
    except ImportError as error:
        raise ConfigError([f"optimizer={rule.name}: {error}"]) from error
