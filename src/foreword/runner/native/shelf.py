"""A folder where machine code is kept from one start to the next.

What lies there is run as it is. So a file counts only if nobody but this user can have written it, and if it is whole:
it begins with the digest of the rest. Whatever else is found there is as good as nothing, and is replaced.
"""

import logging
import os
import tempfile
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

_log = logging.getLogger(__name__)
_OTHERS_WRITE = 0o022


@dataclass(frozen=True, slots=True)
class Shelf:
    """Machine code by the digest of what it was made from, so whichever shelf it is from, it is the same."""

    folder: Path | None = field(compare=False)
    """None: nothing is kept."""

    def find(self, key: str) -> bytes | None:
        """What was put there under that key; None without any."""
        if self.folder is None:
            return None
        try:
            with self._file(self.folder, key).open("rb") as opened:
                status = os.fstat(opened.fileno())
                if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
                    return None
                found = opened.read()
        except OSError:
            return None
        size = sha256().digest_size
        digest, code = found[:size], found[size:]
        return code if sha256(code).digest() == digest else None

    def put(self, key: str, code: bytes) -> None:
        """Keep it, in one move. A folder that cannot be written to costs time at the next start, nothing else."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".code-", dir=self.folder)  # for this user alone
            with os.fdopen(handle, "wb") as opened:
                opened.write(sha256(code).digest() + code)
            Path(name).replace(self._file(self.folder, key))
        except OSError as error:
            _log.warning("machine code is not kept: %s", error)

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        return folder / f"{key}.o"


NOWHERE = Shelf(None)
