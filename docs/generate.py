"""Hooks of ``make docs``: the pages that are made of the code, and links to files outside of this folder.

``reference/command-line.md`` has the help of every command in full, ``reference/job-file.md`` lists every key of a job
or cluster file, ``reference/trainer-arguments.md`` says what becomes of each argument of a Trainer. None is kept in the
repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import click
import typer
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import log
from pydantic import BaseModel

from morph.cli.main import app
from morph.contract.cluster import JobFile
from morph.trainers import lightning_rules
from morph.trainers.arguments import ARGUMENTS, CALLBACKS, COMPARED, METHODS, OF_EVALUATIONS, Rule

ROOT = Path(__file__).parents[1]
_SCRIPTS = ROOT / "tests" / "trainers" / "published_scripts.yaml"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def command_line() -> Iterator[str]:
    """The page of commands: what each does, an example, arguments and options."""
    yield from (
        "# Command line",
        "",
        "`morph COMMAND --help` prints the help of a command; long ones are shortened to fit a screen.",
        "",
    )
    yield from _command(typer.main.get_command(app), "morph")


def _command(command: click.Command, name: str) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    yield from (f"## {name}", "")
    for part in (command.help or "").split("\n\n"):
        kept = part.lstrip().startswith("\b")
        text = part.replace("\b", "").strip("\n")
        yield from ("```text", text, "```", "") if kept else (text, "")
    records = [(one, one.get_help_record(context)) for one in command.params if one.name != "help"]
    rows = [(record[0], record[1]) for _, record in records if record]
    if rows:
        yield from ("| option or argument | meaning |", "|---|---|")
        yield from (f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in rows)
        yield ""
    for sub, found in getattr(command, "commands", {}).items():
        yield from _command(found, f"{name} {sub}")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def job_file() -> Iterator[str]:
    """The page of keys of a job file: each with its default and its meaning."""
    yield from (
        "# Keys of a job file",
        "",
        "A job file (`morph run FILE.yaml`) has the sections `job`, `vms`, `policy` and the ones below; a cluster file",
        "(`--cluster`) has the same without `job`. `morph config explain FILE` prints the list with a file's values,",
        "`morph config schema` as a JSON schema. A dash means: not set.",
        "",
    )
    rows: dict[str, list[str]] = {}
    for key, default, meaning in _keys(JobFile):
        rows.setdefault(key.split(".")[0], []).append(f"| `{key}` | `{_cell(default)}` | {_cell(meaning)} |")
    for section in ("job", *(name for name in rows if name != "job")):
        yield from (f"## {section}", "", "| key | default | meaning |", "|---|---|---|", *rows[section], "")


def _keys(section: type[BaseModel], before: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        inner = list(_models(field.annotation))
        if not inner:
            yield f"{before}{name}", _default(field), field.description or ""
        seen: set[tuple[str, str, str]] = set()
        for model in inner:  # a section that may be of several kinds has the keys of each
            for row in _keys(model, f"{before}{name}."):
                if row not in seen:
                    seen.add(row)
                    yield row


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in {Union, UnionType, Annotated}:
        for one in get_args(annotation):
            yield from _models(one)


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def trainer_arguments() -> Iterator[str]:
    """The page of what becomes of a Trainer's arguments, and of a LightningModule's methods."""
    yield from (
        "# What is honoured of a Trainer",
        "",
        "The tables say what becomes of each argument of the `Trainer` of transformers under",
        "[`morph.hf.job`](../guides/trainer.md), and of Lightning's under `morph.lightning.job`. What they leave out,",
        "for example an argument of a newer version, is refused unless it has its default value.",
        "",
        "## Arguments of transformers' Trainer",
        "",
        *_rules("argument", ARGUMENTS),
        "",
        "A test compares losses and weights by step with `trainer.train()`, over more than an epoch, with values other",
        f"than the default of {_names(sorted({name for given in COMPARED for name in given}))}.",
        "They differ by less than 1e-5 (bf16: 1e-3).",
        "",
        "`EarlyStoppingCallback` is honoured as `best`. These callbacks are not run:",
        f"{_names(CALLBACKS)}. Others are refused.",
        "",
        "## Published example scripts",
        "",
        "`make test-scripts` fetches these scripts of transformers and runs each with random weights and small data,",
        "by itself and under Morph with [two lines](../guides/trainer.md) changed. *Equal*: after two epochs, the last",
        "step of which is short, no weight differs by more than 1e-5.",
        "",
        *_published_scripts(),
        "",
        "## Methods that a subclass of transformers' Trainer overrides",
        "",
        *_rules("method", METHODS),
        f"| {_names(OF_EVALUATIONS)} | refused if the Trainer evaluates | `compute_metrics` |",
        "| any other of the Trainer's, such as `training_step` | refused | write it in `compute_loss` |",
        "",
        "## Arguments of Lightning's Trainer",
        "",
        *_rules("argument", lightning_rules.TRAINER),
        "",
        f"These callbacks are not run: {_names(lightning_rules.CALLBACKS)}.",
        "Others are refused.",
        "",
        "## Methods that a LightningModule overrides",
        "",
        *_rules("method", lightning_rules.METHODS),
        "| `on_test_*`, `on_predict_*` | no effect here | there is only training |",
        "| `on_validation_*` | no effect here | refused if there is evaluation data |",
        "| any other of Lightning's, such as `on_train_batch_start` | refused | write it in `training_step` |",
    )


def _published_scripts() -> Iterator[str]:
    yield from ("| script | model | further options | in Morph |", "|---|---|---|---|")
    for run in yaml.safe_load(_SCRIPTS.read_text(encoding="utf-8"))["runs"]:
        options = " ".join(f"`--{name} {value}`" for name, value in run.get("given", {}).items())
        outcome = f"refused: {run['refused']}" if "refused" in run else "equal"
        yield f"| `{run['script']}` | {run['model']} | {_cell(options)} | {_cell(outcome)} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rules(head: str, rules: Mapping[str, Rule]) -> Iterator[str]:
    """Return a table of rules, grouped by what becomes of them."""
    yield from (f"| {head} | in Morph | how, why, or what instead |", "|---|---|---|")
    meanings = {"honoured": "honoured", "no effect": "no effect here", "refused": "refused unless it is the default"}
    for how, meaning in meanings.items():
        notes: dict[str, list[str]] = {}
        for name, rule in rules.items():
            if rule.how == how:
                only = f"; only {', '.join(str(choice) for choice in rule.allowed)}" if rule.allowed else ""
                only += f"; or {rule.instead}" if rule.instead else ""
                notes.setdefault(rule.note + (only if how == "honoured" else ""), []).append(f"`{name}`")
        yield from (f"| {', '.join(names)} | {meaning} | {_cell(note)} |" for note, names in notes.items())


PAGES = {
    "reference/command-line.md": command_line,
    "reference/job-file.md": job_file,
    "reference/trainer-arguments.md": trainer_arguments,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content="\n".join(page()) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Check links to files of the repository outside of this folder; they lead to ``repo_url`` where that is set."""
    here = Path(page.file.src_uri).parent

    def outside(link: re.Match[str]) -> str:
        target = (ROOT / "docs" / here / link[3]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, link[3])
        return f"[{link[2]}]({config.repo_url}/blob/main/{target.relative_to(ROOT)})" if config.repo_url else link[2]

    return LINK.sub(outside, markdown)
