"""The public face is `foreword.__all__`, all of it and nothing else."""

import types

import foreword


def test_every_name_resolves() -> None:
    for name in foreword.__all__:
        assert getattr(foreword, name) is not None


def test_the_names_are_sorted_and_unique() -> None:
    assert list(foreword.__all__) == sorted(set(foreword.__all__))


def test_nothing_public_is_left_out() -> None:
    public = {
        name
        for name, value in vars(foreword).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public <= set(foreword.__all__)


def test_the_library_face_is_exported() -> None:
    assert "LLM" in foreword.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(foreword, "nothing_of_that_name")
