"""Tests how patterns of files and URLs are expanded, refused, and named without secrets."""

from functools import partial

import pytest

from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.data import open as opening
from lowprec.data.shapes import render_shapes
from lowprec.data.sources import expand, expand_urls, names_faults, read_names, without_secrets
from lowprec.train.preflight import preflight

SECRET_URLS = {
    "http://user:s3cret@host/a.tar?sig=s3cret&x=/b": "http://host/a.tar",
    "https://s3cret@host:8/a/b.tar#s3cret": "https://host:8/a/b.tar",
    "pipe:curl -H 'Authorization: s3cret' -u a:s3cret https://u:s3cret@h/a.tar?s3cret": (
        "pipe:curl https://h/a.tar"
    ),
    "pipe:TOKEN=s3cret aws s3 cp s3://b/a-0.tar.gz -": "pipe:s3://b/a-0.tar.gz",
    "data/a?b#c.tar": "data/a?b#c.tar",
    "{http://u:s3cret@h/{0..2}.tar?s3cret=/x,a/*}": "{http://h/{0..2}.tar,a/*}",
}


@pytest.mark.parametrize(("url", "name"), SECRET_URLS.items())
def test_name_of_a_url_holds_no_secret(url, name):
    assert without_secrets(url) == name


def test_braces_and_globs_are_expanded(tmp_path):
    for name in ("a-0.tar", "a-1.tar", "b.tar"):
        (tmp_path / name).touch()
    a0, a1, b = (f"{tmp_path}/{name}.tar" for name in ("a-0", "a-1", "b"))
    assert expand(f"{tmp_path}/a-{{1..0}}.tar") == [a0, a1]
    assert expand(f"{tmp_path}/{{a-0,*}}.tar") == [a0, a1, b]
    assert expand_urls(f"{tmp_path}/a-*.tar", []).urls == [f"{tmp_path}/a-{i}.tar" for i in (0, 1)]
    mixed = expand_urls(f"{{http://h/{{0..2}},{tmp_path}/*}}.tar", ["http"]).urls
    assert len(mixed) == 6 and mixed == sorted(mixed)
    with pytest.raises(FileNotFoundError, match="no file matches"):
        expand_urls(f"{tmp_path}/c-*.tar", [])
    with pytest.raises(ValueError, match="braces"):
        expand_urls("http://h/{0..2.tar", ["http"])


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("a-{0..2}.tar", ("1 are missing", "a-2.tar")),
        ("a-0.tra", ("data.val=", "no file matches", "nearest: ", "a-0.tar")),
        ("val", ("data.val=", "/val is a folder: write data.val='", "/val/*.tar'")),
        ("{empty,val}", ("data.val=", "/empty is a folder without *.tar files")),
        ("*.csv", ("/t.csv is not a tar file; python -m experiments.make_shards table=",)),
        ("*", ("data.val=", ".json is not a tar file; write data.val='", "/*.tar'")),
        ("a-0.tar::b.tar", ("data.val=", "braces join sources, not ::")),
        ("deep/er/a-0.tra", ("no file matches; folder /", "/deep does not exist; ", "no similar")),
    ],
)
def test_pattern_without_its_files_is_refused_with_the_nearest_one(tmp_path, pattern, parts):
    for folder in ("val", "empty"):
        (tmp_path / folder).mkdir()
    for name in ("a-0.tar", "a-1.tar", "val/0.tar", "t.csv"):
        (tmp_path / name).touch()
    if pattern == "*":
        tmp_path = tmp_path / "val"
        (tmp_path / "0_stats.json").touch()
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        expand(f"{tmp_path}/{pattern}", "data.val")
    assert all(part in str(error.value) for part in parts)


def test_two_stars_stand_for_any_number_of_folders(tmp_path):
    names = ["0.tar", "a/1.tar", "a/b/c/2.tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert expand(f"{tmp_path}/**/*.tar") == [f"{tmp_path}/{name}" for name in names]


def test_a_tilde_is_refused_with_the_path_that_it_means(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(FileNotFoundError, match=r"~ is not expanded: write /home/me/a/\*\.tar"):
        expand("~/a/*.tar")


def test_joined_urls_are_refused_but_no_other_colons():
    for joined in ("http://h/a.tar::http://h/b.tar", "m-{0..1}.tar::n-{0..1}.tar", "a-*::b-*"):
        with pytest.raises(ValueError, match=r"=[^ ]+::[^ ]+: braces join sources"):
            expand_urls(joined, ["http"])
    for url in ("http://h/t.tar?sig=a.b::c", "http://u:p.x::w@h/a.tar", "http://h/a::b.tar"):
        assert expand_urls(url, ["http"]).urls == [url]
    for host in ("[::1]:80", "[2001:db8::abcd:1]"):
        urls = [f"http://{host}/{n}.tar" for n in range(4)]
        assert expand_urls(f"http://{host}/{{0..3}}.tar", ["http"]).urls == urls


def test_digest_is_of_the_urls_and_outlives_a_renewed_secret():
    def digest(pattern):
        return expand_urls(pattern, ["https"]).digest

    plain = digest("https://h/{0..3}.tar")
    assert digest("https://u:p@h/{0..3}.tar?sig=1") == digest("https://h/{0..3}.tar?sig=2") == plain
    assert len({plain, digest("https://h/{0..4}.tar"), digest("https://g/{0..3}.tar")}) == 3
    assert digest("https://h/x?shard={0..3}") != digest("https://h/x?shard={1..4}")


def check_command(train, allowed):
    keys = ["data=stream", "evaluation=none", f'data.train="{train}"']
    return compose_command([*keys, f"data.allow_remote={allowed}"], preflight=preflight)


REFUSED = {  # data.train, data.allow_remote: what the message must contain
    ("http://h/a.tar", "[]"): ("http is not allowed", "data.allow_remote=[http]"),
    ("{http://h/a,pipe:cat a}.tar", "[http]"): ("pipe is not allowed",),
    ("PIPE:cat a.tar", "[http]"): ("pipe is not allowed",),
    ("nowhere/*.tar", "[http]"): ("data.train=nowhere/*.tar: no file matches",),
}


@pytest.mark.parametrize(("keys", "parts"), REFUSED.items(), ids=[" ".join(k) for k in REFUSED])
def test_what_is_not_allowed_is_refused_before_anything_is_opened(keys, parts):
    with pytest.raises(ConfigError) as raised:
        check_command(*keys)
    assert all(part in str(raised.value) for part in parts)


def test_what_is_allowed_passes_if_curl_is_there(monkeypatch):
    assert check_command("http://h/{0..9}.tar", "[http]")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="opens http with curl: apt-get install curl"):
        check_command("http://h/{0..9}.tar", "[http]")
    assert check_command("pipe:cat a.tar", "[pipe]")


def test_the_default_set_is_rendered_in_the_working_directory_and_found_from_others(
    tmp_path, monkeypatch, capsys
):
    small = partial(render_shapes, num_train=8, num_val=4, image_size=16)
    monkeypatch.setattr(opening, "render_shapes", small)
    folder, digests = tmp_path / "here/data/shapes", []
    elsewhere = [f"data.{part}={folder}/{part}-*.tar" for part in ("train", "val")]
    for name, keys in (("here", []), ("there", elsewhere)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        [run] = compose_command(["batch_size=4", *keys])
        digests.append(opening.open_data(run.config).digest(run.config))
    assert digests[0] == digests[1] and not list((tmp_path / "there").iterdir())
    printed = capsys.readouterr().out
    assert printed.count("rendering") == printed.count(f"rendering {folder}, once for this") == 1
    assert all(key.replace(str(folder), "DIR") in printed for key in elsewhere)


def test_files_of_names_have_a_name_or_a_placeholder_in_each_line(make_config, tmp_path):
    names, templates = tmp_path / "names.txt", tmp_path / "templates.txt"
    keys = {"evaluation.name": "zero_shot", "data.val": f"{tmp_path}/val.tar"}
    files = {"data.classnames": str(names), "data.templates": str(templates)}
    config = make_config({**keys, **files})
    names.write_text("cat\ndog \n\n")
    templates.write_text("a photo of {c}.\n\na {}\n")  # as in CLIP benchmark
    assert names_faults(config) == []
    assert read_names(names, "classnames") == ["cat", "dog"]
    assert read_names(templates, "templates") == ["a photo of {}.", "a {}"]
    names.write_text("cat\n\ndog\n")
    templates.write_text("a {}\nno class\n")
    assert names_faults(config) == [
        f"data.classnames={names}: line 2 must name class 1",
        f"data.templates={templates}: a template needs one {{}}: 'no class'",
    ]
    names.write_text("\n")
    assert f"data.classnames={names}: the file is empty" in names_faults(config)
