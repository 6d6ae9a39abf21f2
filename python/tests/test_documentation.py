"""help() documents everything public of the compiled module."""

from ripieno import _ripieno


def documentation():
    """Returns the documentation of each public class, method, attribute and function."""
    found = {}
    for name, value in vars(_ripieno).items():
        if not name.startswith("_") and callable(value):
            found[name] = value.__doc__
            members = vars(value) if isinstance(value, type) else {}
            found |= {
                f"{name}.{member}": its.__doc__
                for member, its in members.items()
                if not member.startswith("_")
            }
    return found


def test_everything_public_is_documented():
    found = documentation()
    assert len(found) > 120
    assert [name for name, text in found.items() if not text] == []
