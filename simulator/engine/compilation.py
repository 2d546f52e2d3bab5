"""How the simulator's inner loops are compiled: without the interpreter lock, and kept on disk by numba.

Numba caches a file for each loop that Python calls, beside its source or in the folder ``NUMBA_CACHE_DIR``, and trusts
the files that it finds there. So each such folder gets one more file, with the digests of the others and of their
sources. Before numba looks for a loop, files that differ from their digests are removed, and the loop is then compiled
again. The cache is optional: if it cannot be written, loops are compiled in each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numba

_SEAL = "morph-loops.json"
_MOST_LOOPS = 200
"""The most loops that one call may have to compile."""
_njit: Any = numba.njit


def _kept_in(loop: Any, sources: Path) -> Path | None:
    """Let numba keep a loop on disk, and return the folder; None if the loop cannot be kept."""
    if not hasattr(loop, "enable_caching"):  # NUMBA_DISABLE_JIT is set
        return None
    with contextlib.suppress(RuntimeError):  # there is no writable folder
        folder = Path(_njit(cache=True)(loop.py_func).stats.cache_path)
        if _checked(folder, sources):
            loop.enable_caching()
            return folder
    return None


def entry(loop: Any) -> Callable[..., Any]:
    """Return a loop for calls from Python; newly compiled files are sealed, if they could be written.

    Only these loops are kept. Their files contain the helpers that they call; to keep each helper too, numba would
    make machine code of each, which nothing loads.
    """
    sources = Path(getattr(loop, "py_func", loop).__code__.co_filename).parent
    folder = _kept_in(loop, sources)
    if folder is None:
        return loop  # type: ignore[no-any-return]
    num_sealed = 0

    @wraps(loop)
    def call(*args: Any) -> Any:
        nonlocal num_sealed
        answer = _called(loop, args)
        if len(loop.overloads) > num_sealed:
            num_sealed = len(loop.overloads)
            if loop.stats.cache_misses:
                _seal(folder, sources)
        return answer

    return call


def _called(loop: Any, args: tuple[Any, ...]) -> Any:
    """Call a loop; if numba raises because it cannot write its file, call again, as the loop is compiled by then."""
    for _ in range(_MOST_LOOPS):
        with contextlib.suppress(OSError):
            return loop(*args)
    return loop(*args)


@cache
def _checked(folder: Path, sources: Path) -> bool:
    """Remove files that differ from their digests; return whether all of them could be removed."""
    about, sealed = _digest_of_sources(sources), {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        seal = json.loads((folder / _SEAL).read_text())
        if seal.get("about") == about:
            sealed = dict(seal["files"])
    try:
        for path in _files(folder):
            if sealed.get(path.name) != _digest(path) or path.name not in sealed:
                path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _seal(folder: Path, sources: Path) -> None:
    with contextlib.suppress(OSError):
        files = {path.name: _digest(path) for path in _files(folder)}
        content = json.dumps({"about": _digest_of_sources(sources), "files": files})
        handle, partial = tempfile.mkstemp(dir=folder, prefix=f".{_SEAL}")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(content)
            Path(partial).replace(folder / _SEAL)
        except OSError:
            Path(partial).unlink()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in {".nbi", ".nbc"}]


def _digest(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


@cache
def _digest_of_sources(folder: Path) -> str:
    """Return the digest of all sources of a folder: a compiled loop contains functions of other files that it calls."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


compiled: Any = _njit(nogil=True)
"""For functions that allocate arrays."""

inlined: Any = _njit(nogil=True, inline="always")
"""For small helpers of a loop."""


def _without_reference_counts() -> Any:
    """Return the decorator for loops that allocate nothing, without reference counts, which took 2/3 of their time."""
    try:
        return _njit(nogil=True, _nrt=False)
    except (KeyError, NameError):  # an option of numba that its documentation does not promise
        return compiled


loop: Any = _without_reference_counts()
