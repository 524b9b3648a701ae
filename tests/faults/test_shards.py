"""Damaged shards: an error or a counted skip that names shard, key and reason; nothing is lost."""

import numpy as np
import pytest

from lowprec.data.index import open_shards
from lowprec.data.shards import ShardError


@pytest.mark.parametrize("junk", ["noise", "zeros", "one bit"])
def test_damage_at_50_positions_is_refused_or_changes_the_digest_and_every_sample_is_counted(
    shard, check, refresh, tmp_path, junk
):
    whole = shard.read_bytes()
    intact, digest = check(shard)
    rng, outcomes = np.random.default_rng(0), []
    last = len(whole.rstrip(b"\0"))  # what follows is padding
    for position in np.linspace(0, last, 50).astype(int):
        refresh(tmp_path)
        damaged = bytearray(whole)
        if junk == "one bit":
            damaged[position] ^= 1 << int(rng.integers(8))
        else:
            damage = rng.bytes(512) if junk == "noise" else bytes(512)
            damaged[position : position + 512] = damage[: len(whole) - position]
        shard.write_bytes(damaged)
        outcome, found = check(shard)
        if found == digest:  # padding, an owner, a date: no sample is touched
            assert outcome == intact
        outcomes.append("error" if outcome == "error" else "other" if found != digest else "same")
    assert {"error", "other"} <= set(outcomes)  # headers and samples were met


def test_shard_that_vanishes_before_it_is_opened_is_an_error_naming_it(tmp_path, shard):
    shards = open_shards(str(shard))
    shard.unlink()
    with pytest.raises(ShardError, match=r"a\.tar cannot be read: No such file"):
        shards.read(0, 0, 1)
