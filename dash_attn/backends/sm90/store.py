"""A folder of machine code that this user alone can have written.

What stands in a file is executed. So a file counts only if the folder and the file belong to this user, nobody else can
write to them, the folder is in no place where every user can rename it, and the file's content has the checksum in its
name. Files appear by renaming, so processes can share a folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)
SUFFIX = ".o"
SCRATCH = "new-"  # folders in which files are written before they get their name
POLL_SECONDS = 0.05
STALE_SECONDS = 3600.0  # what a killed process left is removed after this long
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A folder or file that must not be used; the message says why."""


@dataclass(frozen=True)
class Store:
    """Files by key in a private folder, at most `most_bytes` of them; the longest unused go first."""

    folder: Path
    most_bytes: int = 2**30
    wait_seconds: float = 300.0  # for another process that makes the same file

    @staticmethod
    def at(folder: Path) -> Store:
        """Make the folder if it is not there. Untrusted or OSError if it cannot be used."""
        for path in (*reversed(folder.parents), folder):
            if not os.path.lexists(path):
                path.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            raise Untrusted(f"{folder} is a link or a file, not a folder")
        require_own(folder, facts)
        place = folder.resolve()  # links on the way may change later
        for parent in place.parents:
            require_fixed(parent)
        return Store(place)

    def find(self, key: str) -> Path | None:
        """The file of a key. One that is damaged or not this user's is removed, with a warning."""
        for path in sorted(self.folder.glob(f"{key}-*{SUFFIX}")):
            try:
                require_whole(path)
            except (OSError, Untrusted) as error:
                log.warning("%s; compiling again", error)
                discard(path)
                continue
            with suppress(OSError):
                os.utime(path)
            return path
        return None

    def keep(self, key: str, write: Callable[[Path], None]) -> None:
        """Let `write` make a file, and give it its name once it is whole and on the disk."""
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self.folder) as scratch:
            made = Path(scratch) / f"kernel{SUFFIX}"
            write(made)
            made.chmod(0o600)
            sync(made)
            path = self.folder / f"{key}-{hashlib.sha256(made.read_bytes()).hexdigest()}{SUFFIX}"
            os.replace(made, path)
        sync(self.folder)
        self.trim(path)

    def trim(self, last: Path) -> None:
        """Remove what killed processes left, and old files until the rest is small enough. `last` stays."""
        now = time.time()
        for path in (*self.folder.glob(f"{SCRATCH}*"), *self.folder.glob("*.lock")):
            if age(path, now) > STALE_SECONDS:
                discard(path)
        files = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process may have removed it
                files.append((path != last, path.lstat().st_mtime, path.lstat().st_size, path))
        left = sum(size for _, _, size, _ in files)
        for removable, _, size, path in sorted(files):
            if left > self.most_bytes and removable:
                discard(path)
                left -= size

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """One process at a time. One that waits too long, or cannot lock, goes on without the lock."""
        path = self.folder / f"{key}.lock"
        try:
            handle = lock(path, self.wait_seconds)
        except OSError as error:
            log.warning("cannot lock %s (%s); going on without", path, error)
            handle = None
        try:
            yield
        finally:
            if handle is not None:
                unlock(path, handle)


# ---- whom to trust -----------------------------------------------------------------------------------------


def require_own(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to another user")
    if facts.st_mode & OTHERS_WRITE:
        raise Untrusted(f"{path} can be written by others: chmod go-w {path}")


def require_fixed(parent: Path) -> None:
    """Untrusted if every user can rename what is in this folder. In a folder like /tmp, which is sticky, they cannot.

    The group of a parent is trusted: with the usual umask of 002 each new folder is writable for the user's own group.
    """
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise Untrusted(
            f"others can rename what is in {parent}: chmod o-w {parent}, or name another folder in DASH_ATTN_CACHE_DIR"
        )


def require_whole(path: Path) -> None:
    """Untrusted if this is not a plain file of this user with the content that its name promises."""
    if path.is_symlink():
        raise Untrusted(f"{path} is a link")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise Untrusted(f"{path} is no plain file")
        require_own(path, facts)
        checksum = hashlib.sha256(file.read()).hexdigest()
    if not path.stem.endswith(f"-{checksum}"):
        raise Untrusted(f"{path} is damaged")


def discard(path: Path) -> None:
    """Remove a file, a link or a folder, if that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def age(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except OSError:
        return 0.0


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- one process at a time ---------------------------------------------------------------------------------


def lock(path: Path, seconds: float) -> int | None:
    """A handle that holds the lock, or None when the time is over. The lock ends with the process that holds it."""
    import fcntl  # not on every system that this package runs on; those have no kernels to keep

    deadline = time.monotonic() + seconds
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before removes the file. Whoever opened it earlier has locked a file without a name.
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > deadline:
            log.warning("waited %.0f s for another process that holds %s; going on without", seconds, path)
            return None
        time.sleep(POLL_SECONDS)


def unlock(path: Path, handle: int) -> None:
    import fcntl

    discard(path)
    fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a child process may have the handle as well
    os.close(handle)
