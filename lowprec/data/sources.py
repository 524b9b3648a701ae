"""The files and URLs that a config's `data` group names, none of which is opened as data here.

Imports no torch, so that a wrong path is refused early.
"""

import glob
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from braceexpand import UnbalancedBracesError, braceexpand

from lowprec.config.schema import SHAPES, Config
from lowprec.nearest import nearest_path

SECRETS = re.compile(r"(?<=//)[^/]*@|[?#].*")  # user:password@, query and fragment
JOINED = re.compile(r"(\.\w+|[*}])::|::([a-z0-9]+://|pipe:)")  # as open_clip joins sources
OTHERS = (".parquet", ".json", ".jsonl", ".txt", ".npy", ".zip")  # beside shards, or instead
LISTED = re.compile(r"""(?<=//)[^/]*@|[?#][^\s,'"\]}]*""")  # the same of URLs in a list or braces


def expand(pattern: str, name: str = "data.train") -> list[str]:
    """The files of a glob with braces, sorted; `**` stands for any number of folders.

    Raises FileNotFoundError naming a similar file if nothing matches, or all members of a brace
    that match nothing, and ValueError for a folder or a file that no shard is named like.
    """
    try:
        matches = {part: glob.glob(part, recursive=True) for part in braceexpand(pattern)}
    except UnbalancedBracesError as error:
        raise FileNotFoundError(f"{name}={pattern}: unbalanced braces") from error
    for part in filter(os.path.isdir, matches):
        tars = os.path.join(part, "*.tar")
        hint = f": write {name}='{tars}'" if glob.glob(tars) else " without *.tar files"
        raise ValueError(f"{name}={part} is a folder{hint}")
    for path in (path for paths in matches.values() for path in paths):
        if path.endswith((".csv", ".tsv")):
            make_shards = f"python -m experiments.make_shards table={path} out=FOLDER"
            raise ValueError(f"{name}: {path} is not a tar file; {make_shards} makes shards of it")
        if path.lower().endswith(OTHERS):
            every = "/*" if pattern.endswith("**") else ""
            tars = f"; write {name}='{pattern}{every}.tar'" if pattern.endswith("*") else ""
            raise ValueError(f"{name}={pattern}: {path} is not a tar file{tars}")
    missing = [part for part, paths in matches.items() if not paths]
    if not missing:
        return sorted({path for paths in matches.values() for path in paths})
    _refuse_joined(pattern, name)
    if len(missing) < len(matches):
        first = listing(missing, ", ", limit=5)
        raise FileNotFoundError(f"{name}={pattern}: {len(missing)} are missing: {first}")
    raise FileNotFoundError(f"{name}={pattern}: no file matches{nearest_path(missing[0])}")


def _refuse_joined(pattern: str, name: str) -> None:
    """Raises ValueError for sources joined as open_clip joins them."""
    if JOINED.search(pattern):
        raise ValueError(
            f"{name}={without_secrets(pattern)}: braces join sources, not ::, as in "
            f"{name}='{{a/{{000..099}},b/*}}.tar'"
        )


def listing(items: list[str], separator: str, limit: int = 20) -> str:
    """The first `limit` items for a message, and the total number."""
    rest = f"{separator}... ({len(items)} in all)" if len(items) > limit else ""
    return separator.join(items[:limit]) + rest


@dataclass(frozen=True)
class ShardUrls:
    """Sorted URLs and files, not opened yet."""

    urls: list[str]

    @property
    def digest(self) -> str:
        """Digest of the names, without secrets unless only these tell the shards apart.

        A run can therefore resume after a password or a signature has been renewed.
        """
        names = sorted({without_secrets(url) for url in self.urls})
        names = names if len(names) == len(self.urls) else self.urls
        return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def expand_urls(pattern: str, allowed: list[str]) -> ShardUrls:
    """The shards of a pattern: braces for URLs, braces and globs for files.

    URLs are those that webdataset recognizes. Raises ValueError for schemes that are not `allowed`
    and FileNotFoundError where no file matches.
    """
    try:
        parts = sorted(set(braceexpand(pattern)))
    except UnbalancedBracesError:
        raise ValueError(f"data.train={without_secrets(pattern)}: unbalanced braces") from None
    schemes = {part: urlsplit(part).scheme for part in parts}
    if not any(schemes.values()):
        return ShardUrls(expand(pattern))
    for part in parts:
        if schemes[part] not in ("", "pipe"):
            _refuse_joined(without_secrets(part), "data.train")
    refused = ",".join(sorted(set(schemes.values()) - {"", *allowed}))
    if refused:
        raise ValueError(
            f"data.train={without_secrets(pattern)}: {refused} is not allowed; to allow it: "
            f"data.allow_remote=[{refused}]"
        )
    globbed = [part for part in parts if schemes[part] not in ("", "pipe") and "*" in part]
    if globbed:
        public = without_secrets(globbed[0])
        raise ValueError(f"data.train={public}: no glob in a URL; use braces: {{00..99}}")
    expanded = [[part] if schemes[part] else expand(part) for part in parts]
    return ShardUrls(sorted({url for urls in expanded for url in urls}))


def check_readers(shards: ShardUrls, workers: int, world_size: int = 1) -> None:
    """Raises ValueError unless each worker of each rank has a shard of its own."""
    count, most = len(shards.urls), len(shards.urls) // world_size
    if most < max(1, workers):
        hint = f"num_workers={most} fits" if most else f"{count} ranks fit"
        raise ValueError(
            f"data.train has {count} shards for {world_size} ranks of {max(1, workers)} workers, "
            f"and each worker needs one; {hint}"
        )


def without_secrets(url: str) -> str:
    """A URL, or a list of them, without users, passwords and queries; a path stays as it is.

    A shell command (pipe:) keeps the program and the words that name a tar: others may be secrets.
    """
    if not urlsplit(url).scheme:
        return LISTED.sub("", url) if "://" in url else url
    if not url.startswith("pipe:"):
        return SECRETS.sub("", url)
    words = [SECRETS.sub("", word).strip("'\"") for word in url.removeprefix("pipe:").split()]
    public = [word for i, word in enumerate(words) if i == 0 or ".tar" in word]
    return "pipe:" + " ".join(word for word in public if "=" not in word)


def will_render(config: Config) -> bool:
    """Whether `shapes` must still be rendered, which happens only in its default folder."""
    at_default = Path(config.data.train).parent == Path(SHAPES)
    return config.data.name == "shapes" and at_default and not Path(SHAPES).exists()


def names_file(config: Config, kind: str) -> str | None:
    """The file of class names or templates: the config's, or `<kind>.txt` beside data.val."""
    beside = Path(config.data.val).parent / f"{kind}.txt" if config.data.val else None
    default = str(beside) if beside and beside.is_file() else None
    return getattr(config.data, kind) or default


def read_names(file: str, kind: str) -> list[str]:
    """The lines of a file of "classnames", without empty ones at its end, or of "templates".

    Empty lines between templates are left out, and CLIP benchmark's `{c}` becomes `{}`.
    """
    lines = [line.strip() for line in Path(file).read_text().rstrip().splitlines()]
    if kind == "classnames":
        return lines
    return [line.replace("{c}", "{}") for line in lines if line]


def shard_faults(config: Config, training: bool) -> list[str]:
    """Patterns of shards that match no file, or URLs that cannot be opened here."""
    faults, streaming = [], training and config.data.name == "stream"
    patterns = {"data.train": config.data.train} if training else {}
    if config.evaluation.name != "none":
        patterns["data.val"] = config.data.val or ""
    for name, pattern in patterns.items():
        try:
            if streaming and name == "data.train":
                urls = expand_urls(pattern, config.data.allow_remote).urls
                schemes = sorted({urlsplit(url).scheme for url in urls} - {"", "pipe"})
                if schemes and shutil.which("curl") is None:
                    opens = f"data=stream opens {', '.join(schemes)} with curl"
                    faults.append(f"{opens}: apt-get install curl")
            elif "://" in pattern or pattern.startswith("pipe:"):
                hint = "; use data=stream for URLs" if name == "data.train" else ""
                faults.append(f"{name}: local files are expected, not a URL{hint}")
            elif not will_render(config):
                expand(pattern, name)
        except (FileNotFoundError, ValueError) as error:
            faults.append(str(error))
    return faults


def names_faults(config: Config) -> list[str]:
    """Files of class names and templates that are missing or that no evaluation can use."""
    faults, tasks = [], config.evaluation.name
    is_needed = tasks in ("zero_shot", "both") and not will_render(config)
    for kind in ("classnames", "templates"):
        file = names_file(config, kind)
        if file is None and is_needed:
            faults.append(
                f"evaluation={tasks} needs data.{kind}: a file, or imagenet (there is no "
                f"{kind}.txt beside data.val); evaluation=retrieval needs none"
            )
        elif file not in (None, "imagenet") and not os.path.isfile(file):
            near = nearest_path(file)
            faults.append(f"data.{kind}={file}: no such file{near}; it can also be imagenet")
        elif file not in (None, "imagenet") and is_needed:
            lines = read_names(file, kind)
            bad = [line for line in lines if kind == "templates" and line.count("{}") != 1]
            faults += [] if lines else [f"data.{kind}={file}: the file is empty"]
            if kind == "classnames" and "" in lines:
                empty = lines.index("")
                faults.append(f"data.{kind}={file}: line {empty + 1} must name class {empty}")
            faults += [f"data.{kind}={file}: a template needs one {{}}: {b!r}" for b in bad[:1]]
    return faults
