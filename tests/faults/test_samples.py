"""Bad samples: each is a skip that names shard, key and reason; read + skipped = the index."""

import struct
import zlib

import numpy as np
import pytest


class Make:
    """Image files, some of which claim another size than they have."""

    def __init__(self, encode):
        self.encode = encode
        self.jpg = encode(np.random.default_rng(3).integers(0, 256, (9, 9, 3), np.uint8), "jpg")
        self.gif = encode(np.zeros((9, 9, 3), np.uint8), "gif")

    def claiming_png(self, width, height):
        data = bytearray(self.encode(np.zeros((2, 2, 3), np.uint8), "png"))
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        return bytes(data)

    def claiming_jpg(self, width, height):
        data = bytearray(self.jpg)
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
        return bytes(data)


BAD_SAMPLES = {  # what it has for an image (suffix, bytes), its caption, a word of the reason
    "no image": (None, b"a", "no image"),
    "no caption": (("jpg", lambda make: make.jpg), None, "no caption"),
    "empty caption": (("jpg", lambda make: make.jpg), b"", "caption is empty"),
    "blank caption": (("jpg", lambda make: make.jpg), b" \n\t", "caption is empty"),
    "not UTF-8": (("jpg", lambda make: make.jpg), b"\xff\xfe", "utf-8"),
    "no bytes": (("jpg", lambda make: b""), b"a", "not a JPEG"),
    "another kind of image": (("jpg", lambda make: make.gif), b"a", "not a JPEG"),
    "cut image": (("jpg", lambda make: make.jpg[:-99]), b"a", "runcated"),
    "misspelled kind": (("jgp", lambda make: make.jpg), b"a", "no image"),
    "only a label": (("cls", lambda make: b"1"), None, "no image"),
    "12,000 squared": (("png", lambda make: make.claiming_png(12000, 12000)), b"a", "Bomb"),
    "1 x 100,000": (("png", lambda make: make.claiming_png(1, 10**5)), b"a", "Error"),
    "100,000 squared": (("png", lambda make: make.claiming_png(10**5, 10**5)), b"a", "Bomb"),
    "65,500 squared": (("jpg", lambda make: make.claiming_jpg(65500, 65500)), b"a", "Bomb"),
}


@pytest.mark.parametrize("kind", BAD_SAMPLES)
def test_bad_sample_is_a_skip_that_names_shard_key_and_reason(
    tmp_path, write_members, pairs, encode, check, kind
):
    image, caption, word = BAD_SAMPLES[kind]
    bad = [(f"000003.{image[0]}", image[1](Make(encode)))] if image else []
    bad += [("000003.txt", caption)] if caption is not None else []
    path = write_members(tmp_path / "a.tar", [*pairs(3), *bad, *pairs(2, 4)])
    (read, (skip,)), _ = check(path)
    assert read == [0, 1, 2, 4, 5]
    assert skip["key"].startswith("000003.") and word in skip["reason"]


def test_names_that_are_not_utf8_are_read(tmp_path, write_members, pair, check):
    members = [(name.replace("000001", "ca\udcfff"), data) for name, data in pair(1)]
    (read, skips), _ = check(write_members(tmp_path / "a.tar", [*pair(0), *members]))
    assert (read, skips) == ([0, 1], [])
