"""Every setting of the configuration and of the fleet file as one page: `python -m router.config_reference > PAGE`.

Model     one table for each section, read from its `msgspec.Struct`: name, what it may be, default, and what it means.
          The meaning is the entry `name : meaning` in the docstring and the comment above or beside the field; without
          either, what the section it holds says of itself
Valid     structs whose source is at hand, with fields indented by four
Blind to  what is checked in code: which settings exclude each other, which files must exist
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

from router.config import RouterConfig
from router.fleet import Fleet

StructClass = type[msgspec.Struct]

HEAD = """# Every setting

Written by `python -m router.config_reference > docs/settings.md` from the types that `tfirst serve` reads its files
with. [Configuration](configuration.md) shows a whole file and says what is behind the settings. A key that is not here,
or a value that may not be, stops the start with its name.
"""
FILES: tuple[tuple[str, StructClass], ...] = (("Configuration file", RouterConfig), ("Fleet file", Fleet))
COLUMNS = "| setting | may be | default | |\n| --- | --- | --- | --- |\n"

_COMMENT = re.compile(r"    # ?(.*)")
_FIELD = re.compile(r"    (\w+): [^#]*?(?:\s*# (.*))?")
_OF_WHAT = re.compile(r"^(Section|One row of) `[\w.]+`[:,.]? ?")


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *(part for title, top in FILES for part in file_parts(title, top))])


def file_parts(title: str, top: StructClass) -> Iterator[str]:
    """The file's own table, then one for each section in it."""
    shown = sections(top)
    for cls, path in shown.items():
        heading = f"### `{path}`" if path else f"## {title}"
        rows = (row(field, meanings(cls), shown) for field in fields_of(cls))
        yield f"{heading}\n\n{first_sentence(cls)}\n\n{COLUMNS}{''.join(rows)}"


def sections(top: StructClass) -> dict[StructClass, str]:
    """Each struct a file is made of, once, and where it is met first; `top` itself is at ''. In order of the file."""
    found: dict[StructClass, str] = {top: ""}

    def enter(cls: StructClass, path: str) -> None:
        for field in fields_of(cls):
            inner_path = f"{path}.{field.name}" if path else field.name
            for inner, suffix in structs_in(field.type):
                if inner not in found:
                    found[inner] = inner_path + suffix
                    enter(inner, inner_path + suffix)

    enter(top, "")
    return found


def structs_in(kind: types.Type, suffix: str = "") -> Iterator[tuple[StructClass, str]]:
    """Structs that a value of this type holds, and how they are reached: by a name or by a place in a list."""
    match kind:
        case types.StructType():
            yield kind.cls, suffix
        case types.UnionType():
            for one in kind.types:
                yield from structs_in(one, suffix)
        case types.DictType():
            yield from structs_in(kind.value_type, f"{suffix}.NAME")
        case types.ListType():
            yield from structs_in(kind.item_type, f"{suffix}[]")


def fields_of(cls: StructClass) -> tuple[types.Field, ...]:
    info = types.type_info(cls)
    assert isinstance(info, types.StructType)
    return info.fields


def row(field: types.Field, said: dict[str, str], shown: dict[StructClass, str]) -> str:
    """One line of a table."""
    held = [cls for cls, _ in structs_in(field.type)]
    meaning = said.get(field.name) or (first_sentence(held[0], bare=True) if held else "")
    what = spelled(field.type, lambda cls: f"section [`{shown[cls]}`](#{anchor(shown[cls])})")
    return f"| `{field.name}` | {what} | {default_of(field)} | {meaning} |\n"


def anchor(path: str) -> str:
    """What a heading of `path` is called in a link."""
    return re.sub(r"[^\w-]", "", path.lower())


def default_of(field: types.Field) -> str:
    """A default as YAML has it, `required`, or `its own` for a section whose settings say theirs."""
    if field.required:
        return "required"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        made_of_defaults = not any(inner.required for inner in fields_of(type(value))) and value == type(value)()
        return "its own" if made_of_defaults else code(value)
    return code(value)


def code(value: Any) -> str:
    """A value as YAML reads it, for a cell of a table."""
    plain = msgspec.to_builtins(value)
    text = (plain if isinstance(plain, str) else json.dumps(plain)).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def spelled(kind: types.Type, section: Callable[[StructClass], str]) -> str:
    """In words, what a value of this type may be."""
    match kind:
        case types.UnionType():
            return " or ".join(spelled(one, section) for one in kind.types)
        case types.StructType():
            return section(kind.cls)
        case types.LiteralType():
            return ", ".join(code(value) for value in kind.values)
        case types.EnumType():
            return ", ".join(code(member.value) for member in kind.cls)
        case types.DictType():
            return f"for each name: {spelled(kind.value_type, section)}"
        case types.ListType():
            return f"list of: {spelled(kind.item_type, section)}"
        case types.VarTupleType():
            return f"list of: {spelled(kind.item_type, section)}"
        case types.IntType() | types.FloatType():
            return ("whole number" if isinstance(kind, types.IntType) else "number") + bounds(kind)
        case types.StrType(pattern=str(pattern)):
            return f"text like {code(pattern)}"
        case types.StrType():
            return "text"
        case types.BoolType():
            return "`true`, `false`"
        case types.NoneType():
            return "`null`"
        case types.AnyType():
            return "anything"
    raise AssertionError(f"{kind} has no words")


def bounds(kind: types.IntType | types.FloatType) -> str:
    """What limits a number, in signs; nothing where there are no limits."""
    limits = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
    told = [f"{sign} {limit}" for sign, limit in limits if limit is not None]
    return " " + ", ".join(told) if told else ""


# What the source says


def meanings(cls: StructClass) -> dict[str, str]:
    """What each field means, of those where the source of the struct or of one it extends says so."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            for name, text in [*from_docstring(base).items(), *from_comments(base).items()]:
                found[name] = f"{found[name]}; {text}" if name in found else text
    return {name: text.replace("None", "`null`").replace("|", "\\|") for name, text in found.items()}


def from_comments(cls: type) -> dict[str, str]:
    """The comment lines directly above each field, and the comment behind it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if comment := _COMMENT.fullmatch(line):
            above.append(comment[1])
            continue
        if field := _FIELD.fullmatch(line):
            text = "; ".join(part for part in (" ".join(above), field[2]) if part)
            found |= {field[1]: text} if text else {}
        above = []
    return found


def from_docstring(cls: StructClass) -> dict[str, str]:
    """Entries `name, name : meaning`, which go on over lines that are indented further."""
    name = "|".join(field.name for field in fields_of(cls))
    head = rf"\b(?:{name})(?:, (?:{name}))* : "
    entry = re.compile(rf"({head})(.*?)(?=;? {head}|\n(?!    )|\Z)", re.DOTALL)
    found: dict[str, str] = {}
    for match in entry.finditer(inspect.getdoc(cls) or ""):
        text = " ".join(match[2].split()).rstrip(".")
        found |= dict.fromkeys(match[1].removesuffix(" : ").split(", "), text)
    return found


def first_sentence(cls: StructClass, *, bare: bool = False) -> str:
    """What a section's docstring begins with. bare : without naming the section"""
    line = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
    line = line if not bare else _OF_WHAT.sub("", line).rstrip(".")
    return line.partition(". ")[0] if bare else line


if __name__ == "__main__":
    print(page(), end="")
