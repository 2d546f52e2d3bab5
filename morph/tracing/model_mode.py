"""Runs the cut model's sections under a dispatch mode that knows which section made each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from morph.cutting import CutModel, Section
from morph.cutting.sections.section import Constants
from morph.tracing.findings import SourceLocation
from morph.tracing.operations import influences_of, name_of
from morph.tracing.recorder import Recorder
from morph.tracing.source_lines import recorded
from morph.tracing.storages import Known, Storages, Tag

_BATCH = "batch"


class ModelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the forward of sections; the backward mixes the same sections."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._storages = Storages()
        self._section = 0
        self._node: Node | None = None
        self._noted: set[tuple[int, Node | None, int]] = set()

    def know(self, model: CutModel, parameters: Mapping[str, Tensor]) -> None:
        """Give every parameter and written buffer to the first section that reads it."""
        for unit in model.units:
            for name in unit.names:
                self._storages.own(parameters[name], f"s{unit.sections[0]}", holds_data=True, label=name)

    def know_batch(self, batch: Mapping[str, Tensor]) -> None:
        """Treat the batch as loaded where it is needed."""
        for tensor in batch.values():
            self._storages.see(tensor, outside=False).label = _BATCH

    def follow(self, section: Section, constants: Mapping[str, Tensor]) -> Section:
        """Return the section with its operations watched, and with these constants."""
        graph = section.code

        def code(*arguments: Tensor) -> tuple[Tensor, ...]:
            run = _NodeByNode(graph, self).run if isinstance(graph, GraphModule) else graph
            with self._inside(section.index):
                outputs: tuple[Tensor, ...] = run(*arguments)
            return outputs

        return replace(section, code=code, constant_values=Constants(constants), _on_device={})

    @contextmanager
    def _inside(self, section: int) -> Iterator[None]:
        self._section, self._node = section, None
        with self:
            yield

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Name the node whose operations run."""
        outer, self._node = self._node, node
        yield
        self._node = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; inputs from other sections are findings, and its results belong to this section."""
        options = kwargs or {}
        result = func(*args, **options)
        for influence in influences_of(func, args, options, result):
            for tensor in influence.reads:
                self._read(func, tensor)
            for tensor in influence.results:
                if self._storages.find(tensor) is None:
                    known = self._storages.see(tensor, outside=False)
                    known.tag = Tag(frozenset((f"s{self._section}",)))
        return result

    def _read(self, func: Any, tensor: Tensor) -> None:
        known = self._storages.see(tensor, outside=True)
        here = f"s{self._section}"
        if known.label == _BATCH:
            return
        if known.tag is None:
            if known.read_at is None:
                known.read_at = self._operation(func)
            known.users.add(here)
        elif here not in known.tag.units:
            self._crossing(func, known, tensor)

    def _crossing(self, func: Any, known: Known, tensor: Tensor) -> None:
        assert known.tag is not None
        occurrence = (self._section, self._node, known.reference.cdata)
        if occurrence in self._noted:  # one operation of the user may be several operations of torch
            return
        self._noted.add(occurrence)
        (home,) = known.tag.units
        operator, place = self._operation(func)
        kind: Any = "tied" if known.owner else "activation"
        record = self._recorder.add(kind, "model", operator, place, (home, f"s{self._section}"), (tensor,))
        record.handled = True
        name = known.label if known.owner else str(known.reference.cdata)
        record.names[name] = tensor.untyped_storage().nbytes()
        passed = self._section - int(home[1:]) - 1
        if not known.owner and passed > int(record.detail or 0):
            record.detail = str(passed)

    def _operation(self, func: Any) -> tuple[str, SourceLocation]:
        if self._node is None:
            return name_of(func), SourceLocation(None, None, f"section s{self._section}")
        target = str(self._node.target).removeprefix("aten.").partition(".")[0]
        return target, recorded(self._node.meta.get("stack_trace"))

    def finish(self) -> None:
        """Record constants that several sections read."""
        for known in self._storages.entries():
            if known.read_at is not None and len(known.users) > 1:
                operator, place = known.read_at
                self._recorder.add("constant", "model", operator, place, known.users).handled = True


class _NodeByNode(Interpreter):
    def __init__(self, module: GraphModule, mode: ModelMode) -> None:
        super().__init__(module)
        self._mode = mode

    def run_node(self, n: Node) -> Any:
        with self._mode.at(n):
            return super().run_node(n)
