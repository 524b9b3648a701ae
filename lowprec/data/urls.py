"""Where the shards of a stream lie, and how a URL is named without its secrets."""

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from braceexpand import UnbalancedBracesError, braceexpand

from lowprec.data.index import expand

SECRETS = re.compile(r"(?<=//)[^/]*@|[?#].*")  # user:password@, query and fragment


@dataclass(frozen=True)
class ShardUrls:
    """URLs and files, sorted. What they hold is not known before it is read."""

    urls: list[str]

    @property
    def digest(self) -> str:
        """Of the names alone, without secrets where these do not tell the shards apart.

        So a run goes on when a password or a signature is renewed.
        """
        names = sorted({without_secrets(url) for url in self.urls})
        names = names if len(names) == len(self.urls) else self.urls
        return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def expand_urls(pattern: str, allowed: list[str]) -> ShardUrls:
    """The shards of a pattern: braces for URLs, braces and globs for files.

    A URL is what webdataset takes for one, whatever its spelling. Raises ValueError for one whose
    scheme is not `allowed`, and FileNotFoundError where no file matches.
    """
    try:
        parts = sorted(set(braceexpand(pattern)))
    except UnbalancedBracesError:
        raise ValueError(f"data.train={without_secrets(pattern)}: a brace has no partner") from None
    schemes = {part: urlsplit(part).scheme for part in parts}
    if not any(schemes.values()):
        return ShardUrls(expand(pattern))
    refused = ",".join(sorted(set(schemes.values()) - {"", *allowed}))
    if refused:
        raise ValueError(
            f"data.train={without_secrets(pattern)}: {refused} is not allowed; if it is meant: "
            f"data.allow_remote=[{refused}]"
        )
    globbed = [part for part in parts if schemes[part] not in ("", "pipe") and "*" in part]
    if globbed:
        raise ValueError(
            f"data.train={without_secrets(globbed[0])}: no glob in a URL; use braces: {{00..99}}"
        )
    found = [[part] if schemes[part] else expand(part) for part in parts]
    return ShardUrls(sorted({url for urls in found for url in urls}))


def check_readers(shards: ShardUrls, workers: int, world_size: int = 1) -> None:
    """ValueError unless each worker of each rank has a shard of its own."""
    count, most = len(shards.urls), len(shards.urls) // world_size
    if most < max(1, workers):
        way_out = f"num_workers={most} fits" if most else f"{count} ranks fit"
        raise ValueError(
            f"data.train has {count} shards for {world_size} ranks of {max(1, workers)} workers, "
            f"each of which needs one; {way_out}"
        )


def without_secrets(url: str) -> str:
    """A URL without user, password and query; a path as it is.

    Of a shell command (pipe:) the program and the words that name a tar: others may be secrets.
    """
    if not urlsplit(url).scheme:
        return url
    if not url.startswith("pipe:"):
        return SECRETS.sub("", url)
    words = [SECRETS.sub("", word).strip("'\"") for word in url.removeprefix("pipe:").split()]
    shown = [word for i, word in enumerate(words) if i == 0 or ".tar" in word]
    return "pipe:" + " ".join(word for word in shown if "=" not in word)
