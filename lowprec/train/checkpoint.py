"""Checkpoints: one directory a step, complete when it has its final name, never overwritten.

Files are written to a temporary directory and synced, the manifest with their digests last; the
rename is the commit. Loading verifies every digest. No pickle anywhere.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lowprec.runs import durable
from lowprec.train.state import CheckpointError, DamagedError, TrainState
from lowprec.train.world import ALONE, World

FORMAT = 3


def save_checkpoint(
    run: Path,
    step: int,
    state: TrainState,
    offsets: dict,
    *,
    keep: int,
    provenance: dict,
    world: World = ALONE,
) -> Path:
    """Commits `checkpoints/step_<step>` with the record's offsets, then drops all but `keep`.

    `provenance`: what the run's numbers follow from, compared at a resume. CheckpointError if it
    cannot be written; nothing is left of it then and the older ones stay. Every rank writes what
    is its own; rank 0 does the rest. It is committed, or not, in all of them.
    """
    folder = run / "checkpoints"
    final = folder / f"step_{step:09d}"
    temporary = folder / f".tmp.{final.name}"
    if world.first(final.exists):
        return final
    try:
        world.first(lambda: _begin(temporary))
        contents = state.files()  # the ranks gather here: below one may fail by itself
        written = world.each(lambda: _write_files(temporary, contents))
        files = {name: facts for part in written for name, facts in part.items()}
        world.first(lambda: _commit(temporary, final, step, offsets, files, provenance))
    except OSError as error:
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final} cannot be saved: {error}") from error
    if world.is_first:
        retire(run, keep)
    return final


def _begin(temporary: Path) -> None:
    temporary.parent.mkdir(exist_ok=True)
    durable.sync(temporary.parent.parent)
    temporary.mkdir()


def _commit(
    temporary: Path, final: Path, step: int, offsets: dict, files: dict, provenance: dict
) -> None:
    """Writes the manifest, then gives the checkpoint its name."""
    body = {"format": FORMAT, "step": step, "offsets": offsets, "files": files}
    body |= {"provenance": provenance}
    manifest = {"sha256": _digest_of(body), **body}
    durable.write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
    durable.sync(temporary)
    os.rename(temporary, final)
    durable.sync(final.parent)


def _write_files(folder: Path, contents: dict[str, list]) -> dict[str, dict]:
    """Writes and hashes files, all at once; bytes and sha256 by name."""
    if not contents:
        return {}
    with ThreadPoolExecutor(2 * len(contents)) as pool:
        digests = {name: pool.submit(_sha256, chunks) for name, chunks in contents.items()}
        written = [
            pool.submit(durable.write, folder / name, *chunks) for name, chunks in contents.items()
        ]
    for done in written:
        done.result()
    return {
        name: {"bytes": sum(map(len, chunks)), "sha256": digests[name].result()}
        for name, chunks in contents.items()
    }


def retire(run: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints; a failure is left to the next start's sweep.

    A checkpoint loses its name first: what is left of it after an interruption is no checkpoint.
    """
    for checkpoint in list_checkpoints(run)[:-keep]:
        trash = checkpoint.with_name(f".trash.{checkpoint.name}")
        try:
            os.rename(checkpoint, trash)
            shutil.rmtree(trash)
        except OSError as error:
            print(f"warning: {checkpoint} cannot be removed: {error}")


def sweep(run: Path) -> None:
    """Removes what a killed process left half written or half removed."""
    for pattern in (".tmp.*", ".trash.*"):
        for folder in (run / "checkpoints").glob(pattern):
            shutil.rmtree(folder)


def require_space(run: Path, state: TrainState, keep: int) -> None:
    """CheckpointError unless `keep` checkpoints and the next one fit beside what is there."""
    size = state.num_bytes()
    needed = size * (keep + 1 - min(keep, len(list_checkpoints(run)))) * 11 // 10
    free = shutil.disk_usage(run).free
    if free < needed:
        raise CheckpointError(
            f"{run}: {free:,} bytes are free, and checkpoints need {needed:,} more (keeping {keep} "
            f"of {size:,} and writing one)"
        )


def list_checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step_*"))


def newest_checkpoint(run: Path, *, set_aside: bool = False) -> tuple[Path, dict] | None:
    """The newest checkpoint whose digests hold and its manifest; None if the run never had one.

    A damaged one is named on the console, with `set_aside` renamed to `.damaged.step_*`, and the
    next older taken. If none is whole, CheckpointError: a run that has had checkpoints never starts
    again from step 0.
    """
    faults = [f"{path} is damaged" for path in (run / "checkpoints").glob(".damaged.*")]
    for path in reversed(list_checkpoints(run)):
        try:
            return path, verify(path)
        except DamagedError as error:
            faults.append(str(error))
            if set_aside:
                aside = path.with_name(f".damaged.{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)
            print(f"warning: {error}; an older checkpoint is tried")
    if faults:
        raise CheckpointError(f"{run} has no whole checkpoint: {'; '.join(faults)}")
    return None


def find_checkpoint(source: Path) -> Path:
    """The newest whole checkpoint of a run, or the checkpoint that the path is; CheckpointError."""
    if (source / "manifest.json").exists():
        verify(source)
        return source
    found = newest_checkpoint(source)
    if found is None:
        raise CheckpointError(f"{source} holds no checkpoint: a run or a checkpoint is expected")
    return found[0]


def verify(path: Path) -> dict:
    """The manifest of a checkpoint whose files all match it.

    DamagedError names the file that does not. CheckpointError, so that nothing is set aside, where
    files cannot be read or the format is another version's.
    """
    manifest_file = path / "manifest.json"
    try:
        manifest = json.loads(manifest_file.read_bytes())
        if "sha256" not in manifest and manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {manifest.get('format')}, not {FORMAT}")
        digest = manifest.pop("sha256")
        if digest != _digest_of(manifest):
            raise DamagedError(f"{manifest_file} is damaged")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}; {FORMAT} is read here")
        for name, facts in manifest["files"].items():
            if not (path / name).exists() or _digest_of_file(path / name) != facts["sha256"]:
                raise DamagedError(f"{path / name} is damaged or missing")
    except (FileNotFoundError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise DamagedError(f"{manifest_file} is damaged ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return manifest


def _digest_of(body: dict) -> str:
    return _sha256([json.dumps(body, sort_keys=True).encode()])


def _sha256(chunks: list) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
