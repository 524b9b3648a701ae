"""Random commands: each composes or is refused with a fault, in time, and makes no file."""

import random
import time

import pytest

from lowprec.config.check import ConfigError, keys
from lowprec.config.compose import compose_command
from lowprec.config.schema import Config
from lowprec.train.preflight import preflight

KEYS = [*keys(Config), "experiment", "hydra.verbose", "hydra/launcher", "hydra.run.dir", "x", ""]
VALUES = (
    """
1 0 -1 1e8 1e23 1000000000000000000000000000000 nan inf null true [] [1,2] {} {a:1} {a:{b:[c]}}
'' ' ' a nano adamw /etc/passwd /proc/x /dev/zero /dev/null .. ../.. 'é😀' ${seed} ${oc.env:HOME}
1,2 range(1,3) range(1,0) range(0,1e9) choice(1,2) choice() interval(0,1) glob(*) glob(x*)
sort(3,1) shuffle(a,b) extend_list(1) int(3) float(x) json_str([1]) " [[[[1]]]] a=b @x pipe:cat
http://h/{0..3}.tar $\\{oc.env:HOME\\} a,$\\{seed\\}
{a,b \\ %s ~ 0x10 1_000 007 1e-400 1e400 -0.0 bf16 fp16 custom
{output:{format:int8,x:rowwise,w:tensorwise}} {output:{format:e9m9}} stream shards [rms] imagenet
* [ a[b open_clip RN50 coca_ViT-B-32 ViT-B-16-SigLIP vit_h14 none ddp fsdp2 _target_ (): \0
""".split()
    + ["n" * 300]
)


def random_override(source):
    prefix = source.choice(["", "", "", "+", "++", "~"])
    sign = source.choice(["=", "=", "=", "", "=="])
    return prefix + source.choice(KEYS) + sign + source.choice(VALUES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_random_commands_compose_or_are_refused(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    source = random.Random(seed)
    for _ in range(1000):
        words = [random_override(source) for _ in range(source.choice([1, 1, 2, 3, 5]))]
        start = time.process_time()
        try:
            compose_command(words, multirun=source.random() < 0.5, preflight=preflight)
        except ConfigError as error:
            assert error.faults, words
        except Exception as error:
            raise AssertionError(words) from error
        assert time.process_time() - start < 5, words
    assert not list(tmp_path.iterdir())
