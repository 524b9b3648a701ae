import hashlib
import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from lowprec.data import shapes
from lowprec.data.shapes import (
    CLASSNAMES,
    TEMPLATES,
    class_of,
    distinct_scenes,
    make_scene,
    render_shapes,
)
from lowprec.data.shapes_drawing import draw_scene


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def read_members(path):
    with tarfile.open(path) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar]


FROZEN = {  # split: digests of the first 100 samples with pixels, of the first 2,000 scenes
    "train": (
        "edafc4055792926718a152f080239b13c0ee781abf8ce5c705094c1e8db45fc1",
        "5710e107f6de1d069b0902ffc6c363fb762e5e96ebe89ee1b9f088550944bbcd",
    ),
    "val": (
        "f642797d92cfc8d74064029f375434073927f6152d8181eff64c21379ef1e099",
        "02565b3ee637edd959bcc7d6db8c07e392f690ebbfa1a7e796f38486497c997d",
    ),
}
SWAPPED = "f3b0ac554f45cfdd804bd6f527483d641f6b980a895eeca4a1a9ed2335f0b247"  # of 300 scenes
NAMES_AND_PROMPTS = "935fec0922ecaaa67e49aa2f27b3d71025e6c2c70c67ab711c2b9ca6e17ebc86"


def distinct_indices(seed, split, count):
    return [index for index, _ in distinct_scenes(seed, split, count, swapped=False)]


@pytest.mark.parametrize("split", FROZEN)
def test_frozen_pixels_captions_and_classes_have_not_changed(split):
    """Studies compare runs on these bytes: a failure here is a new data set, not a new digest.

    That pictures show what their captions say was verified before these digests were taken.
    """
    digest = hashlib.sha256()
    for index in range(100) if split == "train" else distinct_indices(0, split, 100):
        scene = make_scene(0, split, index)
        digest.update(draw_scene(scene, 64).tobytes())
        digest.update(f"{scene.caption} {class_of(scene)}\n".encode())
    scenes = "\n".join(repr(make_scene(0, split, index)) for index in range(2000))
    assert (digest.hexdigest(), hashlib.sha256(scenes.encode()).hexdigest()) == FROZEN[split]


def test_frozen_choice_of_validation_scenes_class_names_and_prompts_has_not_changed():
    indices = distinct_indices(0, "val", 2500)
    assert indices[-1] == 2868 and distinct_indices(0, "val", 900) == indices[:900]
    text = "\n".join((*CLASSNAMES, *TEMPLATES))
    assert hashlib.sha256(text.encode()).hexdigest() == NAMES_AND_PROMPTS


def test_frozen_swapped_scenes_have_not_changed():
    """That colors alone are exchanged was verified before this digest was taken."""
    scenes = distinct_scenes(0, "val", 300, swapped=True)
    made = "\n".join(repr(make_scene(0, "val", *scene)) for scene in scenes)
    assert hashlib.sha256(made.encode()).hexdigest() == SWAPPED


def test_swapped_scenes_follow_their_originals_under_keys_of_their_own(tmp_path):
    render_shapes(tmp_path, num_train=1, num_val=30, swapped=True, image_size=16)
    keys = [name for name, _ in read_members(tmp_path / "val-0000.tar") if name.endswith("jpg")]
    assert keys[:4] == ["v0000000.jpg", "v0000001.jpg", "v0000002.jpg", "v0000002s.jpg"]
    assert len(set(keys)) == len(keys) == 30


@pytest.fixture(scope="module")
def small_set(tmp_path_factory):
    out = tmp_path_factory.mktemp("small")
    render_shapes(out, num_train=40, num_val=20, image_size=48)
    return out


def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SAMPLES_PER_SHARD", 4)
    for processes in (1, 2):
        out = tmp_path / str(processes)
        monkeypatch.setattr(shapes, "num_cores", lambda num=processes: num)
        render_shapes(out, num_train=10, num_val=4, image_size=16)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    assert len(list(out.glob("*.tar"))) == 4
    keys = [name for path in sorted(out.glob("*.tar")) for name, _ in read_members(path)]
    assert len(set(keys)) == len(keys) == 3 * (10 + 4)


def test_shard_layout_and_images(small_set):
    members = read_members(small_set / "train-0000.tar")
    expected = [f"t{i:07d}.{suffix}" for i in range(40) for suffix in ("jpg", "txt", "cls")]
    assert [name for name, _ in members] == expected
    for name, data in members:
        scene = make_scene(0, "train", int(name[1:8]))
        if name.endswith("jpg"):
            image = Image.open(io.BytesIO(data))
            assert (image.mode, image.size, image.format) == ("RGB", (48, 48), "JPEG")
            pixels = np.asarray(draw_scene(scene, 48)).astype(int)
            assert np.abs(np.asarray(image) - pixels).mean() < 8  # it is this scene
        elif name.endswith("txt"):
            assert data.decode() == scene.caption
        else:
            subject = scene.subject
            assert CLASSNAMES[int(data)] == f"{subject.color} {subject.shape}"
    assert not list(small_set.glob("*.partial"))
    for name, lines in (("classnames", CLASSNAMES), ("templates", TEMPLATES)):
        assert (small_set / f"{name}.txt").read_text().splitlines() == list(lines)


def test_shards_of_a_larger_set_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SAMPLES_PER_SHARD", 2)
    render_shapes(tmp_path, num_train=5, num_val=0, image_size=16)
    with pytest.raises(ValueError, match="train-0001.tar"):
        render_shapes(tmp_path, num_train=2, num_val=0, image_size=16)
