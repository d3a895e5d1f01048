"""A results folder: whether it is one of ours, and the only way in which anything in it is written or removed.

    <out>/stability-harness.json     the marker, made with the folder: {"format": 1, "id": "..."}

Only a folder with this marker is written to. Everything in it is reached from a descriptor of `<out>`, name by name,
and no link is followed on the way: what a stranger's folder links to stays as it is. `<out>` itself may be a link. Each
access compares the folder with the one that was opened at first, so one that was moved away or removed is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.config import ConfigError
from harness.storage.json_seal import OTHER, is_sealed, sealed_json

MARKER, FORMAT = "stability-harness.json", 1
MOST_BYTES = 2**30  # of a file that is read as a whole; larger ones are damaged, or no files of ours
MOST_NAMES = 3  # of what is in the way, in an error
_ID = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{32}}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FolderLost(Exception):
    """A results folder, or a part of it, was moved or removed while something was done in it."""


class LinkRefused(ConfigError):
    """Something in a results folder is a link, or not the kind of file that belongs there."""


def no_results(out: Path) -> ConfigError:
    """The error for a folder of which results are asked, and that has none, or does not exist."""
    reason = "holds no results" if os.path.isdir(out) else "is no folder" if os.path.exists(out) else "does not exist"
    return ConfigError(f"out={out}: {reason}; allowed: a folder that a sweep has written")


@dataclass(frozen=True)
class ResultsPath:
    """Something in a results folder, there or not; `folder / "name"` goes on from it.

    Raises FolderLost from everything that touches the disk if the folder is another one than at first, or gone, and
    LinkRefused, a ConfigError, where a link is on the way.
    """

    root: Path
    names: tuple[str, ...] = ()
    inode: tuple[int, int] | None = field(default=None, compare=False)  # device and number of `root`
    id: str = field(default="", compare=False)  # of the results folder, from its marker

    # --- whose folder it is ------------------------------------------------------------------------------------

    @classmethod
    def make(cls, out: Path) -> ResultsPath:
        """The results folder `out`, which is made where it is not there or empty.

        Raises ConfigError, and leaves everything as it was, if there are other things in it, or no right to write.
        """
        out = Path(out)
        check_own(out)
        missing = [path for path in (out, *out.parents) if not path.exists()]
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):  # root may lack that right, too
                pass
            if not (out / MARKER).exists():
                _mark(out)
        except OSError as error:
            for path in missing:
                with contextlib.suppress(OSError):
                    path.rmdir()
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"out={out}: cannot be written to ({reason}); allowed: a writable folder") from None
        return cls.open(out)

    @classmethod
    def at(cls, folder: Path) -> ResultsPath:
        """Any folder, for reading: whether it is a results folder, or still the same one, is not looked at."""
        return cls(Path(os.path.abspath(folder)))

    @classmethod
    def open(cls, out: Path) -> ResultsPath:
        """The results folder `out`. Raises ConfigError if it is none."""
        out = Path(os.path.abspath(out))
        try:
            status = os.stat(out)
            folder = cls(out, (), (status.st_dev, status.st_ino))
            content = (folder / MARKER).read_bytes(most=4096)
            has_seal, marker = is_sealed(content), json.loads(content)
            version, name = marker["format"], marker["id"]
            if not has_seal and marker.keys() != {"format", "id"}:
                raise ValueError(OTHER)
        except (FileNotFoundError, NotADirectoryError, FolderLost):
            raise no_results(out) from None
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"out={out}: its {MARKER} cannot be read ({reason}); allowed: a whole one") from None
        if version != FORMAT:
            allowed = f"format {FORMAT}, or a new one"
            raise ConfigError(f"out={out}: is a folder of format {version!r:.40}; allowed: {allowed}")
        if not isinstance(name, str) or not _ID.fullmatch(name):
            raise ConfigError(f"out={out}: its {MARKER} has no id; allowed: one as a sweep has written it")
        return replace(folder, id=name)

    # --- names -------------------------------------------------------------------------------------------------

    def __truediv__(self, name: str) -> ResultsPath:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name!r}: not the name of a file")
        return replace(self, names=(*self.names, name))

    @property
    def path(self) -> Path:
        """For messages, and for those who only read."""
        return self.root.joinpath(*self.names)

    @property
    def parent(self) -> ResultsPath:
        """The folder in which it is; of the results folder itself, that one."""
        return replace(self, names=self.names[:-1])

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    def __fspath__(self) -> str:
        raise TypeError(f"{self.path}: reached only through the functions of {type(self).__name__}")

    def __str__(self) -> str:
        return str(self.path)

    # --- reading -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of this folder. Raises FileNotFoundError if it is not there."""
        at = self._root()
        try:
            for number, name in enumerate(self.names):
                try:
                    inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
                except NotADirectoryError:
                    raise self._refused(at, number + 1) from None
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)

    def _root(self) -> int:
        try:
            at = os.open(self.root, _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            raise self.lost() from None
        status = os.fstat(at)
        if self.inode not in (None, (status.st_dev, status.st_ino)):
            os.close(at)
            raise self.lost()
        return at

    def lost(self) -> FolderLost:
        """What is raised where the folder, or a part of it that was there, is gone."""
        return FolderLost(
            f"out={self.root}: was moved or removed meanwhile; what is left of it can be gone on with by the same "
            "command, with out= where it is now"
        )

    def _refused(self, at: int, length: int | None = None) -> LinkRefused:
        """What is raised for the last of all names, or of so many, which is in the folder of that descriptor."""
        *_, name = names = self.names[:length]
        try:
            what = f"is a link to {os.readlink(name, dir_fd=at)}"
        except OSError:
            what = "is not what belongs there"
        place = "/".join(names)
        return LinkRefused(f"out={self.root}: its {place} {what}; allowed: files and folders as a sweep makes them")

    def descriptor(self, flags: int) -> int:
        """As os.open. Raises LinkRefused for what is no regular file; a pipe is not waited for."""
        with self.parent.opened() as at:
            try:
                file = os.open(self.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=at)
            except OSError as error:
                status = self.status()
                if status is None or stat.S_ISREG(status.st_mode):
                    error.filename = str(self)
                    raise
                raise self._refused(at) from None
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise self._refused(at)
        return file

    def read_bytes(self, most: int = MOST_BYTES) -> bytes:
        """All of a regular file. Raises OSError as open does, and OSError if it has more than `most` bytes."""
        with os.fdopen(self.descriptor(os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise OSError(f"{self.path}: {size} bytes; at most {most} are read")
            return file.read()

    def status(self) -> os.stat_result | None:
        """Of itself, also if it is a link; None if it is not there."""
        try:
            with self.parent.opened() as at:
                return os.stat(self.name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self.status() is not None

    def entries(self) -> list[ResultsPath]:
        """What is in this folder, by name; nothing if it is not there."""
        try:
            with self.opened() as at:
                return [self / name for name in sorted(os.listdir(at))]
        except FileNotFoundError:
            return []

    # --- writing -----------------------------------------------------------------------------------------------

    def make_folder(self) -> None:
        """This folder, and those above it in the results folder."""
        for length in range(1, len(self.names) + 1):
            folder = replace(self, names=self.names[:length])
            with folder.parent.opened() as at, contextlib.suppress(FileExistsError):
                os.mkdir(folder.name, dir_fd=at)

    def write(self, content: bytes) -> None:
        """A reader sees the old file or the new one, and nobody waits for the disk; see `whole_file`."""
        with self.parent.opened() as at:
            try:
                write_at(at, self.name, content)
            except IsADirectoryError:
                raise self._refused(at) from None

    @contextlib.contextmanager
    def whole_file(self, is_synced: bool) -> Iterator[Path]:
        """A path for a library to write to; once the block ends without an error, what is there takes this name.

        A reader sees the old file or the new one, and a killed writer leaves at most a stray file with a dot before its
        name. `is_synced`: the content is on the disk before it has the name, also after a loss of power.
        """
        with self.parent.opened() as at:
            # Through the descriptor, where the system has such paths: whatever becomes of the folders' names meanwhile.
            folder = Path(f"/proc/self/fd/{at}") if sys.platform == "linux" else self.path.parent
            try:
                with _replacing(at, self.name) as aside:
                    yield folder / aside
                    if is_synced:
                        with open(aside, "rb", opener=_opener(at)) as file:
                            os.fsync(file)
            except IsADirectoryError:
                raise self._refused(at) from None

    def rename(self, name: str) -> None:
        """Another name in the same folder."""
        with self.parent.opened() as at:
            os.rename(self.name, name, src_dir_fd=at, dst_dir_fd=at)

    def unlink(self) -> None:
        """Remove this file, or the link that stands here; nothing if it is not there, or is a folder."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), self.parent.opened() as at:
            os.unlink(self.name, dir_fd=at)

    def remove_tree(self) -> None:
        """Remove this folder and what is in it, as far as that is possible; links in it as links."""
        status = self.status()
        if status is not None and stat.S_ISDIR(status.st_mode):
            with contextlib.suppress(FileNotFoundError), self.parent.opened() as at:
                shutil.rmtree(self.name, ignore_errors=True, dir_fd=at)


def write_at(folder: int, name: str, content: bytes) -> None:
    """A file in the folder of that descriptor: a reader sees the old one or the new one.

    It is not waited for the disk: that would take longer than a step.
    """
    with _replacing(folder, name) as aside, open(aside, "xb", opener=_opener(folder)) as file:
        file.write(content)


def check_own(out: Path) -> None:
    """Raises ConfigError if `out` may not be written to: it is a file, or has other things in it and no marker."""
    try:
        names = sorted(name for name in os.listdir(out) if not _UNFINISHED.fullmatch(name))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(f"out={out}: is a file, or below one; allowed: a folder") from None
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be read ({error.strerror}); allowed: a folder of your own") from None
    if MARKER in names:
        ResultsPath.open(out)
    elif names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        shown = f"{', '.join(names[:MOST_NAMES])}{more}"
        raise ConfigError(
            f"out={out}: is not empty ({shown}) and no results folder of this version, which has a {MARKER}; "
            f"allowed: a new or empty folder, such as out={_free(out)}"
        )


def _free(out: Path) -> Path:
    """A folder in `out` that is not there yet."""
    names = ["sweep", *(f"sweep-{number}" for number in range(2, 100))]
    return next((out / name for name in names if not (out / name).exists()), out / uuid.uuid4().hex)


def _mark(out: Path) -> None:
    """Make the marker of an empty folder; where several do so at once, the first one's stays."""
    name = uuid.uuid4().hex
    aside = out / f".{MARKER}.{name}"
    try:
        aside.write_bytes(sealed_json({"format": FORMAT, "id": name}))
        try:
            os.link(aside, out / MARKER)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(aside, out / MARKER)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _replacing(folder: int, name: str) -> Iterator[str]:
    """A name in that folder to write to; once the block ends without an error, what is there takes this `name`."""
    aside = f".{name}.{uuid.uuid4().hex}"
    try:
        yield aside
        os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=folder)
        raise


def _opener(folder: int) -> Callable[[str, int], int]:
    """For `open`: names are in the folder of that descriptor, and no link is followed."""
    return lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
