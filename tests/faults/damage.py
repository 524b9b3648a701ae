"""The corpus of damage: random changes of files, values, shards and command lines."""

import contextlib
import io
import json
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from lowprec.config.check import keys
from lowprec.config.schema import Config

TEXTS = (b"", b"[]", b"5", b"null", b'"text"', b"{}", b"\0" * 300, b"[" * 10**5, b"\xff\xfe",
         b"\n" * 10**5, b"{}\n" * 10**4, b'{"a":' * 5000, b'{"step": "\\ud800"}\n')  # fmt: skip
VALUES = (None, True, False, "x", "", "\0", "\n", "caf\udce9", "\ud800", "n" * 10**5, [], [1], [[]],
          {}, {"a": [1]}, {"\udcff": 1}, -1, 0, 1.5, 10**400, 2**63, 2**31, 1e300, "nan", "inf",
          float("nan"), float("inf"), "1", [None], "${oc.env:HOME}", "../..", "-rf")  # fmt: skip


def mutate(dice: random.Random, data: bytes) -> bytes:
    """Some bits, bytes or stretches of the data changed, cut out, repeated or filled."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 5, 30])):
        at = dice.randrange(len(data) + 1)
        stretch = dice.choice([1, 1, 4, 64, 512, 5000])
        change = dice.randrange(6)
        if change == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif change == 1:
            data[at : at + stretch] = dice.randbytes(stretch)
        elif change == 2:
            del data[at : at + stretch]
        elif change == 3:
            data[at:at] = data[at : at + stretch] * dice.choice([1, 1, 40])
        elif change == 4:
            data[at : at + stretch] = bytes([dice.choice([0, 32, 48, 57, 255])]) * stretch
        else:
            del data[at : at + 1 if dice.random() < 0.8 else None]
    return bytes(data)


def with_value(dice: random.Random, path: Path, data: bytes) -> bytes:
    """A file of JSON, lines of JSON or YAML in which one value or key is another."""
    text, is_rows = data.decode(), path.suffix == ".jsonl"
    whole = [json.loads(line) for line in text.splitlines()] if is_rows else yaml.safe_load(text)
    node = whole
    while True:
        key = dice.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not (isinstance(node[key], (dict, list)) and node[key]) or dice.random() < 0.1:
            break
        node = node[key]
    if isinstance(node, dict) and dice.random() < 0.2:
        node[dice.choice(["", "\ud800", "path", "run", "a.b", "state"])] = node.pop(key)
    else:
        node[key] = dice.choice(VALUES)
    if is_rows:
        return "".join(json.dumps(row) + "\n" for row in whole).encode()
    dump = yaml.safe_dump if path.suffix == ".yaml" and dice.random() < 0.5 else json.dumps
    return dump(whole).encode("utf-8", "surrogatepass")


def content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() and path.stat().st_size < 2**30 else b""


def spoil(dice: random.Random, path: Path, others: list[Path], *, regular: bool = False) -> None:
    """Damages a file; `others` are those that may take its place; `regular`: it stays a file."""
    data, kind = content(path), dice.randrange(10)
    if kind == 0 and not regular and path.is_file():
        path.unlink()
        how = dice.randrange(5)
        if how < 4:
            (os.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name),
             lambda path: path.symlink_to("/dev/zero"))[how](path)  # fmt: skip
        return
    if path.exists() and not path.is_file():
        return
    if kind < 3:
        data = mutate(dice, data)
    elif kind == 3:
        data = dice.choice(TEXTS)
    elif kind == 4:
        at = dice.randrange(len(data) + 1)
        data = data[:at] + dice.choice(TEXTS) + data[at + dice.choice([0, 1, 9]) :]
    elif kind == 5:
        data = content(dice.choice(others))
    else:
        with contextlib.suppress(ValueError, TypeError, LookupError, yaml.YAMLError):
            data = with_value(dice, path, data)  # unless it is spoiled already, or no text
    path.write_bytes(data)
    if dice.random() < 0.02 and not regular:
        os.truncate(path, 2**40)  # a hole


LETTERS = ["\0", " ", "\u0301", *"a é 中 ﷺ 👩 &amp; &#97; _ !? 7".split()]
KINDS = [tarfile.REGTYPE, b"\0", b"S", b"L", b"K", b"x", b"g", b"X", b"1", b"2", b"5", b"6", b"Z"]
SIZES = [0, 1, 511, 513, 2**16, 2**31, 2**33, 2**80, -1, -512, -(2**40)]


def an_image(dice: random.Random) -> bytes:
    """An image file of some kind, mode and size, two in three mutated."""
    mode = dice.choice(["RGB", "RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16"])
    size = dice.choice([1, 2, 7, 16, 33]), dice.choice([1, 5, 16, 40])
    kinds = {"CMYK": ["JPEG"], "RGB": ["JPEG", "PNG", "WEBP"], "L": ["JPEG", "PNG"]}
    kind, file = dice.choice(kinds.get(mode, ["PNG"])), io.BytesIO()
    noise = np.frombuffer(dice.randbytes(size[0] * size[1] * 3), np.uint8)
    image = Image.fromarray(noise.reshape(size[1], size[0], 3))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    (image if mode == "I;16" else image.convert(mode)).save(file, kind)
    return mutate(dice, file.getvalue()) if dice.random() < 0.67 else file.getvalue()


def a_caption(dice: random.Random) -> bytes:
    """Words of odd letters, one in three mutated, some very long."""
    count = dice.choice([0, 1, 20, 300, 3000, 60000])
    letters = dice.sample(LETTERS, dice.choice([1, 2, 6]))
    text = "".join(dice.choices(letters, k=count)).encode()
    return mutate(dice, text) if dice.random() < 0.33 else text


def a_header(dice: random.Random) -> bytes:
    """A valid tar header with an odd kind, size or name, and what may follow it."""
    name = dice.choice(["1.jpg", "x.txt", "a/b.cls", "", ".txt", "../1.png", "n" * 300 + ".jpg"])
    info = tarfile.TarInfo(name)
    info.size, info.type = dice.choice(SIZES), dice.choice(KINDS)
    head = info.tobuf(tarfile.GNU_FORMAT)
    line = dice.choice(["size=-512", "size=9" + "9" * 20, "GNU.sparse.major=1", "path=", "1" * 300])
    record = f"{len(line) + 5:03d} {line}\n".encode().ljust(512, b"\0")
    return head * dice.choice([1, 1, 1, 2000]) + dice.choice([b"", record, bytes(1024)])


def a_tar(dice: random.Random) -> bytes:
    """A tar of mutated samples, itself mutated in one of two cases."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dice.choice([0, 1, 2])) as tar:
        for number in range(dice.choice([1, 3, 6])):
            parts = {dice.choice(["jpg", "png", "webp"]): an_image(dice), "txt": a_caption(dice)}
            parts |= {"cls": dice.choice([b"3", b"-1", b"9" * 30, b"\xb2", b""])}
            for kind, data in dice.sample(list(parts.items()), dice.choice([2, 3, 3])):
                info = tarfile.TarInfo(f"{number}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    tar = file.getvalue()
    if dice.random() < 0.3:
        at = dice.randrange(len(tar) // 512) * 512
        tar = tar[:at] + a_header(dice) + tar[at:]
    return mutate(dice, tar) if dice.random() < 0.3 else tar


KEYS = [*keys(Config), "experiment", "hydra.verbose", "hydra/launcher", "hydra.run.dir", "x", ""]
KEYS += ["\ud800", "caf\udce9", "n" * 10**4, "model", "optimizer", "data", "precision.products"]
WORDS = (
    r"""
1 0 -1 1e8 1e23 1000000000000000000000000000000 nan inf null true [] [1,2] {} {a:1} {a:{b:[c]}}
'' ' ' a nano adamw /etc/passwd /proc/x /dev/zero /dev/null .. ../.. 'é😀' ${seed} ${oc.env:HOME}
1,2 range(1,3) range(1,0) range(0,1e9) choice(1,2) choice() interval(0,1) glob(*) glob(x*)
sort(3,1) shuffle(a,b) extend_list(1) int(3) float(x) json_str([1]) " [[[[1]]]] a=b @x pipe:cat
http://h/{0..3}.tar $\\{oc.env:HOME\\} a,$\\{seed\\}
{a,b \\ %s ~ 0x10 1_000 007 1e-400 1e400 -0.0 bf16 fp16 custom
{output:{format:int8,x:rowwise,w:tensorwise}} {output:{format:e9m9}} stream shards [rms] imagenet
* [ a[b open_clip RN50 coca_ViT-B-32 ViT-B-16-SigLIP vit_h14 none ddp fsdp2 _target_ (): \0
""".split()
    + [
        "n" * 300,
        "\ud800",
        "caf\udce9",
        "'\udcff'",
        "9" * 5000,
        "[" * 300,
        "{a:" * 300,
        "1," * 2000,
    ]
)


def an_override(dice: random.Random) -> str:
    prefix = dice.choice(["", "", "", "+", "++", "~"])
    return prefix + dice.choice(KEYS) + dice.choice(["=", "=", "=", "", "=="]) + dice.choice(WORDS)
