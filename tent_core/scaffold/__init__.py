"""The package that `tent new-transport` writes: a working one, of the name `newname`, which is renamed.

What lies under `package/` is itself linted, typed and tested as it stands; no template language is involved.
"""
