"""The libraries that numbers go to, one file each; each is imported in the process that uses it alone."""
