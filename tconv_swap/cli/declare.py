"""Makes commands from dataclasses, so that an option is declared once, with the type of the field that holds it.

`Annotated[type, option(...)]` declares how a field is given; `expanded` turns the dataclasses that a function takes
into the parameters of its command.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, NamedTuple

import typer

from tconv_swap.cli.invocation import Invocation


class Declared(NamedTuple):
    """The declaration of a field on the command line.

    Attributes:
        name: the name in error messages, such as `--device`.
        shown: typer's declaration: names, help, metavar, limits.
        given: the type that typer reads. None: the type of the field, or text if there is a `parse`.
        parse: turns each given value into what the field holds.
        is_negated: whether this is a flag whose presence makes the field False.
    """

    name: str
    shown: Any
    given: Any = None
    parse: Callable[[Any], Any] | None = None
    is_negated: bool = False


def option(
    *names: str,
    given: Any = None,
    parse: Callable[[Any], Any] | None = None,
    is_negated: bool = False,
    **shown: Any,
) -> Declared:
    """Declares an option. The option may be repeated if the type of the field is a tuple.

    Args:
        names: the names of the option, such as `--out`, `-o`.
        given, parse, is_negated: see `Declared`. `parse` raises ValueError or RuntimeError for a value that it refuses.
        shown: arguments for `typer.Option`.
    """
    return Declared(names[0], typer.Option(*names, **shown), given, parse, is_negated)


def argument(metavar: str, **shown: Any) -> Declared:
    """Declares an argument; takes the arguments of `typer.Argument`."""
    return Declared(metavar, typer.Argument(metavar=metavar, **shown))


def expanded(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command from a function whose parameters are dataclasses: each declared field becomes an option.

    A field that is not declared keeps its default, and so does a field named in `without`. A field of the type
    `Invocation` gets the one of the current run. A ValueError from a dataclass becomes a usage error.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        groups = {name: cls for name, cls in typing.get_type_hints(function).items() if name != "return"}
        fields = {name: _declared_fields(cls, without) for name, cls in groups.items()}
        parameters = [
            _parameter(field, declared, kind) for found in fields.values() for field, declared, kind in found
        ]

        def command(context: typer.Context, **values: Any) -> None:
            made = {}
            for name, cls in groups.items():
                arguments = {
                    field.name: _value(values[field.name], field, declared, kind)
                    for field, declared, kind in fields[name]
                }
                hints = typing.get_type_hints(cls)
                arguments |= {one: context.obj for one, kind in hints.items() if kind is Invocation}
                try:
                    made[name] = cls(**arguments)
                except ValueError as error:
                    raise typer.BadParameter(str(error)) from None
            function(**made)

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        given: Any = command
        given.__signature__ = inspect.Signature([context, *parameters])
        given.__annotations__ = {one.name: one.annotation for one in (context, *parameters)}
        given.__name__, given.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


_Field = tuple["dataclasses.Field[Any]", Declared, Any]


def _declared_fields(cls: Any, without: Collection[str]) -> list[_Field]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found: list[_Field] = []
    for field in dataclasses.fields(cls):
        if typing.get_origin(hints[field.name]) is not Annotated or field.name in without:
            continue
        kind, *notes = typing.get_args(hints[field.name])
        found += [(field, note, kind) for note in notes if isinstance(note, Declared)]
    return found


def _parameter(field: dataclasses.Field[Any], declared: Declared, kind: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    given = declared.given or (str if declared.parse is not None else kind)
    if _is_repeated(kind):
        each = str if declared.parse is not None else typing.get_args(kind)[0]
        given, default = list[each] | None, None  # type: ignore[valid-type]
    elif declared.is_negated:
        default = False
    elif default is None:
        given = given | None
    annotation = Annotated[given, declared.shown]  # type: ignore[valid-type]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _value(given: Any, field: dataclasses.Field[Any], declared: Declared, kind: Any) -> Any:
    """Returns the value of the field if `given` was on the command line."""
    if declared.is_negated:
        return not given
    if _is_repeated(kind):
        return tuple(_parsed(one, declared) for one in given or ())
    return field.default if given is None else _parsed(given, declared)


def _is_repeated(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _parsed(given: Any, declared: Declared) -> Any:
    if declared.parse is None:
        return given
    try:
        return declared.parse(given)
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint=declared.name) from None
