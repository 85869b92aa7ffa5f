"""What is shipped hangs together: dependencies, pins, entry points, documents."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import entry_points, requires
from pathlib import Path

from packaging.requirements import Requirement

from p2pshard import errors
from p2pshard.cli.app import EXIT_CODES

ROOT = Path(__file__).parents[2]


def requirements() -> list[Requirement]:
    return [Requirement(r) for r in requires("p2pshard") or ()]


def test_the_client_alone_needs_no_torch() -> None:
    plain = {r.name.lower() for r in requirements() if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert "grpcio" in plain
    assert not plain & {"torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn", "gguf"}


def test_every_dependency_is_pinned_to_a_version_it_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line.strip() and not line.startswith("#"))
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    for requirement in requirements():
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in pins, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{requirement} does not allow {pins[name]}"
    assert pins["torch"] == "2.13.0"


def test_the_commands_are_installed() -> None:
    scripts = {e.name: e for e in entry_points(group="console_scripts") if e.name.startswith("p2pshard")}
    assert scripts["p2pshard"].value == "p2pshard.cli:main"
    assert callable(scripts["p2pshard"].load())
    assert callable(scripts["p2pshard-node"].load())


def test_the_readme_links_to_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / target).exists(), f"README.md links to {target}, which does not exist"


def test_the_readme_and_the_help_name_the_same_exit_codes() -> None:
    readme = dict(re.findall(r"(?m)^\| (\d+) \| (.+?) \|$", (ROOT / "README.md").read_text()))
    shown = dict(re.findall(r"(?m)^  (\d+) +(.+)$", EXIT_CODES))
    assert readme == shown
    classes = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    assert {str(c.exit_code) for c in classes} <= set(shown)


def test_the_makefile_has_its_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint", "protos", "install", "clean"):
        assert re.search(rf"(?m)^{target}:", text), target
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


def test_the_version_is_the_changelogs() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"(?m)^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text())
