"""Keeps the Python files of a job as they were when its run began, and imports them instead of files on disk.

Loads no torch. Imported modules keep their path: ``__file__`` names the file in the job's folder, so that data beside
it is found and tracebacks name the user's own files, with the lines that are really run.
"""

from __future__ import annotations

import builtins
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_JOB = re.compile(r"(?P<path>.+?):(?P<name>[^:()]+(\(.*\))?)", re.DOTALL)
_SHARED = frozenset({"calibrate", "simulator", "manager"})
"""Morph's packages whose names a job's own modules may have, too."""
OWN = frozenset({"morph", "__main__"}) | _SHARED
"""Morph's own packages, and its command: never part of a job under these names."""
JOB_PREFIX = "morph_job_"
"""Begins the names of a job's file, and of its modules whose names are those of packages of Morph."""
_MORPH_FOLDER = Path(__file__).resolve().parents[2]
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_OF_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib", "stdlib", "platstdlib"))


def split_job(job_path: str) -> tuple[str, str]:
    """Split ``path/to/file.py:name`` or ``path/to/file.py:name(argument=value)``; both are empty for other texts."""
    match = _JOB.fullmatch(job_path)
    return (match["path"], match["name"]) if match else ("", "")


class JobFiles:
    """A finder for ``sys.meta_path``: modules that Python would import from a job's folder come from here.

    ``folder``: an absolute path, below which ``files`` have their paths. ``growing``: whether modules imported from the
    folder are added if they are missing. Otherwise such an import raises an ImportError: no worker trains on code with
    which the run did not begin.
    """

    def __init__(self, folder: Path, files: Mapping[str, bytes], *, growing: bool = False) -> None:
        self.folder = folder
        self.files = dict(files)
        self.growing = growing
        self._below_folder = os.path.join(folder, "")  # noqa: PTH118
        self._known: dict[str, str | None] = {}
        self._real_folders: dict[str, str] = {}

    def install(self) -> None:
        """Import from these files for as long as this process lives."""
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, self)  # after Python's finders of built-in modules

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Import from these files during the block, and forget them afterwards: another job may use the same names."""
        search = list(sys.path)
        stale = {name: module for name, module in list(sys.modules.items()) if self._has(module)}
        for name in stale:
            del sys.modules[name]
        self.install()
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            sys.path[:] = search
            for name in [name for name, module in tuple(sys.modules.items()) if self._has(module)]:
                del sys.modules[name]
            sys.modules.update(stale)

    def main(self, name: str, path: Path) -> ModuleSpec | None:
        """Return the spec to import the job's file as a module of this name; None if it is not among the files."""
        inside = self.inside(str(path))
        return self._spec(name, inside) if inside in self.files and inside.endswith(".py") else None

    def inside(self, path: str) -> str | None:
        """Return the path below the job's folder; None if it is elsewhere, or installed (in a virtual environment)."""
        if path not in self._known:
            self._known[path] = self._inside(path)
        return self._known[path]

    def _inside(self, path: str) -> str | None:
        absolute = path if path.startswith("/") else str(Path(path).absolute())
        for known in (absolute, self._real(absolute)):
            if known.startswith(self._below_folder) or known == str(self.folder):
                inside = Path(known).relative_to(self.folder)
                return None if is_installed(Path(known), inside) else inside.as_posix().removeprefix(".")
        return None

    def _real(self, path: str) -> str:
        """Return the path without links. Its folder is resolved once: thousands of modules lie in a few hundred
        folders.

        For an installed file only its package is resolved, once per process: the path within a package has no links.
        """
        for installed in _OF_PYTHON:
            if path.startswith(installed):
                package, slash, rest = path[len(installed) :].partition("/")
                return _real_package(installed + package) + slash + rest
        folder, name = os.path.split(path)
        if folder not in self._real_folders:
            self._real_folders[folder] = os.path.realpath(folder)
        real = os.path.join(self._real_folders[folder], name)  # noqa: PTH118
        return os.path.realpath(path) if name == ".." or os.path.islink(real) else real  # noqa: PTH114

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """See ``MetaPathFinder``. Raises ImportError for a module of the job's folder that is not among the files."""
        if fullname.partition(".")[0] in OWN:
            return None
        search, name = list(sys.path if path is None else path), fullname
        if path is None and fullname.startswith(JOB_PREFIX):
            search, name = [str(self.folder)], fullname.removeprefix(JOB_PREFIX)
        for number, entry in enumerate(search):
            file = self._below(entry, name)
            if file is not None:
                before = PathFinder.find_spec(name, search[:number])
                return None if before is not None and before.origin is not None else self._spec(fullname, file)
        spec = PathFinder.find_spec(name, search)
        if name != fullname and spec is not None and spec.origin is None:  # a folder without __init__.py
            space = ModuleSpec(fullname, None, is_package=True)
            space.submodule_search_locations = [str(self.folder / name)]
            return space
        if spec is None or spec.origin is None or (inside := self.inside(spec.origin)) is None:
            return spec
        content = Path(spec.origin).read_bytes()
        if self.growing:
            self.files[inside] = content
        elif self.files.get(inside) != content:
            raise ImportError(f"{spec.origin} is not code with which the run began", name=fullname, path=spec.origin)
        return self._spec(fullname, inside) if isinstance(spec.loader, SourceFileLoader) else spec

    def _below(self, entry: str, fullname: str) -> str | None:
        """Return the path of a module among the files, if Python searches this folder for it."""
        if (folder := self.inside(entry)) is None:
            return None
        base = "/".join(filter(None, (folder, fullname.rpartition(".")[2])))
        return next((file for file in (f"{base}/__init__.py", f"{base}.py") if file in self.files), None)

    def _spec(self, fullname: str, inside: str) -> ModuleSpec | None:
        path = self.folder / inside
        loader = _Loader(fullname, str(path), self.files[inside], self._import if self.shared else None)
        within = [str(path.parent)] if path.name == "__init__.py" else None
        return spec_from_file_location(fullname, path, loader=loader, submodule_search_locations=within)

    @cached_property
    def shared(self) -> frozenset[str]:
        """The names of packages of Morph that the job's own modules have."""
        if self.folder == _MORPH_FOLDER:
            return frozenset()
        there = [*self.files, *(_python_files(self.folder, _SHARED) if self.growing else ())]
        return _SHARED & {name.partition("/")[0].removesuffix(".py") for name in there}

    def _import(self, name: str, *given: Any, **named: Any) -> ModuleType:
        """Import for the job's code (``__import__``): ``import simulator`` gives the job's own file of this name.

        Morph's packages keep their names, because its own code in this process imports them.
        """
        level = named.get("level", given[3] if len(given) > 3 else 0)
        is_own = level == 0 and name.partition(".")[0] in self.shared
        return builtins.__import__(JOB_PREFIX + name if is_own else name, *given, **named)

    def _has(self, module: ModuleType) -> bool:
        file = file_of(module) or _folder_of(module)
        return file is not None and module.__name__.partition(".")[0] not in OWN and self.inside(file) is not None


class _Loader(SourceFileLoader):
    """Runs the given source under the file's own path, and shows its lines in tracebacks.

    ``own_import``: what the source uses as ``__import__``; None: Python's.
    """

    def __init__(
        self, fullname: str, path: str, source: bytes, own_import: Callable[..., ModuleType] | None = None
    ) -> None:
        super().__init__(fullname, path)
        self._source, self._own_import = source, own_import

    def exec_module(self, module: ModuleType) -> None:
        if self._own_import is not None:
            module.__dict__["__builtins__"] = vars(builtins) | {"__import__": self._own_import}
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        if self.path.endswith(".py"):
            lines = decode_source(self._source).splitlines(keepends=True)
            linecache.cache[self.path] = (len(self._source), None, lines, self.path)  # no time: never read again
        code: CodeType = compile(self._source, self.path, "exec", dont_inherit=True)
        return code

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)


def _python_files(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the Python files of modules and packages of these names in a folder, relative to it."""
    for name in names:
        for path in (folder / f"{name}.py", *(folder / name).rglob("*.py")):
            if path.is_file():
                yield path.relative_to(folder).as_posix()


@cache
def _real_package(path: str) -> str:
    return os.path.realpath(path)


def is_installed(path: Path, inside: Path) -> bool:
    """Whether a file is of Python's library or of an installed package; ``inside``: the part of its path tested."""
    return any(path.is_relative_to(folder) for folder in _STANDARD) or not _INSTALLED.isdisjoint(inside.parts)


def file_of(module: ModuleType) -> str | None:
    """Return the file of a module, without triggering modules that load lazily when their attributes are read."""
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # not every entry of sys.modules is a module
        return None
    return file if isinstance(file, str) else None


def _folder_of(module: ModuleType) -> str | None:
    """Return the first folder of a package without ``__init__.py``."""
    try:
        folders = object.__getattribute__(module, "__dict__").get("__path__")
        return next(iter(folders or ()), None)
    except (AttributeError, KeyError, TypeError):  # a folder's package looks for its parent, which may be gone
        return None


def held(path: Path) -> JobFiles | None:
    """Return the files in use that include a job's file; None if there are none."""
    for finder in sys.meta_path:
        if isinstance(finder, JobFiles) and finder.inside(str(path)) in finder.files:
            return finder
    return None


@contextmanager
def imported_once(job_path: str) -> Iterator[None]:
    """During the block, imports from the folder of ``path/to/file.py:name`` return the files as first imported."""
    path = Path(split_job(job_path)[0]).resolve()
    if held(path) is not None or not path.is_file():
        yield
        return
    with JobFiles(path.parent, {path.name: path.read_bytes()}, growing=True).in_use():
        yield
