"""The stand-in under the name of the vendor's module. Its version says what it is."""

from tent_mock.mpcomm import INVALID_TRANSFER_HANDLE, MPComm, __version__

__all__ = ["INVALID_TRANSFER_HANDLE", "MPComm", "__version__"]
