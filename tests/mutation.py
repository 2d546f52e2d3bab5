"""Which tests notice that a module was changed: ``python -m tests.mutation MODULE [OPTIONS] -- PYTEST-ARGUMENTS``.

A mutant is a module with one small change inside a function: another comparison, ``and`` for ``or``, a condition turned
round, a number one larger, a statement left out. The tests run once as they are, which also shows which of them run
which line. Then each mutant runs, in a fork of that process, the tests that run its line. A test that fails has killed
it. Tests whose mutants are all killed by others can go, as far as this module is concerned: ``--without`` asks this of
the tests in a file, one name a line, with mutants of lines that they run. Mutants that no test kills show what is not
tested, or what makes no difference.

Code outside of functions, such as defaults of fields, is not mutated, and nothing that numba compiles.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import multiprocessing
import os
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}
FORKS = multiprocessing.get_context("fork")
PYTEST = ("-q", "--tb=no", "-p", "no:cacheprovider", "--capture=no")
LEAST_S = 10.0
"""A mutant's tests may take this long, and ten times as long as without it, before it counts as killed; of processor
time, which a busy machine does not lengthen, only as long as the tests that were watched without it took by the clock.
"""


@dataclass(frozen=True)
class Mutant:
    """One change of a module: its statement's lines, what is changed, and how: ``fields`` of a node of the tree."""

    lines: range
    what: str
    tree: ast.AST
    node: ast.AST
    fields: dict[str, Any]

    def code(self) -> CodeType:
        """Return the changed module. The tree, which all mutants of the module share, is changed for good."""
        self.node.__dict__.update(self.fields)
        return compile(ast.fix_missing_locations(self.tree), "a mutant", "exec")  # type: ignore[arg-type]


def mutants_of(path: Path) -> list[Mutant]:
    """Return every mutant of the functions of a file, in the order of lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    changes = {id(node): (node, lines) for function in functions for node, lines in _code_of(function.body, range(0))}
    found = [
        Mutant(lines, f"{what} in {ast.unparse(node)}".splitlines()[0][:100], tree, node, fields)
        for node, lines in changes.values()
        for what, fields in _changes(node)
    ]
    return sorted(found, key=lambda mutant: mutant.lines.start)


def _code_of(value: object, lines: range) -> Iterator[tuple[ast.AST, range]]:
    """Return nodes that decide something, without annotations and texts, and the lines of the statement of each."""
    for node in value if isinstance(value, list) else [value]:
        if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        of_node = lines
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            of_node = range(node.lineno, max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0) + 1)
        yield node, of_node
        for name, inner in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "args") or isinstance(node, ast.Call):
                yield from _code_of(inner, of_node)


def _changes(node: ast.AST) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return what can be changed about a node, and the fields that it then has."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            yield "compared", {"ops": [SWAPPED[type(operator)]()]}
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in SWAPPED:
            yield "combined", {"op": SWAPPED[type(operator)]()}
        case ast.Constant(value=bool(value)):
            yield "constant", {"value": not value}
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", {"value": value + 1}
        case ast.Expr(value=ast.Call() as call):
            yield "left out", {"value": ast.copy_location(ast.Constant(value=None), call)}
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare):
        test = node.test
        turned = test.operand if isinstance(test, ast.UnaryOp) else ast.UnaryOp(op=ast.Not(), operand=test)
        yield "turned round", {"test": ast.copy_location(turned, test)}


def functions_of(path: str) -> list[FunctionType]:
    """Return every function that was loaded from a file, wherever it is known."""
    gc.unfreeze()
    # asked for its class, an object that torch has deprecated would warn
    found = [one for one in gc.get_objects() if type(one) is FunctionType and one.__code__.co_filename == path]
    gc.freeze()
    return found


def put_in(code: CodeType, functions: Iterable[FunctionType]) -> bool:
    """Give functions the code of the changed module; return whether any changed."""
    changed = False
    new = {(one.co_qualname, one.co_firstlineno): one for one in _inner(code)}
    for function in functions:
        old = function.__code__
        other = new.get((old.co_qualname, old.co_firstlineno))
        if other is not None and other != old and other.co_freevars == old.co_freevars:
            function.__code__, changed = other, True
    return changed


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


class Trial:
    """A plugin for pytest: runs the tests once as they are, then ``then`` while they are still collected.

    It knows which tests ran which lines of some files, for how long, and which failed.
    """

    def __init__(self, paths: Iterable[str], then: Callable[[Trial], None]) -> None:
        self._paths, self._then, self._test = set(paths), then, ""
        self.lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = session.items
        self.run({item.nodeid for item in session.items})
        if self.failed:
            raise SystemExit(f"tests fail without a change: {self.failed}")
        self._paths.clear()
        self._then(self)
        return True

    def run(self, chosen: Collection[str], most_kills: int | None = None) -> None:
        """Run tests, those that took least first, until ``most_kills`` functions have failed."""
        items = [item for item in self._items if item.nodeid in chosen]
        items.sort(key=lambda item: self.seconds[item.nodeid])
        for item, following in zip_longest(items, items[1:]):
            if most_kills is None or len(set(map(function_of, self.failed))) < most_kills:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        self._test = item.nodeid
        if self._paths:
            sys.settrace(self._entered)
        try:
            return (yield)
        finally:
            sys.settrace(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def _entered(self, frame: FrameType, _event: str, _value: object) -> Callable[..., object] | None:
        return self._ran if frame.f_code.co_filename in self._paths else None

    def _ran(self, frame: FrameType, _event: str, _value: object) -> Callable[..., object]:
        self.lines[frame.f_code.co_filename, frame.f_lineno].add(self._test)
        return self._ran


def killers(
    mutant: Mutant, functions: list[FunctionType], trial: Trial, chosen: Collection[str], most_kills: int | None
) -> list[str] | None:
    """Return the tests that fail with a mutant, or ``timeout``; None: it changes no function of the loaded module."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_try, args=(theirs, mutant, functions, trial, chosen, most_kills))
    process.start()
    theirs.close()
    limit_s = LEAST_S + 10 * sum(trial.seconds[test] for test in chosen)
    assert process.pid is not None
    most_s = int(LEAST_S + limit_s / 10)
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (most_s, most_s))
    try:
        found: list[str] | None = ours.recv() if ours.poll(limit_s) else ["timeout"]
    except EOFError:
        found = ["the process ended"]
    process.kill()
    process.join()
    return found


def _try(
    told: Connection,
    mutant: Mutant,
    functions: list[FunctionType],
    trial: Trial,
    chosen: Collection[str],
    most_kills: int | None,
) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if not put_in(mutant.code(), functions):
        told.send(None)
        return
    trial.run(chosen, most_kills)
    told.send(sorted(set(map(function_of, trial.failed))))
    os._exit(0)


def function_of(test: str) -> str:
    """Return the name of a test without its parameters."""
    return test.partition("[")[0]


def not_needed(killed: Mapping[str, Iterable[str]], tests: Iterable[str]) -> list[str]:
    """Return tests that can all go together: each mutant that is killed at all is killed by one that stays.

    A test that kills few goes first. Tests of ``killed``'s values that are not in ``tests`` stay.
    """
    by_mutant = {mutant: set(found) for mutant, found in killed.items() if found}
    num_kills = {test: sum(test in found for found in by_mutant.values()) for test in tests}
    gone = []
    for test in sorted(num_kills, key=lambda test: (num_kills[test], test)):
        if all(found != {test} for found in by_mutant.values()):
            gone.append(test)
            for found in by_mutant.values():
                found.discard(test)
    return gone


def main() -> None:
    """Print each mutant and what kills it, the score, and the tests whose mutants are all killed by others."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="+", help="modules to change, such as manager.controller.decide")
    parser.add_argument("--most", type=int, default=10**6, help="try this many of each module, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=1, help="run a mutant's tests until so many functions fail")
    parser.add_argument("--all", dest="kills", action="store_const", const=None, help="run all tests of a mutant")
    parser.add_argument("--without", type=Path, help="a list of tests: which of their kills others make too")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--json", type=Path, help="write what kills each mutant here")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, arguments = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    paths = {name: str(importlib.import_module(name).__file__) for name in options.modules}
    without = set(options.without.read_text(encoding="utf-8").split()) if options.without else set()
    killed: dict[str, list[str]] = {}

    def try_all(trial: Trial) -> None:
        for name, path in paths.items():
            killed.update(_of_module(name, path, options, without, trial))
            if options.json:
                options.json.write_text(json.dumps(killed, indent=1), encoding="utf-8")

    trial = Trial(paths.values(), try_all)
    if (code := pytest.main([*PYTEST, *arguments], plugins=[trial])) != pytest.ExitCode.OK:
        sys.exit(int(code))
    if without:
        alone = {told: found for told, found in killed.items() if set(found) <= without}
        print(f"\n{len(killed)} mutants are killed with these tests, {len(killed) - len(alone)} without; not:")
        print(*(f"  {told}: {', '.join(found)}" for told, found in alone.items()), sep="\n")
        num_kills = Counter(test for found in killed.values() for test in found)
        gone = [f"{test}: {num_kills[test]} mutants" for test in not_needed(alone, without) if num_kills[test]]
        print("\nall mutants of these tests are killed without them:", *gone, sep="\n  ")
    else:
        survivors = [told for told, found in killed.items() if not found]
        print(f"\n{len(killed) - len(survivors)} of {len(killed)} mutants are killed; not:", *survivors, sep="\n  ")
        if options.kills != 1:
            tests = set(map(function_of, trial.seconds))
            gone, num = not_needed(killed, tests), len(tests)
            print(f"\n{len(gone)} of {num} tests kill nothing that the others do not kill:", *gone, sep="\n  ")


def _of_module(
    name: str, path: str, options: argparse.Namespace, without: set[str], trial: Trial
) -> dict[str, list[str]]:
    def run_by(mutant: Mutant) -> set[str]:
        return {test for line in mutant.lines for test in trial.lines[path, line]}

    def tried(mutant: Mutant) -> list[str] | None:
        if not without:
            chosen = run_by(mutant)
            return killers(mutant, functions, trial, chosen, options.kills) if chosen else []
        left_out = {test for test in run_by(mutant) if function_of(test) in without}
        others = run_by(mutant) - left_out
        if found := killers(mutant, functions, trial, left_out, None):
            if not without & set(found):  # they hang: any of them may be the one that does
                found = sorted(set(map(function_of, left_out)))
            found += (killers(mutant, functions, trial, others, 1) or []) if others else []
        return found or None

    mutants, functions = mutants_of(Path(path)), functions_of(path)
    if without:
        mutants = [mutant for mutant in mutants if without & set(map(function_of, run_by(mutant)))]
    if len(mutants) > options.most:
        mutants = sorted(
            random.Random(options.seed).sample(mutants, options.most), key=lambda mutant: mutant.lines.start
        )
    found = {}
    began_s = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, killing in zip(mutants, pool.map(tried, mutants), strict=True):
            if killing is not None:
                unseen = "" if run_by(mutant) else " (no test runs it)"
                told = f"{name}:{mutant.lines.start} {mutant.what}{unseen}"
                found[f"{told} #{len(found)}"] = killing
                print(f"{told}: {', '.join(killing[:3]) or 'NOT KILLED'}", flush=True)
    print(f"{name}: {len(found)} mutants in {time.monotonic() - began_s:.0f} s")
    return found


if __name__ == "__main__":
    main()
