"""What the lab and the benchmarks write for people is a template, filled with data: pages, tables,
stories. Knows no cell; `report`, `matrix`, `show`, `commands` and `bench.results` call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(
    name: str,
    filters: Iterable[Callable[..., Any]] = (),
    package: str = "lockstep.lab",
    **values: Any,
) -> str:
    """The template called `name`.j2 of a package; what is not given is an error. HTML is
    escaped."""
    engine = Environment(
        loader=PackageLoader(package, ""),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters.update({f.__name__: f for f in filters})
    return engine.get_template(f"{name}.j2").render(**values)
