"""Batch norm, whose statistics each process would compute on its own, is refused."""

from types import SimpleNamespace

import pytest
from torch import nn

from lowprec.config.check import ConfigError
from lowprec.train.build import parallelize


def test_batch_norm_in_several_processes_is_refused(make_config):
    config = make_config({"distributed.name": "ddp"})
    with pytest.raises(ConfigError, match="model nano has batch norm, whose statistics"):
        parallelize(nn.BatchNorm1d(3), config, SimpleNamespace(size=2, rank=0))
