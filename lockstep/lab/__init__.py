"""The lab. Stored beside its modules: recipes, features, properties, spoilt plans."""

import json
import tomllib
from importlib.resources import files
from typing import Any


def table(name: str, package: str = "lockstep.lab") -> dict[str, Any]:
    """Reads a TOML or JSON file stored beside the modules of a package."""
    text = (files(package) / name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    return found
