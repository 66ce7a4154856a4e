"""The names that users import."""

import elsi_edge


def test_public_names() -> None:
    assert set(elsi_edge.__all__) == {
        "ElsiError",
        "GenerateOptions",
        "GenerationEvent",
        "GenerationResult",
        "Session",
        "SessionSettings",
        "__version__",
    }
    for name in elsi_edge.__all__:
        assert getattr(elsi_edge, name) is not None
