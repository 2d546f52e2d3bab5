"""Takes a snapshot of a job's files: they are collected, packed, and imported instead of the files on disk."""

from __future__ import annotations

import ast
import atexit
import hashlib
import io
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path, PurePosixPath

from morph.contract.errors import ConfigError, JobError
from morph.contract.files import packed
from morph.contract.messages import JobCode
from morph.jobs.files import OWN, JobFiles, file_of, is_installed, split_job

MAX_BYTES = 32 * 1024 * 1024
"""The limit, in bytes, of all files together: they are sent to each worker with its setup."""
_LEFT_OUT = {"__pycache__", ".git"}
_SECRETS = ".env"
_Name = tuple[str, ...]


def collect(job_path: str, files: Sequence[str] = (), source: str = "") -> JobFiles:
    """Collect the file that defines a job, the files that it imports from its folder, and other named files.

    No file is run. Imports under computed names are added when the job is checked. ``job_path``: path/to/file.py:name;
    if there is no such file, the result is empty. ``files``: files and folders, relative to that file's folder.
    """
    code = Path(split_job(job_path)[0]).resolve()
    collected = JobFiles(code.parent, {}, growing=True)
    if not code.is_file():
        return collected
    paths = [*_imported(code, collected), *(path for given in files for path in _files(code.parent, given, source))]
    collected.files.update({path.relative_to(code.parent).as_posix(): path.read_bytes() for path in paths})
    return collected


def pack(job_path: str, found: JobFiles, *, unpack: bool = False) -> JobCode:
    """Pack collected files; the same files give the same bytes.

    ``unpack``: whether workers write the files to a folder, because they do not see this machine's folders.
    """
    path, name = split_job(job_path)
    files, num_bytes = dict(sorted(found.files.items())), 0
    for inside, content in files.items():
        num_bytes += len(content)
        if num_bytes > MAX_BYTES:
            raise ConfigError(
                "the files of the job's code are too long together",
                source=str(found.folder),
                value=inside,
                allowed=f"at most {MAX_BYTES} bytes; keep data elsewhere",
            )
    archive = packed(files)
    return JobCode(
        job_path=f"{Path(path).name}:{name}",
        folder=str(found.folder),
        sha256=hashlib.sha256(archive).hexdigest(),
        archive=archive,
        unpack=unpack,
    )


def files_of(code: JobCode) -> dict[str, bytes]:
    """Return the files by their path below the job's folder."""
    if hashlib.sha256(code.archive).hexdigest() != code.sha256:
        raise JobError("is not the code that the run began with: its digest differs", source=code.job_path)
    with zipfile.ZipFile(io.BytesIO(code.archive)) as archive:
        for name in archive.namelist():
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts:
                raise JobError("would be written outside the job's folder", source=name)
        return {name: archive.read(name) for name in archive.namelist()}


def use(code: JobCode) -> str:
    """From now on, import the job from these files; return the job's path.

    A worker on the manager's machine finds data beside the files, in their original folder. Elsewhere the files are
    written into a new folder that only this user can read, and that is removed at exit.
    """
    files, folder = files_of(code), Path(code.folder)
    if code.unpack:
        folder = Path(tempfile.mkdtemp(prefix="morph-job-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    JobFiles(folder, files).install()
    return str(folder / code.job_path)


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file in hexadecimal, by its name."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}


def changed(began: Mapping[str, str], now: JobFiles) -> list[str]:
    """Return the names of files that ``collect`` found now and whose digests differ from those at the beginning."""
    names = sorted(began.keys() | now.files.keys())
    missing = {name: now.folder / name for name in names if name not in now.files}
    there = digests(now.files | {name: path.read_bytes() for name, path in missing.items() if path.is_file()})
    return [name for name in names if there.get(name) != began.get(name)]


def from_elsewhere(files: JobFiles, before: set[str]) -> list[str]:
    """Return files of packages imported since ``before`` that are neither installed nor among the job's files."""
    elsewhere: dict[str, Path] = {}
    for name, module in list(sys.modules.items()):
        top, named = name.partition(".")[0], file_of(module)
        if name in before or top in OWN or named is None or files.inside(named) in files.files:
            continue
        file = Path(named)
        if file.is_file() and not is_installed(file, file):
            package = sys.modules.get(top)
            elsewhere[top] = Path((package and file_of(package)) or file)
    return sorted(map(str, elsewhere.values()))


def _imported(code: Path, found: JobFiles) -> set[Path]:
    """Return the files of the job's folder that its imports reach, anywhere in the code; none of them is run."""
    elsewhere = [entry for entry in sys.path if found.inside(entry) is None]
    files: set[Path] = {code}
    to_visit: list[tuple[Path, _Name]] = [(code, ())]
    while to_visit:
        file, package = to_visit.pop()
        for name in {
            name for name in imported_names(file.read_bytes(), package) if not _is_elsewhere(name[0], elsewhere, found)
        }:
            for led_to, its_package in _leads_to(found.folder, name):
                if led_to not in files:
                    files.add(led_to)
                    to_visit.append((led_to, its_package))
    return files


def imported_names(source: bytes, package: _Name = ()) -> Iterator[_Name]:
    """Yield the full names that a file of this package imports: of modules, and names that may be modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # an import reports the error; extensions have no source
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: max(0, len(package) + 1 - node.level)] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def _leads_to(folder: Path, name: _Name) -> Iterator[tuple[Path, _Name]]:
    """Yield the files that an import of this name runs, in order, each with its package."""
    for length in range(1, len(name) + 1):
        base = folder.joinpath(*name[:length])
        for file, package in (
            (base / "__init__.py", name[:length]),
            *((base.with_name(base.name + suffix), name[: length - 1]) for suffix in (".py", *EXTENSION_SUFFIXES)),
        ):
            if file.is_file():
                yield file, package
                break


def _is_elsewhere(top: str, search: list[str], found: JobFiles) -> bool:
    """Whether Python finds this module outside the job's folder, which it searches last."""
    if top in sys.stdlib_module_names or top in OWN:
        return top not in found.shared
    spec = PathFinder.find_spec(top, search)
    return spec is not None and spec.origin is not None


def _files(folder: Path, given: str, source: str) -> Iterator[Path]:
    place = folder / given
    for part in (place, *place.parents):
        if part == folder:
            break
        if part.is_symlink():
            raise _error("is a link", given, source, "a file or folder")
    if not place.exists():
        raise _error("there is no such file or folder", given, source, f"a file or folder in {folder}")
    for file in [place] if place.is_file() else sorted(place.rglob("*")):
        if _LEFT_OUT.intersection(file.parts) or (file != place and file.name.startswith(_SECRETS)):
            continue
        mode = file.lstat().st_mode
        if stat.S_ISREG(mode):
            yield file
        elif not stat.S_ISDIR(mode):
            raise _error("holds a link, or something that is not a file", given, source, "files and folders")


def _error(problem: str, given: str, source: str, allowed: str) -> ConfigError:
    return ConfigError(problem, source=source, field="vms.environment.files", value=given, allowed=allowed)
