"""Help that fits a screen of 40 lines and 80 columns.

A command's help begins with one sentence and an example; its options stand under titles. If the whole text is longer
than a screen, only the first sentence of each option and the names of the settings of ``--set`` are shown;
``docs/reference/command-line.md`` has the rest.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from morph.contract.errors import InputError

MAX_LINES, MAX_COLUMNS = 40, 80
FEW_OPTIONS = 12
"""The largest number of options that need no titles."""
TITLES = {
    "Job": "--profile --cluster --steps --epochs --policy --objective --until --set --run-dir --checkpoint-url",
    "GPUs": "--gpus --nodes --pool --gpus-per-node --node-type --memory-gib --hosts",
    "Shape": "-P -D --plan --m --schedule --recompute --no-recompute --batch-size --slow --jitter-seed --tolerance",
    "VMs": "--trace --trace-speed --price --budget --on-demand-price --gpus-per-vm --node-types",
    "Drawn traces": "--vms --hours --like --model --seeds --seed",
    "Output": "--plain --verbose --log-format --page --timeline-step --json --output --csv --parquet --png --jobs",
    "After an interruption": "--if-changed --forever --take-over",
}
_TITLE_OF = {option: title for title, options in TITLES.items() for option in options.split()}
_SETTINGS = "Settings of --set:"
_TYPES = {"int": "N", "float": "X", "str": "TEXT", "path": "PATH"}
Rows = list[tuple[str, str]]
Command = Any
"""A command or a group of Typer; its classes for them come and go with Click's."""
CommandPlace = str | Mapping[str, str]


class HelpGroup(TyperGroup):
    """The root command: its help lists each command in a line, under its title; a command is imported when it is used.

    ``table``: the place of each command, ``module:name``, by title and name; of a group whose commands are in several
    places, the places by name, with the group itself under the empty name.
    """

    table: ClassVar[Mapping[str, Mapping[str, CommandPlace]]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        places = {name: (title, place) for title, of in self.table.items() for name, place in of.items()}
        self.commands = Found(places) if places else self.commands

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        summary, example, _, _ = _parts(self.help or "")
        usage = f"Usage: {ctx.command_path} [--version] COMMAND [OPTIONS]"
        lines = [usage, "", *_wrapped(summary, "  "), "", *textwrap.indent(example, "  ").splitlines(), ""]
        commands = {name: self.get_command(ctx, name) for name in self.commands}
        shown = {name: command for name, command in commands.items() if command is not None and not command.hidden}
        title_of = {name: str(getattr(command, "rich_help_panel", "") or "") for name, command in shown.items()}
        order = list(dict.fromkeys(title_of.values()))
        titles = sorted(title_of.values(), key=order.index)
        shown = {name: shown[name] for name in sorted(shown, key=lambda name: order.index(title_of[name]))}
        left, middle = max(map(len, titles), default=0), max(map(len, shown), default=0)
        last = ""
        for title, (name, command) in zip(titles, shown.items(), strict=True):
            text = re.split(r"[.:;]\s|\.$", " ".join((command.help or "").split()))[0]
            lines.append(f"  {title if title != last else '':<{left}}  {name:<{middle}}  {text}")
            last = title
        formatter.write("\n".join(lines) + "\n")


class Found(dict[str, Command]):
    """Commands by name, each of which is imported when it is looked up."""

    def __init__(self, places: Mapping[str, tuple[str, CommandPlace]]) -> None:
        super().__init__(dict.fromkeys(places))
        self._places = dict(places)

    def __getitem__(self, name: str) -> Command:
        if name in self._places:
            title, place = self._places.pop(name)
            self[name] = _imported(name, place)
            self[name].rich_help_panel = title
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it is what get is made of)

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        """Import all that are left."""
        return [(name, self[name]) for name in self]


class MorphCommand(TyperCommand):
    """A command whose help fits a screen. Empty values are refused; of an option given twice, the last counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; InputError names one whose value is empty."""
        values, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for param in order:
            if isinstance(value := values.get(param.name), str) and not value.strip():
                raise InputError("is empty", field=name_of(param), allowed="a value")
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, in full if it fits a screen, else shortened."""
        for short in (False, True):
            lines = list(self._lines(ctx, short=short))
            if len(lines) <= MAX_LINES:
                break
        formatter.write("\n".join(lines) + "\n")

    def _lines(self, ctx: Any, *, short: bool) -> list[str]:
        summary, example, rest, settings = _parts(self.help or "")
        pieces = " ".join((ctx.command_path, *self.collect_usage_pieces(ctx)))
        lines = [*_wrapped(f"Usage: {re.sub('[{}]', '', pieces).replace('......', '...')}"), *([] if short else [""])]
        lines += [*_wrapped(summary, "  "), "", *textwrap.indent(example, "  ").splitlines(), ""]
        for paragraph in rest[:1] if short else rest:
            shown = re.split(r"(?<=\.)\s", paragraph)[0] if short else paragraph
            lines += [*_wrapped(shown, "  "), ""]
        sections = self._sections(ctx, short=short)
        width = max(len(name) for rows in sections.values() for name, _ in rows) + 4
        for title, rows in sections.items():
            lines += [f"{title}:", *(line for row in rows for line in _row(*row, width)), *([] if short else [""])]
        if short and settings:
            lines += _wrapped(f"{_SETTINGS} {', '.join(line.split()[0] for line in settings)}")
        elif settings:
            lines += [_SETTINGS, *settings]
        if short:
            lines.append("The command line reference in the docs explains each option in full.")
        return lines if lines[-1] else lines[:-1]

    def _sections(self, ctx: Any, *, short: bool) -> dict[str, Rows]:
        arguments: Rows = []
        options: dict[str, Rows] = {}
        params = self.get_params(ctx)
        with_titles = len(params) > FEW_OPTIONS
        for param in params:
            record = param.get_help_record(ctx)
            if record is None or (short and param.name == "help"):
                continue
            text = _first_sentence(record[1]) if short else _plain(record[1])
            if param.param_type_name == "argument":
                arguments.append((record[0].split(" <")[0], text))
            else:
                known = [_TITLE_OF[name] for name in param.opts if with_titles and name in _TITLE_OF]
                options.setdefault(known[0] if known else "Options", []).append((_names(record[0]), text))
        titles = [*(title for title in TITLES if title in options), *(["Options"] if "Options" in options else [])]
        chosen = {title: options[title] for title in titles}
        if short:  # a line less
            return {title: [*(arguments if title == titles[0] else []), *rows] for title, rows in chosen.items()}
        return ({"Arguments": arguments} if arguments else {}) | chosen


def name_of(param: Any) -> str:
    """Return the name of an option or argument, as its command's help shows it."""
    return str(param.opts[0] if param.param_type_name == "option" else param.metavar or param.name)


def found_by_name(place: str) -> Any:
    """Import what ``module:name`` names."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def offered(context: typer.Context, name: str) -> Any:
    """Import what the root command offers under this name, to commands of rooms that must not import it themselves.

    None: it offers nothing under this name, because the command was started without it.
    """
    places: Mapping[str, str] = context.find_root().obj or {}
    return found_by_name(places[name]) if name in places else None


def _imported(name: str, place: CommandPlace) -> Any:
    places = {"": place} if isinstance(place, str) else place
    found = found_by_name(places[""])
    if isinstance(found, typer.Typer):
        for registered in found.registered_commands:
            registered.cls = MorphCommand
        found.rich_markup_mode = None
        group = typer.main.get_group(found)
        group.name = name
        group.commands.update({own: _imported(own, places[own]) for own in places if own})
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, cls=MorphCommand)(found)
    return typer.main.get_command(alone)


def _parts(text: str) -> tuple[str, str, list[str], list[str]]:
    """Split a command's help into its summary, its example, other paragraphs, and the rows of its settings."""
    summary, *paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text.replace("\b\n", "")))
    example = ""
    rest: list[str] = []
    settings: list[str] = []
    for paragraph in paragraphs:
        if paragraph.startswith("Example"):
            example = paragraph
        elif paragraph.startswith(_SETTINGS):
            settings = paragraph.splitlines()[1:]
        elif "\n  " in paragraph:
            example += "\n\n" + paragraph
        else:
            rest.append(paragraph)
    return summary, example, rest, settings


def _names(text: str) -> str:
    """Return an option with the kind of its value, such as ``--steps N``."""
    text = re.sub(r"--(\S+) / --no-\1", r"--[no-]\1", text)
    text = re.sub(
        r"<(?:list\[)?(int|float|str|path)(?: range)?\]?>", lambda match: _TYPES[match[1].lower()], text, flags=re.I
    )
    return re.sub(r"<([\w|]+)>", r"\1", text)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("[required]", "").replace("; required]", "]")).strip()


def _first_sentence(text: str) -> str:
    sentence = re.split(r"\.\s|\s{2}\[", text)[0]
    default = re.search(r"\[default: (?!page)([^];]+)", text)
    return f"{sentence.rstrip('.')} [{default[1]}]" if default else sentence.rstrip(".")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(" ".join(text.split()), MAX_COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _row(name: str, text: str, width: int) -> list[str]:
    first, *others = textwrap.wrap(text, MAX_COLUMNS - width, break_on_hyphens=False) or [""]
    return [f"  {name:<{width - 2}}{first}".rstrip(), *(" " * width + line for line in others)]
