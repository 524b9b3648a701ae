import hashlib
import io
import re
import tarfile
from collections import Counter
from functools import cache

import numpy as np
import pytest
from PIL import Image

from lowprec.data import shapes
from lowprec.data.shapes import (
    CLASSNAMES,
    TEMPLATES,
    content,
    distinct_indices,
    frozen_digest,
    make_scene,
    render_shapes,
)
from lowprec.data.shapes_drawing import (
    BACKGROUNDS,
    COLORS,
    MIN_CONTRAST,
    OUTLINES,
    Background,
    Item,
    Placement,
    Scene,
    backgrounds_for,
    color_distance,
    colors_beside,
    draw_scene,
)

NUMBER_WORDS = {"a": 1, "an": 1, "one": 1, "single": 1, "two": 2, "three": 3, "four": 4}
MANY = [make_scene(3, "train", index) for index in range(2000)]
SOME = MANY[:120]


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def read_members(path):
    with tarfile.open(path) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar]


def pixels(scene, size=128):
    return np.asarray(draw_scene(scene, size)).astype(int)


def subject_mask(scene, size=128):
    """Where the picture changes when the subject is taken away: bool (size, size)."""
    without = scene._replace(subject=scene.subject._replace(places=()))
    return np.abs(pixels(scene, size) - pixels(without, size)).sum(axis=2) > 60


def second_mask(scene, size=128):
    alone = scene._replace(subject=scene.subject._replace(places=()))
    return np.abs(pixels(alone, size) - pixels(alone._replace(second=None), size)).sum(axis=2) > 60


def count_components(mask):
    """Number of connected regions of a bool array (h, w)."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    count = 0
    while left:
        count, reached = count + 1, [left.pop()]
        while reached:
            y, x = reached.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            reached += near
    return count


@cache
def nearest_color(pixel):
    return min(COLORS, key=lambda name: color_distance(COLORS[name], pixel))


def subject_words(scene):
    """The part of a caption that is about the subject: up to its noun."""
    noun = re.search(rf"\b{scene.subject.shape}(s|es)?\b", scene.caption)
    words = scene.caption[: noun.end()]
    return re.sub(r"^.*(background|gradient|background fading from .*) with ", "", words)


FROZEN = {
    ("train", 0): "edafc4055792926718a152f080239b13c0ee781abf8ce5c705094c1e8db45fc1",
    ("val", 0): "f642797d92cfc8d74064029f375434073927f6152d8181eff64c21379ef1e099",
    ("train", 32): "2271b514c39982d06571d361cda99e05464d108a7ed61b0f004e461f80d04ad9",
    ("val", 32): "2023ebf7a30231ea74eb44419f9ab0aa6a159a74b92c1f4536d0cba9ac84663a",
}
NAMES_AND_PROMPTS = "935fec0922ecaaa67e49aa2f27b3d71025e6c2c70c67ab711c2b9ca6e17ebc86"


@pytest.mark.parametrize("split, noise", FROZEN)
def test_frozen_pixels_captions_and_classes_have_not_changed(split, noise):
    """Studies compare runs on these bytes: a failure here is a new data set, not a new digest."""
    assert frozen_digest(split, 100, noise=noise) == FROZEN[split, noise]


def test_frozen_choice_of_validation_scenes_class_names_and_prompts_has_not_changed():
    assert distinct_indices(0, "val", 2500)[-1] == 2868
    text = "\n".join((*CLASSNAMES, *TEMPLATES))
    assert hashlib.sha256(text.encode()).hexdigest() == NAMES_AND_PROMPTS


def test_each_validation_caption_is_true_of_one_picture_only():
    scenes = [make_scene(0, "val", index) for index in distinct_indices(0, "val", 3000)]
    assert len({content(scene) for scene in scenes}) == 3000
    assert len({scene.caption.rstrip(".") for scene in scenes}) == 3000
    assert distinct_indices(0, "val", 900) == distinct_indices(0, "val", 3000)[:900]


@pytest.fixture(scope="module")
def small_set(tmp_path_factory):
    out = tmp_path_factory.mktemp("small")
    render_shapes(out, num_train=40, num_val=20, image_size=48)
    return out


@pytest.mark.parametrize(
    "per_shard, num_train, num_val, num_shards", [(2000, 9, 5, 2), (4, 10, 4, 4)]
)
def test_bytes_do_not_depend_on_the_number_of_processes(
    tmp_path, monkeypatch, per_shard, num_train, num_val, num_shards
):
    monkeypatch.setattr(shapes, "SAMPLES_PER_SHARD", per_shard)
    for processes in (1, 2):
        out = tmp_path / str(processes)
        render_shapes(out, num_train=num_train, num_val=num_val, num_processes=processes)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    assert len(list(out.glob("*.tar"))) == num_shards
    keys = [name for path in sorted(out.glob("*.tar")) for name, _ in read_members(path)]
    assert len(set(keys)) == len(keys) == 3 * (num_train + num_val)


def test_a_smaller_set_is_the_beginning_of_a_larger_one(small_set, tmp_path):
    render_shapes(tmp_path, num_train=7, num_val=0, image_size=48)
    few, many = (read_members(out / "train-0000.tar") for out in (tmp_path, small_set))
    assert few == many[: len(few)]
    assert not list(tmp_path.glob("val-*"))


def test_noise_has_the_given_spread_and_depends_on_split_and_index(tmp_path):
    keys = {"num_val": 3, "image_size": 128, "noise": 12.0}
    render_shapes(tmp_path / "one", num_train=3, **keys)
    render_shapes(tmp_path / "two", num_train=5, num_processes=2, **keys)
    render_shapes(tmp_path / "plain", num_train=3, num_val=3, image_size=128)
    noises = []
    for split in ("train", "val"):
        one, two, plain = (
            read_members(tmp_path / name / f"{split}-0000.tar") for name in ("one", "two", "plain")
        )
        assert one == two[: len(one)]
        assert one[1::3] == plain[1::3] and one[2::3] == plain[2::3]  # captions and classes
        for index, (_, data) in enumerate(one[::3]):
            clean = pixels(make_scene(0, split, index))
            noise = np.asarray(Image.open(io.BytesIO(data))).astype(int) - clean
            inside = noise[(clean > 40) & (clean < 215)]  # not cut off at black and white
            assert abs(inside.mean()) < 1 and 11 < inside.std() < 16  # encoding adds errors
            assert np.abs(noise).max() < 120  # nothing wraps around at black and white
            noises.append(noise.ravel())
    correlations = np.corrcoef(noises) - np.eye(len(noises))
    assert np.abs(correlations).max() < 0.1  # edges blur alike where scenes do


def test_seeds_and_splits_are_disjoint_streams(tmp_path):
    streams = [(0, "train"), (1, "train"), (0, "val"), (1, "val"), (2**64 - 1, "val")]
    scenes = [make_scene(seed, split, i) for seed, split in streams for i in range(500)]
    assert len({(s.subject.places, s.subject.shade) for s in scenes}) == len(scenes)


def test_shard_layout_and_images(small_set):
    members = read_members(small_set / "train-0000.tar")
    expected = [f"t{i:07d}.{suffix}" for i in range(40) for suffix in ("jpg", "txt", "cls")]
    assert [name for name, _ in members] == expected
    for name, data in members:
        scene = make_scene(0, "train", int(name[1:8]))
        if name.endswith("jpg"):
            image = Image.open(io.BytesIO(data))
            assert (image.mode, image.size, image.format) == ("RGB", (48, 48), "JPEG")
            assert np.abs(np.asarray(image) - pixels(scene, 48)).mean() < 8  # it is this scene
        elif name.endswith("txt"):
            assert data.decode() == scene.caption
        else:
            subject = scene.subject
            assert CLASSNAMES[int(data)] == f"{subject.color} {subject.shape}"
    assert not list(small_set.glob("*.partial"))
    for name, lines in (("classnames", CLASSNAMES), ("templates", TEMPLATES)):
        assert (small_set / f"{name}.txt").read_text().splitlines() == list(lines)


def test_captions_name_count_color_shape_and_size():
    for scene in MANY:
        words = re.findall(r"\w+", subject_words(scene))
        count = len(scene.subject.places)
        nouns = {1: {scene.subject.shape}}.get(
            count, {scene.subject.shape + "s", scene.subject.shape + "es", "fish"}
        )
        assert words[-1] in nouns, scene.caption
        assert scene.subject.color in words, scene.caption
        numbers = [NUMBER_WORDS[w] for w in words if w in NUMBER_WORDS]
        assert numbers[-1] == count, scene.caption
        side = max(place.size for place in scene.subject.places)
        assert bool({"small", "little"} & set(words)) == (side < 0.3), scene.caption
        assert bool({"large", "big"} & set(words)) == (side > 0.45), scene.caption


def test_captions_name_texture_relation_and_background():
    textures = {"striped": "striped", "dotted": "dotted", "spotted": "dotted"}
    textures |= {"checkered": "checkered", "solid": "solid"}
    for scene in MANY:
        named = {textures[w] for w in re.findall(r"\w+", subject_words(scene)) if w in textures}
        assert named <= {scene.subject.texture}, scene.caption
        assert named or scene.subject.texture == "solid", scene.caption
        assert "aa" not in scene.caption and not re.search(r"\ba orange|sss|  ", scene.caption)
        if scene.second is not None:
            relation = {w for ways in shapes.RELATIONS.values() for w in ways if w in scene.caption}
            assert relation and relation <= set(shapes.RELATIONS[scene.relation])
            assert f" {scene.second.color} {scene.second.shape}" in scene.caption
        if re.search("background|gradient", scene.caption):
            assert all(color in scene.caption for color in scene.background.colors), scene.caption


def test_subject_has_the_named_color():
    for scene in SOME:
        colors = Counter(
            nearest_color(tuple(p)) for p in pixels(scene)[subject_mask(scene)].tolist()
        )
        assert colors.most_common(1)[0][0] == scene.subject.color, scene.caption


def test_subject_has_the_named_texture():
    for scene in SOME:
        subject = pixels(scene)[subject_mask(scene)]
        off = np.linalg.norm(subject - COLORS[scene.subject.color], axis=1) > 60
        low, high = (0, 0.3) if scene.subject.texture == "solid" else (0.08, 0.62)
        assert low <= off.mean() <= high, scene.caption


def test_picture_shows_the_number_of_objects_in_the_caption():
    for scene in SOME:
        # A rim pixel now and then falls off a sharp tip: such specks are no objects.
        mask = subject_mask(scene._replace(subject=scene.subject._replace(texture="solid")))
        assert count_components(mask) == len(scene.subject.places), scene.caption


def test_objects_stand_in_the_relation_of_the_caption():
    for scene in SOME:
        if scene.second is None:
            continue
        (ys, xs), (second_ys, second_xs) = map(
            np.nonzero, (subject_mask(scene), second_mask(scene))
        )
        holds = {
            "left": xs.max() < second_xs.min() + 2,
            "right": xs.min() > second_xs.max() - 2,
            "above": ys.max() < second_ys.min() + 2,
            "below": ys.min() > second_ys.max() - 2,
            "inside": second_mask(scene)[subject_mask(scene)].all(),
        }
        assert holds[scene.relation], scene.caption
        if scene.relation != "inside":
            dx, dy = abs(xs.mean() - second_xs.mean()), abs(ys.mean() - second_ys.mean())
            assert (dx > dy) == (scene.relation in ("left", "right")), scene.caption


def test_colors_are_distinguishable():
    for a in COLORS:
        distances = [color_distance(COLORS[a], COLORS[b]) for b in COLORS if a != b]
        assert min(distances) > 150
        for b in colors_beside(a):
            plains, gradients = backgrounds_for((a, b))
            assert plains
            ends = {BACKGROUNDS[name] for pair in plains + gradients for name in pair}
            for color in (COLORS[a], COLORS[b]):
                assert min(color_distance(color, end) for end in ends) >= MIN_CONTRAST


def test_shapes_are_distinguishable_at_16_pixels():
    def drawn(shape):
        place = Placement(0.5, 0.5, 0.8, 0.0, False)
        item = Item(shape, "black", "solid", (0, 0, 0), (place,))
        plain = Background("plain", ("white",), 0)
        return pixels(Scene(item, None, None, plain, ""), 16)[..., 0] / 255

    images = [drawn(shape) for shape in OUTLINES]
    for i, a in enumerate(images):
        assert all(np.abs(a - b).sum() > 12 for b in images[:i]), list(OUTLINES)[i]


BAD = {"num_train": 0, "num_val": -1, "image_size": 15, "seed": 2**64, "num_processes": 0}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        render_shapes(tmp_path / "out", **{"num_train": 1, "num_val": 0, name: BAD[name]})
    assert not (tmp_path / "out").exists()


def test_shards_of_a_larger_set_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SAMPLES_PER_SHARD", 2)
    render_shapes(tmp_path, num_train=5, num_val=0, image_size=16)
    with pytest.raises(ValueError, match="train-0001.tar"):
        render_shapes(tmp_path, num_train=2, num_val=0, image_size=16)
