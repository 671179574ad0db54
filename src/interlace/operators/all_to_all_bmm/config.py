"""The operator's name and implementations; it has no kernel of its own to configure."""

OPERATOR = "all_to_all_bmm"
IMPLS = ("auto", "chunked", "pushed")
