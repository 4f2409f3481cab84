"""Telling a lack of resources from other failures: retiring idle peers may help against the first."""

from __future__ import annotations

import errno

_LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC})


def lacks_resources(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a lack of descriptors or memory, which idle peers may hold.

    A transport says so of an error of its own by an attribute `scarce` that is true.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LACKING:
            return True
        if getattr(error, "scarce", False) is True:
            return True
        error = error.__cause__ or error.__context__
    return False
