"""`experiments.make_shards` makes shards from a table of image paths and captions."""

import csv
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.entry import run_command
from experiments.make_shards import MakeShardsConfig, main
from lowprec.config.check import ConfigError, RunError
from lowprec.data import table as tables
from lowprec.data.index import open_shards
from lowprec.data.loader import Batches, decode_image

MODES = {"RGB": "jpg", "RGBA": "png", "L": "png", "CMYK": "JPG", "P": "png", "LA": "webp"}
GOOD = [(f"{mode}.{kind}", f'"{mode}", ünï 你好 🎈\nsecond line') for mode, kind in MODES.items()]
GOOD += [("no_suffix", "NA")]
BAD = [  # fields and a part of the reason
    (("missing.jpg", "a"), "missing.jpg nor missing.jpg exists"),
    (("bitmap.bmp", "a"), "not a JPEG, WEBP or PNG"),
    (("truncated.jpg", "a"), "truncated"),
    (("", "a"), "is not a regular file"),
    (("RGB.jpg", " "), "the caption is empty"),
    (("RGB.jpg", "x" * 9000), "8,192"),
    (("RGB.jpg",), "more or fewer fields than columns"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with an image of each mode, damaged ones and a format that is not read."""
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    for mode, kind in MODES.items():
        image.convert(mode).save(folder / f"{mode}.{kind}")
    image.save(folder / "no_suffix", "WEBP")
    image.save(folder / "bitmap.bmp")
    (folder / "truncated.jpg").write_bytes((folder / "RGB.jpg").read_bytes()[:-400])
    return folder


def write_table(path, rows, delimiter=",", header=("filepath", "title"), encoding="utf-8"):
    with open(path, "w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return str(path)


def samples(out):
    """Pixels and caption of each sample, as training reads them, and all labels."""
    captions = []

    def tokenizer(texts):
        captions.extend(texts)
        return torch.zeros(len(texts), 1, dtype=torch.int64)

    shards = open_shards(f"{out}/*.tar")
    batches = Batches(shards, None, shards.num_samples, 1, image_size=30, tokenizer=tokenizer)
    return batches[0].images, captions, shards.labels.tolist()


@pytest.mark.parametrize(
    ("delimiter", "encoding"), [(",", "utf-8"), ("\t", "utf-8-sig"), (";", "utf-8")], ids=repr
)
def test_every_row_is_read_by_training(photos, tmp_path, monkeypatch, delimiter, encoding):
    monkeypatch.setattr(tables, "SAMPLES_PER_SHARD", 3)
    table = write_table(photos / "good.csv", GOOD, delimiter=delimiter, encoding=encoding)
    main(MakeShardsConfig(table, str(tmp_path / "out")))
    images, captions, labels = samples(tmp_path / "out")
    assert captions == [caption for _, caption in GOOD] and set(labels) == {-1}
    for pixels, (name, _) in zip(images, GOOD, strict=True):
        assert np.array_equal(pixels, decode_image((photos / name).read_bytes(), 30))
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    with tarfile.open(tmp_path / "out" / "00000.tar") as tar:
        kinds = [name.partition(".")[2] for name in tar.getnames()]
    assert kinds == ["jpg", "txt", "png", "txt", "png", "txt"]


def test_the_folder_is_never_a_command_or_a_pattern(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = write_table(photos / "good.csv", GOOD)
    main(MakeShardsConfig(table, "pipe:touch canary #/out %d"))
    assert [path.name for path in tmp_path.iterdir()] == ["pipe:touch canary #"]


REFUSED = [  # the content of another table or None, changes of the config, a part of the message
    (b'filepath,title\nRGB.jpg,a\nRGB.jpg,"a dog\nRGB.jpg,a\n', {}, "row after line 2 is damaged"),
    (b"filepath,title\n", {}, "the table has no rows"),
    (b"filepath,title\nRGB.jpg,caf\xe9\n", {}, "save it as UTF-8"),
    (b"filepath,title\nRGB\0.jpg,a\n", {}, r"line 2 \('RGB\\x00.jpg'\)"),
    (None, {"table": "gone.csv"}, "does not exist; nearest: .*good.csv"),
    (None, {"table": "."}, "is a folder; a CSV file is expected"),
    (None, {"caption": "titel"}, "no column titel in filepath, title, .*; choose: caption=title$"),
    (b"file,caption\na,b\n", {}, "column filepath, title in .*choose: image=file caption=caption$"),
    (b"image,caption\na,b\n", {}, "choose: image=image caption=caption$"),
    (b"filepath,title,title\na,b,c\n", {}, "several columns are named title in the first line$"),
    (b"x,y\na,b\n", {}, "choose: image=NAME caption=NAME$"),
    (None, {"out": ""}, "exists"),
    (None, {"out": "a{0,1}"}, "out=.* data.train would expand"),
    (None, {"out": "a*"}, "out=.* data.train would expand"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "changes", "fault"), REFUSED)
def test_what_cannot_be_made_is_refused(photos, tmp_path, content, changes, fault):
    write_table(photos / "good.csv", GOOD)
    (photos / "damaged.csv").write_bytes(content or b"")
    table = "good.csv" if content is None else "damaged.csv"
    keys = {"table": table, "out": "out", **changes}
    keys |= {"table": str(photos / keys["table"]), "out": str(tmp_path / keys["out"])}
    with pytest.raises((RunError, ConfigError), match=fault):
        main(MakeShardsConfig(**keys))
    assert not list(tmp_path.iterdir())


def test_a_fault_of_the_table_is_told_as_those_of_other_commands(monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_shards", "table=/no.csv", "out=x"])
    with pytest.raises(SystemExit, match="^error: table=/no.csv does not exist; / has no similar"):
        run_command(main, "make_shards", MakeShardsConfig)


def test_labels_and_other_names_of_columns(photos, tmp_path, capsys):
    rows = [("ignored", n, caption, path) for n, (path, caption) in enumerate(GOOD)]
    table = write_table(photos / "t.csv", rows, header=("x", "class", "text", "path"))
    options = {"image": "path", "caption": "text", "label": "class"}
    main(MakeShardsConfig(table, str(tmp_path / "val_2"), **options))
    assert f"or, for evaluation, data.val='{tmp_path}/val_2/*.tar'" in capsys.readouterr().out
    assert samples(tmp_path / "val_2")[2] == list(range(len(GOOD)))
    with pytest.raises(RunError, match=r"line 5 .*: the class is '\"CMYK.*, not a number"):
        rows = write_table(photos / "t.csv", GOOD[2:4])
        main(MakeShardsConfig(rows, str(tmp_path / "other"), label="title"))


def test_all_bad_rows_are_named_and_left_out_on_request(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tables, "SAMPLES_PER_SHARD", 3)
    table = write_table(photos / "bad.csv", [*(fields for fields, _ in BAD), *GOOD])
    config = MakeShardsConfig(table, str(tmp_path / "deep" / "out"))
    with pytest.raises(RunError, match=f"{len(BAD)} of {len(BAD + GOOD)} rows") as refused:
        main(config)
    first, *lines = str(refused.value).splitlines()
    assert "nothing was written; skip_bad=true leaves them out:" in first
    assert "writing" not in capsys.readouterr().err
    for number, (line, (_, reason)) in enumerate(zip(lines, BAD, strict=True), 2):
        assert f"line {number} " in line and reason in line
    assert not list(tmp_path.iterdir())
    config.skip_bad = True
    main(config)
    assert samples(tmp_path / "deep" / "out")[1] == [caption for _, caption in GOOD]
    printed = capsys.readouterr().out
    only_bad = write_table(photos / "only_bad.csv", [BAD[0][0]])
    with pytest.raises(RunError, match="1 of 1 rows cannot be read, so nothing was written:"):
        main(MakeShardsConfig(only_bad, str(tmp_path / "out"), skip_bad=True))
    assert f"{len(GOOD)} pairs, {len(BAD)} left out" in printed
    assert f"\ndata.train='{tmp_path}/deep/out/*.tar'\n" in printed


def test_an_interrupted_command_starts_again(photos, tmp_path, monkeypatch):
    table = write_table(photos / "good.csv", GOOD)
    config = MakeShardsConfig(table, str(tmp_path / "out"))
    left = tmp_path / ".out.partial"  # as SIGKILL leaves it
    left.mkdir()
    (left / "00001.tar").write_bytes(b"half")

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tables, "decode_caption", interrupted)
        main(config)
    assert not list(tmp_path.iterdir())
    main(config)
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["00000.tar"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_read(tmp_path, kind):
    def plant(path):
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")

    plant(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("image,caption\na.png,a cat\n")
    with pytest.raises(ValueError, match=r"line 2 \('a.png'\): .*a.png is not a regular file"):
        tables.write_shards(tmp_path / "t.csv", tmp_path / "out", ["image", "caption"])
    plant(tmp_path / "u.csv")
    with pytest.raises(ValueError, match=r"u\.csv is not a regular file"):
        tables.write_shards(tmp_path / "u.csv", tmp_path / "out", ["image", "caption"])


def test_paths_are_of_the_table_or_the_directory(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(photos.parent)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "PNG.png").write_bytes((photos / "RGBA.png").read_bytes())
    rows = [("PNG.png", "of the table"), (f"{photos.name}/RGB.jpg", "of the directory")]
    table = write_table(tmp_path / "tables" / "a.csv", rows)
    main(MakeShardsConfig(table, str(tmp_path / "shards")))
    assert samples(tmp_path / "shards")[1] == ["of the table", "of the directory"]
