"""What the lab writes for people is a template beside this file, filled with data: pages, tables,
stories. Knows no cell; `report`, `matrix` and `show` call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(name: str, filters: Iterable[Callable[..., Any]] = (), **values: Any) -> str:
    """The template called `name`.j2; what is not given is an error. HTML is escaped."""
    engine = Environment(
        loader=PackageLoader("lockstep.lab", ""),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters.update({f.__name__: f for f in filters})
    return engine.get_template(f"{name}.j2").render(**values)
