"""Types of settings and arguments, checked by pydantic; `validation_error` adds file and line to its errors."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from ppattn.errors import UserError, unknown_name


def must(fit: Callable[[Any], object], text: str) -> AfterValidator:
    """For `Annotated`: a value that does not `fit` is an error, which says that it should be `text`."""

    def check(value: Any) -> Any:
        if not fit(value):
            raise ValueError(f"should be {text}")
        return value

    return AfterValidator(check)


Item = TypeVar("Item")
Pair = Annotated[list[Item], Field(min_length=2, max_length=2)]
Triple = Annotated[list[Item], Field(min_length=3, max_length=3)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Odd = Annotated[int, Field(ge=1), must(lambda value: value % 2, "odd")]
Square = Annotated[int, Field(ge=1), must(lambda n: math.isqrt(n) ** 2 == n, "a square number, such as 9, 16 or 49")]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # that Paddle takes
NotNegative = Annotated[float, Field(ge=0.0)]
AboveZero = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Portion = Annotated[float, Field(gt=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Epsilon = Annotated[float, Field(gt=0.0, le=1e-3)]  # of a LayerNorm; Paddle takes no larger one
Mean = Annotated[float, Field(ge=-2, le=2)]  # of pixels in 0..1
Std = Annotated[float, Field(ge=1e-6, le=2)]
Size = Positive | Pair[Positive]  # one side, or [height, width]
Names = str | list[str | list[str]]  # attentions: one name, one per stage, or one per block inside a stage

Model = TypeVar("Model", bound=BaseModel)


class Section(BaseModel):
    """Settings by name: an unknown name or a value of another type is an error, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class _Arguments(Section):
    """Arguments of a class or function: those that are given, of any type."""

    model_config = ConfigDict(validate_default=False, arbitrary_types_allowed=True)


def argument_types(function: Callable) -> dict[str, Any]:
    """Names of the arguments of a class or function, with their annotations."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    return {name: hints.get(name, Any) for name in inspect.signature(function).parameters}


def keyword_defaults(function: Callable) -> dict[str, object]:
    """Names and defaults of the options of a function or of a class: its arguments that are given by keyword only."""
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}


def check_options(function: Callable, given: dict[str, Any], where: str) -> None:
    """`check_arguments` for the options of a function, which `where` names."""
    for name in given.keys() - (known := keyword_defaults(function)).keys():
        raise unknown_name(f"{where} option", name, known)
    check_arguments(function, given, where)


@functools.cache
def _arguments_of(function: Callable) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (hint, None) for name, hint in argument_types(function).items()}
    return create_model(function.__name__, __base__=_Arguments, **fields)


def check_arguments(function: Callable, given: dict[str, Any], where: str) -> None:
    """Compare arguments with a function's annotations, a tuple being a list; `where` begins the error."""
    validated(_arguments_of(function), {name: _lists(value) for name, value in given.items()}, where)


def check_above_zero(option: str, given: float | list | None) -> None:
    """Raise `UserError` unless a number, or each of several, is finite and above 0; None was not given."""
    for value in given if isinstance(given, list) else [given]:
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{option} {value} is not allowed: it must be above 0.")


def validated(model: type[Model], content: object, where: str) -> Model:
    """`content` as the model; raises `UserError` with a line for every entry that does not fit."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise validation_error(error, model, lambda key: where) from None


def validation_error(error: ValidationError, model: type[BaseModel], where: Callable[[str], str]) -> UserError:
    """Pydantic's errors, one line per key; `where` turns a dotted key into the start of its line."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        section, names = model, [""]
        for part in item["loc"]:  # sections, then the key, then what is inside its value
            names.append(str(part))
            inner = section_of(section, str(part))
            if inner is None:
                break
            section = inner
        *above, name = names[1:] or [""]
        key = ".".join([*above, name])
        if item["type"] == "extra_forbidden":
            prefix = "".join(f"{part}." for part in above)
            lines[key] = f"{where(key)}: {unknown_name('setting', name, section.model_fields, prefix)}"
        elif key in lines:  # a value of several possible types: pydantic says why it is none of them
            lines[key] = f"{lines[key].removesuffix('.')}; or: {item['msg']}."
        else:
            lines[key] = f"{where(key)}: {key} = {item['input']!r}: {item['msg']}."
    return UserError("\n".join(lines.values()))


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section that a setting of a section holds; None for a setting with a value of its own."""
    field = model.model_fields.get(name)
    options = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    return next((option for option in options if inspect.isclass(option) and issubclass(option, BaseModel)), None)


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
