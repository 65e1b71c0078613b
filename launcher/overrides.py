"""The command line before Hydra sees it: checked in milliseconds, and rewritten so that Hydra reads what was meant.

Flags move to the front (overrides may then stand on both sides of --multirun), text is quoted (ids stay strings), and
everything that cannot fit is refused with one line each. Pure but for the names of the files in the conf directories.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launcher.environment import SHELL_NAME
from launcher.foreign import NO_COUNTERPART, spelling_here
from launcher.schema import Key, Refused, bad_choice, keys, nearest, nearest_option, sections, unknown_key

# fmt: off
FLAGS = (
    "--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m",
    "--shell-completion", "-sc",
)
# fmt: on
# fmt: off
FLAGS_WITH_VALUE = (
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
)
# fmt: on
INFO_VALUES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
MULTIRUN = ("--multirun", "-m")
COMPLETION = ("--shell-completion", "-sc")
COMMANDS = ("--run", "--multirun", "--cfg", "--info")
LONG = {"-r": "--run", "-m": "--multirun", "-c": "--cfg"}
SWEEP_FUNCTION = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag)\s*\(.*\)\s*$", re.DOTALL)
OVERRIDE = re.compile(r"(~|\+\+?)?([^=]*)(?:=(.*))?$", re.DOTALL)


@dataclass(frozen=True)
class Vocabulary:
    """What can be written on the command line."""

    keys: dict[str, Key]
    groups: dict[str, list[str]]  # options by group
    check_options: bool = True  # False: the files lie where only Hydra finds them


@dataclass(frozen=True)
class Override:
    """One `[+|++|~]key[=value]`."""

    prefix: str
    key: str
    value: str | None  # None: no "="

    @property
    def text(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")


def rewrite(argv: list[str], conf: Path) -> list[str]:
    """Arguments for Hydra; raises Refused with a line for every argument that cannot be meant."""
    if any(argument in COMPLETION for argument in argv):
        return argv
    flags, overrides = split_flags(argv)
    _one_command(flags)
    _are_directories(directories_of(flags, conf))
    multirun = any(flag in MULTIRUN for flag in flags) or "hydra.mode=MULTIRUN" in overrides
    directories = directories_of(flags, conf)
    elsewhere = any(flag in ("--config-path", "-cp") for flag in flags) or any(
        "hydra.searchpath" in o for o in overrides
    )
    vocabulary = Vocabulary(keys(), options(directories), check_options=not elsewhere)
    rewritten, lines = [], []
    for text in overrides:
        try:
            rewritten.append(rewrite_override(text, vocabulary, multirun))
        except Refused as refused:
            lines += refused.lines
    if lines:
        raise Refused(lines)
    return [*flags, *rewritten]


def help_wanted(argv: list[str]) -> bool:
    """Whether the command line asks what can be chosen."""
    return not any(argument in COMPLETION for argument in argv) and any(
        argument in ("--help", "-h") for argument in argv
    )


def directories_of(flags: list[str], conf: Path) -> list[Path]:
    """Where options lie: our own directory and those of --config-dir."""
    return [conf, *(Path(value) for flag, value in pairwise(flags) if flag in ("--config-dir", "-cd"))]


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and everything else, each in order."""
    flags, overrides, rest = [], [], list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.partition("=")
        if argument in FLAGS:
            flags.append(argument)
        elif name in ("--info", "-i"):
            takes = not equals and rest and rest[0] in INFO_VALUES
            flags.append(argument if equals else f"--info={rest.pop(0) if takes else 'all'}")
        elif name in FLAGS_WITH_VALUE:
            if not equals and not rest:
                raise Refused([f"{argument}: needs a value"])
            flags += argument.split("=", 1) if equals else [argument, rest.pop(0)]
        elif argument.startswith("-"):
            near = nearest(name, [*FLAGS, *FLAGS_WITH_VALUE, "--info"])
            setting = argument.lstrip("-") if equals else "key=value"
            hint = f", did you mean {near}?" if near and not equals else f"; settings are written {setting}, see --help"
            raise Refused([f"{argument}: unknown flag{hint}"])
        else:
            overrides.append(argument)
    return flags, overrides


def _one_command(flags: list[str]) -> None:
    """Hydra takes one of its commands at a time; raises Refused for several."""
    names = (LONG.get(flag, flag.partition("=")[0]) for flag in flags)
    asked = list(dict.fromkeys(name for name in names if name in COMMANDS))
    if len(asked) > 1:
        raise Refused([f"{', '.join(asked)}: only one of them at a time; --cfg and --info show a single run"])
    if "--resolve" in flags and "--cfg" not in asked:
        raise Refused(["--resolve: belongs to --cfg, write --cfg job --resolve"])


def _are_directories(directories: list[Path]) -> None:
    for directory in directories:
        if not directory.is_dir():
            raise Refused([f"--config-dir {directory}: is not a directory; it holds GROUP/OPTION.yaml"])


def options(directories: list[Path]) -> dict[str, list[str]]:
    """The options of every group in these conf directories: names of YAML files, subdirectories by path."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for path in directory.glob("*/**/*.yaml"):
            group, *rest = path.relative_to(directory).with_suffix("").parts
            found.setdefault(group, set()).add("/".join(rest))
    return {group: sorted(names) for group, names in sorted(found.items())}


def rewrite_override(text: str, vocabulary: Vocabulary, multirun: bool) -> str:
    """One override for Hydra; raises Refused."""
    match = OVERRIDE.match(text)
    assert match  # the expression matches every text
    override = Override(match[1] or "", match[2].strip(), match[3])
    key, value = override.key, override.value or ""
    elsewhere = spelling_here(key, value)
    if elsewhere and key not in vocabulary.keys:
        told = elsewhere if elsewhere.startswith(NO_COUNTERPART) else f"is another stack's key, here it is {elsewhere}"
        raise Refused([f"{_shown(override.text)}: {told}"])
    if re.search(r"[\n\r]", text):
        raise Refused([f"{key}: its value holds a line break"])
    if key.startswith(("hydra.", "hydra/")) or "@" in key or key.count("/"):
        return text
    if override.prefix == "~":
        return _removal(override, vocabulary)
    if override.value is None or not key:
        raise Refused([f"{_shown(text)}: is not key=value"])
    if key in vocabulary.groups:
        return _group(override, vocabulary, multirun)
    if key.startswith("cluster.env."):
        if not SHELL_NAME.fullmatch(key.removeprefix("cluster.env.")):
            raise Refused([f"{_shown(override.text)}: is not a name that a shell can export, as cluster.env.NAME is"])
        return f"++{key}={value if is_quoted(value) else quote(value)}"
    if key in vocabulary.keys:
        return _key(override, vocabulary.keys[key], multirun)
    raise Refused([f"{override.prefix}{unknown_key(key, [*vocabulary.keys, *vocabulary.groups])}"])


def _removal(override: Override, vocabulary: Vocabulary) -> str:
    if override.key.startswith("cluster.env."):
        return override.text
    if override.key in vocabulary.groups and override.key in sections():
        names = ", ".join(vocabulary.groups[override.key])
        raise Refused([f"{override.text}: group {override.key} always has an option: {names}"])
    if override.key in vocabulary.keys:
        raise Refused([f"{override.text}: keys cannot be removed, set {override.key}=..."])
    raise Refused([f"~{unknown_key(override.key, [*vocabulary.keys, *vocabulary.groups])}"])


def _group(override: Override, vocabulary: Vocabulary, multirun: bool) -> str:
    group, value = override.key, override.value or ""
    known = vocabulary.groups[group]
    prefix = "" if group in sections() else "+"  # the others have no option by default
    plain = f"{prefix}{group}={value}"
    chosen = split_commas(value)
    if SWEEP_FUNCTION.match(value) or (len(chosen) > 1 and not multirun):
        return plain  # Hydra refuses a list outside of a sweep with a message that explains it
    for option in chosen:
        option = option.strip().strip("'\"")
        if option not in known and vocabulary.check_options:
            near = nearest_option(option, known)
            hint = f"; did you mean {group}={near}?" if near else ""
            raise Refused([f"{_shown(override.text)}: group {group} has the options {', '.join(known)}{hint}"])
    return plain


def _key(override: Override, key: Key, multirun: bool) -> str:
    value = override.value or ""
    prefix = "++" if override.prefix else ""  # the key is there: a plain + would only make Hydra complain
    items = split_commas(value)
    if key.kind == dict[str, str]:
        raise Refused([f"{_shown(override.text)}: set one variable at a time, {key.path}.NAME=VALUE"])
    if key.kind == list[str]:
        return f"{prefix}{key.path}={_text_list(override, key, items, multirun)}"
    if not key.is_text or SWEEP_FUNCTION.match(value) or (len(items) > 1 and not multirun):
        return f"{prefix}{key.path}={value}"
    return f"{prefix}{key.path}=" + ",".join(_text(override, key, item) for item in items)


def _text(override: Override, key: Key, item: str) -> str:
    """A quoted string; enums are checked, and null, which is no string, is refused."""
    plain = item[1:-1] if is_quoted(item) else item
    if key.choices and plain not in key.choices and "${" not in plain:
        raise Refused([bad_choice(key.path, _shown(plain), key.choices)])
    if item == "null":
        raise Refused([f"{_shown(override.text)}: null is no string; empty is {key.path}="])
    return item if is_quoted(item) else quote(item)


def _text_list(override: Override, key: Key, items: list[str], multirun: bool) -> str:
    lists = items if multirun else [override.value or ""]
    if not all(item.strip().startswith("[") and item.strip().endswith("]") for item in lists):
        inside = "" if (override.value or "null") == "null" else override.value
        raise Refused([f"{_shown(override.text)}: is a list of strings, write '{key.path}=[{inside}]'"])
    written = []
    for item in lists:
        inside = item.strip()[1:-1]
        texts = [text.strip() for text in split_commas(inside)] if inside.strip() else []
        written.append("[" + ",".join(text if is_quoted(text) else quote(text) for text in texts) + "]")
    return ",".join(written)


def split_commas(value: str) -> list[str]:
    """Parts between the commas that are outside of quotes and brackets; [""] for an empty value."""
    parts, depth, mark, start = [], 0, "", 0
    for index, character in _unescaped(value):
        if mark:
            mark = "" if character == mark else mark
        elif character in "'\"" and not value[start:index].strip():
            mark = character  # a quote opens only where an item begins: it's is no quote
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth = max(0, depth - 1)
        elif character == "," and depth == 0:
            parts.append(value[start:index])
            start = index + 1
    return [*parts, value[start:]]


def _unescaped(value: str) -> Iterator[tuple[int, str]]:
    """Characters that no backslash precedes, with their index."""
    escaped = False
    for index, character in enumerate(value):
        if not escaped:
            yield index, character
        escaped = character == "\\" and not escaped


def is_quoted(value: str) -> bool:
    """Whether the whole value is one string in Hydra's quotes."""
    if len(value) < 2 or value[0] not in "'\"" or value[-1] != value[0]:
        return False
    marks = [index for index, character in _unescaped(value) if character == value[0]]
    return marks == [0, len(value) - 1]


def quote(value: str) -> str:
    """The value as one string in Hydra's grammar, whatever it holds."""
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    escaped = re.sub(r"(\\+)$", lambda match: match[1] * 2, escaped)
    return f"'{escaped}'"


def _shown(text: str) -> str:
    """On one line."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
