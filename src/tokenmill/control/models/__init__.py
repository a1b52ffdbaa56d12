"""Which models a front end has, by name, and versions of them that are tried out."""
