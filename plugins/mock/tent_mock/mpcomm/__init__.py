"""A stand-in for the vendor's module `mpcomm`: its interface and its quirks, between processes of one host.

    from tent_mock.mpcomm import StandIn
    library = StandIn()  # has what the module has: MPComm(), INVALID_TRANSFER_HANDLE, __version__
    library.hold()  # and what a test needs beside it

Bytes really move, by process_vm_readv(2) and process_vm_writev(2), to and from addresses that the other side
published, under keys that were queried. `python -m tent_mock.mpcomm` prints a directory which, put into
PYTHONPATH, lets programs `import mpcomm` and get this.

The quirks: port 0 means the default port, and a port that is taken fails `init`; a blocking call stops every
Python thread; `connect` never times out, and a second one to a host id replaces its record, drops its keys
and leaks what it had; a query replaces all keys; a range without a key fails the transfer, and so does a key
whose memory was unregistered; `bytes_transferred` counts what was posted, also of what failed. The port
answers anybody.
"""

from tent_mock.mpcomm.stand_in import (
    INVALID_TRANSFER_HANDLE,
    ON_THE_PATH,
    Code,
    MPComm,
    StandIn,
    __version__,
)

__all__ = ["INVALID_TRANSFER_HANDLE", "ON_THE_PATH", "Code", "MPComm", "StandIn", "__version__"]
