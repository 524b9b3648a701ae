"""A server that forks the processes of a job, so that torch is imported once for all of them.

Reads one JSON order per line and answers each with a line. An order has `job`, a name in
jobs.JOBS; `size`, the number of processes, or 0 to do the job in the server itself, so that what is
loaded late is there for all; `options` of the job; `folder`, where each process writes
`<rank>.log`; and `signals`, a list of `{"rank", "number"}`, each sent once the signals before it
are, `after_s` later or when a file that matches `file` has so many `lines`. The answer has `codes`,
each process's exit status (negative: killed), `seconds` from the last signal to each end, and
`logs`.
"""

import contextlib
import glob
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import pandas  # noqa: F401 (pyarrow imports it with the first rows)
import pyarrow.pandas_compat  # noqa: F401 (the same)
import torch
from jobs import JOBS
from PIL import Image

import lowprec.train.run  # noqa: F401 (experiments.train imports it when it trains)
from lowprec.clip.text import Tokenizer
from lowprec.runs.provenance import code_digests

LIMIT_S = 60


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(order: dict, rank: int, port: int) -> int:
    """Forks a rank; its process."""
    process = os.fork()
    if process:
        return process
    code = 1
    folder = Path(order["folder"])
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(order["size"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        JOBS[order["job"]](folder, rank, order["size"], **order["options"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if not isinstance(left.code, int) and left.code is not None:
            print(left.code)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_due(signal: dict, zero: float) -> bool:
    if "after_s" in signal:
        return time.monotonic() - zero >= signal["after_s"]
    files = glob.glob(signal["file"])
    return bool(files) and Path(files[0]).read_bytes().count(b"\n") >= signal["lines"]


def fulfil(order: dict) -> dict:
    if order["size"] == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            JOBS[order["job"]](Path(order["folder"]), 0, 1, **order["options"])
        return {}
    port = free_port()
    processes = {start(order, rank, port): rank for rank in range(order["size"])}
    by_rank = {rank: process for process, rank in processes.items()}
    codes, seconds = {}, {}
    waiting = list(order.get("signals", []))
    begun = time.monotonic()
    zero = begun
    while len(codes) < order["size"]:
        while waiting and is_due(waiting[0], zero):
            due = waiting.pop(0)
            os.kill(by_rank[due["rank"]], due["number"])
            zero = time.monotonic()
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in processes:
            rank = processes[process]
            codes[rank] = os.waitstatus_to_exitcode(status)
            seconds[rank] = time.monotonic() - zero
        else:
            time.sleep(0.01)
        stopped = [due["rank"] for due in order.get("signals", []) if due["number"] == 19]
        if time.monotonic() - begun > LIMIT_S or set(by_rank) - set(codes) == set(stopped) != set():
            for rank in set(by_rank) - set(codes):
                os.kill(by_rank[rank], signal.SIGKILL)
    ranks = range(order["size"])
    logs = [(Path(order["folder"]) / f"{rank}.log").read_text() for rank in ranks]
    return {"codes": [codes[r] for r in ranks], "seconds": [seconds[r] for r in ranks],
            "logs": logs}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    code_digests()  # kept, as are the vocabulary and the plugins: no rank needs to load them again
    Tokenizer(8)
    Image.preinit()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(fulfil(json.loads(line))), flush=True)
    os._exit(0)  # without unloading all modules, which takes seconds


if __name__ == "__main__":
    main()
