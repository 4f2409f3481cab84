"""What pluggy finds of this package: the declaration of the transport `mock`."""

from __future__ import annotations

from tent_core.hookspecs import hookimpl
from tent_core.transport import TransportDeclaration
from tent_mock.transport import declare


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport `mock`, number 1000."""
    return declare()
