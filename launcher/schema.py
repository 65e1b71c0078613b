"""The keys of a configuration, read from the dataclasses of trainer.config, and the way from plain containers to them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig

ABSENT = ("null", "none", "off", "false", "no", "")  # how people say "nothing"
NOTHING = ("none", "disabled", "false")  # the options that mean it


class Refused(ConfigError):
    """Mistakes of the user, one line each."""

    def __init__(self, lines: Iterable[str]):
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


@dataclass(frozen=True)
class Key:
    """One leaf of RunConfig."""

    path: str  # section.field
    kind: Any  # int, float, str, bool, list[str], list[int] or dict[str, str]
    choices: tuple[str, ...]  # of an enum; empty: any value of the kind

    @property
    def is_text(self) -> bool:
        return self.kind is str


def keys() -> dict[str, Key]:
    """Every key by its dotted path."""
    found = {}
    for section, cls in get_type_hints(RunConfig).items():
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            path = f"{section}.{field.name}"
            found[path] = Key(path, hints[field.name], tuple(field.metadata.get("choices", ())))
    return found


def sections() -> tuple[str, ...]:
    """The groups of RunConfig, in order."""
    return tuple(field.name for field in dataclasses.fields(RunConfig))


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The most similar word; None where nothing is similar."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return close[0] if close else None


def nearest_option(word: str, options: Iterable[str]) -> str | None:
    """The option that was probably meant; who says null, off or nothing wants the one that stands for it."""
    options = list(options)
    nothing = [option for option in NOTHING if option in options]
    return nothing[0] if nothing and word.lower() in ABSENT else nearest(word.lower(), options)


def nearest_key(path: str, known: Iterable[str]) -> str | None:
    """The key that was probably meant: by its name in the same section, else by its name in any, else by all of it."""
    known = list(known)
    section, dot, name = path.rpartition(".")
    by_name: dict[str, str] = {}
    for key in sorted(known, key=lambda key: not key.startswith(f"{section}.")):
        by_name.setdefault(key.rpartition(".")[2], key)  # its own section comes first
    inside = [key.rpartition(".")[2] for key in known if dot and key.startswith(f"{section}.")]
    if near := nearest(name, inside):
        return f"{section}.{near}"
    if inside and name not in by_name:
        return None
    return by_name.get(name) or nearest(path, [key for key in known if "." in key or not dot])


def unknown_key(path: str, known: Iterable[str]) -> str:
    """The line that refuses a key and names the nearest one, or what its section has."""
    known = list(known)
    near = nearest_key(path, known)
    if near:
        return f"{path}: unknown key, did you mean {near}?"
    section = path.partition(".")[0]
    inside = [key.partition(".")[2] for key in known if key.startswith(f"{section}.")]
    if inside:
        return f"{path}: unknown key; {section} has {', '.join(inside)}"
    return f"{path}: unknown key; sections are {', '.join(sections())}"


def bad_choice(path: str, value: Any, choices: tuple[str, ...]) -> str:
    """The line that refuses a value of an enum."""
    near = nearest_option(str(value), choices)
    return f"{path}={value} is not one of {', '.join(choices)}" + (f"; did you mean {near}?" if near else "")


def to_config(plain: dict[str, Any]) -> RunConfig:
    """The dataclasses of what Hydra composed; raises Refused with a line for every key that does not fit."""
    known = keys()
    lines = list(_structure_problems(plain, known))
    for path, key in known.items():
        section, _, name = path.partition(".")
        values = plain.get(section)
        if isinstance(values, dict) and name in values:
            lines += _value_problems(key, values[name])
    if lines:
        raise Refused(lines)
    return configuration.from_dict(plain)


def _structure_problems(plain: dict[str, Any], known: dict[str, Key]) -> Iterator[str]:
    """Sections and keys that should not be there, and keys that are missing."""
    for section in plain:
        if section not in sections():
            yield unknown_key(section, [*sections(), *known])
    for section in sections():
        values = plain.get(section)
        if not isinstance(values, dict):
            yield f"{section}={values}: is a group of keys"
            continue
        names = [path.partition(".")[2] for path in known if path.startswith(f"{section}.")]
        for name in values:
            if name not in names:
                yield unknown_key(f"{section}.{name}", known)
        missing = [name for name in names if name not in values]
        if missing:
            yield (
                f"{section}: its option lacks {', '.join(missing)}; start the file with `defaults: [<option>, _self_]` "
                "to take them from an option that ships with the project"
            )


def _value_problems(key: Key, value: Any) -> Iterator[str]:
    if key.choices:
        if value not in key.choices or isinstance(value, bool):
            yield bad_choice(key.path, value, key.choices)
    elif key.kind in (int, float, str, bool):
        right = type(value) is key.kind or (key.kind is float and type(value) is int)
        if not right:
            hint = " (empty: write the key with nothing after =)" if value is None and key.kind is str else ""
            yield f"{key.path}={_written(value)} is not {_KIND_NAMES[key.kind]}{hint}"
    elif key.kind == dict[str, str]:
        if not isinstance(value, dict):
            yield f"{key.path}={_written(value)}: set one variable at a time, {key.path}.NAME=VALUE"
            return
        for name, item in value.items():
            if not isinstance(item, str):
                yield f"{key.path}.{name}={item!r} is not a string: quote it"
    else:
        kind = int if key.kind == list[int] else str
        if not isinstance(value, list):
            yield f"{key.path}={_written(value)} is not a list: write '{key.path}=[...]'"
            return
        for item in value:
            if type(item) is not kind:
                yield f"{key.path}: {item!r} is not {_KIND_NAMES[kind]}"


def _written(value: Any) -> str:
    """A value as YAML and the command line have it; text in quotes, so that '3' is not 3."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
