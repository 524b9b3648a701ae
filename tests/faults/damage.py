"""Random damage to files and values."""

import contextlib
import json
import os
import random
from pathlib import Path

import yaml

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
