"""The one-line message of an expected error."""

import pytest


def one_line(kind, action):
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)
