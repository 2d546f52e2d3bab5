"""How the simulator's inner loops are compiled: without the interpreter lock, and kept on disk by numba.

Numba caches a file for each loop beside its source, or in the folder ``NUMBA_CACHE_DIR``, and trusts the files that it
finds there. So each such folder gets one more file, with the digests of the others and of their sources. Before numba
looks for a loop, files that differ from their digests are removed, and the loop is then compiled again. The cache is
optional: if it cannot be written, loops are compiled in each process.
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


def _kept(**options: bool) -> Callable[[Any], Any]:
    """Return a decorator: ``numba.njit`` with these options, its files checked."""

    def decorate(function: Any) -> Any:
        with contextlib.suppress(RuntimeError):  # there is no writable folder
            made = _njit(cache=True, nogil=True, **options)(function)
            if not hasattr(made, "stats"):  # NUMBA_DISABLE_JIT is set
                return made
            if _checked(Path(made.stats.cache_path), Path(function.__code__.co_filename).parent):
                return made
        return _njit(nogil=True, **options)(function)

    return decorate


def entry(loop: Any) -> Callable[..., Any]:
    """Return a loop for calls from Python; newly compiled files are sealed, if they could be written."""
    kept_in = loop.stats.cache_path if hasattr(loop, "stats") else None
    if kept_in is None:
        return loop  # type: ignore[no-any-return]
    folder, sources = Path(kept_in), Path(loop.__wrapped__.__code__.co_filename).parent
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
    """Store the digests of a folder's files."""
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
    """Return a file's digest; None where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


@cache
def _digest_of_sources(folder: Path) -> str:
    """Return the digest of all sources of a folder: a compiled loop contains functions of other files that it calls."""
    found = hashlib.sha256(numba.__version__.encode())
    for path in sorted(folder.glob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


compiled: Any = _kept()
"""For functions that allocate arrays."""

inlined: Any = _kept(inline="always")  # type: ignore[arg-type]
"""For small helpers of a loop."""


def _without_reference_counts() -> Any:
    """Return the decorator for loops that allocate nothing, without reference counts, which took 2/3 of their time."""
    try:
        _njit(_nrt=False)
    except (KeyError, NameError):  # an option of numba that its documentation does not promise
        return compiled
    return _kept(_nrt=False)


loop: Any = _without_reference_counts()
