"""Sphinx extension: the reference pages, read from the package when the site is built, so they cannot go stale.

    ```{api} swin_lessons.models       every public name: its signature, its docstring, a link to its source
    ```
    ```{commands}                      what `swin-lessons COMMAND --help` prints, for each command
    ```

Public is what `__all__` lists. A package without it, such as `plots`, stands for its modules, and a module without it
for the functions and classes it defines. Docstrings are Markdown with Google's sections, such as "Args:".
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import pkgutil
import re
import textwrap
from contextlib import redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import signature, stringify_signature

import swin_lessons

PACKAGE = Path(swin_lessons.__file__).resolve().parent
SECTIONS = {  # of a docstring -> how the page calls it
    "Args:": "Arguments",
    "Attributes:": "Attributes",
    "Raises:": "Raises",
    "Returns:": "Returns",
}
ENTRY = re.compile(r"^(\*{0,2}\w[\w., *]*): ", re.MULTILINE)  # "name: " or "name, name: " at the margin
FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)  # of a data class, with its comment


# --- what there is


def documented_modules(name: str) -> list[ModuleType]:
    """The module itself; of a package without `__all__`, its modules."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__") or not hasattr(module, "__path__"):
        return [module]
    found = sorted(info.name for info in pkgutil.iter_modules(module.__path__))
    return [importlib.import_module(f"{name}.{part}") for part in found if not part.startswith("_")]


def public_names(module: ModuleType) -> list[str]:
    """What `__all__` lists, else the functions and classes that the module defines, in its order."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [name for name, value in vars(module).items() if is_own(name, value, module)]


def is_own(name: str, value: Any, module: ModuleType) -> bool:
    """Is it a public function or class that this module defines?"""
    kind = inspect.isfunction(value) or inspect.isclass(value)
    return kind and not name.startswith("_") and value.__module__ == module.__name__


def public_members(cls: type) -> dict[str, Any]:
    """Methods and properties that a class defines and describes."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_") and callable_of(value) is not None and callable_of(value).__doc__
    }


def callable_of(value: Any) -> Any:
    """The function behind a method or a property; None for anything else."""
    if isinstance(value, property):
        return value.fget
    value = getattr(value, "__func__", value)  # of a class method or static method
    return value if inspect.isfunction(value) else None


# --- in Markdown


def signature_text(value: Any, *, method: bool = False) -> str:
    """`(x: Tensor, size: int = 7) -> Tensor`, without `self` of a method; nothing where Python cannot tell."""
    try:
        found = signature(value, bound_method=method)
    except (TypeError, ValueError):
        return ""
    returns = not inspect.isclass(value)
    text = stringify_signature(found, show_return_annotation=returns, unqualified_typehints=True)
    return text.replace("<factory>", "...")  # a list or dict of its own for each object of a data class


def docstring_markdown(docstring: str) -> str:
    """A docstring with its sections as bold words and lists, and its examples as code."""
    return "\n\n".join(map(paragraph, re.split(r"\n\s*\n", inspect.cleandoc(docstring))))


def paragraph(text: str) -> str:
    head, _, body = text.partition("\n")
    if head in SECTIONS:
        return section(SECTIONS[head], textwrap.dedent(body))
    return f"```python\n{text}\n```" if text.startswith(">>>") else text


def section(title: str, body: str) -> str:
    """Arguments and the like as a list; what is returned as a sentence."""
    if title == "Returns":
        return f"**{title}** {body}"
    return f"**{title}**\n\n" + ENTRY.sub(lambda match: f"- {code(match[1])}: ", body)


def code(names: str) -> str:
    """`a, b` -> each in backticks."""
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))


def directive(kind: str, head: str, body: str, options: str = "", fence: int = 6) -> str:
    ticks = "`" * fence
    return f"{ticks}{{py:{kind}}} {head}\n{options}\n{body}\n{ticks}"


def name_markdown(module: ModuleType, name: str, repository: str) -> str:
    """The entry of one public name."""
    value = getattr(module, name)
    kind = "class" if inspect.isclass(value) else "function"
    option = f":module: {module.__name__}\n"
    if value.__name__ != name:
        return directive(kind, name, f"Another name of `{value.__name__}`.", option)
    parts = [docstring_markdown(value.__doc__ or "")]
    if kind == "class":
        parts += [fields_markdown(value), *(member_markdown(*item) for item in public_members(value).items())]
    parts.append(f"[Source]({repository}/{source(value)})")
    return directive(kind, name + signature_text(value), "\n\n".join(parts), option, fence=8)


def member_markdown(name: str, value: Any) -> str:
    """The entry of a method or property, within its class."""
    function = callable_of(value)
    body = docstring_markdown(function.__doc__)
    if isinstance(value, property):
        return directive("property", name, body)
    return directive(
        "method", name + signature_text(function, method=not isinstance(value, staticmethod)), body
    )


def fields_markdown(cls: type) -> str:
    """The fields of a data class that its source comments, unless the docstring lists them."""
    if not is_dataclass(cls) or "Attributes:" in (cls.__doc__ or ""):
        return ""
    names = {field.name for field in fields(cls)}
    comments = [match for match in FIELD.finditer(inspect.getsource(cls)) if match[1] in names]
    return "\n".join(["**Attributes**\n", *(f"- `{m[1]}`: {m[2]}" for m in comments)]) if comments else ""


def source(value: Any) -> str:
    """`swin_lessons/models/swin.py#L40`."""
    value = inspect.unwrap(value)
    path = Path(inspect.getfile(value)).resolve().relative_to(PACKAGE.parent)
    return f"{path.as_posix()}#L{inspect.getsourcelines(value)[1]}"


def help_page(command: str) -> str:
    """What `swin-lessons COMMAND --help` prints, for a page of 88 characters."""
    from swin_lessons.cli import build_parser

    printed, os.environ["COLUMNS"] = io.StringIO(), "88"
    with redirect_stdout(printed), suppress(SystemExit):
        build_parser().parse_args([command, "--help"])
    return printed.getvalue()


# --- on the page


class Api(SphinxDirective):
    """The public names of a module or package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        modules = documented_modules(self.arguments[0])
        for module in modules:
            if len(modules) > 1:
                found.append(nodes.rubric("", module.__name__))
            found += self.parse_text_to_nodes(self.text(module))
        return found

    def text(self, module: ModuleType) -> str:
        theme = self.config.html_theme_options
        repository = f"{theme['repository_url']}/blob/{theme['repository_branch']}"
        self.env.note_dependency(str(module.__file__))
        entries = [name_markdown(module, name, repository) for name in public_names(module)]
        return "\n\n".join([docstring_markdown(module.__doc__ or ""), *entries])


class Commands(SphinxDirective):
    """A section for each command, with its help page."""

    def run(self) -> list[nodes.Node]:
        from swin_lessons.cli import command_modules

        return [self.section(name) for name in command_modules()]

    def section(self, name: str) -> nodes.section:
        page = help_page(name)
        title = nodes.title("", f"swin-lessons {name}")
        return nodes.section(
            "", title, nodes.literal_block(page, page, language="none"), ids=[f"command-{name}"]
        )


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("api", Api)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
