"""Files that hold a list of what a route takes: the prompts of `--warm`, the heads of `--public-heads`."""

from pathlib import Path
from typing import TypeVar, cast

from pydantic import ValidationError
from pydantic_core import from_json

from foreword.base.errors import ConfigError
from foreword.server.errors import refusal_of_validation
from foreword.server.wire import Wire

FormT = TypeVar("FormT", bound=Wire)


def read_list(path: str | Path, form: type[FormT], setting: str) -> list[FormT]:
    """The objects in a file. Raises ConfigError that names the setting, the file and what is wrong in it."""
    try:
        data = from_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} is not valid JSON: {error}") from None
    if not isinstance(data, list):
        raise ConfigError(f'{setting}: {path} must hold a list of objects, such as [{{"prompt": "..."}}]')
    forms = list[FormT]()
    for place, item in enumerate(cast(list[object], data)):
        try:
            forms.append(form.model_validate(item))
        except ValidationError as error:
            raise ConfigError(f"{setting}: {path}: entry {place}: {refusal_of_validation(error).message}") from None
    return forms
