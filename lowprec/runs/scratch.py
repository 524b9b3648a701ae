"""A folder for the temporary files of this process, which a later start removes after a kill."""

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import TextIO

PREFIX = ".lowprec-tmp-"  # of the folder's name
MARKER = ".lowprec-tmp-lock"  # the file in it that a living process keeps locked


@cache  # keeps the lock for as long as the process and its forks live
def use_own_temporary_folder() -> TextIO:
    """Moves later temporary files (of workers, W&B) to a folder that is removed at exit.

    Removes those of this user's killed processes and nothing else; the caches of compilers stay
    where they are.
    """
    shared = Path(tempfile.gettempdir())
    for folder in shared.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                with open(folder / MARKER) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
    unlocked = Path(tempfile.mkdtemp(prefix=".lowprec-", dir=shared))
    lock = open(unlocked / MARKER, "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    own = unlocked.rename(shared / unlocked.name.replace(".lowprec-", PREFIX, 1))
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        cached = shared / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cached))
    tempfile.tempdir = str(own)
    util.Finalize(None, shutil.rmtree, args=(own, True), exitpriority=-1000)  # the last
    return lock
