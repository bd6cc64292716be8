"""The files around the code agree with each other and do what they say."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import swin_lessons
from swin_lessons.results import load_result

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PYTHONS = SpecifierSet(PROJECT["requires-python"])
BUSY = 2  # the minutes are those of a quiet machine; lessons may have been run on a busy one


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- dependencies -----------------------------------------------------------------------------------


def pins() -> dict[str, Version]:
    """constraints.txt as name -> version. A line of another form is an error here."""
    lines = [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    found = {}
    for requirement in map(Requirement, lines):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"not an exact version: {requirement}"
        found[canonicalize_name(requirement.name)] = Version(specifier.version)
    assert len(found) == len(lines), "a package is pinned twice"
    return found


def requirements() -> list[Requirement]:
    groups = [PROJECT["dependencies"], *(group for name, group in EXTRAS.items() if name != "all")]
    return [Requirement(line) for group in groups for line in group]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_pinned_version_fits_the_range(requirement: Requirement) -> None:
    pin = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)


def test_pins_name_no_local_build() -> None:
    """A version such as 2.14.1+cpu exists on one index alone."""
    assert [name for name, version in pins().items() if version.local] == []


@pytest.mark.parametrize("python", ["3.11.2", "3.12.0", "3.13.0"])
def test_the_pinned_versions_run_on_every_supported_python(python: str) -> None:
    """3.11.2 is Debian 12's. Looked up in the metadata of what is installed here, which is the pinned set."""
    here = {d.name: d.metadata.get("Requires-Python") for d in importlib.metadata.distributions()}
    too_new = [name for name, range_ in here.items() if range_ and not SpecifierSet(range_).contains(python)]
    assert too_new == []


def test_the_extra_all_holds_every_extra() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.name == PROJECT["name"]
    assert everything.extras == EXTRAS.keys() - {"all"}


def test_conda_users_get_the_same_installation() -> None:
    environment = yaml.safe_load(text("environment.yml"))
    *conda, pip = environment["dependencies"]
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge"]
    (python,) = [line for line in conda if line.startswith("python=")]
    assert PYTHONS.contains(python.removeprefix("python="))
    assert "pip" in conda
    assert len(conda) == 2, "packages beside Python and pip would escape the pins"
    assert pip == {"pip": ["-c constraints.txt", "-e .[all]"]}
    assert "-c constraints.txt -e '.[all]'" in " ".join(text("Makefile").replace("\\\n", " ").split())


# --- the Makefile -----------------------------------------------------------------------------------

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True)


@needs_make
def test_help_tells_every_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text("Makefile"), re.MULTILINE)
    told = re.findall(r"^make (\S+) +\S.+$", make("help").stdout, re.MULTILINE)
    assert sorted(told) == sorted(phony.split())


def fake_python(folder: Path, body: str) -> str:
    path = folder / "fakepython"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@needs_make
@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (None, "Install Python 3.11 to 3.13"),
        (
            'case "$*" in --version) echo Python 3.9.2;; *version_info*) exit 1;; esac',
            "make PYTHON=python3.12 book",
        ),
        ('case "$*" in *ensurepip*) exit 1;; esac', "sudo apt install python3-venv"),
    ],
    ids=["none", "too old", "no venv"],
)
def test_make_names_the_remedy(tmp_path: Path, body: str | None, remedy: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = "no-such-python" if body is None else fake_python(tmp_path, body)
    run = make("book", f"PYTHON={python}", folder=tmp_path)
    assert run.returncode != 0
    assert remedy in run.stdout
    assert not (tmp_path / ".venv").exists()


def test_make_and_pyproject_name_the_same_pythons() -> None:
    (low,), (high,) = (re.findall(p, text("Makefile")) for p in (r"\(3, (\d+)\) <=", r"<= \(3, (\d+)\)"))
    assert SpecifierSet(f">=3.{low},<3.{int(high) + 1}") == PYTHONS


# --- papers -----------------------------------------------------------------------------------------


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load(text("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    assert citation["version"] == swin_lessons.__version__
    assert citation["license"] == PROJECT["license"]


def test_the_changelog_has_a_place_for_what_comes() -> None:
    sections = re.findall(r"^## \[(.+?)\]", text("CHANGELOG.md"), re.MULTILINE)
    assert sections[0] == "Unreleased"
    kinds = set(re.findall(r"^### (.+)$", text("CHANGELOG.md"), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_licences_are_whole() -> None:
    assert "Apache License" in text("LICENSE")
    assert "END OF TERMS AND CONDITIONS" in text("LICENSE")
    assert "Creative Commons Attribution 4.0 International Public" in text("LICENSE-text")
    assert "Section 8 -- Interpretation." in text("LICENSE-text")


def test_the_readme_s_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.+?)^```", text("README.md"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_the_readme_lists_every_lesson_and_no_lesson_takes_longer() -> None:
    listed = dict(re.findall(r"\]\((notebooks/\S+?)\) \| (\d+) minutes? \|", text("README.md")))
    lessons = {str(p.relative_to(ROOT)): p for p in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert listed.keys() == lessons.keys()
    for name, path in lessons.items():
        seconds = json.loads(path.read_text(encoding="utf-8"))["metadata"]["swin_lessons"]["seconds"]
        assert seconds <= 60 * int(listed[name]) * BUSY, f"{name}: the README says {listed[name]} minutes"


def test_a_wheel_holds_the_zoo_and_nothing_of_the_book(tmp_path: Path) -> None:
    """What pip installs where there is no checkout. The build runs in a copy: it leaves folders behind."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "swin_lessons", "book/results/zoo"):
        source, target = ROOT / name, copy / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (wheel,) = (copy / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    zoo = {Path(n).name for n in names if "share/swin-lessons/zoo/" in n}
    assert zoo == {p.name for p in (ROOT / "book" / "results" / "zoo").glob("*.safetensors")}
    assert {n.split("/")[0].split("-")[0] for n in names} == {"swin_lessons"}
    assert "swin_lessons/models/swin.py" in names


def test_the_readme_s_commands_exist() -> None:
    commands = set(re.findall(r"^make (\w+)", text("README.md"), re.MULTILINE))
    assert {"book", "test"} <= commands
    assert commands <= set(re.findall(r"^(\w+):.*##", text("Makefile"), re.MULTILINE))
    assert "exec make test" in text(".ci/run")


def test_readme_and_build_say_where_the_command_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    told = importlib.import_module("build_site").where(ROOT / "_build" / "html")
    for page in (text("README.md").split("swin-lessons train")[0], told):
        assert ".venv/bin/swin-lessons" in page
        assert ". .venv/bin/activate" in page
    assert ".venv/bin/python -m http.server -d _build/html" in told


def test_the_readme_names_the_second_host_and_bounds_its_minutes() -> None:
    (beside,) = re.findall(r"TORCH_INDEX=https://download.+?\n\n", text("README.md"), re.DOTALL)
    assert "second host" in " ".join(beside.split())
    assert "upper bounds" in text("README.md").split("| 5. [")[1].split("\n\n")[1]


# --- what is in git ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_git_holds_no_large_and_no_minified_file(tracked: list[Path]) -> None:
    assert [path.name for path in tracked if path.stat().st_size > 1_500_000] == []
    scripts = [path for path in tracked if path.suffix in (".js", ".css")]
    assert [p.name for p in scripts if max(map(len, p.read_text().splitlines())) > 200] == []


def test_nothing_else_lies_at_the_top(tracked: list[Path]) -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in tracked if path.parent != ROOT}
    assert folders <= {".ci", "book", "notebooks", "swin_lessons", "tests"}


# --- measured numbers -------------------------------------------------------------------------------

RESULTS = sorted((ROOT / "book" / "results").rglob("*.json"))


def test_every_result_has_its_origin() -> None:
    for path in RESULTS:
        load_result(path)  # raises, with the name of the file and of the key


def test_results_name_no_folder_of_a_machine() -> None:
    for path in RESULTS:
        command = json.loads(path.read_text(encoding="utf-8"))["provenance"]["command"]
        assert not re.search(r"(?:^|[\s=])/(?!dev/|usr/bin/)\w+/", command), f"{path.name}: {command}"


def test_every_module_compiles_on_the_oldest_python() -> None:
    oldest = min(int(minor) for minor in re.findall(r"\d+\.(\d+)", PROJECT["requires-python"]))
    assert sys.version_info >= (3, oldest)
    for path in sorted((ROOT / "swin_lessons").rglob("*.py")):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, oldest))
