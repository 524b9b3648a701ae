import contextlib
import gzip
import io
import shutil
import tarfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


def encode(pixels: np.ndarray, kind: str = "png") -> bytes:
    """Bytes of an image file of uint8 pixels [height, width, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "jpeg"}.get(kind, kind))
    return file.getvalue()


def sample(number: int, size: tuple[int, int] = (12, 16)) -> dict[str, bytes]:
    """Members of one sample: noise that depends on its number, a caption, label number % 7."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    return {
        "png": encode(pixels),
        "txt": f"caption {number}".encode(),
        "cls": str(number % 7).encode(),
    }


def members(first: int, last: int, change: dict | None = None) -> list[tuple[str, bytes]]:
    """Members of samples `first` .. `last - 1` in order.

    `change`: sample number to members that replace (None: remove) those of that sample.
    """
    named = []
    for n in range(first, last):
        parts = sample(n) | (change or {}).get(n, {})
        named += [(f"{n:06d}.{k}", v) for k, v in parts.items() if v is not None]
    return named


def write_tar(path: Path, members: list[tuple], mtime: float = 0) -> Path:
    """A tar (or .tar.gz) of bytes by name or TarInfo, in order."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            tar.addfile(info, io.BytesIO(data))
    whole = file.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(whole) if path.suffix == ".gz" else whole)
    return path


def write_shards(folder: Path, counts: list[int], change: dict | None = None) -> str:
    """Shards train-000.tar, ... of numbered samples, changed as by `members`; their pattern."""
    for shard, count in enumerate(counts):
        first = sum(counts[:shard])
        write_tar(folder / f"train-{shard:03d}.tar", members(first, first + count, change))
    return str(folder / "train-*.tar")


def tokenize(captions: list[str]) -> torch.Tensor:
    """Stands in for a tokenizer: the numbers in the captions of `sample`."""
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])


def same(a, b) -> bool:
    """Whether two batches hold the same, to the bit."""
    tensors = ("images", "tokens", "labels", "samples")
    return a.skips == b.skips and all(torch.equal(getattr(a, x), getattr(b, x)) for x in tensors)


class Server(ThreadingHTTPServer):
    """Serves the files of a folder; `log` holds the path of each request, `users` who asked."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.log, self.users = folder, [], set()
        self.stopped = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # a reader that goes away early


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        name = self.path.partition("?")[0].lstrip("/")
        self.server.log.append(name)
        if name.startswith("stall"):
            self.server.stopped.wait()
        elif name.startswith("trickle"):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has left
                for _ in range(40):
                    self.wfile.write(bytes(5))
                    time.sleep(0.25)
        else:
            self.server.users.add(self.headers.get("Authorization"))
            self.directory = str(self.server.folder)
            super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    if shutil.which("curl") is None:
        pytest.skip("no curl, by which webdataset opens URLs")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "served").mkdir(exist_ok=True)
    with Server(tmp_path / "served") as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.stopped.set()
        server.shutdown()
