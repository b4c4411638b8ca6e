"""The tracker libraries, one file each. A library is imported only in the process that uses it."""
