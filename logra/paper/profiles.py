"""Profiles: what each notebook runs with. Everything that can be wrong in one is found here, before anything runs.

`profiles/<name>.yaml`:

    figures: figures                          # the folder for outputs and manifest.json, from the project's root
    notebooks:
      figures/fig2_learning:                  # notebooks/figures/fig2_learning.ipynb
        timeout: 900                          # wall-clock limit in seconds
        outputs: [fig2_learning.pdf, ...]     # every file that the notebook writes into the figure folder
        parameters: {updates: 200}            # over the defaults in the notebook's cell tagged `parameters`
"""
from __future__ import annotations

import ast
import difflib
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import nbformat
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

SCALARS = (bool, int, float, str)


class ProfileError(ValueError):
    """A profile, a notebook or a command line asks for what cannot be; the message says what to write instead."""


def _file_name(text: str) -> str:
    if not text or PurePosixPath(text).name != text or text.startswith("."):
        raise ValueError(f"given {text!r}, wanted a plain file name such as 'fig2_learning.pdf'")
    return text


def _inner_folder(text: str) -> str:
    path = PurePosixPath(text)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"given {text!r}, wanted a path from the project's root such as 'build/smoke/figures'")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NotebookEntry(_Strict):
    """One notebook in a profile."""
    timeout: PositiveFloat
    outputs: Annotated[list[Annotated[str, AfterValidator(_file_name)]], Field(min_length=1)]
    parameters: dict[str, Any] = {}


class Profile(_Strict):
    """A profile file, as it stands."""
    figures: Annotated[str, AfterValidator(_inner_folder)]
    notebooks: Annotated[dict[str, NotebookEntry], Field(min_length=1)]


@dataclass(frozen=True)
class Task:
    """One notebook with everything that its run is asked for. `parameters` are all of the notebook's, the profile's over its defaults."""
    name: str                    # figures/fig2_learning
    source: Path                 # .../notebooks/figures/fig2_learning.ipynb
    timeout: float               # seconds
    outputs: tuple[str, ...]
    parameters: dict[str, Any]

    @property
    def stem(self) -> str:
        return self.source.stem


def load(root: Path, name: str) -> Profile:
    """`profiles/<name>.yaml` under `root`. Raises ProfileError for an unknown profile, and for one that is not as described above."""
    known = sorted(path.stem for path in (root / "profiles").glob("*.yaml"))
    if name not in known:
        raise ProfileError(f"unknown profile {name!r}; there are: {', '.join(known) or 'none'}{closest(name, known)}")
    file = f"profiles/{name}.yaml"
    try:
        profile = Profile.model_validate(yaml.safe_load((root / file).read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise ProfileError(f"{file} is not YAML: {error}") from None
    except ValidationError as error:
        lines = [f"{file}: {' > '.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise ProfileError("\n".join(lines)) from None
    for what, names in (("the stem", [PurePosixPath(n).name for n in profile.notebooks]), ("output", [o for e in profile.notebooks.values() for o in e.outputs])):
        for twice in (n for n, count in Counter(names).items() if count > 1):
            raise ProfileError(f"{file}: {what} {twice!r} stands there twice; two notebooks would overwrite each other")
    return profile


def tasks(root: Path, profile_name: str, only: list[str] | None = None) -> tuple[Profile, list[Task]]:
    """The profile and its notebooks, checked, in the profile's order; `only` keeps those whose stem begins with one of its entries.

    Every parameter is checked against its notebook's own. Raises ProfileError with one line for each thing that is wrong.
    """
    profile = load(root, profile_name)
    stems = {PurePosixPath(name).name: name for name in profile.notebooks}
    for wanted in only or []:
        if not any(stem.startswith(wanted) for stem in stems):
            raise ProfileError(f"--only {wanted}: profile {profile_name} has no notebook whose name begins so; there are: {', '.join(stems)}{closest(wanted, list(stems))}")
    chosen, wrong = [], []
    for stem, name in stems.items():
        if only is None or any(stem.startswith(wanted) for wanted in only):
            try:
                chosen.append(_task(root, name, profile.notebooks[name]))
            except ProfileError as error:
                wrong.append(str(error))
    if wrong:
        raise ProfileError("\n".join(wrong))
    return profile, chosen


def _task(root: Path, name: str, entry: NotebookEntry) -> Task:
    source = root / "notebooks" / f"{name}.ipynb"
    notebook = read_notebook(source, name)
    check_finish(notebook, name, source.stem)
    defaults = declared_parameters(notebook, name)
    return Task(name, source, entry.timeout, tuple(entry.outputs), resolve(name, entry.parameters, defaults))


def read_notebook(path: Path, name: str) -> nbformat.NotebookNode:
    """The notebook at `path`; ProfileError, with the closest existing one, when there is none or it is no notebook."""
    if not path.is_file():
        folder = path.parents[len(PurePosixPath(name).parts) - 1]
        there = [p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
        raise ProfileError(f"{name}: there is no notebook notebooks/{name}.ipynb{closest(name, there)}")
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:                          # nbformat raises many kinds, all meaning the same to the reader
        raise ProfileError(f"{name}: notebooks/{name}.ipynb is not a notebook: {error}") from None


def declared_parameters(notebook: nbformat.NotebookNode, name: str) -> dict[str, Any]:
    """The names and defaults in the one cell tagged `parameters`. Raises ProfileError unless it holds plain literals alone."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1 or tagged[0] is not code[0]:
        raise ProfileError(f"{name}: {len(tagged)} cells are tagged 'parameters'; wanted one, the first code cell")
    found: dict[str, Any] = {}
    try:
        body = ast.parse(tagged[0].source).body
    except SyntaxError as error:
        raise ProfileError(f"{name}: the parameters cell is not plain Python: {error}") from None
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=key)], value=value) | ast.AnnAssign(target=ast.Name(id=key), value=ast.expr() as value):
                try:
                    found[key] = ast.literal_eval(value)
                    kind(found[key])
                    continue
                except (ValueError, TypeError):
                    pass
        raise ProfileError(
            f"{name}: line {node.lineno} of the parameters cell is `{ast.unparse(node)}`; wanted `name = literal` with an int, a float, a str, a bool "
            "or a list of one of those. What is derived belongs in the next cell"
        )
    return found


def check_finish(notebook: nbformat.NotebookNode, name: str, stem: str) -> None:
    """Raises ProfileError unless the last code cell ends in `provenance.finish("<stem>")`."""
    wanted = f'provenance.finish("{stem}")'
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    try:
        last = ast.parse(code[-1]).body[-1]
    except (IndexError, SyntaxError):
        last = None
    if last is None or ast.unparse(last) != ast.unparse(ast.parse(wanted)):
        raise ProfileError(f"{name}: the last code cell must end in `{wanted}`, the mark that the notebook ran to its end")


def resolve(name: str, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, each of the default's type (an int is taken for a float). Raises ProfileError for an unknown name or a wrong type."""
    wrong, values = [], dict(defaults)
    for key, value in given.items():
        if key not in defaults:
            wrong.append(f"{name}: parameter {key}: given {value!r}, but the notebook has no such parameter; it has: {', '.join(defaults) or 'none'}{closest(key, list(defaults))}")
            continue
        try:
            values[key] = _as(value, defaults[key])
        except TypeError as error:
            wrong.append(f"{name}: parameter {key}: {error}")
    if wrong:
        raise ProfileError("\n".join(wrong))
    return values


def kind(value: Any) -> str:
    """The type of a parameter in words; TypeError when it is not one that a parameter may have."""
    if isinstance(value, list):
        kinds = {kind(item) for item in value}
        if kinds == {"int", "float"}:
            return "list of float"
        if len(kinds) > 1 or any(k.startswith("list") for k in kinds):
            raise TypeError(f"{value!r} is a list of unlike things")
        return f"list of {kinds.pop()}" if kinds else "list"
    if type(value) not in SCALARS or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"{value!r} is not a finite int, float, str, bool or a list of one of those")
    return type(value).__name__


def _as(value: Any, default: Any) -> Any:
    try:
        given = kind(value)
    except TypeError as error:
        raise TypeError(f"given {error}, wanted {kind(default)}") from None
    wanted = kind(default)
    if wanted == "float" and given == "int":
        return float(value)
    if wanted == "list of float" and given in ("list of int", "list of float"):
        return [float(item) for item in value]
    if given == wanted or (given == "list" and wanted.startswith("list")) or (wanted == "list" and given.startswith("list")):
        return value
    raise TypeError(f"given {value!r} ({given}), wanted {wanted}{_number_hint(value)}")


def _number_hint(value: Any) -> str:
    # YAML 1.1 takes 1e-4 for text: without a point (and a sign in the exponent) it is no number.
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and (match := re.fullmatch(r"([+-]?\d+)(\.\d*)?[eE]([+-]?\d+)", item)):
            return f"; YAML reads {item} as text, write {match[1]}{match[2] or '.0'}e{int(match[3]):+d}"
    return ""


def closest(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.5) or [k for k in known if given in k][:1]
    return f". Did you mean {close[0]}?" if close else ""
