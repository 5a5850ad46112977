"""A folder where what was made once is kept from one start to the next: machine code above all.

What lies there is run as it is. So a file counts only if nobody but this user can have written it, and if it is whole
and what was put there under its name: it begins with a digest of both. Whatever else is found there is as good as
nothing, and is replaced.
"""

import logging
import os
import stat
import tempfile
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

import platformdirs

_log = logging.getLogger(__name__)
_OTHERS_WRITE = 0o022


def cache_folder(override: str | None) -> Path:
    """Where converted models, memoised digests, compiled kernels and the library's catalogue are kept."""
    return Path(override) if override else Path(platformdirs.user_cache_dir("foreword"))


@dataclass(frozen=True, slots=True)
class Shelf:
    """Bytes by the digest of what they were made from, so whichever shelf they are from, they are the same."""

    folder: Path | None = field(compare=False)
    """None: nothing is kept."""

    def find(self, key: str) -> bytes | None:
        """What was put there under that key; None without any."""
        if self.folder is None:
            return None
        try:
            # Nobody may ever write to the other end of a pipe: opening one must not wait for that.
            with os.fdopen(os.open(self._file(self.folder, key), os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
                status = os.fstat(opened.fileno())
                own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
                if not own or not stat.S_ISREG(status.st_mode):
                    return None
                found = opened.read()
        except OSError:
            return None
        size = sha256().digest_size
        digest, code = found[:size], found[size:]
        return code if _digest(key, code) == digest else None

    def put(self, key: str, code: bytes) -> None:
        """Keep it, in one move. A folder that cannot be written to costs time at the next start, nothing else."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".code-", dir=self.folder)  # for this user alone
            try:
                with os.fdopen(handle, "wb") as opened:
                    opened.write(_digest(key, code) + code)
                Path(name).replace(self._file(self.folder, key))
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _warn(self.folder, error.strerror or str(error))

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        return folder / f"{key}.o"


@cache
def _warn(folder: Path, why: str) -> None:
    """Once, not for each file."""
    _log.warning("nothing is kept in %s: %s", folder, why)


def _digest(key: str, code: bytes) -> bytes:
    return sha256(key.encode() + code).digest()


NOWHERE = Shelf(None)
