"""The docstring of a settings class, whose fields have docstrings of their own, for ``help``."""

import ast
import functools
import inspect
import sys
import textwrap
from typing import Any, TypeVar, get_type_hints

C = TypeVar("C", bound=type[Any])


def describe_attributes(cls: C) -> C:
    """Add an ``Attributes:`` section to the docstring of a class, and plain types to its signature.

    The section has the type, the docstring and the default of each field. A field without a
    docstring, which is a section, has the summary of its class. Without source files nothing is
    added.
    """
    try:
        texts = _read_field_docstrings(cls.__module__).get(cls.__name__, {})
    except OSError:
        texts = {}
    if not (cls.__doc__ and texts):
        return cls
    signature, types = inspect.signature(cls), get_type_hints(cls)
    lines, parameters = [], []
    for name, field in signature.parameters.items():
        type_, default = inspect.formatannotation(types[name]), field.default
        text = texts[name] or inspect.cleandoc(types[name].__doc__).partition("\n\n")[0]
        if texts[name] and repr(default) != "<factory>":  # its docstring describes that
            text += f" Default: {repr(default) if isinstance(default, str) else default}."
        lines.append(f"{name} ({type_ if '[' in type_ else type_.rpartition('.')[2]}): {text}")
        parameters.append(field.replace(annotation=types[name]))
    section = "\n".join(map(_wrap, lines))
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nAttributes:\n{section}\n"
    cls.__signature__ = signature.replace(parameters=parameters)
    return cls


def _wrap(line: str) -> str:
    return textwrap.fill(
        " ".join(line.split()),
        width=96,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
        break_long_words=False,
    )


@functools.cache
def _read_field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstring after each annotated name of each class of a module, or empty texts."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        each.name: {
            field.target.id: _docstring(after)
            for field, after in zip(each.body, [*each.body[1:], None], strict=True)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for each in tree.body
        if isinstance(each, ast.ClassDef)
    }


def _docstring(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""
