"""The public face is `foreword.__all__`, all of it and nothing else."""

import foreword


def test_every_name_resolves() -> None:
    for name in foreword.__all__:
        assert getattr(foreword, name) is not None


def test_no_name_is_listed_twice() -> None:
    assert len(set(foreword.__all__)) == len(foreword.__all__)


def test_nothing_public_is_left_out() -> None:
    ours = {name for name, value in vars(foreword).items() if getattr(value, "__module__", "").startswith("foreword.")}
    assert {name for name in ours if not name.startswith("_")} <= set(foreword.__all__)


def test_the_library_face_is_exported() -> None:
    assert "LLM" in foreword.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(foreword, "nothing_of_that_name")
