import pytest

from lowprec.clip.zero_shot import read_names


def test_imagenet_has_1000_names_and_80_templates():
    assert len(read_names("imagenet", "classnames")) == 1000
    templates = read_names("imagenet", "templates")
    assert len(templates) == 80 and all(t.count("{}") == 1 for t in templates)
    assert templates[0].format("dog") == "a bad photo of a dog."


def test_a_template_without_a_place_for_the_name_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("a photo of {}\na photo\n")
    with pytest.raises(ValueError, match="needs one {}: 'a photo'"):
        read_names(str(tmp_path / "t.txt"), "templates")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "c.txt").write_text("\n")
    with pytest.raises(ValueError, match="no line"):
        read_names(str(tmp_path / "c.txt"), "classnames")
