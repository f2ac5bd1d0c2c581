"""The errors that a user can act on.

Every one of them says what was found, what was needed and how to mend it, and where: a command
shows it without a traceback and exits with code 2. Anything else that is raised is a fault of
treeward.

    raise DataError("margin is not a number", where="train.jsonl:17", field="margin",
                    got=float("nan"), need="a finite number",
                    fix="drop the key, or give one number per row")
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Self

_UNSET: Any = object()
_LONGEST_VALUE = 200
_LIKENESS = 0.6  # difflib's own


class TreewardError(ValueError):
    """A mistake that the user can fix.

    `summary` is one sentence; `where` is a file with its line, a config key or a folder; `field` is
    the path of the value inside it, as `completions[1].rank`; `got`, `need` and `fix` are what was
    found, expected and advised.
    """

    def __init__(
        self,
        summary: str,
        *,
        where: str | None = None,
        field: str | None = None,
        got: Any = _UNSET,
        need: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.summary = summary
        self.where = where
        self.field = field
        self.need = need
        self.fix = fix
        # None is a value that a user can have given: `got: None` is then a line of the error.
        self.got = None if got is _UNSET else got
        self._has_got = got is not _UNSET
        lines = [f"{where}: {summary}" if where else summary]
        if field is not None:
            lines.append(f"  field: {field}")
        if got is not _UNSET:
            lines.append(f"  got:   {shown(got)}")
        if need is not None:
            lines.append(f"  need:  {need}")
        if fix is not None:
            lines.append(f"  fix:   {fix}")
        super().__init__("\n".join(lines))

    @classmethod
    def unknown(
        cls,
        summary: str,
        name: str,
        names: Collection[str],
        *,
        fix: str | None = None,
        **place: Any,
    ) -> Self:
        """The error of a name that is none of `names`, with the nearest of them; `fix`: where none
        is near."""
        near = nearest_name(name, names)
        arguments = {"got": name, "need": f"one of {', '.join(names)}"} | place
        return cls(summary, fix=f"did you mean {near}?" if near else fix, **arguments)

    def but(self, **changes: Any) -> Self:
        """The same error with other arguments, as `where`."""
        arguments = {}
        # Not `self.args`, which has the text that was made of them.
        for name in ("summary", "where", "field", "got", "need", "fix"):
            value = getattr(self, name)
            if value is not None or (name == "got" and self._has_got):
                arguments[name] = value
        return type(self)(**(arguments | changes))

    @property
    def in_one_line(self) -> str:
        """The error without its place, as the reason of a missing score."""
        summary = self.summary
        if self.field is not None:
            summary = f"{self.field}: {self.summary}"
        parts = (("got", self.got), ("need", self.need), ("fix", self.fix))
        details = "; ".join(f"{word}: {shown(part)}" for word, part in parts if part is not None)
        if not details:
            return summary
        # The parts may hold ends of lines.
        return " ".join(f"{summary} ({details})".split())

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (workers of Ray); the default would call __init__ with the
        # joined text.
        return _rebuild, (type(self), self.__dict__, self.args)


class ConfigError(TreewardError):
    """The configuration is wrong: an unknown key, a bad value, or two keys that contradict each
    other."""


class DataError(TreewardError):
    """A row of data is wrong; `where` is `file:line`."""


class ModelError(TreewardError):
    """The model or tokenizer cannot do what is asked of it."""


class CheckpointError(TreewardError):
    """A checkpoint is incomplete, or belongs to another run."""


class LostProcessError(TreewardError):
    """A process of the run is gone, or does not answer: started again, the run goes on from its
    last checkpoint."""


def shown(value: Any) -> str:
    """A value in one line of at most about 200 characters; in quotes where nobody would see that it
    is there."""
    # Not as it is: an escape sequence of a server's page would move the cursor of a terminal, and
    # half a surrogate pair of a completion cannot be written to a log.
    if isinstance(value, str) and value.strip() and value.isprintable():
        text = value
    else:
        try:
            text = repr(value)
        except RecursionError:
            return "a value that is nested too deep to be shown"
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}... ({len(text)} characters)"


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be, or None if nothing comes close."""
    originals = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), originals, n=1, cutoff=_LIKENESS)
    return originals[close[0]] if close else None


def nearest_path(path: str | os.PathLike[str]) -> str | None:
    """The path that was probably meant by one that does not exist: names are corrected where it
    goes astray."""
    target = Path(path)
    try:
        from_the_root = reversed([target, *target.parents])
        missing = next((part for part in from_the_root if not part.exists()), None)
        if missing is None:
            return None
        # A link to nothing is listed, but does not exist.
        names = [entry.name for entry in missing.parent.iterdir() if entry.exists()]
    except OSError:  # as for a name that is too long, or a folder that may not be read
        return None
    # Only names that are near without their suffixes: .jsonl alone is no likeness.
    stem = missing.stem.lower()
    alike = []
    for name in names:
        matcher = difflib.SequenceMatcher(None, stem, Path(name).stem.lower())
        if matcher.ratio() >= _LIKENESS:
            alike.append(name)
    near = nearest_name(missing.name, alike)
    if near is None:
        return None
    meant = missing.parent / near / target.relative_to(missing)
    try:
        if meant.exists():
            return str(meant)
    except OSError:  # of the parts behind it, which nobody has looked at yet
        return None
    # This part is corrected; another one further on is missing too.
    return nearest_path(meant)


def pip_install(*extras: str) -> str:
    """The command that installs extras of treeward, from its clone or, of a wheel, beside it.

    pip takes a package that is installed as it is, so that no index needs to have treeward.
    """
    clone = Path(__file__).parents[2]
    names = ",".join(extras)
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'treeward[{names}]'"
    constraints = shlex.quote(str(clone / "constraints.txt"))
    return f"pip install -c {constraints} -e {shlex.quote(f'{clone}[{names}]')}"


def _rebuild(
    cls: type[TreewardError], state: dict[str, Any], args: tuple[Any, ...]
) -> TreewardError:
    # Without the constructor: a subclass may have another one, as `ServerError`.
    error = cls.__new__(cls)
    error.__dict__.update(state)
    error.args = args
    return error
