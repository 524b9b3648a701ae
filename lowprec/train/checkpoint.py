"""Checkpoints: one directory per saved step, committed by a rename, verified before it is loaded.

Files are written and synced in a temporary directory, the manifest with their digests last.
Renaming the directory to `checkpoints/step_<step>` commits it, and it is never overwritten.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lowprec.config.schema import Config
from lowprec.runs import durable
from lowprec.runs.attempts import CheckpointError, DamagedError, saved_steps
from lowprec.runs.provenance import file_digest, refuse_mismatch
from lowprec.runs.read import METRICS, scan_rows
from lowprec.runs.record import Record
from lowprec.train.state import TrainState, is_of_optimizer

FORMAT = 3
KEPT = 2  # newest checkpoints, while a run trains
SAVE_FAILURES = 3  # consecutive failures end the run; before that training continues
MALFORMED = (ValueError, LookupError, AttributeError, TypeError, RecursionError, MemoryError)


@dataclass(eq=False)
class Saver:
    """Restores a run to its newest intact checkpoint and commits new ones.

    Rank 0 chooses and verifies, all ranks read; a failure in one rank is raised in all.
    """

    state: TrainState
    record: Record
    config: Config
    provenance: dict
    failures: int = 0  # consecutive ones of `save`

    def restore(self) -> int:
        """Loads the newest checkpoint and cuts the record back to it; returns its step, or 0."""
        run = self.record.run
        choice = self.state.world.first(self._choose)
        if choice is None:
            self.record.cut({})
            print(f"{run}: starting at step 0")
            return 0
        path, manifest, mismatch = choice
        self.state.world.together(lambda: self.state.load(Path(path)))
        if self.state.world.is_first:
            retire(run / "checkpoints", self.config.keep_checkpoints or KEPT)
        self.record.cut(manifest["offsets"])
        if mismatch:
            self.record.append("events", [{"step": manifest["step"], "drift": mismatch}])
        print(f"{run}: resuming from step {manifest['step']}")
        return manifest["step"]

    def _choose(self) -> tuple[str, dict, list[str]] | None:
        """The checkpoint to resume from, its manifest and the allowed provenance mismatches.

        None if the run never had a checkpoint. Raises CheckpointError if it must not be resumed.
        """
        run = self.record.run
        remove_leftovers(run / "checkpoints")
        newest = newest_checkpoint(run, set_aside=True)
        if newest is None:
            status = self.record.last_status()
            rows = scan_rows(run / "attempts.jsonl", {"saved": int})[0]
            if saved := max([status["saved"], *(row.get("saved", 0) for row in rows)]):
                raise CheckpointError(f"{run} was saved at step {saved}; its checkpoints are gone")
            rows = scan_rows(run / "metrics.jsonl", METRICS)[0]
            reached = max((row.get("step", 0) for row in rows), default=0)
            if status["state"] is None and reached > self.config.save_every:
                raise CheckpointError(
                    f"{run} has a record of {reached} steps; its checkpoints and status.json are "
                    "gone: restore them from a copy, or delete the run directory"
                )
            return None
        path, manifest = newest
        if manifest["step"] > (last := self.config.num_steps):
            raise CheckpointError(f"{run} is at step {manifest['step']}, beyond num_steps={last}")
        mismatch = refuse_mismatch(
            path,
            manifest["provenance"],
            self.provenance,
            allow_code=self.config.resume.allow_drift,
            allow_layout=self.config.resume.allow_reshard,
        )
        return str(path), manifest, mismatch

    def save(self, step: int, signal: int | None = None) -> None:
        """Commits a checkpoint, and records the signal that asked for it.

        A failure is recorded as an event, and the next save tries again. The third consecutive
        failure, or any failure at the end of the run or attempt, raises CheckpointError.
        """
        if signal:
            self.record.append("events", [{"step": step, "signal": signal}])
        try:
            save_checkpoint(
                self.record.run / "checkpoints",
                step,
                self.state,
                self.record.offsets(),
                keep=self.config.keep_checkpoints or KEPT,
                provenance=self.provenance,
            )
        except CheckpointError as error:
            self.failures += 1
            if signal or step == self.config.num_steps or self.failures == SAVE_FAILURES:
                raise
            print(f"warning: {error}; training continues and tries again in save_every steps")
            self.record.append("events", [{"step": step, "not saved": str(error)}])
        else:
            self.failures = 0
            self.record.status("running", step, saved=step)


def save_checkpoint(
    folder: Path, step: int, state: TrainState, offsets: dict, *, keep: int, provenance: dict
) -> Path:
    """Commits `<folder>/step_<step>`, then removes all but the newest `keep` checkpoints there.

    `offsets`: lengths of the record's files, to which a resume cuts them back. `provenance`: what
    the run's numbers depend on, compared at a resume. Rank 0 writes, and the commit succeeds or
    fails in all ranks: CheckpointError leaves nothing of the new checkpoint and the older ones
    untouched.
    """
    final, world = folder / f"step_{step:09d}", state.world
    temporary = folder / f".tmp.{final.name}"
    if world.first(lambda: _is_intact(final)):
        return final
    try:
        world.first(lambda: temporary.mkdir(parents=True))
        contents = state.files()  # ranks gather tensors here, so no rank may fail on its own yet
        files = world.first(lambda: _write_files(temporary, contents))
        body = {"format": FORMAT, "step": step, "offsets": offsets, "files": files}
        world.first(lambda: _commit(temporary, final, body | {"provenance": provenance}))
    except OSError as error:
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final} cannot be saved: {error}") from error
    if world.is_first:
        retire(folder, keep)
    return final


def _is_intact(checkpoint: Path) -> bool:
    """Whether a checkpoint exists; one that is damaged is set aside, to make room for a new one."""
    try:
        return checkpoint.exists() and bool(verify(checkpoint))
    except DamagedError as error:
        print(f"warning: {error}")
        _set_aside(checkpoint)
        return False


def _set_aside(checkpoint: Path) -> None:
    aside = checkpoint.with_name(f".damaged.{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)


def _commit(temporary: Path, final: Path, body: dict) -> None:
    durable.write(temporary / "manifest.json", _signed(body))
    durable.sync(temporary)
    os.rename(temporary, final)
    durable.sync(final.parent)
    durable.sync(final.parent.parent)


def _write_files(folder: Path, contents: dict[str, bytes]) -> dict[str, dict]:
    """Writes and hashes all files concurrently; returns `bytes` and `sha256` of each."""
    with ThreadPoolExecutor(2 * len(contents)) as pool:
        digests = pool.map(_sha256, contents.values())
        list(pool.map(lambda name: durable.write(folder / name, contents[name]), contents))
        return {
            name: {"bytes": len(data), "sha256": digest}
            for (name, data), digest in zip(contents.items(), digests, strict=True)
        }


def retire(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints; on failure the next start removes the rest.

    A checkpoint is renamed first: what an interrupted removal leaves does not look like one.
    """
    for checkpoint in saved_steps(folder)[:-keep]:
        trash = checkpoint.with_name(f".trash.{checkpoint.name}")
        try:
            os.rename(checkpoint, trash)
            shutil.rmtree(trash)
        except OSError as error:
            print(f"warning: {checkpoint} cannot be removed: {error}")


def keep_weights(run: Path) -> None:
    """Removes all checkpoints of a finished run but the newest, and its optimizer's state.

    The manifest is replaced first: after a kill, at worst some files are left that it does not
    name. A failure is only a warning.
    """
    folder = run / "checkpoints"
    try:
        for newest in saved_steps(folder)[-1:]:
            body = json.loads((newest / "manifest.json").read_bytes())
            del body["sha256"]
            dropped = [name for name in body["files"] if is_of_optimizer(name)]
            for name in dropped:
                del body["files"][name]
            retire(folder, 1)
            durable.replace(newest / "manifest.json", _signed(body))
            for name in dropped:
                (newest / name).unlink()
    except (OSError, *MALFORMED) as error:
        print(f"warning: the optimizer's state stays in {folder}: {error}")


def remove_leftovers(folder: Path) -> None:
    """Removes partially written or removed checkpoints that a killed process left behind."""
    for pattern in (".tmp.*", ".trash.*"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


def list_checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first."""
    return saved_steps(run / "checkpoints")


def newest_checkpoint(run: Path, *, set_aside: bool = False) -> tuple[Path, dict] | None:
    """The newest intact checkpoint and its manifest; None if the run never had a checkpoint.

    Prints the name of a damaged one, renames it to `.damaged.step_*` if `set_aside`, and tries the
    next older one. Raises CheckpointError if none is intact: a run that has had checkpoints never
    restarts from step 0.
    """
    faults = [f"{path} is damaged" for path in (run / "checkpoints").glob(".damaged.*")]
    for path in reversed(list_checkpoints(run)):
        try:
            return path, verify(path)
        except DamagedError as error:
            faults.append(str(error))
            if set_aside:
                _set_aside(path)
            print(f"warning: {error}; trying an older checkpoint")
    if faults:
        raise CheckpointError(f"{run} has no intact checkpoint: {'; '.join(faults)}")
    return None


def find_checkpoint(source: Path) -> Path:
    """The newest intact checkpoint of a run, or the checkpoint at this path; CheckpointError."""
    if (source / "manifest.json").exists():
        verify(source)
        return source
    newest = newest_checkpoint(source)
    if newest is None:
        raise CheckpointError(f"{source} is neither a checkpoint nor a run that has one yet")
    return newest[0]


def verify(path: Path) -> dict:
    """The manifest of a checkpoint, after comparing every file with its digest.

    DamagedError names the file that differs. CheckpointError if files cannot be read or the format
    is another version's: such a checkpoint may be good, and must not be set aside.
    """
    manifest_file = path / "manifest.json"
    try:
        if not manifest_file.is_file():  # reading a pipe or a device may never end
            raise FileNotFoundError("it is not a regular file")
        manifest = json.loads(manifest_file.read_bytes())
        if manifest.pop("sha256") != _digest_of(manifest):
            raise DamagedError(f"{manifest_file} is damaged")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}, not {FORMAT}")
        name = path.name.removeprefix("step_")
        if name.isdecimal() and int(name) != manifest["step"]:
            raise DamagedError(f"{path} holds step {manifest['step']}")
        for name, facts in manifest["files"].items():
            file = path / name
            is_whole = file.is_file() and file.stat().st_size == facts["bytes"]
            if not is_whole or file_digest(file) != facts["sha256"]:
                raise DamagedError(f"{path / name} is damaged or missing")
    except (FileNotFoundError, *MALFORMED) as error:
        raise DamagedError(f"{manifest_file} is damaged ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return manifest


def _signed(body: dict) -> bytes:
    return json.dumps({"sha256": _digest_of(body), **body}, indent=1).encode()


def _digest_of(body: dict) -> str:
    return _sha256(json.dumps(body, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
