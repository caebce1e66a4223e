"""Types of settings, and a sentence for a value that does not fit. Pydantic checks; this file words its errors."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from ppattn.errors import UserError, unknown


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("should be odd")
    return value


def _square(value: int) -> int:
    if math.isqrt(value) ** 2 != value:
        raise ValueError("should be a square number, such as 9, 16 or 49")
    return value


Positive = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, le=2**16)]
Odd = Annotated[int, Field(ge=1, le=255), AfterValidator(_odd)]
Square = Annotated[int, Field(ge=1, le=4096), AfterValidator(_square)]
Depth = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=1, le=2**16)]
Pixels = Annotated[int, Field(ge=1, le=2**14)]
Images = Annotated[int, Field(ge=1, le=2**20)]
Workers = Annotated[int, Field(ge=0, le=4096)]
Threads = Annotated[int, Field(ge=1, le=4096)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Classes = Annotated[int, Field(ge=0, le=10**6)]
NotNegative = Annotated[float, Field(ge=0.0)]
AboveZero = Annotated[float, Field(gt=0.0)]
Power = Annotated[float, Field(ge=0.0, le=32.0)]  # of a token's channels; beyond, float32 overflows
Epsilon = Annotated[float, Field(gt=0.0, le=1e-3)]  # of a LayerNorm; Paddle takes no larger one
Ratio = Annotated[float, Field(gt=0.0, le=1000.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Size = Pixels | Annotated[list[Pixels], Field(min_length=2, max_length=2)]  # one side, or [height, width]
Names = str | list[str | list[str]]  # mechanisms: one name, one per stage, or one per block inside a stage

Model = TypeVar("Model", bound=BaseModel)

SMALLEST, LARGEST = 1e-30, 1e30  # that float32 holds, with room for products

PLAIN_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid list": "a list",
    "an instance of Sequence": "a list",
    "a valid dictionary": "a mapping",
}


class Section(BaseModel):
    """Settings by name: an unknown name or a value of another type is an error, nothing is converted."""

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*")
    @classmethod
    def _meant(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("should not hold the character NUL")
        if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
            raise ValueError(f"should be 0 or between {SMALLEST:g} and {LARGEST:g}: models compute in float32")
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            cls._meant(item)
        return value


class _Arguments(Section):
    """Arguments of a class or function: those that are given, of any type."""

    model_config = ConfigDict(validate_default=False, arbitrary_types_allowed=True)


def arguments(function: Callable) -> dict[str, Any]:
    """Names of the arguments of a class or function, with their annotations."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    return {name: hints.get(name, Any) for name in inspect.signature(function).parameters}


def check_arguments(function: Callable, given: dict[str, Any], where: str) -> None:
    """Compare arguments with the annotations of a class or function; a tuple counts as a list.

    Raises:
        UserError: a name that `function` does not have, or a value that does not fit; `where` begins the sentence.
    """
    allowed = _section(function).model_fields
    for name in given:
        if name not in allowed:
            raise unknown(f"argument of {where}", name, allowed)
    try:
        _section(function).model_validate({name: _lists(value) for name, value in given.items()})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise UserError(f"{where}: {name} = {given[name]!r} is not allowed: {reasons(error, (name,))}.") from None


def validated(model: type[Model], content: object, sentence: str) -> Model:
    """`content` as the model; raises `UserError` with the sentence and the first entry that does not fit."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{sentence}: {key} is wrong ({first['msg']}).") from None


def reasons(error: ValidationError, location: tuple[str, ...]) -> str:
    """What pydantic says about the value at a location, in plain words."""
    found = set()
    for item in error.errors():
        if item["loc"][: len(location)] == location:
            text = item["msg"].removeprefix("Input ").removeprefix("Value error, ").removeprefix("Value ")
            found.add(functools.reduce(lambda said, pair: said.replace(*pair), PLAIN_WORDS.items(), text))
    return ", or ".join(sorted(found))


@functools.cache
def _section(function: Callable) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (hint, None) for name, hint in arguments(function).items()}
    return create_model(function.__name__, __base__=_Arguments, **fields)


def _lists(value):
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
