"""The parts of the reference that are made from the code at build time."""

import ast
import dataclasses
import enum
import functools
import html
import importlib
import inspect
import itertools
import json
import re
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import figures
from advice import WHAT_TO_DO

REPOSITORY = Path(__file__).parents[2]
CODE = ("trinity_sync", "flows", "tasks")

EVERYWHERE = ("output", "color")
"""Options of all commands, which are described once."""
SETTINGS: dict[str, tuple[str, str]] = {
    "process_settings": ("trinity_sync.settings", "Settings"),
    "job_settings": ("trinity_sync.storage.job_settings", "JobSettings"),
    "stack_settings": ("trinity_sync.settings", "StackSettings"),
}
"""Models of settings, by the name of their generator: module and class."""


# ------------------------------------------------------------ command line


def commands() -> str:
    """Describe all commands: help, arguments, options and examples."""
    import typer

    from trinity_sync.cli.commands import app

    panels: dict[str, list[tuple[str, Any]]] = {}
    for name, command in _walk(typer.main.get_command(app), ""):
        panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(
            (name, command)
        )
    return "\n\n".join(
        f"## {panel}\n\n" + "\n\n".join(_command(name, each) for name, each in found)
        for panel, found in panels.items()
    )


def _walk(group: Any, prefix: str, panel: str | None = None) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        own = getattr(command, "rich_help_panel", None)
        panel_here = own if isinstance(own, str) else panel
        if hasattr(command, "commands"):
            yield from _walk(command, f"{prefix}{name} ", panel_here)
        else:
            command.rich_help_panel = panel_here
            yield f"{prefix}{name}", command


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [
        each
        for each in command.params
        if each.param_type_name == "option" and not each.hidden and each.name not in EVERYWHERE
    ]
    words = [
        _argument_name(each) if each.required else f"[{_argument_name(each)}]" for each in arguments
    ]
    usage = " ".join(["trinity-sync", name, *["[OPTIONS]"] * bool(options), *words])
    parts = [f"### {name}", _plain(command.help or ""), f"```text\n{usage}\n```"]
    if arguments:
        rows = [(f"`{_argument_name(each)}`", _plain(each.help or "")) for each in arguments]
        parts.append(_table(("argument", "meaning"), rows))
    if options:
        parts.append(_table(("option", "default", "meaning"), [_option(each) for each in options]))
    notes, examples = _split_epilog(command.epilog or "")
    if notes:
        parts.append(notes)
    if examples:
        parts.append("```sh\n" + "\n".join(examples) + "\n```")
    return "\n\n".join(parts)


def _argument_name(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name + "..." * (argument.nargs == -1 and not name.endswith("..."))


def _option(option: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    annotation = option.type_descriptor.annotation
    value = "" if option.is_flag else f" `{option.metavar or _metavar(annotation)}`"
    if choices := _choices(annotation):
        value = " " + " or ".join(f"`{each}`" for each in choices)
    default = option.default() if callable(option.default) else option.default
    default = getattr(default, "value", default)
    if option.secondary_opts:
        default = (option.opts if default else option.secondary_opts)[0]
    shown = "" if default in (None, (), [], False, "") else f"`{default}`"
    return names + value, "required" if option.required else shown, _plain(option.help or "")


def _metavar(annotation: Any) -> str:
    return {"int": "N", "float": "N", "Path": "PATH"}.get(
        getattr(annotation, "__name__", ""), "TEXT"
    )


def _choices(annotation: Any) -> list[str]:
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [str(each.value) for each in annotation]
    return [str(each) for each in get_args(annotation)] if get_origin(annotation) is Literal else []


def _split_epilog(epilog: str) -> tuple[str, list[str]]:
    """Split an epilog into sentences and example commands."""
    text = _plain(epilog.replace("\b", ""))
    before, _, after = re.sub(r"\bExamples?:", "\0", text).partition("\0")
    examples = [
        " ".join(line.split())
        for line in re.split(r"·|\n", after)
        if line.strip().startswith("trinity-sync") or "trinity-sync " in line
    ]
    return before.strip(), examples


def _plain(text: str) -> str:
    """Return help without the markup of rich."""
    return re.sub(r"\[/?(?:bold|dim|italic|cyan|green|yellow|red)?\]", "", inspect.cleandoc(text))


def documents() -> str:
    """Describe the JSON documents of the commands: the fields of their dataclasses."""
    from json_documents import DOCUMENTS

    parts: list[str] = []
    names: dict[Any, list[str]] = {}
    for command, document in DOCUMENTS.items():
        names.setdefault(document, []).append(command)
    seen: set[type] = set()
    for (noun, declared), commands_ in names.items():
        title = ", ".join(f"`{command}`" for command in commands_)
        what = "a list" if get_origin(declared) is list else "an object"
        parts.append(f"### {title}\n\n`{noun}` is {what}.")
        for each in _dataclasses(declared):
            if each not in seen:
                seen.add(each)
                first = inspect.cleandoc(each.__doc__ or "").split("\n\n")[0]
                head = ("field", "type", "meaning")
                parts.append(f"`{each.__name__}`: {first}\n\n{_table(head, _fields(each))}")
            else:
                parts.append(f"`{each.__name__}`: see above.")
    return "\n\n".join(parts)


def _dataclasses(declared: Any) -> list[type]:
    """Return the dataclasses that a type is made of, the outer ones first."""
    if not dataclasses.is_dataclass(declared):
        return [found for each in get_args(declared) for found in _dataclasses(each)]
    found = [declared]
    for hint in get_type_hints(declared).values():
        found += [each for each in _dataclasses(hint) if each not in found]
    return found


def _fields(content: type) -> list[tuple[str, ...]]:
    from json_documents import MEANINGS

    from trinity_sync.cli.output import KEYS, is_time

    described = _docstrings(content)
    rows: list[tuple[str, ...]] = []
    for each in dataclasses.fields(content):
        key = KEYS.get(each.name, each.name)
        kind = _name_type(get_type_hints(content)[each.name])
        kind = kind.replace("float", "time") if is_time(key) else kind
        rows.append((f"`{key}`", kind, described.get(each.name) or MEANINGS[key]))
    return rows


def _docstrings(content: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, and of those that it inherits from."""
    found = {}
    for owner in reversed(content.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, after in itertools.pairwise(tree.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found[statement.target.id] = _docstring(after)
    return found


def _name_type(declared: Any) -> str:
    """Return a type in words, as JSON has it."""
    if get_origin(declared) in (Union, types.UnionType):
        return " or ".join(map(_name_type, get_args(declared)))
    if get_origin(declared) is Literal or declared is Path:
        return "str"
    if get_origin(declared) in (list, tuple, Sequence):
        return f"list[{_name_type(get_args(declared)[0])}]"
    if get_origin(declared) in (dict, Mapping):
        return f"dict[{', '.join(map(_name_type, get_args(declared)))}]"
    return "null" if declared is type(None) else getattr(declared, "__name__", str(declared))


# ------------------------------------------------------------ settings


def settings(module: str, name: str) -> str:
    """Describe a model of settings: a table of its fields, and one of each nested model."""
    found = importlib.import_module(module)
    return "\n\n".join(_model(found, getattr(found, name), ""))


def _model(module: Any, model: type, section: str) -> Iterator[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(tree, ast.ClassDef)
    rows, nested = [], []
    prefix = _environment_prefix(model)
    values = model() if section else None
    for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, kind = statement.target.id, ast.unparse(statement.annotation)
        if name.startswith("_") or kind.startswith("ClassVar"):
            continue
        inner = getattr(module, kind, None)
        if inspect.isclass(inner) and hasattr(inner, "model_fields"):
            nested.append((name, inner))
            continue
        shown = f"`{prefix}{name.upper()}`" if prefix and not section else f"`{name}`"
        default = _default(statement.value, getattr(values, name) if section else None)
        rows.append((shown, _kind(kind), default, _docstring(after)))
    if section:
        yield f"### `[{section}]` {{ #{section} }}"
        yield inspect.cleandoc(model.__doc__ or "").split("\n\n")[0]
    if rows:
        yield _table(("setting", "type", "default", "meaning"), rows)
    for name, inner in nested:
        yield from _model(module, inner, name)


def _environment_prefix(model: type) -> str:
    config = getattr(model, "model_config", {})
    return str(config.get("env_prefix", "")) if isinstance(config, dict) else ""


_TYPES = {
    "FullPath": "path",
    "Paths": "paths",
    "Names": "names",
    "Duration": "duration",
    "Share": "percentage",
    "WriteConcurrency": "text",
    "bool": "true or false",
    "str": "text",
    "int": "number",
    "float": "number",
}


def _kind(annotation: str) -> str:
    """Return a type in words, by its annotation."""
    annotation = re.sub(r"^Annotated\[(\w+),.*\]$", r"\1", annotation)
    for literal in re.findall(r"Literal\[.*?\]", annotation):
        values = [f"`{value.strip()}`" for value in literal[8:-1].replace("'", '"').split(",")]
        annotation = annotation.replace(literal, " or ".join(values))
    return " or ".join(_TYPES.get(part.strip(), part) for part in annotation.split("|"))


def _default(value: ast.expr | None, actual: Any = None) -> str:
    """Return the default of a setting, with its limits.

    Args:
        value: the expression after the annotation.
        actual: the default itself, for a setting of the stack's file.
    """
    named = {each.arg: each.value for each in value.keywords} if isinstance(value, ast.Call) else {}
    limits = [
        f"{sign} {ast.unparse(named[key])}"
        for key, sign in (("ge", "from"), ("gt", "above"), ("le", "to"), ("lt", "below"))
        if key in named and isinstance(named[key], ast.Constant)
    ]
    if actual is not None:
        shown = f"`{_toml(actual)}`"
    elif "default_factory" in named:
        shown = "computed"
    elif isinstance(value, ast.Call):
        first = named.get("default") or (value.args[0] if value.args else None)
        shown = "required" if first is None else f"`{_constant(first)}`"
    else:
        shown = "required" if value is None else f"`{_constant(value)}`"
    return shown.replace("``", "") + (f" ({' '.join(limits)})" if limits else "")


def _toml(value: Any) -> str:
    """Return a value as it is written in the stack's file."""
    from trinity_sync.retention.policies import format_duration

    if isinstance(value, timedelta):
        return f'"{format_duration(value.total_seconds())}"'
    if isinstance(value, tuple):
        return json.dumps([str(each) for each in value])
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _constant(value: ast.expr) -> str:
    """Return a default as it is written in the environment."""
    try:
        found = ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)
    if isinstance(found, bool):
        return str(found).lower()
    if isinstance(found, (tuple, list)):
        return ",".join(map(str, found))
    return f"{found:g}" if isinstance(found, float) else str(found or "")


def _docstring(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return _plain(str(statement.value.value))
    return ""


# ------------------------------------------------------------ metrics


def metrics() -> str:
    """Describe the Prometheus metrics of a worker, those of its node and of its jobs."""
    from trinity_sync.orchestration.metrics import METRICS, RootObserver, SpoolCollector
    from trinity_sync.settings import Settings, StackSettings

    counted = [
        (family, collector._labelnames)
        for collector in METRICS.registry._collector_to_names
        for family in collector.describe()
    ]
    with tempfile.TemporaryDirectory() as empty:
        observer = RootObserver(Settings(), StackSettings(), lambda *_: None)
        observed = [
            (family, family._labelnames)
            for collector in (SpoolCollector(Path(empty)), observer)
            for family in collector.collect()
        ]
    rows = []
    for family, labels in counted + observed:
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = ", ".join(f"`{label}`" for label in labels or ())
        rows.append((f"`{name}`", family.type, shown, family.documentation))
    return _table(("metric", "type", "labels", "meaning"), rows)


# ------------------------------------------------------------ messages


def find_message(quoted: str) -> str:
    """Return the whole message of which a page quotes a part; ``…`` stands for a value."""
    raised, logged = _read_messages()
    pattern = re.compile(".*".join(map(re.escape, quoted.split("…"))), re.DOTALL)
    found = [text for text in {*logged}.union(*raised.values()) if pattern.search(text)]
    return max(found, key=lambda text: (len(text), text), default=quoted)


@functools.cache
def _read_messages() -> tuple[dict[str, set[str]], set[str]]:
    """Return the messages of errors by class, and those of warnings, with ``…`` for values."""
    raised: dict[str, set[str]] = {}
    logged: set[str] = set()
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (text := _first_text(node)):
                called = _called(node.func)
                if called.endswith("Error"):
                    raised.setdefault(called, set()).add(text)
                elif called in ("logger.warning", "logger.error", "logger.exception"):
                    logged.add(text)
    return raised, logged


def messages() -> str:
    """List the errors by class, with what to do and their messages, then the warnings."""
    from trinity_sync import errors

    (raised, logged), parts = _read_messages(), []
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.TrinitySyncError):
            when = inspect.cleandoc(error.__doc__ or "").split("\n\n")[0]
            parts.append(f"### {name}\n\n{when}\n\n{WHAT_TO_DO[name]}")
            if texts := raised.get(name):
                parts.append(_details(f"Messages ({len(texts)})", texts))
    parts.append(
        "## Warnings in logs\n\nLogged by trainers, readers and the worker, as "
        "`trinity_sync.<module>`."
    )
    parts.append(_details(f"Warnings ({len(logged)})", logged))
    return "\n\n".join(parts)


def _modules() -> list[Path]:
    return sorted(path for folder in CODE for path in (REPOSITORY / folder).rglob("*.py"))


def _first_text(call: ast.Call) -> str:
    """Return the text of a call's first argument, with placeholders; empty if it is none."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return re.sub(r"%(?:[-0-9.,]*[sdrfx])", "…", first.value)
    if isinstance(first, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in first.values
        )
    return ""


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = function.value.id
        return owner if owner.endswith("Error") else f"{owner}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _details(title: str, texts: set[str]) -> str:
    shown = sorted({_shorten(text) for text in texts}, key=_sorting)
    rows = "".join(f"<li>{html.escape(text)}</li>" for text in shown)
    return f"<details><summary>{title}</summary><ul>{rows}</ul></details>"


def _shorten(text: str) -> str:
    """Return the first sentence, by which a reader knows the message; the rest is what to do."""
    first = re.split(r"(?<=\w{3})[.;] |: (?=[A-Z])", text, maxsplit=1)[0]
    words = first.split()
    return first + " …" * (first != text) if len(words) <= 12 else " ".join(words[:12]) + " …"


def _sorting(text: str) -> str:
    return text.lstrip("… ").lower()


# ------------------------------------------------------------ files


def layout() -> str:
    """Return the tree of a root's files, from the module that names them."""
    from trinity_sync import layout as names

    tree = textwrap.dedent((names.__doc__ or "").partition("::")[2]).strip()
    return f"```text\n{tree}\n```"


# ------------------------------------------------------------ environments


def environments() -> str:
    """List the packages that a resolver test installs the client next to."""
    test = REPOSITORY / "tests/integration/test_environments.py"
    for statement in ast.parse(test.read_text()).body:
        if isinstance(statement, ast.Assign) and "WHERE_PEOPLE_TRAIN" in ast.unparse(statement):
            return ", ".join(f"`{name}`" for name in ast.literal_eval(statement.value)) + "."
    raise LookupError(f"no WHERE_PEOPLE_TRAIN in {test}")


# ------------------------------------------------------------ all


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in lines
    )


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "costs": figures.costs,
    "drivers": figures.drivers,
    "documents": documents,
    "environments": environments,
    "layout": layout,
    "messages": messages,
    "metrics": metrics,
    "retention": figures.retention,
    "slots": figures.slots,
    "swimlane": figures.swimlane,
    "targets": figures.targets,
    "vllm": figures.vllm,
}
"""Makers of Markdown, by the name in ``<!-- generated: NAME -->``."""
for _name, _where in SETTINGS.items():
    GENERATORS[_name] = lambda where=_where: settings(*where)
