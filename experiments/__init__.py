import lowprec.startup  # noqa: F401
