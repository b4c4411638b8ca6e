"""The tracker libraries, one file each; each is imported only in the process that uses it."""
